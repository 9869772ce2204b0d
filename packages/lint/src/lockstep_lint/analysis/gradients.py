"""Recognise gradient accumulation, and parameters that DDP does not reduce."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import Guard
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import REFERENCES, Words, constant, dotted, idents, keyword, last, mentions, walk
from lockstep_lint.analysis.training import Training
from lockstep_lint.analysis.view import View

__all__ = [
    "around",
    "is_micro_loop",
    "modulo",
    "outside",
    "periodic",
    "steps_by",
    "told_when",
    "unseen",
]


# What the parts of a batch are called.
PARTS = ("micro", "accum", "chunk")
# What cuts a batch.
CUTS = ("split", "chunk", "tensor_split")


def is_micro_loop(view: View, loop: ast.For, scope: Scope) -> bool:
    """Whether an inner loop with a backward runs over parts of a batch (not over samples, tasks or models)."""
    if isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "range":
        if len(loop.iter.args) == 1 and is_one(view, loop.iter.args[0], scope):
            return False
        text = ast.unparse(loop).lower()
        return any(word in text for word in ("accum", "micro", "grad_acc"))
    if any(isinstance(node, ast.Call) and last(node) in CUTS and not is_text(node) for node in walk(loop.iter)):
        return True
    return any(word in name.lower() for name in idents(loop.iter) for word in PARTS)


def is_text(call: ast.Call) -> bool:
    """Whether a call divides a text."""
    return not call.args or isinstance(constant(call.args[0]), str)


def told_when(view: View, site: Site) -> Guard | None:
    """The test by which a scaler's helper is told whether to step (`update_grad=(i + 1) % n == 0`)."""
    tests = (part.value for part in site.call.keywords if rarely(view, part.value, site.scope))
    return next((Guard(test, True, site.stmt) for test in tests), None)


def rarely(view: View, test: ast.expr, scope: Scope) -> bool:
    """Whether a test asks for the remainder of a count, by another number than 1."""
    found = modulo(test, scope)
    return found is not None and not is_one(view, found[0].right, scope)


def is_one(view: View, count: ast.expr, scope: Scope) -> bool:
    """Whether a number of micro-batches certainly is 1, so that nothing is accumulated (`accum_steps = 1`): no option
    of another object, which is there to be changed.
    """
    option = isinstance(count, ast.Attribute) and last(count.value) != "self"
    return not option and all(constant(origin.node) == 1 for origin in view.origins.of(count, scope))


def steps_by(view: View, site: Site) -> bool:
    """Whether a call steps the optimizer, itself or by a function of the project that does that and no backward."""
    if view.steps.steps_optimizer(site):
        return True
    if not view.effects.does(site, {"step"}) or view.effects.does(site, {"backward", "manual_backward"}):
        return False
    return any(view.steps.steps_optimizer(s) for function in view.calls.runs(site) for s in function.sites)


def periodic(view: View, guard: Guard, scope: Scope) -> bool:
    """Whether a test holds in every n-th turn; a name that was given such a test counts, here or by every caller."""
    if modulo(guard.test, scope) is not None:
        return rarely(view, guard.test, scope)
    if handed(view, guard.test, scope):
        return True
    counts = any("accum" in name and "loss" not in name for name in idents(guard.test))
    return counts and not asks_whether(guard.test)  # an `accum_loss` is asked whether it is finite


def handed(view: View, test: ast.expr, scope: Scope) -> bool:
    """Whether a test is of a parameter for which the callers pass what holds in every n-th turn."""
    if not isinstance(test, ast.Name) or test.id not in scope.params or test.id in scope.binds:
        return False
    given = [(passed(site, scope, test.id), site.scope) for site in view.calls.callers(scope)]
    return any(value is not None and rarely(view, value, home) for value, home in given)


def asks_whether(test: ast.expr) -> bool:
    """Whether a test asks if anything is accumulated at all (`steps > 1`), the same in every turn."""
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and constant(test.comparators[0]) == 1


def modulo(test: ast.expr, scope: Scope) -> tuple[ast.BinOp, ast.expr] | None:
    """The `a % b` in a test, with the test itself or with what a name in it was given."""
    found = _remainder(test)
    if found is not None:
        return found, test
    for node in without_order(test):
        for bind in scope.binds.get(dotted(node) or "", []):
            if bind.value is not None and bind.stmt.lineno < test.lineno and bind.how == "assign":
                found = _remainder(bind.value)
                if found is not None:
                    return found, bind.value
    return None


