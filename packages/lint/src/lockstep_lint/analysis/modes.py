"""What switches a model to eval mode, and what switches it back."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import Words, dotted, is_true, last
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View

__all__ = ["lasting", "trains_object"]

# A copy of the model, or another one, which stays in eval mode rightly.
OTHERS = Words(r"teacher|(?<![a-z])ema|(^|_)(ref|old|target|frozen|pretrained|best|final|test|eval)(_|$)")


def lasting(view: View, sites: list[Site], training: Training) -> Iterator[Site]:
    """The calls in a loop that switch the trained model to eval mode, in which it still is when it trains next."""
    ordered = sorted(sites, key=lambda site: (site.line, site.call.col_offset))
    switches = [place for place, site in enumerate(ordered) if evals_model(view, site, training)]
    trains = [place for place, site in enumerate(ordered) if view.trainings.trains([site])] if switches else []
    if not trains:
        return
    back = [place for place, site in enumerate(ordered) if switches_back(view, site)]
    if len(trains) > 1 and back:  # of two calls of what trains, one may only evaluate (`run(train=False)`)
        return
    for switch in switches:
        until = min(after(place, switch, len(ordered)) for place in trains)
        if not any(after(place, switch, len(ordered)) <= until for place in back):
            yield ordered[switch]


def after(place: int, start: int, turn: int) -> int:
    """How far a place comes after another in a loop, in whose next turn what stands before it comes."""
    return (place - start) % turn


def switches_back(view: View, site: Site) -> bool:
    """Whether a call switches a model to train mode, itself or below."""

    def switches(found: Site) -> bool:
        return found.name == "train" and found.receiver is not None and not trains_object(view, found)

    return view.effects.find([site], switches) is not None


def trains_object(view: View, site: Site) -> bool:
    """Whether `x.train(...)` is a method of the project rather than nn.Module's."""
    return view.calls.target(site.call, site.scope) is not None and not (
        not site.call.args or is_true(site.call.args[0])
    )


def evals_model(view: View, site: Site, training: Training) -> bool:
    """Whether a call switches the trained model to eval mode, itself or below."""
    if site.name == "eval":
        return site.receiver is not None and trained(view, site.receiver, site.scope, training)
    return any(
        trained(view, given_for(s, f, site), site.scope, training)
        for f in view.calls.runs(site)
        if EVALUATION.search(f.name) or of_same_object(view, f, training)
        for s in f.named("eval")
    )


def of_same_object(view: View, function: Scope, training: Training) -> bool:
    """Whether a function that trains nothing is no method, or one of the object that trains: what another object calls
    its model is another model (a metric's, say).
    """
    if function.name == "__init__" or view.trainings.trains(function.sites):
        return False
    return function.owner is None or function.owner in (training.scope.owner, training.backward.scope.owner)


def given_for(site: Site, function: Scope, call: Site) -> ast.expr | None:
    """What a method is called on: the caller's argument where that is a parameter, nothing where it is made there."""
    name = dotted(site.receiver)
    if name in function.params:
        return passed(call, function, name)
    return None if name in function.binds else site.receiver


# What the model is called under its wrapper.
INNER = Words(r"^(raw|unwrapped|bare)_(model|net)$|^(model|net|network)_(without|wo|no)_(ddp|dp|parallel)$")


def trained(view: View, node: ast.expr | None, scope: Scope, training: Training) -> bool:
    """Whether a value is the trained model, by its name or because the training switches it to train mode."""
    if last(node) in ("model", "net", "network", "ddp_model", "self") or INNER.search(last(node)):
        return True
    if node is None:
        return False
    modes = (s for s in training.scope.named("train") if s.receiver is not None and not trains_object(view, s))
    names = {dotted(node), unwrapped(node, scope)}
    return any(dotted(s.receiver) in names for s in modes) or (
        not OTHERS.search(last(node)) and called(unwrapped(node, scope), training)
    )


def unwrapped(node: ast.expr, scope: Scope) -> str | None:
    """The name of the wrapped model that a name is given the inside of (`raw_model = engine.module`)."""
    given = [bind.value for bind in scope.binds.get(dotted(node) or "", [])]
    made = {dotted(value.value) for value in given if isinstance(value, ast.Attribute) and value.attr == "module"}
    return made.pop() if len(made) == 1 else None


def called(name: str | None, training: Training) -> bool:
    """Whether the training calls a model of a name."""
    return name is not None and any(dotted(site.call.func) == name for site in training.scope.sites)
