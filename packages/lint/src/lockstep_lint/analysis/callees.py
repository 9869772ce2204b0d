"""Say which functions a call certainly runs, and what is wrong with its arguments."""

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep_lint.analysis.budget import WORK, kept
from lockstep_lint.analysis.context import above, guards
from lockstep_lint.analysis.index import FUNCTIONS, IMPORTS, Imported, Module, Scope, Site
from lockstep_lint.analysis.nodes import REFERENCES, dotted, head, is_none, last, walk
from lockstep_lint.analysis.view import View

__all__ = ["Callee", "Callees", "callees", "is_stub", "kind_of", "may_be_of_object", "refusal", "shown_name"]

# Decorators that leave a function's parameters and its result as they are.
KEEPING = {
    *("staticmethod", "classmethod", "functools.lru_cache", "functools.cache", "functools.wraps", "abc.abstractmethod"),
    *("torch.no_grad", "torch.inference_mode", "torch.enable_grad", "torch.set_grad_enabled", "torch.compile"),
    *("torch.jit.ignore", "torch.jit.unused", "torch.jit.export", "torch.autograd.no_grad", "typing.override"),
    *("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cuda.amp.autocast_mode.autocast"),
    *("torch.distributed.elastic.multiprocessing.errors.record", "torch.compiler.disable"),
}
# What gives a model back, wrapped, so that a call of it runs the model's forward with the same arguments.
WRAPPING = ("prepare", "prepare_model", "setup_module")
MAX_DEPTH = 6
MAX_LINE = 8
Definitions = tuple[Scope, ...]


@dataclass(frozen=True)
class Callee:
    """A function that a call runs; `bound` says that its first parameter is the object, or the class."""

    function: Scope
    bound: bool


@kept
def callees(view: View) -> "Callees":
    """Return the answers about the calls of a file."""
    return Callees(view)


