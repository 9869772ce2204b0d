"""LS059: the result of a function that gives none, or another number of values."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.callees import Callees, callees, is_stub, may_be_of_object, shown_name
from lockstep_lint.analysis.context import guards, inside
from lockstep_lint.analysis.index import DEFINITIONS, Module, Scope, Site
from lockstep_lint.analysis.nodes import SEQUENCES, constant, idents, is_none, last
from lockstep_lint.analysis.reach import ends_run, is_demonstration
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# How many values each `return` of a function gives: a tuple's length, or NOTHING.
NOTHING = -1
Shape = frozenset[int]
UNKNOWN: Shape = frozenset()
ENDS = ("exit", "_exit", "quit", "abort")
ASKING = (ast.BoolOp, ast.IfExp, ast.NamedExpr)
INNER = (ast.stmt, ast.Lambda, ast.ExceptHandler)
# Operators that take neither None nor a tuple; `%` is left out, for texts, and `|`, for types.
TUPLE_HAS = (ast.Add, ast.Mult, ast.Mod, ast.BitOr, ast.MatMult)
NONE_HAS = (ast.Mod, ast.BitOr)
# A loop over the items of something that is named, or over a method's result, with several targets or `named_...()`.
PAIRS = re.compile(r"\bfor\s+\(?\s*\w+\s*(,|in\b.*named_)", re.ASCII)
KEYS = "the keys of {what} are unpacked into {count} names, which are texts: loop over .items(); the run ends here"
TENSORS = "parameters() gives tensors alone, no names: loop over named_parameters(); the run ends here"
NAMED = "{what}() gives pairs of a name and a tensor, which have no '{name}': unpack them; the run ends here"
GIVES_PAIRS = ("named_parameters", "named_buffers", "named_modules", "named_children")


def check(view: View) -> Iterator[Found]:
    """Look for uses of a result that no function which may have given it can bear."""
    known = callees(view)
    yield from forgotten(view, known)
    yield from misread(view)
    for site in view.module.sites():
        given = UNKNOWN if isinstance(site.stmt, ast.Expr) and site.stmt.value is site.call else may_give(view, site)
        if not given or next(wrong_uses(view, site, given), None) is None:
            continue
        found = known.of(site.call, site.scope, site.stmt)
        shapes = [shape(callee.function) for callee in found]
        if not shapes or not all(shapes):
            continue
        used = wrong_uses(view, site, frozenset().union(*shapes))
        found_at = next((each for each in used if ends_run(view, each[0], site.scope)), None)
        if found_at is not None:
            stmt, node, wrong = found_at
            level = Severity.HINT if is_demonstration(view, stmt, site.scope) else None
            yield Found(node, f"{shown_name(found[0].function)}() {wrong}: the run ends here", level)


def forgotten(view: View, known: Callees) -> Iterator[Found]:
    """Find the models and losses that a file makes whose forward computes a last value and does not return it."""
    if not any(loses_values(member) for member in view.project.family(view.module)):
        return
    for site in view.module.sites():
        owner = view.names.definition(site.call.func, site.scope)
        if owner is None or owner.kind != "class" or not loses_value(owner.defs.get("forward")):
            continue
        made = known.definitions(site.call.func, site.scope)
        if made == (owner,) and view.kinds.is_module_class(owner) and ends_run(view, site.stmt, site.scope):
            yield at(site, f"{owner.name}.forward() computes a value and returns nothing: its caller gets None")


@kept
def loses_values(module: Module) -> bool:
    """Check whether a file has a forward that loses its last value."""
    return any(loses_value(scope) for scope in module.scopes if scope.name == "forward")


def loses_value(function: Scope | None) -> bool:
    """Check whether a function's last line gives a value to a name that nothing reads, and no line returns one."""
    if function is None or shape(function) != {NOTHING}:
        return False
    end = function.node.body[-1]  # type: ignore[attr-defined]
    name = end.targets[0] if isinstance(end, ast.Assign) else None
    if not isinstance(name, ast.Name) or name.id in function.globals:
        return False
    return all(stmt is end for stmt, home in function.module.named.get(name.id, ()) if home is function)


