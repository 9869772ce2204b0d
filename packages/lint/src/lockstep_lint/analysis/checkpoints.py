"""Say what the checkpoints of a program hold, and which keys it reads from those that it loads."""

import ast
import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.context import Guard, above, guards
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import (
    Words,
    argument,
    constant,
    dotted,
    idents,
    keyword,
    last,
    own_expressions,
    strings,
    walk,
)
from lockstep_lint.analysis.view import Analysis, View

__all__ = [
    "OTHERS",
    "RESUMES",
    "Read",
    "Saved",
    "file_name",
    "fits",
    "handled",
    "loaded",
    "loads",
    "of_program",
    "path_words",
    "reads",
    "saves",
]

# What says that a run goes on from its own file, and what says that the file is somebody else's.
RESUMES = Words(r"resum|^(start|begin|init|initial)_?epoch$|^continue_?(train|from|run)|^restart", re.IGNORECASE)
OTHERS = Words(
    r"pre_?train|fine_?tun|backbone|teacher|evaluat|^eval$|^test|infer|warm_?start|weights?(_only)?$|transfer|^init$|^jit$",
    re.IGNORECASE,
)
# What may write a checkpoint out of sight, and what only looks at a dictionary.
WRITES = Words(r"^_*(save|dump|write|store)|_save$|(checkpoint|ckpt)$", re.IGNORECASE)
HOOKS = Words(r"^_*(on|before|pre|after|post)_", re.IGNORECASE)
LOOKS = ("save", "print", "len", "log", "info", "debug", "deepcopy", "list", "sorted", "keys", "items", "str", "dict")
# A line in which a string may be a key, or be so on the next line.
KEYED = re.compile(r"""\[[\s(]*(\w{0,2}["']|#|\\?$)""")
MAX_ORIGINS = 6
# How deep the parts of a path are spelled out.
MAX_PARTS = 20


@dataclass(eq=False, slots=True)
class Saved:
    """A file that `torch.save` writes: its keys with their values, "" for a bare state; `known` if all is known."""

    site: Site
    known: bool = True
    values: dict[str, list[tuple[ast.expr, Scope]]] = field(default_factory=dict)

    @property
    def keys(self) -> set[str]:
        """The keys of a table; none of a bare state."""
        return self.values.keys() - {""}


@dataclass(eq=False, slots=True)
class Read:
    """A key that is read from what `torch.load` gave."""

    node: ast.Subscript
    key: str
    stmt: ast.stmt
    scope: Scope
    loads: tuple[tuple[ast.Call, Scope], ...]


@kept
def saves(analysis: Analysis, module: Module) -> tuple[Saved, ...]:
    """Return what the programs of a file write by `torch.save`."""
    sites = [site for member in analysis.project.family(module) for site in member.sites("save")]
    written = (site for site in sites if analysis.names.qualify(site.call.func, site.scope) == "torch.save")
    found = [content(analysis, site) for site in written]
    if found:
        members = analysis.project.family(module)
        found += [Saved(site, known=False) for member in members for site in hidden(analysis, member)]
    return tuple(found)


@kept
def hidden(analysis: Analysis, module: Module) -> tuple[Site, ...]:
    """The calls of a file that may write a checkpoint in another way: out of sight, and handed a table of states."""
    if "state_dict" not in module.text:
        return ()
    return tuple(
        site
        for site in module.sites()
        if analysis.names.qualify(site.call.func, site.scope) != "torch.save"
        and any(holds_states(analysis, given, site) for given in (*site.call.args, *map(value_of, site.call.keywords)))
        and (site.name == "save" or site.name not in LOOKS)
        and analysis.calls.target(site.call, site.scope) is None
    )


def value_of(item: ast.keyword) -> ast.expr:
    """Return the value of a keyword."""
    return item.value


