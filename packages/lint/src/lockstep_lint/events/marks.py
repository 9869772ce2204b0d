"""Say what each call and assignment of a program does in its training."""

import ast
import functools
import re
from collections.abc import Callable, Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import COLLECTIVES, OF_MPI
from lockstep_lint.analysis.context import every_so_often, loops
from lockstep_lint.analysis.engines import OF_FABRIC, SAVES, WAITS, saves_on_all, waits_in_accelerate
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kinds import MODEL, SCALER, TORCH_OPTIMIZERS
from lockstep_lint.analysis.nodes import (
    REFERENCES,
    Words,
    argument,
    constant,
    dotted,
    idents,
    is_none,
    is_true,
    keyword,
    last,
    walk,
)
from lockstep_lint.analysis.processes import STARTS
from lockstep_lint.analysis.training import LOSSES
from lockstep_lint.analysis.view import Analysis
from lockstep_lint.events.event import Mark
from lockstep_lint.events.files import FETCHES, FOLDERS, OPENS, SHELLS, fetches, folder, path_read, path_written
from lockstep_lint.events.forwards import MODELS, model_run
from lockstep_lint.events.norms import NORM, normalises

__all__ = ["Marks", "operands", "split_sum"]

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_")
MOVES = ("to", "cuda", "xpu", "npu")
SHARDS = ("fully_shard",)
SEEDS = ("manual_seed", "manual_seed_all", "seed", "set_seed", "seed_everything")
# What waits for the device if it is given a tensor that is there.
FINITE = ("isnan", "isinf", "isfinite")
SHOWS = ("print", "add_scalar", "add_scalars", "set_postfix", "set_description", "log", "log_metrics", "info")
READS = ("item", "tolist", "cpu", "float", "int", *SHOWS)
# What a test asks of a tensor, whose answer the host then waits for.
ASKED = ("any", "all", "mean", "sum", "max", "min", "norm", "equal", "allclose", *FINITE)
# What the data set of datasets or webdataset is put in another order by, or is split in two at random by.
SHUFFLES = ("shuffle", "permutation", "randperm", "random_split", "train_test_split")

# Functions that may make a model, libraries whose models they are, and what only tells of these.
MAKES = Words(r"model|net|^(make|build|create|from_config)|^instantiate$", re.IGNORECASE)
LIBRARIES = ("torchvision.models.", "timm.create_model", "transformers.AutoModel", "segmentation_models_pytorch.")
ASKS = Words(r"^(list|is)_|^get_(?!model$)|[Ww]eights|from_pretrained|Loader$")
BESIDE = Words(
    r"Loader$|Dataset$|DataModule$|Processor$|Tokenizer(Fast)?$|(?i:loss|criterion)|^(load|prepare)|from_pretrained"
)
# What may write to a file what it is given, by its name alone.
WRITES = Words(
    r"^_*(torch_|async_)?(save|dump|write)(_|[A-Z]|$)|_save$|(write|dump|store|make|create)_(checkpoint|ckpt)"
)
# Calls that run a function that they are given, with the other arguments.
RUNS = {"Thread", "Process", "submit", "apply_async", "partial", "run_in_executor"}
# What else seeds, by its name alone.
SEED = Words(
    r"(^|_)(seed|set_determinis\w*|fix_random\w*|reproducib\w*)(_|$|s$|ing$)|seed_?(all|everything)", re.IGNORECASE
)

# They read or write the parts of all ranks, some only if they are torch.distributed's.
DISTRIBUTED = (
    *("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "full_optim_state_dict"),
    *("optim_state_dict", "save", "save_state_dict", "async_save", "load"),
)
STATES = ("state_dict", "consolidate_state_dict", "summon_full_params", "full_tensor", *DISTRIBUTED)

# What a full name begins with that says more than its last name: of libraries' models, of first weights.
TELLING = ("torchvision.models.", "efficientnet_pytorch.", "torch.hub.", "torch.nn.init.")
# The arguments that name a device.
PLACED = ("device", "map_location")
# What ends the program.
ENDS = ("sys.exit", "os._exit", "exit", "quit")
Found = Iterator[tuple[str, ast.expr | None, str]]


def whole(node: ast.expr) -> ast.expr:
    """Return the model that a parameter is written as a part of (`model.module.head.weight`)."""
    while isinstance(node, ast.Attribute) and node.attr != "module" and dotted(node.value) != "self":
        node = node.value
    return node


def names_gpu(site: Site) -> bool:
    """Check whether a call moves something to a GPU by its bare name (`x.cuda()`, `x.to("cuda")`)."""
    given = site.call.args[0] if site.call.args else None
    name = constant(given)
    return isinstance(name, str) and name.startswith("cuda") if site.name == "to" else given is None


def parameters_of(node: ast.expr | None) -> ast.expr | None:
    """Return the one model whose parameters a group, list or filter contains."""
    parts = walk(node) if node is not None else ()
    calls = (part for part in parts if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute))
    found = {dotted(c.func.value): c.func.value for c in calls if c.func.attr in ("parameters", "named_parameters")}  # type: ignore[attr-defined]
    return next(iter(found.values())) if len(found) == 1 else None


