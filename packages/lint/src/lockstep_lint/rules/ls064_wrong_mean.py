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
from lockstep_lint.analysis.view import View
from lockstep_lint.events.marks import summed
from lockstep_lint.events.query import things
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

SUMS_MEANS = "divides a sum of the batches' means by the number of {what}: too small by the batch size, divide by the number of batches"
SUMS_COUNTS = "divides a count of right predictions by the number of batches: no accuracy, divide by the number of samples"
ONE_BATCH = "'{name}' is of the last batch alone, and is read after the loop as the result of all: add up in the loop"
WINDOW = "'{name}' is the mean of the meter's last values alone, not of the whole pass: read the mean over all of them"
LAST_INDEX = "divides by the last index of the loop, which is one less than its number of turns: divide by '{name} + 1'"

WORDS = re.compile(r"loss|correct|acc|score|error", re.IGNORECASE)
# What gives back the number that it is called on or given, as far as means go.
READS = {"item", "detach", "cpu", "float", "double", "numpy", "tolist", "clone", "to", "cuda", "type", "int", "long"}
SHOWS = {"print", "info", "debug", "write", "set_postfix", "set_description", "set_postfix_str", "log", "add_scalar"}
CLAMPS = {"max", "float", "int"}
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.With, ast.Try)
SCALES = Words(r"batch_?size|^bs(z|s)?$|world|gpu|num_replicas|process", re.IGNORECASE)
MAX_DEPTH = 5


def check(view: View) -> Iterator[Found]:
    """Looks at quotients of what a loop over batches has added up, and at what they divide by."""
    if WORDS.search(view.module.text) is None or "for " not in view.module.text:
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
    """Whether a loop evaluates: over a loader whose name or function says so, without gradients, to its end."""
    over = view.kinds.iterated(loop.iter, scope)
    named = EVALUATION.search(scope.name) or any(map(EVALUATION.search, idents(over)))
    if not named or not view.kinds.is_loader(over, scope) or unit_test(scope.module):
        return False
    sites = view.effects.block(loop, scope)
    ends = any(isinstance(stmt, ast.Break | ast.Return) and inside(stmt, loop, scope.module) for stmt in scope.stmts)
    return not ends and not any(map(view.steps.backwards, sites)) and not whole(view, over, scope)


def whole(view: View, loader: ast.expr, scope: Scope) -> bool:
    """Whether one batch of a loader may hold all of its data (`batch_size=len(data)`)."""
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
        if is_mean(view, value, scope) or is_count(view, value, scope):
            yield Found(own[-1].stmt, ONE_BATCH.format(name=key))
        elif not within and any(compares(stmt, key, loop, scope) for stmt in after):
            yield Found(after[0], ONE_BATCH.format(name=key))


def is_read(stmt: ast.stmt, key: str) -> bool:
    """Whether a statement itself reads a name."""
    parts = [each for each in ast.iter_child_nodes(stmt) if isinstance(each, ast.expr | ast.keyword)]
    return any(
        isinstance(node, ast.Name) and node.id == key and isinstance(node.ctx, ast.Load)
        for part in parts
        for node in walk(part)
    )


def follows(stmt: ast.stmt, loop: ast.For, binds: list[Bind], scope: Scope) -> bool:
    """Whether a statement comes after a loop in the same turn of the loops around, before the name gets another value."""
    around = loops(loop, scope.module)
    end = (around[0].end_lineno if around else None) or 10**9
    again = min((b.stmt.lineno for b in binds if b.stmt.lineno > (loop.end_lineno or 0)), default=10**9)
    return (loop.end_lineno or 0) < stmt.lineno <= min(end, again)


def takes(stmt: ast.stmt, key: str) -> bool:
    """Whether a statement may keep a value, rather than only show it."""
    call = stmt.value if isinstance(stmt, ast.Expr) else None
    return not isinstance(call, ast.Call) or last(call) not in SHOWS


def compares(stmt: ast.stmt, key: str, loop: ast.For, scope: Scope) -> bool:
    """Whether a statement compares what a name holds with another part of the last batch."""
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
    """The properties of the project's meters that are means of a window (`deque(maxlen=20)`)."""
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
    """The attributes of a class that hold so many values."""
    begins = owner.defs.get("__init__")
    found = [bind for binds in begins.binds.values() for bind in binds] if begins is not None else []
    made = [bind for bind in found if isinstance(bind.value, ast.Call) and last(bind.value) == "deque"]
    return {bind.key for bind in made if isinstance(bind.value, ast.Call) and keyword(bind.value, "maxlen") is not None}


