"""LS029: what torch has moved, renamed or given up: one table of names, variables and flags."""

import ast
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.context import above
from lockstep_lint.analysis.index import IMPORTS, Module, Scope, Site
from lockstep_lint.analysis.nodes import REFERENCES, Words, constant, idents, last, walk
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Edit, Severity
from lockstep_lint.rules.base import Found, Rule, at, edit

__all__ = ["RULE"]


class Moved(NamedTuple):
    """A row: a full name and all below it, a word of its text, what to say, and the first torch where it holds."""

    name: str
    word: str
    advice: str
    since: tuple[int, int] = (0, 0)


AMP = "torch.cuda.amp is deprecated: use torch.amp"
APEX = "apex's amp and parallel are deprecated: use torch.amp and torch.nn.parallel"
FSDP1 = "FSDP1 is deprecated: use torch.distributed.fsdp.fully_shard"
LAUNCH = "torch.distributed.launch is deprecated: start with torchrun"
NAMES = (
    Moved("torch.cuda.amp", "amp", AMP),
    Moved("torch.cpu.amp", "amp", AMP),
    Moved("apex.amp", "apex", APEX),
    Moved("apex.parallel", "apex", APEX),
    Moved("fairscale", "fairscale", "FairScale is no longer developed: its sharding is in torch.distributed.fsdp"),
    Moved("torch.distributed.fsdp.FullyShardedDataParallel", "FullyShardedDataParallel", FSDP1),
    Moved("torch.distributed._fsdp.FullyShardedDataParallel", "FullyShardedDataParallel", FSDP1),
    Moved("torch.distributed.launch", "launch", LAUNCH),
    Moved(
        "torch.backends.cuda.sdp_kernel", "sdp_kernel", "sdp_kernel is deprecated: use torch.nn.attention.sdpa_kernel"
    ),
    Moved(
        "torch.distributed.checkpoint.save_state_dict",
        "save_state_dict",
        "save_state_dict is deprecated: use torch.distributed.checkpoint.save",
    ),
    Moved(
        "torch.distributed.checkpoint.load_state_dict",
        "load_state_dict",
        "load_state_dict is deprecated: use torch.distributed.checkpoint.load",
    ),
)
PACKAGES = ("apex.amp", "apex.parallel", "fairscale", "torch.distributed.launch")
# Variables of the environment: torch's own begin with TORCH_ since 2.2; those of NOWHERE never existed.
RENAMED = {
    old: Moved(old, old, f"{old} is called TORCH_{old} since torch 2.2: set that, as the old name will go", (2, 2))
    for old in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING")
}
NOWHERE = {
    name: Moved(name, name, f"nothing reads {name}: give init_process_group(timeout=timedelta(...)) instead")
    for name in ("NCCL_TIMEOUT", "TORCH_NCCL_TIMEOUT", "NCCL_TIMEOUT_MS")
}
VARIABLES = RENAMED | NOWHERE
SETS = ("setdefault", "putenv", "update", "dict", "setenv")
FLAGS = ("--local_rank", "--local-rank")
FLAG = "torchrun passes the local rank in the environment: read os.environ['LOCAL_RANK'] instead of this flag"
STARTS = ("run", "Popen", "check_call", "call", "system", "execvp")
# What reads the variable that torchrun sets; what reads the flag, or all flags at once.
READS = re.compile(r"""["']LOCAL_RANK["']""")
OPTION = re.compile(r"""\.local_rank\b|["']local_rank["']|\bvars\(|\*\*""")
# What asks which torch there is.
VERSION = Words(r"version|torch_(ge|gt|lt|le|\d)", re.IGNORECASE)
MISSING = {"ImportError", "ModuleNotFoundError", "AttributeError"}


def check(view: View) -> Iterator[Found]:
    """Look for the table's names, variables, the old launcher's flag, and commands that start it."""
    yield from names(view)
    yield from variables(view)
    for site in view.sites("add_argument"):
        if any(constant(value) in FLAGS for value in site.call.args) and not handled(view, site):
            yield at(site, FLAG)
    for site in view.sites(*STARTS) if NAMES_LAUNCH.search(view.module.text) else ():
        if any(isinstance(text := constant(node), str) and NAMES_LAUNCH.search(text) for node in walk(site.call)):
            yield at(site, LAUNCH)


NAMES_LAUNCH = re.compile(r"torch\.distributed\.launch\b")


def names(view: View) -> Iterator[Found]:
    """Yield the uses of the table's names, and the imports of packages where nothing in the file uses one."""
    rows = [row for row in NAMES if row.word in view.module.text and applies(view, row)]
    known = leading(view, rows) if rows else set()
    imported: list[Found] = []
    used: set[str] = set()
    for scope in view.scopes if rows else ():
        for stmt, node, full in named(view, scope, known):
            row = next((row for row in rows if f"{full}.".startswith(f"{row.name}.")), None) if full else None
            if row is None or by_version(stmt, node, view.module):
                continue
            if isinstance(node, ast.stmt):
                imported += [Found(node, row.advice)] if row.name in PACKAGES else []
            else:
                used.add(row.advice)
                yield Found(node, row.advice, edit=modern(view, scope, stmt, node, full))
    yield from (found for found in imported if found.message not in used)