class Callees:
    """Resolves calls, and gives no answer where anything in sight could make a call run something else."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.names = view.names
        self.project = view.project
        self.calls = view.calls

    def of(self, call: ast.Call, scope: Scope, stmt: ast.stmt) -> tuple[Callee, ...]:
        """Return every function that a call may run; nothing where that is not certain."""
        found = self.definitions(call.func, scope)
        if found:
            result = self.called(found)
        else:
            result = self.methods(call.func, stmt, scope) if isinstance(call.func, ast.Attribute) else ()
            result = result or self.run(call.func, stmt, scope)
        return () if result and head(call.func) in inner_names(stmt) else result

    def called(self, found: Definitions) -> tuple[Callee, ...]:
        """Return what runs when functions or classes are called by their names."""
        result: list[Callee] = []
        for each in found:
            made = self.constructors(each) if each.kind == "class" else (Callee(each, kind_of(each) == "class"),)
            if not made or not all(self.is_plain(callee.function) for callee in made):
                return ()
            result += made
        return tuple(result)

    def is_plain(self, function: Scope) -> bool:
        """Check that nothing in sight changes a function's parameters, or puts another in its place."""
        if any(not self.keeps(item, function) for item in function.decorators):
            return False
        return not self.patched(function)

    def keeps(self, decorator: ast.expr, function: Scope) -> bool:
        """Check whether a decorator leaves a function as it is."""
        func = decorator.func if isinstance(decorator, ast.Call) else decorator
        full = self.names.qualify(func, function.parent or function) or dotted(func) or ""
        return full in KEEPING

    @kept
    def patched(self, function: Scope) -> bool:
        """Check whether a file of the programs assigns something else to a function's name."""
        method = function.parent is not None and function.parent.kind == "class"
        for member in self.project.family(function.module):
            owners = assigned(member).get(function.name, ())
            if any(method or owner.partition(".")[0] in member.imports for owner in owners):
                return True
            if "setattr" in member.words and (
                f'"{function.name}"' in member.text or f"'{function.name}'" in member.text
            ):
                return True
        return False

    # Names

    def definitions(self, node: ast.expr, scope: Scope) -> Definitions:
        """Return all functions and classes of the project that a name may stand for."""
        first = head(node)
        if first is None or self.names.foreign(first, scope.module):
            return ()
        parts = (dotted(node) or "").split(".")
        WORK.spend(4)
        return self.named(parts, scope)

    def named(self, parts: list[str], scope: Scope) -> Definitions:
        name = parts[0]
        current: Scope | None = scope
        while current is not None and current.kind != "module":
            if current.kind == "function" or current is scope:
                if name in parameters(current) or (name in current.binds and name not in current.globals):
                    return ()
                if name in current.defs:
                    return self.within(namesakes(current, name), parts[1:]) if name not in imports(scope.module) else ()
            current = current.parent
        return self.attribute(scope.module, parts, 0)

    def attribute(self, module: Module, parts: list[str], depth: int) -> Definitions:
        """Return what a name at the top of a file stands for."""
        name = parts[0]
        imported = imports(module).get(name, ())
        if name in module.top.binds or depth > MAX_DEPTH or len(imported) > 1:
            return ()
        if name in module.top.defs:
            later = any(star.line > module.top.defs[name].node.lineno for star in module.stars)  # type: ignore[attr-defined]
            return () if imported or later else self.within(namesakes(module.top, name), parts[1:])
        if imported:
            return self.imported(module, imported[0], parts[1:], depth)
        if len(module.stars) != 1:
            return ()
        target = self.file(module, module.stars[0].module, module.stars[0].level)
        return self.attribute(target, parts, depth + 1) if target is not None and not name.startswith("_") else ()

    def imported(self, module: Module, imported: Imported, rest: list[str], depth: int) -> Definitions:
        if imported.name:
            target = self.file(module, imported.module, imported.level)
            if target is not None:
                found = self.attribute(target, [imported.name, *rest], depth + 1)
                if found:
                    return found
        for cut in range(len(rest) - 1, -1, -1):
            target = self.file(module, ".".join([imported.full, *rest[:cut]]), imported.level)
            if target is not None:
                return self.attribute(target, rest[cut:], depth + 1)
        return ()

    def file(self, module: Module, name: str, level: int) -> Module | None:
        """Return the file that an import means, where only one file of the project can be meant: a module may be
        imported by programs of other folders, whose own files come first.
        """
        found = self.project.paths.all_meant(module.folder, name, level)
        if len(found) > 1 and module.is_script and not level:
            found = tuple(path for path in found if path.startswith(os.path.join(module.folder, "")))[:1]
        return self.project.load(found[0]) if len(found) == 1 else None

    def within(self, found: Definitions, rest: list[str]) -> Definitions:
        """Return the methods behind `Class.method`."""
        if not rest:
            return found
        if len(rest) > 1 or any(each.kind != "class" for each in found):
            return ()
        methods = [self.member(each, rest[0]) for each in found]
        return tuple(method for each in methods for method in each) if all(methods) else ()

    # Classes

    def line(self, owner: Scope) -> Iterator[Scope]:
        """Yield a class and those that it derives from, as long as there is one base and it is in sight."""
        current = owner
        for _ in range(MAX_LINE):
            yield current
            bases = current.node.bases if isinstance(current.node, ast.ClassDef) else []
            found = self.definitions(bases[0], current.parent or current) if len(bases) == 1 else ()
            if len(found) != 1 or found[0].kind != "class":
                return
            current = found[0]

    def member(self, owner: Scope, name: str) -> Definitions:
        """Return the definitions of a method of a class, its own or inherited; nothing where another may come first."""
        for each in self.line(owner):
            if name in each.binds:
                return ()
            if name in each.defs:
                return namesakes(each, name)
        return ()

    def constructors(self, owner: Scope) -> tuple[Callee, ...]:
        """Return the `__init__` that runs where a class is called."""
        for each in self.line(owner):
            node = each.node
            if each.decorators or "__new__" in each.defs or not isinstance(node, ast.ClassDef) or node.keywords:
                return ()
            if any(base.startswith("enum.") for base in self.names.bases_of(each)):
                return ()  # its call looks a member up
        return tuple(Callee(method, True) for method in self.member(owner, "__init__"))

    def methods(self, func: ast.Attribute, stmt: ast.stmt, scope: Scope) -> tuple[Callee, ...]:
        """Return the methods that a call of an attribute runs: of the object itself, its base, or a known class."""
        if func.attr not in self.calls.method_names(scope.module):
            return ()
        value = func.value
        if isinstance(value, ast.Name) and value.id in ("self", "cls"):
            return self.own(value.id, func.attr, scope)
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "super":
            return self.of_base(func.attr, value, scope)
        return self.bound([self.member(owner, func.attr) for owner in self.objects(value, stmt, scope)])

    def objects(self, node: ast.expr, stmt: ast.stmt, scope: Scope) -> tuple[Scope, ...]:
        """Return the classes that an object of a call may be of, where no test around the call asks which one it is."""
        if dotted(node) is None and not isinstance(node, ast.Call):
            return ()
        found = self.classes(node, scope)
        return () if found and guards(stmt, scope.module) and self.is_chosen(node, scope) else found

    def is_chosen(self, node: ast.expr, scope: Scope) -> bool:
        """Check whether an object is one of several that a caller, or an arm of a test, may give."""
        key = dotted(node) or ""
        if key.partition(".")[0] in scope.params and not key.startswith("self."):
            return True
        binds = self.view.origins.binds(key, scope, node.lineno) if key.startswith("self.") else []
        around = [item for bind, home in binds for item in above(bind.stmt, home.module)]
        return any(isinstance(outer, ast.If) and (outer.orelse or place == "orelse") for outer, place in around)

    def bound(self, methods: list[Definitions], to_class: bool = False) -> tuple[Callee, ...]:
        """Return methods as an object, or a class, runs them."""
        if not methods or not all(methods):
            return ()
        found = [method for each in methods for method in each]
        if not all(map(self.is_plain, found)) or any(method.kind != "function" for method in found):
            return ()
        binds = ("class",) if to_class else ("class", "plain")
        return tuple(Callee(method, kind_of(method) in binds) for method in dict.fromkeys(found))

    def own(self, name: str, attr: str, scope: Scope) -> tuple[Callee, ...]:
        """Return the methods that `self.name()` may run: the class's, and those that override it."""
        method: Scope | None = scope
        while method is not None and method.kind == "function" and name not in parameters(method):
            method = method.parent
        owner = method.parent if method is not None and method.kind == "function" else None
        if method is None or owner is None or owner.kind != "class" or method.params[:1] != [name]:
            return ()
        if name in method.binds or kind_of(method) != ("class" if name == "cls" else "plain"):
            return ()
        methods = [self.member(owner, attr)]
        for each in self.calls.subclasses(owner):
            if attr in each.binds:
                return ()
            if attr in each.defs:
                methods.append(namesakes(each, attr))
        if any(is_stub(method) for each in methods for method in each):
            return ()
        return self.bound(methods, name == "cls")

    def of_base(self, attr: str, start: ast.Call, scope: Scope) -> tuple[Callee, ...]:
        """Return the methods that `super().name()` runs, where no class derives from two."""
        owner = scope.parent
        if start.args and (owner is None or last(start.args[0]) != owner.name):
            return ()
        if owner is None or owner.kind != "class" or any(is_mixed(each) for each in self.calls.subclasses(owner)):
            return ()
        line = list(self.line(owner))
        return self.bound([self.member(line[1], attr)]) if len(line) > 1 and not is_mixed(owner) else ()

    def classes(self, node: ast.expr, scope: Scope, depth: int = 0) -> tuple[Scope, ...]:
        """Return the classes that an object may be of; nothing where that is not certain."""
        if isinstance(node, ast.Attribute) and self.set_elsewhere(node, scope):
            return ()
        found: dict[Scope, None] = {}
        for origin in self.view.origins.of(node, scope):
            call = origin.call
            if call is None:
                if is_none(origin.node):
                    continue
                return ()
            inner = self.wrapped(call, origin.scope, node)
            if inner is not None:
                made = self.classes(inner, origin.scope, depth + 1) if depth < MAX_DEPTH else ()
            else:
                made = self.definitions(call.func, origin.scope)
            if not made or any(each.kind != "class" for each in made):
                return ()
            found.update(dict.fromkeys(made))
        return tuple(found)

    def wrapped(self, call: ast.Call, scope: Scope, node: ast.expr) -> ast.expr | None:
        """Return the model that a call wraps, or prepares under the same name."""
        if self.view.wrappers.of_call(call, scope):
            return self.view.wrappers.inner(call)
        if last(call) in WRAPPING and isinstance(call.func, ast.Attribute):
            same = [value for value in call.args if dotted(value) == dotted(node)]
            return same[0] if same or len(call.args) != 1 else call.args[0]
        return None

    def set_elsewhere(self, node: ast.Attribute, scope: Scope) -> bool:
        """Check whether any code but the object's own methods gives an attribute a value."""
        members = self.project.family(scope.module)
        return any(owner != "self" for member in members for owner in assigned(member).get(node.attr, ()))

    def run(self, func: ast.expr, stmt: ast.stmt, scope: Scope) -> tuple[Callee, ...]:
        """Return the `__call__` or the forward that the call of an object runs."""
        if dotted(func) is None or self.names.qualify(func, scope):
            return ()
        methods = []
        for owner in self.objects(func, stmt, scope):
            found = self.member(owner, "__call__")
            if not found and self.view.kinds.is_module_class(owner):
                found = self.member(owner, "forward")
            methods.append(found)
        return self.bound(methods)


