"""LS051: a resumed run that repeats an epoch, or leaves one out."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import inside, loops
from lockstep_lint.analysis.index import Bind, Scope, Site
from lockstep_lint.analysis.nodes import Words, constant, dotted, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

KEY = Words(r"epoch", re.IGNORECASE)
# How many functions the epoch is followed through to the checkpoint that records it.
DEPTH = 3
MESSAGES = {
    0: "a resumed run trains the saved epoch once more: start at checkpoint['epoch'] + 1",
    2: "a resumed run leaves out an epoch: one is added when it is saved and again when it is loaded",
}


def check(view: View) -> Iterator[Found]:
    """Compare the first epoch of a resumed run with the epoch that its checkpoints record."""
    for scope in looped(view):
        for stmt in scope.stmts:
            if isinstance(stmt, ast.For) and isinstance(stmt.target, ast.Name) and (start := first_epoch(stmt.iter)):
                loaded = list(loaded_starts(view, start, scope))
                keys = {key for _, key, _ in loaded}
                saved = set(saved_offsets(view, stmt, stmt.target.id, scope)) if len(keys) == 1 else set()
                totals = {extra + offset for key, extra in saved for _, wanted, offset in loaded if key == wanted}
                if len(totals) == 1 and (total := totals.pop()) in MESSAGES:
                    held = [bind for bind, home in of_object(view, start, scope) if bind in {b for b, *_ in loaded}]
                    own = [bind for bind, *_ in loaded if bind in scope.binds.get(start, [])] or held
                    place = own[0].stmt if own else stmt
                    if any(place in each.stmts for each in view.scopes):
                        yield Found(place, MESSAGES[total])


def looped(view: View) -> Iterator[Scope]:
    """Yield the functions of a file, and of those that use its objects, whose epochs may go on from a checkpoint."""
    yield from view.scopes
    if "self." in view.module.text and "epoch" in view.module.text and ".load" in view.module.text:
        for user in view.project.users(view.module):
            yield from user.scopes if user is not view.module else ()


def of_object(view: View, start: str, scope: Scope) -> list[tuple[Bind, Scope]]:
    """Return the values of an object's attribute, in the methods of its class (`trainer.epoch`)."""
    head, _, name = start.rpartition(".")
    if not head or head == "self":
        return []
    owner = view.calls.class_of(ast.parse(head, mode="eval").body, scope)
    return [(b, m) for m in owner.defs.values() for b in m.binds.get(f"self.{name}", [])] if owner is not None else []


def first_epoch(header: ast.expr) -> str:
    """Return the name of the first epoch of a loop over a range; "" if it has none."""
    call = header if isinstance(header, ast.Call) else None
    if call is not None and last(call) in ("tqdm", "trange") and call.args and isinstance(call.args[0], ast.Call):
        call = call.args[0]
    if call is None or last(call) not in ("range", "trange") or len(call.args) != 2:
        return ""
    return dotted(call.args[0]) or ""


def saved_offsets(view: View, loop: ast.For, name: str, scope: Scope) -> Iterator[tuple[str, int]]:
    """Yield (key, offset from the epoch) of what checkpoints record after the epoch's steps."""
    bodies = [s for s in scope.stmts if inside(s, loop, scope.module)]
    trained = max((s.lineno for s in bodies if isinstance(s, ast.For | ast.While)), default=loop.lineno)
    late = [s for s in bodies if s.lineno >= trained and loops(s, scope.module)[0] is loop]
    yield from recorded(view, late, name, scope, DEPTH)


def recorded(view: View, stmts: list[ast.stmt], name: str, scope: Scope, depth: int) -> Iterator[tuple[str, int]]:
    """Yield the same of some statements, and of the project's functions that they pass the epoch to."""
    stmts = [stmt for stmt in stmts if isinstance(stmt, ast.Assign | ast.Expr)]
    for key, value in (pair for stmt in stmts for node in walk(stmt) for pair in epoch_values(node)):
        if (offset := offset_from(value, name)) is not None:
            yield key, offset
    kept = {b.key for stmt in stmts for b in scope.bound(stmt) if dotted(b.value) == name and b.key.startswith("self.")}
    for site in (site for site in scope.sites if site.stmt in stmts and depth):
        function = view.calls.target(site.call, site.scope)
        if function is None or function.kind != "function" or function is scope:
            continue
        names = {param: offset_from(passed(site, function, param), name) for param in function.params}
        if function.owner is scope.owner is not None:
            names |= dict.fromkeys(kept, 0)
        names |= dict.fromkeys(handed(site, name), 0)
        for inner, extra in names.items():
            found = () if extra is None else recorded(view, function.stmts, inner, function, depth - 1)
            yield from ((key, offset + (extra or 0)) for key, offset in found)


