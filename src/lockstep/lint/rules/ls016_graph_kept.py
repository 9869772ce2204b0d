"""LS016: the graph kept alive over steps."""

import ast
from collections.abc import Iterator

from lockstep.lint.analysis.context import inside, loops, withs
from lockstep.lint.analysis.effects import turns_off_gradients
from lockstep.lint.analysis.index import Bind, Scope
from lockstep.lint.analysis.nodes import dotted, idents, last, walk
from lockstep.lint.analysis.origins import element_of
from lockstep.lint.analysis.training import Training
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule, edit

__all__ = ["RULE"]

MESSAGE = "keeps every step's graph alive: add {}.item() or .detach() instead of the tensor"
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


def check(view: View) -> Iterator[Found]:
    """Looks at sums and lists that outlive a step and take in tensors of its graph."""
    for training in view.training:
        live = graph_names(view, training) if training.backward.scope is training.scope else handed(view, training)
        yield from sums(view, training, live)
        yield from lists(view, training, live)
        yield from meters(view, training, live)


def graph_names(view: View, training: Training) -> set[str]:
    """The names in the loop that hold tensors of the graph: the loss, and what it is made from."""
    loss = view.steps.loss_of(training.backward)
    names = {key for key in [dotted(loss)] if key}
    scope = training.scope
    for _ in range(2):
        for name in list(names):
            for bind in scope.binds.get(name, []):
                if bind.value is not None and bind.stmt.lineno >= training.loop.lineno:
                    names.update(n for n in plain(bind.value) if "loss" in n.lower() or n in ("err", "cost"))
    return {name for name in names if rebound_inside(scope, name, training)}


def handed(view: View, training: Training) -> set[str]:
    """The names in the loop that get the loss from the function that ran backward on it (`loss = self.step(batch)`)."""
    function = training.backward.scope
    loss = dotted(view.steps.loss_of(training.backward))
    found: set[str] = set()
    if loss is None or any(b.stmt.lineno > training.backward.line for b in function.binds.get(loss, [])):
        return found  # made anew after backward: what is given back is not known
    for site in view.trainings.body(training.loop, training.scope):
        if function not in view.calls.runs(site):
            continue
        for bind in training.scope.bound(site.stmt):
            if bind.value is site.call and bind.how == "assign":
                given = [part for value in function.returns() for part in element_of(value, bind.path)]
                if given and all(chain(value) == loss for value in given):
                    found.add(bind.key)
    return found


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


def rebound_inside(scope: Scope, name: str, training: Training) -> bool:
    """Whether the loop gives the name a new tensor in each turn."""
    return any(b.how == "assign" and inside(b.stmt, training.loop, scope.module) for b in scope.binds.get(name, []))


def sums(view: View, training: Training, live: set[str]) -> Iterator[Found]:
    """`total += loss`, and `total = total + loss`."""
    scope = training.scope
    for name, binds in (*scope.binds.items(), *items(scope)):
        for bind in binds:
            if bind.value is None or not inside(bind.stmt, training.loop, scope.module) or no_graph(bind.stmt, view):
                continue
            value = added(bind)
            if value is None or not holds(value, live) or name in live:
                continue
            if outlives(view, scope, name, training) and not flows_back(view, training, name):
                simple = chain(value) is not None
                yield Found(
                    bind.stmt,
                    MESSAGE.format(ast.unparse(value) if simple else "loss"),
                    edit=edit("method", value, "detach") if simple else None,
                )


def items(scope: Scope) -> Iterator[tuple[str, list[Bind]]]:
    """What is added to an item of a tensor, a list or a dictionary (`sums[0] += loss`), under the holder's name."""
    for stmt in scope.stmts:
        if isinstance(stmt, ast.AugAssign) and isinstance(stmt.target, ast.Subscript):
            name = dotted(stmt.target.value)
            if name is not None and name in scope.binds:
                yield name, [Bind(name, stmt.value, (), stmt, "aug")]


def added(bind: Bind) -> ast.expr | None:
    """What a binding adds to its own name."""
    if bind.how == "aug" and isinstance(bind.stmt, ast.AugAssign) and isinstance(bind.stmt.op, ast.Add):
        return bind.value
    if isinstance(bind.value, ast.BinOp) and isinstance(bind.value.op, ast.Add) and dotted(bind.value.left) == bind.key:
        return bind.value.right
    return None


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


def keeps(node: ast.AST) -> bool:
    """Whether a call is a method of a tensor whose result belongs to the same graph (`loss.cpu()`)."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPS


def chain(value: ast.expr) -> str | None:
    """The name at the start of a chain of methods that keep the graph."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and keeps(value):
        value = value.func.value
    return dotted(value)


def holds(value: ast.expr, live: set[str]) -> bool:
    """Whether an expression still carries the graph of one of the names."""
    if keeps(value):
        return chain(value) in live
    if isinstance(value, ast.BinOp):  # `loss / len(loader)`: a length cuts nothing off the loss
        return holds(value.left, live) or holds(value.right, live)
    for node in walk(value):
        if isinstance(node, ast.Call) and (last(node.func) in CUTS) and not keeps(node):
            return False
        if isinstance(node, ast.Attribute) and node.attr in CUTS:
            return False
    if isinstance(value, ast.Call | ast.Compare):
        return False
    return any(isinstance(node, ast.Name | ast.Attribute) and dotted(node) in live for node in walk(value))


