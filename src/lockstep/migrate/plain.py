"""Analyse plain loops, on one device or with DistributedDataParallel: the loop stays, its parts change.

`Script` is the parsed file that all of `migrate/` shares, `Row` a finding, `loop_rows` the part common to all loops.
"""

import ast
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, final

from lockstep.migrate.parsing import (
    EVALUATION,
    Analysis,
    Module,
    Project,
    Scope,
    Site,
    Source,
    Training,
    View,
    argument,
    dotted,
    idents,
    keyword,
    last,
    walk,
)

__all__ = [
    "ACTIONS",
    "BECOMES",
    "GOES",
    "REFUSED",
    "STAYS",
    "Row",
    "Script",
    "is_distributed",
    "loop_rows",
    "rows",
]


ACTIONS = BECOMES, GOES, STAYS, REFUSED = "becomes", "goes", "stays", "refused"
_WIDTH = 110


class Row(NamedTuple):
    """A finding about one place.

    Attributes:
        line: from 1; in a notebook, of the joined cells.
        action: one of BECOMES, GOES, STAYS, REFUSED.
        there: the code there, in one line.
        here: its replacement, what does it instead, or why it is refused and the way out.
    """

    line: int
    action: str
    there: str
    here: str


@final
class Script:
    """A parsed file, with the names that it imports from other files resolved."""

    def __init__(self, source: Source) -> None:
        project = Project()
        self.module: Module = project.add(os.path.realpath(source.path), source)
        project.checked.append(self.module)
        self.source = source
        self.view = View(self.module, Analysis(project))

    @property
    def tree(self) -> ast.Module:
        """The syntax tree of the file."""
        assert self.source.tree is not None
        return self.source.tree

    @functools.cached_property
    def called(self) -> list[tuple[Site, str]]:
        """Every call with the full name of its function, "" if unknown."""
        return [(site, self.view.full(site)) for site in self.module.sites()]

    def made(self, full: re.Pattern[str]) -> list[Site]:
        """Return the calls of a matching name, or of a class derived from one."""
        return [site for site, name in self.called if full.search(name) or self._derives(site, full)]

    def classes(self, full: re.Pattern[str]) -> Iterator[Scope]:
        """Yield the file's classes that derive from a matching full name."""
        for scope in self.module.scopes:
            if scope.kind == "class" and any(full.search(name) for name in self.view.names.bases_of(scope)):
                yield scope

    def _derives(self, site: Site, full: re.Pattern[str]) -> bool:
        found = self.view.names.definition(site.call.func, site.scope)
        if found is None or found.kind != "class":
            return False
        return any(full.search(name) for name in self.view.names.bases_of(found))

    def named(self, sites: list[Site]) -> set[str]:
        """Return the names that are bound to the results of these calls (`trainer`, `self.accelerator`)."""
        calls = {site.call for site in sites}
        return {
            key
            for scope in self.module.scopes
            for key, binds in scope.binds.items()
            for bind in binds
            if bind.value is not None and not bind.path and any(node in calls for node in walk(bind.value))
        }

    def attributes(self, keys: set[str]) -> Iterator[ast.Attribute]:
        """Yield each read of an attribute of these objects."""
        for node in walk(self.tree):
            if isinstance(node, ast.Attribute) and dotted(node.value) in keys:
                yield node

    def methods(self, keys: set[str], test: Callable[[str], bool]) -> Iterator[Site]:
        """Yield the calls of matching methods of these objects."""
        for site in self.module.sites():
            if test(site.name) and dotted(site.receiver) in keys:
                yield site

    def line(self, node: ast.AST) -> str:
        """Return the source line where a node begins."""
        number = getattr(node, "lineno", 1)
        return shortened(self.source.lines[number - 1].strip()) if number <= len(self.source.lines) else ""

    def row(self, node: ast.AST, action: str, here: str, there: str = "") -> Row:
        """Make the row of a place; `there` defaults to its line."""
        return Row(getattr(node, "lineno", 1), action, there or self.line(node), here)


