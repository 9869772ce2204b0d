"""LS003: a process group without a distributed sampler, or shuffle beside a sampler."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.drafts import sampler_given
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import constant, dotted, idents, is_true, keyword, last, strings
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

SAMPLERS = ("sampler", "batch_sampler")
# Words that say that the data is divided among the ranks in some other way.
DIVIDED = re.compile(
    r"rank|shard|partition|world|split_by|sampler|webdataset|iterable|stream|distributed", re.IGNORECASE
)


def check(view: View) -> Iterator[Found]:
    """Looks at the loaders that train under DDP, and at every sampler that stands beside a shuffle."""
    for site in view.sites("DataLoader"):
        if is_true(keyword(site.call, "shuffle")) and samples(view, site):
            yield Found(site.call, "DataLoader refuses shuffle=True beside a sampler: drop it, the sampler shuffles")
    for site in view.sites("DataLoader"):
        if not view.ranks.every(site.stmt, site.scope) or divided(view, site):
            continue
        if any(feeds(view, site, t) and trains_wrapped(view, t) for t in view.trainings.near(view.module)):
            yield Found(
                site.call,
                "every rank reads the same samples: give this loader a DistributedSampler (and shuffle=False)",
                proposal=sampler_given(view, site),
            )


def samples(view: View, site: Site) -> bool:
    """Whether a loader is given what certainly is a sampler, at least on one of the ways that lead there."""
    value = keyword(site.call, "sampler")
    if isinstance(value, ast.Call):
        return True
    if value is None or (isinstance(value, ast.Name) and value.id in site.scope.params):
        return False
    asked = any(set(idents(guard.test)) & set(idents(value)) for guard in guards(site.stmt, site.module))
    return not asked and any("sampler" in full.lower() for _, _, full in view.origins.calls_of(value, site.scope))


def trains_wrapped(view: View, training: Training) -> bool:
    """Whether the program of a training loop wraps its model in DDP."""
    return any(
        kind in ("ddp", "fsdp") and not view.ranks.single(site.stmt, site.scope)
        for member in view.project.family(training.module)
        for kind, site in view.wrappers.made(member)
    )


def divided(view: View, site: Site) -> bool:
    """Whether the loader's arguments divide the data, or may."""
    call = site.call
    if any(keyword(call, name) is not None for name in SAMPLERS) or not known(site) or len(call.args) > 3:
        return True
    data = call.args[0] if call.args else keyword(call, "dataset")
    if data is None or DIVIDED.search(ast.unparse(data)):
        return True
    return not whole(view, data, site.scope)


def known(site: Site) -> bool:
    """Whether what a loader is given is seen, with no sampler in it: `**options` are written out and left alone."""
    if any(isinstance(value, ast.Starred) for value in site.call.args):
        return False
    for item in site.call.keywords:
        if item.arg is not None:
            continue
        name = item.value.id if isinstance(item.value, ast.Name) else ""
        binds = site.scope.binds.get(name, [])
        if not binds or any(bind.value is None or not plain(bind.value) for bind in binds):
            return False
        if any(dotted(other.receiver) == name for other in site.scope.sites) or f"{name}[" in site.module.text:
            return False  # updated, or set by key
    return True


def plain(table: ast.expr) -> bool:
    """Whether an expression is a dictionary that is written out, without a sampler."""
    if isinstance(table, ast.Dict):
        keys = [constant(key) if key is not None else None for key in table.keys]
    elif (
        isinstance(table, ast.Call) and isinstance(table.func, ast.Name) and table.func.id == "dict" and not table.args
    ):
        keys = [item.arg for item in table.keywords]
    else:
        return False
    return all(isinstance(key, str) and key not in SAMPLERS for key in keys)


