"""Which models have BatchNorm layers: by the library that they come from, or by the classes that they are made of."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import given
from lockstep_lint.analysis.flags import default_names
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.lookups import looked_up
from lockstep_lint.analysis.nodes import argument, constant, dotted, last, strings
from lockstep_lint.analysis.settings import Settings, live, passed_down, ruled_out, unchosen
from lockstep_lint.analysis.view import View

__all__ = ["attached", "has_norm"]

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
# Of a table with more models than this, these many are looked at.
MAX_MODELS = 24
MAX_CLASSES = 40
MAX_DEPTH = 3
# The classes and functions that were looked into, each with what was known of its parameters.
Seen = set[tuple[Scope, tuple[tuple[str, str], ...]]]
NORM = re.compile(r"^(Lazy)?BatchNorm[123]d$")
# Layers that share their statistics, which may go by the name of those that do not.
OTHERS = re.compile(r"ABN|SyncB")


def has_norm(view: View, node: ast.expr | None, scope: Scope, depth: int = 0) -> bool:
    """Whether a model certainly has BatchNorm layers."""
    for call, home in made(view, node, scope):
        full = view.names.qualify(call.func, home)
        if of_library(call, home, full, view) or (full.endswith("Sequential") and in_statement(view, call, home)):
            return True
        owner = view.names.definition(call.func, home)
        if owner is None and mostly(view, looked_up(view, call.func, home), set()):
            return True
        if any(isinstance(part, ast.Attribute) and NORM.match(part.attr) for part in arguments(call)):
            return True
        if owner is not None and owner.kind == "class" and makes(view, owner, call, home):
            return True
        if depth < MAX_DEPTH and any(has_norm(view, part, home, depth + 1) for part in holds(call, full, owner)):
            return True
    return False


def attached(view: View, model: ast.expr | None, wrap: Site) -> bool:
    """Whether a function gives a model a BatchNorm layer before it wraps it (`net.head = BatchNorm1d(8)`)."""
    key = dotted(model)
    return key is not None and any(
        name.startswith(f"{key}.") and bind.stmt.lineno < wrap.line and normalises(view, site)
        for name, binds in wrap.scope.binds.items()
        for bind in binds
        for site in wrap.scope.sites
        if site.stmt is bind.stmt
    )


def made(view: View, node: ast.expr | None, scope: Scope) -> Iterator[tuple[ast.Call, Scope]]:
    """The calls that make a model: one that gives it beside other things too (`net, width = TABLE[name](...)`)."""
    for origin in view.origins.of(node, scope):
        if origin.call is not None:
            yield origin.call, origin.scope
        elif isinstance(origin.node, ast.Name | ast.Attribute):
            for bind, home in view.origins.binds(dotted(origin.node) or "", origin.scope, origin.node.lineno):
                if bind.path[:1] == (0,) and isinstance(bind.value, ast.Call):
                    yield bind.value, home


def arguments(call: ast.Call) -> list[ast.expr]:
    """All that a call is given."""
    return [*call.args, *(item.value for item in call.keywords)]


def makes(view: View, owner: Scope, call: ast.Call, scope: Scope) -> bool:
    """Whether a class makes itself BatchNorm layers, of its own or by what it is given."""
    settings = set_in(view, call, scope, owner, {})
    return class_has_norm(view, owner, set(), settings) or any(
        builds(view, owner, part, call, scope) for part in call.args
    )


def holds(call: ast.Call, full: str, owner: Scope | None) -> list[ast.expr]:
    """The arguments of a call that become parts of the model that it makes (`Classifier(backbone, head)`)."""
    if full.endswith("Sequential"):
        return call.args
    start = owner.defs.get("__init__") if owner is not None and owner.kind == "class" else None
    if start is None:
        return []
    kept = [bind.value for key, binds in start.binds.items() if key.startswith("self.") for bind in binds]
    names = [name for name in start.params if any(value is not None and takes(value, name) for value in kept)]
    return [part for name in names if isinstance(part := given(call, start, name), ast.Name | ast.Attribute | ast.Call)]


def takes(value: ast.expr, name: str) -> bool:
    """Whether a value holds a name's object itself, not one of its attributes."""
    stack: list[ast.AST] = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name) and node.id == name:
            return True
        if not isinstance(node, ast.Attribute):
            stack.extend(ast.iter_child_nodes(node))
    return False


def in_statement(view: View, call: ast.Call, scope: Scope) -> bool:
    """Whether a BatchNorm layer is made in a call's own lines."""
    return any(
        normalises(view, site) for site in scope.sites if call.lineno <= site.line <= (call.end_lineno or call.lineno)
    )


def builds(view: View, owner: Scope, part: ast.expr, call: ast.Call, scope: Scope) -> bool:
    """Whether a class makes a part of itself by what it is given, which has BatchNorm layers (`MoCo(resnet50)`)."""
    start = owner.defs.get("__init__")
    names = {s.name for s in start.sites if isinstance(s.call.func, ast.Name)} if start is not None else set()
    if start is None or not any(given(call, start, name) is part for name in names.intersection(start.params)):
        return False
    maker = view.names.definition(part, scope)
    if maker is not None:
        return class_has_norm(view, maker, set(), {})
    call_of_it = ast.copy_location(ast.Call(part, [], []), part)
    return of_library(call_of_it, scope, view.names.qualify(part, scope), view)


