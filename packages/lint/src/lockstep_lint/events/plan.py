"""Reduce a function to its plan: `continue` and `return` become arms of tests.

`if last: continue` before other statements, and `if not last:` around them, give the same plan.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lockstep_lint.analysis.context import Loop
from lockstep_lint.analysis.index import DEFINITIONS, Scope, Site
from lockstep_lint.analysis.nodes import idents
from lockstep_lint.events.event import Mark

__all__ = ["Branch", "Do", "Plan", "Repeat", "Step", "With", "plan"]

# Early exits, and blocks, nested deeper than this are generated code.
MAX_EXITS = 25
MAX_DEPTH = 60
# Kinds of marks that alone are no reason to enter a function.
QUIET = ("sync", "keep", "batch", "place", "leave")
# Statements that may be events by themselves.
MARKED = (ast.Assign, ast.AugAssign, ast.If, ast.While, ast.Assert, ast.Break, ast.Return)
# Most of all statements.
SIMPLE = (ast.Expr, ast.Assign, ast.Return)
ENDS = ("exit", "_exit", "quit", "abort")


@dataclass(eq=False, slots=True)
class Do:
    """The mark of a call or an assignment, and the project's functions that it runs."""

    site: Site | None
    marks: tuple[Mark, ...]
    functions: tuple[Scope, ...]


@dataclass(eq=False, slots=True)
class Branch:
    """A test and its two arms. `leaves`: one of them leaves the loop or function."""

    test: ast.expr
    body: list["Step"]
    orelse: list["Step"]
    leaves: bool = False


@dataclass(eq=False, slots=True)
class Repeat:
    """A loop, or a comprehension."""

    node: ast.For | ast.AsyncFor | ast.While | ast.comprehension
    body: list["Step"]


@dataclass(eq=False, slots=True)
class With:
    """The contexts of a `with`, and what happens in them."""

    contexts: list[ast.expr]
    body: list["Step"]


@dataclass(eq=False, slots=True)
class Try:
    """A handler of an exception."""

    body: list["Step"]


Step = Do | Branch | Repeat | With | Try


@dataclass(eq=False, slots=True)
class Plan:
    """A function's steps, the functions that they run, and whether any is an event."""

    scope: Scope
    steps: list[Step] = field(default_factory=list)
    functions: dict[Scope, None] = field(default_factory=dict)
    marked: bool = False


# A way out of a block: what it leaves, and the tests that must have come out so.
Exit = tuple[str, tuple[tuple[ast.expr, bool], ...]]
Reader = Callable[[Site], tuple[tuple[Mark, ...], tuple[Scope, ...]]]
Assigned = Callable[[ast.stmt, Scope], tuple[Mark, ...]]


def plan(scope: Scope, reader: Reader, assigned: Assigned) -> Plan:
    """Return the plan of a function, a class's body, or a file's own lines."""
    return _Planner(scope, reader, assigned).result


