"""LS034: numpy randomness in a Dataset with workers unseeded."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import given
from lockstep_lint.analysis.context import apart, guards
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.lookups import looked_up
from lockstep_lint.analysis.nodes import argument, constant, dotted, keyword, last
from lockstep_lint.analysis.origins import default
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

MESSAGE = "draws from numpy's generator in unseeded workers: use torch's, or a worker_init_fn"
# A function of this name seeds nothing until a loader is given it.
SEEDS_WORKERS = re.compile(r"(?<!def )\bworker_init_fn\b")
LOADER = re.compile(r"Loader[A-Z]?$")
# What joins data sets, or takes a part of one.
JOINED = {"ConcatDataset", "ChainDataset", "Subset", "random_split"}
MAX_JOINED = 3
QUIET = {"seed", "get_state", "set_state", "default_rng", "RandomState", "Generator", "SeedSequence"}


def check(view: View) -> Iterator[Found]:
    """Looks for numpy's generators in the items of the file's datasets, when a loader has workers and no
    worker_init_fn.
    """
    if asks_for_worker(view) or any(
        "worker_init_fn" in member.text and SEEDS_WORKERS.search(member.text)
        for member in view.project.family(view.module)
    ):
        return
    if not any(workers(view, s) for member in view.project.family(view.module) for s in loaders(view, member)):
        return
    for scope in view.scopes:
        if scope.kind == "class" and is_dataset(view, scope):
            site = drawing(view, scope)
            if site is not None and site.module is view.module:
                yield at(site, MESSAGE)
    told: dict[Scope, list[Site]] = {}
    for site in (s for s in loaders(view, view.module) if workers(view, s)):
        drawn = [
            owner
            for call, scope in made_sets(view, argument(site.call, 0, "dataset"), site.scope, 0)
            for owner in drawing_classes(view, call, scope)
            if owner.module is not view.module and all(apart(other, site) for other in told.get(owner, ()))
        ]
        for owner in drawn:
            told.setdefault(owner, []).append(site)
        if drawn:
            yield at(site, f"{drawn[0].name} {MESSAGE}")


def asks_for_worker(view: View) -> bool:
    """Whether the programs may seed by the worker that they run in, beyond what data sets do for themselves."""
    if view.effects.mentioned(view.module, "worker_seed"):
        return True
    sites = [s for member in view.project.family(view.module) for s in member.sites("get_worker_info")]
    return any(s.scope.owner is None or not is_dataset(view, s.scope.owner) for s in sites)


def drawing_classes(view: View, call: ast.Call, scope: Scope) -> list[Scope]:
    """The data set that a call makes, if its items draw from numpy; of those that a name chooses from a table
    (`SETS[name](path)`), the ones that do, where most of them do.
    """
    owner = view.names.definition(call.func, scope)
    chosen = [owner] if owner is not None else looked_up(view, call.func, scope)
    sets = [each for each in chosen if each.kind == "class" and is_dataset(view, each)]
    drawn = [each for each in sets if drawing(view, each, call) is not None]
    return drawn if len(drawn) * 3 >= len(chosen) * 2 else []


def loaders(view: View, module: Module) -> Iterator[Site]:
    """The calls of a file that make a DataLoader, or one of a class of the project that derives from it."""
    for name, sites in module.by_name.items():
        if name == "DataLoader":
            yield from sites
        elif LOADER.search(name):
            yield from (site for site in sites if derives(view, site))


def derives(view: View, site: Site) -> bool:
    """Whether a call makes an object of a class that derives from torch's DataLoader."""
    owner = view.names.definition(site.call.func, site.scope)
    return (
        owner is not None
        and owner.kind == "class"
        and any(name.startswith("torch.") and name.endswith(".DataLoader") for name in view.names.bases_of(owner))
    )


def made_sets(view: View, node: ast.expr | None, scope: Scope, depth: int) -> Iterator[tuple[ast.Call, Scope]]:
    """The calls that make a data set, or those that one is put together from or cut out of (`Subset(Data(), part)`)."""
    calls = [(call, home) for call, home, _ in view.origins.calls_of(node, scope)]
    for bind, home in view.origins.binds(dotted(node) or "", scope, node.lineno) if node is not None else ():
        if bind.path and isinstance(bind.value, ast.Call) and last(bind.value) == "random_split":
            calls.append((bind.value, home))
    for call, home in calls:
        if last(call) not in JOINED or depth > MAX_JOINED:
            yield call, home
            continue
        whole = next(iter(call.args), None)
        written = whole.elts if isinstance(whole, ast.List | ast.Tuple) else [whole]
        for value, place in (*((each, home) for each in written), *view.wrappers.items(whole, home)):
            yield from made_sets(view, value, place, depth + 1)


