"""Draft the fixes of `--unsafe-fixes`, where all names that they need are known."""

import ast

from lockstep_lint.analysis.context import Loop, above, loops
from lockstep_lint.analysis.index import Module, Site
from lockstep_lint.analysis.nodes import REFERENCES, constant, dotted, is_true, keyword, walk
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View
from lockstep_lint.events.steps import Accumulation
from lockstep_lint.finding import Change

__all__ = [
    "end_process_group",
    "epoch_set",
    "guard_save",
    "load_safely",
    "plain_state",
    "sampler_given",
    "synced_last",
    "unscaled",
    "wrapped",
]


def indent(module: Module, stmt: ast.stmt) -> str:
    """Return the white space before a statement."""
    return module.source.lines[stmt.lineno - 1][: stmt.col_offset]


def before(module: Module, stmt: ast.stmt, *lines: str) -> Change:
    """Insert lines before a statement, at its indent."""
    return Change(stmt.lineno, 0, tuple(indent(module, stmt) + line for line in lines))


def replaced(module: Module, stmt: ast.stmt, *lines: str) -> Change:
    """Replace a statement by lines."""
    return Change(
        stmt.lineno,
        (stmt.end_lineno or stmt.lineno) - stmt.lineno + 1,
        tuple(indent(module, stmt) + line for line in lines),
    )


def imports(module: Module, name: str) -> tuple[Change, ...]:
    """Add `import name` above the file's first import, unless it is there."""
    if name in module.imports:
        return ()
    first = next((stmt for stmt in module.top.stmts if isinstance(stmt, ast.Import | ast.ImportFrom)), None)
    future = isinstance(first, ast.ImportFrom) and first.module == "__future__"
    return (
        (Change((first.lineno + 1) if future else first.lineno, 0, (f"import {name}",)),) if first is not None else ()
    )


def epoch_set(view: View, site: Site) -> tuple[Change, ...]:
    """Add `sampler.set_epoch(epoch)` at the head of the epoch's loop."""
    name = next((b.key for b in site.scope.bound(site.stmt) if b.value is site.call), None)
    for training in view.training:
        for loop, scope, _ in view.trainings.epochs(training):
            counter = dotted(loop.target) if isinstance(loop, ast.For) else None
            if name is not None and counter is not None and scope is site.scope and loop.lineno > site.line:
                return (before(view.module, loop.body[0], f"{name}.set_epoch({counter})"),)
    return ()


def sampler_given(view: View, site: Site) -> tuple[Change, ...]:
    """Give a loader a DistributedSampler instead of `shuffle`."""
    data = site.call.args[0] if site.call.args else keyword(site.call, "dataset")
    stmt = site.stmt
    if (
        data is None
        or "torch" not in view.module.imports
        or not isinstance(stmt, ast.Assign)
        or stmt.value is not site.call
    ):
        return ()
    shuffled = keyword(site.call, "shuffle")
    text = ast.unparse(data) if isinstance(data, REFERENCES) else "train_data"
    rest = [ast.unparse(value) for value in site.call.args[1:2]]
    rest += [ast.unparse(item) for item in site.call.keywords if item.arg not in ("shuffle", "dataset")]
    option = "" if is_true(shuffled) else ", shuffle=False"
    lines = [] if text != "train_data" or dotted(data) == text else [f"train_data = {ast.unparse(data)}"]
    given = ", ".join([text, *rest, "sampler=train_sampler"])
    lines += [
        f"train_sampler = torch.utils.data.DistributedSampler({text}{option})",
        f"{ast.unparse(stmt.targets[0])} = {ast.unparse(site.call.func)}({given})",
    ]
    changes = [replaced(view.module, stmt, *lines)]
    for training in view.training if is_true(shuffled) else ():
        for loop, scope, _ in view.trainings.epochs(training):
            counter = dotted(loop.target) if isinstance(loop, ast.For) else None
            if counter is not None and scope is site.scope and len(changes) == 1:
                changes.append(before(view.module, loop.body[0], f"train_sampler.set_epoch({counter})"))
    return tuple(changes)


def synced_last(view: View, found: Accumulation) -> tuple[Change, ...]:
    """Run all micro-batches but the last under `model.no_sync()`."""
    training, module = found.training, view.module
    if (
        found.guard is None
        or not found.guard.when
        or not isinstance(training.loop, Loop)
        or training.backward.scope is not training.scope
        or training.scope.module is not module
    ):
        return ()
    body = training.loop.body
    model = next(
        (dotted(s.call.func) for s in view.trainings.body(training.loop, training.scope) if _runs_model(view, s)), None
    )
    first = next(
        (
            i
            for i, stmt in enumerate(body)
            if model and any(dotted(getattr(n, "func", None)) == model for n in walk(stmt))
        ),
        None,
    )
    end = next((i for i, stmt in enumerate(body) if stmt is training.backward.stmt), None)
    if first is None or end is None or first > end or not known_before(found.guard.test, body[first], training):
        return ()
    block = module.source.lines[body[first].lineno - 1 : (body[end].end_lineno or body[end].lineno)]
    test = ast.unparse(found.guard.test)
    head = f"{indent(module, body[first])}with contextlib.nullcontext() if {test} else {model}.no_sync():"
    change = Change(
        body[first].lineno, len(block), (head, *(f"    {line}" if line.strip() else line for line in block))
    )
    return (*imports(module, "contextlib"), change)


