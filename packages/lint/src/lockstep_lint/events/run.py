"""Simulate a program from an entry through the project's functions, event by event."""

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from lockstep_lint.analysis.budget import WORK, cache_answers
from lockstep_lint.analysis.calls import find_argument
from lockstep_lint.analysis.context import above
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import constant, dotted
from lockstep_lint.analysis.origins import OBJECT, Known, default, outcome
from lockstep_lint.analysis.project import unit_test
from lockstep_lint.analysis.view import Analysis, View
from lockstep_lint.events.event import ArmBlock, Block, CallBlock, Event, HandlerBlock, LoopBlock, Mark, WithBlock
from lockstep_lint.events.marks import Marks
from lockstep_lint.events.plan import Branch, Do, Plan, Repeat, Step, With, below, plan

__all__ = ["Reader", "Run", "literals", "runs"]

# How deep functions are entered, and how much of a program is run.
MAX_CALLS = 7
MAX_PATH = 160
MAX_EVENTS = 3000
MAX_ENTERED = 1500
MAX_BELOW = 150
# The programs that a file is part of, and its own functions that none of them runs.
MAX_PROGRAMS = 5
MAX_LONE = 60


@dataclass(eq=False)
class Run:
    """The events of a program from its entry: a file or an uncalled function."""

    entry: Scope
    events: list[Event] = field(default_factory=list)
    entered: set[Scope] = field(default_factory=set)
    by_kind: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds, in order."""
        if len(kinds) == 1:
            return self.by_kind.get(kinds[0], [])
        there = [self.by_kind[kind] for kind in kinds if kind in self.by_kind]
        if len(there) < 2:
            return there[0] if there else []
        return sorted((event for found in there for event in found), key=place)


def place(event: Event) -> int:
    """Return the number of an event in its run."""
    return event.place


def runs(view: View) -> tuple[Run, ...]:
    """Return the runs of a file: its programs, and functions that no program runs."""
    return _programs(view.analysis).of(view.module)


class Reader(Protocol):
    """Says which events calls and statements are, and which functions a call runs."""

    def of(self, site: Site) -> tuple[tuple[Mark, ...], tuple[Scope, ...]]:
        """Return the marks of a call, and the project's functions that it runs."""

    def assigned(self, stmt: ast.stmt, scope: Scope) -> tuple[Mark, ...]:
        """Return the marks of a statement."""


@cache_answers
def _programs(analysis: Analysis) -> "_Programs":
    return _Programs(analysis, Marks(analysis))


class _Programs:
    """Makes the plans and runs of a project once."""

    def __init__(self, analysis: Analysis, marks: Reader) -> None:
        self.calls = analysis.calls
        self.project = analysis.project
        self.marks = marks
        self.plans: dict[Scope, Plan] = {}
        self.loudness: dict[Scope, bool] = {}
        self.made: dict[Scope, Run] = {}

    @cache_answers
    def of(self, module: Module) -> tuple[Run, ...]:
        """Return the runs that may have events in a file."""
        found = [self.run(top) for top in self.tops(module)]
        entered = {scope for run in found for scope in run.entered}
        lone = [s for s in module.scopes if s.kind == "function" and s not in entered and self.loud(s)][:MAX_LONE]
        for scope in sorted(lone, key=lambda each: bool(self.calls.callers(each))):  # what nobody calls comes first
            if scope not in entered:
                found.append(self.run(scope))
                entered |= found[-1].entered
        return tuple(run for run in found if run.events)

    def tops(self, module: Module) -> list[Scope]:
        """Return the programs of a file: its own top level, and those of its importers."""
        users = [user for user in self.project.users(module) if user is not module and not unit_test(user)]
        programs = [user for user in users if user.is_script or not self.project.importers(user)]
        return [module.top, *(program.top for program in programs[:MAX_PROGRAMS])]

    def plan(self, scope: Scope) -> Plan:
        """Return the plan of a function."""
        found = self.plans.get(scope)
        if found is None:
            found = self.plans[scope] = plan(scope, self.marks.of, self.marks.assigned)
        return found

    def loud(self, scope: Scope) -> bool:
        """Check whether anything happens when a function runs."""
        found = self.loudness.get(scope)
        if found is None:
            found = any(each.marked for each in below(self.plan(scope), self.plan, MAX_BELOW))
            self.loudness[scope] = found
        return found

    def run(self, entry: Scope) -> Run:
        """Return the run from an entry."""
        found = self.made.get(entry)
        if found is None:
            found = self.made[entry] = _Runner(self, entry).run
        return found


