"""LS054: a model that grows, or is made anew, after its optimizer took its parameters."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import dotted
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import CallBlock, Event, apart, seen_from
from lockstep_lint.events.query import given_as, owner_of, subject, things
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

MESSAGES = {
    "remake": "replaces the model whose parameters the optimizer took on line {line}: it steps those of the old one, "
    "so make the optimizer after it",
    "grow": "gives the model parameters that the optimizer of line {line} does not have, so they are never trained: "
    "make it after, or call add_param_group",
}
Place = tuple[ast.expr, Scope]


def check(view: View) -> Iterator[Found]:
    """Looks for models that change between the making of their optimizer and its next step."""
    done = set()
    for run in runs(view):
        for event in run.of("grow", "remake"):
            taken = outgrown(view, run, event)
            site = seen_from(event, taken) if taken is not None else None
            node = site.call if site is not None else event.node
            home = site.module if site is not None else event.module
            if taken is not None and home is view.module and node not in done:
                done.add(node)
                severity = Severity.HINT if event.detail == "resize" else None
                yield Found(node, MESSAGES[event.kind].format(line=taken.line), severity)


def outgrown(view: View, run: Run, event: Event) -> Event | None:
    """The last optimizer that a changed model's parameters were given to before, if it makes the next step."""
    makers = [each for each in run.of("optimizer", "group") if each.mark.subject is not None]
    earlier = [each for each in makers if each.place < event.place and not apart(each, event)]
    taken = next((each for each in reversed(earlier) if concerns(view, event, each)), None)
    first = (each.place for each in run.of(event.kind) if each.node is event.node)
    forward = any(isinstance(block, CallBlock) and block.function.name == "forward" for block in event.path)
    if taken is None or (forward and event.tests and next(first) < taken.place):
        return None  # what is made at the first forward alone may have been made before the optimizer
    for later in after(run, event):
        if later.kind in ("optimizer", "group"):
            if later.mark.subject is None or concerns(view, event, later, parts=True):
                return None
        elif later.kind == "remake" and later is not event and key_of(later) in map(key, owners(event)):
            return None
        elif later.kind == "step" and steps_by(view, later, taken):
            return taken
    return None


def after(run: Run, event: Event) -> Iterator[Event]:
    """Yield what follows an event, with the next turns of the loops around it."""
    place = event.place + 1
    for loop in reversed(event.loops):
        yield from run.events[place : loop.end]
        yield from run.events[loop.start : event.place]
        place = loop.end
    yield from run.events[place:]


def concerns(view: View, event: Event, maker: Event, parts: bool = False) -> bool:
    """Check whether an optimizer is given the parameters of the model that an event changes, or (`parts`) some."""
    given = list(owners(maker)) if parts else [owner(maker, *subject(maker))]
    if event.kind == "remake":
        return key_of(event) in map(key, given)
    mine = frozenset().union(*(things(view, *each) for each in owners(event)))
    return any(mine & things(view, *each) for each in given)


def steps_by(view: View, step: Event, maker: Event) -> bool:
    """Check whether a step is certainly one of an optimizer."""
    found = things(view, *subject(step))
    receiver = maker.mark.site.receiver if maker.mark.site is not None else None
    return bool(found) and found == ({maker.node} if maker.kind == "optimizer" else things(view, receiver, maker.scope))


def owners(event: Event) -> Iterator[Place]:
    """Yield what an event changes or takes, and what that is a part of, as the calls on the way name them."""
    node, scope = event.mark.subject, event.scope
    while node is not None:
        found, home = owner(event, node, scope)
        if dotted(found) != "self":
            yield found, home
        node, scope = getattr(found, "value", None), home


def owner(event: Event, node: ast.expr | None, scope: Scope) -> Place:
    """Return an object as the calls around an event name it: `self` is what the method is called of."""
    found, home = given_as(event, node, scope)
    for block in reversed(event.path):
        if isinstance(block, CallBlock) and block.function is home and dotted(found) == "self":
            func, method = block.site.call.func, block.site.name == block.function.name
            found, home = given_as(event, block.site.receiver if method else func, block.site.scope)
            found = found if found is not None else func
    assert found is not None
    return found, home


def key(place: Place) -> tuple[object, str | None]:
    """Return what a variable is known by: the scope or the class that it belongs to, and its name."""
    return owner_of(*place), dotted(place[0])


def key_of(event: Event) -> tuple[object, str | None]:
    """Return the variable that an event gives a new model."""
    return key(owner(event, event.mark.subject, event.scope))


RULE = Rule(
    code="LS054",
    name="model grown after its optimizer",
    what="A model gets new layers, or is made anew, after an optimizer has been given its parameters.",
    why=(
        "The optimizer keeps the parameters that it was given. What the model gets later has gradients, and no step "
        "ever changes it: the new layers stay as they were drawn, and a new model does not learn at all."
    ),
    bad="""
import torch
from torch import nn
from torchvision.models import resnet18

def main(loader, classes):
    model = resnet18(weights="DEFAULT")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.fc = nn.Linear(512, classes)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    good="""
import torch
from torch import nn
from torchvision.models import resnet18

def main(loader, classes):
    model = resnet18(weights="DEFAULT")
    model.fc = nn.Linear(512, classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Make the optimizer after the model has all its layers, or give it the new ones by add_param_group",
    moot=frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "composer", "lockstep"}),
    note=(
        "It is told at the call or assignment that changes the model, where the next step is of the optimizer made "
        "before. `.to()` and `convert_sync_batchnorm` keep the parameters. `resize_token_embeddings` is a hint: it "
        "makes new ones of heads that are not tied to the embedding, and in older versions of transformers always."
    ),
)
