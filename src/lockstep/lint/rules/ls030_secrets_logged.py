"""LS030: environment or secrets logged."""

import ast
import re
from collections.abc import Iterator

from lockstep.lint.analysis.index import Site
from lockstep.lint.analysis.nodes import constant, dotted, walk
from lockstep.lint.analysis.view import View
from lockstep.lint.finding import Confidence, Severity
from lockstep.lint.rules.base import Found, Rule, at

__all__ = ["RULE"]

SECRET = re.compile(
    r"(^|_)(api_?key|secret(_key)?|password|passwd|(hf|access|auth|api|bearer|github|wandb)_token)$", re.IGNORECASE
)
METHODS = {"debug", "info", "warning", "error", "critical", "log", "write", "print"}
LOGGING = re.compile(r"log|wandb|writer|console|accelerator", re.IGNORECASE)


def check(view: View) -> Iterator[Found]:
    """Looks at what is printed, logged or sent to a tracker."""
    for site in view.sites():
        if not speaks(view, site):
            continue
        for value in (*site.call.args, *(k.value for k in site.call.keywords)):
            what = leaked(view, value, site)
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
    inside = {id(part) for node in walk(value) if isinstance(node, ast.Subscript | ast.Call) for part in covered(node)}
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


def covered(node: ast.Subscript | ast.Call) -> Iterator[ast.AST]:
    """What a look-up or a call only uses: `os.environ` in `os.environ["HOME"]`, `len(token)`."""
    if isinstance(node, ast.Subscript):
        yield node.value
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
    what="The whole environment, or a key, token or password, is printed, logged or sent to a tracker.",
    why=(
        "Logs are shared, uploaded and kept. The environment of a training job usually holds the keys of the "
        "tracker, the hub and the cloud."
    ),
    bad=(
        """
import os
import torch

print(os.environ)
""",
        """
import logging
import torch

def login(hf_token):
    logging.info("token %s", hf_token)
""",
    ),
    good=(
        """
import os
import torch

print(os.environ.get("CUDA_HOME"), sorted(os.environ))
print(os.environ["CUDA_VISIBLE_DEVICES"])
""",
    ),
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Log only the variables that are needed, by name",
)
