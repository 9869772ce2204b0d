"""LS024: CUDA used before the device is set or the group made."""

from collections.abc import Iterator

from lockstep_lint.analysis.calls import COLLECTIVES
from lockstep_lint.analysis.context import apart
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import constant, keyword
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

# What makes a context; `empty_cache` does nothing before there is one.
STARTS_CUDA = ("torch.cuda.init", "torch.cuda.synchronize")
NEEDS_GROUP = {*COLLECTIVES, "get_rank", "get_world_size", "new_group"}


def check(view: View) -> Iterator[Found]:
    """Find uses of CUDA before set_device, and of the group before init_process_group, in one function."""
    for scope in view.scopes:
        devices = [s for s in scope.sites if s.name == "set_device" and "torch.cuda" in view.full(s)]
        groups = [s for s in scope.sites if s.name == "init_process_group"]
        if devices and constant(next(iter(devices[0].call.args), None)) != 0:
            yield from early_cuda(view, scope, devices[0])
        if groups:
            yield from early_group(view, scope, groups[0])


def early_cuda(view: View, scope: Scope, device: Site) -> Iterator[Found]:
    """Find moves to the current GPU before set_device."""
    for site in scope.sites:
        if site.line >= device.line or view.ranks.single(site.stmt, scope) or apart(site, device):
            continue
        bare = site.name == "cuda" and not site.call.args and not site.call.keywords and not view.full(site)
        named = site.name == "to" and bool(site.call.args) and constant(site.call.args[0]) == "cuda"
        made = constant(keyword(site.call, "device")) == "cuda"
        if bare or named or made or view.full(site) in STARTS_CUDA:
            yield at(
                site,
                f"uses GPU 0 on every rank: line {device.line} chooses the device too late, so call set_device first",
            )


def early_group(view: View, scope: Scope, group: Site) -> Iterator[Found]:
    """Find uses of the process group before it is made."""
    for site in scope.sites:
        if site.line >= group.line or apart(site, group) or site.stmt is group.stmt:
            continue
        if view.wrappers.wrapper(site) == "ddp":
            yield at(site, f"DDP needs the process group that line {group.line} makes: call init_process_group first")
        elif site.name in NEEDS_GROUP and view.full(site).startswith("torch.distributed") and not is_tested(site):
            yield at(
                site,
                f"{site.name}() needs the process group that line {group.line} makes: call init_process_group first",
            )


def is_tested(site: Site) -> bool:
    """Check whether the function asks if a group exists, before or in a call."""
    start = getattr(site.scope.node, "lineno", 1)
    return any("is_initialized" in text for text in site.module.lines[start - 1 : site.line])


RULE = Rule("LS024", Severity.ERROR, Confidence.HIGH, check, fix="unsafe", moot=frozenset({"lockstep"}), placed=True)