def without_order(test: ast.expr) -> Iterator[ast.AST]:
    """The parts of a test, without what it only compares by size (`step < resume_step`)."""
    operands = test.values if isinstance(test, ast.BoolOp) else [test]
    for operand in operands:
        if not (isinstance(operand, ast.Compare) and isinstance(operand.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)):
            yield from walk(operand)


def _remainder(value: ast.expr) -> ast.BinOp | None:
    for node in walk(value):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
            return None if isinstance(node.left, ast.JoinedStr) else node
    return None


PARAMETERS = ("parameters", "named_parameters")
EXCHANGED = {"ddp", "fsdp"}
MAX_VALUES = 80
MAX_ROUNDS = 3
ANY = Words("")
# What is read from a wrapped model without running it.
STATE = {"state_dict", "load_state_dict", "parameters", "named_parameters", "train", "eval", "modules", "children"}
STATE |= {"zero_grad", "buffers", "named_modules", "requires_grad_", "no_sync", "to", "named_children", "apply"}


def outside(view: View, training: Training) -> bool:
    """Whether all that a loop trains certainly stands outside of the wrappers of its programs, which hold other models
    (a teacher's, whose student is not wrapped).
    """
    wraps = [
        site
        for member in view.project.family(view.module)
        for kind, site in view.wrappers.made(member)
        if kind in EXCHANGED
    ]
    models = list(trained(view, training)) if wraps else []
    return bool(models) and all(apart(model, scope, wrap) for model, scope in models for wrap in wraps)


def unseen(view: View, training: Training) -> bool:
    """Whether what a loop trains is handed to something out of sight, which may wrap it or exchange its gradients."""
    strangers = list(view.hidden_calls(ANY))
    return any(is_handed(model, scope, site) for model, scope in trained(view, training) for site in strangers)


def is_handed(model: ast.expr, scope: Scope, site: Site) -> bool:
    """Whether a call of a model's own function is given the model, by itself or in something else."""
    values = (*site.call.args, *(item.value for item in site.call.keywords))
    return site.scope is scope and any(mentions(value, dotted(model) or "") for value in values)


def trained(view: View, training: Training) -> Iterator[tuple[ast.expr, Scope]]:
    """The models whose parameters the optimizers of a loop are given; none where one of them is out of sight."""
    found: list[tuple[ast.expr, Scope]] = []
    steps = filter(view.steps.steps_optimizer, view.trainings.body(training.loop, training.scope))
    for step in steps:
        scaled = step.receiver is not None and view.kinds.is_scaler(step.receiver, step.scope)
        optimizer = step.call.args[0] if scaled and step.call.args else step.receiver
        for origin in view.origins.of(optimizer, step.scope):
            models = list(optimized(origin.call, origin.scope)) if origin.call is not None else []
            if not models:
                return
            found += [(model, origin.scope) for model in models]
    yield from found


def optimized(call: ast.Call, scope: Scope) -> Iterator[ast.expr]:
    """The models whose parameters a call is given, through the names of its function (`AdamW(groups)`)."""
    queue: list[ast.expr] = [*call.args, *(item.value for item in call.keywords)]
    seen: set[str] = set()
    count = 0
    while queue and count < MAX_VALUES:
        count += 1
        for node in walk(queue.pop()):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PARAMETERS:
                yield node.func.value
            elif isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                queue += [bind.value for bind in scope.binds.get(node.id, []) if bind.value is not None]


def apart(model: ast.expr, scope: Scope, wrap: Site) -> bool:
    """Whether a model certainly is not the one that a call of the same function wraps: neither is made of the other, or
    is a part of something else.
    """
    inner = wrap.call.args[0] if wrap.call.args else keyword(wrap.call, "module")
    ours, theirs = dotted(model), dotted(inner)
    if inner is None or ours is None or (theirs is None and not isinstance(inner, ast.Call)):
        return False
    names = {theirs or "", *(bind.key for bind in wrap.scope.bound(wrap.stmt))} - {""}
    if scope is not wrap.scope or not names or not all(map(plain, (ours, *names))) or mentions(inner, ours):
        return False
    if not all(isinstance(bind.value, ast.Call) for key in (ours, *names) for bind in scope.binds.get(key, [])):
        return False
    if ours not in scope.binds or ours in derived(names, scope):
        return False
    holders = {f"{key}." for key in derived({ours}, scope)}  # `teacher.student = student` makes the teacher hold it
    return not any(holder.startswith(f"{name}.") for holder in holders for name in names)


