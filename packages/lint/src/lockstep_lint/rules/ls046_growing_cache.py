"""LS046: a data set that keeps its samples in a list or dictionary in each worker."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Scope
from lockstep_lint.analysis.nodes import argument, constant, dotted, idents
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

MESSAGE = "keeps every sample in '{name}': each loader worker keeps its own, and memory grows until the host has none"
READS = ("__getitem__", "__iter__", "__getitems__")
# What takes samples out again.
BOUNDS = ("pop", "clear", "popleft", "popitem")


def check(view: View) -> Iterator[Found]:
    """Looks at the methods by which data sets give samples."""
    if not any(workers(view)):
        return
    for scope in view.scopes:
        if scope.kind != "class" or not any("Dataset" in name for name in view.names.bases_of(scope)):
            continue
        for name in READS:
            method = scope.defs.get(name)
            yield from grown(method, scope) if method is not None else ()


def workers(view: View) -> Iterator[bool]:
    """Whether loaders of the programs have workers: some number other than 0."""
    for member in view.project.family(view.module):
        for site in member.sites("DataLoader"):
            count = argument(site.call, 5, "num_workers")
            yield count is not None and constant(count) != 0


def grown(method: Scope, owner: Scope) -> Iterator[Found]:
    """The statements of a method that put what it read into an attribute, from which nothing is taken out."""
    for stmt in method.stmts:
        key = kept_in(stmt, method)
        if key is None or emptied(key, owner) or asked_for_room(stmt, method):
            continue
        yield Found(stmt, MESSAGE.format(name=key))
        return


def kept_in(stmt: ast.stmt, method: Scope) -> str | None:
    """The attribute that a statement puts a value of the method's own into (`self.cache[i] = image`)."""
    key, value = None, None
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call) and isinstance(stmt.value.func, ast.Attribute):
        if stmt.value.func.attr == "append" and stmt.value.args:
            key, value = dotted(stmt.value.func.value), stmt.value.args[0]
    elif isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Subscript):
        key, value = dotted(stmt.targets[0].value), stmt.value
    if key is None or not key.startswith("self.") or key in method.binds or value is None:
        return None
    made = isinstance(value, ast.Name | ast.Tuple | ast.Dict | ast.Call)
    return key if made and any(name in method.binds for name in idents(value)) else None


def emptied(key: str, owner: Scope) -> bool:
    """Whether a method takes anything out of an attribute, or it is not made as an empty list or dictionary."""
    methods = owner.defs.values()
    if any(dotted(site.receiver) == key for method in methods for name in BOUNDS for site in method.named(name)):
        return True
    if any(isinstance(stmt, ast.Delete) for method in methods for stmt in method.stmts):
        return True
    values = [bind.value for method in methods for bind in method.binds.get(key, [])]
    return not values or not all(is_empty(value) for value in values)


def is_empty(value: ast.expr | None) -> bool:
    """Whether a value is an empty list or dictionary."""
    if isinstance(value, ast.Call):
        return dotted(value.func) in ("list", "dict") and not value.args and not value.keywords
    return (isinstance(value, ast.List) and not value.elts) or (isinstance(value, ast.Dict) and not value.keys)


def asked_for_room(stmt: ast.stmt, method: Scope) -> bool:
    """Whether a test of a size stands before (`if len(self.cache) < limit:`)."""
    return any("len" in idents(guard.test) for guard in guards(stmt, method.module))


RULE = Rule(
    code="LS046",
    name="samples kept in workers",
    what="A data set puts each sample that it reads into a list or a dictionary, and loader workers read it.",
    why=(
        "Each worker is a process with its own copy of the data set: none sees what another has kept, and each ends up "
        "with all samples of all epochs. Eight workers on eight ranks hold the data 64 times, until the host kills one."
    ),
    bad="""
import torch
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __init__(self, paths):
        self.paths = paths
        self.cache = {}

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        if index not in self.cache:
            image = torch.load(self.paths[index], map_location="cpu", weights_only=True)
            self.cache[index] = image
        return self.cache[index]

def loader(paths):
    return DataLoader(Images(paths), batch_size=8, num_workers=8)
""",
    good="""
import torch
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return torch.load(self.paths[index], map_location="cpu", weights_only=True)

def loader(paths):
    return DataLoader(Images(paths), batch_size=8, num_workers=8)
""",
    severity=Severity.ERROR,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="none",
    remedy="Keep nothing, or fill one shared tensor or memory map before the workers start",
)
