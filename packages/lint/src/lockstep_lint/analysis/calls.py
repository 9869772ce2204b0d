"""Resolve calls and the classes of objects in a project."""

import ast
from collections.abc import Callable, Iterator

from lockstep_lint.analysis.budget import WORK, cache_answers
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.names import Names, bound_locally
from lockstep_lint.analysis.nodes import REFERENCES, SEQUENCES, dotted, element_of, head, is_true, keyword, last, walk

__all__ = ["COLLECTIVES", "OF_MPI", "Calls", "Effects", "find_argument", "find_passed", "turns_off_gradients"]


# Calls that run a function given as an argument, in this process or in others.
# A name that is bound more often than this in one scope is generated code.
MAX_BINDS = 20
MAX_CLASS_STEPS = 60
RUNNERS = {"spawn", "start_processes", "Process", "Thread", "partial", "notebook_launcher", "elastic_launch", "timeit"}
RUNNERS |= {"step", "run"}  # an optimizer's, with a closure; a launcher's
RUNNERS |= {"TorchTrainer"}
# The arguments by which they are given it.
HANDS = ("fn", "target", "function", "train_loop_per_worker")
# Those of them that give it other arguments than they are given themselves.
STARTERS = ("spawn", "Process", "start_processes", "notebook_launcher", "TorchTrainer")
# Those that put the number of the process before them.
NUMBERED = ("spawn", "start_processes")