def derived(names: set[str], scope: Scope) -> set[str]:
    """Some names of a function, with those whose values are made of them (`net = torch.compile(model)`)."""
    found = set(names)
    for _ in range(MAX_ROUNDS):
        more = {
            key
            for key, binds in scope.binds.items()
            if key not in found
            and any(mentions(bind.value, name) for bind in binds if bind.value is not None for name in found)
        }
        if not more:
            break
        found |= more
    return found


def plain(key: str) -> bool:
    """Whether a name stands for a whole object, here or in the method's own (`model`, `self.model`)."""
    return "." not in key or (key.startswith("self.") and key.count(".") == 1)


def around(view: View, training: Training) -> Site | None:
    """The call by which each step of a loop runs the model inside DDP's wrapper for its loss (`model.module.loss(x)`),
    where none runs the wrapper, or may do that out of sight.
    """
    if ".module" not in training.module.text:
        return None
    found: Site | None = None
    for site in view.trainings.each_step(training):
        func = site.call.func
        unclear = in_wrapper(view, func, site.scope) or forwarded(view, func, site.scope) or holds(view, site)
        within = not unclear and inside(view, func, site.scope)
        if not unclear and not within:
            unclear = view.calls.target(site.call, site.scope) is None and is_given(view, site.call, site.scope)
        if not (unclear or within) or view.ranks.single(site.stmt, site.scope):
            continue  # also `if not distributed: model.step(x)` beside `model.module.step(x)`
        if unclear:
            return None
        found = found or (site if in_loss(view, site, training) else None)
    return found


def in_loss(view: View, site: Site, training: Training) -> bool:
    """Whether a call makes the loss of a step, or what that is made of in the same function."""
    loss, scope = view.steps.loss_of(training.backward), training.backward.scope
    queue, seen = [loss] if loss is not None else [], set[str]()
    while queue and site.scope is scope:
        for node in walk(queue.pop()):
            if node is site.call:
                return True
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                queue += [bind.value for bind in scope.binds.get(node.id, []) if bind.value is not None]
    return False


def holds(view: View, site: Site) -> bool:
    """Whether a call is one of an object that was given a wrapped model (`diffusion = Diffusion(model)`)."""
    func = site.call.func
    holders = [func, func.value] if isinstance(func, ast.Attribute) else [func]
    return any(
        is_given(view, made, home)
        for holder in holders
        if dotted(holder) is not None
        for made, home, _ in view.origins.calls_of(holder, site.scope)
        if not view.wrappers.of_call(made, home)
    )


def is_given(view: View, call: ast.Call, scope: Scope) -> bool:
    """Whether a call is given a wrapped model, by itself or in something else (`step([model], x)`), or picks what it
    calls out of that (`[model][0](x)`): not what is in the wrapper, nor what is only read from it.
    """
    queue: list[ast.AST] = [*call.args, *(item.value for item in call.keywords)]
    if dotted(call.func) is None:
        queue.append(call.func)
    while queue:
        node = queue.pop()
        if isinstance(node, REFERENCES) and in_wrapper(view, node, scope):
            return True
        read = (
            isinstance(node, ast.Attribute) and node.attr in (*STATE, "module") and in_wrapper(view, node.value, scope)
        )
        queue.extend(() if read else ast.iter_child_nodes(node))
    return False


def in_wrapper(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether a name may hold a wrapped model."""
    return dotted(node) is not None and any(True for _ in view.wrappers.wrapped(node, scope))


def forwarded(view: View, func: ast.expr, scope: Scope) -> bool:
    """Whether a call runs the wrapper's own forward by its name, or asks the wrapper for something unknown."""
    return (
        isinstance(func, ast.Attribute)
        and func.attr not in STATE
        and func.attr != "module"
        and in_wrapper(view, func.value, scope)
    )


def inside(view: View, func: ast.expr, scope: Scope) -> bool:
    """Whether a call runs the model inside a DDP wrapper, by itself or by a method."""
    parts = [func, func.value] if isinstance(func, ast.Attribute) and func.attr not in STATE else [func]
    return any(
        isinstance(part, ast.Attribute)
        and part.attr == "module"
        and {kind for kind, _, _ in view.wrappers.wrapped(part.value, scope)} == {"ddp"}
        for part in parts
    )
