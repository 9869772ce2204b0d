"""LS022: pin_memory without non_blocking; no workers (an opinion)."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.batches import (
    asked,
    comprehension_names,
    moved,
    moves_device,
    placed,
    replaced,
    surely_replaced,
    taken,
    unpacked,
    unwrapped,
)
from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import loops
from lockstep_lint.analysis.forwards import shields
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import (
    base,
    has_star,
    idents,
    keyword,
    last,
    targets,
    walk,
)
from lockstep_lint.analysis.pinned import never_pins, pins_memory
from lockstep_lint.analysis.prepared import unprepared
from lockstep_lint.analysis.view import View
from lockstep_lint.analysis.workers import no_workers, own_loader
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at, edit

__all__ = ["RULE"]

MOVES = ("to", "cuda")
# These move the batches.
MOVERS = {"accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "composer", "lockstep", "trl"}


def check(view: View) -> Iterator[Found]:
    """Looks for blocking moves of batches that come from pinned memory, and for loaders without workers."""
    others = view.frameworks & MOVERS
    if (not others or others == {"accelerate"}) and pinned(view) and not view.mps_only:
        for site in view.sites(*MOVES):
            device = next(iter(site.call.args), None) if site.name == "to" else None
            if others and not unprepared(view, site):
                continue
            if blocking(view, site) and not view.on_cpu(site) and not view.is_cpu(device, site.scope):
                yield at(
                    site,
                    "the batch is in pinned memory but this move waits for it: add non_blocking=True",
                    edit=edit("keyword", site.call, "non_blocking", "True"),
                )
    if not view.gpu:
        return
    for site in view.sites("DataLoader"):
        if view.full(site).startswith("torch") and no_workers(view, site):
            yield at(site, "loads in the training process: give the loader num_workers", opinion=True)
    for site in view.sites("__init__"):
        if own_loader(view, site) and no_workers(view, site):
            yield at(site, "loads in the training process: give the loader num_workers", opinion=True)


def pinned(view: View) -> bool:
    """Whether a training loader of the programs pins its memory."""
    return any(map(pins_memory, view.project.family(view.module)))


def blocking(view: View, site: Site) -> bool:
    """Whether a call moves the variable of a loop over training batches, and waits."""
    if keyword(site.call, "non_blocking") is not None or has_star(site.call) or len(site.call.args) > 2:
        return False
    if site.name == "to" and not moves_device(site.call):
        return False
    if site.name == "cuda" and len(site.call.args) > 1:
        return False
    root = base(unwrapped(site.receiver)) if site.receiver is not None else None
    if not isinstance(root, ast.Name):
        return False
    if (root.id in drawn(view, site) and not replaced(site, root.id, set())) or fed(view, site, root.id):
        return True
    for loop in loops(site.stmt, site.module):
        if isinstance(loop, ast.For) and over_batches(view, loop, site) and carried(site, root.id, loop):
            tests = held_out(loop) or EVALUATION.search(site.scope.name) or shields(site)
            return any(t.loop is loop for t in view.trainings.near(site.module)) or not tests
    return False


def drawn(view: View, site: Site) -> set[str]:
    """The names of batches that `next(iterator)` gives, and the variables of comprehensions over them."""
    scope = site.scope
    if not {"next", "__next__"} & scope.module.by_name.keys():
        return set()
    around = loops(site.stmt, site.module)
    trains = any(training.loop in around for training in view.trainings.of(site.module))
    looping = bool(around) and not shields(site) and not EVALUATION.search(scope.name)
    own = {
        key
        for key, binds in scope.binds.items()
        for bind in binds
        for source in (asked(bind.value),)
        if source is not None
        and gives_batches(view, source, site)
        and (trains or (not of_held_out(view, source, scope) and (looping or stepping(view, site))))
    }
    own |= {
        key
        for key, binds in (scope.binds.items() if own else ())
        for bind in binds
        if bind.path and isinstance(bind.value, ast.Name) and bind.value.id in own
    }
    return own | comprehension_names(site, own) if own else own


def of_held_out(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether what `next` asks is held-out data, by its name or by that of the loader which it runs over."""
    made = [call for call, _, _ in view.origins.calls_of(node, scope) if last(call) in ("iter", "enumerate")]
    names = [last(node), *(name for call in made for arg in call.args[:1] for name in idents(arg))]
    return any(map(EVALUATION.search, names))


