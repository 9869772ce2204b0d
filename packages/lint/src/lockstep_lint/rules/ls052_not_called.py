"""LS052: a method that is named, but not called."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.nodes import dotted
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

# Methods that a script calls for their effect.
METHODS = {
    *("step", "zero_grad", "backward", "train", "eval", "update", "barrier", "synchronize", "close", "set_epoch"),
    *("wait_for_everyone", "destroy_process_group", "requires_grad_", "share_memory", "cuda", "save_state"),
}


def check(view: View) -> Iterator[Found]:
    """Find statements that name a method without calling it."""
    for scope in view.scopes:
        for stmt in scope.stmts:
            node = stmt.value if isinstance(stmt, ast.Expr) else None
            if isinstance(node, ast.Attribute) and node.attr in METHODS and dotted(node) is not None:
                yield Found(node, f"{dotted(node)} is named, but not called: add ()")


RULE = Rule(
    code="LS052",
    name="not called",
    what="A statement names a method of the training (`scheduler.step`), and does not call it.",
    why="Nothing happens, and nothing fails: the rates stay, the gradients add up, or the mode is not changed.",
    bad="""
def train(model, loader, optimizer, scheduler, criterion):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    scheduler.step
""",
    good="""
def train(model, loader, optimizer, scheduler, criterion):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    scheduler.step()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Call it",
)