class Calls:
    """The call graph, worked out file by file as rules ask."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.project = names.project
        self.targets: dict[ast.Call, Scope | None] = {}
        self.classes: dict[tuple[ast.expr, Scope, bool], Scope | None] = {}

    @cache_answers
    def method_names(self, module: Module) -> frozenset[str]:
        """Return the names of all methods that a file's programs define."""
        return frozenset().union(*(member.methods for member in self.project.family(module)))

    def target(self, call: ast.Call, scope: Scope) -> Scope | None:
        """Return the project's function that a call runs, or its class's `__init__` or `__call__`."""
        if call not in self.targets:
            self.targets[call] = self.resolve(call, scope)
        return self.targets[call]

    def resolve(self, call: ast.Call, scope: Scope) -> Scope | None:
        found = self.names.definition(call.func, scope)
        if found is None and isinstance(call.func, ast.Attribute):
            found = self.method(call.func, scope)
        if found is None and "__call__" in self.method_names(scope.module):
            plain = isinstance(call.func, REFERENCES)
            owner = self.class_of(call.func, scope, handed_in=False) if plain else None
            return self.names.member(owner, "__call__") if owner is not None else None
        if found is not None and found.kind == "class":
            return self.names.member(found, "__init__")
        return found

    def method(self, func: ast.Attribute, scope: Scope) -> Scope | None:
        owner: Scope | None
        if isinstance(func.value, ast.Name) and func.value.id in ("self", "cls"):
            owner = scope.owner
        elif isinstance(func.value, ast.Call) and getattr(func.value.func, "id", "") == "super":
            parents = self.names.parents(scope.owner) if scope.owner is not None else iter(())
            return next((m for p in parents if (m := self.names.member(p, func.attr)) is not None), None)
        elif func.attr in self.method_names(scope.module):
            owner = self.class_of(func.value, scope)
        else:
            return None
        return self.names.member(owner, func.attr) if owner is not None else None

    def class_of(self, node: ast.expr, scope: Scope, handed_in: bool = True) -> Scope | None:
        """Return the project's class of an object, from the assignment that made it."""
        first = head(node)
        if first is not None and self.names.foreign(first, scope.module):
            return None
        if self.names.unknown(node, scope) and last(node) != "module":
            return None
        key = (node, scope, handed_in)
        if key not in self.classes:
            self.classes[key] = self.find_class(node, scope, handed_in)
        return self.classes[key]

    def find_class(self, node: ast.expr, scope: Scope, handed_in: bool) -> Scope | None:
        """Return the first class on the ways back from a value."""
        seen: set[tuple[ast.expr, Scope]] = set()
        stack: list[tuple[ast.expr, Scope, str]] = [(node, scope, "")]
        unwraps = ".module" in (dotted(node) or "")
        for _ in range(MAX_CLASS_STEPS):
            if not stack:
                return None
            current, home, annotated = stack.pop()
            if annotated:  # comes after all values that the name was given
                found = _find_annotated(annotated, home, self.names)
                if found is not None:
                    return found
            elif (current, home) not in seen:
                seen.add((current, home))
                if isinstance(current, ast.Call):
                    found = self.made_class(current, home, stack)
                    if found is not None:
                        return found
                    if unwraps and current.args and last(current).endswith(("Parallel", "DDP")):
                        stack.append((current.args[0], home, ""))
                elif isinstance(current, ast.Attribute) and current.attr == "module":
                    stack.append((current.value, home, ""))
                else:
                    key = dotted(current)
                    if key is not None:
                        stack.append((current, home, key))
                        stack.extend((value, at, "") for value, at in reversed(list(self.values(key, home))))
                        stack.extend((made, at, "") for made, at in self.imported(key, home))
                        if handed_in:
                            stack.extend((made, at, "") for made, at in self.handed_in(key, home))
        return None

    @cache_answers
    def handed_in(self, key: str, scope: Scope) -> tuple[tuple[ast.expr, Scope], ...]:
        """Return the values that calls pass for a parameter, found by the callee's name."""
        if key not in scope.params or key in scope.binds or key in ("self", "cls"):
            return ()
        made = scope.owner if scope.name == "__init__" else scope
        sites = (s for m in self.project.family(scope.module) for s in m.by_name.get(made.name, [])) if made else ()
        calls = (s for s in sites if self.names.definition(s.call.func, s.scope) is made or self.is_method(s, scope))
        starts = [s for m in self.project.family(scope.module) for s in m.sites(*STARTERS)] if made is scope else []
        begun = [s for s in starts if any(self.names.definition(v, s.scope) is scope for v in work_of(s.call))]
        given_here = [(find_argument(site.call, scope, key), site.scope) for site in calls]
        given_here += [(spawn_argument(site, scope, key), site.scope) for site in begun]
        return tuple((value, home) for value, home in given_here if value is not None)[:MAX_BINDS]

    def is_method(self, site: Site, method: Scope) -> bool:
        """Check whether a call runs a method of an object whose class its assignments show."""
        receiver = site.receiver if method.parent is method.owner and method.owner is not None else None
        owner = self.class_of(receiver, site.scope, handed_in=False) if receiver is not None else None
        return owner is not None and self.names.member(owner, method.name) is method

    def imported(self, key: str, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield the values of an imported name in its file (`from utils.comm import comm`)."""
        found = scope.module.imports.get(key)
        if found is None or not found.name or bound_locally(key, scope):
            return
        target = self.project.find(scope.module, found.module, found.level)
        for bind in target.top.binds.get(found.name, [])[:MAX_BINDS] if target is not None else ():
            if target is not None and bind.value is not None and not bind.path and bind.how == "assign":
                yield bind.value, target.top

    def made_class(self, node: ast.Call, scope: Scope, stack: list[tuple[ast.expr, Scope, str]]) -> Scope | None:
        """Return the class that a call instantiates. A function's results go onto the stack."""
        found = self.names.definition(node.func, scope)
        if found is None and isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda", "eval", "train"):
            stack.append((node.func.value, scope, ""))
        if found is not None and found.kind == "function":
            stack.extend((value, found, "") for value in reversed(list(found.returns())))
            return None
        return found

    def values(self, key: str, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield the plain values of a name, in a surrounding scope or its class."""
        homes: list[Scope] = []
        if key.startswith("self.") and scope.owner is not None:
            for owner in (scope.owner, *self.names.parents(scope.owner)):
                homes += owner.defs.values()
        current: Scope | None = scope
        while current is not None:
            homes.append(current)
            current = current.parent
        for home in homes:
            binds = [b for b in home.binds.get(key, [])[:MAX_BINDS] if b.how in ("assign", "with")]
            found = [
                value for b in binds for value in element_of(b.value, b.path)
            ]  # also `total, meter = 0.0, Meter()`
            if found:
                yield from ((value, home) for value in found)
                return

    def runs(self, site: Site) -> list[Scope]:
        """Return the functions that a call runs: its target, and functions passed to a runner."""
        target = self.target(site.call, site.scope)
        found = [target] if target is not None else []
        if site.name in RUNNERS:
            candidates = [*site.call.args[:1], *(keyword(site.call, name) for name in HANDS)]
            given = keyword(site.call, "args") or (site.call.args[1] if len(site.call.args) > 1 else None)
            candidates += given.elts if isinstance(given, SEQUENCES) else []
            handed = (self.handed(value, site.scope) for value in candidates if value is not None)
            found += [function for function in handed if function is not None and function.kind == "function"]
        return found

    def handed(self, value: ast.expr, scope: Scope) -> Scope | None:
        """Return the function, or the known object's method (`self.work`), that an expression passes on."""
        found = self.names.definition(value, scope)
        if found is None and isinstance(value, ast.Attribute):
            return self.method(value, scope)
        if found is None and isinstance(value, ast.Name):  # `run = partial(work, cfg=cfg)`
            given, home = next(self.values(value.id, scope), (value, scope))
            inner = given.args[0] if isinstance(given, ast.Call) and last(given) == "partial" and given.args else given
            return self.names.definition(inner, home)
        return found

    @cache_answers
    def edges(self, module: Module) -> dict[Scope, list[Site]]:
        """Map each function to the calls in one file that run it."""
        table: dict[Scope, list[Site]] = {}
        for site in module.sites():
            for function in self.runs(site):
                table.setdefault(function, []).append(site)
        return table

    @cache_answers
    def callers(self, function: Scope) -> list[Site]:
        """Return the calls in the project that run a function."""
        return [site for module in self.project.users(function.module) for site in self.edges(module).get(function, [])]

    @cache_answers
    def subclasses(self, owner: Scope) -> tuple[Scope, ...]:
        """Return the project's classes that derive from a class, directly or not."""
        scopes = [scope for module in self.project.users(owner.module) for scope in module.scopes]
        return tuple(s for s in scopes if s.kind == "class" and s is not owner and owner in self.names.parents(s))

    @cache_answers
    def by_base(self, method: Scope) -> list[Site]:
        """Return the base class's calls of a method that this class overrides or implements."""
        owner = method.parent if method.kind == "function" and not method.name.startswith("__") else None
        if owner is None or owner.kind != "class":
            return []
        return [
            site
            for parent in self.names.parents(owner)
            for caller in parent.defs.values()
            for site in caller.named(method.name)
            if dotted(site.receiver) in ("self", "cls")
        ]

    def namesakes(self, function: Scope) -> list[Site]:
        """Return the unresolved calls in the function's programs that have its name."""
        members = self.project.family(function.module)
        return [s for m in members for s in m.sites(function.name) if self.target(s.call, s.scope) is None]


def _find_annotated(key: str, scope: Scope, names: Names) -> Scope | None:
    """Return the class that a parameter's annotation names."""
    node = scope.node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if arg.arg == key and arg.annotation is not None:
                found = names.definition(arg.annotation, scope)
                return found if found is not None and found.kind == "class" else None
    return None


def find_passed(site: Site, function: Scope, name: str) -> ast.expr | None:
    """Return the expression that a call passes for a parameter, also where it starts processes."""
    if site.name in STARTERS:
        named = next((item.value for item in site.call.keywords if item.arg == name), None)
        return named if named is not None else spawn_argument(site, function, name)
    if site.name == "partial" and function.name != "partial":  # its own first argument is the function
        return find_argument(ast.Call(site.call.func, site.call.args[1:], site.call.keywords), function, name)
    return find_argument(site.call, function, name)


def work_of(call: ast.Call) -> list[ast.expr]:
    """Return the function that a call which starts processes is given."""
    return [value for value in (*call.args[:1], *(keyword(call, name) for name in HANDS)) if value is not None]


def spawn_argument(site: Site, function: Scope, name: str) -> ast.expr | None:
    """Return the argument for a function that processes are started with (`spawn(work, args=(net,))`)."""
    call = site.call
    work = next(iter(work_of(call)), None)
    values = keyword(call, "args") or (call.args[1] if len(call.args) > 1 else None)
    if last(work) != function.name or not isinstance(values, ast.Tuple) or name not in function.params:
        return None
    own = function.params[:1] in (["self"], ["cls"])
    place = function.params.index(name) - own - (site.name in NUMBERED)
    starred = any(isinstance(value, ast.Starred) for value in values.elts)
    return values.elts[place] if 0 <= place < len(values.elts) and not starred else None


def find_argument(call: ast.Call, function: Scope, name: str) -> ast.expr | None:
    """Return the expression that a call of a function gives for the parameter `name`."""
    for item in call.keywords:
        if item.arg == name:
            return item.value
    params = function.params
    place = params.index(name) - (1 if params[:1] in (["self"], ["cls"]) else 0)
    if 0 <= place < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args[: place + 1]):
        return call.args[place]
    return None


COLLECTIVES = {
    "barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast",
    "broadcast_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "gather", "scatter", "gather_object", "scatter_object_list", "monitored_barrier",
}  # fmt: skip
# Those of mpi4py's world, by which a program may start its ranks.
OF_MPI = {name for each in ("bcast", "barrier", "allreduce", "allgather") for name in (each, each.capitalize())}
MAX_FUNCTIONS = 80


class Effects:
    """Searches the calls that run when a function or block runs, not their paths."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.names_of = calls.names
        self.project = calls.project

    def below(self, sites: list[Site]) -> Iterator[Site]:
        """Yield the given calls and all calls of the project's functions that they run."""
        seen: set[Scope] = set()
        queue: list[Scope] = []
        yield from self.enter(sites, seen, queue)
        while queue and len(seen) < MAX_FUNCTIONS:
            yield from self.enter(queue.pop().sites, seen, queue)

    def enter(self, sites: list[Site], seen: set[Scope], queue: list[Scope]) -> Iterator[Site]:
        for site in sites:
            WORK.spend()
            yield site
            for function in self.calls.runs(site):
                if function not in seen:
                    seen.add(function)
                    queue.append(function)

    @cache_answers
    def names(self, scope: Scope) -> frozenset[str]:
        """Return the last names of all calls that run when a function runs."""
        return frozenset(site.name for site in self.below(scope.sites))

    def block(self, stmt: ast.stmt, scope: Scope) -> list[Site]:
        """Return the calls written in a statement and the blocks in it."""
        end = stmt.end_lineno or stmt.lineno
        WORK.spend(len(scope.sites))
        return [site for site in scope.sites if stmt.lineno <= site.stmt.lineno and (site.stmt.end_lineno or 0) <= end]

    def does(self, site: Site, names: set[str]) -> bool:
        """Check whether a call is one of `names` or runs a function that calls one."""
        return site.name in names or any(names & self.names(function) for function in self.calls.runs(site))

    def mentioned(self, module: Module, *words: str) -> bool:
        """Check whether the text of a file's programs has one of the words."""
        return any(self.project.says(module, word) for word in words)

    def mentioned_in(self, scope: Scope, word: str) -> bool:
        """Check whether the text of a function has the word."""
        node = scope.node
        start, end = getattr(node, "lineno", 1), getattr(node, "end_lineno", None)
        return any(word in line for line in scope.module.lines[start - 1 : end])

    def is_collective(self, site: Site) -> bool:
        """Check whether a call is a collective of torch's default group or mpi4py's world."""
        if site.name not in COLLECTIVES and site.name not in OF_MPI:
            return False
        full = self.names_of.qualify(site.call.func, site.scope)
        if site.name in OF_MPI and full.startswith("mpi4py.MPI.COMM_WORLD."):
            return True
        if not full.startswith("torch.distributed"):
            return False
        return not any(item.arg == "group" for item in site.call.keywords)

    def find(self, sites: list[Site], wanted: Callable[[Site], bool]) -> Site | None:
        """Return the first call, in `sites` or in what they run, that is wanted."""
        return next((site for site in self.below(sites) if wanted(site)), None)


def turns_off_gradients(node: ast.expr) -> bool:
    """Check whether a context or decorator keeps no graph (no_grad, set_grad_enabled(False))."""
    name = last(node)
    if name == "set_grad_enabled" and isinstance(node, ast.Call):
        return not any(is_true(value) for value in node.args)
    return name in ("no_grad", "inference_mode") or any(
        isinstance(item, ast.Attribute) and item.attr in ("no_grad", "inference_mode") for item in walk(node)
    )
