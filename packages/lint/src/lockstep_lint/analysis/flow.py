"""Follow a function's arms, loops and exits, and find the ways that come to a name without a value for it."""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep_lint.analysis.budget import WORK, kept
from lockstep_lint.analysis.calls import Calls
from lockstep_lint.analysis.context import above
from lockstep_lint.analysis.index import DEFINITIONS, IMPORTS, Module, Scope
from lockstep_lint.analysis.nodes import dotted, is_none, last, own_expressions, walk

__all__ = ["Fact", "Read", "Way", "gaps", "hears", "may_be_none", "nones", "readable", "starred", "undecided"]


class Fact(NamedTuple):
    """A test on a way: the text `key` of it has come out `when`, and its `node` as it `holds` (`x is not None`).

    `arms` says that both outcomes have statements of their own, `cause` that the other one gives the name its value.
    """

    key: str
    when: bool
    node: ast.expr | None
    scope: Scope
    holds: bool = True
    arms: bool = False
    cause: bool = False


# The tests on a way through a function, from its start to a place.
Way = tuple[Fact, ...]
# For each name the ways that have not given it a value; under "" the ways that come to the place. None: no way comes.
State = dict[str, tuple[Way, ...]] | None


@dataclass(eq=False, slots=True)
class Read:
    """A read of a name that some ways come to without a value; `never` says that no way has given it one."""

    node: ast.expr
    stmt: ast.stmt
    name: str
    ways: tuple[Way, ...]
    never: bool


# More ways than this are not told apart.
MAX_WAYS = 10
MAX_DEPTH = 60
ENDS = ("exit", "_exit", "quit", "abort", "error", "fail", "skip")
# A handler of these would hear that a name has no value.
HEARS = ("NameError", "UnboundLocalError", "Exception", "BaseException", "AttributeError", "TypeError")
LEAVES = (ast.Return, ast.Raise, ast.Break, ast.Continue, ast.Assert, ast.Match, *IMPORTS)
DEFINING = (*IMPORTS, *DEFINITIONS)
GIVING = (ast.Assign, ast.With)
SCOPED = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


@kept
def gaps(scope: Scope, calls: Calls) -> tuple[Read, ...]:
    """Return the reads of a function's own names that some ways come to without a value."""
    if not readable(scope):
        return ()
    given, places = givers(scope), scope.module.places.get(scope, {})
    own = [name for name in own_names(scope, given) if name in places]
    names = frozenset(name for name in own if doubtful(name, given[name], places[name], scope))
    return tuple(_Flow(scope, names, calls).run(dict.fromkeys(names, ((),)))) if names else ()


def nones(scope: Scope, names: frozenset[str], calls: Calls, given: dict[str, tuple[Way, ...]]) -> tuple[Read, ...]:
    """The uses of some names of a function, as an object or a table, where some ways have left them None; `given` are
    the ways on which parameters are None.
    """
    names = names.union(given)
    if not names or not readable(scope):
        return ()
    return tuple(_Flow(scope, names, calls, empty=True).run({name: given.get(name, ()) for name in names}))


def may_be_none(value: ast.expr) -> bool:
    """Check whether a value is None, or is where a test comes out so."""
    return is_none(value) or (isinstance(value, ast.IfExp) and (is_none(value.body) or is_none(value.orelse)))


@kept
def readable(scope: Scope) -> bool:
    """Check whether a function's names are those that its text shows."""
    module = scope.module
    tricks = any(module.words[word] for word in ("exec", "locals", "globals", "dbutils")) or "vars()" in module.bare
    return scope.kind != "class" and not tricks


def givers(scope: Scope) -> dict[str, list[ast.stmt]]:
    """Return the statements by which a function, or a file's own lines, give a value to a name, by the names."""
    found = {name: [bind.stmt for bind in binds] for name, binds in scope.binds.items() if "." not in name}
    for stmt in (stmt for stmt in scope.stmts if isinstance(stmt, DEFINING)):
        if isinstance(stmt, IMPORTS):
            for alias in stmt.names:
                found.setdefault(alias.asname or alias.name.partition(".")[0], []).append(stmt)
        else:
            found.setdefault(stmt.name, []).append(stmt)
    return found


