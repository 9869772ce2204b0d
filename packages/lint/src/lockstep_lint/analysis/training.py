"""Find the training loops of a file: steps, epochs, evaluations."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import Effects
from lockstep_lint.analysis.context import (
    Guard,
    Loop,
    above,
    each_update,
    every_so_often,
    far_apart,
    first_time,
    following,
    guards,
    in_most_turns,
    in_turn,
    inside,
    loops,
    meant,
    never,
    now_and_then,
    turned_off,
)
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION, MODEL, SCALER, Steps
from lockstep_lint.analysis.nodes import REFERENCES, Words, constant, dotted, head, idents, is_none, last, walk
from lockstep_lint.analysis.ranks import Ranks

__all__ = ["LOSSES", "Training", "Trainings"]


# A flag that says that a run trains.
TRAINS = Words(r"^(is_)?train(ing)?$")
# What names a part of the data or of the training.
NAMED = Words(r"val|test|eval|train|phase|split|stage|subset|infer|predict", re.IGNORECASE)


def leaves(guard: Guard, stmt: ast.stmt) -> bool:
    """Whether a test ends the turn, in the other case: before a statement, or in the arm beside it (`if not boxes:
    continue`, then `else: ...`).
    """
    if guard.stmt.lineno <= stmt.lineno and (guard.stmt.end_lineno or 0) < stmt.lineno:
        return True
    ends = isinstance(guard.stmt, ast.If) and isinstance(guard.stmt.body[-1], ast.Continue | ast.Break | ast.Raise)
    return ends and not guard.when


def chooses(test: ast.Compare, scope: Scope) -> bool:
    """Whether a parameter that nothing changes is compared with the name of a way to compute (`kind == "focal"`)."""
    name = dotted(test.left)
    words = (name or "", str(constant(test.comparators[0])))
    return name in scope.params and name not in scope.binds and not any(map(NAMED.search, words))


def sites_in(arm: list[ast.stmt], scope: Scope) -> list[Site]:
    """The calls in some statements of a function."""
    start, end = arm[0].lineno, arm[-1].end_lineno or arm[-1].lineno
    return [site for site in scope.sites if start <= site.stmt.lineno <= end]


def evaluates(guard: Guard) -> bool:
    """Whether a statement stands in the arm where a flag like `is_train` does not hold, or where there is no
    optimizer.
    """
    test, when = guard.test, guard.when
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, when = test.operand, not when
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and when else [test]
    for part in parts:
        if isinstance(part, ast.Compare) and is_none(part.comparators[0]) and "optim" in last(part.left):
            return isinstance(part.ops[0], ast.Is | ast.Eq) is when
    return not when and TRAINS.search(last(test) if isinstance(test, REFERENCES) else "")


# Where a program keeps its options, and what is no option though it is kept there.
OPTIONS = Words(r"(^|_)(args|opts?|params|cfg|conf|config|hparams|FLAGS)$")
COUNTS = Words(r"step|epoch|(?<![wc]r)(?<!lim)iter|count|current|best|batch_idx", re.IGNORECASE)


def parts(test: ast.expr) -> Iterator[ast.expr]:
    """Yield the operands of a test, without literals."""
    stack = [test]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.BoolOp):
            stack.extend(node.values)
        elif isinstance(node, ast.UnaryOp):
            stack.append(node.operand)
        elif isinstance(node, ast.Compare):
            stack.extend((node.left, *node.comparators))
        elif not isinstance(node, ast.Constant):
            yield node


def of_a_name(node: ast.AST) -> bool:
    """Whether a part of a test asks whether a value is there, or what a key is called (`"loss" in key`)."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        return isinstance(constant(node.left), str)
    return isinstance(node, ast.Constant) and node.value is None


def held_names(test: ast.expr) -> Iterator[str]:
    """The names in a test, without those of flags that must not hold (`not validating`)."""
    off = {
        id(node)
        for part in walk(test)
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not)
        for node in walk(part.operand)
    }
    yield from (name for node in walk(test) if id(node) not in off for name in _own(node))