def holds_states(analysis: Analysis, node: ast.expr, site: Site) -> bool:
    """Check whether an argument is a table that is written out, with the state of an object in it."""
    if not isinstance(node, ast.Dict | ast.Name | ast.Attribute):
        return False
    made = [node] if isinstance(node, ast.Dict) else [origin.node for origin in analysis.origins.of(node, site.scope)]
    tables = [value for each in made if isinstance(each, ast.Dict) for value in each.values]
    return any(isinstance(value, ast.Call) and last(value) == "state_dict" for value in tables)


@kept
def content(analysis: Analysis, site: Site) -> Saved:
    """Return what one call of `torch.save` writes."""
    saved = Saved(site)
    given = argument(site.call, 0, "obj")
    made = analysis.origins.of(given, site.scope) if given is not None else []
    saved.known = 0 < len(made) <= MAX_ORIGINS and all(
        take(saved, origin.node, origin.scope, analysis) for origin in made
    )
    tables = {(dotted(given), site.scope)} if dotted(given) is not None else set()
    tables |= {(name, origin.scope) for origin in made for name in names_of(origin.node, origin.scope)}
    for name, scope in tables:
        saved.known &= grown(saved, name or "", scope, analysis)
    return saved


def take(saved: Saved, node: ast.expr, scope: Scope, analysis: Analysis) -> bool:
    """Add what an expression makes to a file's keys; False where it is not known."""
    if isinstance(node, ast.Dict):
        names = [constant(key) for key in node.keys]
        put(saved, [(str(name), value) for name, value in zip(names, node.values, strict=True)], scope)
        return all(isinstance(name, str) for name in names)
    if not isinstance(node, ast.Call):
        return False
    if last(node) in ("dict", "OrderedDict") and not node.args:
        pairs = [(item.arg or "", item.value) for item in node.keywords]
        put(saved, pairs, scope)
        return all(key for key, _ in pairs)
    if last(node) == "state_dict" and isinstance(node.func, ast.Attribute):
        put(saved, [("", node)], scope)
        return analysis.kinds.is_model(node.func.value, scope) or ".module." in ast.unparse(node)
    return False


def put(saved: Saved, pairs: list[tuple[str, ast.expr]], scope: Scope) -> None:
    """Add keys with their values, of one function, to what a file holds."""
    for key, value in pairs:
        saved.values.setdefault(key, []).append((value, scope))


def names_of(node: ast.expr, scope: Scope) -> Iterator[str]:
    """Yield the names that a function gives a value that it makes."""
    for key, binds in scope.binds.items():
        if any(bind.value is node for bind in binds):
            yield key


def grown(saved: Saved, name: str, scope: Scope, analysis: Analysis) -> bool:
    """Add what is put into a table later, in its function or the class; False where that is not known."""
    homes = scope.owner.defs.values() if name.startswith("self.") and scope.owner is not None else [scope]
    whole = True
    for home in homes:
        for stmt in home.stmts:
            target = stmt.targets[0] if isinstance(stmt, ast.Assign) else None
            if isinstance(stmt, ast.Assign) and isinstance(target, ast.Subscript) and dotted(target.value) == name:
                key = constant(target.slice)
                whole &= isinstance(key, str)
                put(saved, [(str(key), stmt.value)], home)
            whole &= not (isinstance(stmt, ast.AugAssign) and dotted(stmt.target) == name)
        for site in home.sites:
            whole &= taken_in(saved, site, name, analysis)
    return whole


def taken_in(saved: Saved, site: Site, name: str, analysis: Analysis) -> bool:
    """Add what a call puts into a table; False where it may put more into it."""
    call = site.call
    if dotted(site.receiver) == name and site.name in ("update", "setdefault"):
        key = constant(next(iter(call.args), None)) if site.name == "setdefault" else None
        tables = [each for each in call.args if isinstance(each, ast.Dict)] if site.name == "update" else []
        for table in tables:
            names = [str(constant(each)) for each in table.keys]
            put(saved, list(zip(names, table.values, strict=True)), site.scope)
        put(saved, [(item.arg or "", item.value) for item in call.keywords], site.scope)
        put(saved, [(key, call.args[-1])] if isinstance(key, str) else [], site.scope)
        return bool(key) or (len(tables) == len(call.args) and not any(item.arg is None for item in call.keywords))
    handed = any(dotted(each) == name for each in (*call.args, *(item.value for item in call.keywords)))
    if not handed or site.name in LOOKS:
        return True
    function = analysis.calls.target(site.call, site.scope)
    if function is not None and any(fills(function, param) for param in function.params):
        return False
    return bool(WRITES.search(site.name)) and not HOOKS.search(site.name)


