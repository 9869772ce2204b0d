"""Trace whether a value is on the device, in a graph, or from a batch."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep_lint.analysis.budget import WORK, cache_answers
from lockstep_lint.analysis.calls import find_passed, turns_off_gradients
from lockstep_lint.analysis.context import loops, withs
from lockstep_lint.analysis.index import Bind, Scope, Site
from lockstep_lint.analysis.nodes import (
    REFERENCES,
    SEQUENCES,
    Words,
    argument,
    constant,
    dotted,
    element_of,
    idents,
    keyword,
    last,
    targets,
    walk,
)
from lockstep_lint.analysis.training import LOSSES
from lockstep_lint.analysis.view import View
from lockstep_lint.events.event import CallBlock, Event
from lockstep_lint.events.forwards import MODELS, RUNS

__all__ = ["HOST", "Value", "losses", "reads", "runs_model", "value_at"]

# They make a tensor on the CPU.
MADE = {f"torch.{name}" for name in ("tensor", "Tensor", "FloatTensor", "LongTensor", "from_numpy", "zeros", "ones")}
MADE |= {f"torch.{name}" for name in ("rand", "randn", "randint", "randperm", "arange", "linspace", "full", "empty")}
# Calls whose result is a number, a text or an array on the host.
HOST = {"item", "tolist", "numpy", "float", "int", "bool", "str", "repr", "len", "format", "round", "isinstance"}
# What a tensor knows of itself without the device.
ABOUT = {"shape", "ndim", "dtype", "device", "size", "dim", "numel", "requires_grad", "grad_fn", "is_cuda", "keys"}
# Functions of torch that give no tensor of the device.
MAKERS = {"load", "device", "is_tensor", "is_grad_enabled", "LongTensor"}
# Builtins that pass on what they are given.
PASSING = {"sum", "max", "min", "abs", "list", "tuple", "dict", "sorted", "zip", "reversed"}
# Functions and methods whose result has no graph.
CUTS = {"detach", "detach_", "argmax", "argmin", "argsort", "topk", "eq", "ne", "gt", "lt", "ge", "le", "long", "int"}
CUTS |= {"isnan", "isinf", "isfinite", "bool", "round", "floor"}
READ = HOST | CUTS | {"data", "cpu"}
# Methods that give parts of a batch.
PARTS = {"items", "values", "get", "pop", "chunk", "split", "next", "__next__", "float", "long"}
# Parts of a model's output that are tensors of its graph; others may be numbers.
TENSORS = Words(r"loss|logit|output|pred|recon|feat|^outs?$|score|hidden|prob")
# Factors of a term of a loss.
FACTOR = Words(r"weight|coef|rate|ratio|factor|lambda|alpha|beta|gamma|scale|^w(_|$)|^i$|step|len|num|count")
# Frameworks whose loaders give batches on the device.
PREPARES = {"accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "composer", "lockstep", "trl"}
MAX_DEPTH = 7
MAX_CALLERS = 3
Calls = tuple[CallBlock, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """Facts of a value: on the device, in a graph, or from a batch."""

    device: bool = False
    graph: bool = False
    loaders: frozenset[tuple[ast.expr, Scope]] = frozenset()

    def __or__(self, other: "Value") -> "Value":
        return Value(self.device or other.device, self.graph or other.graph, self.loaders | other.loaders)

    def computed(self) -> "Value":
        """Return the same, as the input of a computation."""
        return Value(self.device, self.graph)

    def detached(self) -> "Value":
        """Return the same without its graph."""
        return Value(self.device, False, self.loaders)


def moves(call: ast.Call) -> bool:
    """Check whether a call returns its object on the device."""
    if last(call) == "to" and isinstance(call.func, ast.Attribute):
        place = argument(call, 0, "device")
        return place is not None and constant(place) != "cpu"
    return last(call) == "cuda" and isinstance(call.func, ast.Attribute)


UNKNOWN = Value()
COMPUTED = Value(device=True, graph=True)


def value_at(view: View, event: Event, node: ast.expr | None = None) -> Value:
    """Return the facts of an event's subject, resolved through the calls around it."""
    calls = tuple(block for block in event.path if isinstance(block, CallBlock))
    found = _of(view, event.mark.subject if node is None else node, event.scope, calls, MAX_DEPTH)
    return found.detached() if any(cuts_graph(block.node) for block in event.withs) else found