def stepping(view: View, site: Site) -> bool:
    """Whether a call is made in the steps of a training, and not once for a look at the data."""
    trainings = view.trainings
    return any(
        other.stmt is site.stmt
        for training in (*trainings.near(site.module), *trainings.lone(site.module))
        for other in trainings.each_step(training)
    )


def gives_batches(view: View, node: ast.expr, site: Site) -> bool:
    """Whether `next` of a value is a batch: of an iterator of a loader, or of a project's generator over one."""
    if pinned_loader(view, node, site.scope):
        return True
    for origin in view.origins.of(node, site.scope):
        plain = origin.call is not None and origin.call is not node and last(origin.call) in ("iter", "enumerate")
        if plain and origin.call is not None and origin.call.args:
            return pinned_loader(view, origin.call.args[0], origin.scope)
        function = view.calls.target(origin.call, origin.scope) if origin.call is not None else None
        if function is not None and function.kind == "function" and origin.call is not None and origin.call.args:
            yields = any(isinstance(part, ast.Yield) for stmt in function.stmts for part in walk(stmt))
            return yields and pinned_loader(view, origin.call.args[0], origin.scope)
    return False


def fed(view: View, site: Site, name: str, depth: int = 2) -> bool:
    """Whether the name is, or comes out of, a parameter that a caller gives the variable of its loop over training
    batches, itself or by a function in between.
    """
    scope = site.scope
    if scope.kind != "function":
        return False
    callers = callers_of(view, scope)
    params = [*scope.params, *rest_of(scope)]
    own = {param for param in params if any(gives_batch(view, c, scope, param, depth) for c in callers)}
    if not callers and maps(view, scope):
        own = set(scope.params)
    for _ in range(3 if own else 0):
        own |= {
            key
            for key, binds in scope.binds.items()
            for bind in binds
            if bind.value is not None and bind.stmt.lineno <= site.line and taken(bind.value, own)
        }
    return name in own or name in comprehension_names(site, own)


def callers_of(view: View, scope: Scope) -> list[Site]:
    """The calls that may run a function: also those that name the method of a base class which it stands in for."""
    parents = view.names.parents(scope.owner) if scope.owner is not None and not scope.name.startswith("__") else ()
    replaced_ones = {view.names.member(parent, scope.name) for parent in parents} - {None, scope}
    return [site for each in (scope, *replaced_ones) if each is not None for site in view.calls.callers(each)]


def maps(view: View, scope: Scope) -> bool:
    """Whether a function is handed, with a training loader, to a class of the project that is run over in its place
    (`Prepared(train_loader, prepare)`).
    """
    if not view.effects.mentioned(view.module, "__iter__"):
        return False
    for site in scope.module.sites():
        given = [*site.call.args, *(item.value for item in site.call.keywords)]
        if not any(isinstance(value, ast.Name) and value.id == scope.name for value in given):
            continue
        maker = view.calls.target(site.call, site.scope)
        if maker is None or maker.owner is None or view.names.member(maker.owner, "__iter__") is None:
            continue
        if any(view.kinds.is_loader(v, site.scope) and not EVALUATION.search(last(v)) for v in given):
            return True
    return False


def rest_of(scope: Scope) -> list[str]:
    """The name of the parameter that takes the rest of the arguments (`*args`), if there is one."""
    vararg = getattr(getattr(scope.node, "args", None), "vararg", None)
    return [vararg.arg] if vararg is not None else []


