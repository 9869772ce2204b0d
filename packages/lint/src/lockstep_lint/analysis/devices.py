"""Find values on the device, and reads of a batch before it is moved."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import guards, inside, loops, turned_off
from lockstep_lint.analysis.index import Bind, Scope, Site
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
    strings,
    targets,
    walk,
)
from lockstep_lint.analysis.tensors import MADE, READS, SYNCS, moves, on_host
from lockstep_lint.analysis.training import LOSSES, Training
from lockstep_lint.analysis.view import View

__all__ = [
    "from_loader",
    "looped",
    "on_device",
]


# How many names a value is followed back over.
MAX_NAMES = 6
# They give the batches where the model is.
PREPARES = {"accelerate", "lightning_fabric", "lightning", "ignite"}
# What is called of a tensor itself.
METHODS = {"item", "cpu", "tolist", "numpy", "sum", "mean", "size", "shape", "max", "min", "any", "all", "detach"}


def looped(name: str, site: Site) -> ast.expr | None:
    """Return the iterable of the comprehension whose variable a name is (`[x.item() for x in rows]`)."""
    for node in walk(site.stmt):
        if isinstance(node, ast.comprehension) and name in {key for key, _ in targets(node.target)}:
            return node.iter
    return None


def from_loader(view: View, site: Site, training: Training) -> bool:
    """Whether the value comes straight from the loader, which is on the CPU, and was not moved."""
    if site.receiver is None or not isinstance(training.loop, ast.For):
        return False
    root = base(site.receiver)
    rows = looped(root.id, site) if isinstance(root, ast.Name) else None
    whole = rows or site.receiver
    root = base(whole)
    header = view.kinds.iterated(training.loop.iter, training.scope)
    if hands_out_moved(view, header, training.scope):
        return False
    if isinstance(root, ast.Name) and site.scope is training.scope and drawn(root.id, site, training):
        return not moved_in_place(whole, root, training)
    if view.frameworks & PREPARES or not view.kinds.is_loader(header, training.scope) or not moved(training):
        return False
    return Unmoved(view, training).holds(whole, site.scope, MAX_NAMES)


@kept
def hands_out_moved(view: View, header: ast.expr, scope: Scope) -> bool:
    """Whether the loader is of a class of the project's own that moves the batches itself (`PrefetchLoader`)."""
    if "__iter__" not in view.calls.method_names(scope.module):
        return False
    made = [view.names.definition(call.func, home) for call, home, _ in view.origins.calls_of(header, scope)]
    steps = [view.names.member(owner, "__iter__") for owner in made if owner is not None and owner.kind == "class"]
    return bool(steps) and all(
        step is not None and any(moves(site.call) for site in view.effects.below(step.sites)) for step in steps
    )


def moved_in_place(value: ast.expr, root: ast.Name, training: Training) -> bool:
    """Whether a step moves the part of the batch that a value reads before it reads it: by a graph's own `to`, which
    changes the graph (`batch.to(device)`, then `batch.y`), or part by part (`batch[k] = batch[k].to(device)`).
    """
    part = part_of(value, root)
    for stmt in training.scope.stmts:
        if not training.loop.lineno < stmt.lineno < root.lineno or not inside(stmt, training.loop, training.module):
            continue
        if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call) and moves(stmt.value):
            if part is not None and dotted(stmt.value.func) in (f"{root.id}.to", f"{root.id}.cuda"):
                return True
        elif isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Subscript):
            target = stmt.targets[0]
            if dotted(target.value) != root.id or not any(
                isinstance(node, ast.Call) and moves(node) for node in walk(stmt.value)
            ):
                continue
            key = constant(target.slice)
            some = any(any(strings(guard.test)) for guard in guards(stmt, training.module, training.loop))
            if (key is None and not some) or (isinstance(part, ast.Subscript) and key == constant(part.slice)):
                return True
    return False