def windows(view: View, scope: Scope) -> Iterator[Found]:
    """What a function takes for the mean of a whole pass, though it is that of the last batches."""
    passes = [s for s in scope.stmts if isinstance(s, ast.For) and fills(view, s, scope)] if windowed(view) else []
    for node, stmt in scope.reads if passes else ():
        meter = node.value if node.attr in windowed(view) else None
        shows = isinstance(stmt, ast.Expr)
        if isinstance(meter, ast.Subscript) and last(meter.value) == "meters" and not shows:
            if any((loop.end_lineno or 0) < node.lineno for loop in passes):
                yield Found(node, WINDOW.format(name=node.attr))
                return


def fills(view: View, loop: ast.For, scope: Scope) -> bool:
    """Whether a loop over batches fills meters."""
    return any(site.name == "update" for site in view.effects.block(loop, scope)) and view.kinds.is_loader(
        view.kinds.iterated(loop.iter, scope), scope
    )


@kept
def added(scope: Scope) -> dict[str, list[tuple[ast.stmt, ast.expr]]]:
    """What loops of a function add to names: `total += x` in a loop."""
    table: dict[str, list[tuple[ast.stmt, ast.expr]]] = {}
    for stmt in scope.stmts:
        holder, value = summed(stmt) if isinstance(stmt, ast.Assign | ast.AugAssign) else ("", None)
        target = stmt.targets[0] if isinstance(stmt, ast.Assign) else getattr(stmt, "target", None)
        if holder and value is not None and not isinstance(target, ast.Subscript) and loops(stmt, scope.module):
            table.setdefault(holder, []).append((stmt, value))
    return table


def quotients(stmt: ast.stmt) -> Iterator[tuple[ast.AST, ast.expr, ast.expr]]:
    """The divisions of a statement, as they stand: without those that are scaled on."""
    if isinstance(stmt, ast.AugAssign) and isinstance(stmt.op, ast.Div):
        yield stmt, stmt.target, stmt.value
    if isinstance(stmt, BLOCKS):
        return
    if any(map(SCALES.search, idents(stmt))):
        return
    for node in walk(stmt):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node, node.left, node.right


def wrong(
    view: View, scope: Scope, stmt: ast.stmt, top: ast.expr, bottom: ast.expr, sums: dict[str, list[tuple[ast.stmt, ast.expr]]]
) -> str:
    """What is wrong with a quotient, "" where nothing is for certain."""
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