def split_sum(stmt: ast.stmt) -> tuple[str, ast.expr | None]:
    """Return the sum and value of an addition (`total += x`, `sums[k] += x`)."""
    target = stmt.targets[0] if isinstance(stmt, ast.Assign) else getattr(stmt, "target", None)
    holder = dotted(target.value if isinstance(target, ast.Subscript) else target) or ""
    value = getattr(stmt, "value", None)
    if isinstance(stmt, ast.Assign):
        plus = value if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) else None
        left, right = (plus.left, plus.right) if plus is not None else (None, None)
        value = right if holder and dotted(left) == holder else left if holder and dotted(right) == holder else None
    elif not isinstance(stmt, ast.AugAssign) or not isinstance(stmt.op, ast.Add):
        return "", None
    return holder, value if isinstance(value, ast.expr) and not isinstance(value, ast.Constant) else None


def operands(test: ast.expr) -> Iterator[ast.expr]:
    """Yield what a test joins by `and`, `or` and `not`."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from operands(value)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from operands(test.operand)
    else:
        yield test


def asks_tensor(part: ast.expr) -> bool:
    """Check whether a test's operand may be a tensor: of a reduction or a loss."""
    if isinstance(part, ast.Call):
        return last(part) in ASKED
    if not isinstance(part, ast.Compare) or isinstance(part.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn):
        return False
    if any(isinstance(constant(side), str | bool) or is_none(side) for side in part.comparators):
        return False
    calls = (last(node) for node in walk(part) if isinstance(node, ast.Call))
    return any(name in ASKED for name in calls) or any(map(LOSSES.search, idents(part)))


@functools.cache
def is_plain(name: str) -> bool:
    """Check whether a call's last name has no meaning except to a reader."""
    words = (MAKES, WRITES, SEED, MODELS, MODEL, SCALER)
    told = name[:1].isupper() or name in RUNS or name in SHELLS or name.endswith(("Parallel", "DDP"))
    return not (told or "norm" in name.lower() or any(w.search(name) for w in words))


@functools.cache
def is_mute(full: str) -> bool:
    """Check whether the full name of a call adds nothing to its last name."""
    return not (full in FETCHES or full.startswith(TELLING) or NORM.search(full.rpartition(".")[2]))


def places(site: Site) -> bool:
    """Check whether a call gets a device, in a file that names a numbered one."""
    return any(item.arg in PLACED for item in site.call.keywords) and "cuda:" in site.module.text


def hands_seed(site: Site) -> bool:
    """Check whether a call is given a function that seeds (`start(helper.manual_seed)`)."""
    args = [value for value in site.call.args if isinstance(value, REFERENCES)]
    return bool(args) and any(SEED.search(last(value)) for value in args)


