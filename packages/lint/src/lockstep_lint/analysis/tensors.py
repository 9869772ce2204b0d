"""Find values on the CPU, and losses that are still on the device."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.calls import Calls
from lockstep_lint.analysis.context import above
from lockstep_lint.analysis.index import Bind, Scope
from lockstep_lint.analysis.nodes import Words, argument, base, constant, dotted, element_of, idents, last, walk
from lockstep_lint.analysis.origins import Origins, returned, under
from lockstep_lint.analysis.training import Training, Trainings

__all__ = [
    "LOSS",
    "MADE",
    "READS",
    "SYNCS",
    "asks_for_gpu",
    "bare",
    "is_read",
    "key",
    "loss_names",
    "made_on_host",
    "moves",
    "on_host",
]


SYNCS = {"item", "cpu", "tolist"}
# They make a number or a text of what they are given.
READS = {"float", "bool", "int", "str", "repr", "format"}
# What stands before a loss: a number.
FACTOR = Words(r"loss_?(scale|weight|coef|ratio|factor|lambda)", re.IGNORECASE)
# The numbers that stand before a term of a loss.
WEIGHT = Words(
    r"(^|_)(weight|w|coeff?|coefficient|ratio|factor|lambda|lamb?|alpha|beta|gamma|scale|ramp|rampup|mul)$",
    re.IGNORECASE,
)
# They give a number of Python's.
NUMBERS = {"min", "max", "len", "int", "round", "get", "time", "schedule", "beta", "weight"}
# They make one number, or one list, of all that they are given.
ADDS = {"sum", "mean", "stack", "cat", "add", "list", "tuple", "reduce", "scale", "fsum", "values", "items"}
# What gives a tensor of the device again.
STILL_THERE = {"detach", "mean", "sum", "float", "clone"}
# What a number on the device is called.
LOSS = Words(r"loss|err(?!no)|cost|kld|nll|acc|penalty", re.IGNORECASE)


def loss_names(trainings: Trainings, training: Training) -> set[str]:
    """The names of the losses that the loop computes gradients of, and `losses[]` for a dictionary of them."""
    names = set()
    for site in [training.backward, *training.scope.sites]:
        if trainings.steps.backwards(site):
            loss = trainings.steps.loss_of(site)
            names |= {dotted(loss) or "", *held(loss, site.scope), *summed(loss, training), *whole(loss)}
    names |= called_losses(trainings.calls, training)
    names = {name for name in names if name and ("." not in name or name.endswith("[]"))}
    return names | set(given_back(trainings, training)) | set(dictionaries(training, names))


def called_losses(calls: Calls, training: Training) -> set[str]:
    """The names that say that they are a loss, without those that hold a number, or what is computed from numbers."""
    values: dict[str, list[ast.expr]] = {}
    numbers: set[str] = set()
    for name, binds in training.scope.binds.items():
        found = [b for b in binds if b.value is not None and b.stmt.lineno > training.loop.lineno]
        if "loss" in name.lower() and found and not FACTOR.search(name):
            values[name] = [bind.value for bind in found if bind.value is not None]
            if any(is_read(calls, bind, training.scope) for bind in found) or all(
                bind.how == "assign" and constant(bind.value) is not None for bind in found
            ):
                numbers.add(name)
    for name, inner in values.items():
        if name not in numbers and any(numbers & set(idents(value)) for value in inner):
            numbers.add(name)  # `mean_loss = total_loss / count`, after `total_loss += loss.item()`
    named = {name: [values.keys() & set(idents(value)) for value in inner] for name, inner in values.items()}
    while more := {name for name in values.keys() - numbers if any(each and each <= numbers for each in named[name])}:
        numbers |= more  # `best_loss = mean_loss`
    return values.keys() - numbers


def given_back(trainings: Trainings, training: Training) -> Iterator[str]:
    """The dictionaries, as `info[]`, that a function of the project returns which computes the gradients itself."""
    for name, binds in training.scope.binds.items():
        for bind in binds:
            call = bind.value
            if not isinstance(call, ast.Call) or not training.holds(bind.stmt):
                continue
            function = trainings.calls.target(call, training.scope)
            if function is None or not trainings.trains(function.sites):
                continue
            for given in function.returns():
                for table in element_of(given, bind.path):
                    if isinstance(table, ast.Dict) and all(map(still, on_keys(table, function))):
                        yield f"{name}[]"


def on_keys(table: ast.Dict, function: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield the losses of a literal dictionary, by the names of its keys."""
    for name, value in zip(table.keys, table.values, strict=True):
        if LOSS.search(str(constant(name))):
            yield value, function


