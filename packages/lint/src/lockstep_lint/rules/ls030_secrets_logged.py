"""LS030: environment or secrets logged."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.context import guards, inside, loops
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import Words, constant, dotted, idents, last, strings, targets, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

SECRET = re.compile(
    r"(^|_)(api_?key|secret(_key)?|password|passwd|(hf|access|auth|api|bearer|github|wandb)_token)$", re.IGNORECASE
)
# Keys of services, as options are called.
SERVICE = re.compile(r"^(wandb|comet|neptune|openai|hub|hf|huggingface)_(key|token)$", re.IGNORECASE)
# What sends its arguments to a tracker, whatever object it belongs to.
TRACKS = {"init_trackers", "add_hparams", "add_text"}
MAX_HELPERS = 3
# What gives back all that is in its argument.
SHOWS = {"vars", "str", "repr", "dict", "pformat", "dumps", "join", "sorted", "format", "items", "asdict", "deepcopy"}
SHOWS |= {"copy", "list", "to_container"}
# Those that go through what they are given: of a dictionary that is the names alone.
GOES = {"list", "sorted", "join"}
# What gives a text or a value on, in another shape or width.
SHAPES = SHOWS | {"getattr", "ljust", "rjust", "center", "colored"}
# Where a program keeps its options.
OPTIONS = Words(r"(^|_)(args|opts?|params|cfg|conf|config|configs|hparams|FLAGS)$")
# What makes an object of the options of a file.
LOADS = {"SimpleNamespace", "Namespace", "safe_load", "full_load", "load", "AttrDict", "EasyDict", "edict", "create"}
METHODS = {"debug", "info", "warning", "error", "critical", "log", "write", "print"}
LOGGING = re.compile(r"log|wandb|writer|console|accelerator", re.IGNORECASE)


def check(view: View) -> Iterator[Found]:
    """Looks at what is printed, logged or sent to a tracker."""
    for site in view.sites():
        if not speaks(view, site) and site.name not in TRACKS:
            continue
        for value in (*site.call.args, *(k.value for k in site.call.keywords)):
            what = (leaked(view, value, site) if site.name not in TRACKS else "") or all_options(view, value, site)
            if what:
                yield at(site, f"writes {what} where others read it: log only the names and values that are needed")
                break


def speaks(view: View, site: Site) -> bool:
    """Whether a call writes to a log, the terminal or a tracker."""
    if isinstance(site.call.func, ast.Name):
        return site.name in ("print", "pprint", "print_rank_0", "Logger", "log")
    name = dotted(site.receiver) or ""
    return (site.name in METHODS and bool(LOGGING.search(name))) or view.full(site) in (
        "wandb.init",
        "wandb.config.update",
    )


def leaked(view: View, value: ast.expr, site: Site) -> str:
    """What an argument gives away."""
    inside = {id(part) for node in walk(value) for part in covered(node)}
    for node in walk(value):
        if id(node) in inside:
            continue
        name = dotted(node) if isinstance(node, ast.Name | ast.Attribute) else None
        if name is not None and view.names.qualify(node, site.scope) == "os.environ":
            return "the whole environment, with its keys and tokens,"
        if name is not None and SECRET.search(name.split(".")[-1]):
            return f"'{name}'"
        key = constant(variable(node))
        if isinstance(key, str) and SECRET.search(key):
            return f"the variable {key}"
    return ""


def all_options(view: View, value: ast.expr, site: Site) -> str:
    """What a program's options give away where they are all written (`print(args)`, `config=vars(args)`), be it one by
    one in a loop.
    """
    for node in (*shown(value), *one_by_one(value, site)):
        for module, names in options(view, node, site.scope):
            for name in names:
                if not any(spared(member, name) for member in (module, view.module)):
                    return f"all options, '{name}' among them,"
    return ""


def options(view: View, node: ast.expr, scope: Scope) -> Iterator[tuple[Module, tuple[str, ...]]]:
    """The keys and tokens among the options that a name holds, with the file that says so: the one that parses them, or
    this one, which reads them from options that come from a file (`args.hf_token`).
    """
    for module in parsers(view, node, scope):
        yield module, secret_options(module)
    key = dotted(node) or ""
    made = {c for c, *_ in view.origins.calls_of(node, scope)} if OPTIONS.search(key.rpartition(".")[2]) else set()
    if any(last(call) in LOADS for call in made):
        yield view.module, secret_reads(view, key, made)


def one_by_one(value: ast.expr, site: Site) -> Iterator[ast.expr]:
    """The options of which a call in a loop over all of them shows one a turn (`for k in vars(args): print(k,
    getattr(args, k))`), where no test picks some of them.
    """
    for loop in loops(site.stmt, site.module):
        if not isinstance(loop, ast.For) or any(guards(site.stmt, site.module, loop)):
            continue
        binds = [bind for name, _ in targets(loop.target) for bind in site.scope.binds.get(name, [])]
        anew = {bind.key for bind in binds if inside(bind.stmt, loop, site.module)}
        if shows_one(value, loop.target, loop.iter, anew):
            yield from shown(gone_through(loop.iter))


def shows_one(value: ast.expr, target: ast.expr, source: ast.expr, anew: set[str]) -> bool:
    """Whether an expression shows, for the variables of a loop over options, the value of one of them as it is: that of
    a pair, the pair itself, or what is looked up under the name; not of a variable that is bound `anew`.
    """
    pairs = "items" in idents(source)
    whole = {name for name, path in targets(target) if pairs and path in ((), (1,))} - anew
    names = {name for name, path in targets(target) if path == ((0,) if pairs else ())} - anew
    tables = {dotted(node) for node in shown(gone_through(source))}
    for part in open_parts(value, names):
        if isinstance(part, ast.Name) and part.id in whole:
            return True
        looked = part.args[:2] if isinstance(part, ast.Call) and last(part) == "getattr" else []
        looked = [part.value, part.slice] if isinstance(part, ast.Subscript) else looked
        if len(looked) == 2 and last(looked[1]) in names and tables & {dotted(node) for node in shown(looked[0])}:
            return True
    return False


def open_parts(value: ast.expr, names: set[str]) -> Iterator[ast.expr]:
    """The parts of an expression that are shown as they are: not what another function, or a choice by the option's
    name, stands before (`mask(name, value)`, `"***" if "key" in name else value`).
    """
    queue = [value]
    while queue:
        part = queue.pop()
        yield part
        if isinstance(part, ast.Call) and last(part) in SHAPES:
            queue += [*part.args, *(item.value for item in part.keywords)]
            queue += [part.func.value] if isinstance(part.func, ast.Attribute) else []
        elif isinstance(part, ast.IfExp):
            queue += [part.body, part.orelse] if not names & set(idents(part.test)) else []
        elif isinstance(part, ast.JoinedStr | ast.BinOp | ast.Tuple | ast.List | ast.FormattedValue | ast.Starred):
            queue += [node for node in ast.iter_child_nodes(part) if isinstance(node, ast.expr)]


def gone_through(node: ast.expr) -> ast.expr:
    """The table that a loop goes through, sorted or not, by its names or its pairs (`sorted(vars(args).keys())`)."""
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("keys", "items") and not node.args:
            node = node.func.value
        elif last(node) in ("list", "sorted", "tuple") and node.args:
            node = node.args[0]
        else:
            break
    return node


def parsers(view: View, node: ast.expr, scope: Scope, depth: int = 0) -> Iterator[Module]:
    """The files that parse the options which a value holds, also where a helper is given them and gives them back
    (`args = prepare(args)`).
    """
    for call, home, _ in view.origins.calls_of(node, scope):
        if last(call) in ("parse_args", "parse_known_args"):
            yield home.module
        same = [value for value in call.args if dotted(value) is not None and dotted(value) == dotted(node)]
        same += [part for part in shown(call) if last(call) in SHOWS]
        for value in same if depth < MAX_HELPERS else ():
            yield from parsers(view, value, home, depth + 1)


def shown(node: ast.expr) -> Iterator[ast.expr]:
    """The names whose whole content an expression shows."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Name | ast.Attribute):
        if isinstance(node, ast.Attribute) and node.attr == "__dict__":
            node = node.value
        yield node
    elif isinstance(node, ast.Call) and last(node) in SHOWS:
        parts = [*node.args, node.func.value] if isinstance(node.func, ast.Attribute) else node.args
        parts = [part for part in parts if last(node) not in GOES or not by_names(part)]
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    elif isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Tuple | ast.List):
        parts = node.elts
    elif isinstance(node, ast.GeneratorExp | ast.ListComp | ast.DictComp) and not node.generators[0].ifs:
        each, source = node.value if isinstance(node, ast.DictComp) else node.elt, node.generators[0]
        parts = [gone_through(source.iter)] if shows_one(each, source.target, source.iter, set()) else []
    for part in parts:
        yield from shown(part)


