"""LS068: an option whose value from the command line is of another type than the program uses."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.index import Bind, Module, Scope, Site
from lockstep_lint.analysis.nodes import constant, has_star, idents, keyword, last, own_expressions, walk
from lockstep_lint.analysis.options import PARSER, option_of
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

# Parsers of other packages that read `bool` as a flag.
OTHER_PARSERS = ("jsonargparse", "LightningCLI", "LightningArgumentParser", "from tap ", "import tap")
PARSERS = {PARSER, "configargparse.ArgumentParser", "configargparse.ArgParser", "transformers.HfArgumentParser"}
GROUPS = {"add_argument_group", "add_mutually_exclusive_group", "add_parser"}
ARITHMETIC = (ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow)
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
# What raises where it is given a text; torch.manual_seed converts it.
OF_NUMBERS = ("range", "seed", "zeros", "ones", "randn", "arange", "linspace")
OF_LOADERS = {"batch_size", "num_workers", "prefetch_factor"}


def check(view: View) -> Iterator[Found]:
    """Looks for options whose type makes every text True, cannot read the default, or leaves a number a text."""
    if "add_argument" not in view.module.text:
        return
    for site in view.sites("add_argument"):
        call = site.call
        name = destination(call)
        if name is None or has_star(call) or not is_used(view, name):
            continue
        kind, default = keyword(call, "type"), constant(keyword(call, "default"))
        if kind is not None and is_bool(view, kind, site.scope):
            if keyword(call, "nargs") is None and reads_texts(view, site) and not replaced(view, name):
                yield at(site, f"type=bool makes every text True: `{shown(call)} False` turns '{name}' on")
        elif isinstance(kind, ast.Name) and not fits(kind.id, default) and falls_back(view, site):
            yield at(site, f"the default {default!r} of '{name}' is no {kind.id}: the run ends where options are read")
        elif is_text(kind) and is_number(default) and not others(call) and needs_number(view, name, site):
            yield at(site, f"'{name}' is a text where it is given (`{shown(call)} {default}`), and is used as a number")


def destination(call: ast.Call) -> str | None:
    """Return the attribute of the option that a call adds, if it is written out."""
    given = keyword(call, "dest")
    name = constant(given) if given is not None else option_of([constant(arg) for arg in call.args])
    return name if isinstance(name, str) and name.isidentifier() else None


def shown(call: ast.Call) -> str:
    """Return the text by which an option is given."""
    texts = [text for text in map(constant, call.args) if isinstance(text, str)]
    return next((text for text in texts if text.startswith("--")), texts[0] if texts else "")


def replaced(view: View, name: str) -> bool:
    """Check whether a file of the programs gives the option another value, whatever was given."""
    binds = (bind for member in view.project.family(view.module) for bind in bound(member, name))
    return any(bind.value is not None and name not in idents(bind.value) for bind in binds)


def is_used(view: View, name: str) -> bool:
    """Check whether any file of the programs reads an option, by its attribute, its key or `vars`."""
    read = re.compile(rf"""\.{name}\b|["']{name}["']\s*[\],]""")
    members = [member for member in view.project.family(view.module) if name in member.text]
    return any(read.search(member.text) or (member.words[name] and "vars(" in member.text) for member in members)


def is_bool(view: View, kind: ast.expr, scope: Scope) -> bool:
    """Check whether a type is Python's own `bool`."""
    if "bool" in view.module.own_names or "bool" in view.module.imports or not isinstance(kind, ast.Name):
        return False
    return all(constant_name(origin.node) == "bool" for origin in view.origins.of(kind, scope))


def constant_name(node: ast.AST) -> str:
    """Return the name that an expression is."""
    return node.id if isinstance(node, ast.Name) else ""


def others(call: ast.Call) -> bool:
    """Check whether an option has more that says what its value is."""
    return any(keyword(call, name) is not None for name in ("action", "choices", "nargs", "const"))


def is_text(kind: ast.expr | None) -> bool:
    """Check whether an option's value stays the text that was given."""
    return kind is None or constant_name(kind) == "str"


def is_number(value: object) -> bool:
    """Check whether a default is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def fits(kind: str, default: object) -> bool:
    """Check whether a type can read a default, which argparse converts where it is a text."""
    if not isinstance(default, str) or kind not in ("int", "float"):
        return True
    try:
        _ = int(default) if kind == "int" else float(default)
    except ValueError:
        return False
    return True


def falls_back(view: View, site: Site) -> bool:
    """Check whether a program reads the default of an option: it may be left out, and nothing sets another."""
    call = site.call
    if constant(keyword(call, "required")) or keyword(call, "required") is not None or keyword(call, "action"):
        return False
    names = [constant(arg) for arg in call.args]
    flag = all(isinstance(name, str) and name.startswith("-") for name in names)
    family = view.project.family(view.module)
    later = any(any(member.sites("set_defaults", "parse_known_args")) for member in family)
    own = {view.full(site), *(view.names.qualify(each.func, scope) for each, scope in makers(view, site))}
    shadowed = {"int", "float"} & (view.module.own_names | {*view.module.imports})
    return flag and not later and not shadowed and bool(own & PARSERS) and parses(view, site)


def parses(view: View, site: Site) -> bool:
    """Check whether a file of the programs reads options."""
    return any(any(member.sites("parse_args")) for member in view.project.family(site.module))


def makers(view: View, site: Site) -> list[tuple[ast.Call, Scope]]:
    """Return the calls that make the parser, or the parser of the group, that an option is added to."""
    found: list[tuple[ast.Call, Scope]] = []
    queue = [(site.receiver, site.scope)]
    for node, scope in queue:
        for origin in view.origins.of(node, scope) if node is not None and len(queue) < 20 else ():
            call = origin.call
            if call is not None and last(call) in GROUPS and isinstance(call.func, ast.Attribute):
                queue.append((call.func.value, origin.scope))
            elif call is not None:
                found.append((call, origin.scope))
    return found


def reads_texts(view: View, site: Site) -> bool:
    """Check whether a parser is argparse's, whose options hand each text to their type."""
    if keyword(site.call, "action") is not None:
        return False
    family = view.project.family(site.module)
    if any(word in member.text for member in family for word in OTHER_PARSERS):
        return False
    if any("parse_args([]" in member.text or "parse_args(args=[]" in member.text for member in family):
        return False
    registers = (each.call for member in family for each in member.sites("register"))
    if any(constant(call.args[0]) == "type" for call in registers if call.args):
        return False
    made = makers(view, site)
    if made:
        return all(view.names.qualify(call.func, scope) in PARSERS for call, scope in made)
    return any("argparse" in member.imports or "ArgumentParser" in member.imports for member in family)


def needs_number(view: View, name: str, site: Site) -> bool:
    """Check whether a program does with an option what no text can do, and no file of the programs converts it."""
    family = view.project.family(view.module)
    adds = [each for member in family for each in member.sites("add_argument") if destination(each.call) == name]
    if len(adds) != 1 or view.options.known(view.module).open or any(bound(member, name) for member in family):
        return False
    return any(
        is_option(view, node, scope, name, site)
        for member in family
        if member.words[name]
        for node, scope in numbers(view, member)
    )


def bound(member: Module, name: str) -> list[Bind]:
    """Return what a file gives the attribute of an option (`args.lr = float(args.lr)`)."""
    found = ((key, each) for scope in member.scopes for key, binds in scope.binds.items() for each in binds)
    return [bind for key, bind in found if key.endswith(f".{name}") and not key.startswith("self.")]


def is_option(view: View, node: ast.expr, scope: Scope, name: str, site: Site) -> bool:
    """Check whether a value is the option alone, as the parser of this file gave it."""
    for origin in view.origins.of(node, scope):
        value = origin.node
        if not isinstance(value, ast.Attribute) or value.attr != name:
            return False
        parsed = view.options.parsed(value.value, origin.scope)
        if not parsed or any(each.call.args for each in parsed):
            return False
    return True


@kept
def numbers(view: View, module: Module) -> list[tuple[ast.expr, Scope]]:
    """Return the expressions of a file that are used as numbers."""
    found: list[tuple[ast.expr, Scope]] = []
    for scope in module.scopes:
        for stmt in dict.fromkeys(stmt for _, stmt in scope.reads):
            for part in own_expressions(stmt):
                found += [(each, scope) for node in walk(part) for each in operands(node)]
    for site in module.sites():
        found += [(each, site.scope) for each in numeric_arguments(view, site)]
    return [(node, scope) for node, scope in found if isinstance(node, ast.Attribute | ast.Name)]


def operands(node: ast.AST) -> list[ast.expr]:
    """Return the operands of an operator that a text does not have."""
    if isinstance(node, ast.BinOp):
        sides = [node.left, node.right]
        if isinstance(node.op, ast.Add):
            return sides if any(is_number(constant(side)) for side in sides) else []
        texts = any(isinstance(side, ast.JoinedStr) or isinstance(constant(side), str) for side in sides)
        return sides if isinstance(node.op, ARITHMETIC) and not texts else []
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return [node.operand]
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        found = sides if all(isinstance(each, ORDER) for each in node.ops) else []
        rests = [side for side in sides if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mod)]
        return [*found, *(rest.right for rest in rests if any(is_number(constant(side)) for side in sides))]
    return []


