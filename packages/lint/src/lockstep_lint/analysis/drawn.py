"""The weights that a program draws at random before a Trainer of transformers or trl is made, which seeds only then."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import withs
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import argument, idents, keyword, strings
from lockstep_lint.analysis.view import View

__all__ = ["MADE", "drawn_before"]

LIBRARIES = ("transformers.", "trl.")
# A model of transformers that is made, not loaded, by what its class is called.
MADE = re.compile(r"^transformers\.(.*\.)?\w+(Model|LMHead\w*|For[A-Z]\w+)$")
# A head for classes, which a model that was trained on plain text or pictures does not have.
HEADS = re.compile(
    r"^transformers\.(.*\.)?\w+For(\w*Classification|MultipleChoice|SemanticSegmentation)\.from_pretrained$"
)
CLASSES = ("num_labels", "id2label", "ignore_mismatched_sizes")
# What the layers are called that checkpoints of transformers have, and where a project's own are.
PUBLIC = re.compile(
    r"\.(lm_head|cls|predictions?|pooler|shared|h|wte|wpe|proj_out|qa_outputs|score|\w*embed\w*|\w*norm\w*|ln_\w+"
    r"|(\w*_)?(layers?|blocks|encoder|decoder|model|transformer|backbone)|\w*(tower|projector)\w*)$"
)
SAVED = re.compile(
    r"checkpoint|ckpt|output|(?<![a-z])saved?(?![a-z])|resume|finetuned|fine_tuned|(?<!pre)trained(?!_model_name)"
    r"|(?<![a-z])best(?![a-z])|\./|\.\./"
)
# Layers that have no weights.
EMPTY = re.compile(r"Loss|Dropout|Identity|Flatten|Pool|Softmax|ReLU|GELU|SiLU|Tanh|Sigmoid|Softplus|Module$")


def drawn_before(view: View, alone: bool) -> Iterator[Site]:
    """The Trainers of a file, or of the program that it is (`alone`), whose model has weights that were drawn before:
    each as the place in the file that draws them, or that makes the Trainer.
    """
    if not any("Trainer" in member.text for member in view.project.closure(view.module)):
        return
    for member in view.project.closure(view.module) if alone else (view.module,):
        for site in trainers(view, member):
            for call, home in makers(view, argument(site.call, 0, "model"), site.scope, 0):
                if draws(view, call, home):
                    found = next((s for s in home.sites if s.call is call), site)
                    yield from [place for place in (found, site) if place.module is view.module][:1]


def makers(view: View, model: ast.expr | None, scope: Scope, depth: int) -> Iterator[tuple[ast.Call, Scope]]:
    """The calls that a model comes from, and those that a call of somebody else's is given its model by."""
    for call, home, _ in view.origins.calls_of(model, scope):
        yield call, home
        inner = call.args[0] if call.args else keyword(call, "model")
        if depth < 3 and view.kinds.is_model(inner, home) and not draws(view, call, home):
            yield from makers(view, inner, home, depth + 1)


def trainers(view: View, module: Module) -> Iterator[Site]:
    """The calls of a file that make a Trainer of a library, or of a class that derives from one, out of a model."""
    for name, sites in module.by_name.items():
        if name.endswith("Trainer"):
            yield from (site for site in sites if of_library(view, site) and keyword(site.call, "model_init") is None)


def of_library(view: View, site: Site) -> bool:
    """Whether a call makes a Trainer that seeds by itself."""
    owner = view.names.definition(site.call.func, site.scope)
    names = view.names.bases_of(owner) if owner is not None and owner.kind == "class" else (view.full(site),)
    return any(name.startswith(LIBRARIES) and name.endswith("Trainer") for name in names)


def draws(view: View, call: ast.Call, scope: Scope) -> bool:
    """Whether a call makes a model with weights that are drawn: adapters, a head for classes, or all of them."""
    owner = view.names.definition(call.func, scope)
    if owner is not None:
        return owner.kind == "class" and has_layers(view, owner)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained":
        owner = view.names.definition(call.func.value, scope)
        if owner is not None and owner.kind == "class":
            return adds_head(view, owner) and not saved(view, call, scope)
    full = view.names.qualify(call.func, scope)
    if full.startswith("peft.") and full.endswith(".get_peft_model"):
        return True
    if MADE.search(full) or (full.startswith("transformers.") and full.endswith(".from_config")):
        return not on_meta(call, scope)
    return HEADS.search(full) is not None and names_classes(view, call, scope)


def adds_head(view: View, owner: Scope) -> bool:
    """Whether a class that derives from a model of transformers gives itself layers that no public checkpoint of that
    model has weights for.
    """
    start = owner.defs.get("__init__")
    if start is None or not any(map(MADE.search, view.names.bases_of(owner))):
        return False
    return any(
        (is_layer(view, site) or of_own(view, site))
        and any(bind.key.startswith("self.") and not PUBLIC.search(bind.key) for bind in start.bound(site.stmt))
        for site in start.sites
    )


def of_own(view: View, site: Site) -> bool:
    """Whether a call makes a module of the project's own that has layers, and is nothing of transformers."""
    owner = view.names.definition(site.call.func, site.scope)
    if owner is None or owner.kind != "class" or any(n.startswith("transformers.") for n in view.names.bases_of(owner)):
        return False
    return has_layers(view, owner)


def saved(view: View, call: ast.Call, scope: Scope) -> bool:
    """Whether a call may load, by the name of its place, what a program of the project has saved."""
    place = argument(call, 0, "pretrained_model_name_or_path")
    if place is None:
        return True  # it is handed on with others (`from_pretrained(*args)`)
    found = [origin.node for origin in view.origins.of(place, scope)]
    return any(map(SAVED.search, (word for node in found for word in (*idents(node), *strings(node)))))


def names_classes(view: View, call: ast.Call, scope: Scope) -> bool:
    """Whether the classes of a head are given, to the call or to its configuration."""
    config = [made for made, _, _ in view.origins.calls_of(keyword(call, "config"), scope)]
    return any(keyword(made, name) is not None for made in (call, *config) for name in CLASSES)


def has_layers(view: View, owner: Scope) -> bool:
    """Whether the constructor of a project's class makes layers, or what transformers makes of a configuration."""
    classes = (owner, *view.names.parents(owner))
    if any(name.startswith("transformers.") and not name.endswith("Mixin") for name in view.names.bases_of(owner)):
        return any(MADE.search(name) for name in view.names.bases_of(owner))
    makers = [current.defs["__init__"] for current in classes if "__init__" in current.defs]
    return view.kinds.is_module_class(owner) and any(is_layer(view, site) for maker in makers for site in maker.sites)


def is_layer(view: View, site: Site) -> bool:
    """Whether a call makes a layer with weights."""
    full = view.full(site)
    return full.startswith("torch.nn.") and site.name[:1].isupper() and not EMPTY.search(site.name)


def on_meta(call: ast.Call, scope: Scope) -> bool:
    """Whether a model is made without memory for its weights, to be loaded later."""
    site = next((s for s in scope.sites if s.call is call), None)
    around = withs(site.stmt, scope.module) if site is not None else ()
    return any("init_empty_weights" in idents(item) or "meta" in strings(item) for item in around)