def by_names(node: ast.expr) -> bool:
    """Whether going through a value gives the names of options alone (`sorted(vars(args))`)."""
    return isinstance(node, ast.Name | ast.Attribute) or (
        isinstance(node, ast.Call) and last(node) in ("vars", "dict", "asdict", "copy", "deepcopy", "to_container")
    )


@kept
def secret_options(module: Module) -> tuple[str, ...]:
    """The options of a file's parsers that are keys, tokens or passwords."""
    flags = (text for site in module.sites("add_argument") for text in strings(site.call) if text.startswith("--"))
    names = (flag.lstrip("-").replace("-", "_") for flag in flags)
    return tuple(name for name in names if SECRET.search(name) or SERVICE.search(name))


def secret_reads(view: View, key: str, made: set[ast.Call]) -> tuple[str, ...]:
    """The keys, tokens and passwords that a file reads from the object of options that some calls make."""
    reads = ((node, scope) for scope in view.module.scopes for node, _ in scope.reads if isinstance(node.ctx, ast.Load))
    names = dict.fromkeys(
        node.attr
        for node, scope in reads
        if (SECRET.search(node.attr) or SERVICE.search(node.attr))
        and dotted(node.value) == key
        and any(call in made for call, *_ in view.origins.calls_of(node.value, scope))
    )
    return tuple(names)


