"""LS022: pin_memory without non_blocking; no workers (an opinion)."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import passed
from lockstep_lint.analysis.context import above, guards, loops, parted
from lockstep_lint.analysis.devices import on_device
from lockstep_lint.analysis.evaluation import shields
from lockstep_lint.analysis.index import Bind, Module, Scope, Site
from lockstep_lint.analysis.kinds import EVALUATION
from lockstep_lint.analysis.nodes import (
    Words,
    argument,
    base,
    constant,
    dotted,
    element_of,
    has_star,
    idents,
    is_true,
    keyword,
    last,
    strings,
    targets,
    walk,
)
from lockstep_lint.analysis.origins import Origins
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at, edit

__all__ = ["RULE"]


# What gives the parts of a batch.
PARTS = ("items", "values", "chunk", "split")
TYPE = re.compile(r"^b?(float|u?int)\d*$")


def asked(value: ast.expr | None) -> ast.expr | None:
    """What `next(iterator)` or `iterator.__next__()` asks, also for a part of what it gives; the loader where that
    begins anew (`next(iter(loader))`).
    """
    while isinstance(value, ast.Subscript):
        value = value.value
    if not isinstance(value, ast.Call) or last(value) not in ("next", "__next__"):
        return None
    method = isinstance(value.func, ast.Attribute) and not value.args
    given = value.func.value if method else next(iter(value.args), None)  # type: ignore[attr-defined]
    if isinstance(given, ast.Call) and last(given) in ("iter", "enumerate") and given.args:
        return given.args[0]
    return given


def unwrapped(node: ast.expr) -> ast.expr:
    """What stands in a `Variable(...)`."""
    return node.args[0] if isinstance(node, ast.Call) and last(node) == "Variable" and node.args else node


def taken(value: ast.expr, own: set[str]) -> bool:
    """Whether a value is a part of a batch (`batch["x"]`, `batch.items()`, `enumerate(batch)`)."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("enumerate", "zip"):
        return any(taken(arg, own) for arg in value.args)
    plain = isinstance(value, ast.Name | ast.Subscript) or (isinstance(value, ast.Call) and last(value) in PARTS)
    root = base(value)
    return plain and isinstance(root, ast.Name) and root.id in own


def placed(bind: Bind) -> ast.expr:
    """What a binding takes its value from: what stands at its place in a tuple that is written out, or the whole."""
    whole = bind.value or ast.Constant(None)
    return next(element_of(whole, bind.path), whole)


def moves_device(call: ast.Call) -> bool:
    """Whether `.to(...)` names a device and not only a type."""
    first = call.args[0] if call.args else keyword(call, "device")
    if first is None:
        return False
    words = [*idents(first), *(text for text in strings(first))]
    return not any(word in ("cpu", "dtype", "half", "long", "double", "bool") or TYPE.match(word) for word in words)


def moved(value: ast.expr) -> bool:
    """Whether a value was moved to a device already (`batch["x"].to(device).float()`)."""
    return any(
        isinstance(node, ast.Call) and (last(node) == "cuda" or (last(node) == "to" and moves_device(node)))
        for node in walk(value)
    )


def surely_replaced(site: Site, name: str, loop: ast.For) -> bool:
    """The same, in every turn of a loop (`batch = to_device(batch)`)."""
    binds = [b for b in site.scope.binds.get(name, []) if loop.lineno < b.stmt.lineno < site.line]
    tests = [n for n, _ in above(binds[-1].stmt, site.module) if isinstance(n, ast.If)] if binds else []
    around = {n for n, _ in above(site.stmt, site.module)}
    return around.issuperset(tests) and replaced(site, name, set(), loop.lineno)


def chosen(bind: Bind) -> bool:
    """Whether a name is given what a comparison picks out of a batch (`data = data[keep == 0]`)."""
    value = placed(bind)
    return isinstance(value, ast.Subscript) and any(isinstance(node, ast.Compare) for node in walk(value.slice))


