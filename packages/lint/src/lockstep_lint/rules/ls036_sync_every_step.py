"""LS036: a device sync in every step."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.calls import given, turns_off_gradients
from lockstep_lint.analysis.context import Loop, every_so_often, loops, rarely, withs
from lockstep_lint.analysis.devices import from_loader, looped, on_device
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import argument, base, constant, dotted, idents, is_none, last, targets, walk
from lockstep_lint.analysis.project import unit_test
from lockstep_lint.analysis.tensors import LOSS, READS, SYNCS, bare, is_read, key, loss_names, made_on_host, on_host
from lockstep_lint.analysis.training import LOSSES, Training
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]


FINITE = {"isnan", "isinf", "isfinite"}
TORCHS = {f"torch.{name}" for name in FINITE}


def asked(view: View, node: ast.AST, scope: Scope, losses: set[str]) -> bool:
    """Whether a part of a test needs a loss's number."""
    if isinstance(node, ast.Compare):
        plain = not any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
        sides = (node.left, *node.comparators)
        plain = plain and not any(isinstance(constant(each), str | bool) or is_none(each) for each in sides)
        if plain and on_device(view, node, scope):
            return True
        values = [node.left, *node.comparators] if plain else []
    elif isinstance(node, ast.Call) and last(node) in ("any", "all") and isinstance(node.func, ast.Attribute):
        if on_device(view, node, scope):
            return True
        asks = node.func.value  # `assert not torch.isnan(flow).any()`
        return isinstance(asks, ast.Call) and asks_tensor(view, asks, scope)
    elif isinstance(node, ast.Call) and last(node) in FINITE:
        if asks_tensor(view, node, scope):
            return True
        values = [*node.args[:1], *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
    else:
        return asks_given(view, node, scope, losses) if isinstance(node, ast.Call) else False
    finite = isinstance(node, ast.Call)
    return any(on_losses(view, v, scope, losses) or (finite and on_device(view, v, scope)) for v in values)


def asks_tensor(view: View, call: ast.Call, scope: Scope) -> bool:
    """Whether a call asks of a tensor whether it is finite, in torch's words (`torch.isnan(loss)`, `loss.isnan()`): not
    of what a loader gives, or of what is known to be on the CPU.
    """
    value = next(iter(call.args), None)
    if view.names.qualify(call.func, scope) not in TORCHS:
        method = last(call) in FINITE and isinstance(call.func, ast.Attribute) and not (call.args or call.keywords)
        value = call.func.value if method else None  # type: ignore[attr-defined]
    if value is None or on_host(view.origins, value, scope, 1):
        return False
    binds = view.origins.binds(dotted(base(value)) or "", scope, call.lineno)
    return not any(bind.how == "for" for bind, _ in binds)


def asks_given(view: View, call: ast.Call, scope: Scope, losses: set[str]) -> bool:
    """Whether a function of the project asks of the loss that it is given whether it is finite (`if is_bad(loss):`)."""
    function = view.calls.target(call, scope)
    if function is None or function.kind != "function":
        return False
    for value in (node for each in function.returns() for node in walk(each)):
        if isinstance(value, ast.Call) and last(value) in FINITE and value.args:
            name = dotted(value.args[0])
            handed = given(call, function, name) if name in function.params else None
            if handed is not None and (on_losses(view, handed, scope, losses) or on_device(view, handed, scope)):
                return True
    return False


def on_losses(view: View, node: ast.AST, scope: Scope, losses: set[str]) -> bool:
    """Whether a name stands for a loss that was not read before (`loss = loss.item()`)."""
    name = key(node)
    binds = view.origins.binds(name, scope, getattr(node, "lineno", 0)) if name in losses else []
    return name in losses and not any(is_read(view.calls, bind, home) for bind, home in binds)


# They make a text or a number of what they are given, at once.
SHOWS = {"add_scalar", "add_scalars", "set_postfix", "set_postfix_str", "set_description", "info", "warning", "write"}
# What keeps numbers for a person to look at, and how it is given them.
TRACKERS = {"wandb", "run", "mlflow", "accelerator", "fabric", "experiment", "tracker"}
TRACKS = {"log", "log_metric", "log_metrics", "log_dict"}


def check(view: View) -> Iterator[Found]:
    """Looks at everything that runs in every step of the programs' training loops, where it stands in this file."""
    if not view.gpu or unit_test(view.module):
        return
    seen: set[int] = set()
    trainings = view.trainings
    for training in (*trainings.near(view.module), *trainings.engines(view.module), *trainings.lone(view.module)):
        if not trainings.steps_in(training.loop, training.scope) and not (
            view.training and trainings.updates(training)
        ):
            continue
        steps = trainings.each_step(training)
        here = [site for site in steps if site.module is view.module]
        other = [site for site in steps if site.module is not view.module] if here else []
        beyond, afar = {site.scope for site in other if reads_given(view, site)}, readers(view, other)
        losses = loss_names(trainings, training) if here else set()
        yield from old_reads(view, training, here, losses, seen)
        yield from tests(view, training, here, losses, seen)
        yield from texts(view, training, losses, seen)
        for site in here:
            if site.stmt.lineno in seen or (site.scope is training.scope and id(site.call) in rarely(site.stmt)):
                continue
            if in_model(site) and not (LOSS.search(last(site.receiver)) or reads_device(view, site)):
                continue
            what = syncs(view, site, losses) or passed_on(view, site, losses, beyond) or handed_over(view, site, afar)
            if what and not from_loader(view, site, training) and not elsewhere(view, site, training):
                seen.add(site.stmt.lineno)
                yield at(
                    site, f"{what} waits for the device in every step: keep tensors, and read them every n-th step"
                )


def readers(view: View, sites: list[Site]) -> set[Scope]:
    """The functions of some calls that read, or decide by, what they compute of tensors on the device."""
    found = {site.scope for site in sites if site.name in SYNCS and reads_device(view, site)}
    return found | {scope for scope in dict.fromkeys(site.scope for site in sites) if tests_device(view, scope)}


def old_reads(view: View, training: Training, here: list[Site], losses: set[str], seen: set[int]) -> Iterator[Found]:
    """`loss.data[0]`, the `loss.item()` of the first versions of torch."""
    if ".data[0]" not in view.module.text:
        return
    for scope in dict.fromkeys((training.scope, *(site.scope for site in here))):
        if scope.module is not view.module:
            continue
        within = training.loop if scope is training.scope else None
        for node, stmt in scope.reads:
            if node.attr != "data" or not (LOSS.search(last(node.value)) or dotted(node.value) in losses):
                continue
            if within is not None and not training.holds(stmt):
                continue
            if first_of(node, stmt) and stmt.lineno not in seen and not view.trainings.rare(stmt, scope, within):
                seen.add(stmt.lineno)
                yield Found(
                    node, ".data[0] waits for the device in every step: keep tensors, and read them every n-th step"
                )


def tests(view: View, training: Training, here: list[Site], losses: set[str], seen: set[int]) -> Iterator[Found]:
    """`if torch.isnan(loss)`, `assert loss < 10`: Python decides by what stands on the device."""
    for scope in dict.fromkeys((training.scope, *(site.scope for site in here))):
        within = training.loop if scope is training.scope else None
        for stmt in scope.stmts:
            if not isinstance(stmt, ast.If | ast.While | ast.Assert) or stmt.lineno in seen:
                continue
            if every_so_often(stmt.test):
                continue
            if scope.module is not view.module or (within is not None and not training.holds(stmt)):
                continue
            if any(asked(view, node, scope, losses) for node in walk(stmt.test)) and not view.trainings.rare(
                stmt, scope, within
            ):
                seen.add(stmt.lineno)
                text = "a test of a tensor waits for the device in every step: keep tensors, and test every n-th step"
                yield Found(stmt, text)


def tests_device(view: View, scope: Scope) -> bool:
    """Whether a function decides, each time it runs, by a tensor on the device."""
    return scope.kind == "function" and any(
        isinstance(stmt, ast.If | ast.While | ast.Assert)
        and not every_so_often(stmt.test)
        and any(asked(view, node, scope, set()) for node in walk(stmt.test))
        and not view.trainings.rare(stmt, scope, None)
        for stmt in scope.stmts
    )


def texts(view: View, training: Training, losses: set[str], seen: set[int]) -> Iterator[Found]:
    """`line = f"loss {loss:.3f}"`: a text is made of a loss, or of another name for what stands on the device."""
    scope, loop = training.scope, training.loop
    for stmt in scope.stmts if losses and scope.module is view.module else ():
        if not isinstance(stmt, ast.Assign | ast.AugAssign) or stmt.lineno in seen:
            continue
        parts = written(stmt.value) if training.holds(stmt) else ()
        shown = [node for part in parts if id(part) not in rarely(stmt) for node in bare(part)]
        of_loss = any(on_losses(view, node, scope, losses) for node in shown)
        if not of_loss and not any(isinstance(node, ast.Name) and on_device(view, node, scope) for node in shown):
            continue
        if not view.trainings.rare(stmt, scope, loop):
            seen.add(stmt.lineno)
            what = "a loss" if of_loss else "a tensor"
            yield Found(stmt, f"a text of {what} waits for the device in every step: make it every n-th step")


def written(value: ast.expr) -> Iterator[ast.expr]:
    """What is written into the texts that an expression makes."""
    for node in walk(value):
        if isinstance(node, ast.FormattedValue):
            yield node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(constant(node.left), str):
            yield node.right


def first_of(node: ast.Attribute, stmt: ast.stmt) -> bool:
    """Whether an attribute is read for its first element."""
    return any(
        isinstance(item, ast.Subscript) and item.value is node and constant(item.slice) == 0 for item in walk(stmt)
    )


def syncs(view: View, site: Site, losses: set[str]) -> str:
    """What in a call waits for the device."""
    if site.name in SYNCS and site.receiver is not None and not site.call.args and not site.call.keywords:
        return f".{site.name}()" if is_tensor(view, site) else ""
    if site.name == "to" and site.receiver is not None and view.is_cpu(argument(site.call, 0, "device"), site.scope):
        return '.to("cpu")' if is_tensor(view, site) else ""
    if site.name in ("any", "all") and isinstance(site.call.func, ast.Attribute):
        asks = any(isinstance(node, ast.IfExp) and node.test is site.call for node in walk(site.stmt))
        return f".{site.name}()" if asks and on_device(view, site.call, site.scope) else ""
    plain = site.name in (*READS, "print") and isinstance(site.call.func, ast.Name)
    plain = plain or (site.name == "format" and isinstance(constant(site.receiver), str))
    plain = plain or view.full(site).startswith("math.")
    tracks = site.name in TRACKS and last(site.receiver) in TRACKERS
    if plain or tracks or (site.name in SHOWS and site.receiver is not None):
        for value in (*site.call.args, *(k.value for k in site.call.keywords)):
            shown = [node for node in bare(value) if on_losses(view, node, site.scope, losses)]
            whole = isinstance(value, ast.Name) and f"{value.id}{{}}" in losses
            if shown or whole or any(on_device(view, node, site.scope) for node in said(value, plain)):
                return f"{site.name}({ast.unparse(value)[:30]})"
    return ""


def said(value: ast.expr, plain: bool) -> Iterator[ast.expr]:
    """What a call that makes a number or a text is given: the value, or what the text is made of; of what is handed to
    a tracker the names alone, also those in a dictionary.
    """
    if plain:
        yield value
    if not plain or isinstance(value, ast.BinOp | ast.JoinedStr):
        yield from (node for node in bare(value) if isinstance(node, ast.Name))


def passed_on(view: View, site: Site, losses: set[str], beyond: set[Scope]) -> str:
    """What is told where a loss is handed to a function of another file that reads it (`meters.update(loss)`)."""
    function = view.calls.target(site.call, site.scope) if beyond else None
    if function not in beyond:
        return ""
    for value in (*site.call.args, *(item.value for item in site.call.keywords)):
        held = isinstance(value, ast.Name) and {f"{value.id}[]", f"{value.id}{{}}"} & losses
        if held or any(on_losses(view, node, site.scope, losses) for node in (*bare(value), *drawn(value, site))):
            return f"{site.name}({ast.unparse(value)[:30]})"
    return ""


def handed_over(view: View, site: Site, afar: set[Scope]) -> str:
    """What is told where a tensor of the device is handed to a function of another file that reads what it computes of
    such ones (`accuracy(output, target)`).
    """
    runs = (view.calls.target(site.call, site.scope), *view.trainings.forwards(site)) if afar else ()
    if not afar.intersection(runs):
        return ""
    values = (*site.call.args, *(item.value for item in site.call.keywords))
    given = next((value for value in values if on_device(view, value, site.scope)), None)
    return f"{site.name}({ast.unparse(given)[:30]})" if given is not None else ""


def reads_device(view: View, site: Site) -> bool:
    """Whether a call certainly reads from the device."""
    return bool(syncs(view, site, set())) and site.receiver is not None and on_device(view, site.receiver, site.scope)


def in_model(site: Site) -> bool:
    """Whether a call stands in the forward of a model, of whose inputs little is known."""
    owner = site.scope.owner
    return site.scope.name == "forward" and owner is not None and not LOSSES.search(owner.name)


def drawn(value: ast.expr, site: Site) -> Iterator[ast.expr]:
    """What a comprehension's name stands for in a call (`read(v) for v in losses.values()`), as `losses[0]`."""
    for node in walk(site.stmt) if isinstance(value, ast.Name) else ():
        if isinstance(node, ast.comprehension) and dotted(value) in {name for name, _ in targets(node.target)}:
            root = base(node.iter)
            if isinstance(root, ast.Name):
                yield ast.copy_location(ast.Subscript(root, ast.Constant(0), ast.Load()), node.iter)


def reads_given(view: View, site: Site) -> bool:
    """Whether a call reads what its function was given (`value.item()`, also for each value of a dictionary), itself or
    by a writer (`writer.add_scalar(name, value)`).
    """
    writes = site.name == "add_scalar" and site.receiver is not None
    if site.scope.kind != "function" or not (writes or (site.name in SYNCS and syncs(view, site, set()))):
        return False
    node = site.scope.node
    arguments = getattr(node, "args", None)
    given = {
        *site.scope.params,
        *(a.arg for a in (getattr(arguments, "vararg", None), getattr(arguments, "kwarg", None)) if a),
    }
    value = argument(site.call, 1, "scalar_value") if writes else site.receiver
    root: ast.AST | None = base(value) if value is not None else None
    for bind in site.scope.binds.get(dotted(root) or "", []):
        if bind.how == "for" and bind.value is not None:
            keys = bind.path == (0,) and last(bind.value) == "items"
            root = base(bind.value) if not keys else None
    return isinstance(root, ast.Name) and root.id in given and root.id != "self"


def is_tensor(view: View, site: Site) -> bool:
    """Whether the receiver may be a tensor on the device: not a number of Python's, numpy's or the data's."""
    root = base(site.receiver) if site.receiver is not None else None
    name = dotted(site.receiver) or ""
    if isinstance(root, ast.Name) and root.id in (
        "np",
        "numpy",
        "random",
        "math",
        "time",
        "args",
        "cfg",
        "config",
        "self_",
    ):
        return False
    if site.receiver is not None and (
        on_host(view.origins, site.receiver, site.scope, 1)
        or any(isinstance(node, ast.Call) and last(node) in (*SYNCS, "numpy") for node in walk(site.receiver))
    ):
        return False  # `.detach().cpu().numpy()` is reported once, for its first sync
    if isinstance(root, ast.Name):
        rows = looped(root.id, site)  # `[rows.tolist() for rows in parts]`
        if made_on_host(view.origins, root, site.scope, 1) or (rows and on_host(view.origins, rows, site.scope, 1)):
            return False
    return "optimizer" not in name and name != "lr"


def header(loop: Loop) -> ast.expr:
    """What a loop runs over, or tests."""
    return loop.test if isinstance(loop, ast.While) else loop.iter


def elsewhere(view: View, site: Site, training: Training) -> bool:
    """Whether the call is not on the training's way: evaluation inside it, an inner loop over parameters, no graph."""
    nest = loops(site.stmt, site.module)
    if isinstance(site.stmt, ast.Return) and training.loop in nest:
        return True  # the loop's last step
    shielded = any(map(turns_off_gradients, (*withs(site.stmt, site.module), *site.scope.decorators)))
    if shielded and nest[:1] != [training.loop]:
        if site.scope is training.scope:
            return True
        around = [stmt for stmt in site.scope.stmts if isinstance(stmt, Loop)]
        if any(view.kinds.is_loader(view.kinds.iterated(header(loop), site.scope), site.scope) for loop in around):
            return True  # not a score of the step itself, in a function of its own
    if site.scope.name in (
        "state_dict",
        "evaluate",
        "validate",
        "test",
        "eval",
        "validation",
        "__getitem__",
        "collate_fn",
    ):
        return True
    inner = [loop for loop in loops(site.stmt, site.module) if loop is not training.loop and loop is not training.micro]
    between = [loop for loop in inner if loop.lineno > training.loop.lineno] if site.scope is training.scope else inner
    return any(isinstance(loop, ast.For) and "parameters" in " ".join(idents(loop.iter)) for loop in between)


RULE = Rule(
    code="LS036",
    name="device sync in every step",
    what=(
        "A tensor is read back (`.item()`, `print(loss)`, `add_scalar(name, loss)`, `loss.data[0]`, "
        "`if torch.isnan(loss)`) in every step of a training loop."
    ),
    why=(
        "The host waits until the device has finished all it was given, then the device waits for new work: the "
        "queue runs dry in every step."
    ),
    bad="""
import torch

def train(model, loader, optimizer, criterion):
    model.cuda()
    total = 0.0
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total
""",
    good="""
import torch

def train(model, loader, optimizer, criterion):
    model.cuda()
    total = torch.zeros((), device="cuda")
    for i, (x, y) in enumerate(loader):
        x, y = x.cuda(), y.cuda()
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if i % 100 == 0:
            print(total.item())
""",
    severity=Severity.HINT,
    confidence=Confidence.MEDIUM,
    check=check,
    fix="unsafe",
    remedy="Add up detached tensors and read them every n-th step",
    moot=frozenset({"lightning", "pytorch_lightning", "lockstep", "composer", "trl"}),
    note=(
        "What runs beside every step of the optimizer counts, also under gradient accumulation. What runs every "
        "n-th step, or in the first turn only, does not (a test of an option comes out alike in all), nor does an "
        "evaluation or a unit test, nor what is read of a batch before it is moved, nor an arm where an optimizer "
        "that steps in every turn steps once more now and then. The function of an ignite `Engine` that trains is "
        "such a loop, and so is a method, or a function that another one makes, that makes one step and whose loop "
        "is out of sight, and a function that makes one of micro-batches. What runs every n-th turn of a loop "
        "inside the step comes in every step. A function that the step calls is told where it reads, in its own "
        'file (`return loss, {"bce": float(bce.detach())}`), and also where it is handed a loss, or a tensor on the '
        "device that it reads or tests, if that is another file. A tracker or a writer reads the names that it is "
        "given, those in a dictionary too."
    ),
)
