"""Find the ranks that run a statement, by tests of the rank and by callers."""

import ast
import re

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import Calls, find_passed
from lockstep_lint.analysis.context import choices, guards, withs
from lockstep_lint.analysis.index import Bind, Module, Scope, Site
from lockstep_lint.analysis.nodes import Words, constant, dotted, is_none, last, strings
from lockstep_lint.analysis.processes import Programs
from lockstep_lint.analysis.rank_names import (
    COUNT,
    LAUNCHER,
    MAIN,
    MAIN_EXACT,
    MAIN_OF_ARGUMENTS,
    MULTI,
    PACKAGES,
    SINGLE,
    RankNumbers,
    beside_zero,
    counts_batches,
    is_empty,
)

__all__ = ["Ranks"]


def bare(node: ast.expr) -> ast.expr:
    """Remove what keeps an expression's truth: `bool(x)`, `int(x == y)`, `(x := y)`."""
    while isinstance(node, ast.NamedExpr) or keeps_truth(node):
        node = node.value if isinstance(node, ast.NamedExpr) else node.args[0] if isinstance(node, ast.Call) else node
    return as_boolean(node) if isinstance(node, ast.BinOp) else node


# What `&` and `|` mean between comparisons.
JOINS: dict[type[ast.operator], type[ast.boolop]] = {ast.BitAnd: ast.And, ast.BitOr: ast.Or}


def as_boolean(node: ast.BinOp) -> ast.expr:
    """Return a test that `&` or `|` joins as one that `and` or `or` joins."""
    op = JOINS.get(type(node.op))
    if op is None or not any(isinstance(side, ast.Compare | ast.BinOp) for side in (node.left, node.right)):
        return node
    return ast.copy_location(ast.BoolOp(op(), [node.left, node.right]), node)


