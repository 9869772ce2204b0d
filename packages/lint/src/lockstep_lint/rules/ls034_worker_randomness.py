"""LS034: numpy randomness in a Dataset with workers unseeded."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import apart, guards
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import argument, constant, dotted, keyword
from lockstep_lint.analysis.origins import outcome
from lockstep_lint.analysis.view import View
from lockstep_lint.events.run import literals
from lockstep_lint.events.values import sites_of
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

OWN = "draws from a generator that each worker has the same copy of: use torch's, or a worker_init_fn"
SHARED = "draws from numpy's generator in unseeded workers: use torch's, or a worker_init_fn"
# The first torch that seeds numpy's own generator in each worker.
SEEDS_NUMPY = (1, 9)
# A function of this name seeds nothing until a loader is given it.
SEEDS_WORKERS = re.compile(r"(?<!def )\bworker_init_fn\b")
QUIET = {"seed", "get_state", "set_state", "default_rng", "RandomState", "Generator", "SeedSequence"}


def check(view: View) -> Iterator[Found]:
    """Find numpy generators in data sets whose loader workers get no worker_init_fn."""
    family = view.project.family(view.module)
    if view.effects.mentioned(view.module, "worker_seed") or any(map(SEEDS_WORKERS.search, texts(family))):
        return
    asking = (site.scope.owner for member in family for site in member.sites("get_worker_info"))
    if any(owner is None or not is_dataset(view, owner) for owner in asking):
        return  # a helper may seed by the worker that it runs in
    if not any(workers(view, site) for member in family for site in member.sites("DataLoader")):
        return
    for scope in view.scopes:
        site = drawing(view, scope) if scope.kind == "class" and is_dataset(view, scope) else None
        if site is not None and site.module is view.module:
            yield Found(site.call, message(view, site), level(view, site))
    yield from elsewhere(view)


def texts(family: tuple[Module, ...]) -> list[str]:
    """Return the texts of the files that name a worker_init_fn."""
    return [member.text for member in family if "worker_init_fn" in member.text]


def elsewhere(view: View) -> Iterator[Found]:
    """Yield the first loader with workers of each data set from another file."""
    told: dict[Scope, list[Site]] = {}
    for site in (s for s in view.sites("DataLoader") if workers(view, s)):
        for call, home, _ in view.origins.calls_of(argument(site.call, 0, "dataset"), site.scope):
            owner = view.names.definition(call.func, home)
            if owner is None or owner.module is view.module or not is_dataset(view, owner):
                continue
            drawn = drawing(view, owner, sites_of(home).get(call))
            if drawn is not None and all(apart(other, site) for other in told.get(owner, ())):
                told.setdefault(owner, []).append(site)
                yield Found(site.call, f"{owner.name} {message(view, drawn)}", level(view, drawn))
                break


def drawing(view: View, owner: Scope, made: Site | None = None) -> Site | None:
    """Return the call with which an item draws from numpy; None if there is none.

    Branches that the data set's arguments rule out (`Data(mode="val")`) do not count.
    """
    item = view.names.member(owner, "__getitem__") or view.names.member(owner, "__iter__")
    classes = (owner, *view.names.parents(owner))
    if item is None or any(method.named("get_worker_info") for each in classes for method in each.defs.values()):
        return None  # it may seed for its worker
    init = view.names.member(owner, "__init__") if made is not None else None
    known = literals(made, init, {}) if made is not None and init is not None else {}
    sites = [
        site
        for site in item.sites
        if not any(outcome(g.test, known) is (not g.when) for g in guards(site.stmt, site.module))
    ]
    return next((site for site in view.effects.below(sites) if draws(view, site)), None)


def is_dataset(view: View, owner: Scope) -> bool:
    """Check whether a class is a torch Dataset."""
    named = (name.split(".")[-1] for name in view.names.bases_of(owner))
    return owner.kind == "class" and any(name in ("Dataset", "IterableDataset", "VisionDataset") for name in named)


def workers(view: View, site: Site) -> bool:
    """Check whether a loader has, or may have, workers."""
    value = keyword(site.call, "num_workers")
    if value is not None:
        return constant(value) != 0
    options = [o.node for k in site.call.keywords if k.arg is None for o in view.origins.of(k.value, site.scope)]
    return any(not isinstance(node, ast.Dict) or any(map(brings, node.keys, node.values)) for node in options)


def brings(key: ast.expr | None, value: ast.expr) -> bool:
    """Check whether an item of a dictionary of options gives a loader workers."""
    return constant(key) == "num_workers" and constant(value) != 0


def draws(view: View, site: Site) -> bool:
    """Check whether a call draws from numpy's global generator, or a copied one."""
    if is_global(view, site):
        return site.name not in QUIET
    name = dotted(site.receiver)
    if name is None or not name.startswith("self.") or site.scope.owner is None:
        return False
    made = [full for _, _, full in view.origins.calls_of(site.receiver, site.scope)]
    return any(text in ("numpy.random.default_rng", "numpy.random.RandomState") for text in made)


def is_global(view: View, site: Site) -> bool:
    """Check whether a call is of numpy's global generator."""
    return view.full(site).startswith("numpy.random.")


def message(view: View, site: Site) -> str:
    """Return the message for a draw."""
    return SHARED if is_global(view, site) else OWN


def level(view: View, site: Site) -> Severity:
    """Return the severity: a hint if torch may seed the generator in each worker."""
    seeded = is_global(view, site) and (view.torch is None or view.torch >= SEEDS_NUMPY)
    return Severity.HINT if seeded else Severity.ERROR


RULE = Rule("LS034", Severity.ERROR, Confidence.MEDIUM, check, fix="unsafe", moot=frozenset({"lockstep"}))