def misread(view: View) -> Iterator[Found]:
    """Find loops that take keys, or tensors, for pairs, or pairs for tensors."""
    text = view.module.text
    if "state_dict" not in text and "parameters()" not in text and "named_" not in text:
        return
    for scope in view.scopes:
        for stmt in scope.stmts:
            lines = view.module.lines[stmt.lineno - 1 : stmt.end_lineno]
            if isinstance(stmt, DEFINITIONS) or not any(map(PAIRS.search, lines[:1] if has_body(stmt) else lines)):
                continue
            for node in own(stmt):
                if isinstance(node, ast.For | ast.comprehension):
                    wrong = unpacked(view, scope, node) or paired(scope, node)
                    if wrong and ends_run(view, stmt, scope):
                        yield Found(node.iter, wrong)


def has_body(stmt: ast.stmt) -> bool:
    """Check whether other statements stand in a statement."""
    return isinstance(getattr(stmt, "body", None), list)


def unpacked(view: View, scope: Scope, node: ast.For | ast.comprehension) -> str:
    """Explain that a loop unpacks texts, or tensors; "" where it may unpack what it is given."""
    target = node.target
    if not isinstance(target, SEQUENCES) or any(isinstance(item, ast.Starred) for item in target.elts):
        return ""
    over = [(origin.node, origin.scope) for origin in view.origins.of(node.iter, scope)]
    if over and all(is_method(view, *each, "state_dict") or is_saved_state(view, *each) for each in over):
        return KEYS.format(what="a state_dict", count=len(target.elts))
    if over and all(is_method(view, *each, "parameters") for each in over):
        return TENSORS
    return ""


def is_method(view: View, node: ast.expr, scope: Scope, name: str) -> bool:
    """Check whether an expression calls a method of torch's own models, or optimizers, without arguments."""
    if not isinstance(node, ast.Call) or last(node) != name or node.args or node.keywords:
        return False
    if not isinstance(node.func, ast.Attribute) or view.calls.target(node, scope) is not None:
        return False
    return name not in view.calls.method_names(scope.module)


def is_saved_state(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether an expression is the state of a model in a checkpoint, by its key (`torch.load(path)["state_dict"]`)."""
    if not isinstance(node, ast.Subscript) or "state_dict" not in str(constant(node.slice)):
        return False
    made = list(view.origins.calls_of(node.value, scope))
    return bool(made) and all(full == "torch.load" for _, _, full in made)


def paired(scope: Scope, node: ast.For | ast.comprehension) -> str:
    """Explain that a loop takes the pairs of `named_parameters()` for what is in them."""
    what = last(node.iter)
    call, name = node.iter, node.target
    if what not in GIVES_PAIRS or not isinstance(call, ast.Call) or not isinstance(name, ast.Name):
        return ""
    if not isinstance(node, ast.For) or any(bind.stmt is not node for bind in scope.binds.get(name.id, ())):
        return ""
    for stmt in (stmt for stmt in scope.stmts if inside(stmt, node, scope.module)):
        for part in own(stmt):
            of_pair = isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == name.id
            if isinstance(part, ast.Attribute) and of_pair and not hasattr((), part.attr):
                return NAMED.format(what=what, name=part.attr)
    return ""


def may_give(view: View, site: Site) -> Shape:
    """Return what a call gives by the plainest answer: NOTHING, the most wrong one, for an object's."""
    target = view.calls.target(site.call, site.scope)
    if target is not None:
        return shape(target)
    if not may_be_of_object(view, site) or not any(map(runs_known, view.project.family(view.module))):
        return UNKNOWN
    return frozenset({NOTHING})


@kept
def runs_known(module: Module) -> bool:
    """Check whether a file has a model or an object whose call gives a known number of values."""
    return any(bool(shape(scope)) for scope in module.scopes if scope.name in ("forward", "__call__"))


@kept
def shape(function: Scope) -> Shape:
    """Return how many values the returns of a function give; UNKNOWN where one of them gives anything else."""
    if not isinstance(function.node, ast.FunctionDef) or is_stub(function) or function.name in ("__init__", "__new__"):
        return UNKNOWN
    if "yield" in function.module.words and any(map(yields, function.stmts)):
        return UNKNOWN
    given = {size(stmt.value) for stmt in function.stmts if isinstance(stmt, ast.Return)}
    if 0 in given or (not given - {NOTHING} and never_ends(function.node.body)):
        return UNKNOWN
    return frozenset(given or {NOTHING})


def size(value: ast.expr | None) -> int:
    """Return the number of values of a `return`, NOTHING for none, and 0 where it is not known."""
    if value is None or is_none(value):
        return NOTHING
    known = isinstance(value, ast.Tuple) and not any(isinstance(item, ast.Starred) for item in value.elts)
    return len(value.elts) if known else 0  # type: ignore[attr-defined]


def yields(stmt: ast.stmt) -> bool:
    """Check whether a statement makes its function a generator."""
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own(stmt))


