"""LS030: environment or secrets logged."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import REFERENCES, constant, dotted, idents, last, strings, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

SECRET = re.compile(
    r"(^|_)(api_?key|secret(_key)?|password|passwd|(hf|access|auth|api|bearer|github|wandb)_token)$"
    r"|^(wandb|comet|neptune|openai|hub|hf|huggingface)_(key|token)$",
    re.IGNORECASE,
)
# What sends its arguments to a tracker, whatever object it belongs to.
TRACKS = {"init_trackers", "add_hparams", "add_text"}
PRINTS = {"print", "pprint", "print_rank_0", "Logger", "log"}
METHODS = {"debug", "info", "warning", "error", "critical", "log", "write", "print"}
LOGGING = re.compile(r"log|wandb|writer|console|accelerator", re.IGNORECASE)
# What gives back all that is in its argument, and what of a table shows the names alone.
SHOWS = {"vars", "str", "repr", "dict", "pformat", "dumps", "format", "items", "asdict", "deepcopy", "copy"}
NAMES = {"list", "sorted", "keys", "len", "bool", "mask", "type"}
MAX_HELPERS = 3


def check(view: View) -> Iterator[Found]:
    """Look for keys, the environment and all options in what is printed, logged or tracked."""
    for site in view.sites():
        tracks = site.name in TRACKS
        for value in (*site.call.args, *(k.value for k in site.call.keywords)) if tracks or writes(view, site) else ():
            what = ("" if tracks else leaked(view, value, site)) or all_options(view, value, site)
            if what:
                yield at(site, f"writes {what} where others read it: log only the names and values that are needed")
                break


def writes(view: View, site: Site) -> bool:
    """Check whether a call writes to a log, the terminal or a tracker."""
    if isinstance(site.call.func, ast.Name):
        return site.name in PRINTS
    logs = site.name in METHODS and LOGGING.search(dotted(site.receiver) or "") is not None
    return logs or view.full(site) in ("wandb.init", "wandb.config.update")


def leaked(view: View, value: ast.expr, site: Site) -> str:
    """Return the secret that an argument gives away."""
    hidden = {part for node in walk(value) for part in used(node)}
    for node in walk(value):
        name = dotted(node) if isinstance(node, REFERENCES) else None
        key = constant(variable(node))
        if node in hidden:
            continue
        if name is not None and view.names.qualify(node, site.scope) == "os.environ":
            return "the whole environment, with its keys and tokens,"
        if name is not None and SECRET.search(name.rpartition(".")[2]):
            return f"'{name}'"
        if isinstance(key, str) and SECRET.search(key):
            return f"the variable {key}"
    return ""


def used(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what an expression only looks up, counts or tests (`os.environ["HOME"]`, `len(token)`)."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        parts = [node]
    elif isinstance(node, ast.IfExp):
        parts = [node.test]
    elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        parts = node.values[:-1]
    elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in ("get", "keys", "pop")):
        yield node.value
    elif isinstance(node, ast.Call) and last(node) in NAMES:
        parts = node.args
    yield from (inner for part in parts for inner in walk(part))


def variable(node: ast.AST) -> ast.expr | None:
    """Return the key of `os.environ[key]`, `os.environ.get(key)` or `os.getenv(key)`."""
    if isinstance(node, ast.Subscript) and (dotted(node.value) or "").endswith("environ"):
        return node.slice
    if isinstance(node, ast.Call) and (dotted(node.func) or "").endswith(("getenv", "environ.get")) and node.args:
        return node.args[0]
    return None


def all_options(view: View, value: ast.expr, site: Site) -> str:
    """Return the key among a program's options, where they are all written (`print(args)`, `config=vars(args)`)."""
    for node in shown(value):
        for module in parsers(view, node, site.scope, MAX_HELPERS):
            for name in secret_options(module):
                if not any(spares(member, name) for member in (module, view.module)):
                    return f"all options, '{name}' among them,"
    return ""


def shown(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the names whose whole content an expression shows."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        node = node.value
    if isinstance(node, REFERENCES):
        yield node
    elif isinstance(node, ast.Call) and last(node) in SHOWS:
        parts = [*node.args, node.func.value] if isinstance(node.func, ast.Attribute) else node.args
    elif isinstance(node, ast.JoinedStr | ast.BinOp | ast.Tuple | ast.List | ast.FormattedValue):
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    for part in parts:
        yield from shown(part)


def parsers(view: View, node: ast.expr, scope: Scope, depth: int) -> Iterator[Module]:
    """Yield the files that parse the options in a value, also where helpers give them back (`args = prepare(args)`)."""
    for call, home, _ in view.origins.calls_of(node, scope) if depth else ():
        if last(call) in ("parse_args", "parse_known_args"):
            yield home.module
        same = [value for value in call.args if dotted(value) is not None and dotted(value) == dotted(node)]
        for value in (*same, *(shown(call) if last(call) in SHOWS else ())):
            yield from parsers(view, value, home, depth - 1)


@kept
def secret_options(module: Module) -> tuple[str, ...]:
    """Return the options of a file's parsers that are keys, tokens or passwords."""
    flags = (text for site in module.sites("add_argument") for text in strings(site.call) if text.startswith("--"))
    names = (flag.lstrip("-").replace("-", "_") for flag in flags)
    return tuple(name for name in names if SECRET.search(name))


@kept
def spares(module: Module, option: str) -> bool:
    """Check whether a file takes an option out before it shows all, or refuses it."""
    for node in walk(module.top.node):
        if isinstance(node, ast.Delete | ast.Assign) and any(last(target) == option for target in node.targets):
            return True
        if isinstance(node, ast.Call) and last(node) in ("pop", "delattr", "setattr") and option in strings(node):
            return True
        if isinstance(node, ast.If) and option in idents(node.test) and isinstance(node.body[-1], ast.Raise):
            return True
    return False


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
        "Options are known by the parser that declares the key. Silent where names alone are shown, where a function "
        "stands before the values, and where the key is taken out or replaced."
    ),
)