def cuts_graph(context: ast.expr) -> bool:
    """Check whether a context certainly keeps no graph, whatever flag it is given."""
    if isinstance(context, ast.IfExp):
        return cuts_graph(context.body) and cuts_graph(context.orelse)
    given = context.args if isinstance(context, ast.Call) else []
    return turns_off_gradients(context) and all(isinstance(value, ast.Constant) for value in given)


def _any(view: View, nodes: Iterator[ast.expr] | list[ast.expr], scope: Scope, calls: Calls, depth: int) -> Value:
    found = UNKNOWN
    for node in nodes:
        found |= _of(view, node, scope, calls, depth)
    return found


def _item(view: View, node: ast.Subscript, scope: Scope, calls: Calls, depth: int) -> Value:
    """Return the facts of an item: of a written dictionary's value, else of the container."""
    if isinstance(constant(node.slice), str):
        origins = [origin for origin in view.origins.of(node, scope) if origin.node is not node]
        found = UNKNOWN
        for origin in origins:
            found |= _of(view, origin.node, origin.scope, (), depth - 1)
        if origins:
            return found
    found = _of(view, node.value, scope, calls, depth)
    picks = any(isinstance(part, ast.Compare) for part in walk(node.slice))
    return found.computed() if picks else found  # a choice is a copy


@cache_answers
def _of(view: View, node: ast.expr | None, scope: Scope, calls: Calls, depth: int) -> Value:
    """Return the facts of an expression in a scope that was entered by some calls."""
    WORK.spend(8)
    if node is None or depth <= 0:
        return UNKNOWN
    if isinstance(node, ast.Call):
        return _evaluate_call(view, node, (), scope, calls, depth)
    if isinstance(node, REFERENCES):
        key = dotted(node)
        if isinstance(node, ast.Attribute) and node.attr in ABOUT:
            return UNKNOWN
        found = _look_up_name(view, key, node, scope, calls, depth) if key is not None else UNKNOWN
        if found == UNKNOWN and isinstance(node, ast.Attribute) and key not in ("self", "cls"):
            found = _of(view, node.value, scope, calls, depth)
            return found.detached() if node.attr in ("data", "grad") else found
        return found
    if isinstance(node, ast.Subscript):
        return _item(view, node, scope, calls, depth)
    if isinstance(node, ast.Starred | ast.Await | ast.NamedExpr):
        return _of(view, node.value, scope, calls, depth)
    if isinstance(node, ast.Compare):
        asks = any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
        sides = [] if asks else [node.left, *node.comparators]
        return Value(device=_any(view, sides, scope, calls, depth).device)
    if isinstance(node, ast.BinOp):
        text = any(isinstance(constant(each), str) for each in (node.left, node.right))  # `"%f" % loss` is no tensor
        return UNKNOWN if text else _any(view, [node.left, node.right], scope, calls, depth).computed()
    return _any(view, list(_arms(node)), scope, calls, depth)


