"""LS029: names, variables and flags that torch has moved, renamed or dropped."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from lockstep_lint.analysis.context import above
from lockstep_lint.analysis.index import IMPORTS, Module, Scope
from lockstep_lint.analysis.nodes import REFERENCES, Words, constant, idents, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Edit, Severity
from lockstep_lint.rules.base import Found, Rule, at, edit


class Moved(NamedTuple):
    """A row of the table: the full name, its search word, advice and first torch."""

    name: str
    word: str
    advice: str
    since: tuple[int, int] = (0, 0)


AMP = "torch.cuda.amp is deprecated: use torch.amp"
APEX = "apex's amp and parallel are deprecated: use torch.amp and torch.nn.parallel"
FSDP1 = "FSDP1 is deprecated: use torch.distributed.fsdp.fully_shard"
LAUNCH = "torch.distributed.launch is deprecated: start with torchrun"
SDP = "sdp_kernel is deprecated: use torch.nn.attention.sdpa_kernel"
STATE = "{0}_state_dict is deprecated: use torch.distributed.checkpoint.{0}"
NAMES = (
    Moved("torch.cuda.amp", "amp", AMP),
    Moved("torch.cpu.amp", "amp", AMP),
    Moved("apex.amp", "apex", APEX),
    Moved("apex.parallel", "apex", APEX),
    Moved("fairscale", "fairscale", "FairScale is no longer developed: its sharding is in torch.distributed.fsdp"),
    Moved("torch.distributed.fsdp.FullyShardedDataParallel", "FullyShardedDataParallel", FSDP1),
    Moved("torch.distributed._fsdp.FullyShardedDataParallel", "FullyShardedDataParallel", FSDP1),
    Moved("torch.distributed.launch", "launch", LAUNCH),
    Moved("torch.backends.cuda.sdp_kernel", "sdp_kernel", SDP),
    Moved("torch.distributed.checkpoint.save_state_dict", "save_state_dict", STATE.format("save")),
    Moved("torch.distributed.checkpoint.load_state_dict", "load_state_dict", STATE.format("load")),
)
PACKAGES = ("apex.amp", "apex.parallel", "fairscale", "torch.distributed.launch")
# Variables of the environment: torch's own begin with TORCH_ since 2.2; nothing reads those of NOWHERE.
RENAMED = {
    old: Moved(old, old, f"{old} is called TORCH_{old} since torch 2.2: set that, as the old name will go", (2, 2))
    for old in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING")
}
NOWHERE = {
    name: Moved(name, name, f"nothing reads {name}: give init_process_group(timeout=timedelta(...)) instead")
    for name in ("NCCL_TIMEOUT", "TORCH_NCCL_TIMEOUT", "NCCL_TIMEOUT_MS")
}
VARIABLES = RENAMED | NOWHERE
FLAGS = ("--local_rank", "--local-rank")
FLAG = "torchrun passes the local rank in the environment: read os.environ['LOCAL_RANK'] instead of this flag"
STARTS = ("run", "Popen", "check_call", "call", "system", "execvp")
VERSION = Words(r"version|torch_(ge|gt|lt|le|\d)", re.IGNORECASE)
MISSING = {"ImportError", "ModuleNotFoundError", "AttributeError"}
STARTER = re.compile(r"torch\.distributed\.launch\b")


def check(view: View) -> Iterator[Found]:
    """Find the table's names and variables, the old launcher's flag, and commands that start it."""
    yield from names(view)
    yield from variables(view)
    for site in view.sites("add_argument"):
        if any(constant(value) in FLAGS for value in site.call.args) and not needs_flag(view):
            yield at(site, FLAG)
    for site in view.sites(*STARTS) if STARTER.search(view.module.text) else ():
        if any(isinstance(text := constant(node), str) and STARTER.search(text) for node in walk(site.call)):
            yield at(site, LAUNCH)


def applies(view: View, row: Moved) -> bool:
    """Check whether the project's torch is new enough for a row, if known."""
    return view.torch is None or view.torch >= row.since


def names(view: View) -> Iterator[Found]:
    """Find uses of the table's names, and unused imports of dropped packages."""
    module = view.module
    rows = [row for row in NAMES if row.word in module.text and applies(view, row)]
    advised: set[str] = set()
    for stmt, scope in dict.fromkeys(candidates(view, rows) if rows else ()):
        for node in (node for part in expressions(stmt) for node in chains(part)):
            full = view.names.qualify(node, scope)
            row = row_of(full, rows)
            if row is not None and not by_version(stmt, node, module):
                advised.add(row.advice)
                yield Found(node, row.advice, edit=modern(view, scope, stmt, node, full))
    packages = [row for row in rows if row.name in PACKAGES]
    for scope in view.scopes if packages else ():
        for stmt in (stmt for stmt in scope.stmts if isinstance(stmt, IMPORTS)):
            found = [row for name in find_names(stmt) if (row := row_of(name, packages))]
            if found and found[0].advice not in advised and not by_version(stmt, stmt, module):
                yield Found(stmt, found[0].advice)