def known_before(test: ast.expr, stmt: ast.stmt, training: Training) -> bool:
    """Check whether a test gives the same earlier in the turn."""
    names = {dotted(node) for node in walk(test) if isinstance(node, REFERENCES)}
    changed = [b for name in names if name for b in training.scope.binds.get(name, []) if b.stmt is not training.loop]
    return all(b.stmt.lineno < training.loop.lineno or b.stmt.lineno < stmt.lineno for b in changed)


def _runs_model(view: View, site: Site) -> bool:
    return (
        isinstance(site.call.func, REFERENCES)
        and not view.full(site)
        and view.kinds.is_model(site.call.func, site.scope)
    )


def unscaled(view: View, site: Site) -> tuple[Change, ...]:
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


def wrapped(view: View) -> tuple[Change, ...]:
    """Wrap the training loop's model in DDP, once it is on its device."""
    for training in view.training:
        scope = training.scope
        model = next((s for s in view.trainings.body(training.loop, scope) if _runs_model(view, s)), None)
        name = dotted(model.call.func) if model is not None else None
        if name is None or "torch" not in view.module.imports:
            continue
        outer: Loop = (loops(training.loop, view.module) or [training.loop])[-1]
        binds = [
            b for b in scope.binds.get(name, []) if b.stmt.lineno < outer.lineno and isinstance(b.stmt, ast.Assign)
        ]
        if not binds:
            continue
        local = next((n for n in ("local_rank", "args.local_rank") if n in scope.params or n in scope.binds), None)
        device = f", device_ids=[{local}]" if local else ""
        last_bind = binds[-1].stmt
        line = f"{indent(view.module, last_bind)}{name} = torch.nn.parallel.DistributedDataParallel({name}{device})"
        return (Change((last_bind.end_lineno or last_bind.lineno) + 1, 0, (line,)),)
    return ()


def _height(stmt: ast.stmt) -> int:
    return (stmt.end_lineno or stmt.lineno) - stmt.lineno + 1


def load_safely(view: View, site: Site) -> tuple[Change, ...]:
    """Give `torch.load` a `map_location`, or `weights_only=True` instead of False."""
    weights = keyword(site.call, "weights_only")
    if weights is not None and constant(weights) is False:
        return respelled(view.module, weights, "True")
    final = (*site.call.args, *(item.value for item in site.call.keywords))[-1:]
    return tuple(
        change
        for value in final
        for change in respelled(view.module, value, f'{source_of(view.module, value)}, map_location="cpu"')
    )


def plain_state(view: View, site: Site) -> tuple[Change, ...]:
    """Write `model.module.state_dict()` instead of the wrapper's, and load it back the same way."""
    model = dotted(site.receiver)
    if model is None or site.receiver is None:
        return ()
    changes = respelled(view.module, site.receiver, f"{model}.module")
    for load in site.scope.named("load_state_dict"):
        if dotted(load.receiver) == model and load.receiver is not None:
            changes += respelled(view.module, load.receiver, f"{model}.module")
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


def end_process_group(view: View, site: Site) -> tuple[Change, ...]:
    """Add `destroy_process_group()` at the one end of the function that starts the program."""
    scope, chain = site.scope, [site]
    while scope.kind == "function" and scope.owner is None:
        callers = view.calls.callers(scope)
        direct = len(callers) == 1 and view.calls.target(callers[0].call, callers[0].scope) is scope
        if not direct or callers[0].module is not view.module or callers[0].scope.kind != "function":
            break
        chain.append(callers[0])
        scope = callers[0].scope
    final = scope.stmts and getattr(scope.node, "body", [None])[-1]
    if scope.kind != "function" or scope.module is not view.module or not isinstance(final, ast.stmt):
        return ()
    returns = [stmt for stmt in scope.stmts if isinstance(stmt, ast.Return)]
    if any(stmt is not final for stmt in returns) or isinstance(final, ast.Raise | ast.While):
        return ()
    package = dotted(site.receiver) or ("torch.distributed" if "torch" in view.module.imports else "")
    if not package or (scope is not site.scope and package.split(".")[0] not in view.module.imports):
        return ()
    call, ahead = f"{package}.destroy_process_group()", indent(view.module, final)
    lines = [ahead + call]
    if any(True for each in chain for _ in above(each.stmt, view.module)):  # where it is started by chance only
        lines = [f"{ahead}if {package}.is_initialized():", f"{ahead}    {call}"]
    end = final.lineno if isinstance(final, ast.Return) else (final.end_lineno or final.lineno) + 1
    return (Change(end, 0, tuple(lines)),)


def source_of(module: Module, node: ast.expr) -> str:
    """Return the source text of an expression on one line."""
    line = module.source.lines[node.lineno - 1].encode()
    return line[node.col_offset : node.end_col_offset].decode()


def respelled(module: Module, node: ast.expr, text: str) -> tuple[Change, ...]:
    """Replace the text of an expression on one line."""
    if node.lineno != node.end_lineno:
        return ()
    line = module.source.lines[node.lineno - 1].encode()
    after = line[: node.col_offset] + text.encode() + line[node.end_col_offset :]
    return (Change(node.lineno, 1, (after.decode(),)),)
