"""LS029: deprecated launchers and wrappers."""

import ast
import re
from collections.abc import Iterator
from functools import partial

from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import constant, dotted
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

FLAGS = ("--local_rank", "--local-rank")
OLD_FSDP = ("torch.distributed.fsdp", "torch.distributed._fsdp")
# What wraps, or makes something that wraps, with the class that it is given.
WRAPS = ("enable_wrap", "partial")
OLD_APEX = ("apex.amp", "apex.parallel")
APEX = "apex's amp and parallel are deprecated: use torch.amp and torch.nn.parallel"
# Calls that have a successor, by their full names.
MOVED = {
    "torch.backends.cuda.sdp_kernel": "torch.nn.attention.sdpa_kernel",
    "torch.distributed.checkpoint.save_state_dict": "torch.distributed.checkpoint.save",
    "torch.distributed.checkpoint.load_state_dict": "torch.distributed.checkpoint.load",
}
# The variable that torchrun sets.
READS = re.compile(r"""["']LOCAL_RANK["']""")
# What reads the flag, or all flags at once.
OPTION = re.compile(r"""\.local_rank\b|["']local_rank["']|\bvars\(|\*\*""")


def check(view: View) -> Iterator[Found]:
    """Looks at imports, at the flag of the old launcher, and at calls of what has a successor."""
    for site in view.sites("add_argument"):
        if any(constant(value) in FLAGS for value in site.call.args) and not handled(view, site):
            yield at(
                site,
                "torchrun passes the local rank in the environment: read os.environ['LOCAL_RANK'] instead of this flag",
            )
    for full, successor in MOVED.items():
        for site in view.sites(full.rpartition(".")[2]):
            if view.full(site) == full:
                yield at(site, f"{site.name} is deprecated: use {successor}")
    yield from sharded(view)
    yield from launchers(view)
    yield from packages(view)
    yield from spelled_out(view)


def handled(view: View, site: Site) -> bool:
    """Whether the flag takes its default from the environment, is left over where that is read, or another launcher
    than torch's passes it.
    """
    if READS.search(ast.unparse(site.call)) or left_over(view):
        return True
    if view.ranks.programs.spawned(view.module) is not None:
        return True  # the script starts its processes itself, and a flag of that name is its own
    return bool(view.frameworks & {"deepspeed", "colossalai", "megatron"})


def left_over(view: View) -> bool:
    """Whether the programs read the rank from the environment, and never what the flag says."""
    members = view.project.family(view.module)
    read = any(READS.search(member.text) for member in members)
    return read and not any(OPTION.search(member.text) for member in members)


def sharded(view: View) -> Iterator[Found]:
    """Calls that wrap with FSDP1 or are handed it to wrap with, under any name; where there are none, the first call of
    one of its own methods.
    """
    if "FullyShardedDataParallel" not in view.module.text:
        return
    uses = [(site, view.full(site).rpartition("FullyShardedDataParallel")) for site in view.sites()]
    uses = [(site, parts) for site, parts in uses if parts[0].startswith(OLD_FSDP)]
    wraps = [site for site, parts in uses if not parts[2]]
    handed = [site for site in view.sites(*WRAPS) if any(map(partial(is_old, view, site), arguments(site)))]
    for site in [*wraps, *handed] or [site for site, _ in sorted(uses, key=lambda use: use[0].line)][:1]:
        yield at(site, "FSDP1 is deprecated: use torch.distributed.fsdp.fully_shard")


def arguments(site: Site) -> Iterator[ast.expr]:
    """What a call is given, by place or by name."""
    yield from site.call.args
    yield from (item.value for item in site.call.keywords)


def is_old(view: View, site: Site, value: ast.expr) -> bool:
    """Whether a value is FSDP1's class."""
    full = view.names.qualify(value, site.scope)
    return full.startswith(OLD_FSDP) and full.endswith(".FullyShardedDataParallel")


def launchers(view: View) -> Iterator[Found]:
    """Commands that start torch.distributed.launch."""
    if "torch.distributed.launch" not in view.module.text:
        return
    for site in view.sites("run", "Popen", "check_call", "call", "system", "execvp"):
        for node in ast.walk(site.call):
            text = constant(node)
            if isinstance(text, str) and "torch.distributed.launch" in text:
                yield at(site, "torch.distributed.launch is deprecated: start with torchrun")


def packages(view: View) -> Iterator[Found]:
    """Imports of packages whose parts are in torch by now."""
    for scope in view.scopes:
        for stmt in scope.stmts:
            for name in imported(stmt):
                root = name.split(".")[0]
                if name.startswith("torch.distributed.launch"):
                    yield Found(stmt, "torch.distributed.launch is deprecated: start with torchrun")
                elif root == "fairscale":
                    yield Found(stmt, "FairScale is no longer developed: its sharding is in torch.distributed.fsdp")
                elif name.startswith(OLD_APEX):
                    yield Found(stmt, APEX)


def spelled_out(view: View) -> Iterator[Found]:
    """Calls that reach apex's amp or parallel by a full name (`apex.amp.scale_loss(...)`), where no import names it."""
    if "apex." not in view.module.text:
        return
    named = {name for scope in view.scopes for stmt in scope.stmts for name in imported(stmt)}
    parts = tuple(f"{part}." for part in OLD_APEX if "apex" in named and not any(n.startswith(part) for n in named))
    for site in view.sites() if parts else ():
        if f"{dotted(site.call.func)}.".startswith(parts):
            yield at(site, APEX)


def imported(stmt: ast.stmt) -> Iterator[str]:
    """The full names that an import statement brings."""
    if isinstance(stmt, ast.Import):
        yield from (alias.name for alias in stmt.names)
    elif isinstance(stmt, ast.ImportFrom) and not stmt.level:
        yield from (f"{stmt.module}.{alias.name}" for alias in stmt.names)


RULE = Rule(
    code="LS029",
    name="deprecated launch or wrapper",
    what=(
        "The script uses `torch.distributed.launch` or its `--local_rank`, FSDP1, `sdp_kernel`, FairScale, or "
        "apex's amp and parallel."
    ),
    why=(
        "They are unmaintained or warn today and will go: torchrun, fully_shard, sdpa_kernel, torch.amp and DDP "
        "do the same, and get the fixes."
    ),
    bad="""
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
""",
    good="""
import os
import torch
from torch.distributed.fsdp import fully_shard

local_rank = int(os.environ["LOCAL_RANK"])

def wrap(model):
    return fully_shard(model)
""",
    severity=Severity.HINT,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Use torchrun, fully_shard, sdpa_kernel, torch.amp",
    note=(
        "The flag `--local_rank` is told even if the script also reads the variable, unless the variable is the flag's "
        "default, the flag is left over and nothing reads it, or another launcher passes it (DeepSpeed, or the script "
        "itself with `mp.spawn`). A package is "
        "told at the import of its old part (`from apex import amp`) and not again where that is used; only where a "
        "plain `import apex` names no part, each call of `apex.amp...` or `apex.parallel...` is told. FSDP1 is told "
        "where it wraps."
    ),
)
