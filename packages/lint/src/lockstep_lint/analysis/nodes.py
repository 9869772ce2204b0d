"""Query syntax trees."""

import ast
import re
from ast import AST, Attribute, Call, Constant, Name, Subscript
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

__all__ = [
    "REFERENCES",
    "SEQUENCES",
    "Words",
    "argument",
    "base",
    "constant",
    "dotted",
    "element_of",
    "has_star",
    "head",
    "idents",
    "is_none",
    "is_true",
    "keyword",
    "last",
    "mentions",
    "strings",
    "targets",
    "walk",
]

# Tuples: `isinstance` takes twice as long with a union that is made anew each time.
REFERENCES = (Name, Attribute)
SEQUENCES = (ast.Tuple, ast.List)

# The fields of each node class that can hold an expression or a statement: without contexts and operators a walk
# visits half the nodes.
_SKIPPED = {
    "ctx", "n", "s", "op", "ops", "type_comment", "type_ignores", "kind", "attr", "id", "name", "arg", "level",
    "module",
}  # fmt: skip
_Fields = Callable[[ast.AST], tuple[Any, ...]]
_CHILDREN: dict[type[ast.AST], _Fields] = {}


def _children(kind: type[ast.AST]) -> _Fields:
    names = [name for name in reversed(kind._fields) if name not in _SKIPPED]
    # A getter returns a tuple for two names or more: a text that a walk passes over makes up the number.
    fields = _CHILDREN[kind] = attrgetter(*["__doc__"] * (2 - len(names)), *names)
    return fields


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield `node` and everything below it, parents first, in source order."""
    stack = [node]
    known, add = _CHILDREN, stack.append
    while stack:
        current = stack.pop()
        yield current
        kind = current.__class__
        if kind is Name or kind is Constant:  # two thirds of all nodes, with nothing below
            continue
        fields = known.get(kind) or _children(kind)
        for value in fields(current):
            if value.__class__ is list:
                for item in reversed(value):
                    if isinstance(item, AST):
                        add(item)
            elif value is not None and isinstance(value, AST):
                add(value)


def dotted(node: ast.AST | None) -> str | None:
    """Return `a.b.c` for a chain of names and attributes, else None."""
    rest = ""
    while node.__class__ is Attribute:  # asked a thousand times a file: `isinstance` costs three times as much
        rest = f".{node.attr}{rest}"
        node = node.value
    return f"{node.id}{rest}" if node.__class__ is Name else None


def head(node: ast.AST | None) -> str | None:
    """Return `a` for a chain of names and attributes `a.b.c`, else None."""
    while node.__class__ is Attribute:
        node = node.value
    return node.id if node.__class__ is Name else None


def base(node: ast.AST) -> ast.AST:
    """Return the start of a chain of attributes, calls and subscripts."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Await):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return node


def last(node: ast.AST | None) -> str:
    """Return the last identifier of a name, attribute, call or subscript; "" for others."""
    while True:
        kind = node.__class__
        if kind is Attribute:
            return node.attr  # type: ignore[union-attr, no-any-return]
        if kind is Name:
            return node.id  # type: ignore[union-attr, no-any-return]
        if kind is Call:
            node = node.func  # type: ignore[union-attr]
        elif kind is Subscript:
            node = node.value  # type: ignore[union-attr]
        else:
            return ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of the call's keyword argument `name`."""
    for item in call.keywords:  # asked a hundred times a call: a generator here would cost a twentieth of a run
        if item.arg == name:
            return item.value
    return None


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """Return the argument `name`, given by keyword or at `position`."""
    found = keyword(call, name)
    if found is None and position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
        return call.args[position]
    return found


def has_star(call: ast.Call) -> bool:
    """Check whether the call unpacks `*args` or `**kwargs`."""
    return any(item.arg is None for item in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)


def constant(node: ast.AST | None) -> object:
    """Return the value of a literal; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, int | float) else None
    return node.value if isinstance(node, ast.Constant) else None


def is_none(node: ast.AST) -> bool:
    """Check whether an expression is the literal None."""
    return isinstance(node, ast.Constant) and node.value is None


def is_true(node: ast.AST | None) -> bool:
    """Check whether the node is the literal True."""
    return isinstance(node, ast.Constant) and node.value is True


def idents(node: ast.AST) -> Iterator[str]:
    """Yield every identifier and attribute name in an expression."""
    for item in walk(node):
        if item.__class__ is Name:
            yield item.id
        elif item.__class__ is Attribute:
            yield item.attr


def mentions(node: ast.AST, key: str) -> bool:
    """Check whether the expression reads the name or attribute chain `key`."""
    return any(isinstance(item, REFERENCES) and dotted(item) == key for item in walk(node))


def strings(node: ast.AST) -> Iterator[str]:
    """Yield every string literal in a tree."""
    for item in walk(node):
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            yield item.value


def targets(node: ast.AST) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names that an assignment target binds, each with its position in a tuple."""
    stack: list[tuple[ast.AST, tuple[int, ...]]] = [(node, ())]
    while stack:
        item, path = stack.pop()
        if isinstance(item, SEQUENCES):
            stack.extend((element, (*path, i)) for i, element in enumerate(item.elts))
        elif isinstance(item, ast.Starred):
            stack.append((item.value, path))
        else:
            name = dotted(item)
            if name is not None:
                yield name, path


def element_of(value: ast.expr | None, path: tuple[int, ...]) -> Iterator[ast.expr]:
    """Yield an element of a literal tuple; nothing if unknown."""
    for place in path:
        if not isinstance(value, SEQUENCES) or place >= len(value.elts):
            return
        if any(isinstance(each, ast.Starred) for each in value.elts[: place + 1]):
            return
        value = value.elts[place]
    if value is not None:
        yield value


class Words(dict[str, bool]):
    """A pattern for names that caches its answers. A few names are asked thousands of times."""

    def __init__(self, pattern: str, flags: int = 0) -> None:
        super().__init__()
        self.pattern = re.compile(pattern, flags)
        self.search = self.__getitem__  # whether the pattern occurs in a name

    def __missing__(self, name: str) -> bool:
        found = self[name] = self.pattern.search(name) is not None
        return found
