"""What stands at a name's place in a tuple, or under a key of a dictionary, as helpers give them back."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import constant, dotted, element_of
from lockstep_lint.analysis.origins import under
from lockstep_lint.analysis.ranknumbers import RankNumbers

__all__ = ["in_table", "in_tuple"]

# How many names and functions a tuple or a dictionary is followed through, and how many values in all.
MAX_STEPS = 3
MAX_VALUES = 60

Value = tuple[ast.expr, Scope]


def in_tuple(numbers: RankNumbers, key: str, scope: Scope) -> Iterator[Value]:
    """What a name is given as part of a tuple (`main, device = set_up()`), and whatever else it is given then, but for
    True, as it is in one process.
    """
    binds = numbers.bound(key, scope)
    if not any(bind.path for bind, _ in binds):
        return
    for bind, home in binds:
        if not bind.path and bind.value is not None and constant(bind.value) is None:
            yield bind.value, home
        for whole, place in made(numbers, bind.value, home) if bind.path and bind.how == "assign" else ():
            yield from ((part, place) for part in element_of(whole, bind.path) if constant(part) is not True)


def in_table(numbers: RankNumbers, node: ast.Subscript, scope: Scope) -> Iterator[Value]:
    """What stands at a place that is written out, of a dictionary or a tuple (`env["main"]`), or is put there, but for
    True.
    """
    key = constant(node.slice)
    for stmt in scope.stmts if isinstance(key, str | int) else ():
        if isinstance(stmt, ast.Assign) and constant(stmt.value) is not True:
            places = [target for target in stmt.targets if isinstance(target, ast.Subscript)]
            if any(dotted(p.value) == dotted(node.value) and constant(p.slice) == key for p in places):
                yield stmt.value, scope
    for whole, home in made(numbers, node.value, scope) if isinstance(key, str | int) else ():
        parts = under(whole, key) if isinstance(whole, ast.Dict) else ()
        if isinstance(whole, ast.Tuple) and isinstance(key, int) and key >= 0:
            parts = element_of(whole, (key,))
        yield from ((part, home) for part in parts if constant(part) is not True)


def made(numbers: RankNumbers, start: ast.expr | None, scope: Scope) -> Iterator[Value]:
    """The tuples and dictionaries that a value may be, through names and the project's functions."""
    queue = [(start, scope, 0)]
    seen: set[tuple[object, Scope]] = set()
    while queue and len(seen) < MAX_VALUES:
        value, home, depth = queue.pop(0)
        if isinstance(value, ast.Tuple | ast.Dict):
            yield value, home
        elif isinstance(value, ast.Call | ast.Name | ast.Attribute) and depth < MAX_STEPS:
            source = numbers.calls.target(value, home) if isinstance(value, ast.Call) else dotted(value)
            if (source, home) not in seen:
                seen.add((source, home))
                queue += [(given, place, depth + 1) for given, place in behind(numbers, source, home)]


def behind(numbers: RankNumbers, source: Scope | str | None, scope: Scope) -> Iterator[Value]:
    """What a function returns, or what a name is given as it is."""
    if isinstance(source, Scope):
        yield from ((value, source) for value in source.returns())
    else:
        binds = numbers.bound(source or "", scope)
        yield from ((b.value, at) for b, at in binds if b.value is not None and b.how == "assign" and not b.path)