def kind_of(function: Scope) -> str:
    """Return "static", "class" or "plain": how a method is bound; "" for a function that is none."""
    if function.parent is None or function.parent.kind != "class":
        return ""
    names = {last(item) for item in function.decorators}
    static = "staticmethod" in names or function.name == "__new__"
    return "static" if static else "class" if "classmethod" in names else "plain"


def is_mixed(owner: Scope) -> bool:
    """Check whether a class derives from several."""
    return isinstance(owner.node, ast.ClassDef) and len(owner.node.bases) > 1


def is_stub(function: Scope) -> bool:
    """Check whether a function is left to others to write."""
    if any(last(item) in ("abstractmethod", "overload") for item in function.decorators):
        return True
    if any(isinstance(stmt, ast.Raise) and last(stmt.exc) == "NotImplementedError" for stmt in function.stmts):
        return True
    return all(
        isinstance(stmt, ast.Pass) or (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant))
        for stmt in function.stmts
    )


def namesakes(scope: Scope, name: str) -> Definitions:
    """Return all definitions of a name in a scope: in the arms of a test, or one after the other."""
    return tuple(each for each in scope.module.scopes if each.parent is scope and each.name == name)


@kept
def parameters(scope: Scope) -> frozenset[str]:
    """Return the names of a function's parameters, with those of `*args` and `**kwargs`."""
    if not isinstance(scope.node, FUNCTIONS):
        return frozenset()
    args = scope.node.args
    return frozenset((*scope.params, *(each.arg for each in (args.vararg, args.kwarg) if each is not None)))


