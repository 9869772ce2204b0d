"""Which values are on the device: what a model gives, what was moved there, and what is computed of these."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import inside, loops
from lockstep_lint.analysis.hosts import MADE, moves
from lockstep_lint.analysis.index import Bind, Scope
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.losses import READS, SYNCS
from lockstep_lint.analysis.nodes import (
    Words,
    argument,
    base,
    constant,
    dotted,
    element_of,
    is_none,
    keyword,
    last,
    walk,
)
from lockstep_lint.analysis.pace import turned_off
from lockstep_lint.analysis.training import LOSSES
from lockstep_lint.analysis.view import View

__all__ = ["on_device"]

# What a tensor says of itself without asking the device.
ABOUT = {"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "grad_fn", "size", "dim", "numel", "stride"}
ABOUT |= {"element_size", "is_contiguous", "type", "keys", "nelement", "is_floating_point", "is_tensor", "is_complex"}
# They give the norm of the gradients, which is where these are.
NORMS = {"clip_grad_norm_", "get_total_norm"}
# What gives a model, or the parts of one.
MAKES = re.compile(r"^(import|build|create|get|make|load|init|setup|prepare|wrap|unwrap|save|freeze|update|count)")
# What is called after a model and is none: a class, its settings, the methods of a pydantic model.
AFTER = Words(r"_(class|cls|type|factory|builder|constructor|from_\w+|config|cfg|validate\w*|dump\w*|copy|construct)$")
# What a loss is given, which is where the model is.
GIVEN = Words(r"logit|pred|output|^inputs?$|target|label|score|feat|prob|^gts?$", re.IGNORECASE)
# How many names a value is followed back over.
MAX_NAMES = 6
MAX_CALLERS = 4


@kept
def on_device(view: View, value: ast.expr, scope: Scope, names: int = MAX_NAMES) -> bool:
    """Whether a value is certainly a tensor, or several, on the device."""
    if isinstance(value, ast.Call):
        return given_by(view, value, scope, names)
    if isinstance(value, ast.Name):
        return bound(view, value.id, value.lineno, scope, names)
    if isinstance(value, ast.Attribute):
        key = dotted(value) or ""
        if key.startswith("self.") and key.count(".") == 1:
            return bound(view, key, value.lineno, scope, names)
        return value.attr not in ABOUT and on_device(view, value.value, scope, names)
    if isinstance(value, ast.DictComp):
        return on_device(view, value.value, scope, names)
    if isinstance(value, ast.ListComp | ast.GeneratorExp):
        return on_device(view, value.elt, scope, names)
    return any(on_device(view, part, scope, names) for part in parts(value))


def parts(value: ast.expr) -> Iterator[ast.expr]:
    """What a sum, a comparison or a list is made of: it is on the device if one of them is."""
    if isinstance(value, ast.Subscript | ast.Starred):
        yield value.value
    elif isinstance(value, ast.BinOp):
        yield from (value.left, value.right)
    elif isinstance(value, ast.UnaryOp) and not isinstance(value.op, ast.Not):
        yield value.operand
    elif isinstance(value, ast.Compare):
        asks = isinstance(value.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn)
        yield from () if asks else (value.left, *value.comparators)
    elif isinstance(value, ast.Tuple | ast.List):
        yield from value.elts


def given_by(view: View, call: ast.Call, scope: Scope, names: int) -> bool:
    """Whether a call gives a tensor on the device."""
    name, full = last(call), view.names.qualify(call.func, scope)
    if name in SYNCS or name in ABOUT or name in READS - {"float", "int"} or name in ("len", "numpy"):
        return False
    if name in NORMS or full == "torch.autograd.grad":
        return True
    if full.startswith("torch."):
        device = keyword(call, "device")
        if device is not None:
            return not view.is_cpu(device, scope)
        values = (*call.args, *(item.value for item in call.keywords))
        return full not in MADE and any(on_device(view, value, scope, names) for value in values)
    if not isinstance(call.func, ast.Attribute):
        return made(view, call, scope, (), names)
    if moves(call) and (name == "cuda" or keyword(call, "device") is not None or "dtype" not in ast.unparse(call)):
        place = argument(call, 0, "device")
        return moves_data(view, call.func.value, scope) and not view.is_cpu(place, scope)
    if name == "to" and view.is_cpu(argument(call, 0, "device"), scope):
        return False
    return made(view, call, scope, (), names) or on_device(view, call.func.value, scope, names)


def moves_data(view: View, moved: ast.expr, scope: Scope) -> bool:
    """Whether what is moved is data, and not a model or a loss that was made (`Net().cuda()`)."""
    root = base(moved)
    if not isinstance(root, ast.Name) or last(moved)[:1].isupper() or view.kinds.is_model(moved, scope):
        return False
    known = root.id in scope.params or bool(view.origins.binds(root.id, scope, moved.lineno))
    return known or view.names.qualify(root, scope) == "torch" or moved is root


def made(view: View, call: ast.Call, scope: Scope, path: tuple[int, ...], names: int) -> bool:
    """Whether a model or a loss gives a value, or all that a function of the project returns at its place is on the
    device.
    """
    function, name = view.calls.target(call, scope), last(call)
    if function is None or function.name == "__call__":
        runs = bool(call.args or call.keywords) and not name[:1].isupper() and not MAKES.search(name)
        if runs and LOSSES.search(name):
            return any(on_device(view, arg, scope, names) for arg in call.args)
        return runs and not AFTER.search(name) and view.kinds.is_model(call.func, scope)
    if function.kind != "function" or function.name == "__init__":
        return False
    given = [value for each in function.returns() for value in element_of(each, path)] if names else []
    return bool(given) and all(on_device(view, value, function, names - 1) for value in given)


def bound(view: View, key: str, line: int, scope: Scope, names: int) -> bool:
    """Whether all that a name may stand for is on the device."""
    if not names:
        return False
    binds = view.origins.binds(key, scope, line)
    if binds:
        anew = [(b, home) for b, home in binds if not stays(b) and not starts(b) and not turned_off(b.stmt, home)]
        if not anew and all(starts(bind) for bind, _ in binds):
            own = [bind.stmt for bind, home in binds if home is scope and not key.startswith("self.")]
            return added_to(view, key, scope, names - 1, line, own)
        return all(holds(view, bind, home, names - 1) for bind, home in anew or binds)
    if scope.kind != "function" or key not in scope.params or key in ("self", "cls"):
        return False
    if scope.name == "forward" and scope.owner is not None and LOSSES.search(scope.owner.name) and GIVEN.search(key):
        return True
    values = [(passed(caller, scope, key), caller.scope) for caller in view.calls.callers(scope)[:MAX_CALLERS]]
    return any(value is not None and on_device(view, value, home, names - 1) for value, home in values)


def starts(bind: Bind) -> bool:
    """Whether a name is given a number or None, before a loop gives it something else (`norm = 0`)."""
    return any(constant(value) is not None or is_none(value) for value in element_of(bind.value, bind.path))


def added_to(view: View, key: str, scope: Scope, names: int, line: int, begins: list[ast.stmt]) -> bool:
    """Whether a sum that starts at a number takes in what is on the device (`self.tokens += mask.sum()`), where its
    statements in the function itself, which may have begun it last, let that stand until a line.
    """
    owner = scope.owner if key.startswith("self.") else None
    homes = owner.defs.values() if owner is not None else [scope]
    return any(
        bind.how == "aug"
        and bind.value is not None
        and (not begins or any(lasts(bind.stmt, line, begin, scope) for begin in begins))
        and on_device(view, bind.value, home, names)
        for home in homes
        for bind in home.binds.get(key, [])
    )


def lasts(added: ast.stmt, line: int, begin: ast.stmt, scope: Scope) -> bool:
    """Whether what is added to a sum may still be in it at a line: after its beginning, in the same turn of a loop, or
    in the next one, which does not begin it anew.
    """
    if begin.lineno < added.lineno < line:
        return True
    return any(
        each.lineno < line <= (each.end_lineno or line) and not inside(begin, each, scope.module)
        for each in loops(added, scope.module)
    )


def stays(bind: Bind) -> bool:
    """Whether a name is given what a method of its own value gives (`x = x.clone()`), which does not read it."""
    calls = isinstance(bind.value, ast.Call) and isinstance(bind.value.func, ast.Attribute) and bind.how == "assign"
    if not calls or bind.path or bind.value is None or dotted(base(bind.value)) != bind.key:
        return False
    return not any(last(node) in (*SYNCS, "to", "numpy") for node in walk(bind.value) if isinstance(node, ast.Call))


def holds(view: View, bind: Bind, scope: Scope, names: int) -> bool:
    """Whether what a name is bound to is on the device."""
    value, path = bind.value, bind.path
    if value is None or bind.how not in ("assign", "for"):
        return False
    if bind.how == "for":
        if isinstance(value, ast.Call) and last(value) in ("items", "values") and isinstance(value.func, ast.Attribute):
            return path != (0,) and on_device(view, value.func.value, scope, names)
        rows = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        if rows:
            return any(on_device(view, each, scope, names) for row in rows for each in element_of(row, path))
        return isinstance(value, ast.Name) and on_device(view, value, scope, names)
    if isinstance(value, ast.Call) and path:
        known = view.calls.target(value, scope) is not None
        return made(view, value, scope, path, names) if known else on_device(view, value, scope, names)
    if isinstance(value, ast.Tuple | ast.List) and path:
        return any(on_device(view, each, scope, names) for each in element_of(value, path))
    return constant(value) is None and on_device(view, value, scope, names)