def unpacked(site: Site, own: set[str], start: int) -> set[str]:
    """The names that get parts of a batch, as they are, between a line and a call (`graph, atoms = batch`)."""
    return {
        key
        for key, binds in site.scope.binds.items()
        for bind in binds
        if start <= bind.stmt.lineno < site.line and bind.how == "assign" and taken(placed(bind), own)
    }


def replaced(site: Site, name: str, own: set[str], start: int = 0) -> bool:
    """Whether a batch's name was given something else, by a function, before a call (`batch = data.get(batch)`), what
    was moved already, or a choice of its samples, which is a copy that is not pinned.
    """
    before = [b for b in site.scope.binds.get(name, []) if start < b.stmt.lineno < site.line and b.how == "assign"]
    binds = [b for b in before if b.stmt is not site.stmt]
    value = unwrapped(binds[-1].value) if binds and binds[-1].value is not None else None
    if binds and (chosen(binds[-1]) or (moved(placed(binds[-1])) and not parted(site, binds[-1].stmt))):
        return True
    root = base(value) if isinstance(value, ast.Call) and asked(value) is None else None
    return isinstance(root, ast.Name) and root.id not in (name, *own)


def comprehension_names(site: Site, own: set[str]) -> set[str]:
    """The variables of comprehensions in the statement that run over the loop's variable, and the parameters of
    lambdas that are handed on with it (`tree_map(lambda x: x.to(device), batch)`).
    """
    found: set[str] = set()
    for node in walk(site.stmt):
        if isinstance(node, ast.Call) and any(
            isinstance(root := base(arg), ast.Name) and root.id in own for arg in node.args
        ):
            found.update(p.arg for arg in node.args if isinstance(arg, ast.Lambda) for p in arg.args.args)
        if isinstance(node, ast.comprehension):
            root = base(node.iter)
            if isinstance(root, ast.Name) and root.id in own:
                found.update(key for key, _ in targets(node.target))
    return found


PIN = re.compile(r"pin[_-]mem(ory)?\b", re.IGNORECASE)
# Calls that give an option's default, each with the place where it stands.
DEFAULTS = {"add_argument": 99, "get": 1, "getattr": 2, "setdefault": 1}
# They read the environment.
ENVIRONMENT = ("getenv", "os.getenv", "environ.get", "os.environ.get")
# What a Trainer of transformers keeps under this name: True, unless its TrainingArguments are told otherwise.
TRAINERS = "dataloader_pin_memory"
# What says that there is a GPU, and that it is used.
GPU = ("cuda", "usecuda", "usegpu", "hascuda", "hasgpu", "iscuda", "cudaavailable")


@kept
def pins_memory(module: Module) -> bool:
    """Whether a file pins the memory of a loader, or says so as an option's default."""
    if not PIN.search(module.text):
        return False
    return (
        any(_asks(site) for site in module.sites())
        or any(
            (PIN.search(key) and _is_pinning(bind.value, scope))
            or any(isinstance(arm, ast.Dict) and _pins(arm) for arm in _arms(bind))
            for scope in module.scopes
            for key, binds in scope.binds.items()
            for bind in binds
        )
        or any(_default(scope) or any(map(_sets, scope.stmts)) for scope in module.scopes)
    )


def never_pins(origins: Origins, loader: ast.expr, scope: Scope) -> bool:
    """Whether a loader is certainly made without pinned memory, whatever the program says of others."""
    found = origins.of(loader, scope)
    return bool(found) and all(
        origin.call is not None
        and origins.names.qualify(origin.call.func, origin.scope).startswith("torch")
        and last(origin.call) == "DataLoader"
        and not has_star(origin.call)
        and constant(argument(origin.call, 7, "pin_memory") or ast.Constant(False)) is False
        for origin in found
    )


def _sets(stmt: ast.stmt) -> bool:
    """Whether a statement sets the option in a dictionary (`options["pin_memory"] = True`)."""
    return isinstance(stmt, ast.Assign) and any(
        isinstance(target, ast.Subscript) and constant(target.slice) == "pin_memory" and _is_pinning(stmt.value)
        for target in stmt.targets
    )


