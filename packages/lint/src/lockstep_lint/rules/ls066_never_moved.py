"""LS066: a model that stays on the CPU, while its inputs are moved to the GPU."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.context import withs
from lockstep_lint.analysis.index import Scope, Site
from lockstep_lint.analysis.nodes import Words, constant, dotted, keyword, mentions, own_expressions, strings, walk
from lockstep_lint.analysis.origins import SAME
from lockstep_lint.analysis.view import View
from lockstep_lint.events.marks import LAYERS
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

MESSAGE = "'{name}' is never moved to the device that its inputs are moved to: its first forward fails there"
MOVES = ("to", "cuda", "xpu", "npu", "type", "to_empty", "share_memory")
# Methods that may move a model, or its inputs, by a function that they are handed.
HOOKS = ("_", "register_forward")
# What a class says where it puts its parameters, or its inputs, in some place by itself.
PLACES = ("device", "cuda", ".to(", ".cpu(", "getattr(", "return self\n")
# Calls that take a model and leave it where it is.
LEAVES = Words(r"^torch\.optim\.|^torch\.save$|^(builtins\.)?(print|len|isinstance|type|id|hasattr|str|repr)$")
MAX_NAMES = 12


# A name of a model, its scope, and the statement that binds it there.
Name = tuple[str, Scope, ast.stmt | None]


class Escaped(Exception):
    """A model gets to a place that is not in sight, or is moved."""


def check(view: View) -> Iterator[Found]:
    """Looks at each model that a class in sight makes, wherever its names get to."""
    if not view.effects.mentioned(view.module, ".to(", ".cuda(") or view.effects.mentioned(
        view.module, "set_default", "load_module", "prepare(", "Fabric", "deepspeed", "lightning", "device_map"
    ):
        return
    for site in [site for site in view.sites() if site.name[:1].isupper() and stays(view, site)]:
        try:
            runs = forwards(view, site)
        except Escaped:
            continue
        if any(on_gpu(view, value, scope) for call, scope in runs for value in inputs(call)):
            yield at(site, MESSAGE.format(name=site.name))


def stays(view: View, site: Site) -> bool:
    """Check whether a call makes a model of a class in sight that has parameters and says nothing of devices.

    Within a context, such as `with device:`, its parameters may be made elsewhere.
    """
    made = view.names.definition(site.call.func, site.scope)
    return made is not None and made.kind == "class" and plain(view, made) and not any(withs(site.stmt, site.module))


@kept
def plain(view: View, owner: Scope) -> bool:
    """Check whether a class is a model with layers, whose code and bases say nothing of devices."""
    if not view.kinds.is_module_class(owner) or owner.parent is not owner.module.top:
        return False
    family = [owner, *view.names.parents(owner)]
    bases = set(view.names.bases_of(owner))
    foreign = {base for base in bases if not any(base.endswith(each.name) for each in family)}
    if not foreign <= {"torch.nn.Module", "torch.nn.modules.Module"}:
        return False
    code = "\n".join(line for each in family for line in lines_of(each))
    made = [site for each in family for method in each.defs.values() for site in method.sites]
    return not any(word in code for word in PLACES) and any(
        LAYERS.search(site.name) and view.full(site).startswith("torch.nn.") for site in made
    )


def lines_of(owner: Scope) -> list[str]:
    """Return the lines of a class."""
    start, end = owner.node.lineno, owner.node.end_lineno  # type: ignore[attr-defined]
    return owner.module.lines[start - 1 : end]


def forwards(view: View, made: Site) -> list[tuple[ast.Call, Scope]]:
    """Return the calls of a model by all of its names; raises Escaped where its life is not in sight."""
    found: list[tuple[ast.Call, Scope]] = []
    queue = list(follow(view, made.call, made.stmt, made.scope, found))
    seen: set[tuple[str, Scope]] = set()
    while queue:
        name, scope, start = queue.pop()
        if (name, scope) in seen:
            continue
        seen.add((name, scope))
        if len(seen) > MAX_NAMES or is_global(view, name, scope) or rebinds(name, scope, start):
            raise Escaped
        for stmt, home in dict.fromkeys(scope.module.named.get(name, [])):
            if home is scope or (name not in home.params and name not in home.binds and within(home, scope)):
                for node in (part for part in nodes_of(stmt) if isinstance(part, ast.Name) and part.id == name):
                    queue += follow(view, node, stmt, home, found)
    return found


def rebinds(name: str, scope: Scope, start: ast.stmt | None) -> bool:
    """Check whether a name is given another object too than at its start."""
    binds = [bind for bind in scope.binds.get(name, []) if bind.stmt is not start]
    return any(bind.value is None or bind.how != "assign" or not mentions(bind.value, name) for bind in binds)


def is_global(view: View, name: str, scope: Scope) -> bool:
    """Check whether another file imports a name of a file's own lines, or a function may set it for all."""
    module = scope.module
    if any(name in each.globals for each in module.scopes):
        return True
    for user in view.project.users(module) if scope.kind == "module" else ():
        for item in user.imported if user is not module else ():
            if item.name in (name, "*", "") and view.project.find(user, item.module or item.name, item.level) is module:
                return True
    return False


def within(home: Scope, scope: Scope) -> bool:
    """Check whether a function stands in a scope."""
    while home.parent is not None and home is not scope:
        home = home.parent
    return home is scope


