"""LS008: no seed before the model is made (an opinion)."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.context import guards, inside, loops, withs
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION, MODEL, OPTIMIZER, TORCH_OPTIMIZERS
from lockstep_lint.analysis.lookups import chosen_files
from lockstep_lint.analysis.nodes import Words, argument, idents, keyword, last, strings
from lockstep_lint.analysis.view import DEVICE, TRAINS, View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


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
MODEL_LIBRARIES = ("torchvision.models", "timm.")
KNOWN = ("torchvision.models.", "timm.create_model", "segmentation_models_pytorch.create_model")
# What looks a class up.
MODEL_CLASSES = Words(r"class|getattr|locate|import|registry", re.IGNORECASE)
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
    if full.startswith(MODEL_LIBRARIES) and ASKS.search(site.name):
        return False
    if full.startswith("torch.nn.") and site.name[:1].isupper():
        return True
    return (
        full.startswith((*MODEL_LIBRARIES, "transformers."))
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
        if found and all(isinstance(bind.value, ast.Call) and MODEL_CLASSES.search(last(bind.value)) for bind in found):
            return True
    return False


def foreign(view: View, owner: Scope) -> bool:
    """Whether a class derives from one that cannot be seen."""
    return len(list(view.names.bases_of(owner))) > len(list(view.names.parents(owner)))


# What has all weights drawn on the GPU that are drawn after it.
ON_GPU = ("set_default_device", "set_default_tensor_type")
SEED = Words(r"seed|manual_seed|fix_random|determinis[mt]|reproducib", re.IGNORECASE)
# What asks, or does something else without chance (`policy.forward_deterministic(state)`), seeds nothing.
ELSE = Words(
    r"^initial_seed$|(?<!set)(?<!make)(?<!use)(?<!enable)(?<!be)_deterministic$|^(is|are)_determin|^deterministic_",
    re.IGNORECASE,
)
# Their trainer seeds nothing by itself.
TRAINERS = {"lightning", "pytorch_lightning"}
# Their trainer seeds by itself.
SEEDED = {"transformers", "trl"}


def check(view: View) -> Iterator[Found]:
    """Looks for a call that seeds, in the programs whose training this file starts."""
    top = view.module.top.sites
    runs = (
        view.module.is_script
        or any(s.name == "parse_args" for s in top)
        or view.trainings.trains(top)
        or any(fits(view, site) for site in top)
    )
    own = view.training or prepares(view) or any(fits(view, site) for site in view.sites("fit"))
    if EVALUATION.search(view.module.path.rpartition("/")[2].partition(".")[0]) and not steps(view):
        return  # says by its name that it evaluates or tests what others train
    if not (trains(view) if runs else own):
        yield from before_trainer(view)
        return
    if seeds(view, alone=view.module.is_script):
        return
    if not runs and any(made_by_script(view, user) for user in view.project.users(view.module)):
        return  # told there
    site = model_made(view, view.module)
    if site is not None:
        yield at(
            site,
            "no seed is set before the model is made: call torch.manual_seed(seed) first",
            severity=Severity.OPINION,
        )


def steps(view: View) -> bool:
    """Whether a file trains: it has a backward call and steps an optimizer, or its own lines run what has one."""
    if next(view.sites("backward"), None) is None:
        return view.trainings.trains(view.module.top.sites)
    stepped = view.project.users(view.module) if not view.module.is_script else view.project.closure(view.module)
    return any(view.steps.steps_optimizer(site) for member in (view.module, *stepped) for site in member.sites("step"))


def made_by_script(view: View, user: Module) -> bool:
    """Whether a program that runs the file makes a model, and may train it, by what it calls."""
    if not user.is_script or model_made(view, user) is None:
        return False
    return any(TRAINS.search(site.name) for site in user.sites())


def before_trainer(view: View) -> Iterator[Found]:
    """The first weights that are drawn before a Trainer, which seeds when it is made."""
    alone = view.module.is_script
    site = next(drawn_before(view, alone), None)
    if site is not None and not seeds(view, alone, (site,)):
        message = "weights are drawn before a Trainer is made, which seeds only then: call set_seed(seed) first"
        yield at(site, message, severity=Severity.OPINION)


def trains(view: View) -> bool:
    """Whether the program of a file computes gradients, in a loop or not, has a trainer fit, or makes an optimizer for
    somebody else's loop.
    """
    handed = not view.frameworks & SEEDED
    if handed and any(TORCH_OPTIMIZERS.search(view.full(site)) for site in view.sites() if site.name[:1].isupper()):
        return True
    for member in view.project.closure(view.module):
        if view.trainings.of(member) or any(map(view.steps.backwards, member.sites("backward"))):
            return True
        if any(fits(view, site) for site in member.sites("fit")):
            return True
    return has_chosen_train(view)


def has_chosen_train(view: View) -> bool:
    """Whether the file itself calls a method that computes gradients in a class that is chosen by a name
    (`model = create_model(options); model.optimize_parameters()`).
    """
    steps = {
        scope.name
        for file in chosen_files(view)
        for scope in file.scopes
        if scope.kind == "function" and scope.owner is not None and scope.name != "__init__"
        if view.effects.find(scope.sites, view.steps.backwards) is not None
    }
    called = view.sites(*steps) if steps else ()  # without a name, all of them
    return any(site.receiver is not None and last(site.receiver) != "self" for site in called)


def prepares(view: View) -> bool:
    """Whether a function of the file makes a model and its optimizer, and trains with what other files hold."""
    return any(
        any(
            OPTIMIZER.search(key) and any(isinstance(b.value, ast.Call) for b in scope.binds[key])
            for key in scope.binds
        )
        and any(model_at(view, site) for site in scope.sites)
        for scope in view.scopes
        if scope.kind == "function"
    ) and trains(view)


def fits(view: View, site: Site) -> bool:
    """Whether a call starts the training of a Lightning trainer."""
    return site.name == "fit" and last(site.receiver) == "trainer" and bool(view.frameworks & TRAINERS)


def seeds(view: View, alone: bool, drawn: tuple[Site, ...] = ()) -> bool:
    """Whether anything in the programs of the file seeds before its models, and what else draws weights (`drawn`); a
    file that is run by itself (`alone`) is one program.
    """
    members = view.project.closure(view.module) if alone else view.project.family(view.module)
    runs = (view.module,) if alone else view.project.users(view.module)  # what another of them does by itself runs this
    found = [
        site
        for member in members
        for name, sites in member.by_name.items()
        if SEED.search(name) and not ELSE.search(name)
        for site in sites
        if not (site.module not in runs and by_itself(site))
        and not of_other(view, site)
        and not by_others(view, site)
        and not of_data(site)
        and not makes_module(view, site)  # a layer whose name sounds like it (`Deterministic(block)`)
        and not of_steps(view, site)
    ]
    models = [*drawn, *(site for site in view.sites() if model_at(view, site))] if found else []
    return any(not unused(view, site, members, models) and not late(view, site, models, 0) for site in found)


def by_itself(site: Site) -> bool:
    """Whether a call is made only where its file is run, not imported (`if __name__ == "__main__":`)."""
    return any("__main__" in strings(guard.test) for guard in guards(site.stmt, site.module))


def late(view: View, site: Site, models: list[Site], depth: int) -> bool:
    """Whether a call comes only after the models that its function makes, or is run only there."""
    beside = [model.line for model in models if model.scope is site.scope]
    if beside:
        return max(beside) < site.line
    callers = view.calls.callers(site.scope) if depth < 4 else []
    if view.module.is_script:  # what runs the same in other programs says nothing of this one
        members = view.project.closure(view.module)
        callers = [caller for caller in callers if caller.module in members]
    return bool(callers) and all(late(view, caller, models, depth + 1) for caller in callers)


def of_data(site: Site) -> bool:
    """Whether a call seeds in a data set's own methods, for the order of files or one sample's changes."""
    owner = site.scope.owner
    return owner is not None and bool({"__getitem__", "__iter__"} & owner.defs.keys())


def of_steps(view: View, site: Site) -> bool:
    """Whether a call seeds in a training loop, or in one around it that makes no model: it has been made."""
    around = [
        loop
        for t in view.trainings.of(site.module)
        if t.scope is site.scope
        for loop in (t.loop, *loops(t.loop, site.module))
        if loop is t.loop or not any(model_at(view, s) for s in view.effects.block(loop, site.scope))
    ]
    return any(inside(site.stmt, loop, site.module) for loop in around)


def unused(view: View, site: Site, members: tuple[Module, ...], models: list[Site]) -> bool:
    """Whether a call seeds in a helper that nothing in the program calls (`utils.set_seed`)."""
    scope = site.scope
    if scope.owner is not None:
        return site.module is not view.module and idle_class(view, scope, members, 0)
    if scope.kind != "function":
        return False
    if site.module is view.module:
        if view.trainings.trains(scope.sites) or any(model.scope is scope for model in models):
            return False  # what trains here may be called by anything
        members = tuple({*members, *view.project.users(view.module)})
    named = sum(member.words[scope.name] for member in members)
    others = sum(view.full(s).startswith("torch.") for member in members for s in member.sites(scope.name))
    return named - others == 1


def idle_class(view: View, scope: Scope, members: tuple[Module, ...], depth: int) -> bool:
    """Whether a function is the constructor of a class of which nothing is made: no other file names it, and only such
    classes that derive from it call it.
    """
    owner = scope.owner
    if owner is None or scope.name != "__init__" or owner.decorators or depth > 3:
        return False
    others = [member for member in members if member is not scope.module]
    if any(member.words[owner.name] or any(map(looks_up, member.sites("getattr"))) for member in others):
        return False
    return all(idle_class(view, caller.scope, members, depth + 1) for caller in view.calls.callers(scope))


def looks_up(site: Site) -> bool:
    """Whether a call takes something out of an imported file by a name that is worked out."""
    return bool(site.call.args) and last(site.call.args[0]) in site.module.imports


def of_other(view: View, site: Site) -> bool:
    """Whether a call seeds what makes no weights: one generator object, Python's or numpy's random numbers."""
    full = view.full(site)
    if full in ("random.seed", "numpy.random.seed"):
        return True
    if full in ("torch.cuda.manual_seed", "torch.cuda.manual_seed_all"):
        return not any(map(draws_on_gpu, view.project.family(site.module)))  # else on the CPU, and moved then
    return site.name in ("manual_seed", "seed") and site.receiver is not None and not full


@kept
def draws_on_gpu(module: Module) -> bool:
    """Whether a file may have weights drawn on the GPU: by default, in a block under a device, or by a class that is
    told to (`nn.Linear(2, 2, device="cuda")`).
    """
    if any(True for _ in module.sites(*ON_GPU)):
        return True
    if any(keyword(site.call, "device") is not None for site in module.sites() if site.name[:1].isupper()):
        return True
    blocks = (stmt for scope in module.scopes for stmt in scope.stmts if isinstance(stmt, ast.With))
    return any(DEVICE.search(last(item.context_expr)) for stmt in blocks for item in stmt.items)


def by_others(view: View, site: Site) -> bool:
    """Whether a call runs a function in sight that seeds nothing but what makes no weights (`set_seed(1)`)."""
    function = view.calls.target(site.call, site.scope)
    found = [s for s in view.effects.below(function.sites) if SEED.search(s.name)] if function is not None else []
    made = [s for s in found if view.calls.target(s.call, s.scope) is None]
    return bool(made) and all(of_other(view, s) for s in made)


RULE = Rule(
    code="LS008",
    name="no seed",
    what="Nothing seeds the random generators before the model is made.",
    why=(
        "The run cannot be repeated, and without DDP's first broadcast the ranks would start from different weights. "
        "Some want fresh randomness in every run: this is an opinion."
    ),
    bad="""
import torch
from torch import nn

def main(loader):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

if __name__ == "__main__":
    main([])
""",
    good="""
import torch
from torch import nn

def main(loader, seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

if __name__ == "__main__":
    main([], 1)
""",
    severity=Severity.OPINION,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Call torch.manual_seed(seed) before the model is made",
    moot=frozenset({"lockstep"}),
    note=(
        "It is told at the line where a script first makes a model, and in a file that holds a training loop of its "
        "own even if another file starts it. A data set that seeds for its own order does not count, nor does a helper "
        "that nothing calls, what an imported file seeds only where it is run by itself, "
        "a seed that comes after the model, or one of CUDA's, numpy's or Python's random "
        "numbers alone, which make no weights (they are made on the CPU). The Trainers of transformers and trl seed "
        "when they are made: it is "
        "told where weights are drawn before that, by get_peft_model, by a "
        "model of the project's own or of a configuration, or by a new head, for classes or one that a class of the "
        "project adds. A model whose weights are all loaded, peft_config= and model_init= are silent."
    ),
)
