"""Follow what an evaluation adds up over a rank's part of the data to where it is reported or decided by."""

import ast
import re
from collections.abc import Callable, Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import inside
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, last, strings, targets, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.events.evaluation import holds_out, span, trains
from lockstep_lint.events.event import CallBlock, Event, LoopBlock
from lockstep_lint.events.query import given_as
from lockstep_lint.events.run import Run

__all__ = ["Report", "evaluations", "prepared_by", "reported"]

# They give each rank its own part of the loaders that they prepare.
PREPARING = frozenset({"accelerate", "lightning", "lightning_fabric"})
PREPARES = ("prepare", "prepare_data_loader", "setup_dataloaders")
# What shows or keeps a result.
TELLS = Words(r"^(print|info|debug|warning|write|writerow|log|log_metrics|log_dict|log_scalars?|add_scalars?)$")
STOPS = Words(r"early_?stop", re.IGNORECASE)
RANKS = Words(r"rank|process_index|^(local|global)_id$|device")
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Report = tuple[ast.stmt, Scope]
Exchanges = Callable[[Site], bool]


def evaluations(view: View, run: Run) -> Iterator[tuple[Event, LoopBlock]]:
    """Yield the loops of a run that evaluate a model on a loader, each with its first forward."""
    seen: set[LoopBlock] = set()
    for event in run.of("run", "forward"):
        for loop in event.loops[-1:]:
            if loop not in seen and isinstance(loop.node, ast.For) and not trains(span(run, loop)):
                seen.add(loop)
                named = any(isinstance(b, CallBlock) and EVALUATION.search(b.function.name) for b in event.path)
                if named or EVALUATION.search(run.entry.name) or holds_out(view, event, loop):
                    yield event, loop


def over(view: View, event: Event, loop: LoopBlock) -> tuple[ast.expr, Scope]:
    """Return the loader of a loop as the calls on the way to an event pass it."""
    assert isinstance(loop.node, ast.For)
    node = view.kinds.iterated(loop.node.iter, loop.scope)
    given, home = given_as(event, node, loop.scope)
    return (given, home) if given is not None else (node, loop.scope)


def prepared_by(view: View, node: ast.expr, scope: Scope) -> bool:
    """Check whether all ways to a loader lead through a framework that gives each rank its own part."""
    found = [(each.node, each.scope) for each in view.origins.of(view.kinds.iterated(node, scope), scope)]
    return bool(found) and all(divides(view, made, home) for made, home in found)


def divides(view: View, made: ast.expr, scope: Scope) -> bool:
    """Check whether an expression is what a framework gives for a loader."""
    if not view.analysis.named(scope.module) & PREPARING:
        return False
    if isinstance(made, ast.Call):
        return isinstance(made.func, ast.Attribute) and last(made) in PREPARES
    binds = view.origins.binds(dotted(made) or "", scope, made.lineno)
    values = [bind.value for bind, _ in binds]
    return bool(values) and all(isinstance(value, ast.Call) and last(value) in PREPARES for value in values)


class Flow:
    """Follows names from a loop to the statements that report them."""

    def __init__(self, view: View, calls: list[CallBlock], exchanges: Exchanges, depth: int = 2) -> None:
        self.view = view
        self.calls = calls
        self.exchanges = exchanges
        self.depth = depth
        self.exchanged = False
        self.decisions: list[Report] = []
        self.reports: list[Report] = []

    def follow(self, scope: Scope, names: set[str], line: int) -> None:
        """Follow some names in a function from a line on, and what it returns in the function that calls it."""
        for stmt in sorted(scope.stmts, key=lambda each: each.lineno):
            if stmt.lineno <= line or self.exchanged or not names:
                continue
            touched = names & {name for part in parts(stmt) for name in reads(part)}
            if touched:
                self.step(stmt, scope, names, touched)
            else:
                names = names - {bind.key for bind in scope.bound(stmt) if bind.how == "assign"}
            if touched and isinstance(stmt, ast.Return) and self.calls and self.calls[-1].function is scope:
                self.leave(stmt, names)

    def leave(self, stmt: ast.Return, names: set[str]) -> None:
        """Go on where a function was called, with the names that get what it returns."""
        site = self.calls[-1].site
        outer = Flow(self.view, self.calls[:-1], self.exchanges, self.depth)
        call = site.stmt.value if isinstance(site.stmt, ast.Expr) else None
        if isinstance(call, ast.Call) and TELLS.search(last(call)):
            self.reports.append((site.stmt, site.scope))
        bound = {bind.key for bind in site.scope.bound(site.stmt) if self.at(stmt, bind.path, names)}
        outer.follow(site.scope, bound, site.stmt.end_lineno or site.line)
        self.exchanged = self.exchanged or outer.exchanged
        self.decisions += outer.decisions
        self.reports += outer.reports

    def at(self, stmt: ast.Return, path: tuple[int, ...], names: set[str]) -> bool:
        """Check whether the part of a returned tuple that a name gets has one of some names."""
        value = stmt.value
        for step in path:
            value = value.elts[step] if isinstance(value, ast.Tuple) and step < len(value.elts) else value
        return value is not None and bool(names & reads(value))

    def step(self, stmt: ast.stmt, scope: Scope, names: set[str], touched: set[str]) -> None:
        """Look at one statement that reads some of the names."""
        own = [site for site in scope.sites if site.stmt is stmt]
        sites = [site for site in own if touched & reads(site.call)]
        if any(map(self.exchanges, self.view.effects.below(own if not isinstance(stmt, BLOCKS) else sites))):
            self.exchanged = True
        elif self.decides(stmt, touched):
            self.decisions.append((stmt, scope))
        elif self.tells(stmt, touched) or any(self.shows(site, touched) for site in sites):
            self.reports.append((stmt, scope))
        if isinstance(stmt, ast.Assign | ast.AnnAssign | ast.AugAssign):
            names |= {bind.key for bind in scope.bound(stmt)}
            target = stmt.targets[0] if isinstance(stmt, ast.Assign) else stmt.target
            if isinstance(target, ast.Subscript):  # `row["loss"] = loss`
                names.add(dotted(target.value) or "")

    def decides(self, stmt: ast.stmt, touched: set[str]) -> bool:
        """Check whether a statement compares one of some names with another value (`loss < best`)."""
        for node in (node for part in parts(stmt) for node in walk(part)):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.Gt | ast.LtE | ast.GtE):
                sides = (node.left, node.comparators[0])
                if any(touched & reads(side) for side in sides) and all(constant(side) is None for side in sides):
                    return True
            given = node.args if isinstance(node, ast.Call) else []
            if any(touched & reads(value) for value in given) and stops(node):
                return True
        return False

    def tells(self, stmt: ast.stmt, touched: set[str]) -> bool:
        """Check whether a statement reports one of some names, without saying of which rank."""
        for node in (node for part in parts(stmt) for node in walk(part)):
            if isinstance(node, ast.Call) and TELLS.search(last(node)) and touched & reads(node):
                named = any(map(RANKS.search, idents(node))) or any("rank" in text.lower() for text in strings(node))
                return not named
        return False

    def shows(self, site: Site, touched: set[str]) -> bool:
        """Check whether a call hands one of some names to a function of the project that reports it."""
        target = self.view.calls.target(site.call, site.scope)
        if target is None or target.kind != "function" or self.depth == 0:
            return False
        given = ((name, passed(site, target, name)) for name in target.params)
        inner = Flow(self.view, [], self.exchanges, self.depth - 1)
        inner.follow(target, {name for name, value in given if value is not None and touched & reads(value)}, 0)
        return bool(inner.decisions or inner.reports)


