"""What a step reads of its batch before that is moved: it is on the CPU, where the loader made it."""

import ast

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import guards, inside
from lockstep_lint.analysis.hosts import moves, on_host
from lockstep_lint.analysis.index import Bind, Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import base, constant, dotted, element_of, last, strings, targets, walk
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View

__all__ = ["from_loader", "looped"]

# How many names a value is followed back over.
MAX_NAMES = 6
# They give the batches where the model is.
PREPARES = {"accelerate", "lightning_fabric", "lightning", "ignite"}
# What is called of a tensor itself.
METHODS = {"item", "cpu", "tolist", "numpy", "sum", "mean", "size", "shape", "max", "min", "any", "all", "detach"}


def looped(name: str, site: Site) -> ast.expr | None:
    """What a comprehension in a call's statement runs over, if a name is its variable (`[x.item() for x in rows]`)."""
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
