"""LS064: a mean over the wrong count."""

import ast
import functools
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.context import guards, inside, loops
from lockstep_lint.analysis.index import Bind, Scope
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import (
    Words,
    argument,
    constant,
    dotted,
    has_star,
    idents,
    keyword,
    last,
    targets,
    walk,
)
from lockstep_lint.analysis.project import unit_test
from lockstep_lint.analysis.training import LOSSES
from lockstep_lint.analysis.view import View
from lockstep_lint.events.marks import summed
from lockstep_lint.events.means import counted, is_count, is_mean, plain
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

SUMS_MEANS = "divides a sum of the batches' means by the number of {what}, not of batches: the mean is far too small"
SUMS_COUNTS = (
    "divides a count of matches by the number of batches: this is no accuracy, divide by the number of samples"
)
ONE_BATCH = "'{name}' is of the last batch alone, and is read after the loop as the result of all: add up in the loop"
WINDOW = "'{name}' is the mean of the meter's last values alone, not of the whole pass: read the mean over all of them"
LAST_INDEX = "divides by the last index of the loop, one less than its number of turns: divide by '{name} + 1'"

SHOWS = {"print", "info", "debug", "write", "set_postfix", "set_description", "set_postfix_str", "log", "add_scalar"}
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.With, ast.Try)
SCALES = Words(r"batch_?size|^bs(z|s)?$|world|gpu|num_replicas|process", re.IGNORECASE)
Sums = dict[str, list[tuple[ast.stmt, ast.expr]]]


def check(view: View) -> Iterator[Found]:
    """Looks at quotients of what a loop over batches has added up, and at what they divide by."""
    if "for " not in view.module.text:
        return
    for scope in view.scopes:
        sums = added(scope) if scope.kind != "class" else {}
        for stmt in scope.stmts if sums else ():
            for node, top, bottom in quotients(stmt):
                message = wrong(view, scope, stmt, top, bottom, sums)
                if message:
                    yield Found(node, message)
        for loop in scope.stmts if scope.kind != "class" else ():
            if isinstance(loop, ast.For) and holds_out(view, loop, scope):
                yield from last_batches(view, loop, scope)
        yield from windows(view, scope)


def holds_out(view: View, loop: ast.For, scope: Scope) -> bool:
    """Check whether a loop evaluates: over a loader whose name or function says so, without gradients, to its end."""
    over = view.kinds.iterated(loop.iter, scope)
    named = EVALUATION.search(scope.name) or any(map(EVALUATION.search, idents(over)))
    if not named or not view.kinds.is_loader(over, scope) or unit_test(scope.module):
        return False
    sites = view.effects.block(loop, scope)
    ends = any(isinstance(stmt, ast.Break | ast.Return) and inside(stmt, loop, scope.module) for stmt in scope.stmts)
    return not ends and not any(map(view.steps.backwards, sites)) and not whole(view, over, scope)


def whole(view: View, loader: ast.expr, scope: Scope) -> bool:
    """Check whether one batch of a loader may hold all of its data (`batch_size=len(data)`)."""
    made = view.kinds.loader_call(loader, scope)
    size = argument(made[0], 1, "batch_size") if made is not None else None
    found = [origin.node for origin in view.origins.of(size, made[1])] if made is not None else []
    return any(last(node) == "len" or constant(node) == -1 for node in found)


def last_batches(view: View, loop: ast.For, scope: Scope) -> Iterator[Found]:
    """Names that each turn gives anew, and that are read after the loop alone: they are of the last batch."""
    for key, binds in scope.binds.items():
        own = [bind for bind in binds if inside(bind.stmt, loop, scope.module)]
        if not own or "." in key or any(bind.how != "assign" or guards(bind.stmt, scope.module, loop) for bind in own):
            continue
        reads = [stmt for stmt, home in scope.module.named.get(key, []) if home is scope and is_read(stmt, key)]
        after = [stmt for stmt in reads if follows(stmt, loop, binds, scope)]
        within = [stmt for stmt in reads if stmt.lineno > own[-1].stmt.lineno and inside(stmt, loop, scope.module)]
        if not after or any(map(functools.partial(takes, key=key), within)):
            continue
        value = own[-1].value if not own[-1].path else None
        computed = is_mean(view, value, scope) or is_count(view, value, scope) or gives_loss(value)
        if computed and not any(site.name == "backward" for stmt in after for site in scope.sites if site.stmt is stmt):
            yield Found(own[-1].stmt, ONE_BATCH.format(name=key))
        elif not within and any(compares(stmt, key, loop, scope) for stmt in after):
            yield Found(after[0], ONE_BATCH.format(name=key))


