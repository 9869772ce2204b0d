"""The lines that every loop of one's own has: loaders, the loop over batches, backward, clip, step and schedule.

What a framework's own object does (`accelerator.backward`) stands in `objects.py`; here are torch's own calls.
"""

import ast
import re
from collections.abc import Iterator

from lockstep.migrate.parsing import EVALUATION, Site, Training, argument, dotted, keyword, last
from lockstep.migrate.script import BECOMES, GOES, REFUSED, STAYS, Row, Script

__all__ = ["loop_rows"]

_ITERABLE = re.compile(r"(^|\.)IterableDataset$")
_UNDIVIDED = "without the division by the accumulated batches: batch.weight is the micro-batch's share of the step"
_PERMUTED = ("DistributedSampler", "RandomSampler", "SequentialSampler")


def loop_rows(script: Script) -> Iterator[Row]:
    """What is told of the loop's lines."""
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
    """A loss that is divided before its backward: where it is by the accumulated batches, the weight does it."""
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
    """The name that a call's value is given."""
    stmt = site.stmt
    if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1:
        return dotted(stmt.targets[0]) or ""
    return ""
