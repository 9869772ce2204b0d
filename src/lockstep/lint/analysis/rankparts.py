"""What stands at a name's place in a tuple, or under a key of a dictionary, as helpers give them back."""

import ast
from collections.abc import Iterator

from lockstep.lint.analysis.index import Scope
from lockstep.lint.analysis.nodes import constant, dotted
from lockstep.lint.analysis.origins import element_of, under
from lockstep.lint.analysis.ranknumbers import RankNumbers

__all__ = ["keyed", "placed"]

# How many names and functions a tuple or a dictionary is followed through, and how many values in all.
MAX_STEPS = 3
MAX_VALUES = 60

Value = tuple[ast.expr, Scope]


def placed(numbers: RankNumbers, key: str, scope: Scope) -> Iterator[Value]:
    """What a name is given as part of a tuple (`main, device = set_up()`), but for True, as it is in one process."""
    for bind, home in numbers.bound(key, scope):
        for whole, place in made(numbers, bind.value, home) if bind.path and bind.how == "assign" else ():
            yield from ((part, place) for part in element_of(whole, bind.path) if constant(part) is not True)


def keyed(numbers: RankNumbers, node: ast.Subscript, scope: Scope) -> Iterator[Value]:
    """What stands at a place that is written out, of a dictionary or a tuple (`env["main"]`), but for True."""
    key = constant(node.slice)
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
