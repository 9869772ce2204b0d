"""Analyse plain loops, on one device or with DistributedDataParallel: only parts of the loop change.

All of `migrate/` uses `ParsedScript`, a parsed file, and `MigrationRow`, a finding. `loop_rows` is common to all loops.
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
    loops,
    walk,
)

__all__ = [
    "ACTIONS",
    "BECOMES",
    "GOES",
    "REFUSED",
    "STAYS",
    "MigrationRow",
    "ParsedScript",
    "is_distributed",
    "loop_rows",
    "rows",
]


ACTIONS = BECOMES, GOES, STAYS, REFUSED = "becomes", "goes", "stays", "refused"
_WIDTH = 110


class MigrationRow(NamedTuple):
    """A finding about one line of a script.

    Attributes:
        line: from 1; in a notebook, of the joined cells.
        action: one of BECOMES, GOES, STAYS, REFUSED.
        code: the code of the script, on one line ("there" in JSON).
        advice: its replacement, or why it is refused and what to do instead ("here" in JSON).
    """

    line: int
    action: str
    code: str
    advice: str


@final
class ParsedScript:
    """A parsed file, with its imports from other files resolved."""

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
    def call_names(self) -> list[tuple[Site, str]]:
        """Every call with the full name of its function, "" if unknown."""
        return [(site, self.view.full(site)) for site in self.module.sites()]

    def constructions(self, pattern: re.Pattern[str]) -> list[Site]:
        """Return the calls of matching names, and of classes derived from them."""
        return [site for site, name in self.call_names if pattern.search(name) or self._derives(site, pattern)]

    def classes(self, pattern: re.Pattern[str]) -> Iterator[Scope]:
        """Yield the file's classes that derive from a matching full name."""
        for scope in self.module.scopes:
            if scope.kind == "class" and any(pattern.search(name) for name in self.view.names.bases_of(scope)):
                yield scope

    def _derives(self, site: Site, pattern: re.Pattern[str]) -> bool:
        scope = self.view.names.definition(site.call.func, site.scope)
        if scope is None or scope.kind != "class":
            return False
        return any(pattern.search(name) for name in self.view.names.bases_of(scope))

    def bound_names(self, sites: list[Site]) -> set[str]:
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
        return shorten(self.source.lines[number - 1].strip()) if number <= len(self.source.lines) else ""

    def row(self, node: ast.AST, action: str, advice: str, code: str = "") -> MigrationRow:
        """Build the row of a node; `code` defaults to its source line."""
        return MigrationRow(getattr(node, "lineno", 1), action, code or self.line(node), advice)


def shorten(text: str) -> str:
    """Join a text to one line, and cut it to the maximum width."""
    plain = " ".join(text.split())
    return plain if len(plain) <= _WIDTH else f"{plain[: _WIDTH - 3]}..."


_ITERABLE = re.compile(r"(^|\.)IterableDataset$")
_NO_DIVISION = "remove the division by the accumulated batches: batch.weight is the micro-batch's share of the step"
_PLAIN_SAMPLERS = ("DistributedSampler", "RandomSampler", "SequentialSampler")


def loop_rows(script: ParsedScript) -> Iterator[MigrationRow]:
    """Yield the rows that all loops have in common."""
    for site, full in script.call_names:
        yield from _loader_rows(script, site, full)
        yield from _step_rows(script, site, full)
    yield from _scheduler_rows(script)
    for training in script.view.training:
        yield from _loop_rows(script, training)
    yield from _loss_rows(script)
    for owner in script.classes(_ITERABLE):
        advice = "samples must be accessible by index: implement __len__ and __getitem__, or write the data to files"
        yield script.row(owner.node, REFUSED, advice)
    yield from _optimizer_rows(script)


def _loader_rows(script: ParsedScript, site: Site, full: str) -> Iterator[MigrationRow]:
    if not full.endswith(".DataLoader"):
        return
    call, target = site.call, _assigned_name(site)
    dataset = argument(call, 0, "dataset")
    size = argument(call, 1, "batch_size")
    data = ast.unparse(dataset) if dataset is not None else "dataset"
    micro = ast.unparse(size) if size is not None else "1"
    if EVALUATION.search(target):
        micro += ", shuffle=False"
    loader = f"lockstep.loader({data}, world, batch_size=..., micro_batch_size={micro})"
    more = keyword(call, "collate_fn")
    loader = loader if more is None else f"{loader[:-1]}, collate={ast.unparse(more)})"
    note = "; batch_size counts all processes and accumulated batches of a step"
    yield script.row(call, BECOMES, f"{target or 'loader'} = {loader}{note}")
    for name in ("sampler", "batch_sampler"):
        sampler = keyword(call, name)
        if sampler is None or (isinstance(sampler, ast.Constant) and sampler.value is None):
            continue
        samplers = {full.rpartition(".")[2] for _, _, full in script.view.origins.calls_of(sampler, site.scope)}
        if name == "batch_sampler" or (samplers and not samplers <= set(_PLAIN_SAMPLERS)):
            advice = "lockstep sets the order: use loader(shuffle=...), or order the dataset"
            yield script.row(sampler, REFUSED, advice, f"{name}={ast.unparse(sampler)}")