class _Planner:
    """Makes the plan of one scope."""

    def __init__(self, scope: Scope, reader: Reader, assigned: Assigned) -> None:
        self.scope = scope
        self.result = Plan(scope)
        self.does: dict[ast.Call, Do] = {}
        # The calls that are events or run functions, by the expressions of statements that they stand in.
        self.inside: dict[ast.expr, list[ast.Call]] = {}
        self.roots: dict[ast.stmt, dict[ast.expr, None]] = {}
        for site in scope.sites:
            marks, functions = reader(site)
            if marks or functions:
                self.does[site.call] = Do(site, marks, functions)
                self.inside.setdefault(site.root, []).append(site.call)
                self.roots.setdefault(site.stmt, {})[site.root] = None
                self.result.functions.update(dict.fromkeys(functions))
        marked = (stmt for stmt in scope.stmts if isinstance(stmt, MARKED))
        self.assigned = {stmt: marks for stmt in marked if (marks := assigned(stmt, scope))}
        if self.does or self.assigned:
            self.result.steps, _ = self.block(getattr(scope.node, "body", []), 0)
        found = (*(do.marks for do in self.does.values()), *self.assigned.values())
        self.result.marked = any(is_loud(mark) for marks in found for mark in marks)

    def block(self, body: list[ast.stmt], depth: int) -> tuple[list[Step], list[Exit]]:
        """Return the steps and exits of a block. Code after an exit becomes its test's other arm."""
        steps: list[Step] = []
        exits: list[Exit] = []
        if depth > MAX_DEPTH:
            return steps, exits
        for place, stmt in enumerate(body):
            if stmt.__class__ is ast.Assign and stmt not in self.roots and stmt not in self.assigned:
                continue  # as most statements are
            found, ways = self.statement(stmt, depth)
            steps += found
            if not ways:
                continue
            exits += ways
            if any(not tests for _, tests in ways):
                break  # what follows is never run
            if depth < MAX_EXITS and place + 1 < len(body):
                rest, more = self.block(body[place + 1 :], depth + 1)
                for _, tests in reversed(ways):
                    rest, more = self.otherwise(steps, tests, rest, more)
                return steps + rest, exits + more
        return steps, exits

    def otherwise(
        self, steps: list[Step], tests: tuple[tuple[ast.expr, bool], ...], rest: list[Step], more: list[Exit]
    ) -> tuple[list[Step], list[Exit]]:
        """Return the rest of a block, where a way out before it was not taken."""
        test, when = join_tests(tests)
        more = [(what, ((test, not when), *conditions)) for what, conditions in more]
        last = steps[-1] if steps else None
        if isinstance(last, Branch) and last.test is test:
            arm = last.orelse if when else last.body
            arm += rest
            last.leaves = True
            return [], more
        branch = Branch(test, [], [], leaves=True)
        (branch.orelse if when else branch.body).extend(rest)
        return ([branch] if rest else []), more

    def statement(self, stmt: ast.stmt, depth: int) -> tuple[list[Step], list[Exit]]:
        """Return the steps of a statement, and the ways out that it has."""
        if isinstance(stmt, SIMPLE):
            return self.simple(stmt)
        if isinstance(stmt, ast.If):
            return self.choice(stmt, depth)
        if isinstance(stmt, Loop):
            return self.loop(stmt, depth)
        if isinstance(stmt, (ast.With, ast.AsyncWith)):
            head = [step for item in stmt.items for step in self.expression(item.context_expr)]
            body, exits = self.block(stmt.body, depth)
            held: list[Step] = [With([item.context_expr for item in stmt.items], body)] if body else []
            return [*head, *held], exits
        if isinstance(stmt, ast.Try):
            return self.attempt(stmt, depth)
        if isinstance(stmt, ast.Match):
            return self.cases(stmt, depth)
        if isinstance(stmt, DEFINITIONS):
            return [], []
        return self.simple(stmt)

    def simple(self, stmt: ast.stmt) -> tuple[list[Step], list[Exit]]:
        steps: list[Step] = []
        for root in self.roots.get(stmt, ()):
            if not isinstance(getattr(root, "ctx", None), ast.Store):
                steps += self.expression(root)
        steps += self.own(stmt)
        if isinstance(stmt, ast.Expr):
            call = stmt.value if isinstance(stmt.value, ast.Call) else None
        elif isinstance(stmt, (ast.Return, ast.Raise)):
            return steps, [("function", ())]
        elif isinstance(stmt, (ast.Continue, ast.Break)):
            return steps, [("loop", ())]
        else:
            return steps, []
        if call is not None and name_of(call) in ENDS:
            return steps, [("function", ())]
        return steps, []

    def own(self, stmt: ast.stmt) -> list[Step]:
        """Return the events that a statement is by itself."""
        return [Do(None, self.assigned[stmt], ())] if stmt in self.assigned else []

    def choice(self, stmt: ast.If, depth: int) -> tuple[list[Step], list[Exit]]:
        head = self.expression(stmt.test) + self.own(stmt)
        body, left = self.block(stmt.body, depth + 1)
        orelse, other = self.block(stmt.orelse, depth + 1)
        exits = [(what, ((stmt.test, True), *tests)) for what, tests in left]
        exits += [(what, ((stmt.test, False), *tests)) for what, tests in other]
        if any(not tests for _, tests in left) and any(not tests for _, tests in other):
            exits.append((left[-1][0], ()))  # both arms leave
        if not body and not orelse and not exits:
            return head, []
        return [*head, Branch(stmt.test, body, orelse)], exits

    def loop(self, stmt: Loop, depth: int) -> tuple[list[Step], list[Exit]]:
        header = stmt.test if isinstance(stmt, ast.While) else stmt.iter
        head = self.expression(header) + self.own(stmt)
        body, _ = self.block(stmt.body, depth)  # a way out of the function says little of what follows the loop
        orelse, _ = self.block(stmt.orelse, depth)
        if isinstance(stmt, ast.While):  # asked in every turn
            return ([Repeat(stmt, [*head, *body])] if head or body else []) + orelse, []
        return head + ([Repeat(stmt, body)] if body else []) + orelse, []

    def attempt(self, stmt: ast.Try, depth: int) -> tuple[list[Step], list[Exit]]:
        steps, exits = self.block(stmt.body, depth)
        for handler in stmt.handlers:
            held, _ = self.block(handler.body, depth)
            steps += [Try(held)] if held else []
        for block in (stmt.orelse, stmt.finalbody):
            more, ways = self.block(block, depth)
            steps += more
            exits += ways
        return steps, [way for way in exits if way[1] or not stmt.handlers]

    def cases(self, stmt: ast.Match, depth: int) -> tuple[list[Step], list[Exit]]:
        steps = self.expression(stmt.subject)
        for case in stmt.cases:
            body, _ = self.block(case.body, depth)
            value = case.pattern.value if isinstance(case.pattern, ast.MatchValue) else ast.Name("_", ast.Load())
            test = ast.copy_location(ast.Compare(stmt.subject, [ast.Eq()], [value]), stmt.subject)
            steps += [Branch(test, body, [])] if body else []
        return steps, []

    def expression(self, root: ast.expr) -> list[Step]:
        """Return the steps of a statement's expression, in evaluation order."""
        if root not in self.inside:
            return []
        if root in self.scope.module.forked:
            return self.parts(root)
        return [self.does[call] for call in sorted(self.inside[root], key=end)]

    def parts(self, node: ast.AST) -> list[Step]:
        if isinstance(node, ast.Lambda):
            return []
        if isinstance(node, ast.BoolOp):
            return self.operands(node.values, isinstance(node.op, ast.And))
        if isinstance(node, ast.IfExp):
            body, orelse = self.parts(node.body), self.parts(node.orelse)
            return self.parts(node.test) + ([Branch(node.test, body, orelse)] if body or orelse else [])
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            inner = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return self.comprehension(node.generators, [step for part in inner for step in self.parts(part)])
        steps = [step for child in ast.iter_child_nodes(node) for step in self.parts(child)]
        if isinstance(node, ast.Call) and node in self.does:
            steps.append(self.does[node])
        return steps

    def operands(self, values: list[ast.expr], all_hold: bool) -> list[Step]:
        head = self.parts(values[0])
        rest = self.operands(values[1:], all_hold) if len(values) > 1 else []
        if not rest:
            return head
        return [*head, Branch(values[0], rest if all_hold else [], [] if all_hold else rest)]

    def comprehension(self, generators: list[ast.comprehension], inner: list[Step]) -> list[Step]:
        for part in reversed(generators):
            for test in reversed(part.ifs):
                inner = [*self.parts(test), Branch(test, inner, [])] if inner else self.parts(test)
            inner = self.parts(part.iter) + ([Repeat(part, inner)] if inner else [])
        return inner