def keeps_truth(node: ast.expr) -> bool:
    """Check whether a call returns the truth of its only argument."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or not isinstance(node.func, ast.Name):
        return False
    return node.func.id == "bool" or (node.func.id == "int" and isinstance(node.args[0], ast.Compare | ast.BoolOp))


def may_be_number(node: ast.expr) -> bool:
    """Check whether a tested expression may be a rank by its words (`if rank: return`)."""
    if not isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        return False
    words = " ".join((last(node), *strings(node))).lower()
    return ("rank" in words or "procid" in words) and not words.startswith("is_") and not last(node).endswith("ranks")


MAX_CALLERS = 20


# An attribute that is set at more places than this is no flag.
MAX_BINDS = 20
# What a test that holds on one rank, but not the main one, comes to.
OTHER = -2
# What may be a test of the rank where a name is given its value.
DECIDES = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.Attribute, ast.Call, ast.Subscript)


class RankTests:
    """Decides in which processes a test holds, by its names and their values."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.numbers = RankNumbers(calls)

    @cache_answers
    def test(self, node: ast.expr, scope: Scope, when: bool = True, depth: int = 0) -> int:
        """Return 1 for a test of the main rank, -1 of others, OTHER of one."""
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
        if isinstance(node, ast.IfExp):  # `writer if rank == 0 else None`
            return self.test(node.test, scope, when, depth) if is_empty(node.orelse) else 0
        if isinstance(node, ast.Subscript):
            said = constant(node.slice)
            told = isinstance(said, str) and (MAIN.search(said) or said in MAIN_EXACT)
            return sign if told else 0
        if not depth and may_be_number(node) and self.numbers.is_rank(node, scope):
            return -sign  # `if rank: return`
        name = last(node).lstrip("_")
        key = dotted(node)
        main = MAIN.search(name) or name in MAIN_EXACT or (key is not None and key.endswith(MAIN_OF_ARGUMENTS))
        if main:
            return sign
        if depth >= 3:
            return 0
        if isinstance(node, ast.Call):
            return self.asked(self.calls.target(node, scope), when, depth)
        return self.named(key, scope, when, depth) if key is not None else 0

    def asked(self, function: Scope | None, when: bool, depth: int) -> int:
        """Evaluate a project function that tests the rank (`def primary(): return get_rank() == 0`)."""
        if function is None:
            return 0
        values = [value for value in function.returns() if not isinstance(value, ast.Constant)]
        found = {self.test(value, function, when, depth + 1) for value in values}
        return found.pop() if len(found) == 1 else 0

    def several(self, node: ast.BoolOp, scope: Scope, when: bool, depth: int) -> int:
        """Evaluate a test of several parts."""
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
        """Check whether a test asks if there are several processes, or may be."""
        return self.many(test, scope) == 1 or asks_package(test)

    def named(self, key: str, scope: Scope, when: bool, depth: int) -> int:
        """Evaluate a name by the rank tests that gave it its values."""
        for value, home in self.calls.values(key, scope):
            if isinstance(value, DECIDES):
                found = self.test(value, home, when, depth + 1)
                if found:
                    return found
            elif isinstance(value, ast.Name) and key.startswith("self.") and depth < 3:
                found = self.handed(value.id, home, when, depth + 1)  # `Logger(enable=rank == 0)`
                if found:
                    return found
        return self.kept(key, scope, when, depth) or self.handed(key, scope, when, depth)

    def kept(self, key: str, scope: Scope, when: bool, depth: int) -> int:
        """Evaluate a name that is None or False on some ranks."""
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
        """Check whether tests of the rank alone decide whether a binding is made."""
        if bind.value is None or is_empty(bind.value):
            return True
        tests = list(guards(bind.stmt, home.module))
        asked = [g.test for g in tests] + ([bind.value.test] if isinstance(bind.value, ast.IfExp) else [])
        return not any(isinstance(test, ast.BoolOp) for test in asked) and all(
            self.test(g.test, home, g.when, depth + 1) or self.many(g.test, home, g.when) for g in tests
        )

    def share(self, bind: Bind, home: Scope, depth: int, flag: bool) -> int | None:
        """Return the ranks on which a binding is set; None if it shows nothing."""
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
        """Evaluate a parameter that every caller sets to a rank test (`train(verbose=rank == 0)`)."""
        if key not in scope.params or key in scope.binds:
            return 0
        callers = self.calls.callers(scope)[:MAX_CALLERS]
        given = [(find_passed(site, scope, key), site.scope) for site in callers]
        found = {self.test(value, home, when, depth + 1) if value is not None else 0 for value, home in given}
        return found.pop() if len(found) == 1 else 0

    def many(self, test: ast.expr, scope: Scope, when: bool = True) -> int:
        """Return 1 if a test needs several processes, -1 if it needs one, else 0."""
        test = bare(test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.many(test.operand, scope, not when)
        if isinstance(test, ast.BoolOp):
            asked = [value for value in test.values if not asks_package(value)]  # which is there
            found = [self.many(value, scope, when) for value in asked or test.values]
            if isinstance(test.op, ast.And) is when:  # each part has come out so
                return next((value for value in found if value), 0)
            return found[0] if len(set(found)) == 1 else 0
        return self.asks_many(test, scope) * (1 if when else -1)

    def asks_many(self, test: ast.expr, scope: Scope) -> int:
        """Judge the same for a test of one part that holds."""
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


def asks_package(test: ast.expr) -> bool:
    """Check whether a test asks if torch.distributed can be used."""
    name = dotted(test.func if isinstance(test, ast.Call) else test) or ""
    return name.endswith(PACKAGES)


# A `with` around what all ranks run, the main one before the others.
TURNS = Words(r"main_process_first$", re.IGNORECASE)
FIRST = Words(r"(first|main_process|rank_?0|rank_?zero|zero_first|on_main|master)", re.IGNORECASE)

RANKS_MAX_CALLERS = 40


class Ranks:
    """Answers which processes run a statement; 0 if unknown."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.tests = RankTests(calls)
        self.programs = Programs(calls)

    @cache_answers
    def side(self, stmt: ast.stmt, scope: Scope) -> int:
        """Return 1 for a statement of the main rank, -1 for the others', else 0."""
        for guard in guards(stmt, scope.module):
            found = self.tests.test(guard.test, scope, guard.when)
            if found:
                return found
        return 0

    def main_only(self, stmt: ast.stmt, scope: Scope) -> bool:
        """Check whether one rank alone runs a statement, by what surrounds it or its callers."""
        if self.side(stmt, scope):
            return True
        if any(FIRST.search(last(item)) for item in withs(stmt, scope.module)):
            return True
        return self.reserved(scope)

    def in_turn(self, site: Site) -> bool:
        """Check whether only a `with` that lets the others follow limits a call."""
        if self.side(site.stmt, site.scope) or self.reserved(site.scope):
            return False
        held = [last(item) for item in withs(site.stmt, site.module)]
        return all(TURNS.search(name) for name in held if FIRST.search(name))

    @cache_answers
    def reserved(self, scope: Scope) -> bool:
        """Check whether only one rank runs a function."""
        return self._reserved(scope, 0)

    def _reserved(self, scope: Scope, depth: int) -> bool:
        if scope.kind != "function" or depth > 5:
            return False
        if any(FIRST.search(last(item)) or "rank" in last(item) for item in scope.decorators):
            return True
        if scope.parent is not None and isinstance(scope.node, ast.stmt) and self.side(scope.node, scope.parent):
            return True
        made = self.made(scope)
        if made and all(self.on_main(site) or self._reserved(site.scope, depth + 1) for site in made):
            return True
        callers = self.calls.callers(scope) or self.calls.by_base(scope) or self.calls.namesakes(scope)
        if not callers:
            return False
        shared = [s for s in callers[:RANKS_MAX_CALLERS] if not self.single(s.stmt, s.scope) or self.kept_out(s)]
        shared = [s for s in shared if not self.one_process(s.module)] or shared
        return bool(shared) and all(self.kept_out(site) or self._reserved(site.scope, depth + 1) for site in shared)

    @cache_answers
    def one_process(self, module: Module) -> bool:
        """Check whether a file is a script that starts no processes and reads no rank."""
        return module.is_script and not (self.programs.parallel(module.top) or self.programs.accelerated(module))

    def made(self, method: Scope) -> list[Site]:
        """Return the calls that make a method's objects."""
        owner = method.parent if method.name != "__init__" else None
        init = owner.defs.get("__init__") if owner is not None and owner.kind == "class" else None
        return self.calls.callers(init)[:RANKS_MAX_CALLERS] if init is not None else []

    def kept_out(self, site: Site) -> bool:
        """Check whether a test around a call excludes all ranks but the main one."""
        if self.side(site.stmt, site.scope) == 1 or self.chosen(site):
            return True
        return any(FIRST.search(last(item)) for item in withs(site.stmt, site.module))

    def on_main(self, site: Site) -> bool:
        """Check whether a test around or inside its statement limits a call to rank 0."""
        inner = (self.tests.test(guard.test, site.scope, guard.when) for guard in choices(site))
        return self.side(site.stmt, site.scope) == 1 or 1 in inner

    def chosen(self, site: Site) -> bool:
        """Check whether a statement's inner test limits a call to some ranks (`main and print(x)`)."""
        return any(self.tests.test(guard.test, site.scope, guard.when) for guard in choices(site))

    @cache_answers
    def single(self, stmt: ast.stmt, scope: Scope) -> bool:
        """Check whether a statement runs only where there is one process (`if not distributed:`)."""
        found = [(self.tests.many(g.test, scope, g.when), g) for g in guards(stmt, scope.module)]
        several = any(many == 1 for many, _ in found)  # there, `gpu is None` leaves it to the wrapper to take them all
        return any(many == -1 and not (several and asks_none(guard.test)) for many, guard in found)

    @cache_answers
    def alone(self, scope: Scope) -> bool:
        """Check whether a function is called only where there is one process."""
        return self._alone(scope, 0)

    def _alone(self, scope: Scope, depth: int) -> bool:
        found = self.calls.callers(scope) or self.calls.by_base(scope)
        callers = found[:RANKS_MAX_CALLERS] if scope.kind == "function" and depth < 5 else []
        return bool(callers) and all(self.single(s.stmt, s.scope) or self._alone(s.scope, depth + 1) for s in callers)

    def several(self, stmt: ast.stmt, scope: Scope) -> bool:
        """Check whether all ranks, or all but the main one, run a statement."""
        if self.every(stmt, scope):
            return True
        kept = self.side(stmt, scope) == -1 and not self.reserved(scope) and not self.single(stmt, scope)
        return kept and self.programs.spawned(scope.module) is None and self.programs.involved(scope)

    @cache_answers
    def every(self, stmt: ast.stmt, scope: Scope) -> bool:
        """Check whether every rank certainly runs a statement in a program of several processes."""
        module = scope.module
        if not self.programs.distributed(module) or self.main_only(stmt, scope) or self.single(stmt, scope):
            return False
        if self.alone(scope) or self.programs.apart(scope) or scope in self.programs.beside(module):
            return False
        spawned = self.programs.spawned(module)
        if spawned is not None:
            return scope in spawned
        return self.programs.involved(scope)

    def everywhere(self, site: Site, module: Module) -> bool:
        """Check whether every rank makes a call, in programs of Accelerate too."""
        if not (self.programs.accelerated(module) or self.programs.accelerated(site.module)):
            return self.every(site.stmt, site.scope) or self.imported(site)
        kept = not self.in_turn(site) or self.single(site.stmt, site.scope)
        return not kept and not self.alone(site.scope)

    def imported(self, site: Site) -> bool:
        """Check whether every spawned process makes a call, as it imports the file."""
        if site.scope.kind != "module" or not self.programs.again(site.module):
            return False
        tests = list(guards(site.stmt, site.module))
        alone = any("__main__" in strings(guard.test) for guard in tests) or self.main_only(site.stmt, site.scope)
        return not alone and not self.single(site.stmt, site.scope)


def asks_none(test: ast.expr) -> bool:
    """Check whether a test compares with None."""
    return isinstance(test, ast.Compare) and is_none(test.comparators[0])
