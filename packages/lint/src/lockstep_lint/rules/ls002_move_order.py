"""LS002: DDP wrapped before the model is on its device, or a model moved in part."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import withs
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import dotted, keyword
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event, apart
from lockstep_lint.events.query import subject, things
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# What makes a module on the CPU.
MAKERS = ("torchvision.models.", "timm.create_model", "segmentation_models_pytorch.")
MOVES = {"to", "cuda", "xpu", "npu"}


def check(view: View) -> Iterator[Found]:
    """Looks at every DDP wrapper for moves of the model before, in part, or after it."""
    for run in runs(view):
        for wrap in run.of("wrap"):
            site = wrap.mark.site
            if wrap.detail != "ddp" or site is None or wrap.module is not view.module or not made_here(view, wrap):
                continue
            before, after = moves(view, run, wrap)
            name = dotted(wrap.mark.subject) or ""
            called = f"'{name}'" if name else "the model"
            if before:
                continue
            if after and after[0].module is view.module:
                late = f"moved to its device only after DDP took it on line {wrap.line}"
                yield Found(after[0].node, f"{late}: move the model first, then wrap it")
            elif name and part_moved(site.scope, name, site.line):
                yield at(
                    site, f"only a part of {called} was moved to the device: move the whole model before wrapping it"
                )
            elif wants_gpu(site.call) and not placed(view, site) and not made_there(view, wrap):
                yield at(site, f"{called} is still on the CPU here: move it to its device before wrapping it")


def moves(view: View, run: Run, wrap: Event) -> tuple[list[Event], list[Event]]:
    """The moves of the model that a wrapper is given, before the wrapper and after it."""
    model = things(view, wrap.mark.subject, wrap.scope)
    found = [m for m in run.of("move") if not apart(m, wrap) and model & things(view, *subject(m))]
    return [m for m in found if m.place < wrap.place], [m for m in found if m.place > wrap.place]


def wants_gpu(call: ast.Call) -> bool:
    """Whether the wrapper names devices, so that its model must be on a GPU."""
    value = keyword(call, "device_ids")
    return value is not None and not isinstance(value, ast.Constant | ast.IfExp)


def part_moved(scope: Scope, name: str, line: int) -> bool:
    """Whether an attribute of the model was moved."""
    return any(
        move.name in MOVES and move.line < line and (dotted(move.receiver) or "").startswith(f"{name}.")
        for move in scope.sites
    )


def made_here(view: View, wrap: Event) -> bool:
    """Whether all that the model can be is built in this very function, by a class, without a device argument."""
    found = things(view, wrap.mark.subject, wrap.scope)
    calls = [(made, home) for made in found if isinstance(made, ast.Call) and (home := scope_of(made, wrap.scope))]
    return bool(found) and len(calls) == len(found) and all(built(view, made, home) for made, home in calls)


def scope_of(call: ast.Call, scope: Scope) -> Scope | None:
    """The function, if a call stands in it."""
    return scope if any(site.call is call for site in scope.sites) else None


def built(view: View, call: ast.Call, scope: Scope) -> bool:
    """Whether a call makes a module of torch.nn or of a visible class, on the CPU."""
    full = view.names.qualify(call.func, scope)
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


def made_there(view: View, wrap: Event) -> bool:
    """Whether the model is made in a block whose device new modules get (`with device:`)."""
    scope = wrap.scope
    made = things(view, wrap.mark.subject, scope)
    around = [item for site in scope.sites if site.call in made for item in withs(site.stmt, site.module)]
    return any(full == "torch.device" for item in around for _, _, full in view.origins.calls_of(item, scope))


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