@kept
def imports(module: Module) -> dict[str, tuple[Imported, ...]]:
    """For each name that a file imports, all that it may stand for."""
    found: dict[str, dict[Imported, None]] = {}
    for scope in module.scopes:
        for stmt in scope.stmts:
            if not isinstance(stmt, IMPORTS):
                continue
            for alias in stmt.names:
                if isinstance(stmt, ast.Import):
                    name = alias.asname or alias.name.partition(".")[0]
                    made = Imported(alias.name if alias.asname else name, "", 0, 0)
                else:
                    name = alias.asname or alias.name
                    made = Imported(stmt.module or "", alias.name, stmt.level, 0)
                found.setdefault(name, {})[made] = None
    return {name: tuple(made) for name, made in found.items()}


@kept
def assigned(module: Module) -> dict[str, frozenset[str]]:
    """For each attribute that a file assigns, the objects that it belongs to, as they are named."""
    found: dict[str, set[str]] = {}
    for scope in module.scopes:
        for key in scope.binds:
            owner, _, attr = key.rpartition(".")
            if owner:
                found.setdefault(attr, set()).add(owner)
    return {attr: frozenset(owners) for attr, owners in found.items()}


@kept
def inner_names(stmt: ast.stmt) -> frozenset[str | None]:
    """Return the names that lambdas and comprehensions of a statement bind."""
    found: set[str | None] = set()
    for node in walk(stmt):
        if isinstance(node, ast.Lambda):
            found |= {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        elif isinstance(node, ast.comprehension):
            found |= {item.id for item in walk(node.target) if isinstance(item, ast.Name)}
    return frozenset(found)


def may_be_of_object(view: View, site: Site) -> bool:
    """Check, by its name alone, whether a call may be of an object of the project, or of a method of one."""
    func = site.call.func
    if not isinstance(func, REFERENCES) or view.names.unknown(func, site.scope) or view.full(site):
        return False
    first = head(func)
    return first is None or not view.names.foreign(first, site.module)


def shown_name(function: Scope) -> str:
    """Return the name by which a user knows a function."""
    owner = function.parent
    if owner is None or owner.kind != "class":
        return function.name
    return owner.name if function.name == "__init__" else f"{owner.name}.{function.name}"


def refusal(callee: Callee, call: ast.Call) -> str:
    """Return what is wrong with a call's arguments; "" where the function may take them."""
    node = callee.function.node
    if not isinstance(node, FUNCTIONS):
        return ""
    args = node.args
    places = [each.arg for each in (*args.posonlyargs, *args.args)]
    if callee.bound:
        if not places and args.vararg is None:
            return "has no parameter for the object itself"
        places = places[1:]
    plain = [value for value in call.args if not isinstance(value, ast.Starred)]
    starred = len(plain) < len(call.args)
    if len(plain) > len(places) and args.vararg is None:
        return f"takes {counted(len(places))}, and is given {len(plain)}"
    first = next((i for i, value in enumerate(call.args) if isinstance(value, ast.Starred)), len(call.args))
    named = [item.arg for item in call.keywords if item.arg is not None]
    wrong = wrong_keyword(callee, named, places[:first])
    if wrong or starred or len(named) < len(call.keywords):
        return wrong
    return missing(args, places, len(plain), named)


def counted(number: int) -> str:
    """Write a number of positional arguments."""
    return "no argument by position" if not number else f"{number} argument{'s' * (number > 1)} by position"


def wrong_keyword(callee: Callee, named: list[str], filled: list[str]) -> str:
    """Say which keyword a function does not take, or is given twice."""
    args = callee.function.node.args  # type: ignore[attr-defined]
    only = {each.arg for each in args.posonlyargs}
    known = {each.arg for each in (*args.args, *args.kwonlyargs)}
    for name in named:
        if name in filled and name not in only:
            return f"is given '{name}' twice"
        if name not in known and args.kwarg is None:
            return f"takes no argument '{name}'"
    return ""


def missing(args: ast.arguments, places: list[str], count: int, named: list[str]) -> str:
    """Say which arguments without a default a call leaves out."""
    needed = places[: len(places) - len(args.defaults)] if args.defaults else places
    left = [name for name in needed[count:] if name not in named]
    only = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    left += [each.arg for each, value in only if value is None and each.arg not in named]
    return f"needs {' and '.join(map(repr, left))}, which the call leaves out" if left else ""
