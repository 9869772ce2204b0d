"""Classify objects as optimizer, scheduler, scaler, model or loader, by origin, else by name."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import Words, argument, dotted, keyword, last
from lockstep_lint.analysis.origins import Origins

__all__ = ["EVALUATION", "MODEL", "OPTIMIZER", "SCALER", "TORCH_OPTIMIZERS", "Kinds", "Steps", "parts"]


# The calls in which a rank's part is taken, and how such an expression reads.
CALLS = ("split", "chunk", "tensor_split", "array_split", "arange", "range", "shard", "split_dataset_by_node", "slice")
# Those of DGL, which know the rank themselves.
SPLITS = ("node_split", "edge_split")
RANK = r"[\w.]*(?:rank|get_rank\(\)|process_index)"
COUNT = r"[\w.]*(?:world_size|num_processes|num_replicas|nprocs|n_gpus|ngpus|get_world_size\(\))"
SLICE = rf"\[\s*{RANK}\s*::"
PART = re.compile(
    rf"(?:split|chunk)\([^\n]*\)\[{RANK}\]"
    rf"|{SLICE}|\brange\({RANK}, [^\n]*{COUNT}\)|\barange\({RANK}, [^\n]*{COUNT}"
    rf"|\.slice\({RANK}, [^\n]*{COUNT}\)|\.shard\([^\n]*{RANK}|\bsplit_dataset_by_node\("
    r"|\bdistributed\.(?:node|edge)_split\("
)
SHARD = re.compile(rf"\bshard_id={RANK}")


def divides(node: ast.AST) -> bool:
    """Check whether an expression or a statement takes a rank's own part of something (`data[rank::world_size]`)."""
    return PART.search(ast.unparse(node)) is not None


@cache_answers
def parts(module: Module) -> tuple[str, ...]:
    """Return the statements of a file that select the rank's shard, as text."""
    return tuple(dict.fromkeys(_parts(module)))


def _parts(module: Module) -> Iterator[str]:
    yield from (text for site in module.sites(*SPLITS) if PART.search(text := ast.unparse(site.stmt)))
    if "rank" not in module.text and "process_index" not in module.text:
        return
    for site in module.sites(*CALLS):
        stmt = site.stmt
        if not isinstance(stmt, ast.If | ast.For | ast.While | ast.With | ast.Try) and any(
            any(word in line for word in ("rank", "split_dataset", "process_index"))
            for line in module.lines[stmt.lineno - 1 : stmt.end_lineno]
        ):
            text = ast.unparse(site.stmt)
            if PART.search(text):
                yield text
    if "shard_id" in module.text:
        texts = (ast.unparse(site.stmt) for site in module.sites() if keyword(site.call, "shard_id") is not None)
        yield from (text for text in texts if SHARD.search(text))
    for found in re.finditer(SLICE, module.text):
        start = module.text.rfind("\n", 0, found.start()) + 1
        yield module.text[start : found.end()]


OPTIMIZER = Words(r"optim|^opt$|^opt_|_opt$|_opt_", re.IGNORECASE)
SCHEDULER = Words(r"sched|^lr_?warm|warmup", re.IGNORECASE)
SCALER = Words(r"scaler", re.IGNORECASE)
LOADER = Words(r"loader|^dl$|_dl$|^dl_|batches|data_?iter|iterator$", re.IGNORECASE)
MODEL = Words(
    r"(^|_)(model|net|network|netg|netd|generator|discriminator|encoder|decoder|backbone|classifier|gpt|unet|vae|module|student|teacher|critic|actor)s?(_|$|\d)|model$|net$",
    re.IGNORECASE,
)
EVALUATION = Words(
    r"(^|_)(val|valid|validate|validation|test|eval|evaluate|evaluation|dev|inference|infer|testing|evaluating)(_|$|\d)|^(val|valid|test|eval)(loader|_?set|iter|data)|(val|valid|test|eval)_?(loader|dl)$|^(eval|valid|test)[A-Z]|Eval(uat|$)|Valid|Test",
    re.ASCII,
)
TORCH_OPTIMIZERS = re.compile(r"^torch\.optim\.(?!lr_scheduler|swa)\w+(\.\w+)*$")
SCHEDULERS = re.compile(r"lr_scheduler\.\w+$")
SAMPLER = "DistributedSampler"
# What shows how far a loop is.
BARS = {"tqdm", "tqdm_notebook", "track", "progress_bar"}
SCALERS = re.compile(r"\.GradScaler$")


