"""LS005: BatchNorm under DDP without conversion."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.index import Module, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.norms import attached, has_norm
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# What the model that is wrapped is called, most often.
MODELS = {"model", "net", "self.model"}
# A conversion, or a choice of layers that share their statistics.
CONVERSIONS = ("convert_syncbn", "SyncBN", "sync_bn", "syncbn")
SHARED = re.compile(r"SyncBatchNorm|InPlaceABN")
# An option that is declared says nothing until something asks for it.
DECLARED = re.compile(r"""add_argument\(\s*["']--?sync_?bn["']""")
# Where a layer that shares is only defined, or imported, maybe under another name.
DEFINED = re.compile(
    r"^[ \t]*(from|import)\b.*$|\bclass\s+\w*InPlaceABN\w*|\bsuper\(\w*InPlaceABN\w*|\w*InPlaceABN\w*\.apply\b",
    re.MULTILINE,
)
PLAIN = re.compile(r"(?<!Sync)BatchNorm")
# Layers that a loop looks for, to fill them (`isinstance(m, (nn.BatchNorm2d, nn.SyncBatchNorm))`).
LOOKED_FOR = re.compile(
    r"isinstance\([^()]*\([^()]*\)|isinstance\([^()]*\)|\((?=[^()]*\b(?:_?BatchNorm|GroupNorm))[^()]*,[^()]*\)"
)


def check(view: View) -> Iterator[Found]:
    """Looks at the models that DDP wraps for BatchNorm layers that nothing converts."""
    made = [site for kind, site in view.wrappers.made(view.module) if kind == "ddp" and not view.on_cpu(site)]
    if not made or view.only_evaluates or any(map(converts, view.project.family(view.module))):
        return
    for site in made:
        model = view.wrappers.inner(site.call)
        if (has_norm(view, model, site.scope) or attached(view, model, site)) and not stays(view, site):
            yield at(
                site,
                "each rank normalises by its own share of the batch: convert the model with nn.SyncBatchNorm first",
            )


@kept
def converts(module: Module) -> bool:
    """Whether a file converts BatchNorm layers, or may make others."""
    if any(word in module.text for word in CONVERSIONS):
        text = DECLARED.sub("", module.text)
        if any(word in text for word in CONVERSIONS):
            return True
    if not SHARED.search(module.text):
        return False
    left = len(SHARED.findall(DEFINED.sub("", LOOKED_FOR.sub("", module.text))))
    return left > (sum(map(own_layer, module.sites("SyncBatchNorm"))) if left else 0)


def own_layer(site: Site) -> bool:
    """Whether a call makes a layer of a class that knows no other kind: the model's other layers are not converted."""
    owner = site.scope.owner
    if owner is None or not isinstance(owner.node, ast.ClassDef):
        return False
    body = site.module.lines[owner.node.lineno - 1 : owner.node.end_lineno]
    return not any(map(PLAIN.search, body))


def stays(view: View, site: Site) -> bool:
    """Whether the model is moved to the CPU before it is wrapped."""
    moves = [s for s in site.scope.named("to") if s.line <= site.line and view.kinds.is_model(s.receiver, s.scope)]
    made = [s for s in site.scope.named("to") if any(bind.key in MODELS for bind in site.scope.bound(s.stmt))]
    return any(view.is_cpu(next(iter(s.call.args), None), s.scope) for s in (*moves, *made))


RULE = Rule(
    code="LS005",
    name="BatchNorm under DDP",
    what="A model with BatchNorm layers is wrapped in DDP and never converted to SyncBatchNorm.",
    why=(
        "Each rank computes mean and variance from its own part of the batch. With a small batch a rank the statistics "
        "are noisy, differ between ranks, and the result depends on the number of GPUs."
    ),
    bad="""
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

def wrap(local_rank):
    model = Net().to(local_rank)
    return DDP(model, device_ids=[local_rank])
""",
    good="""
import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(local_rank):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(torchvision.models.resnet50()).to(local_rank)
    return DDP(model, device_ids=[local_rank])
""",
    severity=Severity.WARNING,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="model = nn.SyncBatchNorm.convert_sync_batchnorm(model) before it is wrapped",
)