class Marks:
    """Reads calls and assignments, by what they call and by the types of their objects."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.calls = analysis.calls
        self.steps = analysis.steps
        self.kinds = analysis.kinds

    def of(self, site: Site) -> tuple[tuple[Mark, ...], tuple[Scope, ...]]:
        """Return the mark of a call, and the project's functions that it runs."""
        functions = [function for function in self.calls.runs(site) if function.kind == "function"]
        functions = functions or self.handed(site)
        functions += self.analysis.trainings.overrides(site)
        functions = functions or self.analysis.trainings.forwards(site)
        known = bool(functions) and any(function.name != "forward" for function in functions)
        found = list(self.read(site, known))
        marks = [Mark(kind, site.call, site.stmt, site.scope, subject, detail, site) for kind, subject, detail in found]
        return tuple(marks), tuple(functions)

    def read(self, site: Site, known: bool) -> Found:
        """Return a call's kinds of events; `known`: it runs functions of the project."""
        name, full = site.name, self.full(site)
        model = model_run(self.analysis.view(site.module), site)
        if model is not None:
            yield "run", model, ""
        for reader in READERS.get(name, ()):
            yield from reader(self, site)
        if is_plain(name) and is_mute(full) and isinstance(site.call.func, REFERENCES):  # as most calls are
            if site.call.keywords or not (known or full):
                yield from self.given(site, full, known)
            return
        if name.endswith(("Parallel", "DDP")):
            kind = self.analysis.wrappers.wrapper(site)
            if kind:
                yield "wrap", self.analysis.wrappers.inner(site.call), kind
        if name.endswith("_") and site.call.args and full.startswith("torch.nn.init."):
            yield "initialise", whole(site.call.args[0]), ""
        if name[:1].isupper() and self.makes_optimizer(site):
            yield "optimizer", self.optimized(site), ""
        if SCALER.search(name) and self.steps.helps(site):
            yield "backward", argument(site.call, 0, "loss"), "scaled"
            yield "step", argument(site.call, 1, "optimizer"), ""
        yield from self.named(site, full, known)

    def given(self, site: Site, full: str, known: bool) -> Found:
        """Yield the kinds of events that a call's arguments show."""
        if full and site.call.keywords and places(site):
            yield "device", None, site.name
        if is_true(keyword(site.call, "download")):
            yield "fetch", None, "fetch"
        if not known and not full and hands_seed(site):
            yield "seed", None, "all"

    def named(self, site: Site, full: str, known: bool) -> Found:
        """Yield the kinds of events that a call's full or last name shows."""
        name, view = site.name, self.analysis.view(site.module)
        if self.makes_model(site, known):
            yield "make", None, ""
        if places(site):
            yield "device", None, name
        if normalises(view, site, full):
            yield "norm", None, ""
        if fetches(view, site, full):
            yield "fetch", None, "fetch"
        hands = name in RUNS and any(WRITES.search(last(item.value)) for item in site.call.keywords)
        hands = hands or (name in RUNS and any(WRITES.search(last(value)) for value in site.call.args))
        if (hands or WRITES.search(name)) and path_written(site, full) is None:
            yield "hand", None, name
        if not known and (SEED.search(name) or (not full and hands_seed(site))) and name not in SEEDS:
            yield "seed", None, "all"
        if not known and (MODELS.search(name) or MODEL.search(name)) and (site.call.args or site.call.keywords):
            func = site.call.func
            if isinstance(func, REFERENCES) and not full:
                yield "forward", func, ""

    def handed(self, site: Site) -> list[Scope]:
        """Return the project's functions among the arguments of an unknown call, which may run them."""
        names = [given for given in site.call.args[:3] if given.__class__ is ast.Name]
        if not names or site.name in SHOWS:
            return []
        found = [self.calls.names.definition(given, site.scope) for given in names]
        return [function for function in found if function is not None and function.kind == "function"]

    def makes_optimizer(self, site: Site) -> bool:
        """Check whether a call makes an optimizer of torch."""
        return TORCH_OPTIMIZERS.match(self.full(site)) is not None

    def optimized(self, site: Site) -> ast.expr | None:
        """Return the one model whose parameters an optimizer gets, also through a function."""
        given = argument(site.call, 0, "params")
        binds = site.scope.binds.get(dotted(given) or "", [])
        given = binds[0].value if len(binds) == 1 and not binds[0].path else given
        found = parameters_of(given)
        first = next(iter(given.args), None) if isinstance(given, ast.Call) and found is None else None
        return first if first is not None and self.kinds.is_model(first, site.scope) else found

    def makes_model(self, site: Site, known: bool) -> bool:
        """Check whether a call makes a model: by class, library or name; not a layer."""
        func, owner = site.call.func, site.scope.owner
        if isinstance(func, REFERENCES) and not site.name[:1].isupper() and not MAKES.search(site.name):
            return False
        if owner is not None and owner.kind == "class" and self.kinds.is_module_class(owner):
            return False
        full, made = self.full(site), self.calls.names.definition(site.call.func, site.scope)
        if made is not None and made.kind == "class":
            return self.kinds.is_module_class(made) and not BESIDE.search(site.name)
        if known or full.startswith(LIBRARIES):
            return not known and not ASKS.search(site.name)
        called = [bind.key.rpartition(".")[2] for bind in site.scope.bound(site.stmt) if bind.value is site.call]
        if not any(MODEL.search(key) for key in called) or self.analysis.wrappers.wrapper(site):
            return False
        return full.startswith("torch.nn.") or (not full and not BESIDE.search(site.name))

    def full(self, site: Site) -> str:
        """Return the full name of what a call calls."""
        return self.calls.names.qualify(site.call.func, site.scope)

    def backward(self, site: Site) -> Found:
        """Mark gradients computed; the loss may be scaled before (`scaler.scale(loss).backward()`)."""
        if self.steps.backwards(site):
            scaled = site.receiver is not None and any(last(node) == "scale" for node in walk(site.receiver))
            yield "backward", self.steps.loss_of(site), "scaled" if scaled else ""

    def step(self, site: Site) -> Found:
        """Mark a step of an optimizer or a scheduler."""
        if self.steps.steps_scheduler(site):
            yield "schedule", site.receiver, ""
        elif self.steps.steps_optimizer(site) and self.of_torch(site):
            scaled = self.kinds.is_scaler(site.receiver, site.scope) and site.call.args
            yield "step", site.call.args[0] if scaled else site.receiver, "scaled" if scaled else ""

    def of_torch(self, site: Site) -> bool:
        """Check whether a call runs an optimizer's method: torch's, or of a subclass."""
        target = self.calls.target(site.call, site.scope)
        bases = self.calls.names.bases_of(target.owner) if target is not None and target.owner is not None else ()
        return target is None or any(name.endswith(".Optimizer") for name in bases)

    def zero(self, site: Site) -> Found:
        """Mark gradients cleared."""
        if self.of_torch(site):
            yield "zero", site.receiver, ""

    def clip(self, site: Site) -> Found:
        """Mark gradients clipped; apex's master parameters are unscaled."""
        if self.calls.target(site.call, site.scope) is None:
            master = any(last(node) == "master_params" for given in site.call.args for node in walk(given))
            yield "clip", next(iter(site.call.args), site.receiver), "master" if master else ""

    def unscale(self, site: Site) -> Found:
        """Mark gradients divided by the loss scale."""
        yield "unscale", next(iter(site.call.args), None), ""

    def load(self, site: Site) -> Found:
        """Mark a state loaded into a model or another object."""
        if site.receiver is not None:
            yield "load", site.receiver, ""

    def initialise(self, site: Site) -> Found:
        """Mark new values for a model's parameters."""
        if site.receiver is not None and self.kinds.is_model(site.receiver, site.scope):
            yield "initialise", site.receiver, ""

    def epoch(self, site: Site) -> Found:
        """Mark a sampler's set_epoch."""
        if site.receiver is not None:
            yield "set_epoch", site.receiver, ""

    def sampler(self, site: Site) -> Found:
        """Mark a distributed sampler made."""
        yield "sampler", argument(site.call, 0, "dataset"), ""

    def shard(self, site: Site) -> Found:
        """Mark a model sharded in place."""
        yield "wrap", next(iter(site.call.args), None), "fsdp2"

    def move(self, site: Site) -> Found:
        """Mark a model or a batch moved to a device."""
        receiver, given = site.receiver, site.call.args or site.call.keywords or site.name != "to"
        data = loops(site.stmt, site.module) or site.scope.kind == "function"
        if given and (MODEL.search(last(receiver)) or not loops(site.stmt, site.module)):
            yield "move", receiver, ""
        if given and data and not MODEL.search(last(receiver)):
            host = any(constant(value) == "cpu" for each in site.call.args[:1] for value in walk(each))
            yield ("sync" if host else "batch") if self.trains(site.module) else "place", receiver, ""
            if names_gpu(site) and self.analysis.view(site.module).distributed:
                yield "device", receiver, site.name

    @cache_answers
    def trains(self, module: Module) -> bool:
        """Check whether the programs of a file compute gradients."""
        return self.analysis.effects.mentioned(module, "backward", "training_step", ".step(")

    def look(self, site: Site) -> Found:
        """Mark a value that the host reads, shows or tests, and so waits for."""
        if not self.trains(site.module):
            return
        given = [*site.call.args, *(item.value for item in site.call.keywords)]
        if site.name in ("item", "tolist", "cpu") and not given:
            yield "sync", site.receiver, ""
        elif given and not all(isinstance(value, ast.Constant) for value in given):
            yield "sync", None, ""

    def append(self, site: Site) -> Found:
        """Mark a value appended to a list."""
        if len(site.call.args) == 1 and site.receiver is not None and self.trains(site.module):
            holder = site.receiver.value if isinstance(site.receiver, ast.Subscript) else site.receiver
            yield "keep", site.call.args[0], dotted(holder) or ""

    def mode(self, site: Site) -> Found:
        """Mark a model switched to training or evaluation mode."""
        if site.receiver is None or len(site.call.args) > 1:
            return
        given = argument(site.call, 0, "mode")
        if site.name == "eval":
            if not site.call.args:
                yield "eval", site.receiver, ""
        elif self.calls.target(site.call, site.scope) is None or given is None or constant(given) is True:
            if constant(given) is False:
                yield "eval", site.receiver, ""
            elif given is None or constant(given) is True:
                yield "train", site.receiver, ""
            elif not site.call.keywords or keyword(site.call, "mode") is not None:
                yield "mode", site.receiver, ""

    def collective(self, site: Site) -> Found:
        """Mark a collective: all ranks wait or exchange something."""
        view = self.analysis.view(site.module)
        if self.analysis.effects.is_collective(site) or saves_on_all(view, site) or waits_in_accelerate(view, site):
            yield "collective", next(iter(site.call.args), None), site.name

    def start(self, site: Site) -> Found:
        """Mark the start of the process group."""
        if self.calls.target(site.call, site.scope) is None:
            yield "start", None, site.name

    def end(self, site: Site) -> Found:
        """Mark the end of the process group."""
        yield "end", None, ""

    def file(self, site: Site) -> Found:
        """Mark a file written or read; the detail is the full name of the call."""
        full = self.full(site)
        for kind, path in (("save", path_written(site, full)), ("read", path_read(site, full))):
            if path is not None:
                yield kind, path, full or site.name

    def pretrained(self, site: Site) -> Found:
        """Mark a model of transformers saved to a folder."""
        made = (last(call) for call, _, _ in self.analysis.origins.calls_of(site.receiver, site.scope))
        model = self.kinds.is_model(site.receiver, site.scope) or "unwrap_model" in made
        if model and keyword(site.call, "is_main_process") is None:
            yield "save", argument(site.call, 0, "save_directory"), "save_pretrained"

    def shuffle(self, site: Site) -> Found:
        """Mark a data set or list shuffled; the detail is the random generator's library."""
        full = self.full(site)
        if site.name in ("permutation", "randperm"):  # an order to index by
            given = keyword(site.call, "generator") is not None
            drawn = not given and full in ("torch.randperm", "numpy.random.permutation")
            yield from (("shuffle", next(iter(site.call.args), None), full.partition(".")[0]),) if drawn else ()
            return
        if site.name != "shuffle":
            yield from self.split(site, full)
            return
        if full in ("random.shuffle", "numpy.random.shuffle"):
            yield "shuffle", next(iter(site.call.args), None), full.partition(".")[0]
        elif site.receiver is not None and not (full or site.call.args or site.call.keywords):
            yield "shuffle", site.receiver, "numpy"  # as the data sets of datasets do

    def split(self, site: Site, full: str) -> Found:
        """Mark a data set split at random."""
        seeded = any(keyword(site.call, name) is not None for name in ("generator", "random_state", "seed", "shuffle"))
        if seeded or any(item.arg is None for item in site.call.keywords):
            return
        if full.startswith("torch.utils.data.") and len(site.call.args) < 3:
            yield "shuffle", next(iter(site.call.args), None), "torch split"
        elif full.startswith("sklearn."):
            yield "shuffle", next(iter(site.call.args), None), "numpy split"
        elif site.name == "train_test_split" and not full and site.receiver is not None:
            yield "shuffle", site.receiver, "numpy split"

    def state(self, site: Site) -> Found:
        """Mark a state read; of sharded objects all ranks need to read it."""
        sharded = self.full(site).startswith("torch.distributed")
        if site.name not in DISTRIBUTED or sharded:
            yield "state", site.receiver if site.receiver is not None and not sharded else None, self.full(site)

    def seed(self, site: Site) -> Found:
        """Mark a seed of one library, or of all."""
        root = self.full(site).partition(".")[0]
        if site.name != "seed" or root in ("random", "numpy", "torch"):
            yield "seed", next(iter(site.call.args), None), root if site.name == "seed" or root == "torch" else "all"

    def place(self, site: Site) -> Found:
        """Mark a device made, or chosen for the process."""
        if site.call.args or site.call.keywords:
            yield "device", None, site.name

    def leave(self, site: Site) -> Found:
        """Mark the end of the program within a loop."""
        if dotted(site.call.func) in ENDS and loops(site.stmt, site.module):
            yield "leave", None, "exit"

    def folder(self, site: Site) -> Found:
        """Mark a folder made, filled or removed in a way that only one process may."""
        for way in folder(self.analysis.view(site.module), site, self.full(site)):
            yield "folder", None, way

    def fit(self, site: Site) -> Found:
        """Mark the training of a library's Trainer."""
        if self.calls.target(site.call, site.scope) is None and last(site.receiver).endswith("trainer"):
            yield "fit", next(iter(site.call.args), None), ""

    def assigned(self, stmt: ast.stmt, scope: Scope) -> tuple[Mark, ...]:
        """Mark a statement: `p.grad = None`, a sum, a tensor's test, a loop's exit."""
        if isinstance(stmt, (ast.Break, ast.Return)):
            return (Mark("leave", stmt, stmt, scope),) if loops(stmt, scope.module) else ()
        if isinstance(stmt, (ast.If, ast.While, ast.Assert)):
            asked = [part for part in operands(stmt.test) if asks_tensor(part)] if self.trains(scope.module) else []
            often = bool(asked) and not every_so_often(stmt.test)
            return tuple(Mark("sync", stmt, stmt, scope, part, "test") for part in asked) if often else ()
        if isinstance(stmt, ast.Assign) and not isinstance(stmt.value, (ast.BinOp, ast.Constant)):
            return ()
        if isinstance(stmt, ast.Assign) and is_none(stmt.value):
            for target in stmt.targets:
                if isinstance(target, ast.Attribute) and target.attr == "grad":
                    return (Mark("zero", stmt, stmt, scope, target.value if dotted(target) else None),)
        holder, value = split_sum(stmt)
        if holder and value is not None and self.trains(scope.module):
            return (Mark("keep", stmt, stmt, scope, value, holder),)
        return ()


