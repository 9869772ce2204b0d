"""LS004: set_epoch missing or constant."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import above, guards, inside, loops
from lockstep_lint.analysis.drafts import epoch_set
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import constant, dotted, is_none, keyword, last, strings, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


def check(view: View) -> Iterator[Found]:
    """Looks for set_epoch in the programs that use a DistributedSampler for training over epochs."""
    for site in view.sites("set_epoch"):
        value = site.call.args[0] if site.call.args else None
        fixed = isinstance(value, ast.Constant) and isinstance(constant(value), int) and loops(site.stmt, view.module)
        if (fixed and not set_elsewhere(view, site)) or (value is not None and stays(view, site, value)):
            yield at(site, "set_epoch always gets the same number: pass the epoch, or every epoch has the same order")
    if any(map(sets_epoch, view.project.family(view.module))):
        yield from renamed(view)
        return
    near = view.trainings.near(view.module)
    if not any(list(view.trainings.epochs(t)) for t in near) and not (near and endless(view)):
        return
    for site in view.sites():
        if site.name != "DistributedSampler" and from_helper(view, site):
            yield at(site, "set_epoch is never called on this sampler, so every epoch has the first one's order")
        elif site.name == "DistributedSampler" and trains(view, site):
            yield at(
                site,
                "set_epoch is never called, so every epoch has the first one's order: call sampler.set_epoch(epoch)",
                proposal=epoch_set(view, site),
            )


@kept
def sets_epoch(module: Module) -> bool:
    """Whether a file calls `set_epoch`, or hands it on: more than that a class of samplers has such a method."""
    if "'set_epoch'" in module.text or '"set_epoch"' in module.text:
        return True  # by its name (`getattr(sampler, "set_epoch")`)
    own = [scope for scope in module.scopes if scope.name == "set_epoch"]
    inner = sum(len(scope.named("set_epoch")) for scope in own)  # super().set_epoch(epoch)
    return module.words["set_epoch"] > len(own) + inner


def renamed(view: View) -> Iterator[Found]:
    """Looks for samplers whose name is another sampler's before any epoch: `set_epoch` is called on the other one."""
    calls = [site for member in view.project.family(view.module) for site in member.sites("set_epoch")]
    if not calls or not all(by_name(view, site) for site in calls):
        return
    for site in view.sites():
        makes, names = site.name == "DistributedSampler", [bind.key for bind in site.scope.bound(site.stmt)]
        if not any("sampler" in name for name in names) or any(map(EVALUATION.search, strings(site.call))):
            continue
        if lost(site) and (trains(view, site) if makes else from_helper(view, site)):
            yield at(site, "its name is given to another sampler before set_epoch is called on it: keep both")


def by_name(view: View, site: Site) -> bool:
    """Whether set_epoch is called on a sampler by a name of its own, which certainly is not that of a loader
    (`loader.sampler`, or a name or an argument that it is given as).
    """
    receiver = site.receiver
    if not isinstance(receiver, ast.Name | ast.Attribute) or "sampler" not in last(receiver):
        return False
    if not isinstance(receiver, ast.Name) and dotted(receiver.value) != "self":
        return False
    found = [origin.node for origin in view.origins.of(receiver, site.scope) if not is_none(origin.node)]
    return bool(found) and all(isinstance(node, ast.Call) and last(node) != "getattr" for node in found)


def lost(site: Site) -> bool:
    """Whether the name that a sampler is given gets another one for certain, where nothing but a loader has read it,
    which is not gone through before (once, with the sampler's first order).
    """
    scope, stmt = site.scope, site.stmt
    key = next((bind.key for bind in scope.bound(stmt) if "sampler" in bind.key), "")
    later = [bind.stmt for bind in scope.binds.get(key, []) if bind.stmt.lineno > stmt.lineno]
    if not later or "." in key or above(later[0], site.module)[:1] != above(stmt, site.module)[:1]:
        return False
    start, end = stmt.end_lineno or stmt.lineno, later[0].end_lineno or later[0].lineno
    loads = [call for call in scope.named("DataLoader") if start < call.line <= end]
    taken = {id(keyword(call.call, "sampler")) for call in loads}
    taken |= {id(node) for call in scope.named("len") for node in call.call.args}
    held = {bind.key for call in loads for bind in scope.bound(call.stmt)}
    between = [node for node in walk(scope.node) if isinstance(node, ast.Name) and start < node.lineno <= end]
    return not any(
        isinstance(node.ctx, ast.Load) and id(node) not in taken and (node.id == key or node.id in held)
        for node in between
    )


def set_elsewhere(view: View, site: Site) -> bool:
    """Whether another call gives the same sampler an epoch that is no literal (the literal is for an evaluation)."""
    key = dotted(site.receiver)
    return any(
        dotted(other.receiver) == key and other.call.args and not isinstance(other.call.args[0], ast.Constant)
        for other in view.sites("set_epoch")
    )


