"""The wrappers that run a model on several devices: DDP, DataParallel, FSDP."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.names import Names
from lockstep_lint.analysis.nodes import constant, dotted, keyword, last, walk
from lockstep_lint.analysis.origins import Origin, Origins

__all__ = ["Wrappers"]

DDP = "DistributedDataParallel"


class Wrappers:
    """Recognises wrappers, and the values that may hold one."""

    def __init__(self, names: Names, origins: Origins) -> None:
        self.names = names
        self.origins = origins

    @kept
    def made(self, module: Module) -> tuple[tuple[str, Site], ...]:
        """The calls of a file that wrap a model, each with its wrapper."""
        if "Parallel" not in module.text and "DDP" not in module.text:
            return ()
        return tuple((kind, site) for site in module.sites() if (kind := self.wrapper(site)))

    @kept
    def kinds(self, module: Module) -> frozenset[str]:
        """The wrappers that a file's programs put around a model."""
        return frozenset(kind for member in self.names.project.family(module) for kind, _ in self.made(member))

    def wrapper(self, site: Site) -> str:
        """ "ddp", "dp" or "fsdp" for a call that wraps a model, else ""."""
        return self.of_call(site.call, site.scope)

    def of_call(self, call: ast.Call, scope: Scope) -> str:
        """The wrapper that a call makes: of torch, or of a class of the project that derives from one of torch's."""
        if isinstance(call.func, ast.Attribute) and not call.func.attr.endswith(("Parallel", "DDP")):
            return ""  # a full name ends as an attribute does; only a plain name may stand for another
        full = self.names.qualify(call.func, scope)
        if not (full or last(call.func)).endswith(("Parallel", "DDP")):
            return ""
        kind = named(full)
        if not kind and not full.startswith("torch."):
            owner = self.names.definition(call.func, scope)
            bases = self.names.bases_of(owner) if owner is not None and owner.kind == "class" else iter(())
            kind = next(filter(None, map(named, bases)), "")
        return kind

    def wrapped(self, node: ast.expr, scope: Scope) -> Iterator[tuple[str, ast.Call, Origin]]:
        """The wrappers that a value may come from."""
        for origin in self.origins.of(node, scope):
            call = origin.call
            if call is not None:
                kind = self.of_call(call, origin.scope)
                if kind:
                    yield kind, call, origin

    def put_on(self, node: ast.expr, scope: Scope) -> Iterator[str]:
        """The wrappers that code of other places puts on an attribute of a method's object (`agent.net = DDP(...)`)."""
        attribute = node.attr if isinstance(node, ast.Attribute) and dotted(node) == f"self.{node.attr}" else ""
        for member in self.names.project.family(scope.module) if attribute and scope.owner is not None else ():
            for kind, site in self.made(member):
                for target in site.stmt.targets if isinstance(site.stmt, ast.Assign) else ():
                    if (
                        isinstance(target, ast.Attribute)
                        and target.attr == attribute
                        and last(target.value) != "self"
                        and self.origins.calls.class_of(target.value, site.scope) is scope.owner
                    ):
                        yield kind

    def inner(self, call: ast.Call) -> ast.expr | None:
        """The model that a wrapper call wraps."""
        return call.args[0] if call.args else keyword(call, "module")

    def held(self, node: ast.expr, stmt: ast.stmt, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """What an item of a list or a dictionary may be: `nets[name]`, or the variable of a loop or a comprehension."""
        named = constant(node.slice) if isinstance(node, ast.Subscript) else None
        if isinstance(node, ast.Subscript):
            table: ast.expr | None = node.value
        else:
            table = runs_over(node, stmt) or next(
                (
                    bind.value
                    for bind, _ in self.origins.binds(dotted(node) or "", scope, node.lineno)
                    if bind.how == "for"
                ),
                None,
            )
        while isinstance(table, ast.Call) and (table.args or isinstance(table.func, ast.Attribute)):
            table = table.args[0] if table.args else table.func.value  # type: ignore[attr-defined]
        yield from self.items(table, scope, named)

    def items(self, table: ast.expr | None, scope: Scope, named: object = None) -> Iterator[tuple[ast.expr, Scope]]:
        """What is put into a list or a dictionary of a name, where it is made or later; with `named` not what goes
        under another key that is written out.
        """
        key = dotted(table)
        if key is None:
            return
        homes = scope.owner.defs.values() if key.startswith("self.") and scope.owner is not None else [scope]
        for home in homes:
            for bind in home.binds.get(key, []):
                yield from ((value, home) for value in elements(bind.value, named))
            for other in home.stmts:
                if isinstance(other, ast.Assign) and any(
                    isinstance(target, ast.Subscript)
                    and dotted(target.value) == key
                    and (named is None or constant(target.slice) in (None, named))
                    for target in other.targets
                ):
                    yield other.value, home
            yield from (
                (s.call.args[0], home) for s in home.named("append") if dotted(s.receiver) == key and s.call.args
            )


def named(full: str) -> str:
    """The wrapper that a full name stands for."""
    name = full.rpartition(".")[2]
    if name.endswith(DDP) or (name == "DDP" and "parallel" in full):
        return "ddp"
    if name == "DataParallel" and full.startswith("torch.nn"):
        return "dp"
    return "fsdp" if name == "FullyShardedDataParallel" else ""


def runs_over(node: ast.expr, stmt: ast.stmt) -> ast.expr | None:
    """What the comprehension in a statement runs over whose variable a name is."""
    for item in walk(stmt):
        if isinstance(item, ast.comprehension) and any(
            isinstance(name, ast.Name) and name.id == dotted(node) for name in walk(item.target)
        ):
            return item.iter
    return None


def elements(table: ast.expr | None, named: object = None) -> list[ast.expr]:
    """What stands in a list, a tuple or a dictionary that is written out, or there under a key or a number."""
    if isinstance(table, ast.Dict):
        pairs = zip(table.keys, table.values, strict=True)
        return [value for key, value in pairs if named is None or constant(key) in (None, named)]
    if isinstance(table, ast.List | ast.Tuple):
        starred = any(isinstance(value, ast.Starred) for value in table.elts)
        return table.elts[named : named + 1] if isinstance(named, int) and named >= 0 and not starred else table.elts
    if isinstance(table, ast.DictComp):
        return [table.value]
    if isinstance(table, ast.ListComp):
        return [table.elt]
    return []