# The readers of calls, with the last names of what they read.
NAMED: dict[Callable[[Marks, Site], Found], tuple[str, ...]] = {
    Marks.backward: ("backward", "manual_backward"),
    Marks.step: ("step", "step_and_update_lr"),
    Marks.zero: ("zero_grad",),
    Marks.clip: CLIPS,
    Marks.unscale: ("unscale_",),
    Marks.load: ("load_state_dict",),
    Marks.initialise: ("apply", "reset_parameters", "init_weights"),
    Marks.epoch: ("set_epoch",),
    Marks.sampler: ("DistributedSampler",),
    Marks.shard: SHARDS,
    Marks.move: MOVES,
    Marks.mode: ("eval", "train"),
    Marks.collective: tuple({*COLLECTIVES, *OF_MPI, *WAITS, *OF_FABRIC, *SAVES, "pad_across_processes", "prepare"}),
    Marks.start: STARTS,
    Marks.end: ("destroy_process_group",),
    Marks.file: tuple(OPENS),
    Marks.pretrained: ("save_pretrained",),
    Marks.shuffle: SHUFFLES,
    Marks.seed: SEEDS,
    Marks.state: STATES,
    Marks.fit: ("fit",),
    Marks.leave: ("exit", "_exit", "quit"),
    Marks.place: ("device", "set_device", "set_device_index"),
    Marks.folder: FOLDERS,
    Marks.look: READS,
    Marks.append: ("append",),
}
READERS: dict[str, list[Callable[[Marks, Site], Found]]] = {}
for _reader, _names in NAMED.items():
    for _name in _names:
        READERS.setdefault(_name, []).append(_reader)
