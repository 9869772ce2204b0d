"""The calls that make a model, by what they call, by what that gives back, or by the name that gets it."""

import ast
import re

from lockstep_lint.analysis.drawn import MADE
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kinds import MODEL
from lockstep_lint.analysis.nodes import Words, last
from lockstep_lint.analysis.view import View

__all__ = ["makes_module", "model_at", "model_made"]

# What says how a model is made is none.
SETTINGS = Words(r"conf|cfg|arg|param|opt|name|dir|path|type|kind|ckpt|output|pred|loss|grad", re.IGNORECASE)
BUILDS = Words(r"^(get|build|make|create|init|setup)_|^(build|make|create)$")
# A function that makes one, by its name, whatever is bound to what it gives.
GIVES = Words(r"^((get|build|make|create|init(iali[sz]e)?|setup|new|load|define|construct)_|new$)", re.IGNORECASE)
# What feeds or scores a model, whatever it is bound to (`training_generator = DataLoader(data)`).
BESIDE = Words(r"Loader$|Dataset$|DataModule$|Processor$|Tokenizer(Fast)?$|(?i:loss|criterion)")
# Libraries whose models hold no weights of torch, and what draws numbers.
ELSEWHERE = re.compile(
    r"^(sentencepiece|tokenizers|sklearn|gensim|spacy|fasttext|xgboost|lightgbm|catboost|tensorflow|keras|hmmlearn"
    r"|openai|anthropic|google|pickle|joblib|numpy|scipy|pandas|statsmodels|mujoco|gym|gymnasium|onnxruntime|cv2)\."
    r"|^torch\.Generator$"
)
# They make a model, whatever it is called (`resnet = torchvision.models.resnet18()`).
LIBRARIES = ("torchvision.models", "timm.")
KNOWN = ("torchvision.models.", "timm.create_model", "segmentation_models_pytorch.create_model")
# What looks a class up.
CLASSES = Words(r"class|getattr|locate|import|registry", re.IGNORECASE)
# What only tells of such models, their weights or their names.
ASKS = Words(r"^(list|is)_|^get_(?!model$)|weights", re.IGNORECASE)


def model_made(view: View, module: Module) -> Site | None:
    """The first place of a file that makes a model."""
    made = next((site for site in module.sites() if model_at(view, site)), None)
    if made is not None:
        return made
    wrapped = [site for _, site in view.wrappers.made(module)]
    other = [site for site in module.sites() if view.full(site).startswith(KNOWN) and not ASKS.search(site.name)]
    return min((*wrapped, *module.sites("get_model", "build_model"), *other), key=lambda site: site.line, default=None)


def model_at(view: View, site: Site) -> bool:
    """Whether a call makes what its statement binds, and that is a model, not a layer of one."""
    owner = site.scope.owner
    if owner is not None and owner.kind == "class" and "torch.nn.Module" in view.names.bases_of(owner):
        return False
    binds = [] if BESIDE.search(site.name) or ELSEWHERE.search(view.full(site)) else site.scope.bound(site.stmt)
    if not any(bind.value is not None and covers(bind.value, site) for bind in binds):
        return False
    keys = [bind.key.split(".")[-1] for bind in binds]
    named = any(MODEL.search(key) and not SETTINGS.search(key) for key in keys)
    return (named and makes(view, site)) or makes_module(view, site) or by_function(view, site)


def covers(value: ast.expr, site: Site) -> bool:
    """Whether the call is the assigned value or what it is made from."""
    return value.lineno <= site.line <= (value.end_lineno or value.lineno)


def makes_module(view: View, site: Site) -> bool:
    """Whether a call makes a module of a visible class, also of one that derives from a model of transformers."""
    owner = view.names.definition(site.call.func, site.scope)
    if owner is None or owner.kind != "class":
        return False
    return view.kinds.is_module_class(owner) or any(map(MADE.search, view.names.bases_of(owner)))


def by_function(view: View, site: Site) -> bool:
    """Whether a call runs a function that makes a model, as its name says, and gives it back (`new_model(options)`)."""
    function = view.names.definition(site.call.func, site.scope) if GIVES.search(site.name) else None
    return function is not None and function.kind == "function" and gives_model(view, function)


def makes(view: View, site: Site) -> bool:
    """Whether a call makes a module rather than moving or wrapping one."""
    if view.wrappers.wrapper(site) or site.name in (
        "to",
        "cuda",
        "compile",
        "load",
        "prepare",
        "state_dict",
        "parameters",
        "module",
    ):
        return False
    owner = view.names.definition(site.call.func, site.scope)
    if owner is not None:
        return (
            (owner.kind == "class" and view.kinds.is_module_class(owner))
            or "model" in site.name
            or "net" in site.name
            or (owner.kind == "class" and foreign(view, owner) and "model" in site.name.lower())
            or (owner.kind == "function" and (BUILDS.search(site.name) or gives_model(view, owner)))
        )
    if isinstance(site.call.func, ast.Call | ast.Subscript):
        return True  # of a class that is looked up: `getattr(models, name)()`, `MODELS[name]()`
    full = view.full(site)
    if full.startswith(LIBRARIES) and ASKS.search(site.name):
        return False
    if full.startswith("torch.nn.") and site.name[:1].isupper():
        return True
    return (
        full.startswith((*LIBRARIES, "transformers."))
        or site.name[:1].isupper()
        or "model" in site.name
        or site.name == "instantiate"  # of what a configuration says
    )


def gives_model(view: View, function: Scope) -> bool:
    """Whether a function makes and gives back a module of a visible class, or of one that it looks up
    (`kind = get_class(name); return kind(**options)`), in a program that steps an optimizer.
    """
    members = view.project.closure(view.module)
    if not any(view.steps.steps_optimizer(s) for member in members for s in member.sites("step")):
        return False  # tries a model out
    if view.trainings.trains(function.sites):
        return False  # what it trains is told where it is made
    for value in function.returns():
        for call, home, _ in view.origins.calls_of(value, function):
            made = view.names.definition(call.func, home)
            if home is function and made is not None and made.kind == "class" and view.kinds.is_module_class(made):
                return True
        kind = value.func if isinstance(value, ast.Call) else None
        found = function.binds.get(kind.id, []) if isinstance(kind, ast.Name) else []
        if found and all(isinstance(bind.value, ast.Call) and CLASSES.search(last(bind.value)) for bind in found):
            return True
    return False


def foreign(view: View, owner: Scope) -> bool:
    """Whether a class derives from one that cannot be seen."""
    return len(list(view.names.bases_of(owner))) > len(list(view.names.parents(owner)))
