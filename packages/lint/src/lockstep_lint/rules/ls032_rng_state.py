"""LS032: only one rank's RNG state saved."""

from collections.abc import Iterator

from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

STATES = (
    "torch.get_rng_state",
    "torch.random.get_rng_state",
    "torch.cuda.get_rng_state",
    "torch.cuda.get_rng_state_all",
)
OTHERS = ("numpy.random.get_state", "random.getstate")


def check(view: View) -> Iterator[Found]:
    """Looks for random states read where only one rank comes."""
    if not view.distributed:
        return
    for site in view.sites("get_rng_state", "get_rng_state_all", "get_state", "getstate"):
        if view.full(site) in (*STATES, *OTHERS) and view.ranks.main_only(site.stmt, site.scope):
            yield at(site, "saves the random state of one rank only: gather every rank's, or save one file a rank")


RULE = Rule(
    code="LS032",
    name="one rank's RNG state",
    what="The state of the random generators is read, to be saved, on one rank only.",
    why=(
        "After a resume all ranks continue with rank 0's random numbers, or with fresh ones: dropout and "
        "augmentation repeat across ranks and the run is not the one that was stopped."
    ),
    bad="""
import torch
import torch.distributed as dist

def main(rank):
    dist.init_process_group("nccl")
    if rank == 0:
        torch.save({"rng": torch.get_rng_state()}, "state.pt")
    dist.destroy_process_group()
""",
    good="""
import torch
import torch.distributed as dist

def main(rank, world_size):
    dist.init_process_group("nccl")
    states = [None] * world_size
    dist.all_gather_object(states, torch.get_rng_state())
    if rank == 0:
        torch.save({"rng": states}, "state.pt")
    dist.destroy_process_group()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Gather the states of all ranks before one of them saves",
    moot=frozenset({"accelerate", "lightning", "pytorch_lightning", "lockstep", "composer"}),
)