@kept
def fills(function: Scope, name: str) -> bool:
    """Check whether a function puts anything into a table that it is handed."""
    stored = (each for stmt in function.stmts if isinstance(stmt, ast.Assign | ast.AugAssign) for each in targets(stmt))
    by_key = any(dotted(each.value if isinstance(each, ast.Subscript) else each) == name for each in stored)
    return by_key or any(
        dotted(site.receiver) == name for site in function.sites if site.name in ("update", "setdefault")
    )


def targets(stmt: ast.Assign | ast.AugAssign) -> list[ast.expr]:
    """Return what an assignment gives a value."""
    return stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]


@kept
def loads(analysis: Analysis, module: Module) -> tuple[Site, ...]:
    """Return the calls of `torch.load` in the programs of a file."""
    sites = (site for member in analysis.project.family(module) for site in member.sites("load"))
    return tuple(site for site in sites if analysis.names.qualify(site.call.func, site.scope) == "torch.load")


def reads(view: View) -> Iterator[Read]:
    """Yield the keys that a file reads from what the programs load, in order."""
    lines = [number for number, line in enumerate(view.module.source.lines, 1) if KEYED.search(line)]
    for scope in view.scopes if lines else ():
        for stmt in scope.stmts:
            first = bisect.bisect_left(lines, stmt.lineno)
            keyed = first < len(lines) and lines[first] <= (stmt.end_lineno or stmt.lineno)
            for part in own_expressions(stmt) if keyed else ():
                for node in walk(part):
                    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                        key = constant(node.slice)
                        made = loaded(view, node.value, scope) if isinstance(key, str) else ()
                        if made:
                            yield Read(node, str(key), stmt, scope, made)


def loaded(view: View, node: ast.expr, scope: Scope) -> tuple[tuple[ast.Call, Scope], ...]:
    """Return the calls of `torch.load` that a value certainly comes from."""
    if dotted(node) is None and not isinstance(node, ast.Call):
        return ()
    made = view.origins.of(node, scope)
    calls = [(o.call, o.scope) for o in made if o.call is not None and last(o.call) == "load"]
    if not calls or len(calls) < len(made):
        return ()
    return tuple(calls) if all(view.names.qualify(c.func, s) == "torch.load" for c, s in calls) else ()


def fits(view: View, read: Read) -> bool:
    """Check whether a key is certainly read: nothing asks whether it is there, and no exception is handled."""
    module = read.scope.module
    if handled(read.stmt, read.scope):
        return False
    asks = re.compile(rf"['\"]{re.escape(read.key)}['\"]\s+(not\s+)?in\b|in\s+\w*keys|hasattr|isinstance")
    here = [ast.unparse(guard.test) for guard in guards(read.stmt, module)]
    here += [ast.unparse(node.test) for node in walk(read.stmt) if isinstance(node, ast.IfExp | ast.If)]
    table = dotted(read.node.value) or ""
    asked = any(asks.search(test) or re.search(rf"\bin {re.escape(table)}\b", test) for test in here)
    return not asked and not re.search(rf"['\"]{re.escape(read.key)}['\"]\s+(not\s+)?in\b", module.text)


def handled(stmt: ast.stmt, scope: Scope) -> bool:
    """Check whether an exception of a statement is handled."""
    return any(isinstance(node, ast.Try) for node, _ in above(stmt, scope.module))


def tests_of(made: tuple[tuple[ast.Call, Scope], ...], places: list[tuple[ast.stmt, Scope]]) -> list[Guard]:
    """Return the tests around the calls that load a file, and around what is done with it."""
    loads = [(site.stmt, scope) for call, scope in made for site in scope.sites if site.call is call]
    return [guard for stmt, scope in (*loads, *places) for guard in guards(stmt, scope.module)]