def own_names(scope: Scope, given: Iterable[str]) -> set[str]:
    """Return the names among these that are a function's own, or a file's, and that no other function sets."""
    elsewhere = (other.globals for other in declaring(scope.module) if other is not scope)
    return set(given).difference(scope.params, scope.globals, starred(scope), *elsewhere)


@kept
def declaring(module: Module) -> tuple[Scope, ...]:
    """Return the functions of a file that say `global` or `nonlocal`."""
    return tuple(scope for scope in module.scopes if scope.globals)


def starred(scope: Scope) -> list[str]:
    """Return the names of `*args` and `**kwargs`."""
    args = getattr(scope.node, "args", None)
    return [each.arg for each in (args.vararg, args.kwarg) if each is not None] if args is not None else []


def doubtful(name: str, given: list[ast.stmt], places: list[ast.stmt], scope: Scope) -> bool:
    """Whether a name is read where no value stands before in the same block, or in one around it: given the statements
    that give it one, and all that name it.
    """
    if begins(given, places, scope):
        return False
    up = scope.module.up
    first: dict[object, int] = {}
    for stmt in given:
        blocks: list[object] = [up.get(stmt)]
        if isinstance(stmt, ast.For | ast.AsyncFor | ast.With | ast.AsyncWith):
            blocks = [(stmt, "body"), *(blocks if not isinstance(stmt, ast.For | ast.AsyncFor) else ())]
        for block in blocks:
            first[block] = min(stmt.lineno, first.get(block, stmt.lineno))
    for stmt in places:
        if not (stmt in given and isinstance(stmt, ast.For | ast.AsyncFor)):
            block = up.get(stmt)
            while first.get(block, stmt.lineno) >= stmt.lineno and block is not None:
                block = up.get(block[0])
            if first.get(block, stmt.lineno) >= stmt.lineno and not only_given(name, stmt):
                return True
    return False


def begins(given: list[ast.stmt], places: list[ast.stmt], scope: Scope) -> bool:
    """Whether a name plainly gets its value first: in the block, or from the loop, that all its places are in. As it is
    so for most names, their places need not be looked at one by one.
    """
    first = min(given, key=lambda stmt: stmt.lineno) if len(given) > 1 else given[0]
    if isinstance(first, DEFINING):
        return first not in scope.module.up and first.lineno < places[0].lineno
    if first is not places[0] or (len(places) > 1 and places[1].lineno <= first.lineno):
        return False  # it may be read before, or in the statement itself
    if isinstance(first, ast.For):
        return not first.orelse and places[-1].lineno <= (first.end_lineno or 0)
    outer, where = scope.module.up.get(first, (scope.node, "body"))
    block = getattr(outer, where, [])
    ends = block[-1] if block else None
    return isinstance(first, GIVING) and isinstance(ends, ast.stmt) and places[-1].lineno <= (ends.end_lineno or 0)


def only_given(name: str, stmt: ast.stmt) -> bool:
    """Check whether a statement gives a name a value, and does not read it."""
    if isinstance(stmt, ast.AugAssign):
        return False
    return not any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for part in own_expressions(stmt)
        for node in walk(part)
    )


