"""LS036: a device sync in every step."""

import ast
from collections.abc import Iterator

from lockstep.lint.analysis.context import loops, withs
from lockstep.lint.analysis.effects import turns_off_gradients
from lockstep.lint.analysis.index import Site
from lockstep.lint.analysis.nodes import base, dotted, idents, last, targets, walk
from lockstep.lint.analysis.training import Training
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

SYNCS = {"item", "cpu", "tolist"}
READS = {"print", "float", "bool", "int"}
# They make a text or a number of what they are given, at once.
SHOWS = {"add_scalar", "set_postfix", "set_postfix_str", "set_description"}


def check(view: View) -> Iterator[Found]:
    """Looks at everything that runs in every step of the programs' training loops, where it stands in this file."""
    if not view.gpu:
        return
    seen: set[int] = set()
    for training in view.trainings.near(view.module):
        if not view.trainings.steps_in(training.loop, training.scope) and not view.training:
            continue
        here = [site for site in view.trainings.each_step(training) if site.module is view.module]
        losses = loss_names(view, training) if here else set()
        for site in here:
            if site.stmt.lineno in seen:
                continue
            what = syncs(view, site, losses)
            if what and not from_loader(site, training) and not elsewhere(view, site, training):
                seen.add(site.stmt.lineno)
                yield at(
                    site, f"{what} waits for the device in every step: keep tensors, and read them every n-th step"
                )


def syncs(view: View, site: Site, losses: set[str]) -> str:
    """What in a call waits for the device."""
    if site.name in SYNCS and site.receiver is not None and not site.call.args and not site.call.keywords:
        return f".{site.name}()" if is_tensor(view, site) else ""
    plain = site.name in READS and isinstance(site.call.func, ast.Name)
    if plain or (site.name in SHOWS and site.receiver is not None):
        for value in (*site.call.args, *(k.value for k in site.call.keywords)):
            if any(isinstance(node, ast.Name) and node.id in losses for node in bare(value)):
                return f"{site.name}({ast.unparse(value)[:30]})"
    return ""


def bare(value: ast.expr) -> Iterator[ast.AST]:
    """The parts of an expression that are not inside a call's method chain (`loss` but not `loss.item()`)."""
    stack: list[ast.AST] = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            stack.extend(node.args if node.func.attr == "format" else [])
            continue
        yield node
        if not isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
            stack.extend(ast.iter_child_nodes(node))


def is_tensor(view: View, site: Site) -> bool:
    """Whether the receiver may be a tensor on the device: not a number of Python's, numpy's or the data's."""
    root = base(site.receiver) if site.receiver is not None else None
    name = dotted(site.receiver) or ""
    if isinstance(root, ast.Name) and root.id in (
        "np",
        "numpy",
        "random",
        "math",
        "time",
        "args",
        "cfg",
        "config",
        "self_",
    ):
        return False
    if (
        any(isinstance(node, ast.Call) and last(node) in (*SYNCS, "numpy") for node in walk(site.receiver))
        if site.receiver is not None
        else False
    ):
        return False  # `.detach().cpu().numpy()` is reported once, for its first sync
    return "optimizer" not in name and name != "lr"


def from_loader(site: Site, training: Training) -> bool:
    """Whether the value comes straight from the loader, which is on the CPU, and was not moved."""
    root = base(site.receiver) if site.receiver is not None else None
    if not isinstance(root, ast.Name) or not isinstance(training.loop, ast.For) or site.scope is not training.scope:
        return False
    if root.id not in {name for name, _ in targets(training.loop.target)}:
        return False
    return not any(
        bind.stmt is not training.loop and bind.stmt.lineno > training.loop.lineno
        for bind in site.scope.binds.get(root.id, [])
    )


def loss_names(view: View, training: Training) -> set[str]:
    """The names of the losses that the loop computes gradients of."""
    names = set()
    for site in [training.backward, *training.scope.sites]:
        if view.steps.backwards(site):
            loss = view.steps.loss_of(site)
            names |= {dotted(loss) or ""}
    for key, binds in training.scope.binds.items():
        inner = [b.value for b in binds if b.value is not None and b.stmt.lineno > training.loop.lineno]
        if (
            "loss" in key.lower()
            and inner
            and not any(last(node) in (*SYNCS, "numpy", "float") for v in inner for node in walk(v))
        ):
            names.add(key)
    return {name for name in names if name and "." not in name}


def elsewhere(view: View, site: Site, training: Training) -> bool:
    """Whether the call is not on the training's way: evaluation inside it, an inner loop over parameters, no graph."""
    if any(turns_off_gradients(item) for item in withs(site.stmt, site.module)) and loops(site.stmt, site.module)[
        :1
    ] != [training.loop]:
        return True
    if site.scope.name in (
        "state_dict",
        "evaluate",
        "validate",
        "test",
        "eval",
        "validation",
        "__getitem__",
        "collate_fn",
    ):
        return True
    inner = [loop for loop in loops(site.stmt, site.module) if loop is not training.loop and loop is not training.micro]
    between = [loop for loop in inner if loop.lineno > training.loop.lineno] if site.scope is training.scope else inner
    return any(isinstance(loop, ast.For) and "parameters" in " ".join(idents(loop.iter)) for loop in between)


RULE = Rule(
    code="LS036",
    name="device sync in every step",
    what="A tensor is read back (`.item()`, `print(loss)`, `add_scalar(name, loss)`) in every step of a training loop.",
    why=(
        "The host waits until the device has finished all it was given, then the device waits for new work: the "
        "queue runs dry in every step."
    ),
    bad=(
        """
import torch

def train(model, loader, optimizer, criterion):
    model.cuda()
    total = 0.0
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total
""",
        """
import torch

def train(model, loader, optimizer, criterion, writer):
    model.cuda()
    for i, (x, y) in enumerate(loader):
        x, y = x.cuda(), y.cuda()
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        writer.add_scalar("loss", loss, i)
""",
    ),
    good=(
        """
import torch

def train(model, loader, optimizer, criterion):
    model.cuda()
    total = torch.zeros((), device="cuda")
    for i, (x, y) in enumerate(loader):
        x, y = x.cuda(), y.cuda()
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if i % 100 == 0:
            print(total.item())
""",
    ),
    severity=Severity.WARNING,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Add up detached tensors and read them every n-th step",
    moot=frozenset({"lightning", "pytorch_lightning", "lockstep", "composer", "trl"}),
    note=(
        "What runs beside every step of the optimizer counts, also under gradient accumulation. What runs every "
        "n-th step does not, nor does an evaluation."
    ),
)