@kept
def spared(module: Module, option: str) -> bool:
    """Whether a file takes an option out before it shows all, or stops where it is given."""
    for node in walk(module.top.node):
        if isinstance(node, ast.Delete | ast.Assign) and any(last(target) == option for target in node.targets):
            return True
        if isinstance(node, ast.Call) and last(node) in ("pop", "delattr", "setattr") and option in strings(node):
            return True
        if (
            isinstance(node, ast.If)
            and option in idents(node.test)
            and any(isinstance(n, ast.Raise) for n in node.body)
        ):
            return True
    return False


def covered(node: ast.AST) -> Iterator[ast.AST]:
    """What a look-up, a call or a test only uses: `os.environ` in `os.environ["HOME"]`, `len(token)`, `"RANK" in
    os.environ`.
    """
    if isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        yield from walk(node)
    elif isinstance(node, ast.IfExp):
        yield from walk(node.test)
    elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        yield from (part for value in node.values[:-1] for part in walk(value))
    elif isinstance(node, ast.Subscript):
        yield node.value
    elif not isinstance(node, ast.Call):
        return
    elif isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "keys", "pop"):
        yield node.func.value
    elif isinstance(node.func, ast.Name) and node.func.id in ("len", "bool", "sorted", "mask", "type"):
        yield from (part for argument in node.args for part in walk(argument))


def variable(node: ast.AST) -> ast.expr | None:
    """The key of `os.environ[key]`, `os.environ.get(key)` or `os.getenv(key)`."""
    if isinstance(node, ast.Subscript) and (dotted(node.value) or "").endswith("environ"):
        return node.slice
    if isinstance(node, ast.Call) and (dotted(node.func) or "").endswith(("getenv", "environ.get")) and node.args:
        return node.args[0]
    return None


RULE = Rule(
    code="LS030",
    name="environment or secrets logged",
    what=(
        "The whole environment, all options where a key or token is one of them, or a key, token or password, is "
        "printed, logged or sent to a tracker."
    ),
    why=(
        "Logs are shared, uploaded and kept. The environment of a training job usually holds the keys of the "
        "tracker, the hub and the cloud."
    ),
    bad="""
import os
import torch

print(os.environ)
""",
    good="""
import os
import torch

print(os.environ.get("CUDA_HOME"), sorted(os.environ))
print(os.environ["CUDA_VISIBLE_DEVICES"])
""",
    severity=Severity.HINT,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Log only the variables that are needed, by name",
    note=(
        "Options are known by the parser that declares the key, or, where they come from a file, by the file's own "
        "reading of it (`config.hf_token`). They may be shown as a whole, or one by one in a loop "
        "(`for name, value in vars(args).items(): print(name, value)`). Silent where names alone are shown, where a "
        "test or a function stands before the values, and where the key is taken out or replaced."
    ),
)
