"""LS007: a fixed device in a script of several processes."""

import ast
from collections.abc import Iterator

from lockstep.lint.analysis.index import Site
from lockstep.lint.analysis.nodes import constant, keyword
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

SETTERS = ("set_device", "set_device_index", "CUDA_VISIBLE_DEVICES", "set_default_device", "cuda.device(")


def check(view: View) -> Iterator[Found]:
    """Looks at every place that names a device, in the code that all ranks run."""
    if not view.distributed:
        return
    chosen = view.effects.mentioned(view.module, *SETTERS)
    for site in view.sites(
        "device", "to", "cuda", "set_device", "set_device_index", "load", "DistributedDataParallel", "DDP"
    ):
        message = fixed(view, site) or ("" if chosen else bare(view, site))
        if message and view.ranks.every(site.stmt, site.scope):
            yield at(site, message)


def fixed(view: View, site: Site) -> str:
    """What is wrong with a call that names GPU 0 (or another number)."""
    first = site.call.args[0] if site.call.args else None
    text = constant(first)
    named = isinstance(text, str) and text.startswith("cuda:") and text[5:].isdigit()
    if site.name in ("device", "to") and named and not chosen_by_test(site.stmt, first):
        return f"every rank uses '{text}': use the local rank, f\"cuda:{{local_rank}}\""
    if (
        site.name in ("set_device", "set_device_index")
        and isinstance(text, int)
        and "cuda" in ast.unparse(site.call.func)
    ):
        return f"every rank uses GPU {text}: pass the local rank"
    if site.name == "cuda" and isinstance(text, int) and view.kinds.is_model(site.receiver, site.scope):
        return f"every rank uses GPU {text}: pass the local rank"
    where = constant(keyword(site.call, "map_location"))
    if site.name == "load" and isinstance(where, str) and where.startswith("cuda:"):
        return f"every rank loads onto '{where}': load onto 'cpu' or the rank's own device"
    ids = keyword(site.call, "device_ids")
    if isinstance(ids, ast.List) and len(ids.elts) == 1 and isinstance(constant(ids.elts[0]), int):
        return f"every rank uses GPU {constant(ids.elts[0])}: pass device_ids=[local_rank]"
    return ""


def chosen_by_test(stmt: ast.stmt, node: ast.expr | None) -> bool:
    """Whether the device is one arm of a choice that may depend on the rank."""
    for item in ast.walk(stmt):
        if isinstance(item, ast.IfExp) and node in (item.body, item.orelse):
            return not any(word in ast.unparse(item.test) for word in ("is_available", "cuda"))
    return False


def bare(view: View, site: Site) -> str:
    """A move to "cuda" without a number, where nothing chose the rank's device."""
    if site.name == "cuda" and not site.call.args and not site.call.keywords and site.receiver is not None:
        moved = view.kinds.is_model(site.receiver, site.scope) and not view.full(site)
    else:
        moved = site.name == "to" and bool(site.call.args) and constant(site.call.args[0]) == "cuda"
        moved = moved and view.kinds.is_model(site.receiver, site.scope)
    return "moves to GPU 0 on every rank: call torch.cuda.set_device(local_rank) first" if moved else ""


RULE = Rule(
    code="LS007",
    name="fixed device",
    what=(
        "Code that every rank runs names a fixed GPU (`cuda:0`, `set_device(0)`), or moves to plain `cuda` where "
        "nothing chose the rank's own."
    ),
    why=(
        "All processes of a machine share one GPU, which runs out of memory while the others idle; NCCL refuses "
        "two ranks on one device."
    ),
    bad=(
        """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model):
    dist.init_process_group("nccl")
    device = torch.device("cuda:0")
    model = DDP(model.to(device))
    dist.destroy_process_group()
""",
        """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model):
    dist.init_process_group("nccl")
    model = model.cuda()
    model = DDP(model)
    dist.destroy_process_group()
""",
    ),
    good=(
        """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = DDP(model.cuda(), device_ids=[local_rank])
    dist.destroy_process_group()
""",
        """
import torch

def main(model):
    return model.to(torch.device("cuda:0"))
""",
    ),
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Use the device of the local rank: torch.cuda.set_device(local_rank)",
    moot=frozenset(
        {"accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "composer", "lockstep", "trl", "horovod"}
    ),
)
