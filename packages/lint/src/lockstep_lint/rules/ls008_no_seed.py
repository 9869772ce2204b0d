"""LS008: no seed before the model is made (an opinion)."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import guards, inside, loops
from lockstep_lint.analysis.drawn import drawn_before
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.kinds import EVALUATION, OPTIMIZER, TORCH_OPTIMIZERS
from lockstep_lint.analysis.lookups import chosen_files
from lockstep_lint.analysis.making import makes_module, model_at, model_made
from lockstep_lint.analysis.nodes import Words, keyword, last, strings
from lockstep_lint.analysis.view import DEVICE, TRAINS, View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

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
        yield at(site, "no seed is set before the model is made: call torch.manual_seed(seed) first", opinion=True)


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
        yield at(site, message, opinion=True)


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
    severity=Severity.INFO,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Call torch.manual_seed(seed) before the model is made",
    default=False,
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
