"""Find names and expressions that keep the autograd graph of a training step."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import given as calls_given
from lockstep_lint.analysis.calls import given as handed_in
from lockstep_lint.analysis.calls import passed, turns_off_gradients
from lockstep_lint.analysis.context import Loop, inside, withs
from lockstep_lint.analysis.index import Bind, Scope, Site
from lockstep_lint.analysis.names import Names
from lockstep_lint.analysis.nodes import Words, constant, dotted, element_of, is_true, last, walk
from lockstep_lint.analysis.origins import reaching, returned
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View

__all__ = [
    "added",
    "chain",
    "computes_loss",
    "cuts_graph",
    "evaluated",
    "expanded",
    "handed_to_keep",
    "holds",
    "live_at",
    "live_names",
    "plainly",
]


# Methods, and functions of torch, that give a tensor of the graph of what they are given.
SMOOTH = {"sum", "mean", "view", "reshape", "flatten", "permute", "transpose", "contiguous", "float", "double", "clone"}
SMOOTH |= {"softmax", "sigmoid", "log_softmax", "log", "exp", "pow", "square", "sqrt", "abs", "clamp", "squeeze"}
SMOOTH |= {"unsqueeze", "mul", "div", "add", "sub", "relu", "tanh", "cpu", "cuda", "to", "norm", "std", "mse_loss"}
SMOOTH |= {"l1_loss", "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"}
# How many names a value is followed back over.
MAX_NAMES = 8


def flows_through(names: Names, function: Scope, given: str) -> bool:
    """Whether all that a function returns is computed from one of its parameters, and nothing cuts it off."""
    returned = list(function.returns())
    return bool(returned) and all(Flow(names, function, given).holds(value, MAX_NAMES) for value in returned)


class Flow:
    """Follows the values of a function back to one of its parameters."""

    def __init__(self, names: Names, function: Scope, given: str) -> None:
        self.names = names
        self.function = function
        self.given = given

    def holds(self, value: ast.AST, left: int, within: str = "") -> bool:
        """Whether a value still has the graph of the parameter; `within` is the name that it is given to."""
        if isinstance(value, ast.Name):
            return self.named(value.id, left, within)
        if isinstance(value, ast.BinOp):
            return self.holds(value.left, left, within) or self.holds(value.right, left, within)
        if isinstance(value, ast.UnaryOp) and not isinstance(value.op, ast.Not):
            return self.holds(value.operand, left, within)
        if isinstance(value, ast.Subscript):
            return self.holds(value.value, left, within)
        if not isinstance(value, ast.Call) or last(value) not in SMOOTH:
            return False
        if self.names.qualify(value.func, self.function).startswith("torch."):
            return any(self.holds(arg, left, within) for arg in value.args)
        return isinstance(value.func, ast.Attribute) and self.holds(value.func.value, left, within)

    def named(self, name: str, left: int, within: str) -> bool:
        """Whether all that a name is given has the graph; its own value on the right of that is what it was before."""
        binds = [bind for bind in self.function.binds.get(name, []) if bind.how in ("assign", "aug")]
        if name == within or not binds:
            return name == self.given
        if not left or any(bind.path or bind.value is None for bind in binds):
            return False
        whole = [bind for bind in binds if bind.how == "assign"]
        return bool(whole) and all(self.turned(bind.value, name, left, binds) for bind in whole if bind.value)

    def turned(self, value: ast.expr, name: str, left: int, binds: list[Bind]) -> bool:
        """Whether a value that a name is given has the graph: where it is made of the name itself (`loss = 1 - loss`),
        the name's other values say so.
        """
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value)) and len(binds) > 1:
            return name != self.given
        return self.holds(value, left - 1, name)


# Calls and attributes after which nothing of the graph is left.
CUTS = {
    "item",
    "detach",
    "tolist",
    "numpy",
    "float",
    "int",
    "data",
    "len",
    "size",
    "shape",
    "argmax",
    "str",
    "eq",
    "round",
}
# Methods and functions that give a number, an array or a tensor without the graph.
SEVERS = {"item", "detach", "tolist", "numpy", "data"}
NUMBERS = {"float", "int"}
# Methods that give back a tensor of the same graph.
KEEPS = {
    "cpu",
    "cuda",
    "to",
    "float",
    "half",
    "double",
    "mean",
    "sum",
    "clone",
    "squeeze",
    "unsqueeze",
    "view",
    "reshape",
}
# What computes a loss, and where a model of transformers has its outputs.
LOSSES = Words(r"criterion|loss|^crit$|cross_entropy|kl_div", re.IGNORECASE)
OUTPUTS = {"loss", "logits", "last_hidden_state"}
# How many names a value is followed back over.
GRAPHS_MAX_NAMES = 3


def live_names(view: View, training: Training) -> set[str]:
    """The names in a loop that hold tensors of the step's graph."""
    if training.backward.scope is training.scope:
        loss = dotted(view.steps.loss_of(training.backward))
        return graph_names(training, {loss} if loss else set())
    return handed(view, training) | graph_names(training, given(view, training))


