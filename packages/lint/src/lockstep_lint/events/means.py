"""Tell what a value that a loop adds up is: a mean over a batch, or a count; and what a divisor counts."""

import ast
from collections.abc import Callable

from lockstep_lint.analysis.context import inside, loops
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import argument, constant, dotted, has_star, keyword, last, targets
from lockstep_lint.analysis.view import View
from lockstep_lint.events.query import things

__all__ = ["counted", "is_count", "is_mean", "plain"]

# What gives back the number that it is called on or given, as far as means go.
READS = {"item", "detach", "cpu", "float", "double", "numpy", "tolist", "clone", "to", "cuda", "type", "int", "long"}
CLAMPS = {"max", "float", "int"}
MAX_DEPTH = 5
Wanted = Callable[[View, ast.expr | None, Scope, int], bool]


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
        elif (isinstance(node, ast.Attribute) and node.attr == "data") or (
            isinstance(node, ast.Subscript) and last(node.value) == "data" and constant(node.slice) == 0
        ):
            node = node.value
        else:
            return node


def counted(view: View, node: ast.expr, loop: ast.For, scope: Scope, depth: int = MAX_DEPTH) -> str:
    """Return what a divisor counts: samples, tokens, batches, or the turns before the last; "" if not known."""
    node = plain(node)
    if isinstance(node, ast.Call) and last(node) == "len" and isinstance(node.func, ast.Name) and len(node.args) == 1:
        return length_of(view, node.args[0], loop, scope)
    name = dotted(node)
    if name is None or depth == 0:
        return ""
    binds = scope.binds.get(name, [])
    before = [bind for bind in binds if bind.stmt.lineno < node.lineno]
    if any(bind.how == "for" for bind in binds):
        own = before and before[-1].stmt is loop and all(bind.how == "for" for bind in binds)
        return f"index {name}" if own and is_index(name, loop) and not leaves(loop, scope) else ""
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
    """Check whether a name counts the turns of a loop from 0."""
    over = loop.iter
    while isinstance(over, ast.Call) and last(over) not in ("enumerate", "range") and over.args:
        over = over.args[0]
    if not isinstance(over, ast.Call) or last(over) != "enumerate" or len(over.args) > 1 or over.keywords:
        return False
    return any(key == name and path == (0,) for key, path in targets(loop.target))


def leaves(loop: ast.For, scope: Scope) -> bool:
    """Check whether a loop may end before its data does, or passes over a turn."""
    return any(
        isinstance(stmt, ast.Break | ast.Continue | ast.Return) and inside(stmt, loop, scope.module)
        for stmt in scope.stmts
    )


def length_of(view: View, node: ast.expr, loop: ast.For, scope: Scope) -> str:
    """Return what the length of an object counts, beside a loop over batches."""
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
    """Return what a counter adds in each turn."""
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
            return (
                "samples" if isinstance(value.args[0], ast.Subscript) or unpacked(value.args[0], scope, whole) else ""
            )
        if name in ("numel", "nelement"):
            return "tokens"
        if is_count(view, value, scope):
            return "tokens"
    key = dotted(value)
    binds = [bind for bind in scope.binds.get(key or "", []) if bind.how == "assign" and not bind.path]
    own = [bind for bind in binds if inside(bind.stmt, loop, scope.module)]
    if (
        depth
        and own
        and len(own) == len([b for b in scope.binds.get(key or "", []) if inside(b.stmt, loop, scope.module)])
    ):
        units = {unit_of(view, bind.value, loop, scope, depth - 1) for bind in own}
        return units.pop() if len(units) == 1 else ""
    return ""


def unpacked(node: ast.expr, scope: Scope, whole: set[str]) -> bool:
    """Check whether a value is one part of a batch, not the tuple or dictionary that a loader gives."""
    key = dotted(node)
    return key is not None and (key not in whole or len(whole) > 2)


def is_mean(view: View, value: ast.expr | None, scope: Scope, depth: int = MAX_DEPTH) -> bool:
    """Check whether a value certainly is a mean over a batch."""
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


def all_bound(view: View, value: ast.expr, scope: Scope, wanted: Wanted, depth: int) -> bool:
    """Check whether all that a name may hold is so."""
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
    """Check whether a call gives a mean over all that it is given: a loss of torch by its default, or `mean()`."""
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
    """Return what the class of a method gives an attribute in its own body (`criterion = MSELoss()`)."""
    owner, key = scope.owner, dotted(func) or ""
    binds = owner.binds.get(key[5:], []) if owner is not None and key.startswith("self.") else []
    return [(bind.value if isinstance(bind.value, ast.Call) else None, owner) for bind in binds if owner is not None]


def by_mean(call: ast.Call) -> bool:
    """Check whether a loss of torch takes the mean, by its default or by its arguments."""
    if has_star(call) or any(keyword(call, old) is not None for old in ("reduce", "size_average")):
        return False
    given = keyword(call, "reduction")
    return given is None or constant(given) == "mean"


def of_transformers(view: View, value: ast.Attribute | ast.Subscript, scope: Scope) -> bool:
    """Check whether a value is the loss that a model of transformers gives for labels, a mean over them."""
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
    """Check whether a value certainly counts where a comparison holds (`(guess == y).sum()`)."""
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
    """Check whether a value is a comparison, element by element."""
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
