"""What names a device: a GPU with a number, "cuda" without one, the rank among all processes."""

import ast
import re

from lockstep_lint.analysis.context import parted
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import constant, dotted, idents, keyword, last, strings, walk
from lockstep_lint.analysis.origins import Origin
from lockstep_lint.analysis.view import View

__all__ = [
    "after_cuda",
    "chosen_by_test",
    "index_of",
    "is_default",
    "is_global",
    "numbered",
    "placed_before",
    "plain",
    "same_for_all",
]

# The rank among all processes, as launchers call it.
RANKS = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
# What the Trainers of transformers and trl are told, which sets the device of the process when it is made.
ARGUMENTS = re.compile(r"^transformers\.(\w+\.)*\w*TrainingArguments$|^trl\.(\w+\.)*(?!Model)\w+Config$")
# What makes them of a command line or a file.
PARSES = ("parse_args_into_dataclasses", "parse_json_file", "parse_yaml_file", "parse_dict")


def placed_before(view: View, site: Site) -> bool:
    """Whether a Trainer's arguments, which set the device of each process, are made in the programs, and not only after
    a call in its own function.
    """
    made = [s for member in view.project.family(view.module) for s in arguments_made(view, member)]
    return any(s.scope is not site.scope or s.line < site.line for s in made)


@kept
def arguments_made(view: View, module: Module) -> list[Site]:
    """The calls of a file that make a Trainer's arguments, also by a class of the project that derives from theirs."""
    if "TrainingArguments" not in module.text and "trl" not in module.text:
        return []
    parsed = [s for s in module.sites(*PARSES) if "TrainingArguments" in module.words]
    named = [s for name, sites in module.by_name.items() if name[:1].isupper() for s in sites]
    return [*parsed, *(s for s in named if any(map(ARGUMENTS.search, names_behind(view, s))))]


def names_behind(view: View, site: Site) -> list[str]:
    """The full name of what a call calls, or of what the project's class that it makes one of derives from."""
    owner = view.names.definition(site.call.func, site.scope)
    return list(view.names.bases_of(owner)) if owner is not None and owner.kind == "class" else [view.full(site)]


def numbered(device: object) -> bool:
    """Whether a device is a GPU with a number."""
    return isinstance(device, str) and device.startswith("cuda:") and device[5:].isdigit()


def plain(view: View, node: ast.expr, scope: Scope) -> bool:
    """Whether a device certainly is "cuda" without a number, or the CPU where there is no GPU."""
    names = names_of(view, node, scope)
    return "cuda" in names and names <= {"cuda", "cpu"}


def same_for_all(view: View, node: ast.expr, scope: Scope) -> str:
    """The GPU that a device certainly is by a string that names its number ("cuda:0"), "" where it is none, or one of
    several, between which the rank may choose.

    An option that is set somewhere (`args.device`) may have other values that are not in sight.
    """
    if isinstance(node, ast.Attribute) and last(node.value) != "self":
        return ""
    origins = view.origins.of(node, scope)
    arms = [arm for origin in origins for arm in arms_of(origin.node)]
    found = [arm for arm in map(constant, arms) if isinstance(arm, str) and numbered(arm)]
    alike = len(set(found)) == 1 and all(numbered(arm) or arm == "cpu" for arm in map(constant, arms))
    return found[0] if alike else ""


def names_of(view: View, node: ast.expr, scope: Scope) -> set[object]:
    """What a device may be called; None stands for what is not known."""
    names: set[object] = set()
    for origin in view.origins.of(node, scope):
        value: ast.expr | None = origin.node
        if origin.call is not None and view.names.qualify(origin.call.func, origin.scope) == "torch.device":
            value = origin.call.args[0] if len(origin.call.args) == 1 else None
        arms = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        names |= {constant(arm) for arm in arms}
    return names


def is_default(view: View, site: Site) -> bool:
    """Whether a device is only a name's first value: the same function gives it another one, which is not written out
    (`device = cuda:0; if ddp: device = mine`), or nothing ever asks for it.
    """
    for bind in site.scope.bound(site.stmt):
        binds = [b for b in site.scope.binds[bind.key] if b.stmt.lineno > site.line and b.how == "assign"]
        later = (b.value for b in binds if not parted(site, b.stmt))
        if any(value is not None and None in names_of(view, value, site.scope) for value in later):
            return True
        if not bind.path and bind.how == "assign" and not asked_for(view, bind.key):
            return True
    return False


def asked_for(view: View, key: str) -> bool:
    """Whether anything in the programs reads a name, or an attribute of such a name."""
    name = key.rpartition(".")[2]
    for member in view.project.family(view.module):
        if name != "device" and member.words[name] > 1:
            return True
        for node in walk(member.source.tree) if member.source.tree is not None and name in member.words else ():
            reads = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
            if reads and last(node) == name and dotted(node) != "torch.device":
                return True
    return False


