"""LS051: a resumed run that repeats an epoch, or leaves one out."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import inside, loops
from lockstep_lint.analysis.index import Bind, Scope, Site
from lockstep_lint.analysis.nodes import constant, dotted, keyword, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

KEY = "epoch"
MESSAGES = {
    0: "a resumed run trains the saved epoch once more: start at checkpoint['epoch'] + 1",
    2: "a resumed run leaves out an epoch: one is added when it is saved and again when it is loaded",
}


def check(view: View) -> Iterator[Found]:
    """Compare the first epoch of a resumed run with the epoch that its checkpoints record."""
    for scope in view.scopes:
        for stmt in scope.stmts:
            if isinstance(stmt, ast.For) and isinstance(stmt.target, ast.Name):
                start = first_epoch(stmt.iter)
                saved = set(saved_offsets(view, stmt, stmt.target.id, scope)) if start else set()
                loaded = {offset for _, offset in loaded_starts(view, start, scope)} if len(saved) == 1 else set()
                if len(loaded) == 1 and (total := saved.pop() + loaded.pop()) in MESSAGES:
                    own = [bind for bind, _ in loaded_starts(view, start, scope) if bind in scope.binds.get(start, [])]
                    yield Found(own[0].stmt if own else stmt, MESSAGES[total])


def first_epoch(header: ast.expr) -> str:
    """Return the name of the first epoch of a loop over a range; "" if it has none."""
    call = header if isinstance(header, ast.Call) else None
    if call is not None and last(call) in ("tqdm", "trange") and call.args and isinstance(call.args[0], ast.Call):
        call = call.args[0]
    if call is None or last(call) not in ("range", "trange") or len(call.args) != 2:
        return ""
    return dotted(call.args[0]) or ""


def saved_offsets(view: View, loop: ast.For, name: str, scope: Scope) -> Iterator[int]:
    """Yield the offsets from the epoch to the number that is saved after its steps."""
    bodies = [s for s in scope.stmts if inside(s, loop, scope.module)]
    trained = max((s.lineno for s in bodies if isinstance(s, ast.For | ast.While)), default=loop.lineno)
    for stmt in bodies:
        if stmt.lineno < trained or loops(stmt, scope.module)[0] is not loop:
            continue
        if not isinstance(stmt, ast.Assign | ast.Expr):
            continue
        written = (offset_from(value, name) for node in walk(stmt) for value in epoch_values(node))
        yield from (each for each in written if each is not None)
        for site in (site for site in scope.sites if site.stmt is stmt):
            yield from offsets_in_call(view, site, name)


def offsets_in_call(view: View, site: Site, name: str) -> Iterator[int]:
    """Yield the same offsets from inside a project function that a call passes the epoch to."""
    function = view.calls.target(site.call, site.scope)
    if function is None or function.kind != "function":
        return
    for param in function.params:
        extra = offset_from(passed(site, function, param), name)
        inner = (
            offset_from(value, param) for stmt in function.stmts for node in walk(stmt) for value in epoch_values(node)
        )
        yield from (extra + each for each in inner if extra is not None and each is not None)


def epoch_values(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the values under the key `epoch` of a dict that is written out."""
    if isinstance(node, ast.Dict):
        yield from (v for k, v in zip(node.keys, node.values, strict=True) if constant(k) == KEY)
    elif isinstance(node, ast.Call) and last(node) == "dict":
        value = keyword(node, KEY)
        yield from () if value is None else (value,)


def offset_from(value: ast.expr | None, name: str) -> int | None:
    """Return the offset of a value from a name: 0 or 1; None if it is another value."""
    if dotted(value) == name:
        return 0
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and constant(value.right) == 1:
        return 1 if dotted(value.left) == name else None
    return None


def loaded_starts(view: View, start: str, scope: Scope) -> Iterator[tuple[Bind, int]]:
    """Yield the assignments of the first epoch from a checkpoint, with the offset from its epoch."""
    owners = [(b, scope) for b in scope.binds.get(start, [])]
    if "." in start:  # `args.start_epoch`, set by what loads the checkpoint
        family = (s for member in view.project.family(scope.module) for s in member.scopes if s is not scope)
        owners += [(b, s) for s in family for b in s.binds.get(start, [])]
    for bind, _ in owners:
        if bind.how == "aug":
            yield bind, 9  # more is done to it
        elif not bind.path and (offset := offset_from_checkpoint(bind.value)) is not None:
            yield bind, offset


def offset_from_checkpoint(value: ast.expr | None) -> int | None:
    """Return the offset of a value from a checkpoint's epoch; None if it is another value."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and constant(value.right) == 1:
        return 1 if offset_from_checkpoint(value.left) == 0 else None
    if isinstance(value, ast.Call) and last(value) == "int" and value.args:
        return offset_from_checkpoint(value.args[0])
    return 0 if isinstance(value, ast.Subscript) and constant(value.slice) == KEY else None


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
