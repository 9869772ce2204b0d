"""LS031: a process group but never any gradient exchange."""

import re
from collections.abc import Iterator

from lockstep.lint.analysis.drafts import wrapped
from lockstep.lint.analysis.index import Module
from lockstep.lint.analysis.nodes import Words
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# Whatever may exchange gradients, or says that the processes do not train one model together.
EXCHANGES = re.compile(
    r"DistributedDataParallel|\bDDP\b|FullyShardedDataParallel|\bFSDP\b|fully_shard|ZeroRedundancy|DeepSpeed|deepspeed|"
    r"horovod|apply_gradient_allreduce|average_gradients|sync_grad|allreduce_grad|reduce_grad|parallelize_module|"
    r"\bDTensor|PipelineStage|pipeline|torch\.distributed\.rpc|rpc\.|Join\(|replicate\(|local_sgd|ModelAverager|"
    r"\.grad\b|all_reduce_grad|grad_sync|reduce_scatter|gossip|federat|bagua|byteps|megatron|fairscale|all_reduce_params|DistributedOptimizer"
)

# A function of such a name in a file that is not here may wrap the model.
WRAPS = Words(
    r"wrap|ddp|fsdp|dist|parallel|prepare|shard|sync|reduce|trainer|engine|(build|get|make)_model|^main|^run|^train",
    re.IGNORECASE,
)


def check(view: View) -> Iterator[Found]:
    """Looks at programs with a group and a training loop for anything that could exchange gradients."""
    if not any(True for _ in view.sites("init_process_group")):
        return
    if view.hidden(WRAPS):
        return
    family = view.project.family(view.module)
    if any(EXCHANGES.search(member.bare) or renamed(member) for member in family):
        return
    trained = [t for member in family for t in view.trainings.of(member) if steps(view, member)]
    if not trained:
        return
    for site in view.sites("init_process_group"):
        yield at(
            site,
            "the ranks never exchange gradients, so each trains a model of its own: wrap the model in DDP",
            proposal=wrapped(view),
        )


def renamed(module: Module) -> bool:
    """Whether a file uses a wrapper that it imports under another name."""
    names = [name for name, imported in module.imports.items() if EXCHANGES.search(imported.full)]
    return any(re.search(rf"\b{re.escape(name)}\b", module.bare) for name in names)


def steps(view: View, module: Module) -> bool:
    """Whether a file steps an optimizer."""
    return any(view.steps.steps_optimizer(site) for site in module.sites("step"))


RULE = Rule(
    code="LS031",
    name="no gradient exchange",
    what="A program starts a process group and trains, but nothing wraps the model or exchanges gradients.",
    why=(
        "Each rank trains a model of its own on its share of the data, and the one that is saved has seen a "
        "fraction of it."
    ),
    bad=(
        """
import torch
import torch.distributed as dist

def main(model, loader, optimizer, criterion, local_rank):
    dist.init_process_group("nccl")
    model = model.to(local_rank)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x.to(local_rank)), y.to(local_rank)).backward()
        optimizer.step()
    dist.destroy_process_group()
""",
        """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # the model should be wrapped in DDP

def main(model, loader, optimizer, criterion, local_rank):
    'Trains with DDP.'
    dist.init_process_group("nccl")
    model = model.to(local_rank)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x.to(local_rank)), y.to(local_rank)).backward()
        optimizer.step()
    dist.destroy_process_group()
""",
    ),
    good=(
        """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, loader, optimizer, criterion, local_rank):
    dist.init_process_group("nccl")
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x.to(local_rank)), y.to(local_rank)).backward()
        optimizer.step()
    dist.destroy_process_group()
""",
        """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Native

def main(model, loader, optimizer, criterion, local_rank):
    dist.init_process_group("nccl")
    model = Native(model.to(local_rank), device_ids=[local_rank])
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x.to(local_rank)), y.to(local_rank)).backward()
        optimizer.step()
    dist.destroy_process_group()
""",
    ),
    severity=Severity.ERROR,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Wrap the model in DistributedDataParallel",
    moot=frozenset(
        {
            "accelerate",
            "lightning",
            "pytorch_lightning",
            "lightning_fabric",
            "deepspeed",
            "composer",
            "lockstep",
            "trl",
            "horovod",
            "ray",
            "transformers",
            "megatron",
            "colossalai",
        }
    ),
)
