"""LS057: a training loader that keeps the order of the data."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import argument, constant, idents, is_none, keyword, last, strings
from lockstep_lint.analysis.view import View
from lockstep_lint.events.loaders import feeds
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

MESSAGE = "trains in the order of the data, with the same batches in every epoch: pass shuffle=True"
SAMPLED = "trains in the order of the data, with the same batches in every epoch: leave shuffle=False out"
SAMPLERS = ("sampler", "batch_sampler")
# Data sets of torchvision whose samples lie in the order of their classes.
SORTED = ("torchvision.datasets.ImageFolder", "torchvision.datasets.DatasetFolder")
# What may have given the data another order, or draws what it is asked for, or whose order means something.
MIXED = re.compile(
    r"shuffl(?!e\s*=\s*(False|shuffle\b))|perm\(|permut|random_split|train_test_split|\.sample\(|randint|randrange"
    r"|random\.(choice|sample|random\b)|torch\.rand|np\.random|\brng\b|KFold|iloc\[.*rand",
    re.IGNORECASE,
)
PROFILES = re.compile(r"\bprofile\(")
ORDERED = re.compile(
    r"stream|sequential|chunk|replay|rollout|trajector|stateful|memmap|bptt|curriculum|buffer|overfit|toy|synthetic"
    r"|dummy|fake|Iterable|val(id)?(_|$)|(^|_)(val|test|eval|query|search)|calib|probe",
    re.IGNORECASE,
)


def check(view: View) -> Iterator[Found]:
    """Looks at the loaders that several epochs of steps run over."""
    if "DataLoader" not in view.module.text or measures(view.module.bare):
        return
    fed: set[ast.Call] = {call for run in runs(view) for call in repeated(view, run)}
    for site in view.sites("DataLoader"):
        call = site.call
        if call not in fed or any(item.arg is None for item in call.keywords) or len(call.args) > 2:
            continue
        data, sampler = argument(call, 0, "dataset"), keyword(call, "sampler")
        if data is None or not keeps_order(view, data, site.scope):
            continue
        if sampler is not None and not is_none(sampler):
            yield from sampled(view, sampler, site.scope)
        elif all(given is None or is_none(given) for given in (sampler, keyword(call, "batch_sampler"))):
            shuffled = keyword(call, "shuffle")
            if shuffled is None or constant(shuffled) is False:
                yield Found(call, MESSAGE)


def measures(text: str) -> bool:
    """Check whether a file measures how fast it is."""
    return "enable_timing" in text or ("profile(" in text and PROFILES.search(text) is not None)


def sampled(view: View, sampler: ast.expr, scope: Scope) -> Iterator[Found]:
    """Yield a DistributedSampler of the file that is the only one of a loader and is told not to shuffle."""
    made = list(view.origins.of(sampler, scope))
    call = made[0].call if len(made) == 1 else None
    if call is not None and last(call) == "DistributedSampler" and made[0].scope.module is view.module:
        yield from (Found(call, SAMPLED),) if constant(keyword(call, "shuffle")) is False else ()


def repeated(view: View, run: Run) -> Iterator[ast.Call]:
    """Yield the loaders of the loops that compute gradients and step, once an epoch."""
    for back in run.of("backward"):
        steps = any(loop in step.loops for loop in back.loops[-1:] for step in run.of("step"))
        if steps and len(back.loops) > 1:
            yield from feeds(view, back)


def keeps_order(view: View, data: ast.expr, scope: Scope) -> bool:
    """Whether a data set certainly is one that is read by its index, and nothing in sight gives it an order."""
    made = [(origin.node, origin.scope) for origin in view.origins.of(data, scope)]
    homes = {scope, *(home for _, home in made)}
    words = [*idents(data), *strings(data), *(word for node, _ in made for word in (*idents(node), *strings(node)))]
    if not made or any(map(ORDERED.search, words)) or any(map(EVALUATION.search, words)) or any(map(mixes, homes)):
        return False
    whole = any(last(node) != "Subset" for node, _ in made)  # a part alone is for a trial, or measures
    return whole and all(sorted_data(view, node, home) for node, home in made)


def sorted_data(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether an expression makes a data set in a fixed order: of torchvision, or of a class in sight."""
    if not isinstance(node, ast.Call):
        return False
    full = view.names.qualify(node.func, scope)
    if full in SORTED:
        return True
    if full == "torch.utils.data.Subset" and len(node.args) == 2:
        made = view.origins.of(node.args[0], scope)
        return bool(made) and all(sorted_data(view, each.node, each.scope) for each in made if each.node is not node)
    owner = view.names.definition(node.func, scope)
    if owner is None or owner.kind != "class" or "__iter__" in owner.defs or "__getitem__" not in owner.defs:
        return False
    bases = [name for name in view.names.bases_of(owner) if not name.endswith(("Dataset", "object", "ABC", "Generic"))]
    if bases or mixes(owner) or ORDERED.search(owner.name):
        return False
    return uses_index(owner.defs["__getitem__"])


def uses_index(method: Scope) -> bool:
    """Whether `__getitem__` reads the index that it is given."""
    body = getattr(method.node, "body", [])
    return len(method.params) == 2 and any(method.params[1] in idents(stmt) for stmt in body)


@kept
def mixes(scope: Scope) -> bool:
    """Check whether a function, a class or a file's top level may give data another order."""
    return MIXED.search(part_of(scope)) is not None


def part_of(scope: Scope) -> str:
    """The text of a function or a class; of a file's top level, its statements alone."""
    lines = scope.module.bare.split("\n")
    if scope.kind == "module":
        return "\n".join(line for stmt in scope.stmts for line in lines[stmt.lineno - 1 : stmt.lineno])
    start, end = scope.node.lineno, scope.node.end_lineno or scope.node.lineno  # type: ignore[attr-defined]
    return "\n".join(lines[start - 1 : end])


RULE = Rule(
    code="LS057",
    name="training data not shuffled",
    what=(
        "The loader that the epochs of a training run over has no `shuffle=True` and no sampler, or a "
        "DistributedSampler with `shuffle=False`, and nothing else mixes its data."
    ),
    why=(
        "Neighbours in the data are alike: files lie in the order of their classes, windows of one recording follow "
        "each other. A batch then has one class or scene, and each epoch has the same batches in the same order."
    ),
    bad="""
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

def train(model, optimizer, loss_of, epochs):
    loader = DataLoader(ImageFolder("photos"), batch_size=64)
    for epoch in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()
""",
    good="""
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

def train(model, optimizer, loss_of, epochs):
    loader = DataLoader(ImageFolder("photos"), batch_size=64, shuffle=True)
    for epoch in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()
""",
    severity=Severity.ERROR,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Pass shuffle=True, or give a sampler that shuffles",
    moot=frozenset({"lightning", "pytorch_lightning", "composer", "lockstep", "trl"}),
    note=(
        "It is told for `ImageFolder` and for classes in sight with `__getitem__`, in loops that step and that lie in "
        "a loop of epochs. Code near them that shuffles, draws at random or splits at random silences it, and so do "
        "names that speak of streams, trajectories, replay or held-out data."
    ),
)