def still(found: tuple[ast.expr, Scope]) -> bool:
    """Whether a value was certainly computed, and not read from the device."""
    value, scope = found
    made = [bind.value for bind in scope.binds.get(value.id, [])] if isinstance(value, ast.Name) else []
    return bool(made) and not any(each is None or constant(each) is not None or read(each) for each in made)


def dictionaries(training: Training, names: set[str]) -> Iterator[str]:
    """The dictionaries that the loop puts a loss into, as `logs{}`: they may hold numbers too."""
    for stmt in training.scope.stmts:
        if not isinstance(stmt, ast.Assign) or not training.holds(stmt):
            continue
        target, value = stmt.targets[0], stmt.value
        name = dotted(target.value if isinstance(target, ast.Subscript) else target)
        put: list[ast.expr] = [value] if isinstance(target, ast.Subscript) else []
        if isinstance(value, ast.Dict):
            put = value.values
        elif isinstance(value, ast.Call) and last(value).lower().endswith("dict"):
            put = [item.value for item in value.keywords]
            put += [each for table in value.args[:1] if isinstance(table, ast.Dict) for each in table.values]
        if name is not None and any(key(node) in names for each in put for node in bare(each)):
            yield f"{name}{{}}"


def held(loss: ast.expr | None, scope: Scope) -> Iterator[str]:
    """The dictionaries that a loss is taken out of, or is the sum of, as `losses[]`."""
    given = scope.binds.get(dotted(loss) or "", []) if loss is not None else []
    for value in (loss, *(bind.value for bind in given)):
        for node in added(value) if value is not None else ():
            name = None
            if isinstance(node, ast.Subscript) and isinstance(constant(node.slice), str):
                name = dotted(node.value)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "values":
                name = dotted(node.func.value)
            if name is not None and not any(read(bind.value) for bind in scope.binds.get(name, [])):
                yield f"{name}[]"


def whole(loss: ast.expr | None) -> Iterator[str]:
    """The name of the losses of a batch's samples, and `loss[]` for one of them, where their mean is differentiated."""
    made = loss.func if isinstance(loss, ast.Call) and last(loss) in ("mean", "sum") else None
    if isinstance(made, ast.Attribute) and isinstance(made.value, ast.Name):
        yield from (made.value.id, f"{made.value.id}[]")


def added(value: ast.expr) -> Iterator[ast.AST]:
    """The parts of a value, without what a model or a loss is given to compute with (`model(x, n=cfg["n"])`)."""
    stack: list[ast.AST] = [value]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.Call) and last(node) not in ADDS:
            stack.append(node.func)
        else:
            stack.extend(ast.iter_child_nodes(node))


def summed(loss: ast.expr | None, training: Training) -> Iterator[str]:
    """The names that the loop adds up to a loss (`loss = mse + weight * kl`): what it computes by a call itself."""
    scope, queue = training.scope, [dotted(loss) or ""]
    seen: set[str] = set()
    while queue and len(seen) < 20:
        name = queue.pop()
        seen.add(name)
        here = [bind for bind in scope.binds.get(name, []) if training.holds(bind.stmt)]
        if name != dotted(loss) and here and not WEIGHT.search(name) and all(computes(bind.value) for bind in here):
            yield name
        parts = [part for bind in here if bind.value is not None and not bind.path for part in terms(bind.value)]
        queue += [part for part in parts if part not in seen]


def terms(value: ast.expr) -> Iterator[str]:
    """The names that are added up in a value, also those that a factor stands before."""
    for node in walk(value) if isinstance(value, ast.BinOp) else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            yield from (side.id for side in (node.left, node.right) if isinstance(side, ast.Name))


def computes(value: ast.expr | None) -> bool:
    """Whether a value is what a call or a sum gives, and is no number."""
    plain = isinstance(value, ast.Call) and last(value) not in NUMBERS
    return (plain or isinstance(value, ast.BinOp)) and not read(value)


def read(value: ast.expr | None) -> bool:
    """Whether a value was read from the device where it was bound."""
    return value is not None and any(
        last(node) in (*SYNCS, "numpy", "float") or (isinstance(node, ast.Subscript) and first_of_data(node))
        for node in walk(value)
    )


