"""LS031: a process group but never any gradient exchange."""

import functools
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.index import Module
from lockstep_lint.analysis.nodes import Words
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import TRAINERS, Found, Rule, at

# Wrappers that exchange gradients, and whatever else may do that, or says that the processes do not train one model
# together.
DDP = Words(r"DistributedDataParallel|^DDP$")
OTHERS = Words(
    r"FullyShardedDataParallel|^FSDP$|fully_shard|ZeroRedundancy|DeepSpeed|deepspeed|"
    r"horovod|apply_gradient_allreduce|average_gradients|sync_grad|allreduce_grad|reduce_grad|parallelize_module|"
    r"^DTensor|PipelineStage|pipeline|local_sgd|ModelAverager|"
    r"all_reduce_grad|grad_sync|reduce_scatter|gossip|federat|bagua|byteps|megatron|fairscale|all_reduce_params|DistributedOptimizer"
)
PIECES = ("torch.distributed.rpc", "rpc.", "Join(", "replicate(")
# Gradients that are read may be exchanged by hand, where anything is exchanged at all; not those that are cleared.
GRADIENTS = re.compile(r"\.grad\b(?!\s*=\s*None)")
COLLECTIVES = re.compile(r"reduce|gather|broadcast|i?send\(|all_to_all|import \*")

# A function of such a name in a file that is not here may wrap the model.
WRAPS = Words(
    r"wrap|ddp|fsdp|dist|parallel|prepare|shard|sync|reduce|trainer|engine|(build|get|make)_model|^main|^run|^train",
    re.IGNORECASE,
)


def check(view: View) -> Iterator[Found]:
    """Find programs that start a group, train, and have nothing that could exchange gradients."""
    if not any(True for _ in view.sites("init_process_group")):
        return
    family = view.project.family(view.module)
    if any(map(exchanges, family)) or by_hand(family):
        return
    if any(member.names(DDP) or renames_wrapper(member) for member in family):
        return
    if view.hidden(WRAPS) or not trainings(view):
        return
    for site in view.sites("init_process_group"):
        yield at(site, "the ranks never exchange gradients, so each trains a model of its own: wrap the model in DDP")


def by_hand(family: tuple[Module, ...]) -> bool:
    """Check whether the files of a program may exchange gradients by themselves."""
    return any(says(m, GRADIENTS) for m in family) and any(says(m, COLLECTIVES) for m in family)


@cache_answers
def exchanges(module: Module) -> bool:
    """Check whether a file names an exchange of gradients other than DDP."""
    return module.names(OTHERS) or any(piece in module.bare for piece in PIECES)


@cache_answers
def says(module: Module, pattern: re.Pattern[str]) -> bool:
    """Check whether a pattern occurs in a file outside comments."""
    return pattern.search(module.bare) is not None


def trainings(view: View) -> list[Training]:
    """Return the training loops of a file's programs, of the files that step an optimizer."""
    family = view.project.family(view.module)
    return [t for member in family for t in view.trainings.of(member) if steps(view, member)]


def renames_wrapper(module: Module) -> bool:
    """Check whether a file uses a wrapper that it imports under another name."""
    return any(name in module.words for name, imported in module.imports.items() if wraps(imported.full))


@functools.cache
def wraps(full: str) -> bool:
    """Check whether what has a full name exchanges gradients."""
    parts = full.split(".")
    return any(DDP.search(part) or OTHERS.search(part) for part in parts) or any(piece in full for piece in PIECES)


def steps(view: View, module: Module) -> bool:
    """Check whether a file steps an optimizer."""
    return any(view.steps.steps_optimizer(site) for site in module.sites("step"))


MOOT = TRAINERS | {"accelerate", "colossalai", "deepspeed", "horovod", "lightning_fabric"}
MOOT |= {"megatron", "ray", "transformers"}
RULE = Rule("LS031", Severity.ERROR, Confidence.MEDIUM, check, fix="unsafe", moot=MOOT, placed=True)
