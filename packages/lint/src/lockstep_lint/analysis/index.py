"""Index a file: scopes, bindings, calls, and the parents of every statement."""

import ast
import functools
import os
import re
import string
from ast import Attribute, Call, Dict, Name, NamedExpr
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lockstep_lint.analysis.nodes import Words, dotted, last, targets, walk
from lockstep_lint.analysis.source import Source

__all__ = [
    "DEFINITIONS",
    "FORKS",
    "IMPORTS",
    "Bind",
    "Imported",
    "Module",
    "Scope",
    "Site",
    "bare",
    "index",
    "strip_comments",
]


# A string or a comment, whichever begins first: so that a "#" in a string is no comment.
TOKENS = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*', re.DOTALL
)


def strip_comments(text: str) -> str:
    """Return the text without its comments; its lines stay where they are."""
    if "#" not in text:
        return text
    return TOKENS.sub(lambda match: "" if match[0][0] == "#" else match[0], text)


def bare(text: str) -> str:
    """Return the text with comments taken out and strings emptied; their line ends stay."""
    return TOKENS.sub(lambda match: "\n" * match[0].count("\n") if match[0][0] == "#" else _empty(match[0]), text)


def _empty(string: str) -> str:
    quote = string[:3] if string[:3] in ('"""', "'''") else string[0]
    return quote + "\n" * string.count("\n") * (len(quote) == 3) + quote


def blank_lines(text: str, statements: Iterable[ast.stmt]) -> str:
    """Return the text with the statements' lines emptied, where nothing else stands on them."""
    lines = text.split("\n")
    for stmt in statements:
        if not lines[stmt.lineno - 1][: stmt.col_offset].strip():
            for line in range(stmt.lineno - 1, min(stmt.end_lineno or stmt.lineno, len(lines))):
                lines[line] = ""
    return "\n".join(lines)


FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
TESTED = (ast.If, ast.While)
# Expressions whose parts are not all worked out, once, from left to right.
FORKS = frozenset({ast.BoolOp, ast.IfExp, ast.Lambda, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp})
# Makes blanks of all that is part of no word.
BLANKS = str.maketrans(dict.fromkeys(string.punctuation.replace("_", ""), " "))
# A file that binds or calls more than this is data in Python's clothes.
MAX_NODES = 150_000


# Of these two there are thousands: frozen ones would take three times as long to make.
@dataclass(eq=False, slots=True)
class Bind:
    """A name that gets a value. `how` is assign, aug, for, with or del; `path` its place in a tuple target."""

    key: str
    value: ast.expr | None
    path: tuple[int, ...]
    stmt: ast.stmt
    how: str


@dataclass(eq=False, slots=True)
class Site:
    """A call, with its statement and scope. `root` is the complete expression that contains it."""

    call: ast.Call
    stmt: ast.stmt
    scope: "Scope"
    name: str
    root: ast.expr

    @property
    def line(self) -> int:
        """Position of the call."""
        return self.call.lineno

    @property
    def receiver(self) -> ast.expr | None:
        """The object whose method is called."""
        return self.call.func.value if isinstance(self.call.func, ast.Attribute) else None

    @property
    def module(self) -> "Module":
        """The file of the call."""
        return self.scope.module


