"""LS002: DDP wrapped before the model is on its device, or a model moved in part."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import dotted, keyword, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# What makes a module on the CPU.
MAKERS = ("torchvision.models.", "timm.create_model", "segmentation_models_pytorch.")
MOVES = {"to", "cuda", "xpu", "npu"}


def check(view: View) -> Iterator[Found]:
    """Looks at every DDP wrapper for moves of the model before, in part, or after it."""
    for kind, site in view.wrappers.made(view.module):
        if kind != "ddp":
            continue
        inner = view.wrappers.inner(site.call)
        name = dotted(inner) or ""
        if not (name or built_inside(inner)) or moved_before(view, site, name) or moved_as_another(view, site):
            continue
        if not made_here(view, inner, site.scope):
            continue
        called = f"'{name}'" if name else "the model"
        late = moved_after(site, name)
        if late is not None:
            yield at(
                late,
                f"moved to its device only after DDP took it on line {site.line}: move the model first, then wrap it",
            )
        elif name and part_moved(site.scope, name, site.line):
            yield at(site, f"only a part of {called} was moved to the device: move the whole model before wrapping it")
        elif wants_gpu(site.call) and not placed(view, site):
            yield at(site, f"{called} is still on the CPU here: move it to its device before wrapping it")


def built_inside(inner: ast.expr | None) -> bool:
    """Whether the model is made where it is wrapped (`DDP(Net())`), and not moved there."""
    return isinstance(inner, ast.Call) and not any(
        isinstance(node, ast.Attribute) and node.attr in MOVES for node in walk(inner)
    )


def wants_gpu(call: ast.Call) -> bool:
    """Whether the wrapper names devices, so that its model must be on a GPU."""
    value = keyword(call, "device_ids")
    return value is not None and not isinstance(value, ast.Constant | ast.IfExp)


def moved_before(view: View, site: Site, name: str) -> bool:
    """Whether the model was moved, or may have been, before the wrapper."""
    scope: Scope | None = site.scope
    while scope is not None:
        for move in scope.sites:
            if (
                move.name in MOVES
                and dotted(move.receiver) == name
                and (move.line <= site.line or scope is not site.scope)
            ):
                return True
            if move.name in MOVES and scope is not site.scope and move.receiver is not None:
                return True
        scope = scope.parent
    bind = [b for b in site.scope.binds.get(name, []) if b.stmt.lineno < site.line and b.value is not None]
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOVES
        for b in bind
        for node in walk(b.value)  # type: ignore[arg-type]
    )


def moved_as_another(view: View, site: Site) -> bool:
    """Whether the model was moved before by another of its names (`raw = model`, `torch.compile(raw)`)."""
    made = {call for call, _, _ in view.origins.calls_of(view.wrappers.inner(site.call), site.scope)}
    return any(
        made & {call for call, _, _ in view.origins.calls_of(move.receiver, move.scope)}
        for move in site.scope.sites
        if move.name in MOVES and move.line <= site.line and isinstance(move.receiver, ast.Name)
    )


def moved_after(site: Site, name: str) -> Site | None:
    """A move of the model, or of the wrapper, that comes after the wrapper was made."""
    wrapper = next((b.key for bs in site.scope.binds.values() for b in bs if b.value is site.call), None)
    for move in site.scope.sites:
        if move.name not in MOVES or not (move.call.args or move.name == "cuda"):
            continue
        if move.line > site.line and dotted(move.receiver) in {name, wrapper} - {"", None}:
            return move
        if move.receiver is site.call:
            return move
    return None


def part_moved(scope: Scope, name: str, line: int) -> bool:
    """Whether an attribute of the model was moved."""
    return any(
        move.name in MOVES and move.line < line and (dotted(move.receiver) or "").startswith(f"{name}.")
        for move in scope.sites
    )


def made_here(view: View, node: ast.expr | None, scope: Scope) -> bool:
    """Whether all that the model can be is built in this very function, by a class, without a device argument."""
    found = list(view.origins.calls_of(node, scope))
    if not found or len(found) != len(view.origins.of(node, scope)):
        return False
    return all(home is scope and built(view, call, home, full) for call, home, full in found)


def built(view: View, call: ast.Call, scope: Scope, full: str) -> bool:
    """Whether a call makes a module of torch.nn or of a visible class, on the CPU."""
    owner = view.names.definition(call.func, scope)
    if any(
        "cuda" in ast.unparse(argument) or "device" in ast.unparse(argument)
        for argument in (*call.args, *(k.value for k in call.keywords))
    ):
        return False
    if owner is not None and owner.kind == "class":
        inside = [s for method in owner.defs.values() for s in method.sites]
        return not any(s.name in {*MOVES, "device"} for s in inside)
    if any(item.arg in (None, "device_map") for item in call.keywords):
        return False  # which may put it on a device, or names what does
    if full.startswith("torch.nn."):  # no function, and nothing around a model that may have been moved
        models = any(view.kinds.is_model(value, scope) for value in call.args)
        return full.rpartition(".")[2][:1].isupper() and not models and "parallel" not in full
    made = full.startswith("transformers.") and full.endswith((".from_pretrained", ".from_config"))
    return made or full.startswith(MAKERS)


def placed(view: View, site: Site) -> bool:
    """Whether a default device makes modules appear where they belong."""
    return view.effects.mentioned(
        view.module, "set_default_device", "set_default_tensor_type", "with device", "with torch.device"
    )


RULE = Rule(
    code="LS002",
    name="DDP before the model is on its device",
    what=(
        "DistributedDataParallel gets a model that is on the CPU, or only in part on its device, and it is moved "
        "later or never."
    ),
    why=(
        "DDP registers the parameters that it is given. Moving the model afterwards leaves its buckets and hooks with "
        "other tensors: the run stops with a device mismatch, or trains parameters that are never exchanged."
    ),
    bad="""
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(local_rank):
    model = nn.Linear(4, 2)
    model = DDP(model)
    model = model.to(local_rank)
    return model
""",
    good="""
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(local_rank):
    model = nn.Linear(4, 2).to(local_rank)
    return DDP(model, device_ids=[local_rank])
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Call model.to(device) before DistributedDataParallel(model)",
)