def _own(node: ast.AST) -> Iterator[str]:
    """The name that a node itself is."""
    name = getattr(node, "id", getattr(node, "attr", None))
    if isinstance(name, str):
        yield name


def is_option(node: ast.expr) -> bool:
    """Whether an expression is an option of the command line or of a configuration, the same in every step."""
    if isinstance(node, ast.Subscript) and isinstance(constant(node.slice), str):
        return any(map(OPTIONS.search, idents(node.value))) and not COUNTS.search(str(constant(node.slice)))
    if not isinstance(node, ast.Attribute) or COUNTS.search(node.attr):
        return False
    return any(map(OPTIONS.search, (dotted(node.value) or "").split(".")))


def is_fixed(node: ast.expr, scope: Scope, within: ast.stmt | None) -> bool:
    """Whether a name is bound before the loop and the loops around that, an attribute by its object's `__init__`
    alone, or an attribute says how a model is built (`model.n_classes == 1`).
    """
    key = dotted(node)
    if key is None:
        return False
    if key.startswith("self.") and key.count(".") == 1 and scope.owner is not None:
        methods = [method for method in scope.owner.defs.values() if key in method.binds]
        return [method.name for method in methods] == ["__init__"]
    if isinstance(node, ast.Attribute):
        return MODEL.search(last(node.value)) and not COUNTS.search(node.attr)
    if COUNTS.search(key):
        return False
    binds = scope.binds.get(key, [])
    if key in scope.params or binds:
        if within is None or any(bind.how != "assign" for bind in binds):
            return False
        once = len(binds) + (key in scope.params) == 1
        start = within if once else min((within, *loops(within, scope.module)), key=lambda loop: loop.lineno)
        return all(bind.stmt.lineno < start.lineno for bind in binds)
    top = scope.module.top.binds.get(key, [])
    return len(top) == 1 and top[0].how == "assign"


# A test that holds in every step or in none: it says nothing about how often.
STEADY = re.compile(
    r"cuda|gpu|(?<![a-z])amp(?![a-z])|fp16|half|dist(?!anc)|ddp|train(?!\w*(?:loss|acc|score))|scaler|clip|method|"
    r"mode(?!l)|accel|device|world|use_|isinstance|hasattr|is_tensor|sync_grad|rank|warm",
    re.IGNORECASE,
)

EPOCH = Words(r"^(epoch|ep|epoch_idx|cur_epoch)$")
# From when on something is done in every step.
STARTS = Words(r"(^|_)(start|begin|after)(s|_|$)", re.IGNORECASE)
# What a loss is called.
LOSSES = Words(r"criterion|loss|^crit$|^criteria(_|\d|$)", re.IGNORECASE)
# A file with more training loops than this is generated.
MAX_TRAININGS = 40


@dataclass(frozen=True, eq=False)
class Training:
    """A loop that trains: each turn computes gradients."""

    loop: Loop
    scope: Scope
    backward: Site
    micro: Loop | None

    @property
    def module(self) -> Module:
        """The file of the loop."""
        return self.scope.module

    def holds(self, stmt: ast.stmt) -> bool:
        """Whether a statement of its scope stands in the loop, or in the function that is taken for one."""
        return self.loop is self.scope.node or inside(stmt, self.loop, self.module)


