"""LS023: GradScaler with bf16, fp16 without a scaler, a scaler that scales nothing."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import turns_off_gradients
from lockstep_lint.analysis.context import withs
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import argument, constant, dotted, is_true, keyword
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at


def check(view: View) -> Iterator[Found]:
    """Look at scalers and autocasts: which type, and whether they go together."""
    bf16 = [s for s in view.sites("autocast") if kind(view, s) == "bfloat16"]
    fp16 = [s for s in view.sites("autocast") if kind(view, s) == "float16"]
    scaled = view.effects.mentioned(
        view.module, "GradScaler", "scaler", "amp.initialize", "loss_scale", "deepspeed", "Fabric", "accelerat"
    )
    for site in view.sites("GradScaler", "ShardedGradScaler", "autocast"):
        full = view.full(site)
        if site.name != "autocast" and full and bf16 and not fp16 and is_enabled(site):
            message = "bfloat16 has float32's range: drop the GradScaler, or use float16"
            yield at(site, message, severity=Severity.HINT)
    for site in view.sites("MixedPrecision", "MixedPrecisionPolicy") if not scaled and trains(view) else ():
        if view.full(site).startswith("torch.distributed") and shards_in_half(view, site):
            yield at(site, "float16 gradients underflow without a ShardedGradScaler: scale the loss, or use bfloat16")
    for site in view.sites("autocast") if not scaled else ():
        if kind(view, site) == "float16" and trains_under(view, site):
            yield at(site, "float16 gradients underflow without a GradScaler: scale the loss, or use bfloat16")


def trains(view: View) -> bool:
    """Check whether the programs of the file compute gradients."""
    return bool(view.trainings.near(view.module))


def shards_in_half(view: View, site: Site) -> bool:
    """Check whether FSDP is certainly set to compute in float16."""
    given = argument(site.call, 0, "param_dtype")
    found = view.origins.of(given, site.scope)
    return bool(found) and all(name_of_type(o.node, o.scope, view) == "float16" for o in found)


def kind(view: View, site: Site) -> str:
    """Return the type that an autocast certainly uses, "" if chosen at run time."""
    found = kinds(view, site)
    return next(iter(found)) if len(found) == 1 else ""


def kinds(view: View, site: Site) -> set[str]:
    """Return the types that an autocast may use, "" for what is not known."""
    full = view.full(site)
    if not full.startswith("torch"):
        return {""}
    dtype = keyword(site.call, "dtype")
    if dtype is None and len(site.call.args) > 1 and "cuda.amp" not in full:
        dtype = site.call.args[1]
    if dtype is None:
        cuda = full.startswith("torch.cuda.amp") or constant(argument(site.call, 0, "device_type")) == "cuda"
        switch = keyword(site.call, "enabled")
        return {"float16" if cuda and switch is None else ""}
    return {name_of_type(o.node, o.scope, view) for o in view.origins.of(dtype, site.scope)}


def name_of_type(node: ast.expr, scope: Scope, view: View) -> str:
    name = (dotted(node) or "").rsplit(".", 1)[-1]
    return {"bfloat16": "bfloat16", "float16": "float16", "half": "float16"}.get(name, "")


def is_enabled(site: Site) -> bool:
    """Check whether a scaler is on for certain."""
    value = keyword(site.call, "enabled")
    return value is None or is_true(value)


def trains_under(view: View, site: Site) -> bool:
    """Check whether an autocast is around a loop that computes gradients."""
    around = (*withs(site.stmt, site.module), *site.scope.decorators)
    return not any(map(turns_off_gradients, around)) and any(
        view.trainings.trains([s]) or view.steps.backwards(s) for s in site.scope.sites if s.line >= site.line
    )


RULE = Rule("LS023", Severity.ERROR, Confidence.HIGH, check, fix="unsafe")