class _Flow:
    """Runs one function once, for some of its names."""

    def __init__(self, scope: Scope, names: frozenset[str], calls: Calls, *, empty: bool = False) -> None:
        self.scope = scope
        self.names = names
        self.calls = calls
        self.empty = empty
        self.found: list[Read] = []
        self.bound: set[str] = set()
        self.hidden: list[frozenset[str]] = []
        self.loops: list[_Turn] = []
        self.heard = 0
        self.depth = 0
        self.matters = mattering(names, scope) if names else set()
        self.stmt: ast.stmt = ast.Pass()

    def run(self, start: dict[str, tuple[Way, ...]]) -> list[Read]:
        """Return the reads that some ways come to without a value."""
        if self.names:
            self.block(getattr(self.scope.node, "body", []), {"": ((),), **start})
        return self.found

    def block(self, body: list[ast.stmt], state: State) -> State:
        self.depth += 1
        for stmt in body:
            if state is None or self.depth > MAX_DEPTH:
                break
            WORK.spend()
            if stmt in self.matters:
                state = self.statement(stmt, state)
        self.depth -= 1
        return state

    def statement(self, stmt: ast.stmt, state: dict[str, tuple[Way, ...]]) -> State:
        self.stmt = stmt
        handler: Callable[..., State] | None = getattr(self, f"on_{type(stmt).__name__}", None)
        if handler is not None:
            return handler(stmt, state)
        for child in ast.iter_child_nodes(stmt):
            if isinstance(child, ast.expr):
                self.visit(child, state)
        return state

    def on_If(self, stmt: ast.If, state: dict[str, tuple[Way, ...]]) -> State:
        self.visit(stmt.test, state)
        arms = bool(stmt.orelse) and not (len(stmt.orelse) == 1 and isinstance(stmt.orelse[0], ast.If))
        body = self.block(stmt.body, self.assume(state, stmt.test, True, arms))
        orelse = self.block(stmt.orelse, self.assume(state, stmt.test, False, arms))
        return join(blamed(body, orelse, stmt.test, True), blamed(orelse, body, stmt.test, False))

    def on_For(self, stmt: ast.For | ast.AsyncFor, state: dict[str, tuple[Way, ...]]) -> State:
        if self.empty and isinstance(stmt.iter, ast.Name):
            self.read(stmt.iter, state)
        self.visit(stmt.iter, state)
        self.bind(stmt.target, state)
        return self.turns(stmt, state, endless=False)

    on_AsyncFor = on_For

    def on_While(self, stmt: ast.While, state: dict[str, tuple[Way, ...]]) -> State:
        self.visit(stmt.test, state)
        begun = self.assume(state, stmt.test, True, False)
        if begun is None:
            return state
        endless = isinstance(stmt.test, ast.Constant) and bool(stmt.test.value)
        return self.turns(stmt, begun, endless=endless)

    def turns(self, stmt: ast.For | ast.AsyncFor | ast.While, state: State, *, endless: bool) -> State:
        """Run a loop's body once: that it is empty, nothing shows."""
        assert state is not None
        later = frozenset(name for part in stmt.body for node in walk(part) if (name := stored(node)))
        turn = _Turn(later & self.names, state[""])
        self.loops.append(turn)
        end = self.block(stmt.body, state)
        for left in turn.next:
            end = join(end, left)
        self.loops.pop()
        end = None if endless else self.block(stmt.orelse, end)
        for left in turn.left:
            end = join(end, left)
        return end

    def on_Break(self, _: ast.stmt, state: dict[str, tuple[Way, ...]]) -> State:
        if self.loops:
            self.loops[-1].left.append(state)
        return None

    def on_Continue(self, _: ast.stmt, state: dict[str, tuple[Way, ...]]) -> State:
        if self.loops:
            self.loops[-1].next.append(state)
        return None

    def on_Return(self, stmt: ast.Return, state: dict[str, tuple[Way, ...]]) -> State:
        if stmt.value is not None:
            self.visit(stmt.value, state)
        return None

    def on_Raise(self, stmt: ast.Raise, state: dict[str, tuple[Way, ...]]) -> State:
        if stmt.exc is not None:
            self.visit(stmt.exc, state)
        return None

    def on_Expr(self, stmt: ast.Expr, state: dict[str, tuple[Way, ...]]) -> State:
        self.visit(stmt.value, state)
        ends = isinstance(stmt.value, ast.Call) and (
            last(stmt.value) in ENDS or never_returns(self.calls.target(stmt.value, self.scope))
        )
        return None if ends else state

    def on_Assert(self, stmt: ast.Assert, state: dict[str, tuple[Way, ...]]) -> State:
        self.visit(stmt.test, state)
        return self.assume(state, stmt.test, True, False)

    def on_Assign(self, stmt: ast.Assign, state: dict[str, tuple[Way, ...]]) -> State:
        self.visit(stmt.value, state)
        for target in stmt.targets:
            if self.empty and isinstance(target, ast.Tuple | ast.List) and isinstance(stmt.value, ast.Name):
                self.read(stmt.value, state)
            self.bind(target, state, stmt.value)
        return state

    def on_AnnAssign(self, stmt: ast.AnnAssign, state: dict[str, tuple[Way, ...]]) -> State:
        if stmt.value is not None:
            self.visit(stmt.value, state)
            self.bind(stmt.target, state, stmt.value)
        return state

    def on_AugAssign(self, stmt: ast.AugAssign, state: dict[str, tuple[Way, ...]]) -> State:
        self.visit(stmt.value, state)
        if isinstance(stmt.target, ast.Name):
            self.read(stmt.target, state)
        self.bind(stmt.target, state)
        return state

    def on_Delete(self, stmt: ast.Delete, state: dict[str, tuple[Way, ...]]) -> State:
        for target in stmt.targets:
            self.bind(target, state)
        return state

    def on_With(self, stmt: ast.With | ast.AsyncWith, state: dict[str, tuple[Way, ...]]) -> State:
        for item in stmt.items:
            self.visit(item.context_expr, state)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, state)
        swallows = any(last(item.context_expr) in ("suppress", "raises") for item in stmt.items)
        before = {**state}
        end = self.block(stmt.body, state)
        return join(end, self.unknown(before)) if swallows else end

    on_AsyncWith = on_With

    def on_Try(self, stmt: ast.Try, state: dict[str, tuple[Way, ...]]) -> State:
        heard = any(map(hearing, stmt.handlers))
        before = {**state}
        self.heard += heard
        end = self.block(stmt.body, state)
        self.heard -= heard
        ended = self.block(stmt.orelse, {**end} if end is not None else None)
        raised = self.unknown(join(before, end))
        for handler in stmt.handlers:
            inner = {**raised} if raised is not None else None
            if inner is not None and handler.name is not None:
                self.give(handler.name, inner)
            ended = join(ended, self.block(handler.body, inner))
        return self.block(stmt.finalbody, ended)

    on_TryStar = on_Try

    def on_Match(self, stmt: ast.Match, state: dict[str, tuple[Way, ...]]) -> State:
        self.visit(stmt.subject, state)
        end = self.unknown(state)
        for case in stmt.cases:
            inner = self.unknown(state)
            for node in walk(case.pattern):
                name = getattr(node, "name", None)
                if inner is not None and name in self.names:
                    inner = {**inner, name: ()}
            if isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None and case.guard is None:
                end = self.block(case.body, inner) if end is None else join(None, self.block(case.body, inner))
            else:
                end = join(end, self.block(case.body, inner))
        return end

    def on_FunctionDef(self, stmt: ast.FunctionDef | ast.AsyncFunctionDef, state: dict[str, tuple[Way, ...]]) -> State:
        for part in (*stmt.decorator_list, *stmt.args.defaults, *filter(None, stmt.args.kw_defaults)):
            self.visit(part, state)
        self.give(stmt.name, state)
        return state

    on_AsyncFunctionDef = on_FunctionDef

    def on_ClassDef(self, stmt: ast.ClassDef, state: dict[str, tuple[Way, ...]]) -> State:
        for part in (*stmt.decorator_list, *stmt.bases):
            self.visit(part, state)
        self.give(stmt.name, state)
        return state

    def on_Import(self, stmt: ast.Import | ast.ImportFrom, state: dict[str, tuple[Way, ...]]) -> State:
        for alias in stmt.names:
            self.give(alias.asname or alias.name.partition(".")[0], state)
        return state

    on_ImportFrom = on_Import

    def bind(self, target: ast.expr, state: dict[str, tuple[Way, ...]], value: ast.expr | None = None) -> None:
        """Give a target's names a value."""
        plain = isinstance(target, ast.Name)
        for node in walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.visit(node, state)
            elif isinstance(node, ast.Name):
                self.give(node.id, state, value if plain else None)
            elif self.empty and isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.value, ast.Name):
                self.read(node.value, state)

    def give(self, name: str, state: dict[str, tuple[Way, ...]], value: ast.expr | None = None) -> None:
        if name not in self.names:
            return
        self.bound.add(name)
        state[name] = ()
        if not self.empty or value is None:
            return
        if is_none(value):
            state[name] = state[""]
        elif isinstance(value, ast.IfExp) and may_be_none(value):
            when = is_none(value.body)
            side = blamed(self.assume(state, value.test, when, True), {**state, name: ()}, value.test, when, path=True)
            state[name] = side[""] if side is not None else ()

    def visit(self, node: ast.AST, state: State) -> None:
        """Look for reads in an expression, each under the tests before it."""
        if state is None:
            return
        if isinstance(node, ast.BoolOp):
            inner: State = {**state}
            for value in node.values:
                self.visit(value, inner)
                inner = self.assume(inner, value, isinstance(node.op, ast.And), False)
        elif isinstance(node, ast.IfExp):
            self.visit(node.test, state)
            self.visit(node.body, self.assume(state, node.test, True, False))
            self.visit(node.orelse, self.assume(state, node.test, False, False))
        elif isinstance(node, SCOPED):
            self.comprehension(node, state)
        elif isinstance(node, ast.NamedExpr):
            self.visit(node.value, state)
            self.give(node.target.id, state)
        elif not isinstance(node, ast.Lambda):
            used = self.used(node)
            if used is not None:
                self.read(used, state)
            for child in ast.iter_child_nodes(node):
                self.visit(child, state)

    def used(self, node: ast.AST) -> ast.Name | None:
        """Return the name that an expression reads, or uses as an object or a table."""
        if not self.empty:
            return node if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else None
        inner = node.func if isinstance(node, ast.Call) else getattr(node, "value", None)
        uses = isinstance(node, ast.Attribute | ast.Subscript | ast.Call) and isinstance(inner, ast.Name)
        return inner if uses and isinstance(inner, ast.Name) else None

    def comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, state: dict[str, tuple[Way, ...]]
    ) -> None:
        self.visit(node.generators[0].iter, state)
        own = (each for part in node.generators for each in walk(part.target))
        self.hidden.append(frozenset(each.id for each in own if isinstance(each, ast.Name)))
        inner: State = {**state}
        for place, part in enumerate(node.generators):
            if place:
                self.visit(part.iter, inner)
            for test in part.ifs:
                self.visit(test, inner)
                inner = self.assume(inner, test, True, False)
        for result in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            self.visit(result, inner)
        self.hidden.pop()

    def read(self, node: ast.Name, state: dict[str, tuple[Way, ...]]) -> None:
        """Note a read that some ways come to without a value; whoever goes on after it has one."""
        ways = state.get(node.id, ())
        if not ways or self.heard or any(node.id in names for names in self.hidden):
            return
        again = [turn for turn in self.loops if node.id in turn.later]
        never = node.id not in self.bound and all(turn.begun == state[""] for turn in again)
        self.found.append(Read(node, self.stmt, node.id, ways, never))
        state[node.id] = ()

    def assume(self, state: State, test: ast.expr, when: bool, arms: bool) -> State:
        """Return what holds where a test has come out `when`; None where no way comes there."""
        if state is None:
            return None
        if isinstance(test, ast.Constant) and bool(test.value) is not when:
            return None
        facts = [Fact(*key, node, self.scope, holds, arms) for node, holds, key in parts(test, when)]
        found = {name: tuple(extended(ways, facts)) for name, ways in state.items()}
        for name in self.names if self.empty else ():
            if any((fact.key, fact.when) in ((name, True), (f"{name} is None", False)) for fact in facts):
                found[name] = ()
            if any(isinstance(fact.node, ast.Call) and last(fact.node) == "isinstance" for fact in facts):
                found[name] = ()
        if not found[""]:
            return None
        return {name: capped(name, ways) for name, ways in found.items()}

    def unknown(self, state: State) -> State:
        """Return the same where something that no test shows has decided the way."""
        if state is None:
            return None
        fact = Fact("", True, None, self.scope)
        return {name: tuple(way if fact in way else (*way, fact) for way in ways) for name, ways in state.items()}


