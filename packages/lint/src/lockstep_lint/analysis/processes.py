"""Find programs that run in several processes, and the functions that each process runs."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.budget import cache_answers
from lockstep_lint.analysis.calls import Calls, find_passed
from lockstep_lint.analysis.context import above, apart, loops
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import SEQUENCES, Words, constant, keyword, walk

__all__ = ["STARTS", "Programs"]


STARTS = ("init_process_group", "initialize_distributed", "init_distributed")
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
INITS = ("horovod.torch.init", "smdistributed.modelparallel.torch.init")
SPAWNS = {"spawn", "start_processes", "Process"}
SPAWN = "torch.multiprocessing.spawn"
# What starts processes from a notebook.
LAUNCHERS = ("TorchTrainer", "TorchDistributor", "notebook_launcher")
# A program that asks its launcher for its place is started several times, whoever makes the group (a Trainer, say).
LAUNCHED = re.compile(
    r"""environ\.get\(\s*["'](?:LOCAL_RANK|WORLD_SIZE)["']|getenv\(\s*["'](?:LOCAL_RANK|WORLD_SIZE)["']|environ\[\s*["'](?:LOCAL_RANK|WORLD_SIZE)["']\s*\](?!\s*=[^=])"""
    r"|\n@(?:[\w.]+\.)?record\n"  # of torch.distributed.elastic
)
# How a file asks for the place of its process, which whoever asks has started.
ASKS = Words(r"^is_((local|world|global)_)?(main|master|root|rank_?zero)(_process|_worker|_rank)?$|^get_world_size$")
# A question that comes after one whether there is a group says nothing of how the program is started; nor does a file
# that gives the programs which it starts their places.
AFTER = re.compile(r"is_initialized\(\)\s*and\s+(int\()?(os\.)?$")
GIVES = re.compile(r"""["']LOCAL_RANK["']\s*(:|\]\s*=(?!=))""")


class Programs:
    """Answers what is known of the processes that a file's programs run in."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.project = calls.project

    @cache_answers
    def direct(self, module: Module) -> bool:
        """Check whether a file starts a process group or wraps a model itself."""
        if is_launched(module.text) or any(self.deepspeed(site) for site in module.sites("initialize")):
            return True
        if not any(word in module.text for word in (*STARTS, *WRAPPERS)):
            starts = any(package in module.text for package in ("horovod", "smdistributed"))
            return starts and any(self.initiates(site) for site in module.sites("init"))
        return any(map(for_several, module.sites(*STARTS))) or any(map(self.wraps, module.sites()))

    def initiates(self, site: Site) -> bool:
        """Check whether a call starts Horovod, or SageMaker's model parallelism."""
        return self.calls.names.qualify(site.call.func, site.scope) in INITS

    def deepspeed(self, site: Site) -> bool:
        """Check whether a call hands the model to DeepSpeed."""
        return self.calls.names.qualify(site.call.func, site.scope) == "deepspeed.initialize"

    @cache_answers
    def accelerated(self, module: Module) -> bool:
        """Check whether a script makes an Accelerator: `accelerate launch` starts several processes."""
        if "Accelerator" not in module.text or module.path.endswith(".ipynb"):
            return False
        names = self.calls.names
        return any(names.qualify(s.call.func, s.scope) == "accelerate.Accelerator" for s in module.sites("Accelerator"))

    @cache_answers
    def started(self, module: Module) -> bool:
        """Check whether a file calls a function of another that starts the process group (`setup_ddp()`)."""
        return any(
            function.module is not module and self.makes_group(function)
            for site in module.sites()
            for function in self.calls.runs(site)
        )

    @cache_answers
    def asks(self, module: Module) -> bool:
        """Check whether a file asks an object for the place of its process (`backend.is_master_process()`)."""
        return any(s.receiver is not None and ASKS.search(s.name) for s in module.sites())

    def wraps(self, site: Site) -> bool:
        """Check whether a call wraps a model for several processes."""
        full = self.calls.names.qualify(site.call.func, site.scope) or site.name
        return full.endswith(WRAPPERS)

    @cache_answers
    def distributed(self, module: Module) -> bool:
        """Check whether a program with the file runs in several processes; notebooks must start them."""
        if module.path.endswith(".ipynb") and not any(True for _ in module.sites(*STARTS, *SPAWNS, *LAUNCHERS)):
            return False
        return any(self.direct(member) for member in self.project.family(module))

    @cache_answers
    def spawned(self, module: Module) -> frozenset[Scope] | None:
        """Return the functions that run in spawned processes; None if a launcher starts the program."""
        starts = [
            function
            for member in self.project.family(module)
            for site in member.sites(*SPAWNS)
            if not self.idle(site.scope)
            for function in (*self.calls.runs(site), *self.handed(site))
        ]
        return frozenset(self.reach(starts, self.methods(module))) if starts else None

    @cache_answers
    def again(self, module: Module) -> bool:
        """Check whether spawned processes import a file again, with what is outside functions."""
        for member in self.project.users(module) if any("spawn" in m.text for m in self.project.users(module)) else ():
            for site in member.sites("spawn"):
                if self.calls.names.qualify(site.call.func, site.scope) == SPAWN and any(self.calls.runs(site)):
                    return True
        return False

    def handed(self, site: Site) -> Iterator[Scope]:
        """Yield the functions that callers hand on to `spawn` (`def launch(worker): mp.spawn(worker)`)."""
        rest = keyword(site.call, "args") or next(iter(site.call.args[1:2]), None)
        more = rest.elts if isinstance(rest, SEQUENCES) else []
        for value in (*site.call.args[:1], keyword(site.call, "fn"), keyword(site.call, "target"), *more):
            if isinstance(value, ast.Name) and value.id in site.scope.params and value.id not in site.scope.binds:
                for caller in self.calls.callers(site.scope):
                    found = self.calls.names.definition(find_passed(caller, site.scope, value.id), caller.scope)
                    if found is not None and found.kind == "function":
                        yield found

    @cache_answers
    def idle(self, scope: Scope) -> bool:
        """Check whether nothing in sight runs or names a function, and it starts no group."""
        return self._idle(scope, 0)

    def _idle(self, scope: Scope, depth: int) -> bool:
        name = scope.name
        if scope.kind != "function" or name == "main" or name.startswith("__") or scope.decorators:
            return False
        if name.startswith("on_") and scope.owner is not None and any(self.calls.names.bases_of(scope.owner)):
            return False  # a hook, which what drives the class calls
        if depth and (
            name.startswith("test") or (scope.owner is not None and any(self.calls.names.bases_of(scope.owner)))
        ):
            return False  # what runs it may be elsewhere
        callers = self.calls.callers(scope)
        if len(callers) > 3 or depth > 3 or (not callers and self.calls.by_base(scope)):
            return False
        if sum(member.words[name] for member in self.project.users(scope.module)) != 1 + len(callers):
            return False
        if self.makes_group(scope):
            return False
        return all(site.scope is not scope and self._idle(site.scope, depth + 1) for site in callers)

    @cache_answers
    def methods(self, module: Module) -> dict[str, list[Scope]]:
        """Return the methods of all classes of a file's programs, by their names."""
        table: dict[str, list[Scope]] = {}
        for member in self.project.family(module):
            for scope in member.scopes:
                for method in scope.defs.values() if scope.kind == "class" else ():
                    table.setdefault(method.name, []).append(method)
        return table

    @cache_answers
    def beside(self, module: Module) -> frozenset[Scope]:
        """Return the functions of a helper process that is started once (`Process(target=watch)`)."""
        sites = [site for member in self.project.family(module) for site in member.sites(*SPAWNS)]
        once: list[Scope] = []
        often: list[Scope] = []
        for site in sites:
            (once if site.name == "Process" and not _is_repeated(site) else often).extend(self.calls.runs(site))
        lone = [function for function in once if once.count(function) == 1 and function not in often]
        if not lone:
            return frozenset()
        rest = [function for function in (*once, *often) if function not in lone]
        started = frozenset(self.reach(rest)) if rest else frozenset()
        ranks = {f for f in self.reach(lone) if any(f.named(name) for name in STARTS)}
        return frozenset() if ranks else frozenset(self.reach(lone)) - started

    def reach(self, starts: list[Scope], methods: dict[str, list[Scope]] | None = None) -> Iterator[Scope]:
        """Yield the functions that run with `starts`; `methods` adds those of unknown objects."""
        seen = set(starts)
        queue = list(starts)
        while queue:
            current = queue.pop()
            yield current
            below = [f for site in current.sites for f in self.calls.runs(site)] + list(current.defs.values())
            for site in current.sites if methods else ():
                if methods and site.receiver is not None and self.calls.target(site.call, site.scope) is None:
                    below += methods.get(site.name, ())
            for function in below:
                if function not in seen:
                    seen.add(function)
                    queue.append(function)

    @cache_answers
    def makes_group(self, function: Scope) -> bool:
        """Check whether a function starts the process group, itself or by what it calls."""
        names = (*STARTS, "init_device_mesh")  # which starts one where there is none
        return any(any(map(for_several, below.named(name))) for below in self.reach([function]) for name in names)

    @cache_answers
    def apart(self, function: Scope) -> bool:
        """Check whether a function runs only in another arm than the start of the group."""
        return function.kind == "function" and self._apart(function, 0)

    def _apart(self, function: Scope, depth: int) -> bool:
        callers = self.calls.callers(function) if depth < 5 else []
        if not callers or (not depth and self.makes_group(function)):
            return False
        rest = [site for site in callers if not (site.scope.kind == "module" and not self.parallel(site.scope))]
        return bool(rest) and all(  # what is left is not its own file, run by itself in one process
            self.beyond(site) or (site.scope.kind == "function" and self._apart(site.scope, depth + 1)) for site in rest
        )

    def beyond(self, site: Site) -> bool:
        """Check whether a call is in another arm than every start of the group."""
        if not any(isinstance(node, ast.If) for node, _ in above(site.stmt, site.module)):
            return False
        starts = [
            other
            for other in site.scope.sites
            if other.name in STARTS or any(self.makes_group(function) for function in self.calls.runs(other))
        ]
        return bool(starts) and all(apart(site, other) for other in starts)

    @cache_answers
    def involved(self, scope: Scope) -> bool:
        """Check whether a function's file, or a caller's file, runs distributed."""
        if self.elsewhere(scope):
            return False
        seen, queue = {scope}, [scope]
        while queue and len(seen) < 60:
            current = queue.pop()
            if self.direct(current.module) or self.started(current.module) or self.asks(current.module):
                return True
            for site in self.calls.callers(current) or self.calls.by_base(current):
                if site.scope not in seen:
                    seen.add(site.scope)
                    queue.append(site.scope)
        return False

    @cache_answers
    def elsewhere(self, scope: Scope) -> bool:
        """Check whether only other files, of one process each, run a function of this file."""
        tops, seen, queue = set(), {scope}, [scope]
        while queue and len(seen) < 60:
            current = queue.pop()
            callers = dict.fromkeys(s.scope for s in self.calls.callers(current) if current.kind == "function")
            if current.kind == "module":
                tops.add(current)
            elif not callers:
                return False
            queue += [scope for scope in callers if scope not in seen]
            seen.update(callers)
        return bool(tops) and not any(top.module is scope.module or self.parallel(top) for top in tops)

    @cache_answers
    def parallel(self, top: Scope) -> bool:
        """Check whether a script itself starts a group or wraps a model for several processes."""
        if self.direct(top.module) or self.asks(top.module):
            return True
        below = list(self.reach([top]))
        found = (site for scope in below for name in (*STARTS, *WRAPPERS) for site in scope.named(name))
        engines = ((self.deepspeed, "initialize"), (self.initiates, "init"))
        return any(map(for_several, found)) or any(
            ask(site) for ask, name in engines for scope in below for site in scope.named(name)
        )


def is_launched(text: str) -> bool:
    """Check whether a file asks its launcher for its rank, and starts no programs itself."""
    if "subprocess" in text and "env=" in text and GIVES.search(text):
        return False
    return any(not AFTER.search(text[: found.start()][-80:]) for found in LAUNCHED.finditer(text))


def for_several(site: Site) -> bool:
    """Check whether the start of a process group may be one of several processes."""
    return constant(keyword(site.call, "world_size")) != 1


def _is_repeated(site: Site) -> bool:
    """Check whether a call is in a loop or a comprehension."""
    around = any(isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp) for node in walk(site.stmt))
    return around or bool(loops(site.stmt, site.module))
