"""Recognise the collective calls of DeepSpeed, Accelerate and Fabric."""

import ast
import re

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import COLLECTIVES
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, idents, last
from lockstep_lint.analysis.view import View

__all__ = [
    "OF_FABRIC",
    "PREPARING",
    "SAVES",
    "WAITS",
    "asks_for_deepspeed",
    "find_prepared",
    "is_shard",
    "saves_on_all",
    "waits_in_accelerate",
]

# With ZeRO each rank writes its own part, or hands it to the others; the engine waits for all of them in any case.
SAVES = {"save_checkpoint", "save_16bit_model", "save_fp16_model"}
# They save by themselves, in their own way.
OTHERS = {"lightning", "pytorch_lightning", "lockstep", "composer", "accelerate"}

# The methods of an Accelerator that end when all processes are in them: names that nothing else has, and others.
WAITS = {"wait_for_everyone", "gather_for_metrics", "check_trigger"}
GATHERS = {"gather", "reduce", "pad_across_processes"}
ACCELERATOR = Words(r"accelerator$", re.IGNORECASE)
# Those of Lightning's Fabric, which saves on the main process by itself, after all have come.
OF_FABRIC = {"barrier", "save", "all_gather", "all_reduce", "broadcast"}
FABRIC = Words(r"^_?fabric$")
WAITING = WAITS | GATHERS | COLLECTIVES | OF_FABRIC | {"prepare"}


def waits_in_accelerate(view: View, site: Site) -> bool:
    """Check whether a call is a collective of Accelerate or Fabric. A notebook is one process."""
    if site.name not in WAITING or site.module.path.endswith(".ipynb"):
        return False
    if FABRIC.search(last(site.receiver)):
        return site.name in OF_FABRIC and "lightning_fabric" in view.frameworks
    if view.full(site).startswith("accelerate.utils."):
        return site.name in WAITS | GATHERS | COLLECTIVES  # `save` writes on the main process, and waits for nobody
    if site.receiver is None or view.calls.target(site.call, site.scope) is not None:
        return False
    if site.name in WAITS:
        return True
    if not ACCELERATOR.search(last(site.receiver)):
        return False
    prepares = site.name == "prepare" and any(is_trained(view, value, site.scope) for value in site.call.args)
    return prepares or site.name in GATHERS


# Frameworks that give each rank its part of the loaders that they prepare, and the calls that do so.
PREPARING = frozenset({"accelerate", "lightning", "lightning_fabric"})
PREPARES = ("prepare", "prepare_data_loader", "setup_dataloaders")


@cache_answers
def find_prepared(view: View) -> frozenset[ast.Call]:
    """Return the loaders that Accelerate or Fabric divides among the ranks."""
    members = [m for m in view.project.family(view.module) if any(m.sites(*PREPARES))]
    members = members if any(view.analysis.named(m) & PREPARING for m in members) else []
    given = [(value, site.scope) for member in members for site in member.sites(*PREPARES) for value in site.call.args]
    made = [each for value, scope in given for each in view.origins.calls_of(value, scope)]
    return frozenset(call for call, _, full in made if full.endswith("DataLoader"))


def is_shard(view: View, loader: ast.expr, scope: Scope) -> bool:
    """Check whether a loader yields a rank's own shard."""
    if view.kinds.is_shard(loader, scope):
        return True
    made = {call for call, _, _ in view.origins.calls_of(view.kinds.iterated(loader, scope), scope)}
    return bool(made) and made <= find_prepared(view)


def is_trained(view: View, value: ast.expr, scope: Scope) -> bool:
    """Check whether a value is a model for Accelerate, not an optimizer, scheduler or loader."""
    kinds = view.kinds
    others = (kinds.is_optimizer, kinds.is_scheduler, kinds.is_loader)
    return kinds.is_model(value, scope) and not any(ask(value, scope) for ask in others)


def saves_on_all(view: View, site: Site) -> bool:
    """Check whether DeepSpeed's engine saves in a call, by its object or the test around."""
    if site.name not in SAVES or site.receiver is None or OTHERS & view.frameworks:
        return False
    if view.calls.target(site.call, site.scope) is not None:
        return False
    if "deepspeed" in view.frameworks and "engine" in last(site.receiver):
        return True
    return any(guard.when and asks_for_deepspeed(guard.test) for guard in guards(site.stmt, site.module))


def asks_for_deepspeed(test: ast.expr) -> bool:
    """Check whether a test asks whether DeepSpeed is used."""
    return any("deepspeed" in name.lower() for name in idents(test))