def stops(node: ast.AST) -> bool:
    """Check whether a call ends the training or lowers its rate by what it is given."""
    receiver = last(getattr(getattr(node, "func", None), "value", None))
    return STOPS.search(last(node)) or (last(node) == "step" and "sched" in receiver)


def parts(stmt: ast.stmt) -> list[ast.AST]:
    """Return the expressions of a statement, without the statements in it."""
    if isinstance(stmt, BLOCKS):
        return [each for each in ast.iter_child_nodes(stmt) if isinstance(each, ast.expr)]
    return [stmt]


def reads(node: ast.AST) -> set[str]:
    """Return the names and attributes that are read in an expression, without those whose length alone is asked for."""
    found: set[str] = set()
    lengths: set[ast.AST] = set()
    for each in walk(node):
        if isinstance(each, ast.Call) and last(each) == "len":
            lengths |= set(each.args)
        elif isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Load) and each not in lengths:
            found.add(dotted(each) or "")
    return found


@kept
def added(loop: ast.For, scope: Scope) -> frozenset[str]:
    """Return what a loop adds to or fills: sums, lists, and tensors by index."""
    found: set[str | None] = set()
    for stmt in scope.stmts:
        if isinstance(stmt, ast.Assign | ast.AugAssign) and inside(stmt, loop, scope.module):
            target = stmt.targets[0] if isinstance(stmt, ast.Assign) else stmt.target
            holder = dotted(target.value if isinstance(target, ast.Subscript) else target)
            plus = isinstance(stmt, ast.AugAssign) and isinstance(stmt.op, ast.Add)
            again = isinstance(stmt.value, ast.BinOp) and dotted(stmt.value.left) == holder
            if plus or again or isinstance(target, ast.Subscript):
                found.add(holder)
    for site in (*scope.named("append"), *scope.named("extend")):
        if inside(site.stmt, loop, scope.module):
            found.add(dotted(site.receiver))
    own = {name for name, _ in targets(loop.target)}
    bound = {
        key
        for key, binds in scope.binds.items()
        if all(inside(b.stmt, loop, scope.module) and b.how != "aug" for b in binds)
    }
    return frozenset(name for name in found if name is not None and name not in own and name not in bound)


def reported(view: View, event: Event, loop: LoopBlock, wanted: Words, exchanges: Exchanges) -> Report | None:
    """Return the statement that decides by, or else reports, what an evaluation has added up in one process.

    `wanted` says what sums are called; where a call that `exchanges` brings the ranks' parts together, there is none.
    """
    assert isinstance(loop.node, ast.For)
    names = {name for name in added(loop.node, loop.scope) if wanted.search(name.rpartition(".")[2])}
    within = view.effects.block(loop.node, loop.scope)
    if not names or any(map(exchanges, view.effects.below(within))):
        return None
    flow = Flow(view, [block for block in event.path if isinstance(block, CallBlock)], exchanges)
    flow.follow(loop.scope, names, loop.node.end_lineno or loop.node.lineno)
    return next(iter(flow.decisions or flow.reports), None) if not flow.exchanged else None
