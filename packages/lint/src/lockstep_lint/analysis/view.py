"""Give a rule one file, and answers about the programs that it belongs to."""

import ast
import functools
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import Calls, Effects
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.imports import oldest_torch
from lockstep_lint.analysis.index import Imported, Module, Scope, Site
from lockstep_lint.analysis.kinds import Kinds, Steps
from lockstep_lint.analysis.names import Names
from lockstep_lint.analysis.nodes import Words, base, constant, keyword, last
from lockstep_lint.analysis.origins import Origin, Origins
from lockstep_lint.analysis.project import Project
from lockstep_lint.analysis.ranks import Ranks
from lockstep_lint.analysis.training import Training, Trainings

__all__ = ["Analysis", "View"]


DDP = "DistributedDataParallel"


class Wrappers:
    """Recognises wrappers, and the values that may hold one."""

    def __init__(self, names: Names, origins: Origins) -> None:
        self.names = names
        self.origins = origins

    @cache_answers
    def made(self, module: Module) -> tuple[tuple[str, Site], ...]:
        """Return the calls of a file that wrap a model, each with its wrapper."""
        if "Parallel" not in module.text and "DDP" not in module.text:
            return ()
        sites = (site for site in module.sites() if site.call.func.__class__ is ast.Name or may_wrap(site.name))
        return tuple((kind, site) for site in sites if (kind := self.wrapper(site)))

    @cache_answers
    def kinds(self, module: Module) -> frozenset[str]:
        """Return the wrappers that a file's programs put around a model."""
        return frozenset(kind for member in self.names.project.family(module) for kind, _ in self.made(member))

    def wrapper(self, site: Site) -> str:
        """Return "ddp", "dp" or "fsdp" for a call that wraps a model, else ""."""
        return self.of_call(site.call, site.scope)

    def of_call(self, call: ast.Call, scope: Scope) -> str:
        """Return the wrapper that a call makes: torch's, or a class that derives from it."""
        if isinstance(call.func, ast.Attribute) and not may_wrap(call.func.attr):
            return ""  # a full name ends as an attribute does; only a plain name may stand for another
        full = self.names.qualify(call.func, scope)
        if not may_wrap(full or last(call.func)):
            return ""
        kind = find_wrapper(full)
        if not kind and not full.startswith("torch."):
            owner = self.names.definition(call.func, scope)
            bases = self.names.bases_of(owner) if owner is not None and owner.kind == "class" else iter(())
            kind = next(filter(None, map(find_wrapper, bases)), "")
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


def may_wrap(name: str) -> bool:
    """Check whether a name is spelled like a wrapper's."""
    return name.endswith(("Parallel", "DDP"))