def _step_rows(script: ParsedScript, site: Site, full: str) -> Iterator[MigrationRow]:
    steps, name = script.view.steps, site.name
    if steps.steps_optimizer(site):
        scaled = bool(site.receiver is not None and script.view.kinds.is_scaler(site.receiver, site.scope))
        if (site.call.args or site.call.keywords) and not scaled and name == "step":
            yield script.row(
                site.call, REFUSED, "engines call optimizer.step() without a closure: use an optimizer that needs none"
            )
        else:
            yield script.row(site.call, BECOMES, "engine.step()")
    elif name == "zero_grad":
        yield script.row(site.call, GOES, "engine.step() clears the gradients")
    elif name == "clip_grad_norm_" and full:
        limit = argument(site.call, 1, "max_norm")
        clip = ast.unparse(limit) if limit is not None else "..."
        yield script.row(site.call, GOES, f"clip={clip} of lockstep.engine")
    elif name == "clip_grad_value_" and full:
        yield script.row(site.call, REFUSED, "engines clip by norm: clip= of lockstep.engine")


def _scheduler_rows(script: ParsedScript) -> Iterator[MigrationRow]:
    """Yield a row for each step of a scheduler: it keeps its clock, the step or the epoch."""
    each_step = {site.call for training in script.view.training for site in script.view.trainings.each_step(training)}
    for site, _ in script.call_names:
        if not script.view.steps.steps_scheduler(site):
            continue
        advice = "call it once per step, after engine.step(), on any number of processes"
        if each_step and site.call not in each_step:
            advice = "once per epoch, as now: if (step.number + 1) % (len(loader) // epochs) == 0, after engine.step()"
        yield script.row(site.call, STAYS, advice)


def _loop_rows(script: ParsedScript, training: Training) -> Iterator[MigrationRow]:
    if training.scope.module is script.module and isinstance(training.loop, ast.For):
        target, over = training.loop.target, training.loop.iter
        if isinstance(over, ast.Call) and last(over) == "enumerate" and isinstance(target, ast.Tuple):
            target = target.elts[-1]
        data = ast.unparse(target).strip("()") if isinstance(target, ast.Tuple) else ast.unparse(target)
        advice = f"for step in loader: ... for batch in step: {data} = batch.data; after the inner loop engine.step()"
        yield script.row(training.loop, BECOMES, advice)
    for loop, scope, _ in script.view.trainings.epochs(training):
        if scope.module is script.module:
            advice = "epochs=... of lockstep.loader: its steps cover all epochs"
            yield script.row(loop, GOES, advice)


def _loss_rows(script: ParsedScript) -> Iterator[MigrationRow]:
    """Yield rows for losses that are divided before the backward; batch.weight replaces the division."""
    losses = [script.view.steps.loss_of(site) for site, _ in script.call_names if script.view.steps.backwards(site)]
    yield from (
        script.row(each, BECOMES, _NO_DIVISION, ast.unparse(each)) for each in losses if _is_division(each) and each
    )
    for scope in script.module.scopes:
        for key in {dotted(each) for each in losses} & scope.binds.keys():
            for bind in scope.binds[key or ""]:
                if _is_division(bind.value) or (
                    isinstance(bind.stmt, ast.AugAssign) and isinstance(bind.stmt.op, ast.Div)
                ):
                    yield script.row(bind.stmt, BECOMES, _NO_DIVISION)


def _is_division(value: ast.expr | None) -> bool:
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)


def _optimizer_rows(script: ParsedScript) -> Iterator[MigrationRow]:
    """Yield a row if one loop steps several optimizers."""
    for training in script.view.training:
        each: dict[str, Site] = {}
        for site in script.view.trainings.each_step(training):
            if script.view.steps.steps_optimizer(site) and site.module is script.module:
                each.setdefault(script.view.steps.stepped(site), site)
        if len(each) > 1:
            site = list(each.values())[-1]
            yield script.row(
                site.call, STAYS, f"{len(each)} optimizers: use one engine for each, as in examples/gan.py"
            )
            return


def _assigned_name(site: Site) -> str:
    """Return the name that a call's result is assigned to."""
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
_SAVE_STATE = "lockstep.save_state(folder, world, step.number + 1, engine=engine, scheduler=scheduler, loader=loader)"
_LOAD_STATE = "lockstep.load_state(folder, world, engine=engine, scheduler=scheduler, loader=loader)"
_LOAD_WEIGHTS = "load pretrained weights before the engine is built, on every rank; lockstep.load_state resumes a run"
# What a checkpoint to resume from has besides the model's weights.
_RESUMES = re.compile(r"optim|sched|scaler|epoch|global_step|resume", re.IGNORECASE)
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
    "all_reduce": (STAYS, "may stay for a metric; lockstep.gather_for_metrics counts each sample once"),
    "reduce": (STAYS, "may stay for a metric; lockstep.gather_for_metrics counts each sample once"),
}
_RANK = re.compile(r"^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$")