def evaluated(view: View, forward: Site, loop: Loop) -> set[str]:
    """The names in a loop that hold what a call of the model gave there, with its graph, or losses of that."""
    scope = forward.scope
    names: set[str] = set()
    for _ in range(3):
        for name, binds in scope.binds.items():
            made = [bind for bind in binds if bind.how == "assign" and inside(bind.stmt, loop, scope.module)]
            if made and all(computed_from(view, bind, forward, names) for bind in made):
                names.add(name)
    return names


def computed_from(view: View, bind: Bind, forward: Site, names: set[str]) -> bool:
    """Whether a name is given what a call of the model gave, a loss of that, or a part of it."""
    value = bind.value
    if value is None:
        return False
    if isinstance(value, ast.Subscript):
        return not bind.path and dotted(value.value) in names and constant(value.slice) is not None
    if isinstance(value, ast.Attribute):
        return dotted(value.value) in names and value.attr in OUTPUTS
    if start(value) is forward.call:
        return not gives_arrays(view, bind, forward)
    return not bind.path and computes_loss(view, value, forward, names)


def gives_arrays(view: View, bind: Bind, forward: Site) -> bool:
    """Whether a model whose class is the project's own gives numbers or arrays of numpy where a name is bound, by its
    own method or by the `__call__` that it has in the place of torch's.
    """
    function = view.calls.target(forward.call, forward.scope)
    if function is None:
        owner = view.kinds.run_class(forward.call.func, forward.scope)
        function = view.names.member(owner, "forward") if owner is not None else None
    if function is None or function.kind != "function":
        return False
    given = [part for each in returned(function, (forward.call, forward.scope)) for part in element_of(each, bind.path)]
    return bool(given) and all(is_array(view, part, function, GRAPHS_MAX_NAMES) for part in given)


def is_array(view: View, value: ast.expr, scope: Scope, names: int) -> bool:
    """Whether a value is a number, an array of numpy or a list of these, by way of a few names at most."""
    if isinstance(value, ast.Call) and last(value) in ("list", "map") and isinstance(value.func, ast.Name):
        return any(is_array(view, arg, scope, names) for arg in value.args)
    if not isinstance(value, ast.Name) or not names:
        return severed(value)
    binds = view.origins.binds(value.id, scope, value.lineno)
    return bool(binds) and all(
        bind.value is not None and not bind.path and is_array(view, bind.value, home, names - 1) for bind, home in binds
    )


def computes_loss(view: View, value: ast.expr, forward: Site, names: set[str]) -> bool:
    """Whether an expression is the loss of what a call of the model gave, still with its graph."""
    if isinstance(value, ast.BinOp):  # `criterion(output, y) * len(x)`
        return any(computes_loss(view, side, forward, names) for side in (value.left, value.right))
    call = start(value)
    if not isinstance(call, ast.Call):
        return False
    target = view.calls.target(call, forward.scope)
    if target is not None and scores(view, call, target, forward, names):
        return True
    if not LOSSES.search(last(call.func)):
        return False
    if target is not None and (target.kind != "function" or not all(map(lives, target.returns()))):
        return False
    return any(start(each) is forward.call or holds(each, names) for each in call.args)


def scores(view: View, call: ast.Call, target: Scope, forward: Site, names: set[str]) -> bool:
    """Whether a function of the project gives what it computes of the model's output, with the graph of that."""
    if target.kind != "function" or any(map(turns_off_gradients, target.decorators)):
        return False
    for name in target.params:
        value = handed_in(call, target, name)
        if value is not None and (start(value) is forward.call or chain(value) in names):
            return flows_through(view.names, target, name)
    return False