def never_ends(body: list[ast.stmt]) -> bool:
    """Check whether a function never comes back: it raises, or ends the program."""
    ends = (isinstance(stmt, ast.Expr) and last(stmt.value) in ENDS for stmt in body)
    return any(ends) or any(isinstance(stmt, ast.Raise) for stmt in body)


def own(stmt: ast.stmt) -> Iterator[ast.AST]:
    """Walk the expressions of a statement, without the statements and the lambdas in it."""
    stack: list[ast.AST] = [] if isinstance(stmt, DEFINITIONS) else [stmt]
    while stack:
        node = stack.pop()
        yield node
        stack += [each for each in ast.iter_child_nodes(node) if not isinstance(each, INNER)]


def wrong_uses(view: View, site: Site, given: Shape) -> Iterator[tuple[ast.stmt, ast.AST, str]]:
    """Yield what is done to a call's result that no value of a shape bears: in its statement, and by its only name."""
    stmt, scope = site.stmt, site.scope
    yield from ((stmt, node, wrong) for node, wrong in faults(stmt, site.call, given))
    name = stmt.targets[0] if isinstance(stmt, ast.Assign) and stmt.value is site.call else None
    if not isinstance(name, ast.Name) or name.id in scope.globals:
        return
    places = dict.fromkeys(view.module.places[scope][name.id])
    for other in sorted(places, key=lambda each: each.lineno):
        if other.lineno <= stmt.lineno or any(name.id in idents(guard.test) for guard in guards(other, view.module)):
            continue
        for node, wrong in faults(other, name, given):
            binds = view.origins.binds(name.id, scope, node.lineno)  # type: ignore[attr-defined]
            if [bind.value for bind, _ in binds] == [site.call]:
                yield other, node, wrong


def faults(stmt: ast.stmt, value: ast.expr, given: Shape) -> Iterator[tuple[ast.AST, str]]:
    """Yield the places of a statement where a value is used as none of its shape can be."""
    nodes = list(own(stmt))
    if any(isinstance(node, ASKING) for node in nodes):
        return  # a test may ask whether there is a value
    name = value.id if isinstance(value, ast.Name) else ""
    for node in nodes:
        if isinstance(node, ast.Name | ast.Constant):
            continue  # most nodes are, and use nothing
        for used, wrong in uses(node, given):
            if used is value or (name and isinstance(used, ast.Name) and used.id == name):
                yield node if isinstance(node, ast.expr) else used, wrong


