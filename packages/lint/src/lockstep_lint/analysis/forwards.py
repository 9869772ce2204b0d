"""The calls that run a model: of the model itself, of its methods that run it, and of helpers that do."""

import ast

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import loops, withs
from lockstep_lint.analysis.effects import turns_off_gradients
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.kinds import OPTIMIZER
from lockstep_lint.analysis.nodes import Words, dotted, last
from lockstep_lint.analysis.view import View

__all__ = ["given_held_out", "is_forward", "model_of", "run_by", "run_model", "shields"]

MODELS = Words(
    r"^(model|net|netG|generator|encoder|classifier|ddp_model|network|unet|vae|detector|segmenter|student)$"
    r"|^(?!(get|load|build|create|make|save|init|setup|wrap|prepare|convert|export|print|log|reset"
    r"|unwrap|initiali[sz]e|instantiate|construct|define|restore|fetch|copy|clone|freeze|unfreeze|compile|summari[sz]e"
    r"|count|register|quantize|fuse|shard|parallelize|sync)_).*_(model|net)$"
)
# Methods of a model that run it.
RUNS = Words(r"^forward|(^|_)loss(es)?$")
# Methods of a model that do more than run it, which its name at their end does not make a model of.
DOES = Words(r"^(eval|evaluate|val|validate|test|train|fit|run|predict|update|sample|score|check|set|apply|reset)_")

# What held-out data is called that a model is given as a whole, without a loop.
HELD_OUT = Words(
    r"^([xX]|inputs?|data|features?|images?)_(val|valid|validation|test|eval|dev)(_tensor|_t|_torch)?$"
    r"|^(val|valid|validation|test|eval|dev)_(x|X|inputs?|data|features?|images?)(_tensor|_t|_torch)?$"
    r"|^[xX](val|valid|test)$"
)


def is_forward(view: View, site: Site) -> bool:
    """Whether a call is a model called with data, or a method of it that runs it (`model.module.get_loss(x)`)."""
    func = site.call.func
    if not isinstance(func, ast.Name | ast.Attribute) or not (site.call.args or site.call.keywords):
        return False
    if isinstance(func, ast.Attribute) and RUNS.search(func.attr):
        return runs_model(view, func.value, site.scope)
    if view.full(site) or view.names.definition(func, site.scope) is not None:
        return False
    if isinstance(func, ast.Attribute) and DOES.search(func.attr) and dotted(func.value) != "self":
        return False  # `model.eval_model(batch)`
    if MODELS.search(last(func)):
        return True
    modules = [*site.scope.named("eval"), *(s for s in site.scope.named("parameters") if optimized(s))]
    name = dotted(func)
    if name is not None and any(dotted(s.receiver) == name for s in modules):
        return True
    return view.kinds.module_class(func, site.scope) is not None


def runs_model(view: View, receiver: ast.expr, scope: Scope) -> bool:
    """Whether the object of a method that runs a model is one, and no module of functions."""
    if isinstance(receiver, ast.Attribute) and receiver.attr == "module":
        receiver = receiver.value
    if dotted(receiver) in (None, "self") or view.names.qualify(receiver, scope):
        return False
    return MODELS.search(last(receiver)) or view.kinds.module_class(receiver, scope) is not None


def optimized(site: Site) -> bool:
    """Whether the parameters that a call gives go to an optimizer."""
    return any(OPTIMIZER.search(bind.key) for bind in site.scope.bound(site.stmt))


@kept
def forward_in(view: View, function: Scope) -> Site | None:
    """The call of the model, for one batch, in a function that several loops may share (`self.process(batch)`)."""
    if function.kind != "function" or function.name in ("__init__", "__call__", "forward"):
        return None
    found = next((site for site in function.sites if is_forward(view, site)), None)
    return found if found is not None and not loops(found.stmt, found.module) else None


def run_model(site: Site) -> str | None:
    """The name of the model that a call runs, itself or by a method (`model(x)`, `model.forward(x)`)."""
    func = site.call.func
    by_method = isinstance(func, ast.Attribute) and RUNS.search(func.attr)
    return dotted(func.value if by_method else func)  # type: ignore[attr-defined]


def run_by(view: View, site: Site) -> Site | None:
    """The call of a model in the function that a call runs."""
    function = view.calls.target(site.call, site.scope)
    return forward_in(view, function) if function is not None else None


def model_of(site: Site, inner: Site) -> str | None:
    """The name, where `site` stands, of the model that the function which it calls runs by `inner`."""
    name, function = dotted(inner.call.func), inner.scope
    if name in function.params:
        return dotted(passed(site, function, name))
    return None if name in function.binds else name


def shields(site: Site) -> bool:
    """Whether a call keeps no graph by the `with` around it or its function's decorators."""
    return any(map(turns_off_gradients, (*withs(site.stmt, site.module), *site.scope.decorators)))


def given_held_out(site: Site) -> bool:
    """Whether all that a call is given is held-out data by its name (`model(X_test)`)."""
    names = [last(value) for value in site.call.args]
    return bool(names) and not site.call.keywords and all(HELD_OUT.search(name) for name in names)