def applies(view: View, row: Moved) -> bool:
    """Whether the project's torch is new enough for a row, as far as it is known."""
    return view.torch is None or view.torch >= row.since


def leading(view: View, rows: list[Moved]) -> set[ast.stmt]:
    """Return the statements with a name that a row's name begins with, and the attribute that comes next in it, or with
    a name that stands for as much as the row's.
    """
    found: set[ast.stmt] = set()
    module = view.module
    wanted = [f"{row.name}." for row in rows]
    read: dict[str, set[ast.stmt]] = {part: set() for row in wanted for part in row.split(".")}
    for scope in module.scopes:
        for node, stmt in scope.reads:
            if node.attr in read:
                read[node.attr].add(stmt)

    @functools.cache
    def reached(full: str) -> frozenset[ast.stmt] | None:
        """Return the statements that read what comes after a full name in a row's; None for all statements."""
        if any(full.startswith(row) for row in wanted):
            return None
        following = {row[len(full) :].partition(".")[0] for row in wanted if row.startswith(full)}
        return frozenset().union(*(read[part] for part in following))

    renamed = {
        key
        for scope in module.scopes
        for key, binds in scope.binds.items()
        if any(isinstance(bind.value, REFERENCES) for bind in binds)
    }
    for name, places in module.named.items():
        if name not in module.imports and (view.names.foreign(name, module) or not (name in renamed or module.stars)):
            continue  # it can stand for nothing that was imported
        if name not in module.own_names:  # means the same in all scopes
            within = reached(f"{view.names.qualify_name(name, module.top)}.")
            found.update(stmt for stmt, _ in places if within is None or stmt in within)
            continue
        by_scope = {home: reached(f"{view.names.qualify_name(name, home)}.") for home in {home for _, home in places}}
        found.update(stmt for stmt, home in places if (within := by_scope[home]) is None or stmt in within)
    return found


def named(view: View, scope: Scope, known: set[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.AST, str]]:
    """Yield each import and each name in a scope's own statements, with its statement and its full name."""
    owner = scope.node
    for decorator in scope.decorators if owner in known else ():
        assert isinstance(owner, ast.stmt)
        for node in chains(decorator):
            yield owner, node, view.names.qualify(node, scope.parent or scope)
    for stmt in scope.stmts:
        if isinstance(stmt, IMPORTS):
            yield from ((stmt, stmt, name) for name in imports(stmt))
        elif stmt in known:
            for part in parts(stmt):
                for node in chains(part):
                    yield stmt, node, view.names.qualify(node, scope)


def imports(stmt: ast.stmt) -> Iterator[str]:
    """Yield the full names that an import statement brings."""
    if isinstance(stmt, ast.Import):
        yield from (alias.name for alias in stmt.names)
    elif isinstance(stmt, ast.ImportFrom) and not stmt.level:
        yield from (f"{stmt.module}.{alias.name}" for alias in stmt.names)


