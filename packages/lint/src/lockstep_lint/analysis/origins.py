"""Trace values to their origins, through names, attributes, parameters and returns."""

import ast
import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lockstep_lint.analysis.budget import WORK, cache_answers
from lockstep_lint.analysis.calls import Calls, find_argument, find_passed
from lockstep_lint.analysis.context import above, guards, loops
from lockstep_lint.analysis.index import Bind, Scope
from lockstep_lint.analysis.nodes import REFERENCES, SEQUENCES, constant, dotted, element_of, has_star, head, last

__all__ = ["OBJECT", "SAME", "Known", "Origin", "Origins", "default", "find_results", "outcome", "reaching", "under"]


# The call through which a search came into a function: its arguments are the parameters, not those of other calls.
Entry = tuple[ast.Call, Scope]


def find_results(function: Scope, entry: Entry) -> Iterator[ast.expr]:
    """Yield a call's possible results, without those that its literal arguments rule out."""
    for stmt in function.stmts:
        if isinstance(stmt, ast.Return) and stmt.value is not None and not is_excluded(stmt, function, entry):
            yield stmt.value


def is_excluded(stmt: ast.stmt, function: Scope, entry: Entry | None) -> bool:
    """Check whether a call's literal arguments rule out a statement of the function."""
    known = literals(entry[0], function) if entry is not None else {}
    return bool(known) and any(outcome(g.test, known) is (not g.when) for g in guards(stmt, function.module))


# What is known of names: their literals, or OBJECT for what is neither None nor a literal.
Known = dict[str | None, object]
OBJECT = object()


@cache_answers
def literals(call: ast.Call, function: Scope) -> Known:
    """Return the literal arguments of a call, of parameters that are never bound again."""
    found = Known()
    for name in function.params:
        value = find_argument(call, function, name) or default(function, name, call)
        if isinstance(value, ast.Constant) and name not in function.binds:
            found[name] = value.value
    return found