def gives_loss(value: ast.expr | None) -> bool:
    """Check whether a value is what a criterion gives for outputs and labels, by its name."""
    value = plain(value) if value is not None else None
    return (
        isinstance(value, ast.Call) and len(value.args) > 1 and LOSSES.search(last(value)) and last(value)[0].islower()
    )


def is_read(stmt: ast.stmt, key: str) -> bool:
    """Check whether a statement itself reads a name."""
    parts = [each for each in ast.iter_child_nodes(stmt) if isinstance(each, ast.expr | ast.keyword)]
    return any(
        isinstance(node, ast.Name) and node.id == key and isinstance(node.ctx, ast.Load)
        for part in parts
        for node in walk(part)
    )


def follows(stmt: ast.stmt, loop: ast.For, binds: list[Bind], scope: Scope) -> bool:
    """Whether a statement follows a loop in the same turn of the loops around, before the name gets another value."""
    around = loops(loop, scope.module)
    end = (around[0].end_lineno if around else None) or 10**9
    again = min((b.stmt.lineno for b in binds if b.stmt.lineno > (loop.end_lineno or 0)), default=10**9)
    return (loop.end_lineno or 0) < stmt.lineno <= min(end, again)


def takes(stmt: ast.stmt, key: str) -> bool:
    """Check whether a statement may keep a value, rather than only show it."""
    call = stmt.value if isinstance(stmt, ast.Expr) else None
    return not isinstance(call, ast.Call) or last(call) not in SHOWS


def compares(stmt: ast.stmt, key: str, loop: ast.For, scope: Scope) -> bool:
    """Check whether a statement compares what a name holds with another part of the last batch."""
    batch = {name for name, _ in targets(loop.target)}
    batch |= {b.key for s in scope.stmts if inside(s, loop, scope.module) for b in scope.bound(s)}
    for node in walk(stmt) if not isinstance(stmt, BLOCKS) else ():
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            sides = [set(idents(side)) for side in (node.left, node.comparators[0])]
            if any(key in one and (batch - {key}) & other for one, other in (sides, sides[::-1])):
                return True
    return False


@kept
def windowed(view: View) -> frozenset[str]:
    """Return the properties of the project's meters that are means of a window (`deque(maxlen=20)`)."""
    members = view.project.family(view.module) if "meters" in view.module.text else ()
    classes = [s for m in members if "maxlen" in m.text for s in m.scopes if s.kind == "class"]
    return frozenset(
        method.name
        for owner in classes
        for method in owner.defs.values()
        if any(last(item) == "property" for item in method.decorators)
        and any(site.name == "mean" for site in method.sites)
        and any(key in held(owner) for site in method.sites for key in map(dotted, walk(site.call)))
    )


def held(owner: Scope) -> set[str]:
    """Return the attributes of a class that hold so many values."""
    begins = owner.defs.get("__init__")
    found = [bind for binds in begins.binds.values() for bind in binds] if begins is not None else []
    made = [bind for bind in found if isinstance(bind.value, ast.Call) and last(bind.value) == "deque"]
    return {bind.key for bind in made if isinstance(bind.value, ast.Call) and keyword(bind.value, "maxlen") is not None}


def windows(view: View, scope: Scope) -> Iterator[Found]:
    """Yield what a function takes for the mean of a whole pass, though it is that of the last batches."""
    passes = [s for s in scope.stmts if isinstance(s, ast.For) and fills(view, s, scope)] if windowed(view) else []
    for node, stmt in scope.reads if passes else ():
        meter = node.value if node.attr in windowed(view) else None
        shows = isinstance(stmt, ast.Expr)
        of_meter = isinstance(meter, ast.Subscript) and last(meter.value) == "meters" and not shows
        if of_meter and any((loop.end_lineno or 0) < node.lineno for loop in passes):
            yield Found(node, WINDOW.format(name=node.attr))
            return


def fills(view: View, loop: ast.For, scope: Scope) -> bool:
    """Check whether a loop over batches fills meters."""
    return any(site.name == "update" for site in view.effects.block(loop, scope)) and view.kinds.is_loader(
        view.kinds.iterated(loop.iter, scope), scope
    )