def mattering(names: frozenset[str], scope: Scope) -> set[ast.stmt]:
    """Return the statements that name one of some names or may leave, and those around them."""
    found: set[ast.stmt] = set()
    places = scope.module.places.get(scope, {})
    queue = [stmt for name in names for stmt in places.get(name, ())]
    queue += [bind.stmt for name in names for bind in scope.binds.get(name, ())]
    queue += [stmt for stmt in scope.stmts if isinstance(stmt, LEAVES) or may_end(stmt)]
    queue += [stmt for stmt in scope.stmts if isinstance(stmt, DEFINITIONS) and stmt.name in names]
    for stmt in queue:
        current: ast.stmt | None = stmt
        while current is not None and current not in found:
            found.add(current)
            current = scope.module.up.get(current, (None, ""))[0]
    return found


def may_end(stmt: ast.stmt) -> bool:
    """Check whether a statement is a call that may end the program: by its name, or of a function of the project."""
    call = stmt.value if isinstance(stmt, ast.Expr) else None
    return isinstance(call, ast.Call) and (isinstance(call.func, ast.Name) or last(call) in ENDS)


@dataclass(eq=False, slots=True)
class _Turn:
    """A loop that is being run: the names that it binds, the ways that come to it, and those that leave a turn."""

    later: frozenset[str]
    begun: tuple[Way, ...]
    left: list[State] = field(default_factory=list)
    next: list[State] = field(default_factory=list)


