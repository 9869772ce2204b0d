"""LS060: a name, an option or an attribute that nothing defines."""

import ast
import builtins
import os
import re
from collections.abc import Iterator
from difflib import get_close_matches

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import COLLECTIVES
from lockstep_lint.analysis.context import above, guards
from lockstep_lint.analysis.flow import gaps, hears, readable, starred
from lockstep_lint.analysis.imports import EXTERNAL, KNOWN
from lockstep_lint.analysis.index import Imported, Module, Scope
from lockstep_lint.analysis.nodes import constant, head, last, walk
from lockstep_lint.analysis.reach import ends_run, is_demonstration
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule

__all__ = ["RULE"]

# What Python, a notebook or a profiler puts there.
OFFERED = "__file__ __path__ __builtins__ __annotations__ __class__ __qualname__ __module__ "
OFFERED += "WindowsError reveal_type display profile"
# Of Python 2: such a script is of another time.
OLD = "unicode xrange raw_input basestring long unichr reduce file execfile cmp reload"
BUILTIN = frozenset((*dir(builtins), *OFFERED.split(), *OLD.split()))
OF_DISTRIBUTED = COLLECTIVES | {"init_process_group", "destroy_process_group", "get_rank", "get_world_size"}
OF_DISTRIBUTED |= {"is_initialized", "is_available", "new_group", "isend", "irecv", "send", "recv"}
VARIABLES = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK", "CUDA_LAUNCH_BLOCKING")
ALIKE = 0.9
# What tells other checkers that a name comes from out of sight.
SILENCED = re.compile(r"#.*(F821|name-defined|undefined-variable|reportUndefinedVariable)")
# How a notebook that was written out as a script begins its cells.
CELLS = re.compile(r"^# (In ?\[[\d ]*\]:?|Databricks notebook source|COMMAND -+)\s*$", re.MULTILINE)
# Puts a folder of one machine before all others.
ELSEWHERE = re.compile(r"""sys\.path\.insert\([^\n]*["']/""")


def check(view: View) -> Iterator[Found]:
    """Looks for names, options and variables of the environment that are defined nowhere."""
    yield from undefined(view)
    yield from early(view)
    yield from misspelt(view)
    yield from not_there(view)
    if view.effects.mentioned(view.module, "parse_args"):
        told: set[str] = set()
        for node, stmt, scope in view.options.missing(view.module):
            if node.attr not in told and not hears(stmt, scope):
                told.add(node.attr)
                yield Found(
                    node, f"no parser adds the option '{node.attr}', and nothing sets it: an AttributeError here"
                )


def undefined(view: View) -> Iterator[Found]:
    """Yield the names that neither their function, nor what is around it, nor the file gives a value."""
    module = view.module
    known = file_names(view, module)
    if known is None or is_notebook(module) or not readable(module.top):
        return
    lacking = {
        scope: names
        for scope, places in module.places.items()
        if (names := set(places).difference(known, *map(bound_in, around(scope))))
    }
    wanted = [name for name in module.named if any(name in names for names in lacking.values())] if lacking else []
    unknown = [
        (name, stmt, scope) for name in wanted for stmt, scope in module.named[name] if name in lacking.get(scope, ())
    ]
    stops = {scope: stmt.lineno for _, stmt, scope in unknown if is_bare(stmt)}  # `never_tested`, to end the run there
    told: set[str] = set()
    for name, stmt, scope in unknown:
        if name not in told and stmt.lineno < stops.get(scope, stmt.lineno + 1):
            node = next(reads_of(name, stmt), None)
            known_to_author = node is not None and SILENCED.search(module.source.lines[node.lineno - 1])
            if node is not None and not known_to_author and not hears(stmt, scope) and ends_run(view, stmt, scope):
                level = Severity.HINT if is_demonstration(view, stmt, scope) else None
                yield Found(node, f"'{name}' is defined nowhere: a NameError here", level)
                told.add(name)


@kept
def is_notebook(module: Module) -> bool:
    """Check whether a file is a notebook, or one that was written out as a script: magics may give it names."""
    return module.path.endswith(".ipynb") or CELLS.search(module.source.text) is not None


