"""Where a value comes from: through names, attributes, parameters, returns and methods that give back their object."""

import ast
import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.lint.analysis.budget import WORK
from lockstep.lint.analysis.calls import Calls
from lockstep.lint.analysis.context import above
from lockstep.lint.analysis.index import Bind, Scope, Site
from lockstep.lint.analysis.nodes import dotted

__all__ = ["Origin", "Origins"]

# Methods of a module or tensor that return the object itself, as far as the questions here go.
SAME = {
    "to",
    "cuda",
    "cpu",
    "train",
    "eval",
    "half",
    "float",
    "bfloat16",
    "double",
    "apply",
    "requires_grad_",
    "detach",
}
SAME |= {"contiguous", "clone", "xpu", "npu"}
MAX_STEPS = 120
# A name that is bound more often than this in one scope is generated code.
MAX_BINDS = 40


@dataclass(frozen=True, eq=False)
class Origin:
    """An expression that a value may come from, and the scope that it stands in."""

    node: ast.expr
    scope: Scope

    @property
    def call(self) -> ast.Call | None:
        """The call that made the value, if it was one."""
        return self.node if isinstance(self.node, ast.Call) else None


class Origins:
    """Follows values backwards through a project; what cannot be followed is an origin by itself."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.names = calls.names
        self.project = calls.project
        self.memo: dict[tuple[ast.expr, Scope], list[Origin]] = {}

    def of(self, node: ast.expr | None, scope: Scope) -> list[Origin]:
        """Every expression that the value of `node` may come from, as of where `node` stands."""
        if node is None:
            return []
        key = (node, scope)
        if key not in self.memo:
            self.memo[key] = _Walk(self).run(node, scope)
        return self.memo[key]

    def calls_of(self, node: ast.expr | None, scope: Scope) -> Iterator[tuple[ast.Call, Scope, str]]:
        """The calls among the origins of `node`, each with the full name of what it calls."""
        for origin in self.of(node, scope):
            if origin.call is not None:
                yield origin.call, origin.scope, self.names.qualify(origin.call.func, origin.scope)

    def binds(self, key: str, scope: Scope, line: int) -> list[tuple[Bind, Scope]]:
        """The bindings of a name that may hold at a line of a scope."""
        if key.startswith("self.") and scope.owner is not None:
            return self.attribute_binds(scope.owner, key, scope, line)
        current: Scope | None = scope
        while current is not None:
            found = current.binds.get(key)
            if found and current.kind != "class":
                return [(bind, current) for bind in (reaching(found, current, line) if current is scope else found)]
            if current.kind == "function" and key.split(".")[0] in current.params:
                return []
            current = current.parent
        return []

    def attribute_binds(self, owner: Scope, key: str, scope: Scope, line: int) -> list[tuple[Bind, Scope]]:
        """The bindings of `self.x` in the methods of a class; those before `line` where the method itself has some."""
        here = [bind for bind in scope.binds.get(key, []) if bind.stmt.lineno < line]
        if here:
            return [(bind, scope) for bind in reaching(here, scope, line)]
        found = []
        for current in (owner, *self.names.parents(owner)):
            for method in current.defs.values():
                binds = method.binds.get(key, [])
                found += [(bind, method) for bind in (reaching(binds, method, 10**9) if binds else [])]
        return found


def reaching(binds: list[Bind], scope: Scope, line: int) -> list[Bind]:
    """The bindings that may hold at a line: the last certain one before it and all uncertain ones after that."""
    end = bisect.bisect_left(binds, line, key=lambda bind: bind.stmt.lineno)
    kept: list[Bind] = []
    for bind in reversed(binds[max(0, end - MAX_BINDS) : end]):
        if bind.how == "aug":
            continue
        kept.append(bind)
        around = (node for node, _ in above(bind.stmt, scope.module))
        if _encloses(bind, line) or not any(
            isinstance(node, ast.If | ast.Try | ast.While | ast.For) for node in around
        ):
            break
    return kept[::-1] or [bind for bind in binds[:MAX_BINDS] if bind.how != "aug"]


def _encloses(bind: Bind, line: int) -> bool:
    """Whether a loop's own variable is asked for inside that loop."""
    end = bind.stmt.end_lineno or bind.stmt.lineno
    return bind.how == "for" and bind.stmt.lineno <= line <= end


