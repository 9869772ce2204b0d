"""LS016: the graph kept alive over steps."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import guards, inside, loops, withs
from lockstep_lint.analysis.evaluation import evaluations, is_forward, without_graph
from lockstep_lint.analysis.graphs import (
    added,
    chain,
    computes_loss,
    cuts_graph,
    evaluated,
    expanded,
    handed_to_keep,
    holds,
    live_at,
    live_names,
    plainly,
)
from lockstep_lint.analysis.index import Bind, Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import constant, dotted, idents, walk
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, edit

__all__ = ["RULE"]

MESSAGE = "keeps every step's graph alive: add {}.item() or .detach() instead of the tensor"


def check(view: View) -> Iterator[Found]:
    """Looks at sums and lists that outlive a step and take in tensors of its graph."""
    for training in view.training:
        live = live_names(view, training)
        ran = forwards(view, training)
        outs = {name for site in ran for name in evaluated(view, site, training.loop) if whole(view, name, training)}
        yield from sums(view, training, live, ran, outs)
        yield from lists(view, training, live | outs)
        yield from meters(view, training, live, outs)
        if training.backward.scope is not training.scope and training.backward.scope.module is view.module:
            loss = dotted(view.steps.loss_of(training.backward))
            yield from kept_by_object(training.backward.scope, {loss} if loss else set())
    yield from in_evaluations(view)
    if "LightningModule" in view.module.text:
        for scope in view.scopes:
            if scope.name == "training_step" and scope.owner is not None:
                yield from kept_by_object(scope, returned(scope))


def in_evaluations(view: View) -> Iterator[Found]:
    """What outlives a batch of an evaluation that builds the graph."""
    done: set[ast.stmt] = set()
    for site in evaluations(view):
        nest = loops(site.stmt, site.module)
        if not nest or nest[0] in done or not is_forward(view, site) or without_graph(view, site) is not False:
            continue
        done.add(nest[0])
        evaluation = Training(nest[0], site.scope, site, None)
        live = evaluated(view, site, nest[0])
        yield from sums(view, evaluation, live, [site], set())
        yield from lists(view, evaluation, live)


def returned(step: Scope) -> set[str]:
    """The names of the losses that a step of Lightning's returns, and of the outputs that they are computed from."""
    losses = {dotted(value) or "" for value in step.returns()} - {""}
    made = [bind.value for name in losses for bind in step.binds.get(name, []) if isinstance(bind.value, ast.Call)]
    return losses | {name for value in made for each in value.args for name in idents(each) if output(step, name)}


def output(step: Scope, name: str) -> bool:
    """Whether a name is what the module itself gave (`logits = self(x)`)."""
    made = [bind.value for bind in step.binds.get(name, [])]
    return bool(made) and all(
        isinstance(value, ast.Call) and dotted(value.func) in ("self", "self.forward", "self.model") for value in made
    )


def kept_by_object(step: Scope, losses: set[str]) -> Iterator[Found]:
    """What a function that runs in every step leaves in a list or a sum of its object."""
    live = {name for name in expanded(losses, step, 0) if name in step.binds or name in step.params}
    for site in step.named("append"):
        value = site.call.args[0] if len(site.call.args) == 1 else None
        name = holder(site)
        if value is None or name is None or not name.startswith("self."):
            continue
        if chain(value) in live_at(live, site.stmt, step) and name not in step.binds and not shielded(site.stmt, step):
            yield Found(site.call, MESSAGE.format(ast.unparse(value)), edit=edit("method", value, "detach"))
    for name, binds in step.binds.items():
        for bind in binds if name.startswith("self.") and all(map(added, binds)) else ():
            value = added(bind)
            left = live_at(live - {name}, bind.stmt, step)
            if value is not None and chain(value) in left and not shielded(bind.stmt, step):
                yield Found(bind.stmt, MESSAGE.format(ast.unparse(value)), edit=edit("method", value, "detach"))


def holder(site: Site) -> str | None:
    """The name of the list that a call appends to, or of the dictionary that has it under a key."""
    receiver = site.receiver
    return dotted(receiver.value if isinstance(receiver, ast.Subscript) else receiver)


def sums(view: View, training: Training, live: set[str], ran: list[Site], outs: set[str]) -> Iterator[Found]:
    """`total += loss`, and `total = total + loss`, also of a loss of what the given calls of the model gave."""
    scope = training.scope
    for name, binds in (*scope.binds.items(), *items(scope)):
        for bind in binds:
            value = added(bind) if inside(bind.stmt, training.loop, scope.module) else None
            if value is None or name in live or shielded(bind.stmt, scope) or validates(view, bind.stmt, training):
                continue
            left = live_at(live, bind.stmt, scope)
            here = live_at(outs, bind.stmt, scope) - {name}
            kept = holds(value, left) or plainly(value, here)
            if not kept and not any(computes_loss(view, value, call, left | here) for call in ran):
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
    direct = [b for b in anew if b.stmt in training.loop.body or each_step(view, b, scope)]
    micro = [b for b in fresh if inside(b.stmt, training.loop, scope.module) and b not in anew]
    return not direct and not micro and (bool(fresh) or name.startswith("self."))


