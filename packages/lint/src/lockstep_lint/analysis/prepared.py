"""Which batches Accelerate moves to the device: those of the loaders that it was given."""

import ast
import re

from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import Words, last
from lockstep_lint.analysis.view import View

__all__ = ["unprepared"]

# What may be a loader, or hold one, among what Accelerate is given.
LOADERS = Words(r"load|data|^dl|dl$|iter|batch|sampl|train|val|test|^objs?$|^args$|^kwargs$", re.IGNORECASE)
# Arguments that are certainly no loader, whatever their parts are called.
PLAIN = Words(r"model|net|optim|sched|ema|encoder|decoder|critic|policy|disc|gen|vae|head", re.IGNORECASE)


def unprepared(view: View, site: Site) -> bool:
    """Whether Accelerate leaves a loop's batches where they are: where a flag turns it off (`if use_accelerate: ...
    else: x.to(device)`), or as it is given no loader.
    """
    for guard in guards(site.stmt, site.module):
        test, when = guard.test, guard.when
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, when = test.operand, not when
        if not when and isinstance(test, ast.Name | ast.Attribute) and "accelerat" in last(test).lower():
            return True
    return no_loader_given(view)


def no_loader_given(view: View) -> bool:
    """Whether the programs prepare something with Accelerate, but no loader."""
    members = view.project.family(view.module)
    given = [site for member in members for site in member.sites("prepare") if site.receiver is not None]
    if not given or view.effects.mentioned(view.module, "prepare_data_loader", "skip_first_batches"):
        return False
    return all(certain(view, value, site) for site in given for value in values(site))


def values(site: Site) -> list[ast.expr]:
    """What a call is given."""
    return [*site.call.args, *(item.value for item in site.call.keywords if item.arg != "device_placement")]


def certain(view: View, value: ast.expr, site: Site) -> bool:
    """Whether a value is certainly no loader: a plain name, of a model or an optimizer."""
    if not isinstance(value, ast.Name | ast.Attribute) or view.kinds.is_loader(value, site.scope):
        return False
    name = last(value)
    return not LOADERS.search(name) and (bool(PLAIN.search(name)) or view.kinds.is_model(value, site.scope))