def parts(stmt: ast.stmt) -> Iterator[ast.AST]:
    """Yield what a statement itself evaluates, without the statements in it and without decorators."""
    if isinstance(stmt, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for _, value in ast.iter_fields(stmt):
        items = value if isinstance(value, list) else [value]
        yield from (item for item in items if isinstance(item, ast.expr | ast.withitem))


def chains(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the longest chains of names and attributes that an expression uses; a test of a type uses nothing."""
    stack = [node]
    while stack:
        item = stack.pop()
        kind = item.__class__
        if kind is ast.Compare or (kind is ast.Call and last(item) in ("isinstance", "issubclass")):
            continue
        if isinstance(item, REFERENCES) and isinstance(item.ctx, ast.Load):
            yield item
            while isinstance(item, ast.Attribute):
                item = item.value
            if isinstance(item, ast.Name):
                continue
        stack.extend(ast.iter_child_nodes(item))


def by_version(stmt: ast.stmt, node: ast.AST, module: Module) -> bool:
    """Whether torch's version, or what it has, decides if a name is used, or the new one is missing there."""
    around = above(stmt, module)
    tests = [each.test for each, _ in around if isinstance(each, ast.If)]
    choices = (part for part in walk(stmt) if isinstance(part, ast.IfExp))
    tests += [part.test for part in choices if any(item is node for item in walk(part))]
    tried = [each for each, place in around if isinstance(each, ast.Try) and place == "handlers"]
    return any(MISSING & set(idents(h.type)) for each in tried for h in each.handlers if h.type is not None) or any(
        VERSION.search(name) or (name == "hasattr" and "torch" in idents(test))
        for test in tests
        for name in idents(test)
    )


def modern(view: View, scope: Scope, stmt: ast.stmt, node: ast.AST, full: str) -> Edit | None:
    """Return the call in torch.amp, where torch is imported and no positional argument would change its meaning."""
    name = full.rpartition(".")[2]
    call = next((part for part in walk(stmt) if isinstance(part, ast.Call) and part.func is node), None)
    if not full.startswith(("torch.cuda.amp.", "torch.cpu.amp.")) or name not in ("GradScaler", "autocast"):
        return None
    if call is None or call.args or view.module.imports.get("torch") is None or "torch" in scope.binds:
        return None
    needs = (2, 3) if name == "GradScaler" else (2, 0)
    return edit("callee", call, f"torch.amp.{name}", f'"{full.split(".")[1]}"', needs)


def variables(view: View) -> Iterator[Found]:
    """Yield the places that set a variable of the table."""
    for scope in view.scopes if "NCCL_" in view.module.text else ():
        for stmt in scope.stmts:
            for node in keys(stmt):
                name = constant(node)
                row = VARIABLES.get(name) if isinstance(name, str) else None
                if row is not None and applies(view, row) and not (row.name in NOWHERE and asked(view, row.name)):
                    yield Found(node, row.advice)


def asked(view: View, name: str) -> bool:
    """Whether the program itself asks for a variable, for its own use."""
    asks = re.compile(rf"""(?:getenv|environ\.get)\(\s*["']{name}["']|environ\[\s*["']{name}["']\s*\](?!\s*=[^=])""")
    return any(name in member.text and asks.search(member.text) for member in view.project.family(view.module))


def keys(stmt: ast.stmt) -> Iterator[ast.expr]:
    """Yield the keys that a statement sets in the environment."""
    if isinstance(stmt, ast.Assign):
        for target in stmt.targets:
            if isinstance(target, ast.Subscript) and "environ" in idents(target.value):
                yield target.slice
        if isinstance(stmt.value, ast.Dict) and any("env" in name.lower() for t in stmt.targets for name in idents(t)):
            yield from (key for key in stmt.value.keys if key is not None)
    if isinstance(stmt, ast.Assign | ast.Expr) and isinstance(stmt.value, ast.Call) and last(stmt.value) in SETS:
        yield from stmt.value.args[:1] if last(stmt.value) in ("setdefault", "putenv", "setenv") else ()
        for part in walk(stmt.value):
            if isinstance(part, ast.Dict):
                yield from (key for key in part.keys if key is not None)


def handled(view: View, site: Site) -> bool:
    """Whether the flag's default is the environment's, nothing reads it, or another launcher than torch's passes it."""
    if READS.search(ast.unparse(site.call)) or left_over(view):
        return True
    if view.ranks.programs.spawned(view.module) is not None:
        return True  # the script starts its processes itself, and a flag of that name is its own
    return bool(view.frameworks & {"deepspeed", "colossalai", "megatron"})


def left_over(view: View) -> bool:
    """Whether the programs read the rank from the environment, and never what the flag says."""
    members = view.project.family(view.module)
    read = any("LOCAL_RANK" in member.text and READS.search(member.text) for member in members)
    return read and not any(map(reads_options, members))


@kept
def reads_options(module: Module) -> bool:
    """Check whether a file reads the launcher's flag, or all flags at once."""
    return OPTION.search(module.text) is not None


RULE = Rule(
    code="LS029",
    name="moved or deprecated",
    what=(
        "The script uses what torch has moved, renamed or given up: `torch.cuda.amp`, FSDP1, `sdp_kernel`, "
        "`torch.distributed.launch` or its `--local_rank`, old `NCCL_` variables; or FairScale, or apex's amp."
    ),
    why=(
        "They are unmaintained or warn today and will go; what took their place does the same, and gets the fixes. A "
        "variable that nothing reads changes nothing: a timeout is an argument of init_process_group."
    ),
    bad="""
import argparse
import os
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
os.environ["NCCL_BLOCKING_WAIT"] = "1"
scaler = torch.cuda.amp.GradScaler()
""",
    good="""
import os
import torch
from torch.distributed.fsdp import fully_shard

local_rank = int(os.environ["LOCAL_RANK"])
os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
scaler = torch.amp.GradScaler("cuda")

def wrap(model):
    return fully_shard(model)
""",
    severity=Severity.HINT,
    confidence=Confidence.HIGH,
    check=check,
    fix="safe",
    remedy="Use torch.amp, fully_shard, sdpa_kernel, torchrun, and the TORCH_NCCL_ names",
    note=(
        "It is told where a name of the table is used, under any name, a package at its import; not "
        "where a test of torch's version, `hasattr(torch, ...)` or an `except ImportError` chooses one. "
        "The flag `--local_rank` is told even if the script also reads the variable, unless the variable is the flag's "
        "default, nothing reads the flag, or another launcher passes it (DeepSpeed, or the script itself with "
        "`mp.spawn`). `--fix` moves calls of torch.cuda.amp."
    ),
)
