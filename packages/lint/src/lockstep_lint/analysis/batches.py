"""The batches of a loop by their names: what is taken out of them, what was moved or replaced before."""

import ast
import re

from lockstep_lint.analysis.context import above, parted
from lockstep_lint.analysis.index import Bind, Site
from lockstep_lint.analysis.nodes import base, element_of, idents, keyword, last, strings, targets, walk

__all__ = [
    "asked",
    "comprehension_names",
    "moved",
    "moves_device",
    "placed",
    "replaced",
    "surely_replaced",
    "taken",
    "unpacked",
    "unwrapped",
]

# What gives the parts of a batch.
PARTS = ("items", "values", "chunk", "split")
TYPE = re.compile(r"^b?(float|u?int)\d*$")


def asked(value: ast.expr | None) -> ast.expr | None:
    """What `next(iterator)` or `iterator.__next__()` asks, also for a part of what it gives; the loader where that
    begins anew (`next(iter(loader))`).
    """
    while isinstance(value, ast.Subscript):
        value = value.value
    if not isinstance(value, ast.Call) or last(value) not in ("next", "__next__"):
        return None
    method = isinstance(value.func, ast.Attribute) and not value.args
    given = value.func.value if method else next(iter(value.args), None)  # type: ignore[attr-defined]
    if isinstance(given, ast.Call) and last(given) in ("iter", "enumerate") and given.args:
        return given.args[0]
    return given


def unwrapped(node: ast.expr) -> ast.expr:
    """What stands in a `Variable(...)`."""
    return node.args[0] if isinstance(node, ast.Call) and last(node) == "Variable" and node.args else node


def taken(value: ast.expr, own: set[str]) -> bool:
    """Whether a value is a part of a batch (`batch["x"]`, `batch.items()`, `enumerate(batch)`)."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("enumerate", "zip"):
        return any(taken(arg, own) for arg in value.args)
    plain = isinstance(value, ast.Name | ast.Subscript) or (isinstance(value, ast.Call) and last(value) in PARTS)
    root = base(value)
    return plain and isinstance(root, ast.Name) and root.id in own


def placed(bind: Bind) -> ast.expr:
    """What a binding takes its value from: what stands at its place in a tuple that is written out, or the whole."""
    whole = bind.value or ast.Constant(None)
    return next(element_of(whole, bind.path), whole)


def moves_device(call: ast.Call) -> bool:
    """Whether `.to(...)` names a device and not only a type."""
    first = call.args[0] if call.args else keyword(call, "device")
    if first is None:
        return False
    words = [*idents(first), *(text for text in strings(first))]
    return not any(word in ("cpu", "dtype", "half", "long", "double", "bool") or TYPE.match(word) for word in words)


def moved(value: ast.expr) -> bool:
    """Whether a value was moved to a device already (`batch["x"].to(device).float()`)."""
    return any(
        isinstance(node, ast.Call) and (last(node) == "cuda" or (last(node) == "to" and moves_device(node)))
        for node in walk(value)
    )


def surely_replaced(site: Site, name: str, loop: ast.For) -> bool:
    """The same, in every turn of a loop (`batch = to_device(batch)`)."""
    binds = [b for b in site.scope.binds.get(name, []) if loop.lineno < b.stmt.lineno < site.line]
    tests = [n for n, _ in above(binds[-1].stmt, site.module) if isinstance(n, ast.If)] if binds else []
    around = {n for n, _ in above(site.stmt, site.module)}
    return around.issuperset(tests) and replaced(site, name, set(), loop.lineno)


def chosen(bind: Bind) -> bool:
    """Whether a name is given what a comparison picks out of a batch (`data = data[keep == 0]`)."""
    value = placed(bind)
    return isinstance(value, ast.Subscript) and any(isinstance(node, ast.Compare) for node in walk(value.slice))


def unpacked(site: Site, own: set[str], start: int) -> set[str]:
    """The names that get parts of a batch, as they are, between a line and a call (`graph, atoms = batch`)."""
    return {
        key
        for key, binds in site.scope.binds.items()
        for bind in binds
        if start <= bind.stmt.lineno < site.line and bind.how == "assign" and taken(placed(bind), own)
    }


def replaced(site: Site, name: str, own: set[str], start: int = 0) -> bool:
    """Whether a batch's name was given something else, by a function, before a call (`batch = data.get(batch)`), what
    was moved already, or a choice of its samples, which is a copy that is not pinned.
    """
    before = [b for b in site.scope.binds.get(name, []) if start < b.stmt.lineno < site.line and b.how == "assign"]
    binds = [b for b in before if b.stmt is not site.stmt]
    value = unwrapped(binds[-1].value) if binds and binds[-1].value is not None else None
    if binds and (chosen(binds[-1]) or (moved(placed(binds[-1])) and not parted(site, binds[-1].stmt))):
        return True
    root = base(value) if isinstance(value, ast.Call) and asked(value) is None else None
    return isinstance(root, ast.Name) and root.id not in (name, *own)


def comprehension_names(site: Site, own: set[str]) -> set[str]:
    """The variables of comprehensions in the statement that run over the loop's variable, and the parameters of
    lambdas that are handed on with it (`tree_map(lambda x: x.to(device), batch)`).
    """
    found: set[str] = set()
    for node in walk(site.stmt):
        if isinstance(node, ast.Call) and any(
            isinstance(root := base(arg), ast.Name) and root.id in own for arg in node.args
        ):
            found.update(p.arg for arg in node.args if isinstance(arg, ast.Lambda) for p in arg.args.args)
        if isinstance(node, ast.comprehension):
            root = base(node.iter)
            if isinstance(root, ast.Name) and root.id in own:
                found.update(key for key, _ in targets(node.target))
    return found