class Kinds:
    """Recognises the objects of a training script."""

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        self.names = origins.names

    def made_by(self, node: ast.expr | None, scope: Scope, pattern: re.Pattern[str]) -> bool:
        """Check whether a call whose full name matches may have made a value."""
        return any(pattern.search(full) for _, _, full in self.origins.calls_of(node, scope))

    def is_optimizer(self, node: ast.expr | None, scope: Scope) -> bool:
        """Check whether a value is an optimizer."""
        name = last(node)
        if SCHEDULER.search(name) or SCALER.search(name):
            return False
        return OPTIMIZER.search(name) or self.made_by(node, scope, TORCH_OPTIMIZERS)

    def is_scheduler(self, node: ast.expr | None, scope: Scope) -> bool:
        """Check whether a value is a learning-rate scheduler."""
        return SCHEDULER.search(last(node)) or self.made_by(node, scope, SCHEDULERS)

    def is_scaler(self, node: ast.expr | None, scope: Scope) -> bool:
        """Check whether a value is a gradient scaler."""
        if SCALER.search(last(node)):
            return True
        return self.names.project.says(scope.module, "GradScaler") and self.made_by(node, scope, SCALERS)

    def is_model(self, node: ast.expr | None, scope: Scope) -> bool:
        """Check whether a value is a model, by its name or its class."""
        name = last(node)
        if MODEL.search(name):
            return True
        return self.module_class(node, scope) is not None if node is not None else False

    @cache_answers
    def module_class(self, node: ast.expr | None, scope: Scope) -> Scope | None:
        """Return the project's nn.Module class of a value."""
        for call, home, _ in self.origins.calls_of(node, scope) if self.defines_models(scope.module) else ():
            found = self.names.definition(call.func, home)
            if found is not None and found.kind == "class" and self.is_module_class(found):
                return found
        return None

    @cache_answers
    def defines_models(self, module: Module) -> bool:
        """Check whether the programs of a file define an nn.Module."""
        scopes = (scope for member in self.names.project.family(module) for scope in member.scopes)
        return any(scope.kind == "class" and self.is_module_class(scope) for scope in scopes)

    def run_class(self, func: ast.expr, scope: Scope) -> Scope | None:
        """Return the project's class of a called model, also behind Accelerate or DDP."""
        found = self.module_class(func, scope)
        if found is not None or dotted(func) is None:
            return found
        for call, home, _ in self.origins.calls_of(func, scope):
            if last(call) in ("prepare", "prepare_model") or last(call).endswith(("DataParallel", "DDP")):
                same = (value for value in call.args if dotted(value) == dotted(func))
                found = next(filter(None, (self.module_class(value, home) for value in same)), None)
                if found is not None:
                    return found
        return None

    @cache_answers
    def is_module_class(self, owner: Scope) -> bool:
        """Check whether a class derives from nn.Module, as far as can be seen."""
        return any(name.endswith("Module") or name.startswith("torch.nn.") for name in self.names.bases_of(owner))

    def is_loader(self, node: ast.expr | None, scope: Scope) -> bool:
        """Check whether a value yields batches."""
        return LOADER.search(last(node)) or self.loader_call(node, scope) is not None

    def iterated(self, node: ast.expr, scope: Scope) -> ast.expr:
        """Return the iterable of a loop, without `enumerate`, progress bars and aliases."""
        for _ in range(8):
            if isinstance(node, ast.IfExp):  # `tqdm(loader) if rank == 0 else loader`
                node = node.orelse if isinstance(node.body, ast.Call) else node.body
            inner = within(node)
            if (
                isinstance(node, ast.Call)
                and inner is not None
                and not self.names.qualify(node.func, scope).endswith("DataLoader")
                and not self.gives_loader(node, scope)
            ):
                node = inner
                continue
            key = dotted(node)
            binds = self.origins.binds(key, scope, node.lineno) if key is not None else []
            loader = LOADER.search(last(node))  # is one itself, unless a bar shows how far it is
            values: list[ast.expr] = [
                bind.value
                for bind, _ in binds
                if not bind.path
                and (
                    (isinstance(bind.value, ast.IfExp) and not loader)
                    or (isinstance(bind.value, ast.Call) and within(bind.value) is not None)
                )
                and (not loader or last(bind.value) in BARS)
            ]
            if len(values) > 1:  # `bar = enumerate(loader)`, and on the first rank `bar = tqdm(bar)`
                values = [value for value in values if dotted(within(value)) != key]
            if len(values) != 1 or last(values[0]) == "DataLoader":
                return node
            node = values[0]
        return node

    def gives_loader(self, call: ast.Call, scope: Scope) -> bool:
        """Check whether a call makes a loader, rather than running over one."""
        if self.origins.calls.target(call, scope) is not None and self.loader_call(call, scope) is not None:
            return True
        return LOADER.search(last(call)) and not any(LOADER.search(last(value)) for value in call.args)

    def loader_call(self, node: ast.expr | None, scope: Scope) -> tuple[ast.Call, Scope] | None:
        """Return the DataLoader(...) that made a value, if that is certain."""
        found = [(call, home) for call, home, full in self.origins.calls_of(node, scope) if full.endswith("DataLoader")]
        return found[0] if found else None

    def is_shard(self, node: ast.expr, scope: Scope) -> bool:
        """Check whether a loop runs over a loader of the rank's shard."""
        calls = self.origins.calls_of(self.iterated(node, scope), scope)
        return any(self.gives_shard(call, home) for call, home, full in calls if full.endswith("DataLoader"))

    def gives_shard(self, made: ast.Call, scope: Scope) -> bool:
        """Check whether a loader has a distributed sampler, or gets the rank's shard."""
        sampler = keyword(made, "sampler")
        if any(full.endswith(SAMPLER) for _, _, full in self.origins.calls_of(sampler, scope)):
            return True
        given = [value for value in (argument(made, 0, "dataset"), sampler) if value is not None]
        return any(divides(origin.node) for value in given for origin in self.origins.of(value, scope))


