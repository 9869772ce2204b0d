"""LS006: criterion or target left on the CPU."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import inside
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import base, dotted, keyword, last, mentions, targets, walk
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

MOVES = ("to", "cuda")
LOSSES = re.compile(
    r"^torch\.nn\.(?!.*CTC)(\w+\.)*\w+Loss$|^torch\.nn\.functional\.(?!ctc)\w+(_loss|_entropy|_with_logits)$"
)
TENSORS = {"tensor", "as_tensor", "FloatTensor", "from_numpy", "ones", "zeros", "Tensor", "full"}


def check(view: View) -> Iterator[Found]:
    """Find class weights on the CPU, and targets that stay there while inputs move."""
    if not view.gpu:
        return
    for site in view.sites("CrossEntropyLoss", "NLLLoss", "BCEWithLogitsLoss", "BCELoss"):
        weight = keyword(site.call, "weight") or keyword(site.call, "pos_weight")
        if weight is not None and on_cpu(view, weight, site.scope) and not is_moved(view, site.call, site.scope):
            yield at(
                site,
                "the weights of this loss stay on the CPU: move the criterion to the model's device with .to(device)",
            )
    for training in view.training:
        yield from left_target(view, training)


def on_cpu(view: View, node: ast.expr, scope: Scope) -> bool:
    """Check whether a tensor is certainly made on the CPU and not moved."""
    found = view.origins.of(node, scope)
    direct = [node, *(o.node for o in found)]
    for item in direct:
        for part in walk(item):
            if isinstance(part, ast.Call) and (last(part.func) in MOVES or keyword(part, "device") is not None):
                return False
    return bool(found) and all(isinstance(o.node, ast.Call) and last(o.node.func) in TENSORS for o in found)


def is_moved(view: View, call: ast.Call, scope: Scope) -> bool:
    """Check whether the criterion is moved where it is made, or later under its name."""
    name = next(
        (
            b.key
            for bs in scope.binds.values()
            for b in bs
            if b.value is not None and any(n is call for n in walk(b.value))
        ),
        None,
    )
    if (
        name is not None
        and name.startswith("self.")
        and scope.owner is not None
        and view.kinds.is_module_class(scope.owner)
    ):
        return True  # a submodule, which moves with its owner
    for member in view.project.family(view.module):
        for site in member.sites(*MOVES):
            if site.receiver is call or (name is not None and last(site.receiver) == name.split(".")[-1]):
                return True
    return name is None


def left_target(view: View, training: Training) -> Iterator[Found]:
    """Yield a loop that moves its inputs but compares outputs with unmoved targets."""
    loop, scope = training.loop, training.scope
    if not isinstance(loop, ast.For):
        return
    names = [name for name, _ in targets(loop.target)]
    body = view.trainings.body(loop, scope)
    shifted = {name for name in names if any(moves(view, s.call, name) for s in body)}
    for site in body:
        for value in site.call.args[1:2] if shifted else ():
            name = dotted(value)
            if name not in names or name in shifted or not compares(view, site):
                continue
            rebound = any(inside(bind.stmt, loop, scope.module) for bind in scope.binds.get(name or "", []))
            if not rebound and feeds_model(view, shifted, body):
                yield at(
                    site, f"'{name}' was not moved to the device that the model's output is on: move it like the inputs"
                )


def compares(view: View, site: Site) -> bool:
    """Check whether a loss of torch needs both values on one device. CTC's does not."""
    called = site.call.func
    made = [full for _, _, full in view.origins.calls_of(called, site.scope)]
    found = made or [view.full(site)]
    return all(LOSSES.search(full) for full in found)


def moves(view: View, call: ast.Call, name: str) -> bool:
    """Check whether a call moves a variable, or something read from it."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in MOVES and getattr(base(call), "id", "") == name


def feeds_model(view: View, shifted: set[str], body: list) -> bool:  # type: ignore[type-arg]
    """Check whether a moved variable is what a model is called with."""
    return any(
        view.kinds.is_model(site.call.func, site.scope)
        and any(mentions(arg, name) for arg in site.call.args for name in shifted)
        for site in body
    )


RULE = Rule(
    "LS006", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=TRAINERS | {"accelerate", "lightning_fabric"}
)
