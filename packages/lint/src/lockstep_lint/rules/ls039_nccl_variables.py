"""LS039: names of NCCL variables that torch has changed, or that nothing reads."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.nodes import constant, idents, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

# torch's own variables: since torch 2.2 they begin with TORCH_, and the old names warn and will go.
RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
}
NOWHERE = {"NCCL_TIMEOUT", "TORCH_NCCL_TIMEOUT", "NCCL_TIMEOUT_MS"}
SETS = ("setdefault", "putenv", "update", "dict", "setenv")


def check(view: View) -> Iterator[Found]:
    """Looks at what sets environment variables."""
    if "NCCL_" not in view.module.text:
        return
    old = view.torch is not None and view.torch < (2, 2)  # these know the old names only
    for scope in view.scopes:
        for stmt in scope.stmts:
            for node in named(stmt):
                name = constant(node)
                if isinstance(name, str) and name in RENAMED and not old:
                    yield Found(
                        node,
                        f"{name} is called {RENAMED[name]} since torch 2.2: set that, as the old name will go",
                    )
                elif isinstance(name, str) and name in NOWHERE and not read(view, name):
                    yield Found(node, f"nothing reads {name}: give init_process_group(timeout=timedelta(...)) instead")


def read(view: View, name: str) -> bool:
    """Whether the program itself asks for a variable, for its own use."""
    asks = re.compile(rf"""(?:getenv|environ\.get)\(\s*["']{name}["']|environ\[\s*["']{name}["']\s*\](?!\s*=[^=])""")
    return any(name in member.text and asks.search(member.text) for member in view.project.family(view.module))


def named(stmt: ast.stmt) -> Iterator[ast.expr]:
    """The keys that a statement sets in the environment."""
    if isinstance(stmt, ast.Assign):
        for target in stmt.targets:
            if isinstance(target, ast.Subscript) and "environ" in last_names(target.value):
                yield target.slice
        if isinstance(stmt.value, ast.Dict) and any("env" in name.lower() for t in stmt.targets for name in idents(t)):
            yield from (key for key in stmt.value.keys if key is not None)
    if isinstance(stmt, ast.Assign | ast.Expr) and isinstance(stmt.value, ast.Call) and last(stmt.value) in SETS:
        yield from stmt.value.args[:1] if last(stmt.value) in ("setdefault", "putenv", "setenv") else ()
        for part in walk(stmt.value):
            if isinstance(part, ast.Dict):
                yield from (key for key in part.keys if key is not None)


def last_names(node: ast.expr) -> set[str]:
    return set(idents(node))


RULE = Rule(
    code="LS039",
    name="old NCCL variables",
    what="The script sets an environment variable that torch has renamed (`NCCL_BLOCKING_WAIT`) or that never existed.",
    why=(
        "torch's own variables are called TORCH_NCCL_... since 2.2; the old names warn and will go. A variable that "
        "nothing reads changes nothing: a timeout is an argument of init_process_group."
    ),
    bad="""
import os
import torch.distributed as dist

os.environ["NCCL_BLOCKING_WAIT"] = "1"
os.environ.setdefault("NCCL_ASYNC_ERROR_HANDLING", "1")
""",
    good="""
import os
from datetime import timedelta
import torch.distributed as dist

os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
os.environ["NCCL_DEBUG"] = "INFO"
os.environ["NCCL_SOCKET_IFNAME"] = "eth0"

def start():
    dist.init_process_group("nccl", timeout=timedelta(minutes=60))
""",
    severity=Severity.HINT,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Use the TORCH_NCCL_ names, and init_process_group(timeout=...) for a timeout",
)
