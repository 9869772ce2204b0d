"""Give a rule one file, and answers about the programs that it belongs to."""

import ast
import functools
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import Calls, Effects
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.imports import oldest_torch
from lockstep_lint.analysis.index import Imported, Module, Scope, Site
from lockstep_lint.analysis.kinds import Kinds, Steps
from lockstep_lint.analysis.names import Names
from lockstep_lint.analysis.nodes import SEQUENCES, Words, base, constant, dotted, keyword, last, walk
from lockstep_lint.analysis.origins import Origin, Origins
from lockstep_lint.analysis.project import Project
from lockstep_lint.analysis.ranks import Ranks
from lockstep_lint.analysis.tensors import asks_for_gpu
from lockstep_lint.analysis.training import Training, Trainings

__all__ = ["TRAINS", "Analysis", "View"]


DDP = "DistributedDataParallel"


class Wrappers:
    """Recognises wrappers, and the values that may hold one."""

    def __init__(self, names: Names, origins: Origins) -> None:
        self.names = names
        self.origins = origins

    @kept
    def made(self, module: Module) -> tuple[tuple[str, Site], ...]:
        """Return the calls of a file that wrap a model, each with its wrapper."""
        if "Parallel" not in module.text and "DDP" not in module.text:
            return ()
        return tuple((kind, site) for site in module.sites() if (kind := self.wrapper(site)))

    @kept
    def kinds(self, module: Module) -> frozenset[str]:
        """Return the wrappers that a file's programs put around a model."""
        return frozenset(kind for member in self.names.project.family(module) for kind, _ in self.made(member))

    def wrapper(self, site: Site) -> str:
        """Return "ddp", "dp" or "fsdp" for a call that wraps a model, else ""."""
        return self.of_call(site.call, site.scope)

    def of_call(self, call: ast.Call, scope: Scope) -> str:
        """Return the wrapper that a call makes: torch's, or a class that derives from it."""
        if isinstance(call.func, ast.Attribute) and not call.func.attr.endswith(("Parallel", "DDP")):
            return ""  # a full name ends as an attribute does; only a plain name may stand for another
        full = self.names.qualify(call.func, scope)
        if not (full or last(call.func)).endswith(("Parallel", "DDP")):
            return ""
        kind = named(full)
        if not kind and not full.startswith("torch."):
            owner = self.names.definition(call.func, scope)
            bases = self.names.bases_of(owner) if owner is not None and owner.kind == "class" else iter(())
            kind = next(filter(None, map(named, bases)), "")
        return kind

    def wrapped(self, node: ast.expr, scope: Scope) -> Iterator[tuple[str, ast.Call, Origin]]:
        """Yield the wrappers that a value may come from."""
        for origin in self.origins.of(node, scope):
            call = origin.call
            if call is not None:
                kind = self.of_call(call, origin.scope)
                if kind:
                    yield kind, call, origin

    def inner(self, call: ast.Call) -> ast.expr | None:
        """Return the model that a wrapper call wraps."""
        return call.args[0] if call.args else keyword(call, "module")

    def held(self, node: ast.expr, stmt: ast.stmt, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield the possible items of a list or dictionary: `nets[name]`, or a loop variable's."""
        named = constant(node.slice) if isinstance(node, ast.Subscript) else None
        if isinstance(node, ast.Subscript):
            table: ast.expr | None = node.value
        else:
            table = runs_over(node, stmt) or next(
                (
                    bind.value
                    for bind, _ in self.origins.binds(dotted(node) or "", scope, node.lineno)
                    if bind.how == "for"
                ),
                None,
            )
        while isinstance(table, ast.Call) and (table.args or isinstance(table.func, ast.Attribute)):
            table = table.args[0] if table.args else table.func.value  # type: ignore[attr-defined]
        yield from self.items(table, scope, named)

    def items(self, table: ast.expr | None, scope: Scope, named: object = None) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield what a list or dictionary takes in; `named` leaves out other literal keys."""
        key = dotted(table)
        if key is None:
            return
        homes = scope.owner.defs.values() if key.startswith("self.") and scope.owner is not None else [scope]
        for home in homes:
            for bind in home.binds.get(key, []):
                yield from ((value, home) for value in elements(bind.value, named))
            for other in home.stmts:
                if isinstance(other, ast.Assign) and any(
                    isinstance(target, ast.Subscript)
                    and dotted(target.value) == key
                    and (named is None or constant(target.slice) in (None, named))
                    for target in other.targets
                ):
                    yield other.value, home
            yield from (
                (s.call.args[0], home) for s in home.named("append") if dotted(s.receiver) == key and s.call.args
            )


def named(full: str) -> str:
    """Return the wrapper that a full name means."""
    name = full.rpartition(".")[2]
    if name.endswith(DDP) or (name == "DDP" and "parallel" in full):
        return "ddp"
    if name == "DataParallel" and full.startswith("torch.nn"):
        return "dp"
    return "fsdp" if name == "FullyShardedDataParallel" else ""


def runs_over(node: ast.expr, stmt: ast.stmt) -> ast.expr | None:
    """Return the iterable of the comprehension whose variable a name is."""
    for item in walk(stmt):
        if isinstance(item, ast.comprehension) and any(
            isinstance(name, ast.Name) and name.id == dotted(node) for name in walk(item.target)
        ):
            return item.iter
    return None


def elements(table: ast.expr | None, named: object = None) -> list[ast.expr]:
    """Return the elements of a literal list, tuple or dictionary, or the one at a key or index."""
    if isinstance(table, ast.Dict):
        pairs = zip(table.keys, table.values, strict=True)
        return [value for key, value in pairs if named is None or constant(key) in (None, named)]
    if isinstance(table, SEQUENCES):
        starred = any(isinstance(value, ast.Starred) for value in table.elts)
        return table.elts[named : named + 1] if isinstance(named, int) and named >= 0 and not starred else table.elts
    if isinstance(table, ast.DictComp):
        return [table.value]
    if isinstance(table, ast.ListComp):
        return [table.elt]
    return []


# Packages that take over parts of the training, and the calls that show that they do.
FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "accelerate": ("Accelerator",),
    "lightning": ("Trainer", "LightningModule"),
    "pytorch_lightning": ("Trainer", "LightningModule"),
    "lightning_fabric": ("Fabric",),
    "transformers": ("Trainer", "Seq2SeqTrainer", "TrainingArguments", "HfArgumentParser"),
    "trl": ("SFTTrainer", "DPOTrainer", "PPOTrainer", "GRPOTrainer", "RewardTrainer"),
    "deepspeed": ("initialize", "init_distributed", "init_inference"),
    "composer": ("Trainer",),
    "lockstep": ("train", "engine"),
    "horovod": ("init",),
    "fastai": ("Learner",),
    "ignite": ("Engine",),
    "ray": ("TorchTrainer",),
    "mmengine": ("Runner",),
    "mmcv": ("Runner",),
    "fairseq": (),
    "detectron2": (),
    "colossalai": (),
    "megatron": (),
    "tensorflow": (),
    "jax": (),
}

CPU = ('"cpu"', "'cpu'")
GLOO = re.compile(r"gloo(?<!\wgloo)\b")
OTHERS = ("cuda", "gpu", "nccl", "accelerat")
MPS = re.compile(r"\bmps\b")
OTHER = re.compile(r"\bmps\b|(?<![a-z])([xnh]pu|xla)\b|(?<!torch)\.device\b")
GRADIENTS = ("backward", "manual_backward", "grad", "value_and_grad")
# What may compute gradients out of sight.
TRAINS = Words(r"train|^fit$|backward|^step$|^learn$|^run$|optim", re.IGNORECASE)
# What a device is called that a program is told to use.
DEVICE = Words(r"^(\w+_)?device$|^dev$", re.IGNORECASE)
# Where a program keeps its options.
OPTIONS = Words(r"arg|opt|cfg|conf|hparams|hp$|flags|param", re.IGNORECASE)


class Analysis:
    """All questions about a project, with their answers kept for the length of a run."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.names = Names(project)
        self.calls = Calls(self.names)
        self.origins = Origins(self.calls)
        self.effects = Effects(self.calls)
        self.ranks = Ranks(self.calls)
        self.kinds = Kinds(self.origins)
        self.steps = Steps(self.kinds)
        self.wrappers = Wrappers(self.names, self.origins)
        self.trainings = Trainings(self.steps, self.effects, self.ranks)

    @kept
    def frameworks(self, module: Module) -> frozenset[str]:
        """Return the frameworks that run the training in the programs of a file."""
        own = (
            bool(self.trainings.of(module)) and "manual_backward" not in module.text
        )  # a loop of its own, not a framework's
        related = dict.fromkeys((module,) if own else (*self.project.closure(module), *self.project.users(module)))
        return frozenset(name for member in related for name in self.named(member))

    @kept
    def is_moot(self, module: Module, packages: frozenset[str]) -> bool:
        """Check whether some packages run the training in every program that uses a file."""
        if not packages & self.frameworks(module):
            return False
        programs = [self.project.closure(user) for user in self.project.users(module)]
        taken = [any(packages & self.named(member) for member in program) for program in programs]
        plain = (program for program, moot in zip(programs, taken, strict=True) if not moot)
        return taken[0] or not any(self.trainings.of(member) for program in plain for member in program)

    @kept
    def view(self, module: Module) -> "View":
        """Return a file, as rules see it."""
        return View(module, self)

    @kept
    def named(self, module: Module) -> frozenset[str]:
        """Return the frameworks that a file itself names."""
        return frozenset(_frameworks(module))


class View:
    """One file, as a rule sees it."""

    def __init__(self, module: Module, analysis: Analysis) -> None:
        self.module = module
        self.analysis = analysis
        self.project = analysis.project
        self.names = analysis.names
        self.calls = analysis.calls
        self.steps = analysis.steps
        self.wrappers = analysis.wrappers
        self.origins = analysis.origins
        self.effects = analysis.effects
        self.ranks = analysis.ranks
        self.kinds = analysis.kinds
        self.trainings = analysis.trainings
        self.frameworks = analysis.frameworks(module)

    @functools.cached_property
    def torch(self) -> tuple[int, int] | None:
        """The lowest version of torch that the file's project allows; None where nothing says."""
        return oldest_torch(self.module.path)

    def full(self, site: Site) -> str:
        """Return the full name of what a call calls, "" where it is not known."""
        return self.names.qualify(site.call.func, site.scope)

    def sites(self, *names: str) -> Iterator[Site]:
        """Yield the file's calls of the given last names."""
        return self.module.sites(*names)

    @functools.cached_property
    def scopes(self) -> list[Scope]:
        """The file's module, class and function scopes."""
        return self.module.scopes

    @functools.cached_property
    def training(self) -> tuple[Training, ...]:
        """The file's training loops."""
        return self.trainings.of(self.module)

    @functools.cached_property
    def gpu(self) -> bool:
        """Whether the programs use GPUs: by a word, a device's number, or a device from outside."""
        return (
            self.effects.mentioned(self.module, "cuda", "accelerat", "gpu", "device_map", "deepspeed.initialize")
            or any(map(_on_mps, self.project.family(self.module)))
            or any(
                isinstance(constant(origin.node), int)
                for site in self.sites("to")
                for origin in self.origins.of(next(iter(site.call.args), None), site.scope)
            )
            or any(self.names_device(site) for site in self.sites("to", "device"))
        )

    @functools.cached_property
    def mps_only(self) -> bool:
        """Whether Apple's GPUs are all that the programs of the file name: no memory is pinned for them."""
        return any(map(_on_mps, self.project.family(self.module))) and not self.effects.mentioned(self.module, "cuda")

    def names_device(self, site: Site) -> bool:
        """Check whether a move or `torch.device` takes a device from an option or parameter."""
        given = next(iter(site.call.args), None)
        if site.name == "device":
            return isinstance(given, ast.Attribute | ast.Subscript) and self.full(site) == "torch.device"
        if given is None or not DEVICE.search(_called(given)):
            return False
        return any(
            DEVICE.search(_called(origin.node))
            and not isinstance(base(origin.node), ast.Call)
            and (isinstance(origin.node, ast.Subscript) or _outside(origin.node, origin.scope))
            for origin in self.origins.of(given, site.scope)
        )

    @functools.cached_property
    def cpu_only(self) -> bool:
        """Whether the programs of the file say that they run on a CPU and name no other device."""
        members = self.project.family(self.module)
        return any(map(_on_cpu, members)) and not any(map(_on_other, members))

    def on_cpu(self, site: Site) -> bool:
        """Check whether a call is made only where there is no GPU: in such a program, or on that side of a test."""
        return self.cpu_only or any(
            asks_for_gpu(guard.test) == (-1 if guard.when else 1) for guard in guards(site.stmt, site.module)
        )

    def is_cpu(self, node: ast.expr | None, scope: Scope) -> bool:
        """Check whether a device certainly is the CPU."""
        found = self.origins.of(node, scope)
        return bool(found) and all(
            constant(origin.node) == "cpu"
            or (
                origin.call is not None
                and self.names.qualify(origin.call.func, origin.scope) == "torch.device"
                and constant(next(iter(origin.call.args), None)) == "cpu"
            )
            for origin in found
        )

    def hidden(self, words: Words) -> bool:
        """Check whether the programs call something of such a name that comes from a file that cannot be found."""
        return any(True for _ in self.hidden_calls(words))

    def hidden_calls(self, words: Words) -> Iterator[Site]:
        """Yield the programs' calls of something of such a name that comes from a file that cannot be found."""
        alone = self.module.is_script  # what other scripts that import it call is not its program
        for member in self.project.closure(self.module) if alone else self.project.family(self.module):
            unseen = self.project.unseen(member)
            wanted = filter(words.search, member.by_name) if unseen else ()
            for site in (site for name in wanted for site in member.by_name[name]):
                root = base(site.call)
                if "*" in unseen or (isinstance(root, ast.Name) and root.id in unseen):
                    yield site

    @functools.cached_property
    def only_evaluates(self) -> bool:
        """Whether the file is a script that evaluates and never trains."""
        if not self.module.is_script or self.frameworks or self.hidden(TRAINS):
            return False
        sites = [site for member in self.project.closure(self.module) for site in member.sites("eval", "train")]
        if any(_trains(site) for site in sites) or not any(site.name == "eval" for site in sites if site.receiver):
            return False
        return not any(any(member.sites(*GRADIENTS)) for member in self.project.closure(self.module))

    @functools.cached_property
    def distributed(self) -> bool:
        """Whether the programs of the file run in several processes."""
        return self.ranks.programs.distributed(self.module)


def _trains(site: Site) -> bool:
    """Check whether a call puts a model into training mode."""
    return (
        site.name == "train" and site.receiver is not None and constant(next(iter(site.call.args), None)) is not False
    )


@kept
def _on_cpu(module: Module) -> bool:
    return any(word in module.text for word in CPU) or GLOO.search(module.text) is not None


@kept
def _on_mps(module: Module) -> bool:
    return "mps" in module.text and MPS.search(module.text) is not None


def _called(node: ast.expr) -> str:
    """Return the last part of a name, attribute or key."""
    return str(constant(node.slice)) if isinstance(node, ast.Subscript) else last(node)


def _outside(node: ast.expr, scope: Scope) -> bool:
    """Check whether a name is a parameter, or an attribute of the program's options."""
    if isinstance(node, ast.Attribute):
        return OPTIONS.search(last(node.value))
    return isinstance(node, ast.Name) and node.id in scope.params


@kept
def _on_other(module: Module) -> bool:
    text = module.text.lower()
    return any(word in text for word in OTHERS) or OTHER.search(text) is not None


def _used(module: Module, imported: Imported) -> bool:
    """Check whether a file names what it imports again."""
    return any(item == imported and module.words[name] for name, item in module.imports.items())


def _frameworks(module: Module) -> Iterator[str]:
    for imported in module.imported:
        root = imported.full.split(".")[0]
        wanted = FRAMEWORKS.get(root)
        if wanted is None:
            continue
        if imported.name:
            taken = imported.name in wanted and _used(module, imported)
        else:
            taken = any(f".{name}" in module.text for name in wanted)
        if not wanted or taken:
            yield root
        if root == "lightning" and (imported.name == "Fabric" or ".Fabric" in module.text):
            yield "lightning_fabric"
