"""Tests of the rank, and tests that ask whether there are several processes at all."""

import ast
from collections.abc import Iterable

from lockstep_lint.analysis.calls import Calls, passed
from lockstep_lint.analysis.comparisons import bare, may_be_number
from lockstep_lint.analysis.context import guards
from lockstep_lint.analysis.index import Bind, Scope
from lockstep_lint.analysis.nodes import constant, dotted, is_none, is_true, last
from lockstep_lint.analysis.ranknumbers import RankNumbers, attributes
from lockstep_lint.analysis.rankparts import in_table, in_tuple
from lockstep_lint.analysis.rankwords import (
    COUNT,
    LAUNCHER,
    MAIN,
    MAIN_EXACT,
    MAIN_OF_ARGUMENTS,
    MULTI,
    PACKAGES,
    SINGLE,
    beside_zero,
    counts_batches,
    is_empty,
)
from lockstep_lint.analysis.tracked import RUN, main_has_run

__all__ = ["RankTests"]

MAX_CALLERS = 20
# An attribute that is set at more places than this is no flag.
MAX_BINDS = 20
# What a test that holds on one rank, but not the main one, comes to.
OTHER = -2
# What may be a test of the rank where a name is given its value.
DECIDES = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.Attribute, ast.Call)


class RankTests:
    """Answers which processes a test holds in, by the names in it and the values given to them."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.numbers = RankNumbers(calls)

    def test(self, node: ast.expr, scope: Scope, when: bool = True, depth: int = 0) -> int:
        """1 if a test comes out `when` on the main rank only, -1 if on the others only, OTHER if on one of the others,
        0 if that is not known.
        """
        node = bare(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            if self.numbers.is_rank(node.operand, scope):
                return 1 if when else -1
            return self.test(node.operand, scope, not when, depth)
        if isinstance(node, ast.BoolOp):
            return self.several(node, scope, when, depth)
        sign = 1 if when else -1
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            if is_none(node.comparators[0]) and isinstance(node.ops[0], ast.Is | ast.IsNot):
                there = when if isinstance(node.ops[0], ast.IsNot) else not when
                return 0 if self.numbers.is_rank(node.left, scope) else self.test(node.left, scope, there, depth)
            return sign * self.numbers.compare(node, scope) or (
                OTHER if when and self.numbers.one_rank(node, scope) else 0
            )
        if isinstance(node, ast.IfExp):
            return self.choice(node, scope, when, depth)
        if isinstance(node, ast.Subscript):
            said = constant(node.slice)
            told = isinstance(said, str) and (MAIN.search(said) or said in MAIN_EXACT)
            return sign if told else self.alike(in_table(self.numbers, node, scope), when, depth)
        if not depth and may_be_number(node) and self.numbers.is_rank(node, scope):
            return -sign  # `if rank: return`
        name = last(node).lstrip("_")
        key = dotted(node)
        main = MAIN.search(name) or name in MAIN_EXACT or (key is not None and key.endswith(MAIN_OF_ARGUMENTS))
        if main and not (key is not None and self.always(key, scope)):
            return sign
        if depth >= 3:
            return 0
        function = self.calls.target(node, scope) if isinstance(node, ast.Call) else self.property(key, scope)
        if function is None and key is not None and not isinstance(node, ast.Call):
            return self.named(key, scope, when, depth)
        return self.asked(function, when, depth)

    def property(self, key: str | None, scope: Scope) -> Scope | None:
        """The method that an attribute of `self` asks."""
        head, _, name = (key or "").rpartition(".")
        method = self.calls.names.member(scope.owner, name) if head == "self" and scope.owner is not None else None
        marks = method.decorators if method is not None and method.kind == "function" else []
        return method if any(last(mark) in ("property", "cached_property") for mark in marks) else None

    def asked(self, function: Scope | None, when: bool, depth: int) -> int:
        """A function of the project that tells the rank (`def primary(): return get_rank() == 0`), whatever it says
        where there is one process.
        """
        if function is None:
            return 0
        if when and self.turned_away(function, depth):
            return 1
        values = [value for value in function.returns() if not isinstance(value, ast.Constant)]
        if not values and self.false_on_others(function, depth):
            return 1 if when else -1
        found = {self.test(value, function, when, depth + 1) for value in values}
        return found.pop() if len(found) == 1 else 0

    def turned_away(self, function: Scope, depth: int) -> bool:
        """Whether a function says False to the other ranks before anything else (`if rank != 0: return False`)."""
        first = next((stmt for stmt in function.stmts if isinstance(stmt, ast.Return)), None)
        if first is None or constant(first.value) is not False:
            return False
        tests = list(guards(first, function.module))
        return len(tests) == 1 and self.test(tests[0].test, function, tests[0].when, depth + 1) == -1

    def false_on_others(self, function: Scope, depth: int) -> bool:
        """Whether a function says True or False, and False on the other ranks alone (`if rank > 0: return False`)."""
        says = [stmt for stmt in function.stmts if isinstance(stmt, ast.Return)]
        others = [stmt for stmt in says if constant(stmt.value) is False]
        return (
            0 < len(others) < len(says)
            and all(isinstance(constant(stmt.value), bool) for stmt in says)
            and all(
                any(self.test(g.test, function, g.when, depth + 1) == -1 for g in guards(stmt, function.module))
                for stmt in others
            )
        )

    def always(self, key: str, scope: Scope) -> bool:
        """Whether all that a name of a rank's flag is ever given is True: it tells no rank."""
        own = "." not in key or key.startswith("self.")  # an attribute of another object may be set elsewhere
        binds = self.numbers.bound(key, scope) if own else []
        alike = all(is_true(bind.value) and not any(guards(bind.stmt, home.module)) for bind, home in binds)
        return bool(binds) and alike and not (key.startswith("self.") and self.put_on(key[5:], scope))

    def put_on(self, name: str, scope: Scope) -> bool:
        """Whether the programs set an attribute of this name on an object from outside (`learner.is_main = ...`)."""
        members = self.calls.project.family(scope.module)
        found = (bind.key for member in members for bind, _ in attributes(member).get(name, ()))
        return any(not key.startswith("self.") for key in found)

    def choice(self, node: ast.IfExp, scope: Scope, when: bool, depth: int) -> int:
        """A value that a test chooses, where one arm is empty (`writer if rank == 0 else None`, `True if ... else
        False`).
        """
        if is_empty(node.orelse):
            return self.test(node.test, scope, when, depth)
        if not is_empty(node.body):
            return 0
        if self.numbers.is_rank(node.test, scope):
            return 1 if when else -1
        return self.test(node.test, scope, not when, depth)

    def several(self, node: ast.BoolOp, scope: Scope, when: bool, depth: int) -> int:
        """A test of several parts; `single or rank == 0` counts, as one process is its own main rank."""
        found = [self.test(value, scope, when, depth) for value in node.values]
        if when and isinstance(node.op, ast.Or) and any(map(counts_batches, node.values)):
            return 0  # `rank == 0 and step % 25 == 0 or step == len(loader)`: the second part holds on every rank
        if when or isinstance(node.op, ast.Or):
            return next((value for value in found if value), 0)
        # One part that failed says nothing about the others, unless these hold wherever there are several processes
        # (`not (distributed and rank > 0)`).
        parts = [side for value, side in zip(node.values, found, strict=True) if side or not self.asks(value, scope)]
        return parts[0] if len(set(parts)) == 1 else 0

    def asks(self, test: ast.expr, scope: Scope) -> bool:
        """Whether a test asks if there are several processes, or may be."""
        name = dotted(test.func if isinstance(test, ast.Call) else test) or ""
        return self.many(test, scope) == 1 or name.endswith(PACKAGES)

    def named(self, key: str, scope: Scope, when: bool, depth: int) -> int:
        """A name that was given the result of a rank test, or a tracker's run that only the main rank has."""
        if key.endswith(".run") and self.calls.names.qualify_name(key, scope) == RUN:
            return int(when and main_has_run(self.calls, scope.module, self.test))
        for value, home in self.calls.values(key, scope):
            if isinstance(value, DECIDES):
                found = self.test(value, home, when, depth + 1)
                if found:
                    return found
            elif isinstance(value, ast.Name) and key.startswith("self.") and depth < 3:
                found = self.handed(value.id, home, when, depth + 1)  # `Logger(enable=rank == 0)`
                if found:
                    return found
        return (
            self.alike(in_tuple(self.numbers, key, scope), when, depth)
            or self.kept(key, scope, when, depth)
            or self.switched(key, scope, when, depth)
            or self.handed(key, scope, when, depth)
        )

    def alike(self, values: Iterable[tuple[ast.expr, Scope]], when: bool, depth: int) -> int:
        """What a test of any of some values comes to, where that is the same for all."""
        found = {self.test(value, home, when, depth + 1) for value, home in values} if depth < 3 else set()
        return found.pop() if len(found) == 1 else 0

    def switched(self, key: str, scope: Scope, when: bool, depth: int) -> int:
        """A flag that the other ranks alone turn off, or on, after all have got it (`verbose = True`, then `if rank !=
        0: verbose = False`): 1 if it comes out `when` on the main rank only.
        """
        binds = (self.numbers.bound(key, scope) or self.numbers.set_elsewhere(key, scope))[:MAX_BINDS]
        off = [(bind, home) for bind, home in binds if turns(bind.value, not when) and self.others(bind, home, depth)]
        rest = [(bind, home) for bind, home in binds if not any(bind is other for other, _ in off)]
        return int(
            bool(off) and all(home is off[0][1] and bind.stmt.lineno < off[0][0].stmt.lineno for bind, home in rest)
        )

    def others(self, bind: Bind, home: Scope, depth: int) -> bool:
        """Whether only the other ranks make a binding."""
        return any(self.test(g.test, home, g.when, depth + 1) == -1 for g in guards(bind.stmt, home.module))

    def kept(self, key: str, scope: Scope, when: bool, depth: int) -> int:
        """A name that has a value on some ranks and None or False on the others (`writer = Writer() if rank == 0 else
        None`), here or where the attribute of another object is set (`args.verbose = rank == 0`).
        """
        binds = self.numbers.bound(key, scope) or self.numbers.set_elsewhere(key, scope)
        flag = any(isinstance(bind.value, ast.Constant) and bind.value.value is False for bind, _ in binds)
        found = {self.share(bind, home, depth, flag) for bind, home in binds[:MAX_BINDS]} if binds else set()
        found.discard(None)
        side = found.pop() if len(found) == 1 else 0
        if when or not side:
            return side or 0
        # That it is empty tells the other ranks only where nothing else decides whether it is filled.
        return {1: -1, -1: 1}.get(side, 0) if all(self.by_rank_alone(b, home, depth) for b, home in binds) else 0

    def by_rank_alone(self, bind: Bind, home: Scope, depth: int) -> bool:
        """Whether tests of the rank alone decide whether a binding is made, or it is one to None or False."""
        if bind.value is None or is_empty(bind.value):
            return True
        tests = list(guards(bind.stmt, home.module))
        asked = [g.test for g in tests] + ([bind.value.test] if isinstance(bind.value, ast.IfExp) else [])
        return not any(isinstance(test, ast.BoolOp) for test in asked) and all(
            self.test(g.test, home, g.when, depth + 1) or self.many(g.test, home, g.when) for g in tests
        )

    def share(self, bind: Bind, home: Scope, depth: int, flag: bool) -> int | None:
        """On which ranks a binding gives its name more than None or False: None for a value that says nothing. What a
        `flag` is given on one rank is a decision of its own, unless it is written out.
        """
        value = bind.value
        if value is None or bind.path or bind.how != "assign":
            return 0
        if is_empty(value):
            return None
        tests = list(guards(bind.stmt, home.module))
        if isinstance(value, DECIDES):
            found = self.test(value, home, True, depth + 1)
            if found or not isinstance(value, ast.Call | ast.Attribute):
                return found
        if flag and not isinstance(value, ast.Constant):
            return 0
        found = next(filter(None, (self.test(g.test, home, g.when, depth + 1) for g in tests)), 0)
        alone = any(self.many(g.test, home, g.when) == -1 for g in tests)
        return None if not found and alone else found

    def handed(self, key: str, scope: Scope, when: bool, depth: int) -> int:
        """A parameter for which every caller gives the result of a rank test (`train(verbose=rank == 0)`)."""
        if key not in scope.params or key in scope.binds:
            return 0
        callers = self.calls.callers(scope)[:MAX_CALLERS]
        given = [(passed(site, scope, key), site.scope) for site in callers]
        found = {self.test(value, home, when, depth + 1) if value is not None else 0 for value, home in given}
        return found.pop() if len(found) == 1 else 0

    def many(self, test: ast.expr, scope: Scope, when: bool = True) -> int:
        """1 if a test comes out `when` only with several processes, -1 if only with one, else 0."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.many(test.operand, scope, not when)
        if isinstance(test, ast.BoolOp):
            found = [self.many(value, scope, when) for value in test.values]
            if isinstance(test.op, ast.And) is when:  # each part has come out so
                return next((value for value in found if value), 0)
            return found[0] if len(set(found)) == 1 else 0
        return self.asks_many(test, scope) * (1 if when else -1)

    def asks_many(self, test: ast.expr, scope: Scope) -> int:
        """The same for a test of one part that holds."""
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            if isinstance(test.ops[0], ast.In | ast.NotIn) and constant(test.left) in LAUNCHER:
                return 1 if isinstance(test.ops[0], ast.In) else -1  # `"RANK" in os.environ`
            if COUNT.search(last(test.left)):
                return 1 if isinstance(test.ops[0], ast.Gt | ast.GtE | ast.NotEq) else -1
            # `rank == -1` is how scripts of the launch era say "not distributed"
            right = test.comparators[0]
            if last(test.left) == "launcher" and (is_none(right) or constant(right) == "none"):
                return -1 if isinstance(test.ops[0], ast.Eq | ast.Is) else 1
            if (is_none(right) or constant(right) == -1) and self.numbers.is_rank(test.left, scope):
                return -1 if isinstance(test.ops[0], ast.Eq | ast.Is) else 1
            if "rank" in last(test.left).lower() and self.numbers.is_rank(test.left, scope):
                return beside_zero(test.ops[0], constant(right))
            return 0
        name = last(test)
        if SINGLE.search(name):
            return -1
        return 1 if MULTI.search(name) or name.endswith(("is_initialized", "and_initialized")) else 0


def turns(value: ast.expr | None, on: bool) -> bool:
    """Whether a value is the literal that turns a flag on, or off."""
    return value is not None and (is_true(value) if on else is_empty(value))