def numeric_arguments(view: View, site: Site) -> list[ast.expr]:
    """Return the arguments of a call that have to be numbers."""
    call, name = site.call, site.name
    given = [*call.args, *(item.value for item in call.keywords)]
    if not given or not (name[:1].isupper() or name in OF_NUMBERS):
        return []
    full = view.full(site)
    if name == "range" and isinstance(call.func, ast.Name) and not full:
        return call.args
    if full == "torch.utils.data.DataLoader":
        return [*call.args[1:2], *(item.value for item in call.keywords if item.arg in OF_LOADERS)]
    optimizer = full.startswith("torch.optim.") and name[:1].isupper() and full.count(".") == 2
    if optimizer or full == "numpy.random.seed" or (full == f"torch.{name}" and name in OF_NUMBERS):
        return given
    return given if full in (f"torch.nn.{name}" for name in ("Dropout", "Linear", "LayerNorm", "Embedding")) else []


RULE = Rule(
    code="LS068",
    name="option of another type",
    what="An option's value from the command line is not of the type that the program uses.",
    why=(
        "`type=bool` makes every text True, `False` too; without a `type` a number stays a text, and the run ends with "
        "a TypeError, or goes on with a wrong value, as soon as somebody gives the option."
    ),
    bad="""
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--compile", type=bool, default=True)
parser.add_argument("--lr", default=1e-3)
args = parser.parse_args()
model = torch.nn.Linear(2, 2)
if args.compile:
    model = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
""",
    good="""
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()
model = torch.nn.Linear(2, 2)
if args.compile:
    model = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Give the option its type (`type=float`); for a switch write `action=argparse.BooleanOptionalAction`",
    note=(
        "`type=bool` is told wherever the parser is argparse's and the option is used; a number without a `type` only "
        "where a program reckons with it, compares it or hands it on as a number (to `range`, a loader, an optimizer), "
        "and nothing converts it. A default that is a text is converted by argparse: one that its type cannot read "
        "ends the run."
    ),
)
