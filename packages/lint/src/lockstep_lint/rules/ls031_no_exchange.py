"""LS031: a process group but never any gradient exchange."""

import functools
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.drafts import wrapped
from lockstep_lint.analysis.gradients import around, outside, unseen
from lockstep_lint.analysis.index import Module
from lockstep_lint.analysis.nodes import Words
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import apart
from lockstep_lint.events.query import same
from lockstep_lint.events.run import runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

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
THAWED = "trains parameters that were frozen when line {line} built DDP, which never averages them: build it anew"
# Gradients that are read may be exchanged by hand, where anything is exchanged at all; not those that are cleared.
GRADIENTS = re.compile(r"\.grad\b(?!\s*=\s*None)")
COLLECTIVES = re.compile(r"reduce|gather|broadcast|i?send\(|all_to_all|import \*")

# A function of such a name in a file that is not here may wrap the model.
WRAPS = Words(
    r"wrap|ddp|fsdp|dist|parallel|prepare|shard|sync|reduce|trainer|engine|(build|get|make)_model|^main|^run|^train",
    re.IGNORECASE,
)


def check(view: View) -> Iterator[Found]:
    """Looks at programs with a group and a training loop for anything that could exchange gradients."""
    yield from thawed(view)
    starts = any(True for _ in view.sites("init_process_group"))
    if not starts and not (".module" in view.module.text and view.training and view.distributed):
        return
    family = view.project.family(view.module)
    if any(map(exchanges, family)) or by_hand(family):
        return
    if any(member.names(DDP) or renamed(member) for member in family):
        yield from unheard(view)
        return
    if not starts or view.hidden(WRAPS):
        return
    if not trainings(view):
        return
    for site in view.sites("init_process_group"):
        yield at(
            site,
            "the ranks never exchange gradients, so each trains a model of its own: wrap the model in DDP",
            proposal=wrapped(view),
        )


def thawed(view: View) -> Iterator[Found]:
    """Looks for parameters that were frozen when DDP was built, which takes in no others later, and that train then."""
    for run in runs(view) if "requires_grad = True" in view.module.text else ():
        wraps = [wrap for wrap in run.of("wrap") if wrap.detail == "ddp"]
        for event in run.of("thaw"):
            before = [wrap for wrap in wraps if wrap.place < event.place and not apart(wrap, event)]
            wrap = next((each for each in reversed(before) if same(view, each, event)), None)
            if wrap is None or event.module is not view.module or any(each.place > event.place for each in wraps):
                continue
            frozen = (e for e in run.of("freeze") if e.place < wrap.place and not apart(e, event))
            trained = any(back.place > event.place for back in run.of("backward"))
            if trained and any(same(view, each, event) for each in frozen):
                yield Found(event.node, THAWED.format(line=wrap.line))


def unheard(view: View) -> Iterator[Found]:
    """Looks at programs with DDP for training that it does not take part in: of a model that is not the wrapped one, or
    by steps that go around the wrapper.
    """
    kinds = view.wrappers.kinds(view.module)
    if "ddp" not in kinds or not kinds <= {"ddp", "dp"}:
        return
    for training in view.training:
        site = around(view, training)
        if site is not None and site.module is view.module and view.trainings.steps_in(training.loop, training.scope):
            yield at(
                site, "goes around DDP, which exchanges gradients only after its own forward: call the wrapped model"
            )
            return
    starts = any(True for _ in view.sites("init_process_group"))
    trained = trainings(view) if starts and not view.hidden(WRAPS) else []
    if trained and all(outside(view, t) and not unseen(view, t) for t in trained):
        for site in view.sites("init_process_group"):
            yield at(
                site, "the ranks never exchange gradients: what is wrapped in DDP is not the model that is trained"
            )


def by_hand(family: tuple[Module, ...]) -> bool:
    """Whether the files of a program may exchange gradients by themselves."""
    return any(says(m, GRADIENTS) for m in family) and any(says(m, COLLECTIVES) for m in family)


@kept
def exchanges(module: Module) -> bool:
    """Check whether a file names what exchanges gradients beside DDP."""
    return module.names(OTHERS) or any(piece in module.bare for piece in PIECES)


@kept
def says(module: Module, pattern: re.Pattern[str]) -> bool:
    """Whether a pattern occurs in a file, beside its comments."""
    return pattern.search(module.bare) is not None


def trainings(view: View) -> list[Training]:
    """The training loops of a file's programs, of the files that step an optimizer."""
    family = view.project.family(view.module)
    return [t for member in family for t in view.trainings.of(member) if steps(view, member)]


def renamed(module: Module) -> bool:
    """Whether a file uses a wrapper that it imports under another name."""
    return any(name in module.words for name, imported in module.imports.items() if wraps(imported.full))


@functools.cache
def wraps(full: str) -> bool:
    """Check whether what has a full name exchanges gradients."""
    parts = full.split(".")
    return any(DDP.search(part) or OTHERS.search(part) for part in parts) or any(piece in full for piece in PIECES)


def steps(view: View, module: Module) -> bool:
    """Whether a file steps an optimizer."""
    return any(view.steps.steps_optimizer(site) for site in module.sites("step"))


RULE = Rule(
    code="LS031",
    name="no gradient exchange",
    what=(
        "A program starts a process group and trains, but nothing wraps the model or exchanges gradients, or each step "
        "goes around the wrapper (`model.module.loss(x)`); or parameters are unfrozen after DDP was built."
    ),
    why=(
        "Each rank trains a model of its own on its share of the data, and the one that is saved has seen a "
        "fraction of it."
    ),
    bad="""
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
    good="""
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
    severity=Severity.ERROR,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Wrap the model in DistributedDataParallel, and call the wrapper",
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
