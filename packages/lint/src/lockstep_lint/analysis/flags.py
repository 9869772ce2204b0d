"""What a program's options are called, and what they are when nobody sets them."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Module, Scope
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import constant, keyword, strings
from lockstep_lint.analysis.view import View

__all__ = ["default_names"]


def default_names(view: View, scope: Scope, flag: str = "") -> Iterator[str]:
    """The texts that the options of a program which name a model, or one of them, have by default; also the defaults
    of a parameter of that name.
    """
    for member in view.project.family(scope.module):
        for names, value in defaults(member):
            if flag in names if flag else any("arch" in name.lower() or "model" in name.lower() for name in names):
                yield value
    home: Scope | None = scope if flag else None
    while home is not None:
        yield from (value for name, value in given_by_default(home) if name == flag)
        home = home.parent


@kept
def defaults(module: Module) -> tuple[tuple[tuple[str, ...], str], ...]:
    """The names and the default of each option that is a text: of argparse, click and fastargs, of a class's fields and
    of a tree of settings (`_C.MODEL.ARCH = "resnet18"`).
    """
    return tuple(_defaults(module) if "default" in module.text else ()) + tuple(_settings(module))


def _defaults(module: Module) -> Iterator[tuple[tuple[str, ...], str]]:
    for site in module.sites("add_argument", "option"):
        value = constant(keyword(site.call, "default"))
        if isinstance(value, str):
            yield tuple(text.lstrip("-").replace("-", "_") for text in strings(site.call)), value
    for site in module.sites("params"):
        for item in site.call.keywords:
            value = constant(keyword(item.value, "default")) if isinstance(item.value, ast.Call) else None
            if item.arg is not None and isinstance(value, str):
                yield (item.arg,), value


def _settings(module: Module) -> Iterator[tuple[tuple[str, ...], str]]:
    for scope in (module.top, *(scope for scope in module.scopes if scope.kind == "class")):
        for key, binds in scope.binds.items():
            value = constant(binds[0].value)
            if isinstance(value, str) and ("." in key or scope.kind == "class"):
                yield (key.rpartition(".")[2],), value


def given_by_default(function: Scope) -> Iterator[tuple[str, str]]:
    """The parameters of a function that are a text where a call leaves them out."""
    node = function.node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        plain = [*node.args.posonlyargs, *node.args.args]
        pairs = [
            *zip(reversed(plain), reversed(node.args.defaults), strict=False),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        yield from ((arg.arg, text) for arg, value in pairs if isinstance(text := constant(value), str))