@kept
def added(scope: Scope) -> Sums:
    """Return what loops of a function add to names: `total += x` in a loop."""
    table: dict[str, list[tuple[ast.stmt, ast.expr]]] = {}
    for stmt in scope.stmts:
        holder, value = summed(stmt) if isinstance(stmt, ast.Assign | ast.AugAssign) else ("", None)
        target = stmt.targets[0] if isinstance(stmt, ast.Assign) else getattr(stmt, "target", None)
        if holder and value is not None and not isinstance(target, ast.Subscript) and loops(stmt, scope.module):
            table.setdefault(holder, []).append((stmt, value))
    return table


def quotients(stmt: ast.stmt) -> Iterator[tuple[ast.AST, ast.expr, ast.expr]]:
    """Yield the divisions of a statement, as they stand: without those that are scaled on."""
    if isinstance(stmt, ast.AugAssign) and isinstance(stmt.op, ast.Div):
        yield stmt, stmt.target, stmt.value
    if isinstance(stmt, BLOCKS):
        return
    if any(map(SCALES.search, idents(stmt))):
        return
    for node in walk(stmt):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node, node.left, node.right


def wrong(view: View, scope: Scope, stmt: ast.stmt, top: ast.expr, bottom: ast.expr, sums: Sums) -> str:
    """Return what is wrong with a quotient, "" where nothing is for certain."""
    name = dotted(plain(top)) or ""
    parts = reaching(sums.get(name, []), stmt, scope)
    if not parts:
        return ""
    loop = loops(parts[0][0], scope.module)[0]
    if not isinstance(loop, ast.For) or not view.kinds.is_loader(view.kinds.iterated(loop.iter, scope), scope):
        return ""
    unit = counted(view, bottom, loop, scope)
    if unit in ("samples", "tokens") and all(is_mean(view, value, scope) for _, value in parts):
        return "" if single(view, loop, scope) else SUMS_MEANS.format(what=unit)
    if unit == "batches" and all(is_count(view, value, scope) for _, value in parts):
        return "" if single(view, loop, scope) else SUMS_COUNTS
    if unit.startswith("index") and not inside(stmt, loop, scope.module):
        return LAST_INDEX.format(name=unit.partition(" ")[2])
    return ""


def reaching(found: list[tuple[ast.stmt, ast.expr]], stmt: ast.stmt, scope: Scope) -> list[tuple[ast.stmt, ast.expr]]:
    """Return what the last loop before a statement, or around it, adds."""
    near = [each for each in found if each[0].lineno <= stmt.lineno]
    if not near:
        return []
    loop = loops(near[-1][0], scope.module)[0]
    return [each for each in found if loops(each[0], scope.module)[:1] == [loop]]


def single(view: View, loop: ast.For, scope: Scope) -> bool:
    """Check whether a loader certainly gives one sample a turn: by a literal, or by its default."""
    made = list(view.origins.calls_of(view.kinds.iterated(loop.iter, scope), scope))
    for call, home, full in made:
        if not full.endswith("DataLoader"):
            continue
        size = argument(call, 1, "batch_size")
        if size is None and not has_star(call) and keyword(call, "batch_sampler") is None:
            return True
        values = [origin.node for origin in view.origins.of(size, home)]
        if any(constant(value) == 1 or (isinstance(value, ast.Constant) and value.value is None) for value in values):
            return True
    return False


RULE = Rule(
    code="LS064",
    name="mean over the wrong count",
    what=(
        "A reported mean is divided by the wrong number: a sum of the batches' means by the number of samples, a "
        "count of right predictions by the number of batches, or any sum by the last index of its loop. Or the result "
        "is of the last batch, or the last few, alone."
    ),
    why=(
        "The loss is too small by the batch size, the accuracy grows above 1, or most of the data is left out. Nothing "
        "fails, and the figure is compared with others, or chooses the best model."
    ),
    bad="""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

def validate(model, data):
    loader = DataLoader(data, batch_size=64)
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += F.cross_entropy(model(x), y).item()
    return total / len(loader.dataset)
""",
    good="""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

def validate(model, data):
    loader = DataLoader(data, batch_size=64)
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += F.cross_entropy(model(x), y).item() * len(x)
    return total / len(loader.dataset)
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="none",
    remedy="Divide a sum of means by the number of batches, and a sum over samples by their number",
    note=(
        "Told where the source shows what is summed and what is counted: losses of torch with their default or "
        '`reduction="mean"`, `mean()`, the loss of a model of transformers, summed comparisons. Batches of one '
        'sample, `reduction="sum"` and losses out of sight are left alone.'
    ),
)