def shortened(text: str) -> str:
    """Join a text to one line, and cut it to the maximum width."""
    plain = " ".join(text.split())
    return plain if len(plain) <= _WIDTH else f"{plain[: _WIDTH - 3]}..."


_ITERABLE = re.compile(r"(^|\.)IterableDataset$")
_UNDIVIDED = "without the division by the accumulated batches: batch.weight is the micro-batch's share of the step"
_PERMUTED = ("DistributedSampler", "RandomSampler", "SequentialSampler")


def loop_rows(script: Script) -> Iterator[Row]:
    """Yield the rows of the loop's lines."""
    for site, full in script.called:
        yield from _loader(script, site, full)
        yield from _step(script, site, full)
    for training in script.view.training:
        yield from _loops(script, training)
    yield from _losses(script)
    for owner in script.classes(_ITERABLE):
        here = "any sample must be had by its index: give it __len__ and __getitem__, or write the data out"
        yield script.row(owner.node, REFUSED, here)
    yield from _several(script)


def _loader(script: Script, site: Site, full: str) -> Iterator[Row]:
    if not full.endswith(".DataLoader"):
        return
    call, target = site.call, _target(site)
    dataset = argument(call, 0, "dataset")
    size = argument(call, 1, "batch_size")
    what = ast.unparse(dataset) if dataset is not None else "dataset"
    each = ast.unparse(size) if size is not None else "1"
    if EVALUATION.search(target):
        each += ", shuffle=False"
    made = f"lockstep.loader({what}, world, batch_size=..., micro_batch_size={each})"
    more = keyword(call, "collate_fn")
    made = made if more is None else f"{made[:-1]}, collate={ast.unparse(more)})"
    said = "; batch_size is the whole step's, over all processes and accumulated batches"
    yield script.row(call, BECOMES, f"{target or 'loader'} = {made}{said}")
    for name in ("sampler", "batch_sampler"):
        given = keyword(call, name)
        if given is None or (isinstance(given, ast.Constant) and given.value is None):
            continue
        made_by = {full.rpartition(".")[2] for _, _, full in script.view.origins.calls_of(given, site.scope)}
        if name == "batch_sampler" or (made_by and not made_by <= set(_PERMUTED)):
            here = "the order is lockstep's own: shuffle it by loader(shuffle=...), or put the order into the dataset"
            yield script.row(given, REFUSED, here, f"{name}={ast.unparse(given)}")


def _step(script: Script, site: Site, full: str) -> Iterator[Row]:
    steps, name = script.view.steps, site.name
    if steps.steps_scheduler(site):
        yield script.row(site.call, STAYS, "once a step, after engine.step(), whatever the number of processes")
    elif steps.steps_optimizer(site):
        scaled = bool(site.receiver is not None and script.view.kinds.is_scaler(site.receiver, site.scope))
        if (site.call.args or site.call.keywords) and not scaled and name == "step":
            yield script.row(
                site.call, REFUSED, "an engine steps an optimizer without a closure: use one that needs none"
            )
        else:
            yield script.row(site.call, BECOMES, "engine.step()")
    elif name == "zero_grad":
        yield script.row(site.call, GOES, "engine.step() clears the gradients")
    elif name == "clip_grad_norm_" and full:
        limit = argument(site.call, 1, "max_norm")
        shown = ast.unparse(limit) if limit is not None else "..."
        yield script.row(site.call, GOES, f"clip={shown} of lockstep.engine")
    elif name == "clip_grad_value_" and full:
        yield script.row(site.call, REFUSED, "an engine clips by the norm: clip= of lockstep.engine")


def _loops(script: Script, training: Training) -> Iterator[Row]:
    if training.scope.module is script.module and isinstance(training.loop, ast.For):
        target, over = training.loop.target, training.loop.iter
        if isinstance(over, ast.Call) and last(over) == "enumerate" and isinstance(target, ast.Tuple):
            target = target.elts[-1]
        data = ast.unparse(target).strip("()") if isinstance(target, ast.Tuple) else ast.unparse(target)
        here = f"for step in loader: ... for batch in step: {data} = batch.data; after the inner loop engine.step()"
        yield script.row(training.loop, BECOMES, here)
    for loop, scope, _ in script.view.trainings.epochs(training):
        if scope.module is script.module:
            here = "epochs=... of lockstep.loader: its steps run on through all epochs"
            yield script.row(loop, GOES, here)