def outcome(test: ast.expr, known: Known) -> bool | None:
    """Evaluate a test by literals alone; None if they do not decide it."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = outcome(test.operand, known)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        found, ends = {outcome(value, known) for value in test.values}, isinstance(test.op, ast.Or)
        return ends if ends in found else not ends if found == {not ends} else None
    if (key := dotted(test)) in known:
        value = known[key]
        return None if value is OBJECT else bool(value)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return evaluate(test, known)
    return False if last(test) == "TYPE_CHECKING" else None


def evaluate(test: ast.Compare, known: Known) -> bool | None:
    """Evaluate a comparison of a known name with a literal."""
    key, op, right = dotted(test.left), test.ops[0], test.comparators[0]
    if key not in known:
        return None
    value, literal = known[key], constant(right)
    if isinstance(op, ast.In | ast.NotIn) and value is not OBJECT and isinstance(right, ast.Tuple | ast.List | ast.Set):
        return (value in [constant(item) for item in right.elts]) is isinstance(op, ast.In)
    if (literal is None and not isinstance(right, ast.Constant)) or (value is OBJECT and literal is not None):
        return None
    if isinstance(op, ast.Eq | ast.Is):
        return value == literal
    return value != literal if isinstance(op, ast.NotEq | ast.IsNot) else None


def default(function: Scope, name: str, call: ast.Call) -> ast.expr | None:
    """Return the default of a parameter that a call certainly leaves out."""
    node = function.node
    if has_star(call) or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    plain = [*node.args.posonlyargs, *node.args.args]
    pairs = [*zip(reversed(plain), reversed(node.args.defaults), strict=False)]
    found: list[ast.expr | None] = [value for arg, value in pairs if arg.arg == name]
    found += [value for arg, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if arg.arg == name]
    return found[0] if found else None


# Methods of a module or tensor that return the object itself, as far as the questions here go.
SAME = {
    "to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16", "double", "apply", "requires_grad_",
    "detach", "contiguous", "clone", "xpu", "npu",
}  # fmt: skip
# What a function is given and gives back alike: compiled, as a copy, or with other norms.
PASSING = {"torch.compile", "copy.deepcopy", "copy.copy"}
PASSING |= {"torch.nn.SyncBatchNorm.convert_sync_batchnorm", "apex.parallel.convert_syncbn_model"}
MAX_STEPS = 120
# A name that is bound more often than this in one scope is generated code.
MAX_BINDS = 40
# A function that returns another's tuples, which returns another's ...
MAX_TUPLES = 3


@dataclass(eq=False, slots=True)
class Origin:
    """An expression that a value may come from, and the scope that it is in."""

    node: ast.expr
    scope: Scope

    @property
    def call(self) -> ast.Call | None:
        """The call that made the value, if it was one."""
        return self.node if self.node.__class__ is ast.Call else None


def find_stored(key: str, scope: Scope, wanted: object) -> Iterator[ast.expr]:
    """Yield what a function stores in an empty table, under the wanted key."""
    begun = [bind.value for bind in scope.binds.get(key, [])]
    if not begun or not all(isinstance(value, ast.Dict) and not value.keys for value in begun):
        return
    for stmt in scope.stmts:
        target = stmt.targets[0] if isinstance(stmt, ast.Assign) else None
        if isinstance(stmt, ast.Assign) and isinstance(target, ast.Subscript) and dotted(target.value) == key:
            yield from (stmt.value,) if constant(target.slice) in (None, wanted) else ()


class Origins:
    """Follows values backwards through a project; what cannot be followed is an origin by itself."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.names = calls.names
        self.project = calls.project
        self.memo: dict[tuple[ast.expr, Scope], list[Origin]] = {}

    def of(self, node: ast.expr | None, scope: Scope) -> list[Origin]:
        """Return every expression that the value of `node` may come from."""
        if node is None:
            return []
        key = (node, scope)
        found = self.memo.get(key)
        if found is None:
            first = head(node)
            known = first is not None and self.names.foreign(first, scope.module)
            known = known or self.names.unknown(node, scope)
            found = self.memo[key] = [Origin(node, scope)] if known else _Walk(self).run(node, scope)
        return found

    def calls_of(self, node: ast.expr | None, scope: Scope) -> Iterator[tuple[ast.Call, Scope, str]]:
        """Yield the calls among the origins of `node`, with the callees' full names."""
        for origin in self.of(node, scope):
            call = origin.call
            if call is not None:
                yield call, origin.scope, self.names.qualify(call.func, origin.scope)

    def binds(self, key: str, scope: Scope, line: int) -> list[tuple[Bind, Scope]]:
        """Return the bindings of a name that may hold at a line of a scope."""
        if key.startswith("self.") and scope.owner is not None:
            return self.attribute_binds(scope.owner, key, scope, line)
        current: Scope | None = scope
        inner = scope
        while current is not None:
            found = current.binds.get(key)
            if found and current.kind != "class":
                if current is scope and key in current.params and _after(found[0], line):
                    return []  # `model = model.to(device)`: on the right it is still the parameter
                held = reaching(found, current, line) if current is scope else held_by(found, current, inner)
                return [(bind, current) for bind in held]
            if current.kind == "function" and key.split(".")[0] in current.params:
                return []
            inner, current = current, current.parent
        return []

    def attribute_binds(self, owner: Scope, key: str, scope: Scope, line: int) -> list[tuple[Bind, Scope]]:
        """Return the bindings of `self.x` in a class; in its own method those before `line`."""
        here = [bind for bind in scope.binds.get(key, []) if not _after(bind, line)]
        if here:
            return [(bind, scope) for bind in reaching(here, scope, line)]
        found = []
        for current in (owner, *self.names.parents(owner)):
            for method in current.defs.values():
                binds = method.binds.get(key, [])
                found += [(bind, method) for bind in (reaching(binds, method, 10**9) if binds else [])]
        return found


def reaching(binds: list[Bind], scope: Scope, line: int) -> list[Bind]:
    """Return the bindings that may hold at a line. Those before the last certain one do not."""
    end = bisect.bisect_left(binds, line, key=lambda bind: bind.stmt.lineno)
    kept: list[Bind] = []
    for bind in reversed(binds[max(0, end - MAX_BINDS) : end]):
        if bind.how == "aug" or _covers(bind, line):
            continue
        kept.append(bind)
        if _encloses(bind, line) or not any(
            isinstance(node, ast.If | ast.Try | ast.While | ast.For) and not _holds(node, place, line)
            for node, place in above(bind.stmt, scope.module)
        ):
            break
    return kept[::-1] or [bind for bind in binds[:MAX_BINDS] if bind.how != "aug"]


def held_by(binds: list[Bind], scope: Scope, inner: Scope) -> list[Bind]:
    """Return the bindings that may hold when an inner function runs, later ones included."""
    line = getattr(inner.node, "lineno", 0)
    before = [bind for bind in binds if bind.stmt.lineno < line]
    return [*(reaching(before, scope, line) if before else []), *binds[len(before) :]]


