"""LS002: DDP wrapped before the model is on its device, or after a partial move."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import withs
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import dotted, keyword
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import Event, apart
from lockstep_lint.events.query import subject, things
from lockstep_lint.events.run import runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

# What makes a module on the CPU.
MAKERS = ("torchvision.models.", "timm.create_model", "segmentation_models_pytorch.")
MOVES = {"to", "cuda", "xpu", "npu"}
DEFAULTS = ("set_default_device", "set_default_tensor_type", "with device", "with torch.device")
LATE = "moved to its device only after DDP took it on line {line}: move the model first, then wrap it"
PART = "only a part of '{name}' was moved to the device: move the whole model before wrapping it"
STAYS = "{name} is still on the CPU here: move it to its device before wrapping it"


def check(view: View) -> Iterator[Found]:
    """Find DDP wrappers whose model is moved in part, afterwards or not at all."""
    for run in runs(view):
        for wrap in run.of("wrap"):
            site = wrap.mark.site
            if wrap.detail != "ddp" or site is None or wrap.module is not view.module or not made_here(view, wrap):
                continue
            model, name = things(view, wrap.mark.subject, wrap.scope), dotted(wrap.mark.subject) or ""
            moves = [m for m in run.of("move") if not apart(m, wrap) and model & things(view, *subject(m))]
            if any(move.place < wrap.place for move in moves):
                continue
            if moves and moves[0].module is view.module:
                yield Found(moves[0].node, LATE.format(line=wrap.line))
            elif name and part_moved(site.scope, name, site.line):
                yield at(site, PART.format(name=name))
            elif wants_gpu(site.call) and not view.effects.mentioned(view.module, *DEFAULTS):
                yield at(site, STAYS.format(name=f"'{name}'" if name else "the model"))


def wants_gpu(call: ast.Call) -> bool:
    """Check whether a wrapper names devices, so that its model must be on a GPU."""
    value = keyword(call, "device_ids")
    return value is not None and not isinstance(value, ast.Constant | ast.IfExp)


def part_moved(scope: Scope, name: str, line: int) -> bool:
    """Check whether an attribute of the model was moved."""
    return any(
        move.name in MOVES and move.line < line and (dotted(move.receiver) or "").startswith(f"{name}.")
        for move in scope.sites
    )


def made_here(view: View, wrap: Event) -> bool:
    """Check whether a class makes the model in this very function, on the CPU."""
    made = things(view, wrap.mark.subject, wrap.scope)
    sites = (site for site in wrap.scope.sites if site.call in made)
    here = {site.call for site in sites if not any(withs(site.stmt, site.module))}  # `with device:`
    return bool(made) and all(call in here and on_cpu(view, call, wrap.scope) for call in made)


def on_cpu(view: View, call: object, scope: Scope) -> bool:
    """Check whether a call makes a module on the CPU, and names no device."""
    text = ast.unparse(call) if isinstance(call, ast.Call) else ""
    if not isinstance(call, ast.Call) or any(word in text for word in ("cuda", "device", "**")):
        return False
    full, owner = view.names.qualify(call.func, scope), view.names.definition(call.func, scope)
    if owner is not None and owner.kind == "class":
        return not any(s.name in {*MOVES, "device"} for method in owner.defs.values() for s in method.sites)
    if full.startswith("torch.nn."):  # a class, and nothing around a model that may have been moved
        models = any(view.kinds.is_model(value, scope) for value in call.args)
        return full.rpartition(".")[2][:1].isupper() and not models and "parallel" not in full
    return full.startswith((*MAKERS, "transformers.")) and (full.startswith(MAKERS) or full.endswith("from_pretrained"))


RULE = Rule("LS002", Severity.ERROR, Confidence.HIGH, check, fix="unsafe")