def nodes_of(stmt: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement's own expressions."""
    for part in own_expressions(stmt):
        yield from walk(part)


def follow(
    view: View, node: ast.expr, stmt: ast.stmt, scope: Scope, found: list[tuple[ast.Call, Scope]]
) -> Iterator[Name]:
    """Yield the further names that a mention of a model gives it; its forwards are added to `found`."""
    up = {child: parent for parent in (stmt, *nodes_of(stmt)) for child in ast.iter_child_nodes(parent)}
    parent = up.get(node)
    if isinstance(getattr(node, "ctx", None), ast.Store):
        return
    if isinstance(parent, ast.Attribute):
        if not stays_there(parent, up, stmt):
            raise Escaped
    elif isinstance(parent, ast.Call) and parent.func is node:
        found.append((parent, scope))
    elif isinstance(parent, ast.Call | ast.keyword):
        call = parent if isinstance(parent, ast.Call) else up[parent]
        yield from parameter(view, node, call, parent, scope)
    elif isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
        yield parent.targets[0].id, scope, stmt
    elif isinstance(parent, ast.Return):
        yield from results(view, scope, None)
    elif isinstance(parent, ast.Tuple) and isinstance(up[parent], ast.Return):
        yield from results(view, scope, parent.elts.index(node))
    elif not isinstance(parent, ast.Compare | ast.Delete | ast.FormattedValue | ast.If):
        raise Escaped


def stays_there(method: ast.Attribute, up: dict[ast.AST, ast.AST], stmt: ast.stmt) -> bool:
    """Check whether a method of a model leaves it where it is, and gives back nothing that it could be moved by."""
    call = up[method]
    if (
        method.attr in MOVES
        or method.attr.startswith(HOOKS)
        or not isinstance(call, ast.Call)
        or call.func is not method
    ):
        return False
    if method.attr in SAME and not isinstance(up[call], ast.Expr):
        return False
    if keyword(call, "assign") is not None:  # the weights are those that were loaded
        return False
    text = ast.unparse(stmt) if isinstance(stmt, ast.For) and stmt.iter is call else ""
    return "cuda" not in text and ".to(" not in text


def parameter(view: View, node: ast.expr, call: ast.AST, parent: ast.AST, scope: Scope) -> Iterator[Name]:
    """Yield the parameter that a call hands a model to, of a function in sight."""
    if not isinstance(call, ast.Call) or any(isinstance(value, ast.Starred) for value in call.args):
        raise Escaped
    full = view.names.qualify(call.func, scope) or (dotted(call.func) or "")
    target = view.calls.target(call, scope)
    if target is None or target.kind != "function":
        if not LEAVES.search(full):
            raise Escaped
        return
    params = target.params[1:] if target.params[:1] in (["self"], ["cls"]) else target.params
    place = call.args.index(node) if node in call.args else len(params)
    name = parent.arg if isinstance(parent, ast.keyword) else params[place] if place < len(params) else None
    if name is None or name not in target.params:
        raise Escaped
    yield name, target, None


def results(view: View, scope: Scope, place: int | None) -> Iterator[Name]:
    """Yield the names that the callers of a function give to what it returns, or to one part of it."""
    callers = view.calls.callers(scope)
    if not callers:
        raise Escaped
    for site in callers:
        target = site.stmt.targets[0] if isinstance(site.stmt, ast.Assign) and site.stmt.value is site.call else None
        if place is not None:
            target = target.elts[place] if isinstance(target, ast.Tuple) and place < len(target.elts) else None
        if not isinstance(target, ast.Name):
            raise Escaped
        yield target.id, site.scope, site.stmt


def inputs(call: ast.Call) -> list[ast.expr]:
    """Return what a forward is given."""
    return [*call.args, *(item.value for item in call.keywords)]


def on_gpu(view: View, value: ast.expr, scope: Scope) -> bool:
    """Check whether an input was moved to a GPU, or to a device that may be one."""
    if isinstance(value, ast.Name):
        binds = view.origins.binds(value.id, scope, value.lineno)
        moved = [bind for bind, home in binds if home is scope and bind.how == "assign"]
        values = [part for bind in moved for part in parts_of(bind.value, bind.path)]
        return bool(values) and len(moved) == len(binds) and all(is_move(view, part, scope) for part in values)
    return is_move(view, value, scope)


def parts_of(value: ast.expr | None, path: tuple[int, ...]) -> list[ast.expr]:
    """Return what a binding gives its name, where that is written out."""
    if len(path) == 1 and isinstance(value, ast.Tuple) and path[0] < len(value.elts):
        return [value.elts[path[0]]]
    return [value] if value is not None and not path else []


def is_move(view: View, value: ast.expr, scope: Scope) -> bool:
    """Check whether an expression moves a tensor to what may be a GPU."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if value.func.attr == "cuda":
        return not view.names.qualify(value.func, scope)
    if value.func.attr != "to" or not value.args:
        return False
    names = [
        word
        for origin in view.origins.of(value.args[0], scope)
        for word in device_names(view, origin.node, origin.scope)
    ]
    return any(word.startswith("cuda") for word in names)


def device_names(view: View, node: ast.expr, scope: Scope) -> list[str]:
    """Return the devices that an expression may give, by their names."""
    if isinstance(node, ast.Call) and view.names.qualify(node.func, scope) == "torch.device":
        return [
            word for value in node.args[:1] for origin in view.origins.of(value, scope) for word in strings(origin.node)
        ]
    return [name] if isinstance(name := constant(node), str) else []


RULE = Rule(
    code="LS066",
    name="model never moved",
    what="A model's inputs are moved to the GPU, and the model, which is in sight from its making on, never is.",
    why="Its weights stay on the CPU: the first forward ends the run with a RuntimeError about two devices.",
    bad="""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x)

def train(loader):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    good="""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x)

def train(loader):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="none",
    remedy="Move the model too, before its optimizer is made: net = Net().to(device)",
    note=(
        "Silent where the model is handed to code that is not in sight, is kept in an object or a list, or where its "
        "class says anything of devices."
    ),
)