def is_distributed(script: ParsedScript) -> bool:
    """Whether the script uses torch.distributed or a distributed wrapper."""
    return any(full.startswith("torch.distributed.") or _engine_of(full) for _, full in script.call_names)


def rows(script: ParsedScript) -> Iterator[MigrationRow]:
    """Yield the rows of a script; none if it computes no gradients."""
    if not any(script.view.steps.backwards(site) for site, _ in script.call_names):
        return
    wrapped = [site for site, full in script.call_names if _engine_of(full)]
    yield from _engine_rows(script, wrapped)
    for site, full in script.call_names:
        yield from _call_rows(script, site, full)
    yield from _environment_rows(script)
    yield from loop_rows(script)


def _engine_of(full: str) -> str:
    name = full.rpartition(".")[2]
    return _WRAPPERS.get(name, "") if full.startswith("torch.") or name == "fully_shard" else ""


def _engine_rows(script: ParsedScript, wrapped: list[Site]) -> Iterator[MigrationRow]:
    """Yield rows for where to build the engine: in place of a wrapper, else after the optimizer."""
    for site in wrapped:
        name = _engine_of(script.view.full(site))
        if site.name == "fully_shard" and loops(site.stmt, site.module):
            yield script.row(site.call, GOES, 'lockstep.engine("fsdp", ...) shards each block by itself')
            continue
        model = ast.unparse(site.call.args[0]) if site.call.args else "model"
        if name == "zero":
            yield script.row(site.call, BECOMES, f'the optimizer itself, and lockstep.engine("{name}", ...)')
            continue
        optimizer_code = "lambda model: make_optimizer(model)" if name == "fsdp" else "optimizer"
        advice = f'engine = lockstep.engine("{name}", {model}, {optimizer_code}, world), after the optimizer; '
        yield script.row(site.call, BECOMES, f"{advice}in the loop call engine.model(...)")
    if wrapped:
        return
    for site, full in script.call_names:
        if re.search(r"^torch\.optim\.(?!lr_scheduler|swa)\w+(\.\w+)*$", full) and site.name[:1].isupper():
            target = dotted(site.stmt.targets[0]) if isinstance(site.stmt, ast.Assign) else None
            advice = (
                "unchanged; after it world = lockstep.World.join() and engine = "
                f'lockstep.engine("auto", model.to(world.device), {target or "optimizer"}, world)'
            )
            yield script.row(site.call, STAYS, advice)


def _call_rows(script: ParsedScript, site: Site, full: str) -> Iterator[MigrationRow]:  # noqa: C901
    name, call = full.rpartition(".")[2] or site.name, site.call
    if full.startswith("torch.distributed.") and name in _DIST:
        if name == "all_reduce" and call.args and "grad" in set(idents(call.args[0])):
            yield script.row(call, GOES, "the engine reduces gradients over the ranks")
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
        yield script.row(call, GOES, "World.join() sets it: use world.device")
    elif full in ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"):
        yield script.row(call, GOES, "torchrun, or lockstep launch --nproc-per-node N -- script.py")
    elif full == "torch.save":
        yield script.row(call, BECOMES, _SAVE_STATE)
    elif full == "torch.load":
        yield script.row(call, *((BECOMES, _LOAD_STATE) if _resumes(site) else (STAYS, _LOAD_WEIGHTS)))
    elif name == "convert_sync_batchnorm":
        advice = 'may stay; lockstep.engine(..., batchnorm="replay") does not depend on the number of processes'
        yield script.row(call, STAYS, advice)
    elif script.view.steps.backwards(site):
        yield script.row(call, BECOMES, "with engine.accumulate(batch.last): engine.backward(loss, batch.weight)")


def _resumes(site: Site) -> bool:
    """Whether a load is of a run's state: it says so, or more of it is read than a model's weights."""
    names = {bind.key for bind in site.scope.bound(site.stmt)}
    uses = [stmt for stmt in site.scope.stmts if stmt is site.stmt or names & set(idents(stmt))]
    loaded = [stmt for stmt in uses if isinstance(stmt, ast.Assign | ast.Expr | ast.Return)]
    return any(_RESUMES.search(ast.unparse(stmt)) for stmt in loaded) or bool(_RESUMES.search(site.scope.name))


def _environment_rows(script: ParsedScript) -> Iterator[MigrationRow]:
    """Yield rows for the launcher's variables that the script reads or sets."""
    for scope in script.module.scopes:
        for stmt in scope.stmts:
            if isinstance(stmt, ast.Assign | ast.Expr) and "environ" in set(idents(stmt)):
                names = {node.value for node in ast.walk(stmt) if isinstance(node, ast.Constant)}
                if any(isinstance(name, str) and _RANK.search(name) for name in names):
                    yield script.row(stmt, GOES, "World.join() reads it: use world.rank, world.size, world.device")
