"""LS062: a resume that reads what no checkpoint of the program holds."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.checkpoints import (
    Read,
    Saved,
    fits,
    handled,
    loaded,
    loads,
    of_program,
    reads,
    saves,
)
from lockstep_lint.analysis.nodes import Words
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

MISSING = "reads {keys}, which the checkpoints of this program do not hold ({held}): a resume ends here"
WHOLE = "loads a whole checkpoint into the model, and this program's hold more ({held}): that ends in an error"
# What only the checkpoint of a run under way has.
PROGRESS = Words(r"epoch|iter|step|optim|best|sched|scaler", re.IGNORECASE)


def check(view: View) -> Iterator[Found]:
    """Compare the keys that a resume reads with those that the program's own saves write."""
    if not loads(view.analysis, view.module) or not (written := saves(view.analysis, view.module)):
        return
    by_load: dict[ast.Call, list[Read]] = {}
    for read in reads(view):
        by_load.setdefault(read.loads[0][0], []).append(read)
    for found in by_load.values():
        named = any(PROGRESS.search(read.key) for read in found)
        own = of_program(view, found[0].loads, [(read.stmt, read.scope) for read in found], written, named)
        held = set[str]().union(*(saved.keys for saved in own))
        missing = [read for read in found if read.key not in held and fits(view, read)] if own else []
        if missing and not any(read.key in saved.values for read in missing for saved in written):
            keys = " and ".join(dict.fromkeys(f"'{read.key}'" for read in missing))
            shown = ", ".join(sorted(held)) or "a model's state alone"
            yield Found(missing[0].node, MISSING.format(keys=keys, held=shown))
    yield from whole_tables(view, written)


def whole_tables(view: View, written: tuple[Saved, ...]) -> Iterator[Found]:
    """Yield the models that load a whole checkpoint, where all that the program saves are tables of several states."""
    for site in view.sites("load_state_dict"):
        given = next(iter(site.call.args), None)
        if given is None or not view.kinds.is_model(site.receiver, site.scope) or handled(site.stmt, site.scope):
            continue
        made = loaded(view, given, site.scope)
        own = of_program(view, made, [(site.stmt, site.scope)], written, True) if made else []
        if own and all(len(saved.keys) > 1 and "" not in saved.values for saved in own):
            held = sorted(set[str]().union(*(saved.keys for saved in own)))
            yield Found(site.call, WHOLE.format(held=", ".join(held)))


RULE = Rule(
    code="LS062",
    name="key missing in the checkpoint",
    what="A resumed run reads a key from its checkpoint that none of the program's own saves writes.",
    why="The resume ends with a KeyError, which shows only when a run was interrupted and is to go on: it cannot.",
    bad="""
import torch

def train(model, optimizer, loader, loss_of, args):
    start_epoch = 0
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
        torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")
""",
    good="""
import torch

def train(model, optimizer, loader, loss_of, args):
    start_epoch = 0
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
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "last.pt")
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Write the key where the checkpoint is saved, or read it by its name there",
    moot=frozenset({"lightning", "pytorch_lightning", "composer", "lockstep", "trl"}),
    note=(
        "The checkpoint is the program's own where the load and the save name one file, or where a test or the path "
        "speaks of a resume and all that the program saves is in sight. Keys that are asked for by `.get` or `in`, and "
        "pretrained weights, are left alone."
    ),
)