def within(node: ast.expr) -> ast.expr | None:
    """Return the iterable that a call wraps: its first argument, or a progress bar's `iterable`."""
    if not isinstance(node, ast.Call):
        return None
    return node.args[0] if node.args else keyword(node, "iterable")


# Also that of the optimizer that sets its own rate, as the tutorials of the Transformer have it.
STEPS = ("step", "step_and_update_lr")
HELPERS = (ast.Name, ast.Attribute)


class Steps:
    """Recognises the calls of a training step."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.known: dict[ast.Call, bool] = {}

    def steps_optimizer(self, site: Site) -> bool:
        """Check whether a call is `optimizer.step()` or `scaler.step(optimizer)`."""
        found = self.known.get(site.call)
        if found is None:
            found = self.known[site.call] = self._steps_optimizer(site)
        return found

    def _steps_optimizer(self, site: Site) -> bool:
        if self.helps(site):
            return True
        if site.name not in STEPS or site.receiver is None:
            return False
        if self.kinds.is_scaler(site.receiver, site.scope):
            return bool(site.call.args)
        return self.kinds.is_optimizer(site.receiver, site.scope)

    def steps_scheduler(self, site: Site) -> bool:
        """Check whether a call is `scheduler.step(...)`."""
        return site.name == "step" and site.receiver is not None and self.kinds.is_scheduler(site.receiver, site.scope)

    def backwards(self, site: Site) -> bool:
        """Check whether a call computes gradients (`loss.backward()`, `accelerator.backward(loss)`)."""
        named = site.name in ("backward", "manual_backward") and site.receiver is not None
        return named or self.helps(site)

    def helps(self, site: Site) -> bool:
        """Check whether a scaler's helper gets loss and optimizer, and runs backward and step."""
        if not SCALER.search(site.name) or not isinstance(site.call.func, HELPERS):
            return False
        loss, optimizer = argument(site.call, 0, "loss"), argument(site.call, 1, "optimizer")
        if loss is None or optimizer is None or self.kinds.origins.calls.target(site.call, site.scope) is not None:
            return False
        return self.kinds.is_optimizer(optimizer, site.scope)

    def loss_of(self, site: Site) -> ast.expr | None:
        """Return the loss that a backward call starts from, without a scaler's `scale(...)`."""
        receiver = site.receiver
        if self.helps(site):
            return argument(site.call, 0, "loss")
        if isinstance(receiver, ast.Call) and last(receiver) == "scale" and receiver.args:
            return receiver.args[0]
        if site.call.args and not isinstance(receiver, ast.Call) and "loss" not in last(receiver).lower():
            return site.call.args[0]
        return receiver