def first_of_data(node: ast.Subscript) -> bool:
    """Whether an expression is the `loss.item()` of the first versions of torch (`loss.data[0]`)."""
    held = node.value
    return isinstance(held, ast.Attribute) and held.attr == "data" and constant(node.slice) == 0 and named(held.value)


def named(node: ast.expr) -> bool:
    """Whether the name of a value says that it is a loss."""
    return LOSS.search(last(node))


def is_read(calls: Calls, bind: Bind, scope: Scope) -> bool:
    """Whether a name is given what was read from the device, there or in the function of the project that gives it, or
    a part of that (`losses = step(x)`, then `losses["total"]`, `losses.pop("total")`).
    """
    value = bind.value
    place: object = None
    if read(value) or gives_number(calls, value, bind.path, scope):
        return True
    if isinstance(value, ast.Call) and last(value) in ("pop", "get") and isinstance(value.func, ast.Attribute):
        place, value = constant(next(iter(value.args), None)), value.func.value
    elif isinstance(value, ast.Subscript):
        put = put_under(value, scope)
        if put and all(map(read, put)):
            return True
        place, value = constant(value.slice), value.value
    if value is bind.value or not isinstance(value, ast.Name):
        return value is not bind.value and gives_number(calls, value, (), scope, place)
    whole = scope.binds.get(value.id, [])
    return bool(whole) and all(gives_number(calls, each.value, each.path, scope, place) for each in whole)


def put_under(item: ast.Subscript, scope: Scope) -> list[ast.expr]:
    """What a function puts into a dictionary under the key of one of its items (`logs["loss"] = loss.item()`), also by
    the same name for the key.
    """
    held, place = dotted(item.value), item.slice
    told = isinstance(constant(place), str) or isinstance(place, ast.Name)
    return [
        stmt.value
        for stmt in (scope.stmts if told else ())
        if isinstance(stmt, ast.Assign)
        for target in stmt.targets
        if isinstance(target, ast.Subscript)
        and dotted(target.value) == held
        and ast.unparse(target.slice) == ast.unparse(place)
    ]


def gives_number(
    calls: Calls, call: ast.expr | None, path: tuple[int, ...], scope: Scope, place: object = None
) -> bool:
    """Whether a value is what a function of the project has read (`step(x)`, which returns `loss.item()`), also one of
    several, or a dictionary that holds a number under a key, or numbers only.
    """
    while isinstance(call, ast.BinOp) and isinstance(call.left, ast.Call | ast.BinOp):
        call = call.left  # `step(x) / world_size`
    function = calls.target(call, scope) if isinstance(call, ast.Call) else None
    if function is None or not isinstance(call, ast.Call) or function.kind != "function":
        return False
    given = [part for each in returned(function, (call, scope)) for part in element_of(each, path)]
    return bool(given) and all(is_number(part, function, place) for part in given)


def is_number(value: ast.expr | None, scope: Scope, place: object = None) -> bool:
    """Whether a value is read from the device where it stands, or all that its name was given is; of a dictionary that
    is written out what stands under a key, or all.
    """
    if isinstance(value, ast.Dict):
        found = list(under(value, place))
        return bool(found) and all(map(read, found))
    if isinstance(value, ast.BinOp) and isinstance(value.left, ast.Name):
        value = value.left  # `total / world_size`
    if not isinstance(value, ast.Name):
        return read(value)
    binds = scope.binds.get(value.id, [])
    return bool(binds) and all(
        bind.how in ("assign", "aug")
        and not bind.path
        and (constant(bind.value) is not None or reads_all(bind.value, scope, place))
        for bind in binds
    )


def reads_all(value: ast.expr | None, scope: Scope, place: object) -> bool:
    """Whether what a name is given was read there, also all that a dictionary holds, or what it holds under a key."""
    return is_number(value, scope, place) if isinstance(value, ast.Dict) else read(value)


def key(node: ast.AST) -> str:
    """A name as it stands, a loss that is taken out of a dictionary as `losses[]`; "" for anything else."""
    if isinstance(node, ast.Subscript):
        held = dotted(node.value)
        return f"{held}[]" if held is not None else ""
    return node.id if isinstance(node, ast.Name) else ""


