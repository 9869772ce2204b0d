"""The mistakes that can be put into a source: each a small edit of the kind that a person makes.

for mutant in mutants(source):
    changed = mutant.put_into(source)

What cannot matter to a result is left out: annotations, texts, messages, what is logged or raised. So are the arguments
of calls that kill or remove, since a mistake there could reach beyond the tests.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Mutant", "mutants"]

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
TURNED = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add}
FACTORS = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd)
OTHERS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "ceil": "floor", "floor": "ceil"}
OTHERS |= {"maximum": "minimum", "minimum": "maximum"}
VALUES = {"detach", "clone", "copy", "contiguous", "double", "float", "abs", "isfinite", "sqrt", "square"}
OPTIONAL = {
    "group",
    "async_op",
    "dtype",
    "device",
    "dim",
    "timeout",
    "key",
    "reverse",
    "default",
    "alpha",
    "min",
    "max",
}
TOLD = {"say", "print", "warn", "warning", "info", "error", "debug", "exception", "note"}
DANGEROUS = {"kill", "killpg", "rmtree", "unlink", "rmdir", "remove", "removedirs", "pthread_kill", "getattr", "sleep"}
TEXT = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)
APART = {"annotation", "returns", "decorator_list", "ctx", "type_params"}
SIMPLE = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Tuple, ast.Dict)


class Mutant(NamedTuple):
    """One edit: `text` in the place of the bytes from `start` to `end` of a UTF-8 source, in the line `line`."""

    kind: str
    line: int
    start: int
    end: int
    text: str

    def put_into(self, source: str) -> str:
        """The source with the mistake in it."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()


def mutants(source: str) -> list[Mutant]:
    """All mistakes that can be put into a source, each once, in the order of their places."""
    starts = [0]
    for row in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    found = {}
    for node, kind, new in _edits(ast.parse(source), ""):
        text = new if isinstance(new, str) else ast.unparse(new)
        if isinstance(new, ast.expr) and not isinstance(new, SIMPLE):
            text = f"({text})"
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        found.setdefault((start, end, text), Mutant(kind, node.lineno, start, end, text))
    return sorted(found.values(), key=lambda mutant: mutant[1:])


def _edits(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str, ast.AST | str]]:
    """(what is replaced, kind of mistake, by what) of a node and of all below it."""
    if isinstance(node, TEXT) or (isinstance(node, ast.Call) and _name(node) in TOLD):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("', '.join", "' and '.join"):  # a list for a person
        return
    if isinstance(node, ast.Assign) and any(ast.unparse(t) in ("__all__", "__slots__") for t in node.targets):
        return
    if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name) and _tells(node):
        return
    yield from ((node, kind, new) for kind, new in _of_statement(node, function))
    yield from ((node, kind, new) for kind, new in RULES.get(type(node), _nothing)(node))
    for test in _conditions(node):
        yield test, "inverted condition", ast.UnaryOp(ast.Not(), test)
    if isinstance(node, ast.Call) and _name(node) in DANGEROUS:
        return
    function = node.name if isinstance(node, ast.FunctionDef) else function
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            strict = isinstance(child, ast.keyword) and child.arg == "strict"  # of a zip: an assertion
            if isinstance(child, ast.AST) and field not in APART and not strict:
                yield from _edits(child, function)


def _tells(node: ast.FunctionDef) -> bool:
    """Whether a function makes a text for a person: it returns a str, most of it an f-string."""
    return node.returns.id == "str" and any(isinstance(each, ast.JoinedStr) for each in ast.walk(node))


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _of_statement(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value) not in TOLD | DANGEROUS:
        yield "dropped call", "pass"
    if isinstance(node, ast.Continue):
        yield "dropped call", "pass"
    stored = node.targets[0] if isinstance(node, ast.Assign) else None
    if isinstance(stored, ast.Attribute | ast.Subscript) and function not in ("", "__init__"):
        yield "forgotten reset", "pass"
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.BitOr):
        target, value = ast.unparse(node.target), ast.unparse(node.value)
        yield "forgotten update", "pass"
        if isinstance(node.op, ast.Add):
            yield "sign", f"{target} -= {value}"
            yield "forgotten sum", f"{target} = {value}"