class Trainings:
    """Finds training loops and answers what belongs to them."""

    def __init__(self, steps: Steps, effects: Effects, ranks: Ranks) -> None:
        self.steps = steps
        self.effects = effects
        self.ranks = ranks
        self.calls = effects.calls
        self.kinds = steps.kinds

    @kept
    def of(self, module: Module) -> tuple[Training, ...]:
        """The training loops whose backward call stands in a file."""
        found: dict[tuple[Loop, Site | None], Training] = {}
        helpers = [s for name, sites in module.by_name.items() if SCALER.search(name) for s in sites]
        for site in (*module.sites("backward", "manual_backward", "step"), *helpers):
            if len(found) < MAX_TRAININGS and self.steps.backwards(site):
                for training in self.around(site):
                    found.setdefault((training.loop, None), training)
        return tuple(found.values())

    @kept
    def near(self, module: Module) -> tuple[Training, ...]:
        """The training loops of all files of the programs that a file is part of."""
        return tuple(t for member in self.calls.project.family(module) for t in self.of(member))

    def around(self, site: Site) -> Iterator[Training]:
        """The step loops that run a backward call: around it, or around a call of its function."""
        entries = [(site.stmt, site.scope)]
        for _ in range(4):
            outside: list[tuple[ast.stmt, Scope]] = []
            for stmt, scope in entries:
                nest = loops(stmt, scope.module)
                if nest:
                    yield self.pick(nest, scope, site)
                else:
                    outside += [(caller.stmt, caller.scope) for caller in self.calls.callers(scope)[:6]]
            entries = outside
        return

    def pick(self, nest: list[Loop], scope: Scope, site: Site) -> Training:
        """The loop of a nest that runs one optimizer step a turn; inside it the loop over micro-batches, if any."""
        inner = nest[0]
        if len(nest) > 1 and not self.steps_in(inner, scope) and self.steps_in(nest[1], scope):
            return Training(nest[1], scope, site, inner)
        return Training(inner, scope, site, None)

    @kept
    def steps_in(self, loop: Loop, scope: Scope) -> bool:
        block = self.body(loop, scope)
        return self.effects.find(block, self.steps.steps_optimizer) is not None

    def body(self, loop: Loop, scope: Scope) -> list[Site]:
        """The calls in the body of a loop, without those of its header."""
        return [s for s in self.effects.block(loop, scope) if s.stmt is not loop or isinstance(loop, ast.While)]

    def epochs(self, training: Training) -> Iterator[tuple[Loop, Scope, ast.stmt]]:
        """The loops over epochs around a training loop, each with the statement in it that holds the training."""
        nest = loops(training.loop, training.module)
        if nest:
            yield nest[0], training.scope, training.loop
            return
        queue, seen = [training.scope], {training.scope}
        while queue and len(seen) < 12:
            for site in self.calls.callers(queue.pop()):
                outer = loops(site.stmt, site.module)
                if outer:
                    yield outer[-1] if len(outer) == 1 else outer[0], site.scope, site.stmt
                elif site.scope not in seen:
                    seen.add(site.scope)
                    queue.append(site.scope)

    @kept
    def each_step(self, training: Training) -> tuple[Site, ...]:
        """The calls that run in every step of a training loop, in it and in the functions that it calls."""
        return tuple(self.walk_step(training))

    def walk_step(self, training: Training) -> Iterator[Site]:
        seen: set[Scope] = set()
        queue = [(self.body(training.loop, training.scope), training.loop, training.scope)]
        while queue and len(seen) < 40:
            sites, within, _ = queue.pop()
            for site in sites:
                if self.rare(site.stmt, site.scope, within):
                    continue
                yield site
                for function in (*self.calls.runs(site), *self.forwards(site), *self.overrides(site)):
                    if function not in seen and function.name not in ("__init__", "__str__", "display"):
                        seen.add(function)
                        queue.append((function.sites, None, function))  # type: ignore[arg-type]

    def forwards(self, site: Site) -> list[Scope]:
        """The forward of a loss of the project's own, or of a model of the same file, which a call of the object runs
        (`criterion(output, target)`).
        """
        if not site.call.args or "forward" not in self.calls.method_names(site.module):
            return []
        first = head(site.call.func)
        if self.calls.names.unknown(site.call.func, site.scope) or (
            first is not None and self.calls.names.foreign(first, site.module)
        ):
            return []
        if LOSSES.search(site.name):
            owner = self.calls.class_of(site.call.func, site.scope)
            owner = owner if owner is not None and self.kinds.is_module_class(owner) else None
        else:
            owner = self.kinds.run_class(site.call.func, site.scope)
            owner = owner if owner is not None and owner.module is site.module else None
        forward = self.calls.names.member(owner, "forward") if owner is not None else None
        return [forward] if forward is not None else []

    def overrides(self, site: Site) -> Iterator[Scope]:
        """The methods that a call of the object's own method may run in classes that derive from this one, which may
        leave it to them.
        """
        receiver = site.receiver
        if not isinstance(receiver, ast.Name) or receiver.id != "self":
            return
        target = self.calls.target(site.call, site.scope)
        owner = target.owner if target is not None else site.scope.owner
        for inner in self.calls.subclasses(owner) if owner is not None else ():
            yield from [inner.defs[site.name]] if site.name in inner.defs else []

    def rare(self, stmt: ast.stmt, scope: Scope, within: ast.stmt | None) -> bool:
        """Whether a statement runs only now and then, or not for certain, in a turn of the loop `within`."""
        for node, place in above(stmt, scope.module):
            if node is within:
                break
            if place == "handlers":
                return True
        for found in guards(stmt, scope.module, within):
            test = meant(found.test, scope)
            guard = found if test is found.test else replace(found, test=test)
            if self.steps_when(guard.stmt, guard.when, scope) and not self.once_more(guard, scope, within):
                continue  # what stands beside the optimizer's step is done in every step of the training
            if self.each_update(guard, scope, within) or self.waits(guard, scope):
                continue
            if self.within_step(guard, scope, within):
                continue
            if never(guard) or turned_off(stmt, scope) or first_time(guard, scope):
                return True
            if self.apart(guard.stmt, guard.when, scope):
                return True
            if now_and_then(guard.test, guard.when) or evaluates(guard) or self.seldom(guard.test, scope):
                return True
            if not leaves(guard, stmt) and not in_most_turns(guard) and not self.steady(guard.test, scope, within):
                return True
        return False

    def within_step(self, guard: Guard, scope: Scope, within: ast.stmt | None) -> bool:
        """Whether a test holds in every n-th turn of a loop that counts inside the step (`for t in range(n): ... if t %
        2 == 0:`), where nothing is trained: that comes in every step.
        """
        if in_turn(guard.test) is not guard.when or not guard.when:
            return False
        asked = set(idents(guard.test))
        for loop in loops(guard.stmt, scope.module):
            if loop is within:
                return False
            if isinstance(loop, ast.For) and (dotted(loop.target) or "") in asked:
                ranges = isinstance(loop.iter, ast.Call) and dotted(loop.iter.func) == "range"
                return ranges and not self.trains(self.body(loop, scope))
        return False

    def seldom(self, test: ast.expr, scope: Scope) -> bool:
        """Whether a test calls a function of the project that asks for every n-th step."""
        asked = self.calls.target(test, scope) if isinstance(test, ast.Call) else None
        return asked is not None and any(map(every_so_often, asked.returns()))

    @kept
    def steps_when(self, branch: ast.stmt, when: bool, scope: Scope) -> bool:
        """Whether the arm of a test, or what an early exit leaves, steps the optimizer, itself or by a call of a
        function that does (`if step % 4 == 0: agent.learn(memory)`).
        """
        if not isinstance(branch, ast.If):
            return False
        arm = branch.body if when else branch.orelse or following(branch, scope.module)
        if not arm:
            return False
        here = sites_in(arm, scope)
        return any(self.steps.steps_optimizer(site) and self.certain(site, arm, scope) for site in here) or any(
            self.steps.steps_optimizer(site) and not loops(site.stmt, function.module)
            for call in here
            if any(call.stmt is stmt for stmt in arm)
            for function in self.calls.runs(call)
            for site in function.sites
        )

    def once_more(self, guard: Guard, scope: Scope, within: ast.stmt | None) -> bool:
        """Whether an arm that runs in every n-th turn steps an optimizer once more that steps in every turn (`if i % n
        == 0: path_loss.backward(); g_optim.step()`), or other ones far more seldom than the loop's own.
        """
        if not guard.when or not isinstance(within, Loop) or not now_and_then(guard.test, True):
            return False
        steps = [site for site in self.body(within, scope) if self.steps.steps_optimizer(site)]
        arm = [site for site in steps if inside(site.stmt, guard.stmt, scope.module)]
        every = {
            self.steps.stepped(site)
            for site in steps
            if site not in arm
            and all(
                leaves(g, site.stmt) or self.steady(g.test, scope, within) or self.each_update(g, scope, within)
                for g in guards(site.stmt, site.module, within)
            )
        }
        return bool(arm and every) and (far_apart(guard.test) or {self.steps.stepped(site) for site in arm} <= every)

    def each_update(self, guard: Guard, scope: Scope, within: ast.stmt | None) -> bool:
        """Whether a statement runs once for each step of the optimizer, also where something besides is asked that is
        the same in every turn (`if step % accumulation_steps == 0 and rank == 0:`).
        """
        if not isinstance(guard.test, ast.BoolOp) or not isinstance(guard.test.op, ast.And) or not guard.when:
            return each_update(guard)
        parts = [(part, each_update(replace(guard, test=part))) for part in guard.test.values]
        return any(each for _, each in parts) and all(each or self.steady(part, scope, within) for part, each in parts)

    def waits(self, guard: Guard, scope: Scope) -> bool:
        """Whether an arm computes gradients that another arm's step of the optimizer waits for
        (`if update: ... optimizer.step() else: loss.backward()`).
        """
        if not isinstance(guard.stmt, ast.If) or not self.steps_when(guard.stmt, not guard.when, scope):
            return False
        arm = guard.stmt.body if guard.when else guard.stmt.orelse
        return bool(arm) and any(self.steps.backwards(site) for site in sites_in(arm, scope))

    @kept
    def apart(self, branch: ast.stmt, when: bool, scope: Scope) -> bool:
        """Whether an arm of a test does not train, and the other arm does (`if export: write(batch) else: ...`), or
        what follows does where the arm ends the turn (`if show: plot(batch); continue`).
        """
        own = getattr(branch, "body" if when else "orelse", [])
        if not isinstance(branch, ast.If) or not own:
            return False
        other = branch.orelse if when else branch.body
        if not other and isinstance(own[-1], ast.Continue | ast.Break):
            other = following(branch, scope.module)
        if not other:
            return False
        return self.trains(sites_in(other, scope)) and not self.trains(sites_in(own, scope))

    def certain(self, site: Site, arm: list[ast.stmt], scope: Scope) -> bool:
        """Whether a call is made whenever a block runs: at once, or where an option says so."""
        tops = set(map(id, arm))
        for node in (site.stmt, *(node for node, _ in above(site.stmt, scope.module))):
            if isinstance(node, Loop) or (isinstance(node, ast.If) and not self.steady(node.test, scope, None)):
                return False
            if id(node) in tops:
                return True
        return False

    def steady(self, test: ast.expr, scope: Scope, within: ast.stmt | None) -> bool:
        """Whether a test comes out alike in every turn of the loop `within`, or else of the loop that calls `scope`."""
        if self.ranks.tests.test(test, scope) or self.ranks.tests.many(test, scope):
            return True
        named = isinstance(test, ast.Compare) and isinstance(constant(test.comparators[0]), str)
        if isinstance(test, ast.Compare) and named and (is_option(test.left) or chooses(test, scope)):
            return True
        if any(STEADY.search(name) for name in idents(test)) or any(map(of_a_name, walk(test))):
            return True
        after = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Gt | ast.GtE) and test.comparators[0]
        if after and any(map(STARTS.search, idents(after))):
            return True  # in every step from then on (`step > discriminator_start`)
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Gt | ast.GtE | ast.Lt | ast.LtE):
            name = dotted(test.left) or ""
            if (
                within is not None
                and EPOCH.search(name)
                and all(bind.stmt.lineno < within.lineno for bind in scope.binds.get(name, []))
            ):
                return True  # in every step of these epochs
        return not any(map(EVALUATION.search, held_names(test))) and all(
            is_option(part) or is_fixed(part, scope, within) for part in parts(test)
        )

    def trains(self, sites: list[Site]) -> bool:
        """Whether a block computes gradients, itself or by what it calls."""
        return self.effects.find(sites, self.steps.backwards) is not None