@kept
def _handled(module: Module) -> frozenset[str]:
    found: set[str] = set()
    for stmt in (stmt for scope in module.scopes for stmt in scope.stmts):
        found |= {handler.name for handler in getattr(stmt, "handlers", ()) if handler.name}
        if isinstance(stmt, ast.Match):
            patterns = [node for case in stmt.cases for node in walk(case.pattern)]
            names = (getattr(node, "name", None) or getattr(node, "rest", None) for node in patterns)
            found |= {name for name in names if name}
    return frozenset(found)


def file_names(view: View, module: Module, depth: int = 0) -> set[str] | None:
    """Return the names that all of a file can see; None where a star import brings some that are out of sight."""
    found = {*module.top.binds, *module.top.defs, *module.imports, *BUILTIN}
    found |= {each.module.partition(".")[0] for each in module.imported if each.level}  # a package's own files
    if "except" in module.text or "match" in module.text:
        found |= _handled(module)
    for star in module.stars:
        target = view.project.find(module, star.module, star.level)
        brought = file_names(view, target, depth + 1) if target is not None and depth < 3 else None
        if brought is None:
            return None
        found |= brought
    return found


def around(scope: Scope) -> Iterator[Scope]:
    """A scope, and those around it whose names it sees."""
    current: Scope | None = scope
    while current is not None:
        if current is scope or current.kind != "class":
            yield current
        current = current.parent


@kept
def bound_in(scope: Scope) -> frozenset[str]:
    """Return the names that a function or class gives a value."""
    return frozenset((*scope.binds, *scope.params, *scope.defs, *starred(scope), *scope.globals))


def reads_of(name: str, stmt: ast.stmt) -> Iterator[ast.Name]:
    """Yield the reads of a name in a statement, if it is not a variable of a comprehension or a lambda there."""
    if isinstance(stmt, ast.Raise) or is_bare(stmt):
        return  # it ends there in any case
    parts = own_parts(stmt)
    nodes = [node for part in parts for node in walk(part)]
    for node in nodes:
        stored = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and node.id == name
        if stored or (isinstance(node, ast.arg) and node.arg == name):
            return
    yield from (node for node in nodes if isinstance(node, ast.Name) and node.id == name)


def is_bare(stmt: ast.stmt) -> bool:
    """Check whether a statement is a name alone."""
    return isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Name)