def stored(node: ast.AST) -> str:
    """Return the name that is given a value, or ""."""
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


def caught_by(handler: ast.ExceptHandler) -> list[ast.expr]:
    """Return the exceptions that a handler names."""
    if handler.type is None:
        return []
    return handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]


@kept
def never_returns(function: Scope | None) -> bool:
    """Check whether a function of the project ends in an exception or the end of the program."""
    if function is None or not isinstance(function.node, ast.FunctionDef) or function.name == "__init__":
        return False
    end = function.node.body[-1]
    leaves = isinstance(end, ast.Expr) and isinstance(end.value, ast.Call) and last(end.value) in ENDS
    return (leaves or isinstance(end, ast.Raise)) and not any(isinstance(s, ast.Return) for s in function.stmts)


def parts(test: ast.expr, when: bool) -> Iterator[tuple[ast.expr, bool, tuple[str, bool]]]:
    """Yield the tests that one which has come out `when` is made of: each with its outcome, and a key for its text."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, when = test.operand, not when
    if isinstance(test, ast.NamedExpr):
        test = test.value
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is when:
        for value in test.values:
            yield from parts(value, when)
    else:
        yield test, when, keyed(test, when)


def keyed(test: ast.expr, when: bool) -> tuple[str, bool]:
    """A text for a test that is the same for `x is None` and `x is not None`, and how it has come out."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        for op, sign in ((ast.IsNot, "is"), (ast.NotEq, "=="), (ast.NotIn, "in")):
            if isinstance(test.ops[0], op):
                left, right = written(test.left), written(test.comparators[0])
                return f"{left} {sign} {right}", not when
            if isinstance(test.ops[0], ast.Eq) and is_none(test.comparators[0]):
                return f"{written(test.left)} is None", when
    return written(test), when