def _asks(site: Site) -> bool:
    """Whether a call says True for `pin_memory`, with its own argument, as a flag's default or as one of `get`."""
    if any(item.arg and PIN.search(item.arg) and _is_pinning(item.value, site.scope) for item in site.call.keywords):
        return True
    if site.name in DEFAULTS and any(PIN.search(text) for text in strings(site.call)):
        return is_true(argument(site.call, DEFAULTS[site.name], "default"))
    return False


def _default(scope: Scope) -> bool:
    """Whether a function's parameter is called so, with True as its default."""
    node = scope.node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    plain = [*node.args.posonlyargs, *node.args.args]
    pairs = [*zip(reversed(plain), reversed(node.args.defaults), strict=False)]
    pairs += [(arg, value) for arg, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value]
    return any(PIN.search(arg.arg) and is_true(value) for arg, value in pairs)


def _is_pinning(value: ast.expr | None, scope: Scope | None = None) -> bool:
    """Whether a value is True, or true where there is a GPU."""
    if isinstance(value, ast.IfExp):
        return _is_pinning(value.body, scope) or _is_pinning(value.orelse, scope)
    if isinstance(value, ast.BoolOp):
        found = [_is_pinning(part, scope) for part in value.values]
        return all(found) if isinstance(value.op, ast.And) else any(found)
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
        return last(value.operand) in ("cpu", "use_cpu", "no_cuda", "no_gpu")
    if isinstance(value, ast.Attribute) and value.attr == TRAINERS:
        return scope is None or f"{TRAINERS}=False" not in scope.module.text.replace(" ", "")
    if isinstance(value, ast.Name | ast.Attribute):
        return last(value).lower().replace("_", "") in GPU or (isinstance(value, ast.Name) and _told(value.id, scope))
    if isinstance(value, ast.Compare):
        return _compares(value)
    if isinstance(value, ast.Call):
        asks = last(value) == "startswith" and "cuda" in strings(value)
        return asks or (last(value) in ("is_available", "bool") and {"cuda", "is_available"} <= set(idents(value)))
    return is_true(value)


def _told(name: str, scope: Scope | None) -> bool:
    """Whether a name of a function or of its file is only given what is true where there is a GPU."""
    while scope is not None and name not in scope.binds and name not in scope.params:
        scope = scope.parent
    given = [bind.value for bind in scope.binds.get(name, [])] if scope is not None else []
    return bool(given) and all(isinstance(each, ast.Call | ast.Compare) and _is_pinning(each) for each in given)


def _compares(value: ast.Compare) -> bool:
    """Whether a comparison is true where there is a GPU (`device.type == "cuda"`, `"cuda" in str(device)`)."""
    other = constant(value.comparators[0])
    match value.ops[0]:
        case ast.Eq():  # `str(os.getenv("PIN_MEMORY", True)).lower() == "true"`
            calls = (node for node in walk(value.left) if isinstance(node, ast.Call))
            asked = [call for call in calls if dotted(call.func) in ENVIRONMENT]
            return other == "cuda" or (other == "true" and any(is_true(argument(c, 1, "default")) for c in asked))
        case ast.NotEq():
            return other in ("cpu", "mps")
        case ast.In():
            return constant(value.left) == "cuda"
        case ast.Gt():
            return last(value.left) == "device_count" and other == 0
    return False


def _arms(bind: Bind) -> list[ast.expr | None]:
    """What a binding may give its name."""
    return [bind.value.body, bind.value.orelse] if isinstance(bind.value, ast.IfExp) else [bind.value]


def _pins(node: ast.Dict) -> bool:
    """Whether a dictionary of options pins the memory."""
    return any(
        constant(key) == "pin_memory" and _is_pinning(value) for key, value in zip(node.keys, node.values, strict=True)
    )


# What may be a loader, or hold one, among what Accelerate is given.
LOADERS = Words(r"load|data|^dl|dl$|iter|batch|sampl|train|val|test|^objs?$|^args$|^kwargs$", re.IGNORECASE)
# Arguments that are certainly no loader, whatever their parts are called.
PLAIN = Words(r"model|net|optim|sched|ema|encoder|decoder|critic|policy|disc|gen|vae|head", re.IGNORECASE)