def row_of(full: str, rows: list[Moved]) -> Moved | None:
    """Return the row of a full name, or of a package that it is in."""
    return next((row for row in rows if full and f"{full}.".startswith(f"{row.name}.")), None)


def candidates(view: View, rows: list[Moved]) -> Iterator[tuple[ast.stmt, Scope]]:
    """Yield the statements, with scopes, whose names may lead to a row."""
    module = view.module
    for name, uses in module.named.items():
        if not (name in module.imports or module.stars or name in module.renames):
            continue
        leading: dict[Scope, bool] = {}
        for stmt, scope in uses:
            if scope not in leading:
                leading[scope] = leads(view.names.qualify_name(name, scope), rows)
            if leading[scope]:
                yield stmt, scope


def leads(full: str, rows: list[Moved]) -> bool:
    """Check whether a full name is one of a row, or begins or continues one."""
    return full != "" and any(f"{row.name}.".startswith(f"{full}.") or row_of(full, [row]) for row in rows)


def expressions(stmt: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement's own expressions; of a function or class, its decorators."""
    if isinstance(stmt, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield from stmt.decorator_list
        return
    for _, value in ast.iter_fields(stmt):
        items = value if isinstance(value, list) else [value]
        yield from (item for item in items if isinstance(item, ast.expr | ast.withitem))


def chains(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the longest chains of names that an expression uses. A type test uses nothing."""
    stack = [node]
    while stack:
        item = stack.pop()
        if isinstance(item, (ast.Constant, ast.Compare)):
            continue
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id.startswith("is"):
            continue
        if isinstance(item, REFERENCES) and isinstance(item.ctx, ast.Load):
            yield item
            while isinstance(item, ast.Attribute):
                item = item.value
            if isinstance(item, ast.Name):
                continue
        stack.extend(ast.iter_child_nodes(item))


def find_names(stmt: ast.stmt) -> Iterator[str]:
    """Yield the full names that an import statement brings."""
    if isinstance(stmt, ast.Import):
        yield from (alias.name for alias in stmt.names)
    elif isinstance(stmt, ast.ImportFrom) and not stmt.level:
        yield from (f"{stmt.module}.{alias.name}" for alias in stmt.names)


def by_version(stmt: ast.stmt, node: ast.AST, module: Module) -> bool:
    """Check whether a test of torch's version decides, or the new name is missing."""
    around = above(stmt, module)
    tests = [each.test for each, _ in around if isinstance(each, ast.If)]
    choices = (part for part in walk(stmt) if isinstance(part, ast.IfExp))
    tests += [part.test for part in choices if any(item is node for item in walk(part))]
    tried = [each for each, place in around if isinstance(each, ast.Try) and place == "handlers"]
    if any(MISSING & set(idents(h.type)) for each in tried for h in each.handlers if h.type is not None):
        return True
    words = [(name, "torch" in idents(test)) for test in tests for name in idents(test)]
    return any(VERSION.search(name) or (name == "hasattr" and of_torch) for name, of_torch in words)


def modern(view: View, scope: Scope, stmt: ast.stmt, node: ast.AST, full: str) -> Edit | None:
    """Return the call in torch.amp, if torch is imported and keyword arguments suffice."""
    name = full.rpartition(".")[2]
    call = next((part for part in walk(stmt) if isinstance(part, ast.Call) and part.func is node), None)
    if not full.startswith(("torch.cuda.amp.", "torch.cpu.amp.")) or name not in ("GradScaler", "autocast"):
        return None
    if call is None or call.args or view.module.imports.get("torch") is None or "torch" in scope.binds:
        return None
    needs = (2, 3) if name == "GradScaler" else (2, 0)
    return edit("callee", call, f"torch.amp.{name}", f'"{full.split(".")[1]}"', needs)


def variables(view: View) -> Iterator[Found]:
    """Find the assignments of a variable of the table in the environment."""
    for scope in view.scopes if "NCCL_" in view.module.text else ():
        for stmt in scope.stmts:
            targets = stmt.targets if isinstance(stmt, ast.Assign) else ()
            keys = [t.slice for t in targets if isinstance(t, ast.Subscript) and "environ" in idents(t.value)]
            for key in keys:
                row = VARIABLES.get(str(constant(key)))
                if row is not None and applies(view, row) and not (row.name in NOWHERE and is_read(view, row.name)):
                    yield Found(key, row.advice)


def is_read(view: View, name: str) -> bool:
    """Check whether the program reads a variable itself."""
    read = re.compile(rf"""(?:getenv|environ\.get)\(\s*["']{name}["']|environ\[\s*["']{name}["']\s*\](?!\s*=[^=])""")
    return any(name in member.text and read.search(member.text) for member in view.project.family(view.module))


def needs_flag(view: View) -> bool:
    """Check whether a program reads LOCAL_RANK, spawns, or has a launcher that passes the flag."""
    reads = any("LOCAL_RANK" in member.text for member in view.project.family(view.module))
    spawns = view.ranks.programs.spawned(view.module) is not None
    return reads or spawns or bool(view.frameworks & {"deepspeed", "colossalai", "megatron"})


RULE = Rule("LS029", Severity.HINT, Confidence.HIGH, check, fix="safe")