def each_step(view: View, bind: Bind, scope: Scope) -> bool:
    """Whether a sum is started anew where the optimizer steps: it holds the graphs of one step alone."""
    branch = branch_of(bind, scope)
    return isinstance(branch, ast.If) and any(
        view.steps.steps_optimizer(site) and inside(site.stmt, branch, scope.module) for site in scope.sites
    )


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
        name = holder(site)
        if site.name != "append" or name is None or len(site.call.args) != 1 or shielded(site.stmt, scope):
            continue
        if validates(view, site.stmt, training):
            continue
        value = site.call.args[0]
        parts = list(value.elts) if isinstance(value, ast.List | ast.Tuple) else [value]
        left = live_at(live, site.stmt, scope)
        part = next((each for each in parts if chain(each) in left), None)
        if part is not None and outlives_list(view, scope, name, training) and not flows_back(view, training, name):
            yield Found(site.call, MESSAGE.format(ast.unparse(part)), edit=edit("method", part, "detach"))


def outlives_list(view: View, scope: Scope, name: str, training: Training) -> bool:
    """Whether a list starts outside the step loop, and is emptied in it only now and then."""
    binds = [b for b in scope.binds.get(name, []) if b.how == "assign"]
    within = [b for b in binds if inside(b.stmt, training.loop, scope.module)]
    if any(b.stmt in training.loop.body or not isinstance(branch_of(b, scope), ast.If) for b in within):
        return False
    if within and (len(within) == len(binds) or any(each_step(view, b, scope) for b in within)):
        return False
    return bool(binds) or name.startswith("self.") or handed_list(view, scope, name)


def handed_list(view: View, scope: Scope, name: str) -> bool:
    """Whether all callers give a function an empty list of their own for a parameter."""
    callers = view.calls.callers(scope) if name in scope.params else []
    found = [view.origins.of(passed(site, scope, name), site.scope) for site in callers]
    return bool(found) and all(
        bool(made) and all(isinstance(origin.node, ast.List) and not origin.node.elts for origin in made)
        for made in found
    )


def branch_of(bind: Bind, scope: Scope) -> ast.AST | None:
    """The statement around the one of a binding."""
    return scope.module.up.get(bind.stmt, (None, ""))[0]


def meters(view: View, training: Training, live: set[str], outs: set[str]) -> Iterator[Found]:
    """`meter.update(loss)` where a class of the project adds up, or collects, what it is given."""
    for site in view.trainings.body(training.loop, training.scope):
        if site.receiver is None or shielded(site.stmt, training.scope) or validates(view, site.stmt, training):
            continue
        left, here = (live_at(names, site.stmt, training.scope) for names in (live, outs))
        name = handed_to_keep(view, site, left, here)
        if name is not None:
            values = [*site.call.args, *(item.value for item in site.call.keywords)]
            value = next((each for each in values if dotted(each) == name), None)
            cut = edit("method", value, "detach") if value is not None else None
            yield Found(site.call, MESSAGE.format(name), edit=cut)


def validates(view: View, stmt: ast.stmt, training: Training) -> bool:
    """Whether a loop that trains and evaluates in turn comes to a statement where it evaluates (`phase == "val"`)."""
    trains = view.steps.backwards(training.backward)
    for guard in guards(stmt, training.module, training.loop) if trains else ():
        test = guard.test
        says = str(constant(test.comparators[0])) if isinstance(test, ast.Compare) else ""
        same = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq)
        if (EVALUATION.search(says) and same is guard.when) or ("train" in says and same is not guard.when):
            return True
    return False


def whole(view: View, name: str, training: Training) -> bool:
    """Whether a name holds all that the model gave, or a part of it that the loss is computed from: another part may be
    a number (`loss, accuracy = model(x)`).
    """
    return flows_back(view, training, name) or not any(bind.path for bind in training.scope.binds.get(name, []))


def forwards(view: View, training: Training) -> list[Site]:
    """The calls of the model in a loop that the loss is computed from, where that trains the model."""
    if not view.trainings.steps_in(training.loop, training.scope):
        return []
    return [
        site
        for site in view.trainings.body(training.loop, training.scope)
        if site.scope is training.scope
        and is_forward(view, site)
        and not shielded(site.stmt, site.scope)
        and any(flows_back(view, training, bind.key) for bind in site.scope.bound(site.stmt) if bind.how == "assign")
    ]


def shielded(stmt: ast.stmt, scope: Scope) -> bool:
    """Whether a statement stands in a block that certainly keeps no graph."""
    return any(map(cuts_graph, withs(stmt, scope.module)))


RULE = Rule(
    code="LS016",
    name="graph kept alive",
    what="A sum or a list that outlives the step takes in a tensor that still belongs to the step's graph.",
    why=(
        "Every step's activations stay in memory for as long as the sum lives: memory grows from step to step "
        "until the run dies."
    ),
    bad="""
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
    good="""
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
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="safe",
    remedy="Add loss.detach() instead",
    note=(
        "The terms of a loss count like the loss. So does what a function that runs in every step leaves in a list or "
        "a sum of its object (`self.losses.append(loss)`), also in the `training_step` of a LightningModule, and "
        "what a class of the project's own keeps of a loss or of the model's output (`metric.add(output, y)`). "
        "And so does what an evaluation without `torch.no_grad()` adds up or collects of its outputs and losses."
    ),
)