def _losses(script: Script) -> Iterator[Row]:
    """Losses that are divided before the backward: the batch's weight replaces the division."""
    found = [script.view.steps.loss_of(site) for site, _ in script.called if script.view.steps.backwards(site)]
    yield from (script.row(each, BECOMES, _UNDIVIDED, ast.unparse(each)) for each in found if _divided(each) and each)
    for scope in script.module.scopes:
        for key in {dotted(each) for each in found} & scope.binds.keys():
            for bind in scope.binds[key or ""]:
                if _divided(bind.value) or (isinstance(bind.stmt, ast.AugAssign) and isinstance(bind.stmt.op, ast.Div)):
                    yield script.row(bind.stmt, BECOMES, _UNDIVIDED)


def _divided(value: ast.expr | None) -> bool:
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)


def _several(script: Script) -> Iterator[Row]:
    """Several optimizers that are stepped in one loop."""
    for training in script.view.training:
        each: dict[str, Site] = {}
        for site in script.view.trainings.each_step(training):
            if script.view.steps.steps_optimizer(site) and site.module is script.module:
                each.setdefault(script.view.steps.stepped(site), site)
        if len(each) > 1:
            site = list(each.values())[-1]
            yield script.row(site.call, STAYS, f"{len(each)} optimizers: an engine for each, as in examples/gan.py")
            return


def _target(site: Site) -> str:
    """The name that a call's value is bound to."""
    stmt = site.stmt
    if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1:
        return dotted(stmt.targets[0]) or ""
    return ""


_WRAPPERS = {
    "DistributedDataParallel": "ddp",
    "FullyShardedDataParallel": "fsdp",
    "fully_shard": "fsdp",
    "DataParallel": "ddp",
    "ZeroRedundancyOptimizer": "zero",
}
_SAVED = "lockstep.save_state(folder, world, step.number + 1, engine=engine, scheduler=scheduler, loader=loader)"
_LOADED = "lockstep.load_state(folder, world, engine=engine, scheduler=scheduler, loader=loader)"
_DIST = {
    "init_process_group": (BECOMES, "world = lockstep.World.join()"),
    "destroy_process_group": (BECOMES, "world.leave()"),
    "get_rank": (BECOMES, "world.rank"),
    "get_world_size": (BECOMES, "world.size"),
    "barrier": (BECOMES, "world.barrier(), where it is still needed: save_state waits by itself"),
    "is_initialized": (BECOMES, "world.size > 1"),
    "all_gather": (BECOMES, "lockstep.gather_for_metrics(step, found)"),
    "all_gather_object": (BECOMES, "world.gather(value)"),
    "broadcast_object_list": (BECOMES, "world.gather(value)[0]"),
    "all_reduce": (STAYS, "of a metric it may stay; lockstep.gather_for_metrics counts each sample once"),
    "reduce": (STAYS, "of a metric it may stay; lockstep.gather_for_metrics counts each sample once"),
}
_RANK = re.compile(r"^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$")


def is_distributed(script: Script) -> bool:
    """Whether the script starts or joins processes of its own."""
    return any(full.startswith("torch.distributed.") or _wrapper(full) for _, full in script.called)


def rows(script: Script) -> Iterator[Row]:
    """Yield the rows of a script; none if it computes no gradients."""
    if not any(script.view.steps.backwards(site) for site, _ in script.called):
        return
    wrapped = [site for site, full in script.called if _wrapper(full)]
    yield from _begin(script, wrapped)
    for site, full in script.called:
        yield from _call(script, site, full)
    yield from _environment(script)
    yield from loop_rows(script)