def handed(site: Site, name: str) -> Iterator[str]:
    """Yield the attributes of a method's object that its caller has set to the epoch (`trainer.epoch = epoch`)."""
    holder = dotted(site.receiver)
    for key, binds in site.scope.binds.items() if holder not in (None, "self") else ():
        if key.rpartition(".")[0] == holder and any(
            b.stmt.lineno < site.line and dotted(b.value) == name for b in binds
        ):
            yield f"self.{key.rpartition('.')[2]}"


def epoch_values(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the keys that name an epoch with their values, of a dict or an entry that is written out."""
    if isinstance(node, ast.Dict):
        pairs = [(constant(key), value) for key, value in zip(node.keys, node.values, strict=True)]
    elif isinstance(node, ast.Call) and last(node) == "dict":
        pairs = [(item.arg, item.value) for item in node.keywords]
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        pairs = [(constant(node.targets[0].slice), node.value)]
    else:
        return
    yield from ((key, value) for key, value in pairs if isinstance(key, str) and KEY.search(key))


def offset_from(value: ast.expr | None, name: str) -> int | None:
    """Return the offset of a value from a name: 0 or 1; None if it is another value."""
    if dotted(value) == name:
        return 0
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and constant(value.right) == 1:
        return 1 if dotted(value.left) == name else None
    return None


def loaded_starts(view: View, start: str, scope: Scope) -> Iterator[tuple[Bind, str, int]]:
    """Yield the assignments of the first epoch from a checkpoint, with the key that it reads and the offset."""
    owners = [(b, scope) for b in scope.binds.get(start, [])]
    if "." in start:  # `args.start_epoch`, set by what loads the checkpoint
        own = start.startswith("self.")
        family = (s for member in view.project.family(scope.module) for s in member.scopes if s is not scope)
        owners += [(b, s) for s in family if not own or s.owner is scope.owner for b in s.binds.get(start, [])]
        owners += of_object(view, start, scope)
    for bind, home in owners:
        if bind.how == "aug":
            yield bind, "", 9  # more is done to it
        elif not bind.path and (found := from_checkpoint(view, bind.value, home)) is not None:
            yield bind, *found


def from_checkpoint(view: View, value: ast.expr | None, scope: Scope) -> tuple[str, int] | None:
    """Return (key, offset) of a value from an epoch that a checkpoint records; None if it is another value."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and constant(value.right) == 1:
        found = from_checkpoint(view, value.left, scope)
        return None if found is None else (found[0], found[1] + 1)
    if isinstance(value, ast.Call) and last(value) == "int" and value.args:
        return from_checkpoint(view, value.args[0], scope)
    if isinstance(value, ast.Call) and (function := view.calls.target(value, scope)) is not None:
        given = list(function.returns())
        return from_checkpoint(view, given[0], function) if len(given) == 1 and function is not scope else None
    key = constant(value.slice) if isinstance(value, ast.Subscript) else None
    return (key, 0) if isinstance(key, str) and KEY.search(key) else None


RULE = Rule(
    code="LS051",
    name="epoch of a resume",
    what="A run that is resumed starts with the epoch that its checkpoint was saved after, or leaves one out.",
    why=(
        "The samplers, the schedule and the number of epochs are one off: one epoch's samples are trained on twice, or "
        "never, and a resumed run is not the run that was interrupted."
    ),
    bad="""
import torch

def train(model, optimizer, loader, step, path, epochs):
    start_epoch = 0
    if path:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        start_epoch = checkpoint["epoch"]
    for epoch in range(start_epoch, epochs):
        for batch in loader:
            step(model, optimizer, batch)
        torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")
""",
    good="""
import torch

def train(model, optimizer, loader, step, path, epochs):
    start_epoch = 0
    if path:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        start_epoch = checkpoint["epoch"] + 1
    for epoch in range(start_epoch, epochs):
        for batch in loader:
            step(model, optimizer, batch)
        torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Add one to the epoch once: when it is saved, or when it is loaded",
    note="Checkpoints that are written within an epoch are left alone: they resume in it.",
)