def stays(view: View, site: Site, value: ast.expr) -> bool:
    """Whether set_epoch is given a name that no epoch changes, or a parameter that all callers give a literal."""
    key = dotted(value)
    scope = site.scope
    if key is None:
        return False
    if key in scope.params and key not in scope.binds:
        callers = view.calls.callers(scope)
        given = [passed(caller, scope, key) for caller in callers]
        fixed = bool(given) and all(isinstance(constant(v), int) for v in given)
        again = bool(callers) and bool(loops(callers[0].stmt, callers[0].module))
        if not loops(site.stmt, view.module):
            return fixed and again
        if again and not fixed:
            return False  # each call is an epoch, or some
    if "." in key and not key.startswith(("args.", "cfg.", "config.", "opt.")):
        return False  # an attribute may change anywhere
    epochs = {
        id(loop)
        for t in view.trainings.near(view.module)
        for loop, home, _ in view.trainings.epochs(t)
        if home is scope
    }
    around = [loop for loop in loops(site.stmt, view.module) if id(loop) in epochs]
    if not around or key.split(".")[-1] in scope.globals:
        return False
    changed = [bind.stmt for other in view.scopes for bind in other.binds.get(key, []) if other is scope or "." in key]
    return not any(stmt is around[-1] or inside(stmt, around[-1], view.module) for stmt in changed)


def endless(view: View) -> bool:
    """Whether the programs feed themselves from `while True: for batch in loader: yield batch`."""
    for member in view.project.family(view.module):
        for scope in member.scopes:
            for stmt in scope.stmts if scope.kind == "function" else ():
                inner = stmt.body[0] if isinstance(stmt, ast.While) else None
                if isinstance(inner, ast.For) and view.kinds.is_loader(inner.iter, scope):
                    return True
        if "StopIteration" in member.text and any(restarts(view, scope) for scope in member.scopes):
            return True
    return False


def restarts(view: View, scope: Scope) -> bool:
    """Whether a function takes its loader up anew when it has run out (`except StopIteration: it = iter(loader)`)."""
    return any(
        isinstance(handler, ast.ExceptHandler) and last(handler.type) == "StopIteration"
        for site in scope.named("iter")
        if site.call.args and view.kinds.is_loader(site.call.args[0], scope)
        for node, place in above(site.stmt, scope.module)
        if isinstance(node, ast.Try) and place == "handlers"
        for handler in node.handlers
    )


def from_helper(view: View, site: Site) -> bool:
    """Whether a call has a function of another file make a DistributedSampler for training, or a loader with one."""
    function = view.calls.target(site.call, site.scope)
    if function is None or function.module is view.module or function.owner is not None:
        return False
    if constant(keyword(site.call, "shuffle")) is False or not trains(view, site):
        return False
    made = [s for s in function.named("DistributedSampler") if trains(view, s) and not switched_off(view, site, s)]
    if "sampler" in site.name:
        return any(s.call is value for value in function.returns() for s in made)
    loads = [s for s in function.named("DataLoader") if view.full(s).endswith("DataLoader")]
    return bool(made and loads) and view.ranks.every(site.stmt, site.scope)


def switched_off(view: View, site: Site, made: Site) -> bool:
    """Whether a call gives its function a flag that is False, under which a sampler is made."""
    around = guards(made.stmt, made.module)
    flags = {guard.test.id for guard in around if guard.when and isinstance(guard.test, ast.Name)}
    for flag in (flags & set(made.scope.params)) - made.scope.binds.keys():
        found = view.origins.of(passed(site, made.scope, flag), site.scope)
        if found and all(constant(origin.node) is False for origin in found):
            return True
    return False


def trains(view: View, site: Site) -> bool:
    """Whether a sampler shuffles and is not for evaluation."""
    if isinstance(keyword(site.call, "shuffle"), ast.Constant) and constant(keyword(site.call, "shuffle")) is False:
        return False
    names = [
        bind.key
        for binds in site.scope.binds.values()
        for bind in binds
        if bind.value is not None and holds(bind.value, site.call)
    ]
    data = site.call.args[0] if site.call.args else keyword(site.call, "dataset")
    given = [dotted(data) or "", site.scope.name]
    held = [EVALUATION.search(name.split(".")[-1]) for name in names]
    return not (held and all(held)) and not any(EVALUATION.search(name.split(".")[-1]) for name in given)


def holds(value: ast.expr, call: ast.Call) -> bool:
    """Whether an assigned value is the sampler, or a conditional or tuple with it."""
    if isinstance(value, ast.IfExp):
        return holds(value.body, call) or holds(value.orelse, call)
    return value is call


RULE = Rule(
    code="LS004",
    name="set_epoch missing",
    what=(
        "A DistributedSampler shuffles for training, but its `set_epoch` is never called, or always with the same"
        " number."
    ),
    why=(
        "The sampler's order depends on its seed and epoch alone: without set_epoch every epoch has the same "
        "order and the same division among ranks."
    ),
    bad="""
import torch
from torch.utils.data import DataLoader, DistributedSampler

def train(model, data, optimizer, device):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(10):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
""",
    good="""
import torch
from torch.utils.data import DataLoader, DistributedSampler

def train(model, data, optimizer, device):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(10):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Call sampler.set_epoch(epoch) at the start of every epoch",
    moot=frozenset({"accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "composer", "lockstep", "trl"}),
    note=(
        "It is told at the sampler, in the file that makes it, or where a file gets it from a helper of another "
        "file (unless a flag that this is given turns the sampler off); once a place, whatever file the epochs are in. "
        "Where set_epoch is called, it is told of a sampler whose name another one gets first, as the call is then for "
        "that one alone. A class of samplers that only defines set_epoch calls nothing."
    ),
)