def part_of(value: ast.expr, root: ast.Name) -> ast.expr | None:
    """The attribute or the item of the batch that a chain of methods begins with."""
    return next(
        (
            node
            for node in walk(value)
            if isinstance(node, ast.Attribute | ast.Subscript)
            and node.value is root
            and getattr(node, "attr", "") not in METHODS
        ),
        None,
    )


def moved(training: Training) -> bool:
    """Whether a loop moves something itself: its loader leaves that to it."""
    sites = [*training.scope.named("to"), *training.scope.named("cuda")]
    return any(inside(site.stmt, training.loop, training.module) for site in sites)


def drawn(name: str, site: Site, training: Training) -> bool:
    """Whether a name is the loop's own variable at a call, as the loader gave it."""
    if name not in {key for key, _ in targets(training.loop.target)}:  # type: ignore[union-attr]
        return False
    return not any(
        bind.stmt is not training.loop and training.loop.lineno < bind.stmt.lineno < site.line
        for bind in site.scope.binds.get(name, [])
    )


class Unmoved:
    """Follows a value back to the batch of a training loop."""

    def __init__(self, view: View, training: Training) -> None:
        self.view = view
        self.training = training

    def holds(self, value: ast.expr, scope: Scope, names: int) -> bool:
        """Whether a value is certainly a part of the batch, or computed of one, and was not moved."""
        whole = value
        while isinstance(value, ast.Attribute | ast.Subscript | ast.Call):
            if isinstance(value, ast.Call):
                if moves(value) or last(value) == "to":
                    return False
                full = self.view.names.qualify(value.func, scope)
                if full.startswith(("torch.", "copy.")):
                    return self.computed(value, scope, names)
                value = value.func
            else:
                value = value.value
        if isinstance(value, ast.Compare | ast.BinOp):
            sides = (value.left, *value.comparators) if isinstance(value, ast.Compare) else (value.left, value.right)
            return self.all_of([side for side in sides if not isinstance(side, ast.Constant)], scope, names)
        return isinstance(value, ast.Name) and self.named(value, whole, scope, names)

    def computed(self, call: ast.Call, scope: Scope, names: int) -> bool:
        """Whether a function of torch is given parts of the batch and nothing else that may be on the device."""
        if any(item.arg == "device" for item in call.keywords):
            return False
        return self.all_of([arg for arg in call.args if not isinstance(arg, ast.Constant)], scope, names)

    def all_of(self, values: list[ast.expr], scope: Scope, names: int) -> bool:
        return bool(values) and all(
            on_host(self.view.origins, value, scope, 1) or self.holds(value, scope, names) for value in values
        )

    def named(self, node: ast.Name, value: ast.expr, scope: Scope, names: int) -> bool:
        """Whether all that a name which a value begins with may stand for is a part of the batch."""
        if not names:
            return False
        binds = self.view.origins.binds(node.id, scope, node.lineno)
        if binds:
            return all(
                not moved_in_place(value, node, self.training)
                if bind.stmt is self.training.loop
                else self.bound(bind, home, names - 1)
                for bind, home in binds
            )
        if scope is self.training.scope or node.id not in scope.params:
            return False
        callers = [site for site in self.view.calls.callers(scope) if site.scope is self.training.scope]
        given = [passed(s, scope, node.id) for s in callers if inside(s.stmt, self.training.loop, s.module)]
        return bool(given) and all(
            each is not None and self.holds(each, self.training.scope, names - 1) for each in given
        )

    def bound(self, bind: Bind, scope: Scope, names: int) -> bool:
        """Whether a name is bound to a part of the batch."""
        if bind.value is None or bind.how not in ("assign", "for"):
            return False
        value: ast.expr | None = bind.value
        if bind.how == "for" and isinstance(value, ast.Call) and dotted(value.func) == "enumerate" and value.args:
            value = value.args[0] if bind.path[:1] == (1,) else None
        elif bind.path and isinstance(value, ast.Tuple | ast.List):
            value = next(iter(element_of(value, bind.path)), None)
        return value is not None and self.all_of([value], scope, names)


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
    """Yield the operands of a sum, comparison or list; one on the device puts the result there."""
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