def start(value: ast.expr) -> ast.expr:
    """Return the start of a chain of methods that keep the graph."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and keeps(value):
        value = value.func.value
    return value


def graph_names(training: Training, losses: set[str]) -> set[str]:
    """The losses among the names of a loop, and what they are made from."""
    names = expanded(losses, training.scope, training.loop.lineno)
    return {name for name in names if rebound_inside(training.scope, name, training)}


def expanded(losses: set[str], scope: Scope, start: int) -> set[str]:
    """The losses, and the losses and terms that they are the sum of by what stands after a line."""
    names = set(losses)
    for _ in range(2):
        for name in list(names):
            for bind in scope.binds.get(name, []):
                if bind.value is not None and bind.stmt.lineno >= start:
                    names.update(n for n in plain(bind.value) if "loss" in n.lower() or n in ("err", "cost"))
                    names.update(n for n in terms(bind.value) if computed(scope, n, start))
    return names


def handed(view: View, training: Training) -> set[str]:
    """The names in the loop that get the loss from the function that ran backward on it (`loss = self.step(batch)`)."""
    function = training.backward.scope
    loss = dotted(view.steps.loss_of(training.backward))
    found: set[str] = set()
    if loss is None or any(b.stmt.lineno > training.backward.line for b in function.binds.get(loss, [])):
        return found  # made anew after backward: what is given back is not known
    for site in calls_of(view, training):
        for bind in training.scope.bound(site.stmt):
            if bind.value is site.call and bind.how == "assign":
                parts = [part for value in function.returns() for part in element_of(value, bind.path)]
                if parts and all(chain(value) == loss for value in parts):
                    found.add(bind.key)
    return found


def given(view: View, training: Training) -> set[str]:
    """The names of the loop that it hands to the function that runs backward on them (`self.step(loss)`)."""
    function = training.backward.scope
    loss = dotted(view.steps.loss_of(training.backward))
    if loss not in function.params:
        return set()
    names = (dotted(passed(site, function, loss)) for site in calls_of(view, training))
    return {name for name in names if name is not None}


def calls_of(view: View, training: Training) -> Iterator[Site]:
    """The calls in a loop of the function that computes its gradients."""
    for site in view.trainings.body(training.loop, training.scope):
        if training.backward.scope in view.calls.runs(site):
            yield site


def plain(value: ast.expr) -> Iterator[str]:
    """The names that arithmetic combines: the operands, not what functions are called with."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.BinOp):
            stack += [node.left, node.right]
        else:
            key = dotted(node)
            if key is not None:
                yield key


def terms(value: ast.expr) -> Iterator[str]:
    """The names that a sum adds as they stand, or times a number that is written out."""
    summed = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub)
    stack: list[ast.expr] = [value] if summed else []
    while stack:
        node = stack.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            stack += [node.left, node.right]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            sides = (node.left, node.right)
            stack += [side for side, other in zip(sides, sides[::-1], strict=True) if constant(other) is not None]
        else:
            key = dotted(node)
            if key is not None:
                yield key


def computed(scope: Scope, name: str, start: int) -> bool:
    """Whether a name is given nothing but computed tensors after a line, as far as can be seen."""
    values = [bind.value for bind in scope.binds.get(name, []) if bind.stmt.lineno >= start and bind.how == "assign"]
    return bool(values) and all(map(lives, values))


def lives(value: ast.expr | None) -> bool:
    """Whether an expression is computed from tensors, as far as can be seen, and cuts nothing off."""
    if isinstance(value, ast.BinOp):  # `kl.sum() / x.shape[0]`
        return lives(value.left) or lives(value.right)
    return isinstance(value, ast.Call) and not cuts(value)


def rebound_inside(scope: Scope, name: str, training: Training) -> bool:
    """Whether the loop gives the name a new tensor in each turn."""
    return any(b.how == "assign" and inside(b.stmt, training.loop, scope.module) for b in scope.binds.get(name, []))


def added(bind: Bind) -> ast.expr | None:
    """Return what a binding adds to the name's former value."""
    if bind.how == "aug" and isinstance(bind.stmt, ast.AugAssign) and isinstance(bind.stmt.op, ast.Add):
        return bind.value
    if isinstance(bind.value, ast.BinOp) and isinstance(bind.value.op, ast.Add) and dotted(bind.value.left) == bind.key:
        return bind.value.right
    return None


