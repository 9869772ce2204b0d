"""Find the training loops of a file: steps, epochs, evaluations."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import Effects
from lockstep_lint.analysis.context import Loop, loops
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION, MODEL, SCALER, Steps
from lockstep_lint.analysis.nodes import Words, constant, dotted, head, idents, last, walk
from lockstep_lint.analysis.ranks import Ranks

__all__ = ["LOSSES", "Training", "Trainings"]


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
    """Check whether a part of a test compares with None or searches a key."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        return isinstance(constant(node.left), str)
    return isinstance(node, ast.Constant) and node.value is None


def held_names(test: ast.expr) -> Iterator[str]:
    """Yield the names in a test, except negated ones (`not validating`)."""
    off = {
        id(node)
        for part in walk(test)
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not)
        for node in walk(part.operand)
    }
    yield from (name for node in walk(test) if id(node) not in off for name in _own(node))


def _own(node: ast.AST) -> Iterator[str]:
    """Yield the name that a node itself is."""
    name = getattr(node, "id", getattr(node, "attr", None))
    if isinstance(name, str):
        yield name


def is_option(node: ast.expr) -> bool:
    """Check whether an expression is an option, the same in every step."""
    if not isinstance(node, ast.Attribute) or COUNTS.search(node.attr):
        return False
    return any(map(OPTIONS.search, (dotted(node.value) or "").split(".")))


def is_fixed(node: ast.expr, scope: Scope, within: ast.stmt | None) -> bool:
    """Check whether a name is bound before the loops, or an attribute by `__init__` alone."""
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


class Trainings:
    """Finds training loops and answers what belongs to them."""

    def __init__(self, steps: Steps, effects: Effects, ranks: Ranks) -> None:
        self.steps = steps
        self.effects = effects
        self.ranks = ranks
        self.calls = effects.calls
        self.kinds = steps.kinds

    @cache_answers
    def of(self, module: Module) -> tuple[Training, ...]:
        """Return the training loops whose backward call is in a file."""
        found: dict[tuple[Loop, Site | None], Training] = {}
        helpers = [s for name, sites in module.by_name.items() if SCALER.search(name) for s in sites]
        for site in (*module.sites("backward", "manual_backward", "step"), *helpers):
            if len(found) < MAX_TRAININGS and self.steps.backwards(site):
                for training in self.around(site):
                    found.setdefault((training.loop, None), training)
        return tuple(found.values())

    @cache_answers
    def near(self, module: Module) -> tuple[Training, ...]:
        """Return the training loops of all files of a file's programs."""
        return tuple(t for member in self.calls.project.family(module) for t in self.of(member))

    def around(self, site: Site) -> Iterator[Training]:
        """Yield the step loops around a backward call, or around a call of its function."""
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
        """Return the loop of a nest that steps once per iteration, with its micro-batch loop."""
        inner = nest[0]
        if len(nest) > 1 and not self.steps_in(inner, scope) and self.steps_in(nest[1], scope):
            return Training(nest[1], scope, site, inner)
        return Training(inner, scope, site, None)

    @cache_answers
    def steps_in(self, loop: Loop, scope: Scope) -> bool:
        block = self.body(loop, scope)
        return self.effects.find(block, self.steps.steps_optimizer) is not None

    def body(self, loop: Loop, scope: Scope) -> list[Site]:
        """Return the calls in the body of a loop, without those of its header."""
        return [s for s in self.effects.block(loop, scope) if s.stmt is not loop or isinstance(loop, ast.While)]

    def forwards(self, site: Site) -> list[Scope]:
        """Return the forward of the project's loss or model that a call runs (`criterion(output, target)`)."""
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
        """Yield the methods of subclasses that a call on `self` may run."""
        if dotted(site.receiver) != "self":
            return
        target = self.calls.target(site.call, site.scope)
        owner = target.owner if target is not None else site.scope.owner
        for inner in self.calls.subclasses(owner) if owner is not None else ():
            yield from [inner.defs[site.name]] if site.name in inner.defs else []

    def steady(self, test: ast.expr, scope: Scope, within: ast.stmt | None) -> bool:
        """Check whether a test gives the same in every turn of a loop."""
        if self.ranks.tests.test(test, scope) or self.ranks.tests.many(test, scope):
            return True
        named = isinstance(test, ast.Compare) and isinstance(constant(test.comparators[0]), str)
        if isinstance(test, ast.Compare) and named and is_option(test.left):
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
        """Check whether a block computes gradients, itself or by what it calls."""
        return self.effects.find(sites, self.steps.backwards) is not None
