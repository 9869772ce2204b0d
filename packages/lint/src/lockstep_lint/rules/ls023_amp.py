"""LS023: GradScaler with bf16, fp16 without a scaler, torch.cuda.amp."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import turns_off_gradients
from lockstep_lint.analysis.context import above, withs
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import Words, argument, constant, dotted, idents, is_true, keyword, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Edit, Severity
from lockstep_lint.rules.base import Found, Rule, at, edit

__all__ = ["RULE"]

# What asks which torch there is.
VERSION = Words(r"version|torch_(ge|gt|lt|le|\d)", re.IGNORECASE)
MISSING = {"ImportError", "ModuleNotFoundError", "AttributeError"}
OLD = ("torch.cuda.amp.", "torch.cpu.amp.")


def check(view: View) -> Iterator[Found]:
    """Looks at scalers and autocasts: which namespace, which type, and whether they go together."""
    bf16 = [s for s in view.sites("autocast") if kind(view, s) == "bfloat16"]
    fp16 = [s for s in view.sites("autocast") if kind(view, s) == "float16"]
    scaled = view.effects.mentioned(
        view.module, "GradScaler", "scaler", "amp.initialize", "loss_scale", "deepspeed", "Fabric", "accelerat"
    )
    for site in view.sites("GradScaler", "ShardedGradScaler", "autocast"):
        full = view.full(site)
        if site.name != "autocast" and full and bf16 and not fp16 and enabled(site) and not half(view, site):
            message = "bfloat16 has float32's range: drop the GradScaler, or use float16"
            yield at(site, message, severity=Severity.HINT)
        elif full.startswith(OLD) and not by_version(site.stmt, site.call, view.module):
            new = f'torch.amp.{site.name}("{full.split(".")[1]}", ...)'
            message = f"torch.cuda.amp is deprecated: use {new}"
            yield at(site, message, severity=Severity.HINT, edit=modern(view, site, full))
    yield from handed_on(view)
    for scope in view.scopes:
        for decorator in scope.decorators:
            if isinstance(decorator, ast.Call) or not isinstance(scope.node, ast.stmt):
                continue
            old = view.names.qualify(decorator, scope.parent or scope).startswith(OLD)
            if old and not by_version(scope.node, decorator, view.module):
                yield Found(decorator, "torch.cuda.amp is deprecated: use torch.amp", Severity.HINT)
    for site in view.sites("MixedPrecision", "MixedPrecisionPolicy") if not scaled and trains(view) else ():
        if view.full(site).startswith("torch.distributed") and shards_in_half(view, site):
            yield at(site, "float16 gradients underflow without a ShardedGradScaler: scale the loss, or use bfloat16")
    for site in view.sites("autocast") if not scaled else ():
        if "float16" in kinds(view, site) and not by_device(view, site) and trains_under(view, site):
            yield at(site, "float16 gradients underflow without a GradScaler: scale the loss, or use bfloat16")


def handed_on(view: View) -> Iterator[Found]:
    """Where a name is given the old autocast itself, which is called by that name
    (`context = torch.cuda.amp.autocast if mixed else nullcontext`).
    """
    told = {dotted(site.call.func) for site in view.sites("autocast") if view.full(site).startswith(OLD)}
    for scope in view.scopes if any(prefix[:-1] in view.module.text for prefix in OLD) else ():
        for bind in (bind for key, binds in scope.binds.items() if key not in told for bind in binds):
            for node in values(bind.value) if bind.value is not None and bind.how == "assign" else ():
                old = view.names.qualify(node, scope) in (f"{prefix}autocast" for prefix in OLD)
                if old and not by_version(bind.stmt, node, view.module):
                    yield Found(node, "torch.cuda.amp is deprecated: use torch.amp", Severity.HINT)


def values(node: ast.expr) -> Iterator[ast.expr]:
    """The names that an expression may give, by a choice, in a table or with arguments (`partial(autocast, ...)`)."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Name | ast.Attribute):
        yield node
    elif isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.BoolOp | ast.Dict):
        parts = node.values
    elif isinstance(node, ast.Tuple | ast.List):
        parts = node.elts
    elif isinstance(node, ast.Call) and last(node) == "partial":
        parts = node.args[:1]
    for part in parts:
        yield from values(part)