def _arms(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts of an expression that its value is one of, or holds."""
    if isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.BoolOp):
        yield from node.values
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, SEQUENCES):
        yield from node.elts
    elif isinstance(node, ast.Dict):
        yield from node.values
    elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
        yield node.elt
    elif isinstance(node, ast.DictComp):
        yield node.value


def _look_up_name(view: View, key: str, node: ast.expr, scope: Scope, calls: Calls, depth: int) -> Value:
    """Return the facts of a name: of its bindings, argument or comprehension."""
    here = [b for b in scope.binds.get(key, []) if b.stmt.lineno == node.lineno and _ends_before(b.stmt, node)]
    binds = [(here[-1], scope)] if here else view.origins.binds(key, scope, node.lineno)
    found = UNKNOWN
    for bind, home in binds:
        part = _bound(view, bind, home, calls if home is scope else (), depth - 1)
        computes = key in losses(view, home) and bind.how == "assign" and not gives_number(view, bind.value, home)
        found |= COMPUTED if computes and not part.graph else part
    if binds:
        start = binds[0][0].stmt.lineno if len(binds) == 1 and binds[0][1] is scope else 0
        adds = (bind for bind in scope.binds.get(key, []) if bind.how == "aug")
        sums = [b.value for b in adds if b.value is not None and _reaches(b.stmt, start, node.lineno, scope)]
        sums += [site.call.args[0] for site in scope.named("append") if dotted(site.receiver) == key and site.call.args]
        return found | _any(view, sums, scope, calls, depth - 1).detached()
    if key in scope.params:
        return _look_up_argument(view, key, scope, calls, depth)
    for inner in comprehensions(scope).get(key, []):
        found |= _row(view, inner.iter, scope, calls, depth - 1)
    return found


def _reaches(add: ast.stmt, start: int, line: int, scope: Scope) -> bool:
    """Check whether a sum that begins at `start` contains an addition at a line."""
    again = [(loop.lineno, loop.end_lineno or 0) for loop in loops(add, scope.module)]  # or in the turn before
    return start < add.lineno < line or any(a <= line <= b and not a <= start <= b for a, b in again)


def _ends_before(stmt: ast.stmt, node: ast.expr) -> bool:
    """Check whether a statement of one line ends before an expression on it."""
    return stmt.end_lineno == node.lineno and (stmt.end_col_offset or 0) <= node.col_offset


@cache_answers
def comprehensions(scope: Scope) -> dict[str, list[ast.comprehension]]:
    """Return the comprehensions of a scope, by the names that they bind."""
    table: dict[str, list[ast.comprehension]] = {}
    for stmt in scope.stmts:
        if not isinstance(stmt, ast.If | ast.For | ast.While | ast.With | ast.Try):
            for part in walk(stmt):
                if isinstance(part, ast.comprehension):
                    for name, _ in targets(part.target):
                        table.setdefault(name, []).append(part)
    return table


def _look_up_argument(view: View, key: str, scope: Scope, calls: Calls, depth: int) -> Value:
    """Return the facts of a parameter, from the call around or from all callers."""
    inner = next((at for at in range(len(calls) - 1, -1, -1) if calls[at].function is scope), None)
    if inner is not None:
        site = calls[inner].site
        return _of(view, find_passed(site, scope, key), site.scope, calls[:inner], depth - 1)
    if key in losses(view, scope):
        return COMPUTED
    found = UNKNOWN
    for site in view.calls.callers(scope)[:MAX_CALLERS]:
        found |= _of(view, find_passed(site, scope, key), site.scope, (), depth - 2)
    return found


def _bound(view: View, bind: Bind, scope: Scope, calls: Calls, depth: int) -> Value:
    """Return the facts of what a binding gives its name."""
    value = bind.value
    if value is None or bind.how not in ("assign", "for"):
        return UNKNOWN
    if bind.how == "for":
        counted = isinstance(value, ast.Call) and last(value) == "enumerate"
        keys = isinstance(value, ast.Call) and last(value) == "items"
        return UNKNOWN if (counted or keys) and bind.path == (0,) else _row(view, value, scope, calls, depth)
    if bind.path and isinstance(value, SEQUENCES):
        return _any(view, list(element_of(value, bind.path)), scope, calls, depth)
    if bind.path and isinstance(value, ast.Call):
        found = _evaluate_call(view, value, bind.path, scope, calls, depth)
        return found if TENSORS.search(bind.key) or view.calls.target(value, scope) else found.detached()
    return _of(view, value, scope, calls, depth)


def _row(view: View, header: ast.expr, scope: Scope, calls: Calls, depth: int) -> Value:
    """Return the facts of a loop's items: a loader's batches, or a value's items."""
    over = view.kinds.iterated(header, scope)
    makes = isinstance(header, ast.Call) and isinstance(header.func, ast.Attribute) and over in header.args
    if makes and isinstance(header, ast.Call) and not (last(header) in PARTS or view.names.qualify(header.func, scope)):
        return (
            _of(view, header, scope, calls, depth)
            if not view.kinds.is_loader(over, scope)
            else _batch(view, over, scope)
        )
    if view.kinds.is_loader(over, scope):
        return _batch(view, over, scope)
    return _of(view, over, scope, calls, depth)


def _batch(view: View, loader: ast.expr, scope: Scope) -> Value:
    """Return a batch of a loader, which some frameworks give on the device."""
    return Value(device=bool(view.frameworks & PREPARES), loaders=frozenset({(loader, scope)}))


def _evaluate_call(view: View, call: ast.Call, path: tuple[int, ...], scope: Scope, calls: Calls, depth: int) -> Value:
    """Return the facts of what a call gives, at a place of a tuple."""
    name, full = last(call), view.names.qualify(call.func, scope)
    method = call.func.value if isinstance(call.func, ast.Attribute) and not full else None
    if method is not None and moves(call):
        return _evaluate_move(view, call, method, scope, calls, depth)
    if name in HOST or (method is not None and name in ABOUT):
        return UNKNOWN
    if method is not None and (name == "cpu" or (name == "to" and view.is_cpu(argument(call, 0, "device"), scope))):
        return Value(graph=_of(view, method, scope, calls, depth).graph)
    if full:
        return _of_library(view, call, full, scope, calls, depth)
    target = view.calls.target(call, scope)
    if target is not None and target.kind == "function" and target.name not in ("__call__", "forward", "__init__"):
        return _evaluate_return(view, target, call, path, scope, calls, depth)
    if name in ("next", "__next__", "iter", "enumerate") or (target is None and name in PASSING and method is None):
        return _any(view, [_row_of(view, each, scope) for each in call.args[:1]], scope, calls, depth) | _next(
            view, call, scope
        )
    if "detach_" in name and name not in CUTS and method is not None:
        return COMPUTED.detached()
    if runs_model(view, call, scope):
        return _evaluate_output(call, scope, COMPUTED)
    return _of_loss(view, call, method if target is None else None, scope, calls, depth)


def _of_loss(view: View, call: ast.Call, method: ast.expr | None, scope: Scope, calls: Calls, depth: int) -> Value:
    """Return the facts of what a loss computes, or a method of a value."""
    name = last(call)
    if LOSSES.search(name) and call.args and not name[:1].isupper():
        found = _any(view, call.args, scope, calls, depth).computed()
        return _evaluate_output(call, scope, found)
    if method is None:
        return UNKNOWN
    found = _of(view, method, scope, calls, depth)
    if name in CUTS:
        return found.detached()
    return found if name in PARTS else found.computed()


def _row_of(view: View, node: ast.expr, scope: Scope) -> ast.expr:
    return view.kinds.iterated(node, scope)


def _next(view: View, call: ast.Call, scope: Scope) -> Value:
    """Return a batch, where `next` asks a loader, or an iterator that one made."""
    if last(call) not in ("next", "__next__"):
        return UNKNOWN
    asked = call.args[0] if call.args else getattr(call.func, "value", None)
    for origin in view.origins.of(asked, scope):
        inner = origin.call.args[0] if origin.call is not None and origin.call.args else origin.node
        over = view.kinds.iterated(inner, origin.scope)
        if view.kinds.is_loader(over, origin.scope):
            return _batch(view, over, origin.scope)
    return UNKNOWN


def _evaluate_move(view: View, call: ast.Call, method: ast.expr, scope: Scope, calls: Calls, depth: int) -> Value:
    """Return the facts of `x.to(...)` and `x.cuda()`: of a model none."""
    place = argument(call, 0, "device")
    if view.kinds.is_model(method, scope) or last(method)[:1].isupper():
        return UNKNOWN
    found = _of(view, method, scope, calls, depth)
    return UNKNOWN if view.is_cpu(place, scope) else Value(device=True, graph=found.graph)


def _of_library(view: View, call: ast.Call, full: str, scope: Scope, calls: Calls, depth: int) -> Value:
    """Return the facts of a library function's result. A torch function's follow its arguments."""
    if full == "torch.autograd.Variable":
        return _any(view, call.args[:1], scope, calls, depth)
    if not full.startswith("torch.") or last(call)[:1].isupper():
        return UNKNOWN
    place = keyword(call, "device")
    if place is not None:
        return Value(device=not view.is_cpu(place, scope))
    if last(call) in ("clip_grad_norm_", "get_total_norm") or full == "torch.autograd.grad":
        return Value(device=True)
    if full in MADE or last(call) in MAKERS:
        return UNKNOWN
    values = [*call.args, *(item.value for item in call.keywords)]
    found = _any(view, values, scope, calls, depth).computed()
    return found.detached() if last(call) in CUTS else found


def _evaluate_return(
    view: View, target: Scope, call: ast.Call, path: tuple[int, ...], scope: Scope, calls: Calls, depth: int
) -> Value:
    """Return the facts of what a function of the project returns."""
    site = sites_of(scope).get(call)
    inner = (*calls, CallBlock(site, target)) if site is not None and depth > 1 else calls
    parts = [tuple(element_of(each, path)) for each in target.returns()]
    values = [part for found in parts for part in found] or target.returns()
    found = _any(view, values, target, inner, depth - 1)
    return found.detached() if any(map(cuts_graph, target.decorators)) else found


@cache_answers
def sites_of(scope: Scope) -> dict[ast.Call, Site]:
    """Return the calls of a scope."""
    return {site.call: site for site in scope.sites}


def _evaluate_output(call: ast.Call, scope: Scope, found: Value) -> Value:
    """Return the facts of a model's output, which has no graph under no_grad."""
    site = sites_of(scope).get(call)
    around = (*withs(site.stmt, scope.module), *scope.decorators) if site is not None else scope.decorators
    return found.detached() if any(map(cuts_graph, around)) else found


def runs_model(view: View, call: ast.Call, scope: Scope) -> bool:
    """Check whether a call runs a model (`model(x)`, `self.net.forward(x)`)."""
    func = call.func
    if not (call.args or call.keywords) or not isinstance(func, REFERENCES):
        return False
    if isinstance(func, ast.Attribute) and RUNS.search(func.attr):
        return MODELS.search(last(func.value)) or view.kinds.module_class(func.value, scope) is not None
    made = view.names.definition(func, scope)
    if made is not None and made.kind == "class":
        return False
    if dotted(func) == "self":
        return scope.owner is not None and view.kinds.is_module_class(scope.owner)
    return MODELS.search(last(func)) or view.kinds.run_class(func, scope) is not None


@cache_answers
def losses(view: View, scope: Scope) -> frozenset[str]:
    """Return the names whose gradients a function computes, with their summands."""
    queue = [dotted(view.steps.loss_of(site)) or "" for site in scope.sites if view.steps.backwards(site)]
    if scope.name == "training_step":
        queue += [dotted(value) or "" for value in scope.returns()]
    found: set[str] = set()
    while queue:
        name = queue.pop()
        if name in found or not name:
            continue
        found.add(name)
        for bind in scope.binds.get(name, []):
            scales = isinstance(bind.stmt, ast.AugAssign) and not isinstance(bind.stmt.op, ast.Add | ast.Sub)
            queue += [term for term in _terms(bind.value) if not scales and is_computed(scope, term)]
    return frozenset(found)


def is_computed(scope: Scope, term: str) -> bool:
    """Check whether a summand is computed by calls and sums, and is no factor."""
    made = [bind.value for bind in scope.binds.get(term, [])]
    return (
        bool(made)
        and not FACTOR.search(term)
        and all(
            isinstance(value, ast.Call | ast.BinOp) and last(value) not in ("next", "len", "get", "time")
            for value in made
        )
    )


def _terms(value: ast.expr | None) -> Iterator[str]:
    """Yield the names that a value is the sum of."""
    if isinstance(value, ast.BinOp):
        yield from _terms(value.left)
        yield from _terms(value.right) if not isinstance(value.op, ast.Div) else ()
    elif isinstance(value, ast.Name):
        yield value.id


def gives_number(view: View, value: ast.expr | None, scope: Scope) -> bool:
    """Check whether a value, or each result of its function, is read to the host."""
    target = view.calls.target(value, scope) if isinstance(value, ast.Call) else None
    given = list(target.returns()) if target is not None and target.kind == "function" else []
    return reads(value) or (bool(given) and all(last(each) in HOST for each in given))


def reads(value: ast.expr | None) -> bool:
    """Check whether an expression reads a value to the host, or detaches it."""
    return value is None or constant(value) is not None or any(name in READ for name in idents(value))