@kept
def written(node: ast.expr) -> str:
    """Return the text of an expression."""
    return dotted(node) or ast.unparse(node)


def extended(ways: Iterable[Way], facts: list[Fact]) -> Iterator[Way]:
    """Yield the ways on which some tests come out so, too."""
    for way in ways:
        if not any(contradicts(old, new) for old in way for new in facts):
            known = {fact[:2] for fact in way}
            found = (*way, *(fact for fact in facts if fact[:2] not in known))
            if all(undecided(fact, found) for fact in found if isinstance(fact.node, ast.BoolOp)):
                yield found


def undecided(fact: Fact, way: Way) -> list[ast.expr]:
    """The parts of `not (a and b)`, or of `a or b`, that the other tests of a way leave open: one of them decides."""
    assert isinstance(fact.node, ast.BoolOp)
    known = {other[:2] for other in way}
    parted = [(value, [key for *_, key in parts(value, not fact.when)]) for value in fact.node.values]
    return [value for value, keys in parted if not known.issuperset(keys)]


def contradicts(one: Fact, other: Fact) -> bool:
    """Check whether two tests cannot have come out so on one way."""
    if one.key == other.key:
        return one.when is not other.when
    if one.when and other.when:
        left, _, first = one.key.rpartition(" == ")
        right, _, second = other.key.rpartition(" == ")
        if left and left == right and first != second:
            return True
    for empty, full in ((one, other), (other, one)):
        if empty.key == f"{full.key} is None" and empty.when and full.when:
            return True
    return False