def plain(node: ast.expr) -> ast.expr:
    """A value without what reads or moves it (`float(total.item())`)."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
            node = node.func.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLAMPS and node.args:
            given = [each for each in node.args if constant(each) is None]
            if len(given) != 1:
                return node
            node = given[0]
        elif isinstance(node, ast.Attribute) and node.attr == "data":
            node = node.value
        elif isinstance(node, ast.Subscript) and last(node.value) == "data" and constant(node.slice) == 0:
            node = node.value
        else:
            return node


def reaching(
    found: list[tuple[ast.stmt, ast.expr]], stmt: ast.stmt, scope: Scope
) -> list[tuple[ast.stmt, ast.expr]]:
    """What the last loop before a statement, or around it, adds."""
    near = [each for each in found if each[0].lineno <= stmt.lineno]
    if not near:
        return []
    loop = loops(near[-1][0], scope.module)[0]
    return [each for each in found if loops(each[0], scope.module)[:1] == [loop]]


def counted(view: View, node: ast.expr, loop: ast.For, scope: Scope, depth: int = MAX_DEPTH) -> str:
    """What a divisor counts: samples, tokens, batches, or the turns before the last; "" where that is not known."""
    node = plain(node)
    if isinstance(node, ast.Call) and last(node) == "len" and isinstance(node.func, ast.Name) and len(node.args) == 1:
        return length_of(view, node.args[0], loop, scope)
    name = dotted(node)
    if name is None or depth == 0:
        return ""
    binds = scope.binds.get(name, [])
    if any(bind.how == "for" for bind in binds):
        return "index " + name if len(binds) == 1 and is_index(name, loop) and not leaves(loop, scope) else ""
    turns = [bind for bind in binds if bind.how == "aug"]
    if turns:
        if not all(isinstance(b.stmt, ast.AugAssign) and isinstance(b.stmt.op, ast.Add) for b in turns):
            return ""
        own = [bind for bind in turns if loops(bind.stmt, scope.module)[:1] == [loop]]
        units = {unit_of(view, bind.value, loop, scope) for bind in own}
        return units.pop() if len(units) == 1 else ""
    if len(binds) == 1 and binds[0].how == "assign" and not binds[0].path and binds[0].value is not None:
        return counted(view, binds[0].value, loop, scope, depth - 1) if binds[0].stmt.lineno < node.lineno else ""
    return ""


def is_index(name: str, loop: ast.For) -> bool:
    """Whether a name counts the turns of a loop from 0."""
    over = loop.iter
    while isinstance(over, ast.Call) and last(over) not in ("enumerate", "range") and over.args:
        over = over.args[0]
    if not isinstance(over, ast.Call) or last(over) != "enumerate" or len(over.args) > 1 or over.keywords:
        return False
    return any(key == name and path == (0,) for key, path in targets(loop.target))


def leaves(loop: ast.For, scope: Scope) -> bool:
    """Whether a loop may end before its data does, or passes over a turn."""
    return any(
        isinstance(stmt, ast.Break | ast.Continue | ast.Return) and inside(stmt, loop, scope.module)
        for stmt in scope.stmts
    )


def length_of(view: View, node: ast.expr, loop: ast.For, scope: Scope) -> str:
    """What the length of an object counts, beside a loop over batches."""
    over = view.kinds.iterated(loop.iter, scope)
    if isinstance(node, ast.Attribute) and node.attr in ("dataset", "sampler"):
        alike = dotted(node.value) == dotted(over) or bool(things(view, node.value, scope) & things(view, over, scope))
        return "samples" if alike else ""
    if dotted(node) is not None and dotted(node) == dotted(over):
        return "batches"
    made = view.kinds.loader_call(over, scope)
    if made is None:
        return ""
    if made[0] in things(view, node, scope):
        return "batches"
    given = (argument(made[0], 0, "dataset"), keyword(made[0], "sampler"))
    found = things(view, node, scope)
    return "samples" if any(things(view, each, made[1]) & found for each in given if each is not None) else ""


def unit_of(view: View, value: ast.expr | None, loop: ast.For, scope: Scope, depth: int = 3) -> str:
    """What a counter adds in each turn."""
    value = plain(value) if value is not None else None
    if constant(value) == 1:
        return "batches"
    if isinstance(value, ast.Subscript) and last(value.value) == "shape":
        return "samples" if constant(value.slice) == 0 else ""
    if isinstance(value, ast.Call):
        name = last(value)
        if name == "size" and isinstance(value.func, ast.Attribute):
            return "samples" if len(value.args) == 1 and constant(value.args[0]) == 0 else ""
        if name == "len" and value.args:
            whole = {key for key, path in targets(loop.target)}
            return "samples" if isinstance(value.args[0], ast.Subscript) or unpacked(value.args[0], scope, whole) else ""
        if name in ("numel", "nelement"):
            return "tokens"
        if is_count(view, value, scope):
            return "tokens"
    key = dotted(value)
    binds = [bind for bind in scope.binds.get(key or "", []) if bind.how == "assign" and not bind.path]
    own = [bind for bind in binds if inside(bind.stmt, loop, scope.module)]
    if depth and own and len(own) == len([b for b in scope.binds.get(key or "", []) if inside(b.stmt, loop, scope.module)]):
        units = {unit_of(view, bind.value, loop, scope, depth - 1) for bind in own}
        return units.pop() if len(units) == 1 else ""
    return ""


def unpacked(node: ast.expr, scope: Scope, whole: set[str]) -> bool:
    """Whether a value is one part of a batch, not the tuple or dictionary that a loader gives."""
    key = dotted(node)
    return key is not None and (key not in whole or len(whole) > 2)


def is_mean(view: View, value: ast.expr | None, scope: Scope, depth: int = MAX_DEPTH) -> bool:
    """Whether a value certainly is a mean over a batch."""
    value = plain(value) if value is not None else None
    if value is None or depth == 0:
        return False
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.Add) and all(
            is_mean(view, each, scope, depth - 1) for each in (value.left, value.right)
        )
    if isinstance(value, ast.Call):
        return gives_mean(view, value, scope)
    if isinstance(value, ast.Attribute | ast.Subscript) and of_transformers(view, value, scope):
        return True
    return all_bound(view, value, scope, is_mean, depth)


def all_bound(view: View, value: ast.expr, scope: Scope, wanted, depth: int) -> bool:  # type: ignore[no-untyped-def]
    """Whether all that a name may hold is so."""
    key = dotted(value)
    if key is None:
        return False
    binds = view.origins.binds(key, scope, value.lineno)
    scaled = any(
        isinstance(bind.stmt, ast.AugAssign) and not isinstance(bind.stmt.op, ast.Add | ast.Sub)
        for bind in scope.binds.get(key, [])
    )
    return (
        bool(binds)
        and not scaled
        and all(
            bind.how == "assign" and not bind.path and home is scope and wanted(view, bind.value, scope, depth - 1)
            for bind, home in binds
        )
    )


def gives_mean(view: View, call: ast.Call, scope: Scope) -> bool:
    """Whether a call gives a mean over all that it is given: a loss of torch by its default, or `mean()`."""
    full, name = view.names.qualify(call.func, scope), last(call)
    if name == "mean":
        whole = not call.keywords and len(call.args) == int(full in ("torch.mean", "numpy.mean"))
        return whole and (bool(full) or isinstance(call.func, ast.Attribute))
    if full.startswith("torch.nn.functional."):
        return (name.endswith("_loss") or "cross_entropy" in name) and by_mean(call)
    if name == "sum" and not (call.args or call.keywords or full) and isinstance(call.func, ast.Attribute):
        return is_mean(view, call.func.value, scope, 2)  # of one number
    made = [(origin.call, origin.scope) for origin in view.origins.of(call.func, scope)]
    made = of_class(call.func, scope) if made == [(None, scope)] else made
    return bool(made) and all(
        each is not None
        and view.names.qualify(each.func, home).startswith("torch.nn.")
        and last(each).endswith("Loss")
        and by_mean(each)
        for each, home in made
    )


def of_class(func: ast.expr, scope: Scope) -> list[tuple[ast.Call | None, Scope]]:
    """What the class of a method gives an attribute in its own body (`criterion = MSELoss()`)."""
    owner, key = scope.owner, dotted(func) or ""
    binds = owner.binds.get(key[5:], []) if owner is not None and key.startswith("self.") else []
    return [(bind.value if isinstance(bind.value, ast.Call) else None, owner) for bind in binds if owner is not None]


def by_mean(call: ast.Call) -> bool:
    """Whether a loss of torch takes the mean, by its default or by its arguments."""
    if has_star(call) or any(keyword(call, old) is not None for old in ("reduce", "size_average")):
        return False
    given = keyword(call, "reduction")
    return given is None or constant(given) == "mean"


def of_transformers(view: View, value: ast.Attribute | ast.Subscript, scope: Scope) -> bool:
    """Whether a value is the loss that a model of transformers gives for labels, a mean over them."""
    named = value.attr if isinstance(value, ast.Attribute) else constant(value.slice)
    holder = value.value
    if named != "loss" or not isinstance(holder, ast.Call | ast.Name):
        return False
    calls = [holder] if isinstance(holder, ast.Call) else []
    if isinstance(holder, ast.Name):
        binds = [bind for bind, home in view.origins.binds(holder.id, scope, value.lineno) if home is scope]
        calls = [bind.value for bind in binds if isinstance(bind.value, ast.Call) and not bind.path]
        if len(calls) != len(binds):
            return False
    hugging = view.project.says(scope.module, "from_pretrained")
    return bool(calls) and all(
        hugging
        and (keyword(call, "labels") is not None or any(item.arg is None for item in call.keywords))
        and view.kinds.run_class(call.func, scope) is None
        for call in calls
    )


def is_count(view: View, value: ast.expr | None, scope: Scope, depth: int = MAX_DEPTH) -> bool:
    """Whether a value certainly counts where a comparison holds (`(guess == y).sum()`)."""
    value = plain(value) if value is not None else None
    if value is None or depth == 0:
        return False
    if isinstance(value, ast.Call) and last(value) in ("sum", "count_nonzero"):
        full = view.names.qualify(value.func, scope)
        inner = value.args[0] if full or isinstance(value.func, ast.Name) else getattr(value.func, "value", None)
        whole = not value.keywords and len(value.args) == int(bool(full) or isinstance(value.func, ast.Name))
        return whole and is_compared(view, inner, scope, depth - 1)
    return all_bound(view, value, scope, is_count, depth)


def is_compared(view: View, value: ast.expr | None, scope: Scope, depth: int) -> bool:
    """Whether a value is a comparison, element by element."""
    value = plain(value) if value is not None else None
    if isinstance(value, ast.Compare):
        return isinstance(value.ops[0], ast.Eq | ast.NotEq)
    if isinstance(value, ast.Call):
        return last(value) == "eq" and bool(value.args)
    if isinstance(value, ast.Subscript):
        return is_compared(view, value.value, scope, depth)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitAnd | ast.Mult):
        return any(is_compared(view, each, scope, depth) for each in (value.left, value.right))
    return depth > 0 and value is not None and all_bound(view, value, scope, is_compared, depth)


def single(view: View, loop: ast.For, scope: Scope) -> bool:
    """Whether a loader certainly gives one sample a turn: by a literal, or by its default."""
    made = [each for each in view.origins.calls_of(view.kinds.iterated(loop.iter, scope), scope)]
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
    what="x",
    why="x",
    bad="""
import torch
""",
    good="""
import torch
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="none",
    remedy="Divide a sum of means by the number of batches, a sum over samples by their number",
)
