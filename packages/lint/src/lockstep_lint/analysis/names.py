"""Resolve names within and across files: full names, functions, classes, base classes."""

import ast
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.imports import EXTERNAL
from lockstep_lint.analysis.index import Bind, Imported, Module, Scope
from lockstep_lint.analysis.nodes import dotted, head
from lockstep_lint.analysis.project import Project

__all__ = ["Names", "bound_locally"]

# What a star import of a project file usually brings along.
COMMON = {
    "torch": "torch",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "optim": "torch.optim",
    "dist": "torch.distributed",
    "np": "numpy",
    "DataLoader": "torch.utils.data.DataLoader",
    "Dataset": "torch.utils.data.Dataset",
}

# A package that passes on what its files pass on.
MAX_STARS = 3
MAX_RENAMES = 4


class Names:
    """Resolves names in the files of a project."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.qualified: dict[ast.AST, str] = {}
        self.defined: dict[tuple[ast.AST | None, Scope], Scope | None] = {}

    def qualify(self, node: ast.AST | None, scope: Scope) -> str:
        """Return the full name of an expression (`torch.nn.Linear`), "" if unknown."""
        if node is None:
            return ""
        known = self.qualified.get(node)
        if known is None:
            name = dotted(node)
            known = self.qualified[node] = self.qualify_name(name, scope) if name else ""
        return known

    @cache_answers
    def foreign(self, name: str, module: Module) -> bool:
        """Check whether a name is a builtin or a well-known package's, not the project's."""
        if name in module.own_names:
            return False
        imported = module.imports.get(name)
        if imported is None:
            return not module.stars
        return not imported.level and self.project.paths.external(module.folder, imported.module.partition(".")[0])

    def qualify_name(self, name: str, scope: Scope, depth: int = 0) -> str:
        """Return the full name behind a dotted name in a scope."""
        first, _, rest = name.partition(".")
        module = scope.module
        imported = module.imports.get(first)
        if imported is None and self.foreign(first, module):
            return ""
        if imported is not None and not bound_locally(first, scope):
            full = self.passed_on(module, imported) or (imported.full if not imported.level else "")
            return f"{full}.{rest}" if rest and full else full
        bind = _alias(first, scope)
        if bind is not None and depth < 4:
            alias = dotted(bind.value)
            if alias and alias != first:
                return self.qualify_name(f"{alias}.{rest}" if rest else alias, scope, depth + 1)
            return ""
        if module.stars and first in COMMON and first not in module.top.binds:
            return f"{COMMON[first]}.{rest}" if rest else COMMON[first]
        brought = self.brought(first, module)
        if brought:
            return f"{brought}.{rest}" if rest else brought
        return ""

    def passed_on(self, module: Module, imported: Imported) -> str:
        """Return the full name behind a re-export (`from data import Images, DataLoader`)."""
        if not imported.name or imported.module.partition(".")[0] in EXTERNAL:
            return ""
        target = self.project.find(module, imported.module, imported.level)
        inner = target.imports.get(imported.name) if target is not None else None
        if inner is None or inner.level or inner.module.partition(".")[0] not in EXTERNAL:
            return ""
        return inner.full

    def brought(self, head: str, module: Module, depth: int = 0) -> str:
        """Return the full name that a star import brings through a project's file."""
        if not module.stars or head in module.top.binds or head in module.top.defs:
            return ""
        for star in module.stars:
            target = self.project.find(module, star.module, star.level)
            if target is None or "__all__" in target.top.binds:
                continue
            imported = target.imports.get(head)
            if imported is None:
                inner = self.brought(head, target, depth + 1) if depth < MAX_STARS else ""
                if inner:
                    return inner
            elif not imported.level and not self.project.find(module, imported.full, 0):
                return imported.full
        return ""

    def definition(self, node: ast.AST | None, scope: Scope) -> Scope | None:
        """Return the project's function or class that a name or `module.name` refers to."""
        key = (node, scope)
        if key not in self.defined:  # half of all questions: an exception would cost more
            self.defined[key] = self.define(node, scope)
        return self.defined[key]

    @cache_answers
    def members(self, module: Module) -> frozenset[str]:
        """Return the attributes that a file's programs assign. No other attribute can be followed."""
        return frozenset().union(*(member.members for member in self.project.family(module)))

    def unknown(self, node: ast.expr, scope: Scope) -> bool:
        """Check whether an expression is an attribute that no program assigns or defines (`loss.backward`)."""
        return node.__class__ is ast.Attribute and node.attr not in self.members(scope.module)

    def define(self, node: ast.AST | None, scope: Scope) -> Scope | None:
        first = head(node)
        if first is None or self.foreign(first, scope.module):
            return None
        if node.__class__ is ast.Name:
            return self.named(first, scope)
        name = dotted(node)
        rest = name[len(first) + 1 :] if name is not None else ""
        if not rest:
            return self.named(first, scope)
        imported = scope.module.imports.get(first)
        if imported is not None and not bound_locally(first, scope):
            return self.exported(scope.module, imported, rest)
        owner = self.named(first, scope)
        return self.member(owner, rest) if owner is not None and owner.kind == "class" else None

    def named(self, name: str, scope: Scope, depth: int = 0) -> Scope | None:
        current: Scope | None = scope
        while current is not None:
            if name in current.defs and (current.kind != "class" or current is scope):
                return current.defs[name]
            if name in current.binds and name not in current.params and current.kind != "class":
                other = self.renamed(name, current, depth)
                if other is not None or current.kind == "function":
                    return other  # a variable of the function's own hides what the file calls so
            current = current.parent
        imported = scope.module.imports.get(name)
        if imported is not None:
            return self.exported(scope.module, imported, "", depth)
        for star in scope.module.stars:
            target = self.project.find(scope.module, star.module, star.level)
            found = self.attribute(target, [name], depth) if target is not None else None
            if found is not None:
                return found
        return None

    def renamed(self, name: str, scope: Scope, depth: int) -> Scope | None:
        """Resolve a name that only renames another (`Data = TrafficData`), unless it is imported too."""
        binds = scope.binds[name]
        value = binds[0].value if len(binds) == 1 and binds[0].how == "assign" and not binds[0].path else None
        if not isinstance(value, ast.Name) or value.id == name or depth >= MAX_RENAMES:
            return None
        if scope.kind == "module" and name in scope.module.imports:
            return None
        return self.named(value.id, scope, depth + 1)

    def exported(self, module: Module, imported: Imported, rest: str, depth: int = 0) -> Scope | None:
        """Resolve an imported name through packages that re-export it."""
        parts = rest.split(".") if rest else []
        target = self.project.find(module, imported.full, imported.level)
        found = self.attribute(target, parts, depth) if target is not None and parts else None
        for cut in range(len(parts) - 1, 0, -1) if found is None else ():  # `import moco.builder; moco.builder.MoCo()`
            inner = self.project.find(module, ".".join([imported.full, *parts[:cut]]), imported.level)
            found = self.attribute(inner, parts[cut:], depth) if inner is not None else None
            if found is not None:
                break
        if found is not None or (target is not None and parts):
            return found
        target = self.project.find(module, imported.module, imported.level)
        if target is not None and imported.name:
            return self.attribute(target, [imported.name, *parts], depth)
        return None

    def attribute(self, module: Module, parts: list[str], depth: int) -> Scope | None:
        scope = module.top.defs.get(parts[0])
        if scope is None and parts[0] in module.top.binds:
            scope = self.renamed(parts[0], module.top, depth)
        if scope is not None:
            return self.member(scope, parts[1]) if len(parts) > 1 else scope
        if depth > 4:
            return None
        passed = module.imports.get(parts[0])
        if passed is not None:
            return self.exported(module, passed, ".".join(parts[1:]), depth + 1)
        for star in module.stars:
            target = self.project.find(module, star.module, star.level)
            if target is not None and target is not module:
                found = self.attribute(target, parts, depth + 1)
                if found is not None:
                    return found
        return None

    def parents(self, owner: Scope) -> Iterator[Scope]:
        """Yield the project's classes that a class derives from, nearest first."""
        queue, seen = [owner], {owner}
        while queue:
            current = queue.pop(0)
            node = current.node
            for expression in node.bases if isinstance(node, ast.ClassDef) else []:
                found = self.definition(expression, current.parent or current)
                if found is not None and found not in seen:
                    seen.add(found)
                    queue.append(found)
                    yield found

    def bases_of(self, owner: Scope) -> Iterator[str]:
        """Yield the full names of everything that a class derives from."""
        for current in (owner, *self.parents(owner)):
            node = current.node
            for expression in node.bases if isinstance(node, ast.ClassDef) else []:
                yield self.qualify(expression, current.parent or current) or dotted(expression) or ""

    def member(self, owner: Scope, name: str) -> Scope | None:
        """Return the method of a class, its own or inherited."""
        for current in (owner, *self.parents(owner)):
            if name in current.defs:
                return current.defs[name]
        return None


def bound_locally(name: str, scope: Scope) -> bool:
    """Check whether a function's own parameter or variable hides an import of the same name."""
    current: Scope | None = scope
    while current is not None and current.kind == "function":
        if name in current.params or name in current.binds:
            return True
        current = current.parent
    return False


# What a parameter, or a variable with several values, is bound to.
HIDDEN = Bind("", None, (), ast.Pass(), "assign")


def _alias(name: str, scope: Scope) -> Bind | None:
    """Return the only assignment of a name that just renames something."""
    current: Scope | None = scope
    while current is not None:
        binds = current.binds.get(name)
        if binds:
            sole = len(binds) == 1 and binds[0].how == "assign" and not binds[0].path
            return binds[0] if sole else HIDDEN
        if current.kind == "function" and name in current.params:
            return HIDDEN
        current = current.parent
    return None