def around(view: View, training: Training) -> list[ast.stmt]:
    """The statements of the loop around an inner one that trains several times on a batch: each begins anew there."""
    outer = next(iter(loops(training.loop, training.module)), None)
    if outer is None or outer not in [other.loop for other in view.training]:
        return []
    return outer.body


def outlives(view: View, scope: Scope, name: str, training: Training) -> bool:
    """Whether the sum starts outside the step loop and is not started anew inside it in every turn."""
    binds = scope.binds[name]
    fresh = [b for b in binds if b.how == "assign" and added(b) is None]
    anew = [
        b
        for b in fresh
        if inside(b.stmt, training.loop, scope.module) and loops(b.stmt, scope.module)[0] is training.loop
    ]
    if not name.startswith("self.") and fresh and all(b.stmt in around(view, training) for b in fresh):
        return False
    direct = [b for b in anew if b.stmt in training.loop.body]
    micro = [b for b in fresh if inside(b.stmt, training.loop, scope.module) and b not in anew]
    return not direct and not micro and (bool(fresh) or name.startswith("self."))


def flows_back(view: View, training: Training, name: str) -> bool:
    """Whether the sum itself is differentiated."""
    scope = training.scope
    seen, queue = set(), []
    for site in scope.sites:
        if view.steps.backwards(site):
            loss = view.steps.loss_of(site)
            queue += [*idents(loss), dotted(loss) or ""] if loss is not None else []
    while queue:
        key = queue.pop()
        if key == name:
            return True
        if key in seen:
            continue
        seen.add(key)
        for bind in scope.binds.get(key, []):
            if bind.value is not None:
                queue += [dotted(n) or "" for n in walk(bind.value) if isinstance(n, ast.Name | ast.Attribute)]
    return False


def lists(view: View, training: Training, live: set[str]) -> Iterator[Found]:
    """`losses.append(loss)` onto a list from outside the loop."""
    scope = training.scope
    for site in view.trainings.body(training.loop, scope):
        name = dotted(site.receiver)
        if site.name != "append" or name is None or len(site.call.args) != 1 or no_graph(site.stmt, view):
            continue
        value = site.call.args[0]
        if chain(value) in live and outlives_list(scope, name, training) and not flows_back(view, training, name):
            yield Found(site.call, MESSAGE.format(ast.unparse(value)), edit=edit("method", value, "detach"))


def outlives_list(scope: Scope, name: str, training: Training) -> bool:
    binds = [b for b in scope.binds.get(name, []) if b.how == "assign"]
    return not any(inside(b.stmt, training.loop, scope.module) for b in binds) and (
        bool(binds) or name.startswith("self.")
    )


def meters(view: View, training: Training, live: set[str]) -> Iterator[Found]:
    """`meter.update(loss)` where the project's meter adds up what it is given."""
    for site in view.trainings.body(training.loop, training.scope):
        if site.name not in ("update", "add") or not site.call.args or dotted(site.call.args[0]) not in live:
            continue
        target = view.calls.target(site.call, site.scope)
        if target is not None and target.owner is not None and sums_up(target):
            yield Found(
                site.call, MESSAGE.format(dotted(site.call.args[0])), edit=edit("method", site.call.args[0], "detach")
            )


def sums_up(method: Scope) -> bool:
    """Whether a method adds its first argument, uncut, to an attribute."""
    params = [p for p in method.params if p != "self"]
    if not params or any(b.how == "assign" for b in method.binds.get(params[0], [])):
        return False
    for key, binds in method.binds.items():
        for bind in binds:
            if (
                key.startswith("self.")
                and bind.how == "aug"
                and bind.value is not None
                and holds(bind.value, {params[0]})
            ):
                return True
    return False


def no_graph(stmt: ast.stmt, view: View) -> bool:
    return any(turns_off_gradients(item) for item in withs(stmt, view.module))


RULE = Rule(
    code="LS016",
    name="graph kept alive",
    what="A sum or a list that outlives the step takes in a tensor that still belongs to the step's graph.",
    why=(
        "Every step's activations stay in memory for as long as the sum lives: memory grows from step to step "
        "until the run dies."
    ),
    bad=(
        """
import torch

def train(model, loader, optimizer, criterion):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss
    return total / len(loader)
""",
        """
import torch

def train(model, loader, optimizer, criterion):
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses
""",
        """
import torch

def train(model, loader, optimizer, criterion):
    total, losses = 0.0, []
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.cpu()
        losses.append(loss.mean().cpu())
    return total, losses
""",
    ),
    good=(
        """
import torch

def train(model, loader, optimizer, criterion):
    total = torch.zeros(())
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total / len(loader)
""",
        """
import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        optimizer.zero_grad()
        total = 0.0
        for part in (x, y):
            loss = criterion(model(part), y)
            total += loss
        total.backward()
        optimizer.step()
""",
        """
import torch

def train(model, loader, optimizer, criterion):
    total, losses = 0.0, []
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach().cpu()
        losses.append(loss.cpu().item())
    return total, losses
""",
    ),
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="safe",
    remedy="Add loss.detach() instead",
)
