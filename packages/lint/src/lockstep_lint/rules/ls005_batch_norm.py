"""LS005: BatchNorm under DDP without conversion."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import given
from lockstep_lint.analysis.context import choices, guards
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.lookups import looked_up
from lockstep_lint.analysis.nodes import argument, constant, dotted, keyword, last, strings
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


def default_names(view: View, scope: Scope, flag: str = "") -> Iterator[str]:
    """The texts that the options of a program which name a model, or one of them, have by default; also the defaults
    of a parameter of that name.
    """
    for member in view.project.family(scope.module):
        for names, value in defaults(member):
            if flag in names if flag else any("arch" in name.lower() or "model" in name.lower() for name in names):
                yield value
    home: Scope | None = scope if flag else None
    while home is not None:
        yield from (value for name, value in given_by_default(home) if name == flag)
        home = home.parent


@kept
def defaults(module: Module) -> tuple[tuple[tuple[str, ...], str], ...]:
    """The names and the default of each option that is a text: of argparse, click and fastargs, of a class's fields and
    of a tree of settings (`_C.MODEL.ARCH = "resnet18"`).
    """
    return tuple(_defaults(module) if "default" in module.text else ()) + tuple(_settings(module))


def _defaults(module: Module) -> Iterator[tuple[tuple[str, ...], str]]:
    for site in module.sites("add_argument", "option"):
        value = constant(keyword(site.call, "default"))
        if isinstance(value, str):
            yield tuple(text.lstrip("-").replace("-", "_") for text in strings(site.call)), value
    for site in module.sites("params"):
        for item in site.call.keywords:
            value = constant(keyword(item.value, "default")) if isinstance(item.value, ast.Call) else None
            if item.arg is not None and isinstance(value, str):
                yield (item.arg,), value


def _settings(module: Module) -> Iterator[tuple[tuple[str, ...], str]]:
    for scope in (module.top, *(scope for scope in module.scopes if scope.kind == "class")):
        for key, binds in scope.binds.items():
            value = constant(binds[0].value)
            if isinstance(value, str) and ("." in key or scope.kind == "class"):
                yield (key.rpartition(".")[2],), value


def given_by_default(function: Scope) -> Iterator[tuple[str, str]]:
    """The parameters of a function that are a text where a call leaves them out."""
    node = function.node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        plain = [*node.args.posonlyargs, *node.args.args]
        pairs = [
            *zip(reversed(plain), reversed(node.args.defaults), strict=False),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        yield from ((arg.arg, text) for arg, value in pairs if isinstance(text := constant(value), str))


# What parameters and attributes are known to be; SOME is a class or function, NOT_KNOWN is given but not known.
Settings = dict[str, object]
SOME, NOT_KNOWN = object(), object()


def passed_down(view: View, call: ast.Call, scope: Scope, function: Scope, before: Settings) -> Settings:
    """What a function's parameters are in a call, and the attributes that it sets to them."""
    node = function.node
    found: Settings = {}
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return found
    for name, default in settings_defaults(node):
        value = given(call, function, name)
        if value is not None:
            found[name] = known(view, value, scope, before)
        elif isinstance(default, ast.Constant):
            found[name] = default.value
    for key, binds in function.binds.items():
        if key in found:
            found[key] = NOT_KNOWN
        elif key.startswith("self.") and len(binds) == 1 and binds[0].value is not None and not binds[0].path:
            found[key] = known(view, binds[0].value, function, found)
    return found


def settings_defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr | None]]:
    """A function's parameters, each with its default."""
    plain = [*node.args.posonlyargs, *node.args.args]
    lacking: list[ast.expr | None] = [None] * (len(plain) - len(node.args.defaults))
    yield from ((arg.arg, value) for arg, value in zip(plain, [*lacking, *node.args.defaults], strict=True))
    yield from ((arg.arg, value) for arg, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))


def known(view: View, node: ast.expr, scope: Scope, settings: Settings) -> object:
    """What an expression is: a literal, what a setting says, or some class."""
    if isinstance(node, ast.Constant):
        return node.value
    key = dotted(node)
    if key is None:
        return NOT_KNOWN
    if key in settings or key in scope.params:
        return settings.get(key, NOT_KNOWN)
    named = view.names.qualify(node, scope) or view.names.definition(node, scope) is not None
    return SOME if named and last(node)[:1].isupper() else NOT_KNOWN


def outcome(test: ast.expr, settings: Settings) -> bool | None:
    """How a test comes out, where the settings decide it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = outcome(test.operand, settings)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        ends = isinstance(test.op, ast.Or)
        found = [outcome(value, settings) for value in test.values]
        return ends if ends in found else None if None in found else not ends
    if isinstance(test, ast.Compare):
        return compared(test, settings) if len(test.ops) == 1 else None
    value = constant(test) if isinstance(test, ast.Constant) else settings.get(dotted(test) or "", NOT_KNOWN)
    return None if value is NOT_KNOWN else bool(value)


def compared(test: ast.Compare, settings: Settings) -> bool | None:
    """How a comparison of a setting with literals comes out."""
    left, op, right = settings.get(dotted(test.left) or "", NOT_KNOWN), test.ops[0], test.comparators[0]
    if left is NOT_KNOWN:
        return None
    if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.Tuple | ast.List | ast.Set):
        return (left in [constant(item) for item in right.elts]) is isinstance(op, ast.In)
    if isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot) and isinstance(right, ast.Constant):
        return (left == right.value) is isinstance(op, ast.Eq | ast.Is)
    return None


def ruled_out(site: Site, settings: Settings) -> bool:
    """Whether the settings keep a call from being made; which of two kinds a test of types lets through is open."""
    return any(
        outcome(guard.test, settings) is (not guard.when) or (typed(guard.test) and isinstance(guard.stmt, ast.If))
        for guard in guards(site.stmt, site.module)
    )


def unchosen(site: Site, settings: Settings) -> bool:
    """Whether the settings keep a call from being made within its own statement (`Norm(8) if norm else Identity()`)."""
    return any(outcome(guard.test, settings) is (not guard.when) for guard in choices(site))


def typed(test: ast.expr) -> bool:
    """Whether a test asks for the type of something."""
    return isinstance(test, ast.Call) and last(test) == "isinstance"


def live(node: ast.AST, settings: Settings) -> Iterator[ast.AST]:
    """The nodes below one, without the arms and the defaults that the settings rule out."""
    stack = [node]
    while stack:
        item = stack.pop()
        yield item
        if isinstance(item, ast.If | ast.IfExp):
            way = outcome(item.test, settings)
            arms = [arm for arm, when in ((item.body, True), (item.orelse, False)) if way is not (not when)]
            for arm in arms:
                stack.extend(arm if isinstance(arm, list) else [arm])
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            stack.extend(item.body)
            stack.extend(value for name, value in settings_defaults(item) if value is not None and name not in settings)
        else:
            stack.extend(ast.iter_child_nodes(item))


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
    severity=Severity.HINT,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="model = nn.SyncBatchNorm.convert_sync_batchnorm(model) before it is wrapped",
)