def drawing(view: View, owner: Scope, made: ast.Call | None = None) -> Site | None:
    """Where the making of a dataset's item draws from numpy; what the call that made the dataset rules out is left out
    (`Data(mode="val")`).
    """
    item = view.names.member(owner, "__getitem__") or view.names.member(owner, "__iter__")
    classes = (owner, *view.names.parents(owner))
    if item is None or any(method.named("get_worker_info") for each in classes for method in each.defs.values()):
        return None  # it may seed for its worker
    sites = [s for s in item.sites if made is None or not ruled_out(view, owner, made, s)]
    return next((s for s in view.effects.below(sites) if draws(view, s)), None)


def ruled_out(view: View, owner: Scope, made: ast.Call, site: Site) -> bool:
    """Whether a test of an attribute, which holds an argument of the constructor, keeps a call from being made."""
    init = view.names.member(owner, "__init__")
    for guard in guards(site.stmt, site.module) if init is not None else ():
        test = guard.test
        if init is None or not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq | ast.NotEq):
            continue
        kept = [bind.value for bind in init.binds.get(dotted(test.left) or "", [])]
        name = kept[0].id if len(kept) == 1 and isinstance(kept[0], ast.Name) and kept[0].id in init.params else ""
        given_here = constant((given(made, init, name) or default(init, name, made)) if name else None)
        wanted = constant(test.comparators[0])
        if given_here is not None and wanted is not None:
            holds = (given_here == wanted) is isinstance(test.ops[0], ast.Eq)
            if holds is not guard.when:
                return True
    return False


def is_dataset(view: View, owner: Scope) -> bool:
    """Whether a class is a torch Dataset."""
    return any(
        name.split(".")[-1] in ("Dataset", "IterableDataset", "VisionDataset") for name in view.names.bases_of(owner)
    )


def workers(view: View, site: Site) -> bool:
    """Whether a loader has, or may have, workers."""
    value = keyword(site.call, "num_workers")
    if value is not None:
        return constant(value) != 0
    options = [o.node for k in site.call.keywords if k.arg is None for o in view.origins.of(k.value, site.scope)]
    return any(not isinstance(node, ast.Dict) or any(map(brings, node.keys, node.values)) for node in options)


def brings(key: ast.expr | None, value: ast.expr) -> bool:
    """Whether an item of a dictionary of options gives a loader workers."""
    return constant(key) == "num_workers" and constant(value) != 0


def draws(view: View, site: Site) -> bool:
    """Whether a call draws from numpy's global generator, or from one that all workers share a copy of."""
    full = view.full(site)
    if full.startswith("numpy.random."):
        return site.name not in QUIET
    name = dotted(site.receiver)
    if name is None or not name.startswith("self.") or site.scope.owner is None:
        return False
    made = [full for _, _, full in view.origins.calls_of(site.receiver, site.scope)]
    return any(text in ("numpy.random.default_rng", "numpy.random.RandomState") for text in made)


RULE = Rule(
    code="LS034",
    name="numpy randomness in workers",
    what="A Dataset draws from numpy's generator, its loader has workers, and no `worker_init_fn` seeds them.",
    why=(
        "Before torch 1.9 all workers drew the same numbers, and since then a generator that the dataset made in its "
        "constructor still gives each worker the same stream: augmentations repeat, in every epoch. numpy's global "
        "generator is seeded by torch today, but a resumed or repeated run depends on that."
    ),
    bad="""
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(i + np.random.randn())

loader = DataLoader(Noisy(), batch_size=2, num_workers=2)
""",
    good="""
import torch
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i + torch.randn(())

loader = DataLoader(Noisy(), batch_size=2, num_workers=2)
""",
    severity=Severity.ERROR,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Draw from torch's generator, or seed numpy in a worker_init_fn",
    moot=frozenset({"lockstep"}),
    note=(
        "Followed is what `__getitem__` or `__iter__` itself runs, through the project's functions. A "
        "`collate_fn`, and a transform that the data set is given from outside, are not followed. It is told at the "
        "draw, and at the first loader of a data set that stands in another file, or of one that a name chooses from a "
        "table of such, in each arm of a test."
    ),
)
