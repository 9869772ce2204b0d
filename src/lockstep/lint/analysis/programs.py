"""Which programs run in several processes, and which of their functions those processes run."""

import functools
from collections.abc import Iterator

from lockstep.lint.analysis.calls import Calls
from lockstep.lint.analysis.index import Module, Scope, Site

__all__ = ["Programs"]

STARTS = ("init_process_group", "initialize_distributed", "init_distributed")
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
SPAWNS = {"spawn", "start_processes", "Process"}


class Programs:
    """Answers what is known of the processes that a file's programs run in."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.project = calls.project

    @functools.cache  # noqa: B019 - lives as long as the run
    def direct(self, module: Module) -> bool:
        """Whether a file itself starts a process group or wraps a model for several processes."""
        if not any(word in module.text for word in (*STARTS, *WRAPPERS)):
            return False
        return any(True for _ in module.sites(*STARTS)) or any(self.wraps(site) for site in module.sites())

    def wraps(self, site: Site) -> bool:
        """Whether a call wraps a model for several processes."""
        full = self.calls.names.qualify(site.call.func, site.scope) or site.name
        return full.endswith(WRAPPERS)

    @functools.cache  # noqa: B019 - lives as long as the run
    def distributed(self, module: Module) -> bool:
        """Whether a program that the file is part of runs in several processes."""
        return any(self.direct(member) for member in self.project.family(module))

    @functools.cache  # noqa: B019 - lives as long as the run
    def spawned(self, module: Module) -> frozenset[Scope] | None:
        """The functions that run in spawned processes, or None if the program is started by a launcher."""
        starts = [
            function
            for member in self.project.family(module)
            for site in member.sites(*SPAWNS)
            for function in self.calls.runs(site)
        ]
        return frozenset(self.reach(starts)) if starts else None

    def reach(self, starts: list[Scope]) -> Iterator[Scope]:
        """The functions that run when one of `starts` does."""
        seen = set(starts)
        queue = list(starts)
        while queue:
            current = queue.pop()
            yield current
            below = [f for site in current.sites for f in self.calls.runs(site)] + list(current.defs.values())
            for function in below:
                if function not in seen:
                    seen.add(function)
                    queue.append(function)

    @functools.cache  # noqa: B019 - lives as long as the run
    def involved(self, scope: Scope) -> bool:
        """Whether a function belongs to the part of a program that runs distributed: its file, or its callers' file."""
        seen, queue = {scope}, [scope]
        while queue and len(seen) < 60:
            current = queue.pop()
            if self.direct(current.module):
                return True
            for site in self.calls.callers(current):
                if site.scope not in seen:
                    seen.add(site.scope)
                    queue.append(site.scope)
        return False
