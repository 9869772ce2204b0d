"""LS066: a model that stays on the CPU, while its inputs are moved to the GPU."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import withs
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import dotted, last, own_expressions, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.marks import LAYERS
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

MESSAGE = "'{name}' is never moved to the device that its inputs are moved to: its first forward fails there"
# Words of a class that may put its parameters, or its inputs, on a device by itself.
PLACES = ("device", "cuda", ".to(", ".cpu(", "getattr(")
# Methods of a model that leave it where it is.
LEAVES = ("parameters", "named_parameters", "train", "eval", "state_dict", "zero_grad", "load_state_dict")


def check(view: View) -> Iterator[Found]:
    """Find models that one function makes, never moves, and runs on inputs that it moves to a GPU."""
    text = view.module.text
    if (".to(" not in text and ".cuda(" not in text) or view.frameworks or "set_default" in text:
        return
    for scope in view.scopes:
        for site in scope.sites if scope.kind != "class" else ():
            names = [bind.key for bind in scope.bound(site.stmt) if bind.value is site.call]
            sole = len(names) == 1 and "." not in names[0] and len(scope.binds[names[0]]) == 1
            if sole and stays(view, site) and runs_on_gpu(view, names[0], scope):
                yield at(site, MESSAGE.format(name=site.name))


def stays(view: View, site: Site) -> bool:
    """Check whether a call makes a model of a class of this project that has layers and names no device."""
    owner = view.names.definition(site.call.func, site.scope)
    if owner is None or owner.kind != "class" or not view.kinds.is_module_class(owner):
        return False
    start, end = owner.node.lineno, owner.node.end_lineno  # type: ignore[attr-defined]
    code = "\n".join(owner.module.lines[start - 1 : end])
    layers = [s for method in owner.defs.values() for s in method.sites if LAYERS.search(s.name)]
    plain = not any(view.names.parents(owner)) and not any(word in code for word in PLACES)
    return plain and bool(layers) and not any(withs(site.stmt, site.module))


def runs_on_gpu(view: View, name: str, scope: Scope) -> bool:
    """Check whether a function runs a model on moved inputs, and neither moves the model nor hands it on."""
    moved = False
    for stmt, home in dict.fromkeys(scope.module.named.get(name, [])):
        if home is not scope:
            return False  # another function may move it
        for node in (part for each in own_expressions(stmt) for part in walk(each)):
            if isinstance(node, ast.Call) and dotted(node.func) == name:
                moved = moved or any(on_gpu(view, value, scope) for value in node.args)
            elif escapes(node, name):
                return False
        if isinstance(stmt, ast.Return | ast.Assign) and stmt.value is not None and dotted(stmt.value) == name:
            return False
    return moved


def escapes(node: ast.AST, name: str) -> bool:
    """Check whether an expression hands a model on, or calls a method that may move it."""
    if isinstance(node, ast.Call):
        return any(dotted(value) == name for value in node.args)
    return isinstance(node, ast.Attribute) and dotted(node.value) == name and node.attr not in LEAVES


def on_gpu(view: View, node: ast.expr, scope: Scope) -> bool:
    """Check whether a value was certainly moved to a GPU (`x = x.cuda()`, `x.to("cuda")`)."""
    binds = [bind for bind in scope.binds.get(dotted(node) or "", []) if bind.how == "assign"]
    values = [node] if isinstance(node, ast.Call) else [bind.value for bind in binds]
    return bool(values) and all(isinstance(value, ast.Call) and is_move(view, value, scope) for value in values)


def is_move(view: View, call: ast.Call, scope: Scope) -> bool:
    """Check whether a call moves a tensor to a GPU where there is one."""
    if not isinstance(call.func, ast.Attribute) or last(call) not in ("to", "cuda"):
        return False
    made = [origin.node for origin in view.origins.of(call.args[0], scope)] if call.args else []
    return last(call) == "cuda" or (bool(made) and all("cuda" in ast.unparse(value) for value in made))


RULE = Rule("LS066", Severity.ERROR, Confidence.HIGH, check)
