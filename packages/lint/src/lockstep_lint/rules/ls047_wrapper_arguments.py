"""LS047: an argument that DDP does not have."""

from collections.abc import Iterator

from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# What belongs to `init_process_group`, or to an optimizer or loader.
OTHERS = {"timeout", "backend", "init_method", "world_size", "rank", "lr", "batch_size", "sync_bn", "device"}


def check(view: View) -> Iterator[Found]:
    """Looks at the keywords of every DDP wrapper."""
    for kind, site in view.wrappers.made(view.module):
        own = view.names.definition(site.call.func, site.scope)  # a class of the project may take more
        wrong = [item.arg for item in site.call.keywords if item.arg in OTHERS]
        if kind == "ddp" and own is None and wrong:
            place = "it is init_process_group's" if wrong[0] != "lr" else "it is the optimizer's"
            yield at(site, f"DistributedDataParallel takes no '{wrong[0]}' and stops with a TypeError: {place}")


RULE = Rule(
    code="LS047",
    name="argument of another",
    what="DistributedDataParallel is given an argument that belongs to `init_process_group`, as `timeout`.",
    why="Every rank stops with a TypeError, after the processes, the model and the data are set up.",
    bad="""
from datetime import timedelta
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(model, rank):
    return DDP(model.to(rank), device_ids=[rank], timeout=timedelta(minutes=30))
""",
    good="""
from datetime import timedelta
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(model, rank):
    dist.init_process_group("nccl", timeout=timedelta(minutes=30))
    model = DDP(model.to(rank), device_ids=[rank])
    dist.destroy_process_group()
    return model
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Give the argument to the call that has it",
)