def _wrapper(full: str) -> str:
    return _WRAPPERS.get(full.rpartition(".")[2], "") if full.startswith("torch.") else ""


def _begin(script: Script, wrapped: list[Site]) -> Iterator[Row]:
    """The place to make the engine: instead of a wrapper, else after the optimizer."""
    for site in wrapped:
        name = _wrapper(script.view.full(site))
        held = ast.unparse(site.call.args[0]) if site.call.args else "model"
        if name == "zero":
            yield script.row(site.call, BECOMES, f'the optimizer itself, and lockstep.engine("{name}", ...)')
            continue
        given = "lambda model: make_optimizer(model)" if name == "fsdp" else "optimizer"
        here = f'engine = lockstep.engine("{name}", {held}, {given}, world), behind the optimizer; '
        yield script.row(site.call, BECOMES, f"{here}in the loop engine.model(...)")
    if wrapped:
        return
    for site, full in script.called:
        if re.search(r"^torch\.optim\.(?!lr_scheduler|swa)\w+(\.\w+)*$", full) and site.name[:1].isupper():
            target = dotted(site.stmt.targets[0]) if isinstance(site.stmt, ast.Assign) else None
            here = (
                "as it is; behind it world = lockstep.World.join() and engine = "
                f'lockstep.engine("auto", model.to(world.device), {target or "optimizer"}, world)'
            )
            yield script.row(site.call, STAYS, here)


def _call(script: Script, site: Site, full: str) -> Iterator[Row]:  # noqa: C901
    name, call = full.rpartition(".")[2] or site.name, site.call
    if full.startswith("torch.distributed.") and name in _DIST:
        if name == "all_reduce" and call.args and "grad" in set(idents(call.args[0])):
            yield script.row(call, GOES, "the engine sums gradients over the ranks")
        else:
            yield script.row(call, *_DIST[name])
    elif name == "DistributedSampler" and full:
        yield script.row(call, GOES, "lockstep.loader: the order is the same on any number of processes")
    elif name == "set_epoch" and site.receiver is not None:
        yield script.row(call, GOES, "each epoch of lockstep.loader has its own permutation")
    elif name == "no_sync" and site.receiver is not None:
        yield script.row(call, BECOMES, "with engine.accumulate(batch.last):")
    elif name == "GradScaler" and full:
        yield script.row(call, GOES, "lockstep.engine(..., loss_scaling=True)")
    elif name in ("update", "unscale_") and script.view.kinds.is_scaler(site.receiver, site.scope):
        yield script.row(call, GOES, "engine.step() does it")
    elif full in ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast"):
        yield script.row(call, BECOMES, 'lockstep.autocast(world, "bf16"), or "fp16" with loss_scaling=True')
    elif full == "torch.cuda.set_device":
        yield script.row(call, GOES, "World.join() sets it; world.device")
    elif full in ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"):
        yield script.row(call, GOES, "torchrun, or lockstep launch --nproc-per-node N -- script.py")
    elif full == "torch.save":
        yield script.row(call, BECOMES, _SAVED)
    elif full == "torch.load":
        yield script.row(call, BECOMES, _LOADED)
    elif name == "convert_sync_batchnorm":
        here = 'may stay; lockstep.engine(..., batchnorm="replay") does not depend on the number of processes'
        yield script.row(call, STAYS, here)
    elif script.view.steps.backwards(site):
        yield script.row(call, BECOMES, "with engine.accumulate(batch.last): engine.backward(loss, batch.weight)")


def _environment(script: Script) -> Iterator[Row]:
    """Launcher variables that the script itself reads or sets."""
    for scope in script.module.scopes:
        for stmt in scope.stmts:
            if isinstance(stmt, ast.Assign | ast.Expr) and "environ" in set(idents(stmt)):
                names = {node.value for node in ast.walk(stmt) if isinstance(node, ast.Constant)}
                if any(isinstance(name, str) and _RANK.search(name) for name in names):
                    yield script.row(stmt, GOES, "World.join() reads it: world.rank, world.size, world.device")
