"""What stands at a name's place in a tuple, or under a key of a dictionary, as helpers give them back."""

import ast
from collections.abc import Iterator

from lockstep.lint.analysis.index import Scope
from lockstep.lint.analysis.nodes import constant, dotted
from lockstep.lint.analysis.origins import element_of, under
from lockstep.lint.analysis.ranknumbers import RankNumbers

__all__ = ["keyed", "placed"]

# How many names and functions a tuple or a dictionary is followed through.
MAX_STEPS = 3

Value = tuple[ast.expr, Scope]


def placed(numbers: RankNumbers, key: str, scope: Scope) -> Iterator[Value]:
    """What a name is given as part of a tuple (`main, device = set_up()`), but for True, as it is in one process."""
    for bind, home in numbers.bound(key, scope):
        for whole, place in made(numbers, bind.value, home, 0) if bind.path and bind.how == "assign" else ():
            yield from ((part, place) for part in element_of(whole, bind.path) if constant(part) is not True)


def keyed(numbers: RankNumbers, node: ast.Subscript, scope: Scope) -> Iterator[Value]:
    """What stands at a place that is written out, of a dictionary or a tuple (`env["main"]`), but for True."""
    key = constant(node.slice)
    for whole, home in made(numbers, node.value, scope, 0) if isinstance(key, str | int) else ():
        parts = under(whole, key) if isinstance(whole, ast.Dict) else ()
        if isinstance(whole, ast.Tuple) and isinstance(key, int) and key >= 0:
            parts = element_of(whole, (key,))
        yield from ((part, home) for part in parts if constant(part) is not True)


def made(numbers: RankNumbers, value: ast.expr | None, scope: Scope, depth: int) -> Iterator[Value]:
    """The tuples and dictionaries that a value may be, through names and the project's functions."""
    if isinstance(value, ast.Tuple | ast.Dict):
        yield value, scope
    elif isinstance(value, ast.Call) and depth < MAX_STEPS:
        function = numbers.calls.target(value, scope)
        for given in function.returns() if function is not None else ():
            if function is not None:
                yield from made(numbers, given, function, depth + 1)
    elif isinstance(value, ast.Name | ast.Attribute) and depth < MAX_STEPS:
        for bind, home in numbers.bound(dotted(value) or "", scope):
            if bind.how == "assign" and not bind.path:
                yield from made(numbers, bind.value, home, depth + 1)