def own_parts(stmt: ast.stmt) -> Iterator[ast.AST]:
    """Yield the expressions of a statement that are worked out, without the statements in it."""
    for name, value in ast.iter_fields(stmt):
        if name in ("annotation", "returns", "args"):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.expr | ast.withitem | ast.keyword):
                yield item
    if isinstance(stmt, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from (*stmt.args.defaults, *filter(None, stmt.args.kw_defaults))


def early(view: View) -> Iterator[Found]:
    """Yield the reads of a function's own names that stand before every place that gives them a value."""
    for scope in view.scopes if not is_notebook(view.module) else ():
        for read in gaps(scope, view.calls):
            if (
                read.never
                and ends_run(view, read.stmt, scope)
                and not is_demonstration(view, read.stmt, scope)
                and not (scope.kind == "module" and (read.name in BUILTIN or scope.module.stars))
            ):
                kind = "an UnboundLocalError" if scope.kind == "function" else "a NameError"
                yield Found(read.node, f"'{read.name}' is read before it gets a value: {kind} here")


def misspelt(view: View) -> Iterator[Found]:
    """Yield attributes of torch.distributed, and variables of the environment, that are nearly right."""
    module = view.module
    of_torch = {name for name, imported in module.imports.items() if imported.full.startswith("torch")}
    for scope in view.scopes if "distributed" in module.text else ():
        for node, _ in scope.reads:
            if node.attr in OF_DISTRIBUTED or head(node) not in of_torch:
                continue
            known = view.names.qualify(node.value, scope) == "torch.distributed"
            for meant in get_close_matches(node.attr, OF_DISTRIBUTED, 1, ALIKE) if known else ():
                yield Found(node, f"torch.distributed has no '{node.attr}', only '{meant}': an AttributeError here")
    for scope in view.scopes if "environ" in module.text else ():
        for stmt in scope.stmts:
            for target in stmt.targets if isinstance(stmt, ast.Assign) else ():
                key = (
                    constant(target.slice) if isinstance(target, ast.Subscript) and last(target) == "environ" else None
                )
                for meant in get_close_matches(key, VARIABLES, 1, ALIKE) if isinstance(key, str) else ():
                    if key not in VARIABLES:
                        yield Found(target, f"nothing reads '{key}': '{meant}' is meant, and keeps its value")


def not_there(view: View) -> Iterator[Found]:
    """Yield what is imported from a file of the project that defines no such name."""
    module = view.module
    wanted = [each for each in module.imported if each.name and each.name != "*"]
    missing = {(each.module, each.level, each.name) for each in wanted if lacks(view, module, each)}
    for scope in view.scopes if missing else ():
        for stmt in scope.stmts:
            if isinstance(stmt, ast.ImportFrom) and certain(view, stmt, scope):
                for alias in stmt.names:
                    if (stmt.module or "", stmt.level, alias.name) in missing:
                        where = "." * stmt.level + (stmt.module or "")
                        level = Severity.HINT if is_demonstration(view, stmt, scope) else None
                        yield Found(stmt, f"'{where}' defines no '{alias.name}': an ImportError here", level)
                        break


def certain(view: View, stmt: ast.stmt, scope: Scope) -> bool:
    """Check whether a run comes to an import, and nothing around it is there for one that fails."""
    tried = any(isinstance(node, ast.Try) for node, _ in above(stmt, scope.module))
    typing = any("TYPE_CHECKING" in ast.unparse(guard.test) for guard in guards(stmt, scope.module))
    return not tried and not typing and ends_run(view, stmt, scope)


@kept
def lacks(view: View, module: Module, imported: Imported) -> bool:
    """Check whether the one file that an import can mean gives no such name."""
    paths, folder, level = view.project.paths, module.folder, imported.level
    first = imported.module.partition(".")[0]
    if (not level and first in EXTERNAL | KNOWN) or paths.where(folder, imported.full, level) is not None:
        return False
    meant = paths.all_meant(folder, imported.module, level)
    if len(meant) != 1 or not (level or starts_there(view, module, imported, meant[0])):
        return False
    target = view.project.load(meant[0])
    if target is None or target is module or not target.whole or not readable(target.top):
        return False
    if any(word in target.text for word in ("__getattr__", "sys.modules", "setattr", "__dict__")):
        return False
    known = file_names(view, target)
    return known is not None and imported.name not in known and not is_folder(target, imported.name)


def starts_there(view: View, module: Module, imported: Imported, path: str) -> bool:
    """Check whether a file lies where Python looks first: beside a program that comes to the import, or in the root."""
    if ELSEWHERE.search(module.text) is not None:
        return False
    paths = view.project.paths
    starts = {*(user.folder for user in view.project.users(module)), paths.root(module.folder)}
    parts = imported.module.split(".")
    return any(paths.real(path) == paths.real(each) for start in starts for each in paths.at(start, parts))


def is_folder(target: Module, name: str) -> bool:
    """Check whether a package holds a folder of a name, or something that is built there."""
    init = os.path.basename(target.path) == "__init__.py"
    return init and any(each.partition(".")[0] == name for each in os.listdir(target.folder))


RULE = Rule(
    code="LS060",
    name="defined nowhere",
    what="A name, an option or an attribute is read, or a name imported, that nothing defines.",
    why="The run ends there, often after hours, where the last epoch is saved or the scores are shown.",
    bad="""
import argparse
import torch

def save(model, args):
    torch.save(model.state_dict(), f"{args.name}.pt")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    save(torch.nn.Linear(2, 2), parser.parse_args())
""",
    good="""
import argparse
import torch

def save(model, args):
    torch.save(model.state_dict(), f"{args.name}.pt")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--name", default="last")
    save(torch.nn.Linear(2, 2), parser.parse_args())
""",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    check=check,
    fix="unsafe",
    remedy="Define it, or correct its name",
    note=(
        "Names are asked for in code that something in the project names; options where the whole parser of argparse "
        "is in sight and no program adds or sets one of that name. Files with star imports out of sight, `exec` or "
        "`globals()`, notebooks, and reads under a handler that may hear of it are left alone."
    ),
)
