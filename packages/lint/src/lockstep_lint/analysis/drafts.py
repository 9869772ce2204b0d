"""Draft the fixes of `--unsafe-fixes`, where all names that they need are known."""

import ast

from lockstep_lint.analysis.context import loops
from lockstep_lint.analysis.index import Module, Site
from lockstep_lint.analysis.nodes import constant, dotted, keyword, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Change

__all__ = ["add_unscale", "epoch_set", "guard_save", "load_safely", "plain_state"]


def indent(module: Module, stmt: ast.stmt) -> str:
    """Return the white space before a statement."""
    return module.source.lines[stmt.lineno - 1][: stmt.col_offset]


def before(module: Module, stmt: ast.stmt, *lines: str) -> Change:
    """Insert lines before a statement, at its indent."""
    return Change(stmt.lineno, 0, tuple(indent(module, stmt) + line for line in lines))


def epoch_set(view: View, site: Site) -> tuple[Change, ...]:
    """Add `sampler.set_epoch(epoch)` at the head of the epoch's loop."""
    name = next((b.key for b in site.scope.bound(site.stmt) if b.value is site.call), None)
    for loop in site.scope.stmts if name is not None else ():
        counter = dotted(loop.target) if isinstance(loop, ast.For) and loop.lineno > site.line else None
        if isinstance(loop, ast.For) and counter is not None and "epoch" in counter:
            return (before(view.module, loop.body[0], f"{name}.set_epoch({counter})"),)
    return ()


def add_unscale(view: View, site: Site) -> tuple[Change, ...]:
    """Add `scaler.unscale_(optimizer)` before a clip, or move a late clip before the step."""
    nest = loops(site.stmt, site.module)
    same = [s for s in site.scope.sites if loops(s.stmt, site.module) == nest]
    for step in (s for s in same if view.steps.steps_optimizer(s)):
        if step.line > site.line and view.kinds.is_scaler(step.receiver, step.scope) and step.call.args:
            line = f"{dotted(step.receiver)}.unscale_({ast.unparse(step.call.args[0])})"
            return (before(view.module, site.stmt, line),)
        if step.line < site.line and isinstance(site.stmt, ast.Expr):
            text = ast.unparse(site.stmt)
            return (before(view.module, step.stmt, text), Change(site.stmt.lineno, _height(site.stmt), ()))
    return ()


def _height(stmt: ast.stmt) -> int:
    return (stmt.end_lineno or stmt.lineno) - stmt.lineno + 1


def load_safely(view: View, site: Site) -> tuple[Change, ...]:
    """Give `torch.load` a `map_location`, or `weights_only=True` instead of False."""
    weights = keyword(site.call, "weights_only")
    if weights is not None and constant(weights) is False:
        return replace_text(view.module, weights, "True")
    final = (*site.call.args, *(item.value for item in site.call.keywords))[-1:]
    return tuple(
        change
        for value in final
        for change in replace_text(view.module, value, f'{source_of(view.module, value)}, map_location="cpu"')
    )


def plain_state(view: View, site: Site) -> tuple[Change, ...]:
    """Write `model.module.state_dict()` instead of the wrapper's, and load it back the same way."""
    model = dotted(site.receiver)
    if model is None or site.receiver is None:
        return ()
    changes = replace_text(view.module, site.receiver, f"{model}.module")
    for load in site.scope.named("load_state_dict"):
        if dotted(load.receiver) == model and load.receiver is not None:
            changes += replace_text(view.module, load.receiver, f"{model}.module")
    return changes


def guard_save(view: View, site: Site) -> tuple[Change, ...]:
    """Put a save under `if torch.distributed.get_rank() == 0:`."""
    stmt, module = site.stmt, site.module
    started = "torch" in module.imports and view.effects.mentioned(module, "init_process_group")
    if not started or not isinstance(stmt, ast.Expr) or any(map(of_several_lines, walk(stmt))):
        return ()
    block = module.source.lines[stmt.lineno - 1 : stmt.end_lineno]
    head = f"{indent(module, stmt)}if torch.distributed.get_rank() == 0:"
    return (Change(stmt.lineno, len(block), (head, *(f"    {line}" for line in block))),)


def of_several_lines(node: ast.AST) -> bool:
    """Check whether an indent would change the text of a string."""
    return isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno


def source_of(module: Module, node: ast.expr) -> str:
    """Return the source text of an expression on one line."""
    line = module.source.lines[node.lineno - 1].encode()
    return line[node.col_offset : node.end_col_offset].decode()


def replace_text(module: Module, node: ast.expr, text: str) -> tuple[Change, ...]:
    """Replace the text of an expression on one line."""
    if node.lineno != node.end_lineno:
        return ()
    line = module.source.lines[node.lineno - 1].encode()
    after = line[: node.col_offset] + text.encode() + line[node.end_col_offset :]
    return (Change(node.lineno, 1, (after.decode(),)),)
