"""Say which calls make BatchNorm layers, or a library's model that has some."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import REFERENCES, Words, argument, constant, is_none, keyword, last, strings
from lockstep_lint.analysis.origins import default
from lockstep_lint.analysis.view import View

__all__ = ["NORM", "normalises"]

# Families of torchvision and timm whose layers hold BatchNorm; a few of their members normalise otherwise.
FAMILIES = re.compile(
    r"^(wide_|tf_|csp|se|ecas?|sk|legacy_)?(?!resnetv2)(resnet|resnext|resnest|densenet|darknet|mobilenet|mnasnet"
    r"|shufflenet|efficientnet|regnet|googlenet|inception|xception|hrnet|repvgg|ghostnet|mixnet|res2net|dla\d|rexnet"
    r"|vgg\d+_bn|fcn_resnet|deeplabv3_|lraspp_|r3d_|mc3_|r2plus1d_|s3d)(?!.*_gn)"
)
# Segmentation models whose decoders hold BatchNorm, whatever their encoder is.
DECODERS = {"Unet", "UnetPlusPlus", "MAnet", "Linknet", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus", "UPerNet"}
# Arguments that choose another normalisation.
CHOICES = {"norm_layer", "decoder_use_batchnorm", "decoder_use_norm"}
NORM = Words(r"^(Lazy)?BatchNorm[123]d$")
# Layers that share their statistics, which may go by the name of those that do not.
OTHERS = re.compile(r"ABN|SyncB")


def normalises(view: View, site: Site, full: str) -> bool:
    """Check whether a call makes a BatchNorm layer, or a library's model with some."""
    func, scope = site.call.func, site.scope
    if is_norm(view, func, scope, full) or of_library(view, site, full):
        return True
    named = not full and "norm" in site.name.lower() and not site.name[:1].isupper() and isinstance(func, REFERENCES)
    if not named or "BatchNorm" not in site.module.text:
        return False
    made = [(o.node, o.scope) for o in view.origins.of(func, scope) if not is_none(o.node) and o.node is not func]
    usual = default(scope, site.name, site.call) if site.name in scope.params and not made else None
    made += [(usual, scope)] if usual is not None else []
    return bool(made) and all(is_norm(view, node, home, view.names.qualify(node, home)) for node, home in made)


def is_norm(view: View, node: ast.expr, scope: Scope, full: str) -> bool:
    """Check whether a name means a BatchNorm class, and none that was renamed to it."""
    if not NORM.search(full.rpartition(".")[2] or last(node)):
        return False
    return bool(full) or not isinstance(node, ast.Name) or not OTHERS.search(scope.module.text)


def of_library(view: View, site: Site, full: str) -> bool:
    """Check whether a call makes a library's model that has BatchNorm."""
    call, name = site.call, site.name
    if any(item.arg in CHOICES for item in call.keywords):
        return False
    if full.startswith("segmentation_models_pytorch.") and name in DECODERS:
        return True
    if full.startswith("efficientnet_pytorch.EfficientNet.") or (
        full.startswith("torchvision.models.") and FAMILIES.match(full.rsplit(".", 1)[-1])
    ):
        return True
    if isinstance(call.func, ast.Subscript | ast.Call) and "models" in ast.unparse(call.func):
        func = call.func
        wanted = func.slice if isinstance(func, ast.Subscript) else next(iter(func.args[1:] or func.args), None)
        return any(map(FAMILIES.match, find_choices(view, wanted, site.scope)))
    if full == "torch.hub.load" or name in ("create_model", "get_model"):
        wanted = call.args[1] if full == "torch.hub.load" and len(call.args) > 1 else argument(call, 0, "model_name")
        return any(FAMILIES.match(text.partition("/")[2] or text) for text in find_choices(view, wanted, site.scope))
    return False


def find_choices(view: View, wanted: ast.expr | None, scope: Scope) -> Iterator[str]:
    """Yield the names that a look-up may find: literal, or an option's defaults."""
    texts = [text for origin in view.origins.of(wanted, scope) if isinstance(text := constant(origin.node), str)]
    if texts or wanted is None:
        return iter(texts)
    inner = constant(wanted.slice) if isinstance(wanted, ast.Subscript) else None  # `config["arch"]`
    flag = inner if isinstance(inner, str) else last(wanted)
    found = [pair for member in view.project.family(scope.module) for pair in defaults(member)]
    own = [value for name, value in found if name == flag]
    return iter(own or [value for name, value in found if "arch" in name.lower() or "model" in name.lower()])


@cache_answers
def defaults(module: Module) -> tuple[tuple[str, str], ...]:
    """Return the names and the defaults of a program's options that are texts."""
    found = []
    for site in module.sites("add_argument", "option") if "default" in module.text else ():
        value = constant(keyword(site.call, "default"))
        if isinstance(value, str):
            found += [(text.lstrip("-").replace("-", "_"), value) for text in strings(site.call)]
    return tuple(found)
