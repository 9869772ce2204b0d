"""LS050: a step that a rank skips because of its own batch."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import Loop
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import REFERENCES, Words, dotted, idents, is_none, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Event, LoopBlock, apart, turn
from lockstep_lint.events.marks import operands
from lockstep_lint.events.query import alone, sides
from lockstep_lint.events.run import Run, runs
from lockstep_lint.events.steps import exchanges
from lockstep_lint.events.values import losses, runs_model, value_at
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

MESSAGE = "a rank that skips this step leaves the others waiting for its gradients: decide by what all ranks agree on"
# Properties of a value that do not depend on its number.
ABOUT = {"isinstance", "hasattr", "len", "requires_grad", "grad_fn", "shape", "size", "ndim", "dim", "numel"}
# Calls whose result all ranks share.
SHARED = Words(r"reduce|gather|broadcast|sync|all_")


def check(view: View) -> Iterator[Found]:
    """Find steps under DDP or FSDP that a test of the rank's own values skips."""
    if not view.distributed and "accelerate" not in view.frameworks:
        return
    reported: set[ast.expr] = set()
    for run in runs(view):
        if not exchanges(view, run):
            continue
        for event in run.of("backward"):
            if event.module is not view.module or not event.loops or sides(view, event) or alone(view, event):
                continue
            for test in skips(event, event.loops[-1]):
                own = reads_own_value(view, event, test) or misses_own_value(view, run, event, test)
                if test.node not in reported and own and not is_exchanged(test):
                    reported.add(test.node)
                    yield Found(test.node, MESSAGE)


def skips(event: Event, loop: LoopBlock) -> Iterator[ArmBlock]:
    """Yield the tests that skip the event in a turn: around it, or of a `continue` before it."""
    for test in event.tests:
        if test.scope is loop.scope and loop in event.path[: event.path.index(test)]:
            goes_on = not test.leaves or any(continues(stmt.body) for stmt in if_statements(test))
            yield from [test] if goes_on else []


def if_statements(test: ArmBlock) -> Iterator[ast.If]:
    """Yield the `if` statements of a test."""
    for stmt in test.scope.stmts:
        if isinstance(stmt, ast.If) and any(part is test.node for part in walk(stmt.test)):
            yield stmt


def continues(body: list[ast.stmt]) -> bool:
    """Whether a block ends the turn."""
    for stmt in body:
        if isinstance(stmt, ast.Continue):
            return True
        inner = (
            [] if isinstance(stmt, Loop | ast.FunctionDef) else [getattr(stmt, "body", []), getattr(stmt, "orelse", [])]
        )
        if any(continues(block) for block in inner):
            return True
    return False


def reads_own_value(view: View, event: Event, test: ArmBlock) -> bool:
    """Whether a test reads this rank's loss, or another of its values on the device."""
    values = [part for part in operands(test.node) if not is_there(part)]
    return any(
        value_at(view, event, part).device or not losses(view, test.scope).isdisjoint(tested_names(part, test.scope))
        for part in values
    )


def misses_own_value(view: View, run: Run, event: Event, test: ArmBlock) -> bool:
    """Whether a turn computes no gradients because one of the model's outputs is None for its batch: were it always
    so, nothing would ever train.
    """
    loop = event.loops[-1]
    others = [each for each in turn(run.events, loop, "backward") if test not in each.path and not apart(each, event)]
    for part in operands(test.node) if not others else ():
        if isinstance(part, ast.Compare) and len(part.ops) == 1 and is_none(part.comparators[0]):
            whole = part.left.value if isinstance(part.left, ast.Subscript) else part.left
            binds = view.origins.binds(dotted(whole) or "", test.scope, test.node.lineno)
            outputs = any(
                bind.path and isinstance(bind.value, ast.Call) and runs_model(view, bind.value, home)
                for bind, home in binds
            )
            if outputs and test.when is isinstance(part.ops[0], ast.IsNot):
                return True
    return False


def is_there(part: ast.expr) -> bool:
    """Whether a part of a test only checks a value's presence, type, size or graph."""
    if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn):
        return True
    return not ABOUT.isdisjoint(idents(part))


def tested_names(node: ast.expr, scope: Scope) -> dict[str, list[ast.expr]]:
    """Return the names in a test and those they are computed from, each with its earlier values."""
    queue, found = [*names(node)], dict[str, list[ast.expr]]()
    while queue and len(found) < 20:
        name = queue.pop()
        if name not in found:
            binds = [bind for bind in scope.binds.get(name, []) if bind.stmt.lineno < node.lineno]
            found[name] = [bind.value for bind in binds if bind.value is not None]
            queue += [n for v in found[name] if not isinstance(v, ast.Call) or len(v.args) < 2 for n in names(v)]
    return found


def is_exchanged(test: ArmBlock) -> bool:
    """Whether a test depends on the result of a collective."""
    found = tested_names(test.node, test.scope)
    values = [test.node, *(value for each in found.values() for value in each)]
    before = [site for site in test.scope.sites if site.line < test.node.lineno]
    return any(SHARED.search(word) for value in values for word in idents(value)) or any(
        exchanges_name(site.name, site.call, name) for site in before for name in found
    )


def exchanges_name(called: str, call: ast.Call, name: str) -> bool:
    """Whether a call exchanges the value of a name."""
    return SHARED.search(called) and any(name in names(value) for value in call.args)


def names(node: ast.AST) -> list[str]:
    """Return the names in an expression."""
    return [key for part in walk(node) if isinstance(part, REFERENCES) and (key := dotted(part))]


RULE = Rule(
    code="LS050",
    name="step skipped apart",
    what=(
        "A loop under DDP, FSDP or Accelerate skips a step, by a test of the loss or of the values in the batch of its "
        "own rank, or because the model has no output for it."
    ),
    why=(
        "The exchange of the gradients ends when all ranks are in it. A rank that goes on to its next batch instead "
        "answers with that one's gradients, or not at all: the sums are of different steps, and the last step hangs."
    ),
    bad="""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, loader, optimizer, criterion, local_rank):
    dist.init_process_group("nccl")
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    for x, y in loader:
        loss = criterion(model(x.to(local_rank)), y.to(local_rank))
        if torch.isnan(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
""",
    good="""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, loader, optimizer, criterion, local_rank):
    dist.init_process_group("nccl")
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    for x, y in loader:
        loss = criterion(model(x.to(local_rank)), y.to(local_rank))
        bad = torch.isnan(loss).float()
        dist.all_reduce(bad)
        if bad > 0:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="none",
    remedy="All-reduce the decision, and skip on all ranks or on none",
)
