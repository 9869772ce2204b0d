"""Resolve look-ups by name at run time in tables, modules, packages and registries."""

import ast
import os

from lockstep_lint.analysis.index import Module, Scope
from lockstep_lint.analysis.nodes import constant, dotted, last, strings
from lockstep_lint.analysis.view import View

__all__ = ["looked_up"]

MAX_STEPS = 6
# Of a package with more files than this, these many are read.
MAX_FILES = 100
GETTERS = {"get", "get_model", "build", "create"}


def looked_up(view: View, node: ast.expr, scope: Scope, steps: int = 0) -> list[Scope]:
    """The classes and functions of the project that an expression may stand for:
    `TABLE[name]`, `getattr(models, name)`, `import_module("models." + name).Net`, `REGISTRY.get(name)`, or what a
    function returns that does one of these.
    """
    parts: list[list[Scope]] = []
    for origin in view.origins.of(node, scope) if steps < MAX_STEPS else ():
        value, home = origin.node, origin.scope
        known = view.names.definition(value, home)
        if known is not None:
            parts.append([known])
        elif isinstance(value, ast.Subscript):
            parts.append(in_table(view, value.value, home, steps))
        elif isinstance(value, ast.Call):
            parts.append(called(view, value, home, steps))
        else:
            parts.append(
                named(of_module(view, value.value, home), value.attr) if isinstance(value, ast.Attribute) else []
            )
    return sure(parts)


def sure(parts: list[list[Scope]]) -> list[Scope]:
    """All that was found, each once; nothing where over a third of the places that it may come from are unknown."""
    known = [part for part in parts if part]
    return list(dict.fromkeys(member for part in known for member in part)) if len(known) * 3 >= len(parts) * 2 else []


def called(view: View, call: ast.Call, scope: Scope, steps: int) -> list[Scope]:
    """Return the possible results of a call that looks up a name."""
    name, args = last(call.func), call.args
    wanted = constant(args[1]) if name == "getattr" and len(args) > 1 else constant(args[0]) if args else None
    if name == "getattr" and len(args) > 1:
        modules = of_module(view, args[0], scope)
        return named(modules, wanted) if isinstance(wanted, str) else [s for m in modules for s in public(view, m)]
    if name == "__getattribute__" and isinstance(call.func, ast.Attribute) and isinstance(wanted, str):
        return named(of_module(view, call.func.value, scope), wanted)
    if name in GETTERS and isinstance(call.func, ast.Attribute):
        return in_table(view, call.func.value, scope, steps) or registered(view, call.func.value, scope)
    function = view.calls.target(call, scope)
    if function is None:
        return []
    return [s for value in function.returns() for s in looked_up(view, value, function, steps + 1)]


def in_table(view: View, node: ast.expr, scope: Scope, steps: int) -> list[Scope]:
    """Return the entries of a literal dictionary, a module or a registry."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return [s for module in of_module(view, node.value, scope) for s in public(view, module)]
    if isinstance(node, ast.Call) and last(node.func) in ("globals", "vars"):
        return public(view, scope.module)
    tables = [origin for origin in view.origins.of(node, scope) if isinstance(origin.node, ast.Dict)]
    values = [(value, table.scope) for table in tables for value in table.node.values]  # type: ignore[attr-defined]
    return sure([looked_up(view, value, home, steps + 1) for value, home in values]) or registered(view, node, scope)


def registered(view: View, node: ast.expr, scope: Scope) -> list[Scope]:
    """The classes and functions with a decorator of the registry (`@MODELS.register()`)."""
    name = last(node)
    return [
        member
        for module in (view.project.family(scope.module) if name else ())
        if name in module.text
        for member in module.top.defs.values()
        if any(name in (dotted(d.func if isinstance(d, ast.Call) else d) or "").split(".") for d in member.decorators)
    ]


def of_module(view: View, node: ast.expr, scope: Scope) -> list[Module]:
    """The files of the project that an expression stands for: an imported module, or one imported by a name."""
    modules = []
    for origin in view.origins.of(node, scope):
        home = origin.scope.module
        imported = home.imports.get(dotted(origin.node) or "")
        if imported is not None:
            found = view.project.find(home, imported.full, imported.level)
            modules += [found] if found is not None else []
        elif isinstance(origin.node, ast.Call) and last(origin.node.func) in ("import_module", "__import__"):
            modules += by_name(view, origin.node, origin.scope)
    return modules


def by_name(view: View, call: ast.Call, scope: Scope) -> list[Module]:
    """The files that one which is imported by a name may be, where the name's start is written out, there or before
    (`name = "models." + kind; import_module(name)`).
    """
    given = next(iter(call.args), None)
    texts = next(strings(call), "") or next((t for o in view.origins.of(given, scope) for t in strings(o.node)), "")
    start = texts.split(".{")[0].strip(".")
    return in_package(view, start, scope.module) if start else []


def in_package(view: View, name: str, module: Module) -> list[Module]:
    """The files of a package, or the file of a module."""
    found = view.project.find(module, name)
    folder = os.path.dirname(found.path) if found is not None else os.path.join(module.folder, *name.split("."))
    if found is not None and os.path.basename(found.path) != "__init__.py":
        return [found]
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    names = [file for file in names if file.endswith(".py")][:MAX_FILES]
    files = (view.project.load(os.path.join(folder, file)) for file in names)
    return [file for file in files if file is not None]


def named(modules: list[Module], name: str) -> list[Scope]:
    """Return the definitions of a name in modules."""
    return [module.top.defs[name] for module in modules if name in module.top.defs]


def public(view: View, module: Module) -> list[Scope]:
    """The models of a module's names, its own and passed on, without what its other classes are made of."""
    found = dict(module.top.defs)
    for name in module.imports:
        passed = view.names.named(name, module.top)
        if passed is not None:
            found[name] = passed
    for star in module.stars:
        target = view.project.find(module, star.module, star.level)
        found.update(target.top.defs if target is not None else {})
    return [
        member
        for name, member in found.items()
        if not name.startswith("_")
        and name not in member.module.by_name
        and (view.kinds.is_module_class(member) if member.kind == "class" else any(True for _ in member.returns()))
    ]
