"""LS005: BatchNorm under DDP without conversion."""

import ast
import re
from collections.abc import Iterator

from lockstep.lint.analysis.calls import given
from lockstep.lint.analysis.index import Scope, Site
from lockstep.lint.analysis.lookups import looked_up
from lockstep.lint.analysis.nodes import argument, constant, keyword, last, strings
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# Families of torchvision and timm whose layers hold BatchNorm; a few of their members normalise otherwise.
FAMILIES = re.compile(
    r"^(wide_|tf_|csp|se|ecas?|sk|legacy_)?(?!resnetv2)(resnet|resnext|resnest|densenet|darknet|mobilenet|mnasnet"
    r"|shufflenet|efficientnet|regnet|googlenet|inception|xception|hrnet|repvgg|ghostnet|mixnet|res2net|dla\d|rexnet"
    r"|vgg\d+_bn|fcn_resnet|deeplabv3_|lraspp_|r3d_|mc3_|r2plus1d_|s3d)(?!.*_gn)"
)
# What the model that is wrapped is called, most often.
MODELS = {"model", "net", "self.model"}
# Segmentation models whose decoders hold BatchNorm, whatever their encoder is.
DECODERS = {"Unet", "UnetPlusPlus", "MAnet", "Linknet", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus", "UPerNet"}
# Arguments that choose another normalisation.
CHOICES = {"norm_layer", "decoder_use_batchnorm", "decoder_use_norm"}
# Of a table with more models than this, these many are looked at.
MAX_MODELS = 24
NORM = re.compile(r"^BatchNorm[123]d$")


def check(view: View) -> Iterator[Found]:
    """Looks at the models that DDP wraps for BatchNorm layers that nothing converts."""
    if view.effects.mentioned(
        view.module, "SyncBatchNorm", "convert_syncbn", "SyncBN", "sync_bn", "syncbn", "InPlaceABN"
    ):
        return
    for kind, site in view.wrappers.made(view.module):
        if kind == "ddp" and not view.on_cpu(site) and has_norm(view, site) and not stays(view, site):
            yield at(
                site,
                "each rank normalises by its own share of the batch: convert the model with nn.SyncBatchNorm first",
            )


def stays(view: View, site: Site) -> bool:
    """Whether the model is moved to the CPU before it is wrapped."""
    moves = [s for s in site.scope.named("to") if s.line <= site.line and view.kinds.is_model(s.receiver, s.scope)]
    made = [s for s in site.scope.named("to") if any(bind.key in MODELS for bind in site.scope.bound(s.stmt))]
    return any(view.is_cpu(next(iter(s.call.args), None), s.scope) for s in (*moves, *made))


def has_norm(view: View, site: Site) -> bool:
    """Whether the wrapped model certainly has BatchNorm layers."""
    for call, scope, full in view.origins.calls_of(view.wrappers.inner(site.call), site.scope):
        if torchvision(call, scope, full, view):
            return True
        owner = view.names.definition(call.func, scope)
        if owner is not None and owner.kind == "class":
            if class_has_norm(view, owner, set()) or any(builds(view, owner, part, call, scope) for part in call.args):
                return True
        elif owner is None and mostly(view, looked_up(view, call.func, scope)):
            return True
        if full.endswith("Sequential") and any(
            normalises(view, s) for s in scope.sites if s.stmt.lineno <= call.lineno <= (s.stmt.end_lineno or 0)
        ):
            return True
    return False


def builds(view: View, owner: Scope, part: ast.expr, call: ast.Call, scope: Scope) -> bool:
    """Whether a class makes a part of itself by what it is given, which has BatchNorm layers (`MoCo(resnet50)`)."""
    start = owner.defs.get("__init__")
    names = {s.name for s in start.sites if isinstance(s.call.func, ast.Name)} if start is not None else set()
    if start is None or not any(given(call, start, name) is part for name in names.intersection(start.params)):
        return False
    maker = view.names.definition(part, scope)
    if maker is not None:
        return class_has_norm(view, maker, set())
    made = ast.copy_location(ast.Call(part, [], []), part)
    return torchvision(made, scope, view.names.qualify(part, scope), view)


def mostly(view: View, made: list[Scope]) -> bool:
    """Whether most of the models that a name may choose have BatchNorm layers."""
    found = [class_has_norm(view, owner, set()) for owner in made[:MAX_MODELS]]
    return bool(found) and sum(found) * 3 >= len(found) * 2


def normalises(view: View, site: Site) -> bool:
    """Whether a call makes a BatchNorm layer, under any name (`from torch.nn import BatchNorm1d as BatchNorm`)."""
    return bool(NORM.match(site.name) or NORM.match(view.full(site).rpartition(".")[2]))


def torchvision(call: ast.Call, scope: Scope, full: str, view: View) -> bool:
    """Whether a call makes a library's model with BatchNorm, by name or as the default of a flag."""
    if any(item.arg in CHOICES for item in call.keywords):
        return False
    if full.startswith("segmentation_models_pytorch.") and last(call) in DECODERS:
        return True
    if full.startswith("efficientnet_pytorch.EfficientNet."):
        return True
    if full.startswith("torchvision.models.") and FAMILIES.match(full.rsplit(".", 1)[-1]):
        return True
    if isinstance(call.func, ast.Subscript | ast.Call) and "models" in ast.unparse(call.func):
        named = [text for text in strings(call.func) if FAMILIES.match(text)]
        return bool(named) or any(FAMILIES.match(text) for text in default_names(scope, view))
    if last(call) in ("create_model", "get_model") or full == "torch.hub.load":
        wanted = call.args[1] if full == "torch.hub.load" and len(call.args) > 1 else argument(call, 0, "model_name")
        names = [constant(o.node) for o in view.origins.of(wanted, scope)]
        if any(isinstance(name, str) and FAMILIES.match(name.partition("/")[2] or name) for name in names):
            return True
        flag = last(wanted)  # `create_model(args.model)`
        return bool(flag) and any(FAMILIES.match(text) for text in default_names(scope, view, flag))
    return False


def default_names(scope: Scope, view: View, flag: str = "") -> Iterator[str]:
    """The defaults of the program's flags that name a model, or of one of them."""
    for site in scope.module.sites("add_argument"):
        value = constant(keyword(site.call, "default"))
        named = [text.lstrip("-").replace("-", "_") for text in strings(site.call) if text.startswith("-")]
        wanted = flag in named if flag else any("arch" in text or "model" in text for text in strings(site.call))
        if isinstance(value, str) and wanted:
            yield value


def handed_on(scope: Scope) -> bool:
    """Whether a function names a BatchNorm class to make layers of (`norm=nn.BatchNorm2d`), not to look for them."""
    stack: list[ast.AST] = [scope.node] if scope.kind == "function" else []
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name | ast.Attribute) and NORM.match(last(node)):
            return True
        if not (isinstance(node, ast.Call | ast.Compare) and _looks(node)):
            stack.extend(ast.iter_child_nodes(node))
    return False