def affirmed(test: ast.expr, when: bool) -> Iterator[ast.expr]:
    """Yield the parts of a test that hold, or whose value is there, where it comes out `when`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from affirmed(test.operand, not when)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from affirmed(value, when)
    elif isinstance(test, ast.Compare):
        empty = isinstance(test.comparators[0], ast.Constant) and not test.comparators[0].value
        denies = isinstance(test.ops[0], ast.NotIn) or (empty and isinstance(test.ops[0], ast.Is | ast.Eq))
        yield from (test,) if when is not denies else ()
    elif when:
        yield test


def path_words(view: View, path: ast.expr | None, scope: Scope) -> Iterator[str]:
    """Yield the words of a path, and of what its names were given."""
    if path is None:
        return
    for origin in view.origins.of(path, scope):
        yield from (*idents(origin.node), *strings(origin.node))
    yield from (*idents(path), *strings(path))
    for part in walk(path):
        key = dotted(part)
        binds = scope.binds.get(key, []) if key is not None else []
        for bind in binds[:2]:
            yield from (*idents(bind.value), *strings(bind.value)) if bind.value is not None else ()


def file_name(view: View, path: ast.expr | None, scope: Scope) -> frozenset[str]:
    """The names of the files that a path may stand for, with "{}" for what is not written out; "" where none is."""
    if path is None:
        return frozenset({""})
    return frozenset(spelled(origin.node).rpartition("/")[2] for origin in view.origins.of(path, scope))


def spelled(node: ast.expr, depth: int = 0) -> str:
    """A path's text, with "{}" for each part that is not written out."""
    if isinstance(node, ast.Constant) or depth > MAX_PARTS:
        return str(node.value) if isinstance(node, ast.Constant) else "{}"
    if isinstance(node, ast.JoinedStr):
        return "".join(spelled(part, depth + 1) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Div):
        between = "/" if isinstance(node.op, ast.Div) else ""
        return f"{spelled(node.left, depth + 1)}{between}{spelled(node.right, depth + 1)}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(constant(node.left), str):
        return re.sub(r"%[\d.]*[sdfrg]", "{}", str(constant(node.left)))
    if isinstance(node, ast.Call) and last(node) == "join" and node.args:
        return "/".join(spelled(part, depth + 1) for part in node.args)
    if isinstance(node, ast.Call) and last(node) == "format" and isinstance(node.func, ast.Attribute):
        return re.sub(r"\{[^}]*\}", "{}", spelled(node.func.value, depth + 1))
    if isinstance(node, ast.Call) and last(node) in ("str", "Path") and len(node.args) == 1:
        return spelled(node.args[0], depth + 1)
    return "{}"


def of_program(
    view: View,
    made: tuple[tuple[ast.Call, Scope], ...],
    places: list[tuple[ast.stmt, Scope]],
    written: tuple[Saved, ...],
    known: bool,
) -> list[Saved]:
    """The saves that wrote what is loaded: those of its file's name, or all where a run is `known` to be resumed."""
    paths = [(next(iter(call.args), None) or keyword(call, "f"), scope) for call, scope in made]
    words = [word for path, scope in paths for word in path_words(view, path, scope)]
    tests = tests_of(made, places)
    around = [word for guard in tests for word in (*idents(guard.test), *strings(guard.test))]
    if any(map(OTHERS.search, (*words, *around))):
        return []
    names = {name for call, scope in made for name in file_name(view, next(iter(call.args), None), scope)}
    same = [saved for saved in written if file_name(view, argument(saved.site.call, 1, "f"), saved.site.scope) == names]
    if same and all(re.search(r"[a-zA-Z]{3}.*\.\w+$", name) for name in names):
        return same if all(saved.known for saved in same) else []
    parts = [part for guard in tests for part in affirmed(guard.test, guard.when)]
    words += [word for part in parts for word in (*idents(part), *strings(part))]
    resumed = known and any(map(RESUMES.search, words))
    return list(written) if resumed and all(saved.known for saved in written) else []