def bare(value: ast.expr) -> Iterator[ast.AST]:
    """The parts of an expression that are not inside a call's method chain (`loss` but not `loss.item()`)."""
    stack: list[ast.AST] = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            stack.extend(node.args if node.func.attr == "format" else [])
            if node.func.attr in STILL_THERE and not node.args:
                stack.append(node.func.value)
            continue
        if isinstance(node, ast.Attribute) and node.attr == "data":
            stack.append(node.value)
        yield node
        asks = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn)
        if not asks and not isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
            stack.extend(ast.iter_child_nodes(node))


# They make a tensor on the CPU.
MADE = {f"torch.{name}" for name in ("tensor", "Tensor", "FloatTensor", "LongTensor", "from_numpy", "zeros", "ones")}
MADE |= {f"torch.{name}" for name in ("rand", "randn", "randint", "randperm", "arange", "linspace", "full", "empty")}
# Methods of a tensor that give a tensor.
COMPUTED = {"sum", "mean", "max", "min", "abs", "norm", "std", "float", "exp", "log", "sqrt", "pow"}


def on_host(origins: Origins, value: ast.expr, scope: Scope, depth: int = 0) -> bool:
    """Whether a value is read from the device, computed by numpy, or a tensor that is made on the CPU."""
    while isinstance(value, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(value, ast.Call):
            full = origins.names.qualify(value.func, scope)
            if full.startswith("numpy.") or last(value) in (*SYNCS, "numpy"):
                return True
            if full in MADE and not any(item.arg == "device" for item in value.keywords):
                return True
            if moves(value):
                return False
            value = value.func
        else:
            value = value.value
    if isinstance(value, ast.BinOp):
        sides = (value.left, value.right)
        return any(on_host(origins, side, scope, depth) and not computed(other) for side, other in (sides, sides[::-1]))
    if not depth or not isinstance(value, ast.Name):
        return False
    return made_on_host(origins, value, scope, depth - 1)


def computed(value: ast.expr) -> bool:
    """Whether a value is what a tensor's method computes, which a number beside it leaves on the device
    (`losses.sum() / mask.sum().item()`).
    """
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and last(value) not in SYNCS:
        if last(value) in COMPUTED:
            return True
        value = value.func.value
    return False


def made_on_host(origins: Origins, node: ast.Name, scope: Scope, depth: int) -> bool:
    """Whether all that a name may have been given is on the CPU."""
    given = [(bind, home) for bind, home in origins.binds(node.id, scope, node.lineno)]
    if any(brought(bind, home) for bind, home in given):
        return True
    return bool(given) and all(
        b.value is not None and not b.path and on_host(origins, b.value, home, depth) for b, home in given
    )


def brought(bind: Bind, scope: Scope) -> bool:
    """Whether a name is given its own value from the device where there is one (`if use_cuda: loss = loss.cpu()`)."""
    value = bind.value
    if not isinstance(value, ast.Call) or last(value) not in SYNCS or dotted(base(value)) != bind.key:
        return False
    around = above(bind.stmt, scope.module)[:1]
    return any(isinstance(n, ast.If) and place == "body" and asks_for_gpu(n.test) == 1 for n, place in around)


def moves(call: ast.Call) -> bool:
    """Whether a call gives back its object on the device."""
    if last(call) == "to" and isinstance(call.func, ast.Attribute):
        place = argument(call, 0, "device")
        return place is not None and constant(place) != "cpu"
    return last(call) == "cuda" and isinstance(call.func, ast.Attribute)


def asks_for_gpu(test: ast.expr) -> int:
    """1 if a test holds only with a GPU, -1 if only without, else 0."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return -asks_for_gpu(test.operand)
    if isinstance(test, ast.BoolOp):
        found = [asks_for_gpu(value) for value in test.values]
        return next((value for value in found if value), 0) if isinstance(test.op, ast.And) else min(found)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.NotEq):
        value = constant(test.comparators[0])
        sign = 1 if isinstance(test.ops[0], ast.Eq) else -1
        return {"cpu": -sign, "gloo": -sign, "cuda": sign, "nccl": sign}.get(value, 0) if isinstance(value, str) else 0
    name = last(test)
    if name in ("is_available", "use_cuda", "cuda", "gpu", "use_gpu", "has_cuda"):
        return 1
    return -1 if name in ("cpu", "no_cuda", "use_cpu", "cpu_only", "force_cpu") else 0