def gives_batch(view: View, caller: Site, scope: Scope, param: str, depth: int) -> bool:
    """Whether a call passes the variable of a loop over training batches for a parameter."""
    values = caller.call.args if param in rest_of(scope) else [passed(caller, scope, param)]
    names = [value.id for value in values if isinstance(value, ast.Name)]
    return any(
        isinstance(loop, ast.For)
        and any(key in names and not surely_replaced(caller, key, loop) for key, _ in targets(loop.target))
        and over_batches(view, loop, caller)
        and not held_out(loop)
        and not EVALUATION.search(caller.scope.name)
        for loop in (loops(caller.stmt, caller.module) if names else ())
    ) or (depth > 0 and caller.scope is not scope and any(fed(view, caller, name, depth - 1) for name in names))


def held_out(loop: ast.For) -> bool:
    return any(EVALUATION.search(name) for name in idents(loop.iter))


def over_batches(view: View, loop: ast.For, site: Site) -> bool:
    """Whether a loop runs over a loader."""
    return pinned_loader(view, view.kinds.iterated(loop.iter, site.scope), site.scope)


def pinned_loader(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether a value is a loader, also one of several (`data = loaders["train"]`), and may pin its memory."""
    found = view.kinds.is_loader(node, scope) or any(
        isinstance(origin.node, ast.Subscript) and view.kinds.is_loader(origin.node, origin.scope)
        for origin in view.origins.of(node, scope)
    )
    return found and not never_pins(view.origins, node, scope)


def carried(site: Site, name: str, loop: ast.For) -> bool:
    """Whether a variable is one of the loop's own, or unpacked from one, itself or by way of another."""
    own = {key for key, _ in targets(loop.target)}
    if name in own or replaced(site, name, own, loop.lineno):
        return not replaced(site, name, own, loop.lineno)
    for _ in range(2):
        own |= unpacked(site, own, loop.lineno)
    for bind in site.scope.binds.get(name, []):
        if bind.value is not None and loop.lineno <= bind.stmt.lineno <= site.line:
            value = placed(bind)
            root = base(value)
            if isinstance(root, ast.Name) and root.id in own and not moved(value):
                return True
    return name in comprehension_names(site, own)


RULE = Rule(
    code="LS022",
    name="pinned memory, blocking copy",
    what=(
        "A loader pins its memory, but the batches are moved without `non_blocking=True`; or, as an opinion, a "
        "loader has no workers."
    ),
    why=(
        "Pinned memory pays off by copying while the GPU computes. A blocking copy waits for it and pays only the"
        " cost of pinning."
    ),
    bad="""
import torch
from torch.utils.data import DataLoader

def train(model, data, optimizer, criterion, device):
    loader = DataLoader(data, batch_size=32, num_workers=4, pin_memory=True)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
""",
    good="""
import torch
from torch.utils.data import DataLoader

def train(model, data, optimizer, criterion, device):
    loader = DataLoader(data, batch_size=32, num_workers=4, pin_memory=True)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
""",
    severity=Severity.WARNING,
    confidence=Confidence.HIGH,
    check=check,
    fix="safe",
    remedy="Add non_blocking=True to the move",
    moot=frozenset({"lockstep"}),
    note=(
        "It is told at the move, whichever file of the program makes the loader, unless that loader is in sight and "
        "pins nothing; held-out data counts only in a loop that trains, and Apple's GPUs not at all, for which no "
        "memory is pinned. What a comparison picks out of a batch (`batch[keep > 0]`) is a copy that is not pinned, "
        "and what was moved before is on the GPU. The opinion is told at a "
        "`DataLoader(...)` without `num_workers`, or with 0, in a program that knows of GPUs, such as "
        "`DataLoader(data, batch_size=8)`, and at the `super().__init__(...)` of a class that derives from DataLoader; "
        "not for a data set of tensors that are on the GPU already, which workers could not hand out."
    ),
)