def arms_of(node: ast.expr) -> list[ast.expr]:
    """The two values that a choice by whether there is a GPU may give, or the value itself."""
    if isinstance(node, ast.IfExp) and any(word in ast.unparse(node.test) for word in ("is_available", "cuda")):
        return [node.body, node.orelse]
    return [node]


def after_cuda(node: ast.expr | None) -> ast.expr | None:
    """What is put behind "cuda:", in any of the ways to write a string."""
    if isinstance(node, ast.JoinedStr) and len(node.values) == 2 and isinstance(node.values[1], ast.FormattedValue):
        return node.values[1].value if constant(node.values[0]) == "cuda:" else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and constant(node.left) in ("cuda:%d", "cuda:%s"):
        return node.right
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and constant(node.left) == "cuda:":
        return node.right.args[0] if isinstance(node.right, ast.Call) and node.right.args else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        wanted = constant(node.func.value) in ("cuda:{}", "cuda:{:d}", "cuda:{0}")
        return node.args[0] if wanted and len(node.args) == 1 else None
    return None


def is_global(view: View, node: ast.expr, scope: Scope, depth: int = 0) -> bool:
    """Whether a number certainly is the rank among all processes."""
    found = [origin for origin in view.origins.of(node, scope) if not of_one_process(view, origin)]
    return bool(found) and all(global_rank(view, origin, depth) for origin in found)


def of_one_process(view: View, origin: Origin) -> bool:
    """Whether a value is what a call from a single process passes: 0, or a device."""
    call = origin.call
    made = call is not None and view.names.qualify(call.func, origin.scope) == "torch.device"
    return made or constant(origin.node) in (0, "cuda", "cuda:0", "cpu")


def global_rank(view: View, origin: Origin, depth: int) -> bool:
    """Whether a value is the rank among all processes, or that plus or minus a number."""
    if isinstance(origin.node, ast.BinOp) and isinstance(origin.node.op, ast.Add | ast.Sub):
        return isinstance(constant(origin.node.right), int) and is_global(view, origin.node.left, origin.scope, depth)
    number = after_cuda(origin.node)
    if number is not None:
        return is_global(view, number, origin.scope, depth)
    if isinstance(origin.node, ast.Attribute):  # of an object that is handed on (`config.rank`), wherever it is set
        binds = view.ranks.tests.numbers.set_elsewhere(dotted(origin.node) or "", origin.scope) if not depth else []
        values = [(bind.value, home) for bind, home in binds if bind.how == "assign" and not bind.path]
        rest = [(v, home) for v, home in values if constant(v) != 0]  # where there is one process
        same = (value is not None and is_global(view, value, home, depth + 1) for value, home in rest)
        return len(values) == len(binds) and bool(rest) and all(same)
    if isinstance(origin.node, ast.Subscript):
        return "environ" in idents(origin.node) and bool(RANKS & set(strings(origin.node)))
    if origin.call is None:
        return False
    asked = view.names.qualify(origin.call.func, origin.scope) or dotted(origin.call.func)
    if asked in ("torch.distributed.get_rank", "dist.get_rank"):
        return not origin.call.args and not origin.call.keywords
    reads = last(origin.call) in ("int", "getenv", "get") and {"environ", "getenv"} & set(idents(origin.node))
    return bool(reads) and bool(RANKS & set(strings(origin.node)))


def chosen_by_test(stmt: ast.stmt, node: ast.expr | None) -> bool:
    """Whether the device is one arm of a choice that may depend on the rank."""
    for item in ast.walk(stmt):
        if isinstance(item, ast.IfExp) and node in (item.body, item.orelse):
            return not any(word in ast.unparse(item.test) for word in ("is_available", "cuda"))
    return False


def index_of(view: View, site: Site) -> ast.expr | None:
    """What a call takes for the number of its device."""
    first = site.call.args[0] if site.call.args else None
    if isinstance(first, ast.IfExp) and constant(first.orelse) == "cpu":
        first = first.body
    if site.name in ("DistributedDataParallel", "DDP"):
        ids = keyword(site.call, "device_ids")
        return ids.elts[0] if isinstance(ids, ast.List) and len(ids.elts) == 1 else None
    if site.name == "device" and view.full(site) == "torch.device" and len(site.call.args) == 2:
        return site.call.args[1]
    number = after_cuda(first)
    if number is not None:
        return number
    if site.name in ("set_device", "set_device_index"):
        return first if view.full(site).startswith("torch.cuda") else None
    moves = site.name in ("to", "cuda") and site.receiver is not None
    return first if moves and isinstance(first, ast.Name | ast.Call | ast.Attribute) else None
