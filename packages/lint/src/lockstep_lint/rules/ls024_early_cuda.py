"""LS024: CUDA used before the device is set or the group made."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import COLLECTIVES
from lockstep_lint.analysis.context import apart, choices, guards
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import constant, dotted, keyword, strings
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# What makes a context; `empty_cache` does nothing before there is one.
STARTS_CUDA = ("torch.cuda.init", "torch.cuda.synchronize")
NEEDS_GROUP = {*COLLECTIVES, "get_rank", "get_world_size", "new_group"}


def check(view: View) -> Iterator[Found]:
    """Looks at the order of setting the device, making the group and using them, function by function."""
    for scope in view.scopes:
        devices = [s for s in scope.sites if s.name == "set_device" and "torch.cuda" in view.full(s)]
        groups = [s for s in scope.sites if s.name == "init_process_group"]
        if devices and constant(next(iter(devices[0].call.args), None)) != 0:
            yield from early_cuda(view, scope, devices[0])
            yield from early_helper(view, scope, devices[0])
        if groups:
            yield from early_group(view, scope, groups[0])
            yield from without_group(view, scope, groups)
        if devices and groups and groups[0].line < devices[0].line and nccl(groups[0]):
            yield from early_collective(view, scope, groups[0], devices[0])


def early_cuda(view: View, scope: Scope, device: Site) -> Iterator[Found]:
    """A move to the current GPU before it was chosen."""
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
    """A use of the process group before it exists."""
    for site in scope.sites:
        if site.line >= group.line or apart(site, group) or site.stmt is group.stmt:
            continue
        if view.wrappers.wrapper(site) == "ddp":
            yield at(site, f"DDP needs the process group that line {group.line} makes: call init_process_group first")
        elif site.name in NEEDS_GROUP and view.full(site).startswith("torch.distributed") and not tested(site):
            yield at(
                site,
                f"{site.name}() needs the process group that line {group.line} makes: call init_process_group first",
            )


def without_group(view: View, scope: Scope, groups: list[Site]) -> Iterator[Found]:
    """A question to the group, in a function that makes it in one arm of a test and goes on without it in the other."""
    arms = [
        guard for guard in guards(groups[0].stmt, scope.module) if view.ranks.tests.many(guard.test, scope, guard.when)
    ]
    if len(groups) > 1 or len(arms) != 1 or not isinstance(arms[0].stmt, ast.If):
        return
    test = arms[0].stmt
    other = test.orelse if arms[0].when else test.body
    if not other or any(ends(stmt) for stmt in other):
        return
    for site in scope.sites:
        asks = site.name in ("get_rank", "get_world_size", "barrier") and view.full(site).startswith(
            "torch.distributed"
        )
        after = site.line > (test.end_lineno or test.lineno)
        if asks and after and not any(guards(site.stmt, scope.module)) and not any(choices(site)):
            yield at(site, f"{site.name}() fails where line {groups[0].line} was not run: ask is_initialized() first")
            return


def ends(stmt: ast.stmt) -> bool:
    """Check whether a statement ends the function or the program, or may make the group elsewhere."""
    call = stmt.value if isinstance(stmt, ast.Expr) else None
    plain = isinstance(call, ast.Call) and dotted(call.func) in ("print", "logging.info", "logger.info")
    return not (plain or (isinstance(stmt, ast.Assign) and not isinstance(stmt.value, ast.Call)))


def early_helper(view: View, scope: Scope, device: Site) -> Iterator[Found]:
    """A collective in a function of the file that makes the group, called before the device is set."""
    for caller in (s for s in scope.sites if s.line < device.line):
        function = view.calls.target(caller.call, scope)
        if function is None or function.module is not view.module or apart(caller, device):
            continue
        groups = [s for s in function.sites if s.name == "init_process_group" and nccl(s)]
        for site in function.sites if groups and not function.named("set_device") else ():
            if site.line > groups[0].line and view.effects.is_collective(site):
                yield at(site, f"runs on GPU 0 of every rank, as set_device comes later (line {device.line})")
                break


def tested(site: Site) -> bool:
    """Whether the program asks if a group exists around the call."""
    line = site.module.lines[max(0, site.line - 3) : site.line]
    return any("is_initialized" in text for text in line)


def nccl(group: Site) -> bool:
    """Whether the group certainly runs on NCCL, without being told its device."""
    return "nccl" in set(strings(group.call)) and keyword(group.call, "device_id") is None


def early_collective(view: View, scope: Scope, group: Site, device: Site) -> Iterator[Found]:
    """A collective between the two, which opens its communicator on GPU 0."""
    for site in scope.sites:
        if group.line < site.line < device.line and view.effects.is_collective(site) and not apart(site, device):
            yield at(
                site,
                f"runs on GPU 0 of every rank, as line {device.line} comes later: call set_device first",
            )


RULE = Rule(
    code="LS024",
    name="CUDA before the device is set",
    what="A GPU is used before `set_device` chose it, or the process group before `init_process_group` made it.",
    why=(
        "Every process opens a context on GPU 0, which costs memory there and makes NCCL hang or refuse; DDP and "
        "collectives without a group stop the run."
    ),
    bad="""
import torch
import torch.distributed as dist

def main(model, local_rank):
    dist.init_process_group("nccl")
    model = model.cuda()
    torch.cuda.set_device(local_rank)
    dist.destroy_process_group()
    return model
""",
    good="""
import torch
import torch.distributed as dist

def main(model, local_rank):
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = model.cuda()
    dist.barrier()
    dist.destroy_process_group()
    return model
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="First torch.cuda.set_device(local_rank), then init_process_group, then everything else",
    moot=frozenset({"lockstep"}),
)
