"""The literal values that calls hand down from one function to the next, and the tests that they decide."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import given
from lockstep_lint.analysis.context import choices, guards
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import constant, dotted, last
from lockstep_lint.analysis.view import View

__all__ = ["Settings", "live", "passed_down", "ruled_out", "unchosen"]

# What parameters and attributes are known to be; SOME is a class or function, NOT_KNOWN is given but not known.
Settings = dict[str, object]
SOME, NOT_KNOWN = object(), object()


def passed_down(view: View, call: ast.Call, scope: Scope, function: Scope, before: Settings) -> Settings:
    """What a function's parameters are in a call, and the attributes that it sets to them."""
    node = function.node
    found: Settings = {}
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return found
    for name, default in defaults(node):
        value = given(call, function, name)
        if value is not None:
            found[name] = known(view, value, scope, before)
        elif isinstance(default, ast.Constant):
            found[name] = default.value
    for key, binds in function.binds.items():
        if key in found:
            found[key] = NOT_KNOWN
        elif key.startswith("self.") and len(binds) == 1 and binds[0].value is not None and not binds[0].path:
            found[key] = known(view, binds[0].value, function, found)
    return found


def defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr | None]]:
    """A function's parameters, each with its default."""
    plain = [*node.args.posonlyargs, *node.args.args]
    lacking: list[ast.expr | None] = [None] * (len(plain) - len(node.args.defaults))
    yield from ((arg.arg, value) for arg, value in zip(plain, [*lacking, *node.args.defaults], strict=True))
    yield from ((arg.arg, value) for arg, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))


def known(view: View, node: ast.expr, scope: Scope, settings: Settings) -> object:
    """What an expression is: a literal, what a setting says, or some class."""
    if isinstance(node, ast.Constant):
        return node.value
    key = dotted(node)
    if key is None:
        return NOT_KNOWN
    if key in settings or key in scope.params:
        return settings.get(key, NOT_KNOWN)
    named = view.names.qualify(node, scope) or view.names.definition(node, scope) is not None
    return SOME if named and last(node)[:1].isupper() else NOT_KNOWN


def outcome(test: ast.expr, settings: Settings) -> bool | None:
    """How a test comes out, where the settings decide it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = outcome(test.operand, settings)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        ends = isinstance(test.op, ast.Or)
        found = [outcome(value, settings) for value in test.values]
        return ends if ends in found else None if None in found else not ends
    if isinstance(test, ast.Compare):
        return compared(test, settings) if len(test.ops) == 1 else None
    value = constant(test) if isinstance(test, ast.Constant) else settings.get(dotted(test) or "", NOT_KNOWN)
    return None if value is NOT_KNOWN else bool(value)


def compared(test: ast.Compare, settings: Settings) -> bool | None:
    """How a comparison of a setting with literals comes out."""
    left, op, right = settings.get(dotted(test.left) or "", NOT_KNOWN), test.ops[0], test.comparators[0]
    if left is NOT_KNOWN:
        return None
    if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.Tuple | ast.List | ast.Set):
        return (left in [constant(item) for item in right.elts]) is isinstance(op, ast.In)
    if isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot) and isinstance(right, ast.Constant):
        return (left == right.value) is isinstance(op, ast.Eq | ast.Is)
    return None


def ruled_out(site: Site, settings: Settings) -> bool:
    """Whether the settings keep a call from being made; which of two kinds a test of types lets through is open."""
    return any(
        outcome(guard.test, settings) is (not guard.when) or (typed(guard.test) and isinstance(guard.stmt, ast.If))
        for guard in guards(site.stmt, site.module)
    )


def unchosen(site: Site, settings: Settings) -> bool:
    """Whether the settings keep a call from being made within its own statement (`Norm(8) if norm else Identity()`)."""
    return any(outcome(guard.test, settings) is (not guard.when) for guard in choices(site))


def typed(test: ast.expr) -> bool:
    """Whether a test asks for the type of something."""
    return isinstance(test, ast.Call) and last(test) == "isinstance"


def live(node: ast.AST, settings: Settings) -> Iterator[ast.AST]:
    """The nodes below one, without the arms and the defaults that the settings rule out."""
    stack = [node]
    while stack:
        item = stack.pop()
        yield item
        if isinstance(item, ast.If | ast.IfExp):
            way = outcome(item.test, settings)
            arms = [arm for arm, when in ((item.body, True), (item.orelse, False)) if way is not (not when)]
            for arm in arms:
                stack.extend(arm if isinstance(arm, list) else [arm])
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            stack.extend(item.body)
            stack.extend(value for name, value in defaults(item) if value is not None and name not in settings)
        else:
            stack.extend(ast.iter_child_nodes(item))
