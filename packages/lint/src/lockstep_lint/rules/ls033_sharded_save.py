"""LS033: a sharded model or optimizer saved on one rank."""

from collections.abc import Iterator

from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# These gather from all ranks.
GATHERS = {"get_model_state_dict", "get_optimizer_state_dict", "full_optim_state_dict", "optim_state_dict"}
GATHERS |= {"consolidate_state_dict", "summon_full_params", "full_tensor"}


def check(view: View) -> Iterator[Found]:
    """Looks for the state of sharded objects read where only one rank comes."""
    if not view.effects.mentioned(view.module, "FullyShardedDataParallel", "fully_shard", "ZeroRedundancyOptimizer"):
        return
    for site in view.sites("state_dict", *GATHERS):
        if view.ranks.side(site.stmt, site.scope) and reads(view, site):
            yield at(
                site, "needs all ranks, but only one comes here: take the state on every rank, then write it on one"
            )


def reads(view: View, site: Site) -> bool:
    """Whether a call reads the state of something sharded."""
    full = view.full(site)
    if site.name in GATHERS:
        return (
            full.startswith("torch.distributed") or site.name == "full_tensor" or site.name == "consolidate_state_dict"
        )
    if site.receiver is None:
        return False
    for origin in view.origins.of(site.receiver, site.scope):
        name = view.names.qualify(origin.call.func, origin.scope) if origin.call is not None else ""
        if name.endswith("FullyShardedDataParallel"):
            return True
        if name.endswith("ZeroRedundancyOptimizer"):
            return not view.effects.mentioned(view.module, "consolidate_state_dict")
    return False


RULE = Rule(
    code="LS033",
    name="sharded state on one rank",
    what="The state of an FSDP model, or of a sharded optimizer, is read on one rank only.",
    why=(
        "Reading it gathers the shards from all ranks: alone, the rank waits for ever, or it saves a fraction of "
        "the parameters."
    ),
    bad="""
import torch
import torch.distributed.checkpoint.state_dict as dcs
from torch.distributed.fsdp import fully_shard

def save(model, rank):
    fully_shard(model)
    if rank == 0:
        torch.save(dcs.get_model_state_dict(model), "model.pt")
""",
    good="""
import torch
import torch.distributed.checkpoint.state_dict as dcs
from torch.distributed.fsdp import fully_shard

def save(model, rank):
    fully_shard(model)
    state = dcs.get_model_state_dict(model)
    if rank == 0:
        torch.save(state, "model.pt")
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Take the state on all ranks, write it on one",
    moot=frozenset({"lightning", "pytorch_lightning", "lockstep", "composer", "accelerate"}),
)