def _after(bind: Bind, line: int) -> bool:
    """Check whether an assignment takes effect only after a line."""
    return bind.stmt.lineno >= line or _covers(bind, line)


def _covers(bind: Bind, line: int) -> bool:
    """Check whether a line is in the assignment, where the earlier value still holds."""
    return isinstance(bind.stmt, ast.Assign | ast.AnnAssign) and line <= (bind.stmt.end_lineno or 0)


def _holds(node: ast.stmt, place: str, line: int) -> bool:
    """Check whether a line is in the same block of a statement."""
    block = getattr(node, place, [])
    return bool(block) and isinstance(block[-1], ast.stmt) and line <= (block[-1].end_lineno or 0)


def _encloses(bind: Bind, line: int) -> bool:
    """Check whether a loop's own variable is asked for inside that loop."""
    end = bind.stmt.end_lineno or bind.stmt.lineno
    return bind.how == "for" and bind.stmt.lineno <= line <= end


Item = tuple[ast.expr, Scope, Entry | None]


class _Walk:
    """One question, with a bound on its steps."""

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        self.names = origins.names
        self.project = origins.project
        self.steps = MAX_STEPS
        self.seen: set[tuple[ast.expr, Scope, ast.Call | None]] = set()
        self.found: list[Origin] = []

    def run(self, node: ast.expr, scope: Scope) -> list[Origin]:
        queue: list[Item] = [(node, scope, None)]
        while queue and self.steps > 0:
            self.steps -= 1
            WORK.spend(4)
            item = queue.pop()
            key = (item[0], item[1], item[2][0] if item[2] else None)
            if key in self.seen:
                continue
            self.seen.add(key)
            below = list(self.back(*item))
            if not below:
                self.found.append(Origin(item[0], item[1]))
            queue.extend(below)
        self.found.extend(Origin(item[0], item[1]) for item in queue)
        return self.found

    def back(self, node: ast.expr, scope: Scope, entry: Entry | None) -> Iterable[Item]:
        """Return the expressions one step back; none where the value was made."""
        if isinstance(node, REFERENCES):
            return self.name(node, scope, entry)
        if isinstance(node, ast.Call):
            return self.call(node, scope, entry)
        if isinstance(node, ast.Subscript):
            return self.item(node, scope, entry)
        if isinstance(node, ast.IfExp):
            known = outcome(node.test, literals(entry[0], scope)) if entry is not None else None
            arms = ((node.body, True), (node.orelse, False))
            return [(arm, scope, entry) for arm, when in arms if known is not (not when)]
        if isinstance(node, ast.BoolOp):
            return [(value, scope, entry) for value in node.values]
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Starred):
            return [(node.value, scope, entry)]
        return ()

    def call(self, node: ast.Call, scope: Scope, entry: Entry | None) -> Iterator[Item]:
        if isinstance(node.func, ast.Attribute) and node.func.attr in SAME and not self.names.qualify(node.func, scope):
            yield node.func.value, scope, entry
            return
        if node.args and self.names.qualify(node.func, scope) in PASSING:
            yield node.args[0], scope, entry
            return
        target = self.origins.calls.target(node, scope)
        if target is not None and target.kind == "function":
            for value in find_results(target, (node, scope)):
                if not isinstance(value, ast.Tuple):
                    yield value, target, (node, scope)
            for value in find_iterable(target):
                yield value, target, (node, scope)

    def name(self, node: ast.expr, scope: Scope, entry: Entry | None) -> Iterator[Item]:
        key = dotted(node)
        if key is None:
            return
        binds = self.origins.binds(key, scope, node.lineno)
        for bind, home in binds:
            if home is scope and is_excluded(bind.stmt, scope, entry):
                continue
            for value, place in self.values(bind, home):
                yield value, place, entry if home is scope and place is scope else None
        if not binds:
            yield from self.parameter(key, scope, entry)
        if not binds or all("." in key and _covers(bind, node.lineno) for bind, _ in binds):  # `x.net = DDP(x.net)`
            yield from ((value, home, None) for value, home in self.elsewhere(key, node, scope))

    def item(self, node: ast.Subscript, scope: Scope, entry: Entry | None) -> Iterator[Item]:
        """Yield the value of a key of a literal dictionary (`loaders["train"]`)."""
        key = dotted(node.value)
        for bind, home in self.origins.binds(key, scope, node.lineno) if key is not None else []:
            tables = [(bind.value, home)] if not bind.path else []
            if isinstance(bind.value, ast.Call):
                target = self.origins.calls.target(bind.value, home)
                tables = [(value, target) for value in target.returns()] if target is not None else []
            for table, place in tables:
                if isinstance(table, ast.Name):  # a function returns the table that it has filled
                    yield from ((value, place, None) for value in find_stored(table.id, place, constant(node.slice)))
                if not bind.path and isinstance(table, ast.Dict) and not table.keys:
                    yield from ((value, place, None) for value in find_stored(bind.key, home, constant(node.slice)))
                if isinstance(table, ast.Dict):
                    yield from ((value, place, None) for value in under(table, constant(node.slice)))
                elif isinstance(table, ast.DictComp):
                    yield table.value, place, None

    def values(self, bind: Bind, home: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield the values that a binding may give its name, also out of returned tuples."""
        value = bind.value
        if value is None or bind.how in ("for", "aug"):
            return
        if bind.path and isinstance(value, ast.Call):
            if _gives_back(value, bind.path[0]):
                yield value.args[bind.path[0]], home
                return
            for pair, target in self.tuples(value, home):
                yield from ((element, target) for element in element_of(pair, bind.path))
            return
        if bind.path and isinstance(value, ast.Name) and value.id in home.params and value.id not in home.binds:
            for site in self.origins.calls.callers(home)[:8]:
                whole = find_passed(site, home, value.id)
                yield from ((part, site.scope) for part in element_of(whole, bind.path))
            return
        yield from ((element, home) for element in element_of(value, bind.path))

    def tuples(self, call: ast.Call, scope: Scope, depth: int = 0) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield the tuples that a call may return, also through nested calls."""
        target = self.origins.calls.target(call, scope)
        for value in find_results(target, (call, scope)) if target is not None else ():
            if target is not None and isinstance(value, SEQUENCES):
                yield value, target
            elif target is not None and isinstance(value, ast.Call) and depth < MAX_TUPLES:
                yield from self.tuples(value, target, depth + 1)

    def parameter(self, key: str, scope: Scope, entry: Entry | None) -> Iterator[Item]:
        """Yield the arguments for a parameter: of the call followed, or of all calls."""
        home: Scope | None = scope
        while home is not None and key not in home.params:
            home = home.parent
        if home is None:
            return
        if entry is not None and home is scope:
            value = find_argument(entry[0], home, key)
            if value is not None:
                yield value, entry[1], None
            return
        for site in self.origins.calls.callers(home)[:8]:
            value = find_passed(site, home, key)
            if value is not None:
                yield value, site.scope, None

    def elsewhere(self, key: str, node: ast.expr, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield another object's attribute (`trainer.model`), a getter's result, or another file's name."""
        if isinstance(node, ast.Attribute):
            own = key.startswith("self.")
            owner = scope.owner if own else self.origins.calls.class_of(node.value, scope)
            if owner is not None:
                for bind, home in [] if own else self.origins.attribute_binds(owner, f"self.{node.attr}", owner, 10**9):
                    yield from self.values(bind, home)
                getter = self.names.member(owner, node.attr)
                if getter is not None and any(last(d) in GETTERS for d in getter.decorators):
                    yield from ((value, getter) for value in getter.returns())
        imported = scope.module.imports.get(key)
        if imported is not None and imported.name:
            target = self.project.find(scope.module, imported.module, imported.level)
            for bind in target.top.binds.get(imported.name, []) if target is not None else []:
                yield from self.values(bind, target.top) if target is not None else ()


GETTERS = ("property", "cached_property")


def under(table: ast.Dict, key: object) -> Iterator[ast.expr]:
    """Yield the values that a dictionary may give for a key."""
    pairs = [(constant(k), v) for k, v in zip(table.keys, table.values, strict=True)]
    same = [value for name, value in pairs if key is not None and name == key]
    yield from same or ([value for _, value in pairs] if key is None else [])


def find_iterable(function: Scope) -> Iterator[ast.expr]:
    """Yield the iterable whose items a generator yields (`for batch in loader: yield batch`)."""
    for stmt in function.stmts:
        if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Yield):
            around = loops(stmt, function.module)
            if around and isinstance(around[0], ast.For) and dotted(around[0].iter) is not None:
                yield around[0].iter


def _gives_back(call: ast.Call, place: int) -> bool:
    """Check whether a framework's call returns its arguments (`model, opt = amp.initialize(model, opt)`)."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return (
        name in ("initialize", "prepare", "setup") and place < len(call.args) and isinstance(call.args[place], ast.Name)
    )