class _Walk:
    """One question, with a bound on its steps."""

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        self.names = origins.names
        self.project = origins.project
        self.steps = MAX_STEPS
        self.seen: set[tuple[ast.expr, Scope]] = set()
        self.found: list[Origin] = []

    def run(self, node: ast.expr, scope: Scope) -> list[Origin]:
        queue = [(node, scope)]
        while queue and self.steps > 0:
            self.steps -= 1
            WORK.spend(4)
            item = queue.pop()
            if item in self.seen:
                continue
            self.seen.add(item)
            below = list(self.step(*item))
            if not below:
                self.found.append(Origin(*item))
            queue.extend(below)
        self.found.extend(Origin(*item) for item in queue)
        return self.found

    def step(self, node: ast.expr, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """One step back from an expression; nothing if it is where the value was made."""
        if isinstance(node, ast.IfExp):
            yield from ((node.body, scope), (node.orelse, scope))
        elif isinstance(node, ast.BoolOp):
            yield from ((value, scope) for value in node.values)
        elif isinstance(node, ast.NamedExpr | ast.Await | ast.Starred):
            yield node.value, scope
        elif isinstance(node, ast.Call):
            yield from self.call(node, scope)
        elif isinstance(node, ast.Name | ast.Attribute):
            yield from self.name(node, scope)

    def call(self, node: ast.Call, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        if isinstance(node.func, ast.Attribute) and node.func.attr in SAME and not self.names.qualify(node.func, scope):
            yield node.func.value, scope
            return
        target = self.origins.calls.target(node, scope)
        if target is not None and target.kind == "function":
            yield from ((value, target) for value in target.returns() if not isinstance(value, ast.Tuple))

    def name(self, node: ast.expr, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        key = dotted(node)
        if key is None:
            return
        binds = self.origins.binds(key, scope, node.lineno)
        for bind, home in binds:
            value = self.value(bind, home)
            if value is not None:
                yield value
        if not binds:
            yield from self.parameter(key, scope)
            yield from self.elsewhere(key, node, scope)

    def value(self, bind: Bind, home: Scope) -> tuple[ast.expr, Scope] | None:
        """What a binding gives its name: the value, or the element of a tuple that stands at the name's place."""
        if bind.value is None or bind.how in ("for", "aug"):
            return None
        value, scope = bind.value, home
        if bind.path and isinstance(value, ast.Call) and _gives_back(value, bind.path[0]):
            return value.args[bind.path[0]], home
        if bind.path and isinstance(value, ast.Call):
            target = self.origins.calls.target(value, home)
            returned = [r for r in target.returns() if isinstance(r, ast.Tuple)] if target is not None else []
            if target is None or not returned:
                return None
            value, scope = returned[-1], target
        for place in bind.path:
            if not isinstance(value, ast.Tuple | ast.List) or place >= len(value.elts):
                return None
            value = value.elts[place]
        return value, scope

    def parameter(self, key: str, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """What the callers of a function pass for a parameter."""
        home: Scope | None = scope
        while home is not None and key not in home.params:
            home = home.parent
        if home is None:
            return
        for site in self.origins.calls.callers(home)[:8]:
            value = passed(site, home, key)
            if value is not None:
                yield value, site.scope

    def elsewhere(self, key: str, node: ast.expr, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """An attribute of another object of the project (`trainer.model`), or a name of another file."""
        if isinstance(node, ast.Attribute) and not key.startswith("self."):
            owner = self.origins.calls.class_of(node.value, scope)
            if owner is not None:
                for bind, home in self.origins.attribute_binds(owner, f"self.{node.attr}", owner, 10**9):
                    value = self.value(bind, home)
                    if value is not None:
                        yield value
        imported = scope.module.imports.get(key)
        if imported is not None and imported.name:
            target = self.project.find(scope.module, imported.module, imported.level)
            for bind in target.top.binds.get(imported.name, []) if target is not None else []:
                value = self.value(bind, target.top) if target is not None else None
                if value is not None:
                    yield value


def _gives_back(call: ast.Call, place: int) -> bool:
    """Whether a call of a framework returns its arguments, prepared (`model, optimizer = amp.initialize(model,
    optimizer)`).
    """
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return (
        name in ("initialize", "prepare", "setup") and place < len(call.args) and isinstance(call.args[place], ast.Name)
    )


def passed(site: Site, function: Scope, name: str) -> ast.expr | None:
    """The expression that a call passes for the parameter `name`."""
    for item in site.call.keywords:
        if item.arg == name:
            return item.value
    params = function.params
    offset = 1 if params[:1] in (["self"], ["cls"]) else 0
    args = list(site.call.args)
    if site.name in ("spawn", "Process", "start_processes"):
        return None
    place = params.index(name) - offset
    if 0 <= place < len(args) and not any(isinstance(a, ast.Starred) for a in args[: place + 1]):
        return args[place]
    return None