def mostly(view: View, models: list[Scope], seen: Seen) -> bool:
    """Whether most of the models that a name may choose have BatchNorm layers."""
    inside = {owner for owner, _ in seen}
    found = [class_has_norm(view, owner, set(seen), {}) for owner in models[:MAX_MODELS] if owner not in inside]
    return bool(found) and sum(found) * 3 >= len(found) * 2


def normalises(view: View, site: Site) -> bool:
    """Whether a call makes a BatchNorm layer, under any name (`from torch.nn import BatchNorm1d as BatchNorm`)."""
    return is_norm(view, site.call.func, site.scope)


def is_norm(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether a name stands for a BatchNorm class, not for another one that was given its name."""
    full = view.names.qualify(node, scope)
    if not full and isinstance(node, ast.Name) and OTHERS.search(scope.module.text):
        return False
    return bool(NORM.match(full.rpartition(".")[2] or last(node)))


def of_library(call: ast.Call, scope: Scope, full: str, view: View) -> bool:
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
        return any(FAMILIES.match(text) for text in chosen_names(view, call.func, scope))
    if last(call) in ("create_model", "get_model") or full == "torch.hub.load":
        wanted = call.args[1] if full == "torch.hub.load" and len(call.args) > 1 else argument(call, 0, "model_name")
        names = [constant(o.node) for o in view.origins.of(wanted, scope)]
        if any(isinstance(name, str) and FAMILIES.match(name.partition("/")[2] or name) for name in names):
            return True
        flag = last(wanted)  # `create_model(args.model)`
        return bool(flag) and any(FAMILIES.match(text) for text in default_names(view, scope, flag))
    return False


def chosen_names(view: View, chosen: ast.Subscript | ast.Call, scope: Scope) -> list[str]:
    """The names that a look-up may be of: written out there or by who calls, else the defaults of the option that it
    asks (`TABLE[args.arch]`), else of any option that names a model.
    """
    key = chosen.slice if isinstance(chosen, ast.Subscript) else next(iter(chosen.args[1:] or chosen.args), None)
    texts = (constant(origin.node) for origin in view.origins.of(key, scope))
    named = [text for text in texts if isinstance(text, str)]
    named += filter(FAMILIES.match, strings(chosen))
    inner = constant(key.slice) if isinstance(key, ast.Subscript) else None  # `config["arch"]`
    flag = inner if isinstance(inner, str) else last(key)
    return named or (list(default_names(view, scope, flag)) if flag else []) or list(default_names(view, scope))


def handed_on(view: View, scope: Scope, settings: Settings) -> bool:
    """Whether a function names a BatchNorm class to make layers of (`norm=nn.BatchNorm2d`), not to look for them."""
    if scope.kind != "function" or "BatchNorm" not in scope.module.text:
        return False
    looked_for: set[ast.AST] = set()
    for node in live(scope.node, settings):
        if isinstance(node, ast.Call | ast.Compare) and _looks(node):
            looked_for.update(ast.walk(node))
        elif isinstance(node, ast.Name | ast.Attribute) and node not in looked_for and NORM.match(last(node)):
            found = is_norm(view, node, scope)
            if found:
                return True
    return False


def _looks(node: ast.Call | ast.Compare) -> bool:
    return isinstance(node, ast.Compare) or last(node) in ("isinstance", "issubclass", "type")


def class_has_norm(view: View, owner: Scope, seen: Seen, settings: Settings) -> bool:
    """Whether a class, or a class or function that its layers come from, makes BatchNorm layers."""
    key = (owner, tuple(sorted((name, repr(value)) for name, value in settings.items())))
    if key in seen or len(seen) > MAX_CLASSES:
        return False
    seen.add(key)
    for scope, known in scopes_of(owner, settings):
        if handed_on(view, scope, known):
            return True
        for site in scope.sites:
            if not ruled_out(site, known) and makes_norm(view, site, seen, known):
                return True
    return False


def scopes_of(owner: Scope, settings: Settings) -> Iterator[tuple[Scope, Settings]]:
    """The functions in which a class or a function makes layers, each with what is known of its names."""
    yield owner, settings
    attributes = {name: value for name, value in settings.items() if name.startswith("self.")}
    for name, method in owner.defs.items() if owner.kind == "class" else ():
        if name != "forward":
            yield method, settings if name == "__init__" else attributes


def makes_norm(view: View, site: Site, seen: Seen, settings: Settings) -> bool:
    """Whether a call makes a BatchNorm layer or something that has some."""
    if normalises(view, site) or of_library(site.call, site.scope, view.full(site), view):
        return not unchosen(site, settings)
    below = view.names.definition(site.call.func, site.scope)
    if below is None:
        return mostly(view, chosen_in(view, site), seen) if len(seen) < 5 else False
    return class_has_norm(view, below, seen, set_in(view, site.call, site.scope, below, settings))


def set_in(view: View, call: ast.Call, scope: Scope, owner: Scope, before: Settings) -> Settings:
    """What is known of the parameters of a function, or of a class's `__init__`, in a call."""
    function = view.names.member(owner, "__init__") if owner.kind == "class" else owner
    return passed_down(view, call, scope, function, before) if function is not None else {}


def chosen_in(view: View, site: Site) -> list[Scope]:
    """The models that a name may choose where a class makes one of its parts."""
    func = site.call.func
    named = isinstance(func, ast.Name) and func.id in site.scope.binds
    return looked_up(view, func, site.scope) if named or isinstance(func, ast.Call | ast.Subscript) else []