def join(one: State, other: State) -> State:
    """Return what holds where two ways meet."""
    if one is None or other is None:
        return one if other is None else other
    return {name: capped(name, merged(one[name], other[name])) for name in one}


def blamed(state: State, other: State, test: ast.expr, when: bool, *, path: bool = False) -> State:
    """The ways through one arm of a test, where those to a name without a value have the test for their cause if the
    other arm gives it one.
    """
    if state is None or other is None:
        return state
    keys = {key for *_, key in parts(test, when)}
    found = {**state}
    for name, ways in state.items():
        if ways and ((name and not other[name]) or (path and not name)):
            found[name] = tuple(
                tuple(fact._replace(cause=True) if fact[:2] in keys else fact for fact in way) for way in ways
            )
    return found


def merged(one: tuple[Way, ...], other: tuple[Way, ...]) -> tuple[Way, ...]:
    """Return the ways of two sets; two that differ by the outcome of one test are one way."""
    if one == other:
        return one
    found = [*one]
    for way in other:
        add(way, found)
    return tuple(found)


def add(way: Way, found: list[Way]) -> None:
    keys = {fact[:2] for fact in way}
    for old in found:
        known = {fact[:2] for fact in old}
        if known <= keys:
            return
        ours, theirs = keys - known, known - keys
        if len(ours) == len(theirs) == 1 and next(iter(ours))[0] == next(iter(theirs))[0]:
            found.remove(old)
            add(tuple(fact for fact in way if fact[:2] in known), found)
            return
    found[:] = [old for old in found if not keys <= {fact[:2] for fact in old}]
    found.append(way)


def capped(name: str, ways: tuple[Way, ...]) -> tuple[Way, ...]:
    """At most so many ways: more are forgotten, or one way of which nothing is known."""
    if len(ways) <= MAX_WAYS:
        return ways
    return () if name else ((),)


def hears(stmt: ast.stmt, scope: Scope) -> bool:
    """Check whether a handler around a statement may be there for a name or an attribute that is missing."""
    for node, place in above(stmt, scope.module):
        if isinstance(node, ast.Try) and place == "body" and any(map(hearing, node.handlers)):
            return True
    return False


def hearing(handler: ast.ExceptHandler) -> bool:
    """Check whether a handler hears of a name that has no value."""
    return handler.type is None or any(last(part) in HEARS for part in caught_by(handler))