def unprepared(view: View, site: Site) -> bool:
    """Whether Accelerate leaves a loop's batches where they are: where a flag turns it off (`if use_accelerate: ...
    else: x.to(device)`), or as it is given no loader.
    """
    for guard in guards(site.stmt, site.module):
        test, when = guard.test, guard.when
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, when = test.operand, not when
        if not when and isinstance(test, ast.Name | ast.Attribute) and "accelerat" in last(test).lower():
            return True
    return no_loader_given(view)


def no_loader_given(view: View) -> bool:
    """Whether the programs prepare something with Accelerate, but no loader."""
    members = view.project.family(view.module)
    given = [site for member in members for site in member.sites("prepare") if site.receiver is not None]
    if not given or view.effects.mentioned(view.module, "prepare_data_loader", "skip_first_batches"):
        return False
    return all(certain(view, value, site) for site in given for value in values(site))


def values(site: Site) -> list[ast.expr]:
    """What a call is given."""
    return [*site.call.args, *(item.value for item in site.call.keywords if item.arg != "device_placement")]


def certain(view: View, value: ast.expr, site: Site) -> bool:
    """Whether a value is certainly no loader: a plain name, of a model or an optimizer."""
    if not isinstance(value, ast.Name | ast.Attribute) or view.kinds.is_loader(value, site.scope):
        return False
    name = last(value)
    return not LOADERS.search(name) and (bool(PLAIN.search(name)) or view.kinds.is_model(value, site.scope))


def no_workers(view: View, site: Site) -> bool:
    """Whether a loader certainly has no workers, and gives more than a first batch."""
    if one_batch(site) or moved_before(view, site):
        return False
    value = keyword(site.call, "num_workers")
    if value is not None:
        found = view.origins.of(value, site.scope)
        return bool(found) and all(constant(origin.node) == 0 for origin in found)
    if len(site.call.args) > 5 or any(isinstance(arg, ast.Starred) for arg in site.call.args):
        return False
    return all(leaves_out(view, item.value, site) for item in site.call.keywords if item.arg is None)


def moved_before(view: View, site: Site) -> bool:
    """Whether a data set is made of tensors that are on the device already, which its workers could not hand out."""
    data = argument(site.call, 0, "dataset")
    return any(
        last(call).endswith(("Dataset", "set", "sets", "Data"))
        and any(on_device(view, value, home) for value in call.args)
        for call, home, _ in view.origins.calls_of(data, site.scope)
    )


def own_loader(view: View, site: Site) -> bool:
    """Whether a call of `super().__init__` makes a DataLoader of a class of the project's own."""
    owner = site.scope.owner
    supers = isinstance(site.receiver, ast.Call) and last(site.receiver) == "super"
    return supers and owner is not None and any(base.endswith("data.DataLoader") for base in view.names.bases_of(owner))


def one_batch(site: Site) -> bool:
    """Whether a loader is made for its first batch alone (`next(iter(DataLoader(...)))`)."""
    return any(
        isinstance(node, ast.Call) and last(node) == "iter" and node.args[:1] == [site.call]
        for asks in walk(site.stmt)
        if isinstance(asks, ast.Call) and last(asks) == "next"
        for node in asks.args
    )


def leaves_out(view: View, node: ast.expr, site: Site) -> bool:
    """Whether the options that a loader is given as `**options` are written out, and have no workers among them."""
    name = dotted(node)
    if name is None:
        return False
    given = [bind.value for bind, _ in view.origins.binds(name, site.scope, site.line)]
    fed = any(dotted(other.receiver) == name and not harmless(other) for other in site.scope.sites) or any(
        isinstance(target, ast.Subscript) and dotted(target.value) == name and adds_workers(target.slice)
        for stmt in site.scope.stmts
        if isinstance(stmt, ast.Assign)
        for target in stmt.targets
    )
    return bool(given) and not fed and all(map(without_workers, given))