def keeps(node: ast.AST) -> bool:
    """Whether a call is a method of a tensor whose result belongs to the same graph (`loss.cpu()`)."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPS


def chain(value: ast.expr) -> str | None:
    """The name at the start of a chain of methods that keep the graph."""
    return dotted(start(value))


def cuts(value: ast.expr) -> bool:
    """Whether a part of an expression cuts the graph off."""
    for node in walk(value):
        if isinstance(node, ast.Call) and last(node.func) in CUTS and not keeps(node):
            return True
        if isinstance(node, ast.Attribute) and node.attr in CUTS and node.attr not in KEEPS:
            return True
    return False


def holds(value: ast.expr, live: set[str]) -> bool:
    """Whether an expression still carries the graph of one of the names."""
    if keeps(value):
        return chain(value) in live
    if isinstance(value, ast.BinOp):  # `loss / len(loader)`: a length cuts nothing off the loss
        return holds(value.left, live) or holds(value.right, live)
    if isinstance(value, ast.Call | ast.Compare) or cuts(value):
        return False
    return any(isinstance(node, ast.Name | ast.Attribute) and dotted(node) in live for node in walk(value))


def live_at(live: set[str], stmt: ast.stmt, scope: Scope) -> set[str]:
    """The names that still hold the graph at a statement: not those whose last value before it has lost it
    (`loss = loss.item()`).
    """
    return {name for name in live if not lost(name, stmt, scope)}


def lost(name: str, stmt: ast.stmt, scope: Scope) -> bool:
    """Whether all that a name may have been given before a statement has no graph."""
    before = [bind for bind in scope.binds.get(name, []) if bind.stmt.lineno < stmt.lineno]
    found = reaching(before, scope, stmt.lineno) if before else []
    return bool(found) and all(
        bind.how == "assign" and any(severed(value) for value in element_of(bind.value, bind.path)) for bind in found
    )


def severed(value: ast.expr) -> bool:
    """Whether an expression is what such a call gives, or computed from that and numbers alone."""
    if isinstance(value, ast.BinOp):
        sides = (value.left, value.right)
        return any(map(severed, sides)) and all(severed(side) or constant(side) is not None for side in sides)
    while isinstance(value, ast.Call | ast.Attribute | ast.Subscript):
        if isinstance(value, ast.Call):
            if isinstance(value.func, ast.Name):
                return value.func.id in NUMBERS
            value = value.func
        elif isinstance(value, ast.Attribute) and value.attr in SEVERS:
            return True
        else:
            value = value.value
    return False


def cuts_graph(context: ast.expr) -> bool:
    """Whether a `with` certainly keeps no graph, whatever the flags of the run are."""
    if isinstance(context, ast.Call) and last(context) == "set_grad_enabled":
        return len(context.args) == 1 and constant(context.args[0]) is False
    if last(context) == "no_grad":
        return True
    return last(context) == "inference_mode" and not (
        isinstance(context, ast.Call) and any(not is_true(value) for value in context.args)
    )


# Where more is done with what is kept than adding it up: it may be differentiated, or thrown away.
MAX_STMTS = 15


def handed_to_keep(view: View, site: Site, live: set[str], outs: set[str]) -> str | None:
    """The name that still has its graph and that a call hands to a method which keeps it (`metric.add(output, y)`)."""
    method = view.calls.target(site.call, site.scope)
    if method is None or method.owner is None or dotted(site.receiver) in (None, "self"):
        return None
    for name in taken(method):
        value = calls_given(site.call, method, name)
        if value is not None and (holds(value, live) or plainly(value, outs)):
            return chain(value) or "loss"
    return None


def plainly(value: ast.expr, names: set[str]) -> bool:
    """Whether a value is one of the names as it stands, or computed from one, and not a part of it."""
    if isinstance(value, ast.BinOp):
        return plainly(value.left, names) or plainly(value.right, names)
    return chain(value) in names


def taken(method: Scope) -> Iterator[str]:
    """The parameters that a method adds, uncut, to a sum or a list of its object."""
    if len(method.stmts) > MAX_STMTS or any(map(turns_off_gradients, method.decorators)):
        return
    for name in method.params:
        if name == "self" or any(bind.how == "assign" for bind in method.binds.get(name, [])):
            continue
        if sums_up(method, name) or lists_up(method, name):
            yield name


def sums_up(method: Scope, name: str) -> bool:
    """Whether a method adds a parameter to an attribute that it does not set otherwise."""
    return any(
        key.startswith("self.") and all(map(added, binds)) and any(holds(b.value, {name}) for b in binds if b.value)
        for key, binds in method.binds.items()
    )


def lists_up(method: Scope, name: str) -> bool:
    """Whether a method appends a parameter to a list of its object, which it sets nowhere else."""
    for site in method.named("append"):
        held = dotted(site.receiver) or ""
        if not held.startswith("self.") or held in method.binds or len(site.call.args) != 1:
            continue
        shielded = any(map(turns_off_gradients, withs(site.stmt, site.module)))
        if chain(site.call.args[0]) == name and plain_list(method, held) and not shielded:
            return True
    return False


def plain_list(method: Scope, key: str) -> bool:
    """Whether an attribute is only ever set to an empty list, by the methods of its object."""
    homes = method.owner.defs.values() if method.owner is not None else ()
    values = [bind.value for home in homes for bind in home.binds.get(key, [])]
    return bool(values) and all(isinstance(value, ast.List) and not value.elts for value in values)