class _Runner:
    """Runs one program."""

    def __init__(self, programs: _Programs, entry: Scope) -> None:
        self.programs = programs
        self.calls = programs.calls
        self.run = Run(entry)
        self.events = self.run.events
        self.left = MAX_ENTERED
        self.run.entered.add(entry)
        blocks = tuple(WithBlock(item, entry) for item in entry.decorators)
        self.steps(programs.plan(entry).steps, blocks, entry, {}, None, (entry,))
        for event in self.events:
            self.run.by_kind[event.kind].append(event)

    def steps(
        self,
        steps: list[Step],
        path: tuple[Block, ...],
        scope: Scope,
        known: Known,
        owner: Scope | None,
        stack: tuple[Scope, ...],
    ) -> None:
        """Run some steps under the blocks of a path."""
        if len(path) > MAX_PATH or len(self.events) > MAX_EVENTS:
            return
        for step in steps:
            if isinstance(step, Do):
                for function in self.chosen(step, owner):
                    self.enter(step, function, path, known, owner, stack)
                for mark in step.marks:
                    self.events.append(Event(mark, path, len(self.events)))
            elif isinstance(step, Branch):
                branch, result = object(), outcome(step.test, known)
                for arm, when in ((step.body, True), (step.orelse, False)):
                    if arm and result is not (not when):
                        test = ArmBlock(*plainly(step.test, when), scope, branch, step.leaves)
                        inner = path if result is when else (*path, test)
                        self.steps(arm, inner, scope, known, owner, stack)
            elif isinstance(step, Repeat):
                loop = LoopBlock(step.node, scope, len(self.events))
                self.steps(step.body, (*path, loop), scope, known, owner, stack)
                loop.end = len(self.events)
            elif isinstance(step, With):
                self.steps(
                    step.body, (*path, *(WithBlock(c, scope) for c in step.contexts)), scope, known, owner, stack
                )
            else:
                self.steps(step.body, (*path, HandlerBlock(scope)), scope, known, owner, stack)

    def enter(
        self,
        step: Do,
        function: Scope,
        path: tuple[Block, ...],
        known: Known,
        owner: Scope | None,
        stack: tuple[Scope, ...],
    ) -> None:
        """Run a function that a call runs."""
        site = step.site
        assert site is not None
        if len(stack) > MAX_CALLS or function in stack or self.left <= 0 or not self.programs.loud(function):
            return
        self.left -= 1
        WORK.spend(5)
        self.run.entered.add(function)
        if not on_self(step):
            owner = self.owner(site.receiver, function, site.scope)
        handed = self.calls.target(site.call, site.scope) is None
        inner = (*path, CallBlock(site, function, handed), *(WithBlock(item, function) for item in function.decorators))
        self.steps(
            self.programs.plan(function).steps,
            inner,
            function,
            literals(site, function, known),
            owner,
            (*stack, function),
        )

    def chosen(self, step: Do, owner: Scope | None) -> tuple[Scope, ...]:
        """Return the functions that a call runs: of several methods, that of the object's class."""
        if step.site is None or len(step.functions) < 2 or not on_self(step):
            return step.functions
        own = self.calls.names.member(owner, step.site.name) if owner is not None else None
        found = own or next(filter(self.programs.loud, step.functions), None)
        return (found,) if found is not None else ()

    def owner(self, receiver: ast.expr | None, method: Scope, scope: Scope) -> Scope | None:
        """Return the class of the object whose method is called."""
        if method.owner is None:
            return None
        known = isinstance(receiver, ast.Name | ast.Attribute | ast.Call)
        found = self.calls.class_of(receiver, scope) if known and receiver is not None else None
        return found if found is not None else method.owner


def on_self(step: Do) -> bool:
    """Check whether a call is of a method of the object itself."""
    return step.site is not None and dotted(step.site.receiver) in ("self", "cls")


def plainly(test: ast.expr, when: bool) -> tuple[ast.expr, bool]:
    """Return a test without `not`, and how it then comes out."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, when = test.operand, not when
    return test, when


def literals(site: Site, function: Scope, known: Known) -> Known:
    """Return the literal values of a function's parameters in a call, as far as known."""
    call, found = site.call, Known()
    for name in function.params:
        if name in function.binds or name in ("self", "cls"):
            continue
        value = find_argument(call, function, name) or default(function, name, call)
        value = find_literal(value, site) or value
        if isinstance(value, ast.Constant) or constant(value) is not None:
            found[name] = constant(value)
        elif (key := dotted(value)) in known:
            found[name] = known[key]
        elif isinstance(value, ast.Call | ast.List | ast.Dict | ast.Tuple):
            found[name] = OBJECT
    for key, binds in function.binds.items():  # `self.kind = kind`
        if key.startswith("self.") and len(binds) == 1 and (source := dotted(binds[0].value)) in found:
            found[key] = found[source]
    return found


def find_literal(value: ast.expr | None, site: Site) -> ast.expr | None:
    """Return the literal that a name in the calling function always has (`args.shared = False`)."""
    key, scope = dotted(value) or "", site.scope
    binds = scope.binds.get(key, []) if key not in scope.params else []
    sole = len(binds) == 1 and binds[0].how == "assign" and not above(binds[0].stmt, scope.module)
    given = binds[0].value if sole and binds[0].stmt.lineno < site.line else None
    return given if isinstance(given, ast.Constant) or constant(given) is not None else None
