"""LS063: a best score that begins anew when a run is resumed."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.checkpoints import saves
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Bind, Scope
from lockstep_lint.analysis.nodes import (
    REFERENCES,
    Words,
    constant,
    dotted,
    element_of,
    idents,
    last,
    mentions,
    strings,
    walk,
)
from lockstep_lint.analysis.rank_names import attributes
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import ArmBlock, Event, apart
from lockstep_lint.events.marks import operands
from lockstep_lint.events.query import given_as
from lockstep_lint.events.run import Run, runs
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

ANEW = "'{name}' begins anew when the run is resumed: its first model replaces the best one, even if it is worse"
LATEST = "'{name}' is restored from the last model's own score ('{key}'), not the best so far: a worse one replaces it"
WRITES = ("torch.save", "shutil.copy", "shutil.copyfile", "shutil.move")
OPTIMIZER = Words(r"optim|^opt$", re.IGNORECASE)
# What makes a file of each run, or of each save.
OWN = Words(
    r"time|date|now|uuid|run_?id|run_name|version|epoch|step|iter|score|acc|loss|metric|psnr|dice|iou|auc|_f1|f1_",
    re.IGNORECASE,
)
BEST = Words(r"best|(^|_)(min|max|top|lowest|highest|smallest|largest)(_|imum|$)", re.IGNORECASE)
START = Words(r"^(inf|Inf|Infinity|infty|float|maxsize|NINF|math|np|numpy|torch|sys|max|finfo|float32)$")
MAX_NAMES = 30


def check(view: View) -> Iterator[Found]:
    """Look for a score that decides whether a file is replaced, and that a resume of its run does not restore."""
    if "load_state_dict" not in view.module.text and "best" not in view.module.text.lower():
        return
    told = set[ast.stmt]()
    for run in runs(view):
        for event in run.of("save"):
            if event.detail not in WRITES or not resumed(view, run, event) or own_path(view, event):
                continue
            for key, scope in bests(event):
                for stmt, message in judged(view, key, scope):
                    if stmt not in told and any(stmt in each.stmts for each in view.scopes):
                        told.add(stmt)
                        yield Found(stmt, message)


def resumed(view: View, run: Run, event: Event) -> bool:
    """Check whether a run that comes to a save may have loaded the state of an optimizer before its epochs."""
    before = (each for each in run.of("load") if each.place < event.place and not apart(each, event))
    states = [each for each in before if OPTIMIZER.search(last(each.mark.subject))]
    return any(not set(each.loops) & set(event.loops) for each in states) and bool(event.loops)


def bests(event: Event) -> Iterator[tuple[str, Scope]]:
    """Yield the names that the tests around an event compare a score with."""
    for test in event.tests:
        for part in operands(test.node):
            for compare, scope in compared(event, part, test):
                for side in (compare.left, compare.comparators[0]):
                    key = dotted(side)
                    ordered = isinstance(compare.ops[0], ast.Lt | ast.Gt | ast.LtE | ast.GtE)
                    if key is not None and ordered and BEST.search(key):
                        yield key, scope


def compared(event: Event, part: ast.expr, test: ArmBlock) -> Iterator[tuple[ast.Compare, Scope]]:
    """Yield the comparison that a part of a test is, or that its flag was given (`is_best = score > best`)."""
    node, scope = given_as(event, part, test.scope)
    binds = scope.binds.get(dotted(node) or "", [])
    for value in [node] if isinstance(node, ast.Compare) else [bind.value for bind in binds]:
        if isinstance(value, ast.Compare):
            yield value, scope


def judged(view: View, key: str, scope: Scope) -> Iterator[tuple[ast.stmt, str]]:
    """Yield where a best score is begun, or restored, if that is not from the best of the run before."""
    binds = bound(view, key, scope)
    starts = [bind for bind, _ in binds if begins(bind)]
    updates = [bind for bind, home in binds if updated(bind, key, home)]
    rest = [(bind, home) for bind, home in binds if bind not in starts and bind not in updates]
    if not updates or scope.kind == "class" or key in scope.params or put_on(view, key):
        return
    if starts and not rest and not asks_best(view, key):
        yield starts[-1].stmt, ANEW.format(name=key)
    for bind, _ in rest:
        value = value_of(bind)
        name = next(strings(value), "") if value is not None else ""
        if len(rest) == 1 and latest(view, key, name):
            yield bind.stmt, LATEST.format(name=key, key=name)


def bound(view: View, key: str, scope: Scope) -> list[tuple[Bind, Scope]]:
    """Return the values that a name is given in its function, or in the methods of its class."""
    owner = scope.owner if key.startswith("self.") else None
    homes = owner.defs.values() if owner is not None else [scope]
    return [(bind, home) for home in homes for bind in home.binds.get(key, [])]


def begins(bind: Bind) -> bool:
    """Check whether a name is given a number, infinity or None."""
    value = value_of(bind)
    if value is None or bind.how != "assign":
        return False
    names = [*idents(value)]
    literal = isinstance(value, ast.Constant) or constant(value) is not None
    return literal or (bool(names) and all(map(START.search, names)))


def value_of(bind: Bind) -> ast.expr | None:
    """Return the value of a name, also in a tuple that is written out."""
    return next(element_of(bind.value, bind.path), None)


def updated(bind: Bind, key: str, home: Scope) -> bool:
    """Check whether a name is given a better score: under a test of it, or as the larger or smaller of two."""
    if bind.value is not None and mentions(bind.value, key):
        return True
    return not begins(bind) and any(asks(guard.test, key, home) for guard in guards(bind.stmt, home.module))


def asks(test: ast.expr, key: str, home: Scope) -> bool:
    """Check whether a test, or what its flag was given, asks for the best score."""
    flags = [bind.value for bind in home.binds.get(dotted(test) or "", ()) if bind.value is not None]
    return any(mentions(each, key) for each in (test, *flags))


def put_on(view: View, key: str) -> bool:
    """Check whether other code sets the attribute on an object (`trainer.best = ...`)."""
    head, _, name = key.rpartition(".")
    found = (bind.key for m in view.project.family(view.module) for bind, _ in attributes(m).get(name, ()))
    return bool(head) and any(each != key for each in found)


def asks_best(view: View, key: str) -> bool:
    """Check whether the programs read anything by the name of the best from a table, or fill objects out of sight."""
    text = "\n".join(member.text for member in view.project.family(view.module))
    name = re.escape(key.rpartition(".")[2])
    read = rf"(\[|get\(|getattr\([^,\n]*,|pop\()\s*['\"](\w*best\w*|{name})['\"]"
    return re.search(rf"{read}|setattr\(|__dict__", text, re.IGNORECASE) is not None


def latest(view: View, key: str, name: str) -> bool:
    """Check whether a best score is restored from a key under which each save puts the score of its own model."""
    if not name or "best" in name.lower():
        return False
    found = [
        (saved, value, home)
        for saved in saves(view.analysis, view.module)
        for value, home in saved.values.get(name, ())
    ]
    plain = (dotted(value) or isinstance(value, ast.Subscript) for _, value, _ in found)
    if not found or not all(plain) or any("best" in ast.unparse(value).lower() for _, value, _ in found):
        return False
    return any(not kept(saved.site.stmt, saved.site.scope, key) for saved, _, _ in found)


def kept(stmt: ast.stmt, scope: Scope, key: str) -> bool:
    """Check whether a save is under a test of the best score."""
    tests = [guard.test for guard in guards(stmt, scope.module)]
    return any(mentions(test, key) or "best" in ast.unparse(test).lower() for test in tests)


def own_path(view: View, event: Event) -> bool:
    """Check whether a file is of its run or of its save alone: its path has the time, the epoch or the score in it."""
    queue, seen = [(event.mark.subject, event.scope)], set[object]()
    while queue and len(seen) < MAX_NAMES:
        node, scope = given_as(event, *queue.pop())
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(map(OWN.search, idents(node))):
            return True
        for part in walk(node):
            name = dotted(part)
            if name is not None and isinstance(part, REFERENCES):
                queue += [(bind.value, home) for bind, home in view.origins.binds(name, scope, part.lineno)]
                family = view.project.family(scope.module) if "." in name else ()
                queue += [(b.value, s) for m in family for b, s in attributes(m).get(name.rpartition(".")[2], ())]
                queue += [(part, scope)] if name in scope.params and part is not node else []
    return False


RULE = Rule(
    code="LS063",
    name="best score anew",
    what=(
        "A best score decides whether the file of the best model is replaced, and a resumed run begins it anew, or "
        "with the score of the last model."
    ),
    why="The first epoch after a resume counts as the best so far, so that a worse model replaces the best one's file.",
    bad="""
import torch

def train(model, optimizer, loader, loss_of, score_of, args):
    start_epoch, best = 0, 0.0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_epoch = checkpoint["epoch"] + 1
    for epoch in range(start_epoch, args.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, "last.pt")
        score = score_of(model)
        if score > best:
            best = score
            torch.save(state, "best.pt")
""",
    good="""
import torch

def train(model, optimizer, loader, loss_of, score_of, args):
    start_epoch, best = 0, 0.0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_epoch, best = checkpoint["epoch"] + 1, checkpoint["best"]
    for epoch in range(start_epoch, args.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        score = score_of(model)
        better, best = score > best, max(score, best)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "best": best}
        torch.save(state, "last.pt")
        if better:
            torch.save(state, "best.pt")
""",
    severity=Severity.ERROR,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Save the best score in the checkpoint, and restore it with the optimizer",
    moot=frozenset({"lightning", "pytorch_lightning", "composer", "lockstep", "trl"}),
    note=(
        "It is told where the run loads the state of its optimizer before its epochs, the file of the best model has "
        "one path in all runs, and nothing in the program reads a best score from a checkpoint."
    ),
)