def harmless(site: Site) -> bool:
    """Whether a dictionary's method gives it no workers (`options.update({"batch_size": 8})`)."""
    if site.name != "update":
        return site.name in ("pop", "get", "items", "keys", "values", "copy")
    named = all(item.arg not in (None, "num_workers") for item in site.call.keywords)
    return named and all(map(without_workers, site.call.args))


def adds_workers(key: ast.expr) -> bool:
    """Whether what is set under a key of a dictionary may be its workers."""
    name = constant(key)
    return not isinstance(name, str) or name == "num_workers"


def without_workers(value: ast.expr | None) -> bool:
    """Whether a dictionary is written out and has no workers, or none of them."""
    pairs: list[tuple[object, ast.expr]] = []
    if isinstance(value, ast.Dict):
        pairs = [(constant(key), each) for key, each in zip(value.keys, value.values, strict=True)]
    elif isinstance(value, ast.Call) and last(value) == "dict" and not value.args:
        pairs = [(item.arg, item.value) for item in value.keywords]
    else:
        return False
    return all(key is not None and (key != "num_workers" or constant(each) == 0) for key, each in pairs)


MOVES = ("to", "cuda")
# These move the batches.
MOVERS = {"accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "composer", "lockstep", "trl"}


def check(view: View) -> Iterator[Found]:
    """Looks for blocking moves of batches that come from pinned memory, and for loaders without workers."""
    others = view.frameworks & MOVERS
    if (not others or others == {"accelerate"}) and pinned(view) and not view.mps_only:
        for site in view.sites(*MOVES):
            device = next(iter(site.call.args), None) if site.name == "to" else None
            if others and not unprepared(view, site):
                continue
            if blocking(view, site) and not view.on_cpu(site) and not view.is_cpu(device, site.scope):
                yield at(
                    site,
                    "the batch is in pinned memory but this move waits for it: add non_blocking=True",
                    edit=edit("keyword", site.call, "non_blocking", "True"),
                )
    if not view.gpu:
        return
    for site in view.sites("DataLoader"):
        if view.full(site).startswith("torch") and no_workers(view, site):
            yield at(site, "loads in the training process: give the loader num_workers", severity=Severity.OPINION)
    for site in view.sites("__init__"):
        if own_loader(view, site) and no_workers(view, site):
            yield at(site, "loads in the training process: give the loader num_workers", severity=Severity.OPINION)


def pinned(view: View) -> bool:
    """Whether a training loader of the programs pins its memory."""
    return any(map(pins_memory, view.project.family(view.module)))


def blocking(view: View, site: Site) -> bool:
    """Whether a call moves the variable of a loop over training batches, and waits."""
    if keyword(site.call, "non_blocking") is not None or has_star(site.call) or len(site.call.args) > 2:
        return False
    if site.name == "to" and not moves_device(site.call):
        return False
    if site.name == "cuda" and len(site.call.args) > 1:
        return False
    root = base(unwrapped(site.receiver)) if site.receiver is not None else None
    if not isinstance(root, ast.Name):
        return False
    if (root.id in drawn(view, site) and not replaced(site, root.id, set())) or fed(view, site, root.id):
        return True
    for loop in loops(site.stmt, site.module):
        if isinstance(loop, ast.For) and over_batches(view, loop, site) and carried(site, root.id, loop):
            tests = held_out(loop) or EVALUATION.search(site.scope.name) or shields(site)
            return any(t.loop is loop for t in view.trainings.near(site.module)) or not tests
    return False


def drawn(view: View, site: Site) -> set[str]:
    """The names of batches that `next(iterator)` gives, and the variables of comprehensions over them."""
    scope = site.scope
    if not {"next", "__next__"} & scope.module.by_name.keys():
        return set()
    around = loops(site.stmt, site.module)
    trains = any(training.loop in around for training in view.trainings.of(site.module))
    looping = bool(around) and not shields(site) and not EVALUATION.search(scope.name)
    own = {
        key
        for key, binds in scope.binds.items()
        for bind in binds
        for source in (asked(bind.value),)
        if source is not None
        and gives_batches(view, source, site)
        and (trains or (not of_held_out(view, source, scope) and (looping or stepping(view, site))))
    }
    own |= {
        key
        for key, binds in (scope.binds.items() if own else ())
        for bind in binds
        if bind.path and isinstance(bind.value, ast.Name) and bind.value.id in own
    }
    return own | comprehension_names(site, own) if own else own


def of_held_out(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether what `next` asks is held-out data, by its name or by that of the loader which it runs over."""
    made = [call for call, _, _ in view.origins.calls_of(node, scope) if last(call) in ("iter", "enumerate")]
    names = [last(node), *(name for call in made for arg in call.args[:1] for name in idents(arg))]
    return any(map(EVALUATION.search, names))


def stepping(view: View, site: Site) -> bool:
    """Whether a call is made in the steps of a training, and not once for a look at the data."""
    trainings = view.trainings
    return any(
        other.stmt is site.stmt
        for training in (*trainings.near(site.module), *trainings.lone(site.module))
        for other in trainings.each_step(training)
    )


def gives_batches(view: View, node: ast.expr, site: Site) -> bool:
    """Whether `next` of a value is a batch: of an iterator of a loader, or of a project's generator over one."""
    if pinned_loader(view, node, site.scope):
        return True
    for origin in view.origins.of(node, site.scope):
        plain = origin.call is not None and origin.call is not node and last(origin.call) in ("iter", "enumerate")
        if plain and origin.call is not None and origin.call.args:
            return pinned_loader(view, origin.call.args[0], origin.scope)
        function = view.calls.target(origin.call, origin.scope) if origin.call is not None else None
        if function is not None and function.kind == "function" and origin.call is not None and origin.call.args:
            yields = any(isinstance(part, ast.Yield) for stmt in function.stmts for part in walk(stmt))
            return yields and pinned_loader(view, origin.call.args[0], origin.scope)
    return False


def fed(view: View, site: Site, name: str, depth: int = 2) -> bool:
    """Whether the name is, or comes out of, a parameter that a caller gives the variable of its loop over training
    batches, itself or by a function in between.
    """
    scope = site.scope
    if scope.kind != "function":
        return False
    callers = callers_of(view, scope)
    params = [*scope.params, *rest_of(scope)]
    own = {param for param in params if any(gives_batch(view, c, scope, param, depth) for c in callers)}
    if not callers and maps(view, scope):
        own = set(scope.params)
    for _ in range(3 if own else 0):
        own |= {
            key
            for key, binds in scope.binds.items()
            for bind in binds
            if bind.value is not None and bind.stmt.lineno <= site.line and taken(bind.value, own)
        }
    return name in own or name in comprehension_names(site, own)


def callers_of(view: View, scope: Scope) -> list[Site]:
    """The calls that may run a function: also those that name the method of a base class which it stands in for."""
    parents = view.names.parents(scope.owner) if scope.owner is not None and not scope.name.startswith("__") else ()
    replaced_ones = {view.names.member(parent, scope.name) for parent in parents} - {None, scope}
    return [site for each in (scope, *replaced_ones) if each is not None for site in view.calls.callers(each)]


def maps(view: View, scope: Scope) -> bool:
    """Whether a function is handed, with a training loader, to a class of the project that is run over in its place
    (`Prepared(train_loader, prepare)`).
    """
    if not view.effects.mentioned(view.module, "__iter__"):
        return False
    for site in scope.module.sites():
        given = [*site.call.args, *(item.value for item in site.call.keywords)]
        if not any(isinstance(value, ast.Name) and value.id == scope.name for value in given):
            continue
        maker = view.calls.target(site.call, site.scope)
        if maker is None or maker.owner is None or view.names.member(maker.owner, "__iter__") is None:
            continue
        if any(view.kinds.is_loader(v, site.scope) and not EVALUATION.search(last(v)) for v in given):
            return True
    return False


def rest_of(scope: Scope) -> list[str]:
    """The name of the parameter that takes the rest of the arguments (`*args`), if there is one."""
    vararg = getattr(getattr(scope.node, "args", None), "vararg", None)
    return [vararg.arg] if vararg is not None else []


def gives_batch(view: View, caller: Site, scope: Scope, param: str, depth: int) -> bool:
    """Whether a call passes the variable of a loop over training batches for a parameter."""
    values = caller.call.args if param in rest_of(scope) else [passed(caller, scope, param)]
    names = [value.id for value in values if isinstance(value, ast.Name)]
    return any(
        isinstance(loop, ast.For)
        and any(key in names and not surely_replaced(caller, key, loop) for key, _ in targets(loop.target))
        and over_batches(view, loop, caller)
        and not held_out(loop)
        and not EVALUATION.search(caller.scope.name)
        for loop in (loops(caller.stmt, caller.module) if names else ())
    ) or (depth > 0 and caller.scope is not scope and any(fed(view, caller, name, depth - 1) for name in names))


def held_out(loop: ast.For) -> bool:
    return any(EVALUATION.search(name) for name in idents(loop.iter))


def over_batches(view: View, loop: ast.For, site: Site) -> bool:
    """Whether a loop runs over a loader."""
    return pinned_loader(view, view.kinds.iterated(loop.iter, site.scope), site.scope)


def pinned_loader(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether a value is a loader, also one of several (`data = loaders["train"]`), and may pin its memory."""
    found = view.kinds.is_loader(node, scope) or any(
        isinstance(origin.node, ast.Subscript) and view.kinds.is_loader(origin.node, origin.scope)
        for origin in view.origins.of(node, scope)
    )
    return found and not never_pins(view.origins, node, scope)


def carried(site: Site, name: str, loop: ast.For) -> bool:
    """Whether a variable is one of the loop's own, or unpacked from one, itself or by way of another."""
    own = {key for key, _ in targets(loop.target)}
    if name in own or replaced(site, name, own, loop.lineno):
        return not replaced(site, name, own, loop.lineno)
    for _ in range(2):
        own |= unpacked(site, own, loop.lineno)
    for bind in site.scope.binds.get(name, []):
        if bind.value is not None and loop.lineno <= bind.stmt.lineno <= site.line:
            value = placed(bind)
            root = base(value)
            if isinstance(root, ast.Name) and root.id in own and not moved(value):
                return True
    return name in comprehension_names(site, own)


RULE = Rule(
    code="LS022",
    name="pinned memory, blocking copy",
    what=(
        "A loader pins its memory, but the batches are moved without `non_blocking=True`; or, as an opinion, a "
        "loader has no workers."
    ),
    why=(
        "Pinned memory pays off by copying while the GPU computes. A blocking copy waits for it and pays only the"
        " cost of pinning."
    ),
    bad="""
import torch
from torch.utils.data import DataLoader

def train(model, data, optimizer, criterion, device):
    loader = DataLoader(data, batch_size=32, num_workers=4, pin_memory=True)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
""",
    good="""
import torch
from torch.utils.data import DataLoader

def train(model, data, optimizer, criterion, device):
    loader = DataLoader(data, batch_size=32, num_workers=4, pin_memory=True)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
""",
    severity=Severity.HINT,
    confidence=Confidence.HIGH,
    check=check,
    fix="safe",
    remedy="Add non_blocking=True to the move",
    moot=frozenset({"lockstep"}),
    note=(
        "It is told at the move, whichever file of the program makes the loader, unless that loader is in sight and "
        "pins nothing; held-out data counts only in a loop that trains, and Apple's GPUs not at all, for which no "
        "memory is pinned. What a comparison picks out of a batch (`batch[keep > 0]`) is a copy that is not pinned, "
        "and what was moved before is on the GPU. The opinion is told at a "
        "`DataLoader(...)` without `num_workers`, or with 0, in a program that knows of GPUs, such as "
        "`DataLoader(data, batch_size=8)`, and at the `super().__init__(...)` of a class that derives from DataLoader; "
        "not for a data set of tensors that are on the GPU already, which workers could not hand out."
    ),
)
