"""What a file says about pinned memory: at a loader, as an option, as a default."""

import ast
import re

from lockstep_lint.analysis.index import Bind, Module, Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import argument, constant, dotted, has_star, idents, is_true, last, strings, walk
from lockstep_lint.analysis.origins import Origins

__all__ = ["never_pins", "pins_memory"]

PIN = re.compile(r"pin[_-]mem(ory)?\b", re.IGNORECASE)
# Calls that give an option's default, each with the place where it stands.
DEFAULTS = {"add_argument": 99, "get": 1, "getattr": 2, "setdefault": 1}
# They read the environment.
ENVIRONMENT = ("getenv", "os.getenv", "environ.get", "os.environ.get")
# What a Trainer of transformers keeps under this name: True, unless its TrainingArguments are told otherwise.
TRAINERS = "dataloader_pin_memory"
# What says that there is a GPU, and that it is used.
GPU = ("cuda", "usecuda", "usegpu", "hascuda", "hasgpu", "iscuda", "cudaavailable")


@kept
def pins_memory(module: Module) -> bool:
    """Whether a file pins the memory of a loader, or says so as an option's default."""
    if not PIN.search(module.text):
        return False
    return (
        any(_asks(site) for site in module.sites())
        or any(
            (PIN.search(key) and _is_pinning(bind.value, scope))
            or any(isinstance(arm, ast.Dict) and _pins(arm) for arm in _arms(bind))
            for scope in module.scopes
            for key, binds in scope.binds.items()
            for bind in binds
        )
        or any(_default(scope) or any(map(_sets, scope.stmts)) for scope in module.scopes)
    )


def never_pins(origins: Origins, loader: ast.expr, scope: Scope) -> bool:
    """Whether a loader is certainly made without pinned memory, whatever the program says of others."""
    found = origins.of(loader, scope)
    return bool(found) and all(
        origin.call is not None
        and origins.names.qualify(origin.call.func, origin.scope).startswith("torch")
        and last(origin.call) == "DataLoader"
        and not has_star(origin.call)
        and constant(argument(origin.call, 7, "pin_memory") or ast.Constant(False)) is False
        for origin in found
    )


def _sets(stmt: ast.stmt) -> bool:
    """Whether a statement sets the option in a dictionary (`options["pin_memory"] = True`)."""
    return isinstance(stmt, ast.Assign) and any(
        isinstance(target, ast.Subscript) and constant(target.slice) == "pin_memory" and _is_pinning(stmt.value)
        for target in stmt.targets
    )


def _asks(site: Site) -> bool:
    """Whether a call says True for `pin_memory`, with its own argument, as a flag's default or as one of `get`."""
    if any(item.arg and PIN.search(item.arg) and _is_pinning(item.value, site.scope) for item in site.call.keywords):
        return True
    if site.name in DEFAULTS and any(PIN.search(text) for text in strings(site.call)):
        return is_true(argument(site.call, DEFAULTS[site.name], "default"))
    return False


def _default(scope: Scope) -> bool:
    """Whether a function's parameter is called so, with True as its default."""
    node = scope.node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    plain = [*node.args.posonlyargs, *node.args.args]
    pairs = [*zip(reversed(plain), reversed(node.args.defaults), strict=False)]
    pairs += [(arg, value) for arg, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value]
    return any(PIN.search(arg.arg) and is_true(value) for arg, value in pairs)


def _is_pinning(value: ast.expr | None, scope: Scope | None = None) -> bool:
    """Whether a value is True, or true where there is a GPU."""
    if isinstance(value, ast.IfExp):
        return _is_pinning(value.body, scope) or _is_pinning(value.orelse, scope)
    if isinstance(value, ast.BoolOp):
        found = [_is_pinning(part, scope) for part in value.values]
        return all(found) if isinstance(value.op, ast.And) else any(found)
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
        return last(value.operand) in ("cpu", "use_cpu", "no_cuda", "no_gpu")
    if isinstance(value, ast.Attribute) and value.attr == TRAINERS:
        return scope is None or f"{TRAINERS}=False" not in scope.module.text.replace(" ", "")
    if isinstance(value, ast.Name | ast.Attribute):
        return last(value).lower().replace("_", "") in GPU or (isinstance(value, ast.Name) and _told(value.id, scope))
    if isinstance(value, ast.Compare):
        return _compares(value)
    if isinstance(value, ast.Call):
        asks = last(value) == "startswith" and "cuda" in strings(value)
        return asks or (last(value) in ("is_available", "bool") and {"cuda", "is_available"} <= set(idents(value)))
    return is_true(value)


def _told(name: str, scope: Scope | None) -> bool:
    """Whether a name of a function or of its file is only given what is true where there is a GPU."""
    while scope is not None and name not in scope.binds and name not in scope.params:
        scope = scope.parent
    given = [bind.value for bind in scope.binds.get(name, [])] if scope is not None else []
    return bool(given) and all(isinstance(each, ast.Call | ast.Compare) and _is_pinning(each) for each in given)


def _compares(value: ast.Compare) -> bool:
    """Whether a comparison is true where there is a GPU (`device.type == "cuda"`, `"cuda" in str(device)`)."""
    other = constant(value.comparators[0])
    match value.ops[0]:
        case ast.Eq():  # `str(os.getenv("PIN_MEMORY", True)).lower() == "true"`
            calls = (node for node in walk(value.left) if isinstance(node, ast.Call))
            asked = [call for call in calls if dotted(call.func) in ENVIRONMENT]
            return other == "cuda" or (other == "true" and any(is_true(argument(c, 1, "default")) for c in asked))
        case ast.NotEq():
            return other in ("cpu", "mps")
        case ast.In():
            return constant(value.left) == "cuda"
        case ast.Gt():
            return last(value.left) == "device_count" and other == 0
    return False


def _arms(bind: Bind) -> list[ast.expr | None]:
    """What a binding may give its name."""
    return [bind.value.body, bind.value.orelse] if isinstance(bind.value, ast.IfExp) else [bind.value]


def _pins(node: ast.Dict) -> bool:
    """Whether a dictionary of options pins the memory."""
    return any(
        constant(key) == "pin_memory" and _is_pinning(value) for key, value in zip(node.keys, node.values, strict=True)
    )