def uses(node: ast.AST, given: Shape) -> Iterator[tuple[ast.expr, str]]:
    """Yield the operands of a node that must not be of a shape, each with what is wrong."""
    nothing = given == {NOTHING}
    what = "returns nothing" if nothing else f"returns a tuple of {' or '.join(map(str, sorted(given - {NOTHING})))}"
    if isinstance(node, ast.Attribute):
        if not node.attr.startswith("__") and (nothing or node.attr not in ("count", "index")):
            yield node.value, f"{what}, which has no '{node.attr}'"
    elif isinstance(node, ast.Subscript):
        if nothing or lacks(node.slice, given):
            yield node.value, f"{what}, which has no [{text_of(node.slice)}]"
    elif isinstance(node, ast.Call):
        yield node.func, f"{what}, which is called"
        starred = (arg.value for arg in node.args if nothing and isinstance(arg, ast.Starred))
        yield from ((value, f"{what}, which is unpacked") for value in starred)
        if last(node.func) in ("backward", "manual_backward") and node.args and nothing:
            yield node.args[0], f"{what}, which has no gradient"
    elif isinstance(node, ast.Assign):
        yield from ((node.value, wrong) for target in node.targets if (wrong := parted(target, given, what)))
    elif isinstance(node, ast.For | ast.comprehension):
        if nothing:
            yield node.iter, f"{what}, which a loop runs over"
    else:
        yield from ((side, f"{what}, which is no number") for side in operands(node, nothing))


@kept
def text_of(index: ast.expr) -> str:
    """Return the text between the brackets."""
    return ast.unparse(index).strip("()")


def operands(node: ast.AST, nothing: bool) -> tuple[ast.expr, ...]:
    """Return the operands of a node that must not be None, or a tuple."""
    if not isinstance(node, ast.BinOp | ast.AugAssign) or isinstance(node.op, NONE_HAS if nothing else TUPLE_HAS):
        return ()
    if isinstance(node, ast.AugAssign):
        return (node.value,) if nothing else ()
    if nothing:
        return node.left, node.right
    sides = ((node.left, node.right), (node.right, node.left))  # an array takes a tuple, a number does not
    return tuple(side for side, other in sides if isinstance(constant(other), int | float))


def lacks(index: ast.expr, given: Shape) -> bool:
    """Check whether no tuple of a shape has an index: a text, several indices, or a number that is too large."""
    key, lengths = constant(index), given - {NOTHING}
    if type(key) is int:
        return all(not -length <= key < length for length in lengths)
    return isinstance(key, str) or isinstance(index, ast.Tuple)


def parted(target: ast.expr, given: Shape, what: str) -> str:
    """Say what is wrong where a value is unpacked into some names."""
    if not isinstance(target, SEQUENCES):
        return ""
    names = [item for item in target.elts if not isinstance(item, ast.Starred)]
    star = len(names) < len(target.elts)
    if any(length == len(names) or (star and length > len(names)) for length in given - {NOTHING}):
        return ""
    return f"{what}, and is unpacked into {len(names)}{' or more' if star else ''}"


RULE = Rule(
    code="LS059",
    name="nothing comes back",
    what=(
        "A function that returns nothing, or a tuple of another length, is used as if it returned a value; or a loop "
        "takes the keys of a `state_dict`, or the tensors of `parameters()`, for pairs."
    ),
    why=(
        "The run ends with a TypeError or a ValueError when it comes there, often at the first evaluation, before "
        "anything is saved."
    ),
    bad="""
import torch
from parts import prepare

def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    print("accuracy", right / len(loader.dataset))

def train(model, loader, val_loader, optimizer, criterion, epochs):
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        stats = evaluate(model, val_loader)
        print(epoch, stats["accuracy"])

if __name__ == "__main__":
    train(*prepare())
""",
    good="""
import torch
from parts import prepare

def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return {"accuracy": right / len(loader.dataset)}

def train(model, loader, val_loader, optimizer, criterion, epochs):
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        stats = evaluate(model, val_loader)
        print(epoch, stats["accuracy"])

if __name__ == "__main__":
    train(*prepare())
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Return the value from the function",
)