def _looks(node: ast.Call | ast.Compare) -> bool:
    return isinstance(node, ast.Compare) or last(node) in ("isinstance", "issubclass", "type")


def class_has_norm(view: View, owner: Scope, seen: set[Scope]) -> bool:
    """Whether a class, or a class or function that its layers come from, makes BatchNorm layers."""
    if owner in seen or len(seen) > 40:
        return False
    seen.add(owner)
    scopes = [owner, *owner.defs.values()] if owner.kind == "class" else [owner]
    for scope in scopes:
        if scope.kind == "function" and scope.name == "forward":
            continue
        if handed_on(scope):
            return True
        for site in scope.sites:
            if normalises(view, site) or torchvision(site.call, scope, view.full(site), view):
                return True
            below = view.names.definition(site.call.func, scope)
            chosen = [below] if below is not None else chosen_in(view, site) if len(seen) < 5 else []
            if any(class_has_norm(view, each, seen) for each in chosen):
                return True
    return False


def chosen_in(view: View, site: Site) -> list[Scope]:
    """The models that a name may choose where a class makes one of its parts, if most of them have BatchNorm layers."""
    func = site.call.func
    named = isinstance(func, ast.Name) and func.id in site.scope.binds
    made = looked_up(view, func, site.scope) if named or isinstance(func, ast.Call | ast.Subscript) else []
    return made if mostly(view, made) else []


RULE = Rule(
    code="LS005",
    name="BatchNorm under DDP",
    what="A model with BatchNorm layers is wrapped in DDP and never converted to SyncBatchNorm.",
    why=(
        "Each rank computes mean and variance from its own part of the batch. With a small batch a rank the statistics "
        "are noisy, differ between ranks, and the result depends on the number of GPUs."
    ),
    bad=(
        """
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
        """
import torch
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(local_rank):
    return DDP(torchvision.models.resnet50().to(local_rank), device_ids=[local_rank])
""",
        """
import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torchvision.models.resnet18()

class Trainer:
    def __init__(self, local_rank):
        self.model = Net().to(local_rank)
        self.model = DDP(self.model, device_ids=[local_rank])
""",
        """
import argparse
import timm
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet50")

def wrap(args, local_rank):
    return DDP(timm.create_model(args.model).to(local_rank), device_ids=[local_rank])
""",
    ),
    good=(
        """
import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(local_rank):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(torchvision.models.resnet50()).to(local_rank)
    return DDP(model, device_ids=[local_rank])
""",
        """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())

def wrap(local_rank):
    return DDP(Net().to(local_rank), device_ids=[local_rank])
""",
        """
import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    model = DDP(torchvision.models.resnet18())
    dist.destroy_process_group()
    return model
""",
        """
import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(model, local_rank, batch):
    if not torch.cuda.is_available():
        return DDP(torchvision.models.resnet18())
    return DDP(model.to(local_rank), device_ids=[local_rank])
""",
        """
import timm
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = timm.create_model("vit_base_patch16_224")
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                raise ValueError(layer)

def wrap(local_rank):
    return DDP(Net().to(local_rank), device_ids=[local_rank])
""",
    ),
    severity=Severity.WARNING,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="model = nn.SyncBatchNorm.convert_sync_batchnorm(model) before it is wrapped",
)