@dataclass(eq=False)
class Scope:
    """A module, class or function, with its own bindings, calls and returns."""

    kind: str
    name: str
    node: ast.AST
    parent: "Scope | None"
    module: "Module"
    binds: dict[str, list[Bind]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    stmts: list[ast.stmt] = field(default_factory=list)
    reads: list[tuple[ast.Attribute, ast.stmt]] = field(default_factory=list)
    defs: dict[str, "Scope"] = field(default_factory=dict)
    globals: set[str] = field(default_factory=set)

    @functools.cached_property
    def params(self) -> list[str]:
        """The names of a function's parameters, in order."""
        if not isinstance(self.node, FUNCTIONS):
            return []
        args = self.node.args
        return [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]

    @property
    def owner(self) -> "Scope | None":
        """The class whose method this scope is, or is in."""
        scope = self.parent
        while scope is not None and scope.kind == "function":
            scope = scope.parent
        return scope if scope is not None and scope.kind == "class" else None

    @property
    def decorators(self) -> list[ast.expr]:
        """The decorators of a function or class."""
        return getattr(self.node, "decorator_list", [])

    def named(self, name: str) -> list[Site]:
        """Return the calls in the scope whose last name is `name`."""
        return self.by_name.get(name, [])

    @functools.cached_property
    def by_name(self) -> dict[str, list[Site]]:
        """The scope's calls by their last names."""
        return group(self.sites)

    def bound(self, stmt: ast.stmt) -> list[Bind]:
        """Return the bindings of a statement of the scope."""
        return self.by_stmt.get(stmt, [])

    @functools.cached_property
    def by_stmt(self) -> dict[ast.stmt, list[Bind]]:
        """The scope's bindings by their statements."""
        table: dict[ast.stmt, list[Bind]] = {}
        for binds in self.binds.values():
            for bind in binds:
                table.setdefault(bind.stmt, []).append(bind)
        return table

    def returns(self) -> Iterator[ast.expr]:
        """Yield the expressions that a function returns."""
        for stmt in self.stmts:
            if isinstance(stmt, ast.Return) and stmt.value is not None:
                yield stmt.value


@dataclass(frozen=True)
class Imported:
    """An import: the module, and the name imported from it ("" for the module itself)."""

    module: str
    name: str
    level: int
    line: int

    @property
    def full(self) -> str:
        """The dotted name that the import means."""
        return f"{self.module}.{self.name}" if self.name and self.module else self.module or self.name


@dataclass(eq=False)
class Module:
    """The tables of one file."""

    source: Source
    top: Scope = field(init=False)
    scopes: list[Scope] = field(default_factory=list)
    imports: dict[str, Imported] = field(default_factory=dict)
    stars: list[Imported] = field(default_factory=list)
    # The statements that name something in what they evaluate themselves, by what they name.
    named: dict[str, list[tuple[ast.stmt, Scope]]] = field(default_factory=dict)
    imported: list[Imported] = field(default_factory=list)
    up: dict[ast.stmt, tuple[ast.stmt, str]] = field(default_factory=dict)
    # The dictionaries that are written out.
    dicts: list[ast.Dict] = field(default_factory=list)
    # The statements' expressions some parts of which are not worked out once, from left to right.
    forked: set[ast.expr] = field(default_factory=set)
    whole: bool = True

    @property
    def path(self) -> str:
        """The file's path, as it was given."""
        return self.source.path

    @functools.cached_property
    def folder(self) -> str:
        """The file's folder."""
        return os.path.dirname(self.path) or "."

    @functools.cached_property
    def text(self) -> str:
        """The file's text without comments and docstrings, which say nothing of what it does."""
        prose = [s for scope in self.scopes for s in scope.stmts if isinstance(s, ast.Expr) and _is_string(s.value)]
        return strip_comments(blank_lines(self.source.text, prose) if prose else self.source.text)

    @functools.cached_property
    def lines(self) -> list[str]:
        """The lines of `text`."""
        return self.text.split("\n")

    @functools.cached_property
    def bare(self) -> str:
        """The file's text without strings and imports too: what it names beyond importing it."""
        imports = [s for scope in self.scopes for s in scope.stmts if isinstance(s, IMPORTS)]
        return bare(blank_lines(self.text, imports))

    @functools.cached_property
    def words(self) -> Counter[str]:
        """Count the words of `bare`."""
        return Counter(self.bare.translate(BLANKS).split())

    def names(self, wanted: Words) -> bool:
        """Check whether any word of `bare` is wanted, faster than a search of the text."""
        return any(map(wanted.search, self.words))

    def sites(self, *names: str) -> Iterator[Site]:
        """Yield every call in the file, or those whose last name is one of `names`."""
        if not names:
            for scope in self.scopes:
                yield from scope.sites
        for name in names:
            yield from self.by_name.get(name, [])

    @functools.cached_property
    def by_name(self) -> dict[str, list[Site]]:
        """The file's calls by their last names."""
        return group(self.sites())

    @functools.cached_property
    def own_names(self) -> frozenset[str]:
        """The first part of every name that the file binds other than by an import."""
        binds = {key.partition(".")[0] for scope in self.scopes for key in scope.binds}
        return frozenset(binds.union(*(scope.defs for scope in self.scopes), *(scope.params for scope in self.scopes)))

    @functools.cached_property
    def renames(self) -> frozenset[str]:
        """The names that the file assigns another name to (`Wrapper = DDP`)."""
        binds = (bind for scope in self.scopes for found in scope.binds.values() for bind in found)
        return frozenset(bind.key for bind in binds if dotted(bind.value) is not None)

    @functools.cached_property
    def members(self) -> frozenset[str]:
        """The last part of every name that the file assigns or defines."""
        binds = {key.rpartition(".")[2] for scope in self.scopes for key in scope.binds}
        return frozenset(binds.union(*(scope.defs for scope in self.scopes)))

    @functools.cached_property
    def methods(self) -> frozenset[str]:
        """The names of all methods of the file's classes."""
        return frozenset(name for scope in self.scopes if scope.kind == "class" for name in scope.defs)

    @property
    def is_script(self) -> bool:
        """Whether the file says that it can be run."""
        return "__main__" in self.text or self.path.endswith(".ipynb")


def never_run(stmt: ast.stmt) -> str:
    """Return the block of a statement that never runs; "" for none."""
    if not isinstance(stmt, TESTED) or not isinstance(stmt.test, ast.Constant):
        return ""
    return "body" if not stmt.test.value else "orelse"


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def group(sites: Iterable[Site]) -> dict[str, list[Site]]:
    """Group calls by their last names."""
    table: dict[str, list[Site]] = {}
    for site in sites:
        table.setdefault(site.name, []).append(site)
    return table


def index(source: Source) -> Module:
    """Build the tables of a parsed file."""
    assert source.tree is not None
    module = Module(source)
    module.top = Scope("module", "", source.tree, None, module)
    module.scopes.append(module.top)
    _Indexer(module).run(source.tree.body)
    return module


class _Indexer:
    """Fills a module's tables in one pass, with an explicit stack instead of recursion."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.stack: list[tuple[ast.stmt, ast.stmt | None, str, Scope]] = []
        self.budget = MAX_NODES

    def run(self, body: list[ast.stmt]) -> None:
        self.push(body, None, "body", self.module.top)
        while self.stack and self.budget > 0:
            stmt, parent, place, scope = self.stack.pop()
            if parent is not None:
                self.module.up[stmt] = (parent, place)
            scope.stmts.append(stmt)
            if isinstance(stmt, DEFINITIONS):
                self.define(stmt, scope)
            else:
                self.statement(stmt, scope)
        self.module.whole = self.budget > 0

    def push(self, body: list[ast.stmt], parent: ast.stmt | None, place: str, scope: Scope) -> None:
        self.stack.extend((stmt, parent, place, scope) for stmt in reversed(body))

    def define(self, node: FunctionNode | ast.ClassDef, scope: Scope) -> None:
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        inner = Scope(kind, node.name, node, scope, self.module)
        scope.defs[node.name] = inner
        self.module.scopes.append(inner)
        for expression in node.decorator_list:
            self.expression(expression, node, scope)
        if isinstance(node, FUNCTIONS):
            for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
                self.expression(default, node, scope)
        self.push(node.body, None, "body", inner)

    def statement(self, stmt: ast.stmt, scope: Scope) -> None:
        """Record what a statement binds and calls, and queue its blocks, except dead code."""
        if isinstance(stmt, ast.Expr):  # it binds nothing
            self.expression(stmt.value, stmt, scope)
            return
        self.bind(stmt, scope)
        if isinstance(stmt, ast.Assign):  # two thirds of all statements are of these two kinds
            for part in (*stmt.targets, stmt.value):
                self.expression(part, stmt, scope)
            return
        idle = never_run(stmt)
        blocks: list[tuple[list[ast.stmt], str]] = []
        for name in stmt._fields:
            value = getattr(stmt, name, None)
            if isinstance(value, ast.expr):
                self.expression(value, stmt, scope)
            elif isinstance(value, list) and value:
                self.listed(name, value, stmt, scope, blocks)
        for body, place in reversed(blocks):
            if place != idle:
                self.push(body, stmt, place, scope)

    def listed(
        self, name: str, value: list[ast.AST], stmt: ast.stmt, scope: Scope, blocks: list[tuple[list[ast.stmt], str]]
    ) -> None:
        if isinstance(value[0], ast.stmt):
            blocks.append((value, name))  # type: ignore[arg-type]
            return
        for item in value:
            if isinstance(item, ast.expr):
                self.expression(item, stmt, scope)
            elif isinstance(item, ast.withitem):
                self.expression(item.context_expr, stmt, scope)
            elif isinstance(item, ast.ExceptHandler):
                blocks.append((item.body, "handlers"))
            elif isinstance(item, ast.match_case):
                blocks.append((item.body, "cases"))

    def expression(self, root: ast.expr, stmt: ast.stmt, scope: Scope) -> None:
        module, named = self.module, self.module.named
        if root.__class__ is Name:  # every third expression: a walk would cost ten times as much
            self.budget -= 1
            named.setdefault(root.id, []).append((stmt, scope))
            return
        nodes = list(walk(root))
        self.budget -= len(nodes)
        for node in nodes:  # all nodes of all files: `isinstance` would cost three times as much
            kind = node.__class__
            if kind is Name:
                named.setdefault(node.id, []).append((stmt, scope))  # type: ignore[attr-defined]
            elif kind is Attribute:
                scope.reads.append((node, stmt))  # type: ignore[arg-type]
            elif kind is Call:
                scope.sites.append(Site(node, stmt, scope, last(node.func), root))  # type: ignore[arg-type, attr-defined]
            elif kind is NamedExpr:
                self.add(node.target, node.value, stmt, scope, "assign")  # type: ignore[attr-defined]
            elif kind is Dict:
                module.dicts.append(node)  # type: ignore[arg-type]
            elif kind in FORKS:
                module.forked.add(root)

    def bind(self, stmt: ast.stmt, scope: Scope) -> None:
        if isinstance(stmt, ast.Assign):
            for target in stmt.targets:
                self.add(target, stmt.value, stmt, scope, "assign")
        elif isinstance(stmt, ast.AnnAssign):
            self.add(stmt.target, stmt.value, stmt, scope, "assign")
        elif isinstance(stmt, ast.AugAssign):
            self.add(stmt.target, stmt.value, stmt, scope, "aug")
        elif isinstance(stmt, (ast.For, ast.AsyncFor)):
            self.add(stmt.target, stmt.iter, stmt, scope, "for")
        elif isinstance(stmt, (ast.With, ast.AsyncWith)):
            for item in stmt.items:
                if item.optional_vars is not None:
                    self.add(item.optional_vars, item.context_expr, stmt, scope, "with")
        elif isinstance(stmt, IMPORTS):
            self.imports(stmt)
        elif isinstance(stmt, (ast.Global, ast.Nonlocal)):
            scope.globals.update(stmt.names)

    def add(self, target: ast.expr, value: ast.expr | None, stmt: ast.stmt, scope: Scope, how: str) -> None:
        for key, path in targets(target):
            holder = self.module.top if key in scope.globals else scope
            holder.binds.setdefault(key, []).append(Bind(key, value, path, stmt, how))

    def imports(self, stmt: ast.Import | ast.ImportFrom) -> None:
        table = self.module.imports
        for alias in stmt.names:
            if isinstance(stmt, ast.Import):
                found = Imported(alias.name, "", 0, stmt.lineno)
                name = alias.asname or alias.name.split(".")[0]
                bound = found if alias.asname else Imported(name, "", 0, stmt.lineno)
            else:
                found = bound = Imported(stmt.module or "", alias.name, stmt.level, stmt.lineno)
                name = alias.asname or alias.name
            self.module.imported.append(found)
            if alias.name == "*":
                self.module.stars.append(Imported(stmt.module or "", "", stmt.level, stmt.lineno))  # type: ignore[union-attr]
            else:
                table.setdefault(name, bound)  # of two alternatives in a `try`, the preferred one comes first
