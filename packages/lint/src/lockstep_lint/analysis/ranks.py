"""Which ranks run a statement: tests of the rank, functions that only one rank calls, programs of several processes."""

import ast
import re

from lockstep_lint.analysis.calls import Calls
from lockstep_lint.analysis.context import Guard, choices, guards, inside, withs
from lockstep_lint.analysis.drivers import driven
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import Words, is_none, last, strings
from lockstep_lint.analysis.programs import STARTS, Programs
from lockstep_lint.analysis.ranktests import RankTests

__all__ = ["Ranks"]

# A `with` around what all ranks run, the main one before the others.
TURNS = Words(r"main_process_first$", re.IGNORECASE)
FIRST = Words(r"(first|main_process|rank_?0|rank_?zero|zero_first|on_main|master)", re.IGNORECASE)

MAX_CALLERS = 40
MAX_REACHED = 60


class Ranks:
    """Answers which processes run a statement; 0 stands for "not known to be one rank's"."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.tests = RankTests(calls)
        self.programs = Programs(calls)

    @kept
    def side(self, stmt: ast.stmt, scope: Scope) -> int:
        """1 where a statement is reserved for the main rank in its own function, -1 for the others, else 0."""
        for guard in guards(stmt, scope.module):
            found = self.tests.test(guard.test, scope, guard.when)
            if found:
                return found
        return 0

    def main_only(self, stmt: ast.stmt, scope: Scope) -> bool:
        """Whether only one rank runs a statement: by a guard, a `with`, a decorator, or because of who calls."""
        if self.side(stmt, scope):
            return True
        if any(FIRST.search(last(item)) for item in withs(stmt, scope.module)):
            return True
        return self.reserved(scope)

    def in_turn(self, site: Site) -> bool:
        """Whether nothing keeps a call to the main rank but a `with` that lets the others do the same after it."""
        if self.side(site.stmt, site.scope) or self.reserved(site.scope):
            return False
        held = [last(item) for item in withs(site.stmt, site.module)]
        return all(TURNS.search(name) for name in held if FIRST.search(name))

    @kept
    def reserved(self, scope: Scope) -> bool:
        """Whether only one rank runs a function."""
        return self._reserved(scope, 0)

    def _reserved(self, scope: Scope, depth: int) -> bool:
        if scope.kind != "function" or depth > 5:
            return False
        if any(FIRST.search(last(item)) or "rank" in last(item) for item in scope.decorators):
            return True
        if scope.parent is not None and isinstance(scope.node, ast.stmt) and self.side(scope.node, scope.parent):
            return True
        if any(self.calls_by_rank(self.calls.names.definition(callee(item), scope)) for item in scope.decorators):
            return True
        made = self.made(scope)
        if made and all(self.on_main(site) or self._reserved(site.scope, depth + 1) for site in made):
            return True
        callers = self.calls.callers(scope) or self.calls.by_base(scope) or self.calls.namesakes(scope)
        if not callers:
            return self.handed_by_rank(scope)
        shared = [s for s in callers[:MAX_CALLERS] if not self.single(s.stmt, s.scope) or self.kept_out(s)]
        shared = [s for s in shared if not self.one_process(s.module)] or shared
        return bool(shared) and all(self.kept_out(site) or self._reserved(site.scope, depth + 1) for site in shared)

    @kept
    def one_process(self, module: Module) -> bool:
        """Whether a file is a script that starts no processes, nor asks which one it is."""
        return module.is_script and not (self.programs.parallel(module.top) or self.programs.accelerated(module))

    def handed_by_rank(self, function: Scope) -> bool:
        """Whether a function that nobody calls is only named where some ranks hand it on
        (`if rank == 0: trainer.add_event_handler(event, report)`).
        """
        name, found = function.name, []
        for member in self.calls.project.users(function.module) if function.owner is None else ():
            if member.words[name] > (member is function.module):
                found += [(stmt, scope) for stmt, scope in member.named.get(name, ()) if name not in scope.binds]
        return bool(found) and all(self.side(stmt, scope) for stmt, scope in found)

    @kept
    def calls_by_rank(self, decorator: Scope | None) -> bool:
        """Whether a decorator of the project calls the function that it is given on some ranks only."""
        if decorator is None or decorator.kind != "function" or not decorator.params:
            return False
        given = decorator.params[0]
        wrappers = [inner for inner in decorator.defs.values() if inner.kind == "function"]
        sites = [site for inner in wrappers for site in inner.named(given) if isinstance(site.call.func, ast.Name)]
        deeper = any(self.calls_by_rank(inner) for inner in wrappers)  # `def main_only(group): def wrap(function): ...`
        return deeper or (bool(sites) and all(self.side(site.stmt, site.scope) or self.chosen(site) for site in sites))

    def made(self, method: Scope) -> list[Site]:
        """The calls that make the objects which a method is of, where its class has an `__init__` of its own."""
        owner = method.parent if method.name != "__init__" else None
        init = owner.defs.get("__init__") if owner is not None and owner.kind == "class" else None
        return self.calls.callers(init)[:MAX_CALLERS] if init is not None else []

    def kept_out(self, site: Site) -> bool:
        """Whether all ranks but the main one are kept from a call where it stands."""
        if self.side(site.stmt, site.scope) == 1 or self.chosen(site):
            return True
        return any(FIRST.search(last(item)) for item in withs(site.stmt, site.module))

    def on_main(self, site: Site) -> bool:
        """Whether a test around a call, or in its statement, keeps it to the main rank."""
        inner = (self.tests.test(guard.test, site.scope, guard.when) for guard in choices(site))
        return self.side(site.stmt, site.scope) == 1 or 1 in inner

    def chosen(self, site: Site) -> bool:
        """Whether a test inside the statement keeps a call to some ranks (`rank == 0 and print(x)`)."""
        return any(self.tests.test(guard.test, site.scope, guard.when) for guard in choices(site))

    @kept
    def single(self, stmt: ast.stmt, scope: Scope) -> bool:
        """Whether a statement runs only where there is one process (`if not distributed:`)."""
        found = [(self.tests.many(g.test, scope, g.when), g) for g in guards(stmt, scope.module)]
        several = any(many == 1 for many, _ in found)  # there, `gpu is None` leaves it to the wrapper to take them all
        return any(
            many == -1 and not starts(guard, scope) and not (several and asks_none(guard.test)) for many, guard in found
        )

    @kept
    def alone(self, scope: Scope) -> bool:
        """Whether a function is called only where there is one process."""
        return self._alone(scope, 0)

    def _alone(self, scope: Scope, depth: int) -> bool:
        found = self.calls.callers(scope) or self.calls.by_base(scope)
        callers = found[:MAX_CALLERS] if scope.kind == "function" and depth < 5 else []
        return bool(callers) and all(self.single(s.stmt, s.scope) or self._alone(s.scope, depth + 1) for s in callers)

    def several(self, stmt: ast.stmt, scope: Scope) -> bool:
        """Whether all ranks, or all but the main one, run a statement."""
        if self.every(stmt, scope):
            return True
        kept = self.side(stmt, scope) == -1 and not self.reserved(scope) and not self.single(stmt, scope)
        return kept and self.programs.spawned(scope.module) is None and self.programs.involved(scope)

    @kept
    def every(self, stmt: ast.stmt, scope: Scope) -> bool:
        """Whether every rank of a program of several processes runs a statement, as far as can be seen."""
        module = scope.module
        if not self.programs.distributed(module) or self.main_only(stmt, scope) or self.single(stmt, scope):
            return False
        if self.alone(scope) or self.programs.apart(scope) or scope in self.programs.beside(module):
            return False
        if driven(self.calls, stmt, scope):
            return False
        spawned = self.programs.spawned(module)
        if spawned is not None:
            return scope in spawned
        return self.programs.involved(scope)

    @kept
    def beneath(self, scope: Scope) -> bool:
        """Whether a script that makes an Accelerator calls a function of another file on all ranks, directly or not."""
        if not any(map(self.programs.accelerated, self.calls.project.users(scope.module))):
            return False
        seen, queue = {scope}, [scope]
        while queue and len(seen) < MAX_REACHED:
            current = queue.pop()
            if self.programs.accelerated(current.module):
                return True
            sites = self.calls.callers(current) if current.kind == "function" else []
            callers = {s.scope for s in sites if not self.kept_out(s) or self.in_turn(s)}
            queue += callers - seen
            seen |= callers
        return False

    def everywhere(self, site: Site, module: Module) -> bool:
        """Whether every rank makes a call in a program that a file is of, Accelerate's among them."""
        apart = not (self.programs.accelerated(module) or self.programs.accelerated(site.module))
        if apart and not self.beneath(site.scope):
            return self.every(site.stmt, site.scope) or self.imported(site)
        kept = not self.in_turn(site) or self.single(site.stmt, site.scope)
        return not kept and not self.alone(site.scope) and not driven(self.calls, site.stmt, site.scope)

    def imported(self, site: Site) -> bool:
        """Whether every spawned process makes a call, as it imports the file."""
        if site.scope.kind != "module" or not self.programs.again(site.module):
            return False
        tests = list(guards(site.stmt, site.module))
        alone = any("__main__" in strings(guard.test) for guard in tests) or self.main_only(site.stmt, site.scope)
        return not alone and not self.single(site.stmt, site.scope)


def callee(decorator: ast.expr) -> ast.expr:
    """What a decorator names, with its arguments or without."""
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def asks_none(test: ast.expr) -> bool:
    """Whether a test compares with None."""
    return isinstance(test, ast.Compare) and is_none(test.comparators[0])


def starts(guard: Guard, scope: Scope) -> bool:
    """Whether a test guards the start of the process group itself (`if not dist.is_initialized(): init...`)."""
    made = (site for name in STARTS for site in scope.named(name))
    return guard.when and any(inside(site.stmt, guard.stmt, scope.module) for site in made)