def find_wrapper(full: str) -> str:
    """Return the wrapper that a full name means."""
    name = full.rpartition(".")[2]
    if name.endswith(DDP) or (name == "DDP" and "parallel" in full):
        return "ddp"
    if name == "DataParallel" and full.startswith("torch.nn"):
        return "dp"
    return "fsdp" if name == "FullyShardedDataParallel" else ""


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

    @cache_answers
    def frameworks(self, module: Module) -> frozenset[str]:
        """Return the frameworks that run the training in the programs of a file."""
        own = (
            bool(self.trainings.of(module)) and "manual_backward" not in module.text
        )  # a loop of its own, not a framework's
        related = dict.fromkeys((module,) if own else (*self.project.closure(module), *self.project.users(module)))
        return frozenset(name for member in related for name in self.named(member))

    @cache_answers
    def is_moot(self, module: Module, packages: frozenset[str]) -> bool:
        """Check whether some packages run the training in every program that uses a file."""
        if not packages & self.frameworks(module):
            return False
        programs = [self.project.closure(user) for user in self.project.users(module)]
        taken = [any(packages & self.named(member) for member in program) for program in programs]
        plain = (program for program, moot in zip(programs, taken, strict=True) if not moot)
        return taken[0] or not any(self.trainings.of(member) for program in plain for member in program)

    @cache_answers
    def view(self, module: Module) -> "View":
        """Return a file, as rules see it."""
        return View(module, self)

    @cache_answers
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
        """Whether the programs use GPUs: by a word, a device's number or a device object."""
        return (
            self.effects.mentioned(self.module, "cuda", "accelerat", "gpu", "device_map", "deepspeed.initialize")
            or any(map(_on_mps, self.project.family(self.module)))
            or any(
                isinstance(constant(origin.node), int)
                for site in self.sites("to")
                for origin in self.origins.of(next(iter(site.call.args), None), site.scope)
            )
        )

    @functools.cached_property
    def cpu_only(self) -> bool:
        """Whether the file's programs name the CPU and no other device."""
        members = self.project.family(self.module)
        return any(map(_on_cpu, members)) and not any(map(_on_other, members))

    def on_cpu(self, site: Site) -> bool:
        """Check whether a call runs only without a GPU, by its program or a test."""
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
        """Check whether the programs call such a name from a file that is missing."""
        return any(True for _ in self.hidden_calls(words))

    def hidden_calls(self, words: Words) -> Iterator[Site]:
        """Yield the programs' calls of such a name from a file that is missing."""
        alone = self.module.is_script  # what other scripts that import it call is not its program
        for member in self.project.closure(self.module) if alone else self.project.family(self.module):
            unseen = self.project.unseen(member)
            wanted = filter(words.search, member.by_name) if unseen else ()
            for site in (site for name in wanted for site in member.by_name[name]):
                root = base(site.call)
                if "*" in unseen or (isinstance(root, ast.Name) and root.id in unseen):
                    yield site

    @functools.cached_property
    def distributed(self) -> bool:
        """Whether the programs of the file run in several processes."""
        return self.ranks.programs.distributed(self.module)


@cache_answers
def _on_cpu(module: Module) -> bool:
    return any(word in module.text for word in CPU) or GLOO.search(module.text) is not None


@cache_answers
def _on_mps(module: Module) -> bool:
    return "mps" in module.text and MPS.search(module.text) is not None


@cache_answers
def _on_other(module: Module) -> bool:
    text = module.text.lower()
    return any(word in text for word in OTHERS) or OTHER.search(text) is not None


def _is_used(module: Module, imported: Imported) -> bool:
    """Check whether a file names what it imports again."""
    return any(item == imported and module.words[name] for name, item in module.imports.items())


def _frameworks(module: Module) -> Iterator[str]:
    for imported in module.imported:
        root = imported.full.split(".")[0]
        wanted = FRAMEWORKS.get(root)
        if wanted is None:
            continue
        if imported.name:
            taken = imported.name in wanted and _is_used(module, imported)
        else:
            taken = any(f".{name}" in module.text for name in wanted)
        if not wanted or taken:
            yield root
        if root == "lightning" and (imported.name == "Fabric" or ".Fabric" in module.text):
            yield "lightning_fabric"


def asks_for_gpu(test: ast.expr) -> int:
    """Return 1 if a test needs a GPU, -1 if it excludes one, else 0."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return -asks_for_gpu(test.operand)
    if isinstance(test, ast.BoolOp):
        found = [asks_for_gpu(value) for value in test.values]
        return next((value for value in found if value), 0) if isinstance(test.op, ast.And) else min(found)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.NotEq):
        value = constant(test.comparators[0])
        sign = 1 if isinstance(test.ops[0], ast.Eq) else -1
        return {"cpu": -sign, "gloo": -sign, "cuda": sign, "nccl": sign}.get(value, 0) if isinstance(value, str) else 0
    name = last(test)
    if name in ("is_available", "use_cuda", "cuda", "gpu", "use_gpu", "has_cuda"):
        return 1
    return -1 if name in ("cpu", "no_cuda", "use_cpu", "cpu_only", "force_cpu") else 0
