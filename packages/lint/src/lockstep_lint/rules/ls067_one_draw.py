"""LS067: random numbers of samples that begin with the same seed for each of them."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.context import apart, guards, loops
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, is_none, keyword, last, strings
from lockstep_lint.analysis.origins import Origin, default
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

MESSAGE = "each sample begins with this seed, so all get the same random numbers in every epoch: seed once, outside"
# What makes random numbers repeatable, with whose they are.
SEEDS = {
    "random.seed": "random.",
    "numpy.random.seed": "numpy.random.",
    "torch.manual_seed": "torch.",
    "torch.random.manual_seed": "torch.",
}
# What makes a generator of its own by a seed.
MAKES = ("numpy.random.RandomState", "numpy.random.default_rng", "random.Random")
# The functions of torch that draw from its generator; those of the others all do, but for what only handles states.
DRAWS = ("rand", "randn", "randint", "randperm", "normal", "multinomial", "bernoulli", "rand_like", "randn_like")
STATES = Words(r"seed|state|default_rng|RandomState|^Random$|Generator")
AUGMENTS = Words(r"augment|transform|crop|flip|noise|jitter|mask|mix|rotat|collate", re.IGNORECASE)
# Words of data that is to stay the same.
FIXED = Words(r"(?i:determin|fixed|repeat|reproduc|debug|const)")


def check(view: View) -> Iterator[Found]:
    """Looks for constant seeds, with draws after them, in what is called for each sample or batch."""
    if (
        "seed" not in view.module.text
        and "RandomState" not in view.module.text
        and "default_rng" not in view.module.text
    ):
        return
    for scope in view.scopes:
        if scope.kind == "function" and for_each(view, scope):
            yield from (
                at(site, MESSAGE) for site in seeds(view, scope) if constant_seed(view, site) and draws(view, site)
            )


def for_each(view: View, scope: Scope) -> bool:
    """Check whether a function makes one sample or one batch, not of data that is only evaluated on."""
    owner = scope.owner
    names = (scope.name, owner.name if owner is not None else "")
    if any(EVALUATION.search(name) or FIXED.search(name) for name in names):
        return False
    if scope.name == "__getitem__":
        return True
    return (scope.name == "__call__" and owner is not None and AUGMENTS.search(owner.name)) or "collate" in scope.name


def seeds(view: View, scope: Scope) -> Iterator[Site]:
    """Yield the calls of a function that seed random numbers, whatever the sample is."""
    for site in scope.sites:
        if "seed" not in site.name and site.name not in ("RandomState", "default_rng", "Random"):
            continue
        known = view.full(site) in (*SEEDS, *MAKES)
        told = [
            word for guard in guards(site.stmt, site.module) for word in (*idents(guard.test), *strings(guard.test))
        ]
        asked = any(EVALUATION.search(word) or FIXED.search(word) or "train" in word for word in told)
        if known and not asked and not loops(site.stmt, site.module):
            yield site


def constant_seed(view: View, site: Site) -> bool:
    """Check whether a seed is a number, or what a class was given once: not of the sample, and not None."""
    given = next(iter(site.call.args), None) or keyword(site.call, "seed")
    found = view.origins.of(given, site.scope) if given is not None else []
    return bool(found) and all(is_number(view, site, origin) for origin in found)


def is_number(view: View, site: Site, origin: Origin) -> bool:
    """Check whether a value certainly is one number for all samples."""
    node, scope = origin.node, origin.scope
    if isinstance(constant(node), int) and not isinstance(constant(node), bool):
        return True
    if scope is site.scope or not isinstance(node, ast.Name) or scope.name != "__init__" or node.id not in scope.params:
        return (
            isinstance(node, ast.Attribute)
            and last(node.value) in ("args", "opt", "cfg", "config")
            and scope is not site.scope
        )
    usual = default(scope, node.id, ast.Call(ast.Name("made", ast.Load()), [], []))
    return usual is not None and not is_none(usual)


def draws(view: View, seed: Site) -> bool:
    """Check whether random numbers are drawn after a seed in its function."""
    return any(
        is_draw(view, seed, site) for site in seed.scope.sites if site.line > seed.line and not apart(seed, site)
    )


def is_draw(view: View, seed: Site, site: Site) -> bool:
    """Check whether a call draws from what was seeded."""
    full, name = view.full(site), site.name
    if STATES.search(name):
        return False
    kept = SEEDS.get(view.full(seed))
    if kept is None:  # a generator of its own
        keys = {bind.key for bind in seed.scope.bound(seed.stmt) if bind.value is seed.call}
        return dotted(site.receiver) in keys
    return full.startswith(kept) and (kept != "torch." or name in DRAWS)


RULE = Rule(
    code="LS067",
    name="one draw for all samples",
    what=(
        "A data set's `__getitem__`, a collate function or a random transform seeds a generator with a constant, and "
        "draws from it."
    ),
    why=(
        "The generator begins again for each sample, so every image is turned by the same angle, in every epoch: the "
        "augmentation is one fixed change. It also resets the generator that the rest of the process draws from."
    ),
    bad="""
import numpy as np
from torch.utils.data import Dataset

class Clouds(Dataset):
    def __init__(self, clouds):
        self.clouds = clouds

    def __len__(self):
        return len(self.clouds)

    def __getitem__(self, index):
        np.random.seed(0)
        cloud = self.clouds[index]
        return cloud + np.random.normal(0, 0.02, size=cloud.shape)
""",
    good="""
import numpy as np
from torch.utils.data import Dataset

class Clouds(Dataset):
    def __init__(self, clouds):
        self.clouds = clouds

    def __len__(self):
        return len(self.clouds)

    def __getitem__(self, index):
        cloud = self.clouds[index]
        return cloud + np.random.normal(0, 0.02, size=cloud.shape)
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="none",
    remedy="Seed once, before the training (and in worker_init_fn), or by the index and the epoch",
    note=(
        "A seed that is drawn, or made of the index, is none. Silent where a name or a test speaks of evaluation, of "
        "training, or of data that is to stay the same."
    ),
)