def by_version(stmt: ast.stmt, node: ast.expr, module: Module) -> bool:
    """Whether the version of torch, or what it has, decides whether something is used, or it is what remains where the
    new one is missing (`except ImportError:`).
    """
    around = above(stmt, module)
    tests = [each.test for each, _ in around if isinstance(each, ast.If)]
    choices = (part for part in walk(stmt) if isinstance(part, ast.IfExp))
    tests += [part.test for part in choices if any(item is node for item in walk(part))]
    tried = [each for each, place in around if isinstance(each, ast.Try) and place == "handlers"]
    return any(MISSING & set(idents(h.type)) for each in tried for h in each.handlers if h.type is not None) or any(
        VERSION.search(name) or (name == "hasattr" and "torch" in idents(test))
        for test in tests
        for name in idents(test)
    )


def half(view: View, site: Site) -> bool:
    """Whether FSDP's scaler may be for float16 that FSDP itself computes in."""
    return site.name == "ShardedGradScaler" and view.effects.mentioned(
        view.module, "torch.float16", "torch.half", "fp16"
    )


def trains(view: View) -> bool:
    """Whether the programs of the file compute gradients."""
    return bool(view.trainings.near(view.module))


def shards_in_half(view: View, site: Site) -> bool:
    """Whether FSDP is certainly told to compute in float16."""
    given = argument(site.call, 0, "param_dtype")
    found = view.origins.of(given, site.scope)
    return bool(found) and all(name_of_type(o.node, o.scope, view) == "float16" for o in found)


def kind(view: View, site: Site) -> str:
    """The type that an autocast certainly uses, "" if it is chosen at run time."""
    found = kinds(view, site)
    return next(iter(found)) if len(found) == 1 else ""


def kinds(view: View, site: Site) -> set[str]:
    """The types that an autocast may use, "" for what is not known."""
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


def by_device(view: View, site: Site) -> bool:
    """Whether one expression chooses between float16 and bfloat16 (`bfloat16 if is_bf16_supported() else float16`)."""
    given = keyword(site.call, "dtype")
    binds = view.origins.binds(dotted(given) or "", site.scope, site.line) if given is not None else []
    choices = [value for value in (given, *(bind.value for bind, _ in binds)) if value is not None]
    return any({"bfloat16", "float16"} <= set(idents(value)) for value in choices)


def name_of_type(node: ast.expr, scope: Scope, view: View) -> str:
    name = (dotted(node) or "").rsplit(".", 1)[-1]
    return {"bfloat16": "bfloat16", "float16": "float16", "half": "float16"}.get(name, "")


def enabled(site: Site) -> bool:
    """Whether a scaler is on for certain."""
    value = keyword(site.call, "enabled")
    return value is None or is_true(value)


def modern(view: View, site: Site, full: str) -> Edit | None:
    """The call in torch.amp, where torch is imported and no positional argument would change its meaning."""
    if site.call.args or view.module.imports.get("torch") is None or "torch" in site.scope.binds:
        return None
    needs = (2, 3) if site.name == "GradScaler" else (2, 0)
    return edit("callee", site.call, f"torch.amp.{site.name}", f'"{full.split(".")[1]}"', needs)


def trains_under(view: View, site: Site) -> bool:
    """Whether an autocast belongs to a loop that computes gradients, and does not stand where none are kept."""
    around = (*withs(site.stmt, site.module), *site.scope.decorators)
    return not any(map(turns_off_gradients, around)) and any(
        view.trainings.trains([s]) or view.steps.backwards(s) for s in site.scope.sites if s.line >= site.line
    )


RULE = Rule(
    code="LS023",
    name="mixed precision",
    what=(
        "A GradScaler is used with bfloat16, float16 is trained without one, or the deprecated `torch.cuda.amp` "
        "is used."
    ),
    why=(
        "Float16 gradients below 6e-8 become zero unless the loss is scaled; bfloat16 needs no scaling, and the scaler "
        "only skips steps. torch.cuda.amp warns at every use and will go."
    ),
    bad="""
import torch

scaler = torch.cuda.amp.GradScaler()
""",
    good="""
import torch

def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="safe",
    remedy='Use torch.amp.GradScaler("cuda") with float16 only, and torch.amp.autocast("cuda")',
    note=(
        "It is told where a scaler or an autocast is used, as a call or a decorator, or where the old autocast is "
        "given to a name that is called (`context = torch.cuda.amp.autocast if mixed else nullcontext`), not at the "
        "import. Silent about the old one beside the new, where a test of torch's version, `hasattr(torch, ...)` or an "
        "`except` chooses between the two."
    ),
)