def whole(view: View, data: ast.expr, scope: Scope, depth: int = 0) -> bool:
    """Whether a data set certainly is the same for all ranks, or a part of one that `random_split` gives all alike."""
    for origin in view.origins.of(data, scope):
        if isinstance(origin.node, ast.List) and not origin.node.elts:
            continue  # `data = []`, before one of several is chosen
        split = split_of(view, origin.node, origin.scope)
        if split is not None and depth < 2:
            if not whole(view, split, origin.scope, depth + 1):
                return False
        elif not isinstance(origin.node, ast.Call) or divides(view, origin.node, origin.scope):
            return False
    return True


def split_of(view: View, node: ast.expr, scope: Scope) -> ast.expr | None:
    """The data set of which a name is a part (`train, val = random_split(data, ...)`)."""
    key = dotted(node)
    made = [bind.value for bind, _ in view.origins.binds(key, scope, node.lineno)] if key is not None else []
    call = made[0] if len(made) == 1 else None
    if not isinstance(call, ast.Call) or last(call) != "random_split" or not call.args:
        return None
    return None if any(DIVIDED.search(word) for word in (*idents(call), *strings(call))) else call.args[0]


def divides(view: View, call: ast.Call, scope: Scope) -> bool:
    """Whether the code that makes a dataset knows of ranks."""
    if any(DIVIDED.search(word) for word in (*idents(call), *strings(call))):
        return True
    owner = view.names.definition(call.func, scope)
    if owner is None:
        return False
    names = " ".join(view.names.bases_of(owner)) if owner.kind == "class" else ""
    start, end = owner.node.lineno, owner.node.end_lineno or owner.node.lineno  # type: ignore[attr-defined]
    return bool(DIVIDED.search(names + "\n".join(owner.module.lines[start - 1 : end])))


def feeds(view: View, site: Site, training: Training) -> bool:
    """Whether the training loop certainly runs over this loader."""
    name = training.scope.name.lower()
    if EVALUATION.search(name) and "train" not in name:
        return False  # `evaluate` may call the method that trains, and tell it not to
    return any(
        made[0] is site.call
        for source in sources(view, training)
        if (made := view.kinds.loader_call(view.kinds.iterated(source, training.scope), training.scope))
    )


def sources(view: View, training: Training) -> list[ast.expr]:
    """What a training loop takes its batches from: its header, or else the iterator that it asks for the next one."""
    header = [training.loop.iter] if isinstance(training.loop, ast.For) else []
    if any(view.kinds.is_loader(view.kinds.iterated(source, training.scope), training.scope) for source in header):
        return header
    body = view.trainings.body(training.loop, training.scope)
    return header + [s.call.args[0] for s in body if s.name == "next" and s.call.args and s.scope is training.scope]


RULE = Rule(
    code="LS003",
    name="DDP without a distributed sampler",
    what=(
        "The loader that feeds a DDP training loop has no DistributedSampler, so that every rank reads all "
        "samples; or a loader has `shuffle=True` beside a sampler."
    ),
    why=(
        "Each rank sees the whole dataset instead of its share: an epoch costs as much as on one GPU, and with equal "
        "seeds all ranks compute the same gradients. Beside a sampler, shuffle=True is an error."
    ),
    bad="""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10

def main(local_rank, model, optimizer, criterion):
    dist.init_process_group("nccl")
    torch.cuda.set_device(local_rank)
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    loader = DataLoader(CIFAR10("data"), batch_size=32, shuffle=True)
    for epoch in range(10):
        for images, labels in loader:
            images, labels = images.to(local_rank), labels.to(local_rank)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()
""",
    good="""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CIFAR10

def main(local_rank, model, optimizer, criterion):
    dist.init_process_group("nccl")
    torch.cuda.set_device(local_rank)
    model = DDP(model.to(local_rank), device_ids=[local_rank])
    data = CIFAR10("data")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images, labels = images.to(local_rank), labels.to(local_rank)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Pass sampler=DistributedSampler(dataset) and call its set_epoch in every epoch",
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
            "ignite",
            "horovod",
            "ray",
        }
    ),
)