def _conditions(node: ast.AST) -> list[ast.expr]:
    """The conditions of a statement or an expression; not a loop's, which would not end."""
    found = [node.test] if isinstance(node, ast.If | ast.IfExp) else getattr(node, "ifs", [])
    done = (ast.Compare, ast.UnaryOp)  # inverted by their own rules
    return [test for test in found if not isinstance(test, done) or isinstance(getattr(test, "op", None), ast.USub)]


def _nothing(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    return iter(())


def _compare(node: ast.Compare) -> Iterator[tuple[str, ast.expr]]:
    if len(node.ops) != 1:
        return
    operator = type(node.ops[0])
    yield "comparison", ast.Compare(node.left, [COMPARED[operator]()], node.comparators)
    if operator in TURNED:
        yield "inverted condition", ast.Compare(node.left, [TURNED[operator]()], node.comparators)


def _bool_op(node: ast.BoolOp) -> Iterator[tuple[str, ast.expr]]:
    yield "and for or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    for index in range(len(node.values)):
        kept = node.values[:index] + node.values[index + 1 :]
        yield "missing condition", kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)


def _unary_op(node: ast.UnaryOp) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node.op, ast.Not):
        yield "inverted condition", node.operand
    if isinstance(node.op, ast.USub):
        yield "sign", node.operand


def _bin_op(node: ast.BinOp) -> Iterator[tuple[str, ast.expr]]:
    sides = (node.left, node.right)
    if any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides):
        return  # a text, or a path's name
    made = any(isinstance(side, ast.List | ast.ListComp | ast.Tuple | ast.Dict) for side in sides)
    if type(node.op) in SIGNS and not made:
        yield "sign", ast.BinOp(node.left, SIGNS[type(node.op)](), node.right)
    if isinstance(node.op, ast.Add | ast.Sub | ast.BitOr):
        yield "missing term", node.left
        if not isinstance(node.op, ast.Sub):
            yield "missing term", node.right
    if isinstance(node.op, FACTORS):
        yield "missing factor", node.left
    if isinstance(node.op, ast.Mult):
        yield "missing factor", node.right
    if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
        yield "swapped pair", ast.BinOp(node.right, node.op, node.left)


def _constant(node: ast.Constant) -> Iterator[tuple[str, ast.expr]]:
    value = node.value
    if isinstance(value, bool):
        yield "wrong default", ast.Constant(not value)
    elif isinstance(value, int):
        yield "off by one", ast.Constant(value + 1 if value < 100 else value * 2)
        if value > 0:
            yield "off by one", ast.Constant(value - 1 if value < 100 else value // 2)
    elif isinstance(value, float):
        yield "other constant", ast.Constant(value * 2 if value else 1.0)


def _call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = _name(node)
    if name in OTHERS and node.args:
        other = (
            ast.Name(OTHERS[name]) if isinstance(node.func, ast.Name) else ast.Attribute(node.func.value, OTHERS[name])
        )
        yield "other function", ast.Call(other, node.args, [] if name == "sorted" else node.keywords)
    if name in VALUES and not node.args and isinstance(node.func, ast.Attribute):
        yield "dropped call", node.func.value
    if name == "derive":
        yield "missing rank term", ast.Call(node.func, node.args[:-1], node.keywords)
    if name in ("derive", "range", "narrow") and len(node.args) > 1:
        yield "swapped pair", ast.Call(node.func, [*node.args[:-2], node.args[-1], node.args[-2]], node.keywords)
    for keyword in node.keywords:
        if keyword.arg in OPTIONAL:
            kept = [each for each in node.keywords if each is not keyword]
            yield "missing argument", ast.Call(node.func, node.args, kept)


RULES = {
    ast.Compare: _compare, ast.BoolOp: _bool_op, ast.UnaryOp: _unary_op, ast.BinOp: _bin_op, ast.Constant: _constant,
    ast.Call: _call,
}  # fmt: skip
