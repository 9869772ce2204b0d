"""LS034: numpy randomness in a Dataset with workers unseeded."""

from collections.abc import Iterator

from lockstep.lint.analysis.index import Scope, Site
from lockstep.lint.analysis.nodes import constant, dotted, keyword
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

QUIET = {"seed", "get_state", "set_state", "default_rng", "RandomState", "Generator", "SeedSequence"}


def check(view: View) -> Iterator[Found]:
    """Looks for numpy's generators in the items of the file's datasets, when a loader has workers and no
    worker_init_fn.
    """
    if view.effects.mentioned(view.module, "worker_init_fn", "get_worker_info", "worker_seed"):
        return
    if not any(workers(s) for member in view.project.family(view.module) for s in member.sites("DataLoader")):
        return
    for scope in view.scopes:
        if scope.kind == "class" and is_dataset(view, scope):
            item = view.names.member(scope, "__getitem__") or view.names.member(scope, "__iter__")
            site = next((s for s in reach(view, item) if draws(view, s)), None) if item is not None else None
            if site is not None and site.module is view.module:
                yield at(
                    site,
                    "draws from numpy's generator in unseeded workers: use torch's, or a worker_init_fn",
                )


def is_dataset(view: View, owner: Scope) -> bool:
    """Whether a class is a torch Dataset."""
    return any(
        name.split(".")[-1] in ("Dataset", "IterableDataset", "VisionDataset") for name in view.names.bases_of(owner)
    )


def workers(site: Site) -> bool:
    """Whether a loader has, or may have, workers."""
    value = keyword(site.call, "num_workers")
    if value is None:
        return any(k.arg is None for k in site.call.keywords)
    return constant(value) != 0


def reach(view: View, item: Scope) -> Iterator[Site]:
    """The calls that making one item runs."""
    yield from view.effects.below(item.sites)


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
    bad=(
        """
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
        """
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(i + self.rng.standard_normal())

loader = DataLoader(Noisy(), batch_size=2, num_workers=2)
""",
    ),
    good=(
        """
import torch
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i + torch.randn(())

loader = DataLoader(Noisy(), batch_size=2, num_workers=2)
""",
    ),
    severity=Severity.WARNING,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Draw from torch's generator, or seed numpy in a worker_init_fn",
    moot=frozenset({"lockstep"}),
    note=(
        "Followed is what `__getitem__` or `__iter__` itself runs, through the project's functions. A "
        "`collate_fn`, and a transform that the data set is given from outside, are not followed."
    ),
)
