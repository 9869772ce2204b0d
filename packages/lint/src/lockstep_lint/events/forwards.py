"""Say which calls run a model."""

import ast

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import OPTIMIZER
from lockstep_lint.analysis.nodes import REFERENCES, Words, dotted, last
from lockstep_lint.analysis.view import View

__all__ = ["MODELS", "RUNS", "model_run"]

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


def model_run(view: View, site: Site) -> ast.expr | None:
    """Return the model that a call runs, by itself, a method or a part."""
    func, scope = site.call.func, site.scope
    if not isinstance(func, REFERENCES) or not (site.call.args or site.call.keywords):
        return None
    holder = func.value if isinstance(func, ast.Attribute) else None
    if holder is not None and RUNS.search(site.name):
        return holder if is_run(view, holder, scope) else None
    if view.full(site) or view.names.definition(func, scope) is not None:
        return None
    if holder is not None and DOES.search(site.name) and dotted(holder) != "self":
        return None  # `model.eval_model(batch)`
    part_of = holder if holder is not None and is_switched(holder, scope) else None
    if MODELS.search(site.name) or is_switched(func, scope) or view.kinds.module_class(func, scope) is not None:
        return part_of or func
    return part_of if part_of is not None and runs_layers(view, part_of, site) else None


def is_run(view: View, receiver: ast.expr, scope: Scope) -> bool:
    """Check whether a receiver is a model, and no module of functions."""
    if isinstance(receiver, ast.Attribute) and receiver.attr == "module":
        receiver = receiver.value
    if dotted(receiver) in (None, "self") or view.names.qualify(receiver, scope):
        return False
    return MODELS.search(last(receiver)) or view.kinds.module_class(receiver, scope) is not None


def is_switched(node: ast.expr, scope: Scope) -> bool:
    """Check whether a function switches an object to eval mode or optimizes its parameters."""
    known = _find_switches(scope)
    return bool(known) and dotted(node) in known


@cache_answers
def _find_switches(scope: Scope) -> frozenset[str | None]:
    modules = (*scope.named("eval"), *(site for site in scope.named("parameters") if is_optimized(site)))
    return frozenset(dotted(site.receiver) for site in modules) - {None, "self"}


def is_optimized(site: Site) -> bool:
    """Check whether the parameters that a call gives go to an optimizer."""
    return any(OPTIMIZER.search(bind.key) for bind in site.scope.bound(site.stmt))


def runs_layers(view: View, receiver: ast.expr, site: Site) -> bool:
    """Check whether a call runs the layers of a project's model by a method."""
    owner = view.kinds.module_class(receiver, site.scope)
    method = owner.defs.get(site.name) if owner is not None else None
    funcs = [each.call.func for each in method.sites] if method is not None else []
    keys = [dotted(func.value if isinstance(func, ast.Subscript) else func) or "" for func in funcs]
    return any(key.startswith("self.") and owner is not None and key[5:] not in owner.defs for key in keys)