def is_loud(mark: Mark) -> bool:
    """Check whether a mark is a reason to enter its function. Reads count for arguments only."""
    if mark.kind not in QUIET or mark.scope.name == "training_step" or mark.detail == "test":
        return True
    given = set(mark.scope.params) - {"self", "cls"}
    return mark.subject is not None and not given.isdisjoint(idents(mark.subject))


def join_tests(tests: tuple[tuple[ast.expr, bool], ...]) -> tuple[ast.expr, bool]:
    """Join tests and their outcomes into one test by `and`."""
    if len(tests) == 1:
        return tests[0]
    values = [test if when else ast.copy_location(ast.UnaryOp(ast.Not(), test), test) for test, when in tests]
    return ast.copy_location(ast.BoolOp(ast.And(), values), tests[0][0]), True


def end(call: ast.Call) -> tuple[int, int]:
    """Return the end of a call in the file: inner calls end, and run, first."""
    return call.end_lineno or 0, call.end_col_offset or 0


def name_of(call: ast.Call) -> str:
    """Return the last part of the called name."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def below(start: Plan, of: Callable[[Scope], Plan], limit: int) -> Iterator[Plan]:
    """Yield a plan, and the plans of all functions that it runs."""
    seen = {start.scope}
    queue = [start]
    while queue and len(seen) < limit:
        current = queue.pop()
        yield current
        for function in current.functions:
            if function not in seen:
                seen.add(function)
                queue.append(of(function))
