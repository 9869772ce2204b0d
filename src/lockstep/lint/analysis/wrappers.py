"""The wrappers that run a model on several devices: DDP, DataParallel, FSDP."""

import ast
from collections.abc import Iterator

from lockstep.lint.analysis.index import Module, Scope, Site
from lockstep.lint.analysis.kept import kept
from lockstep.lint.analysis.names import Names
from lockstep.lint.analysis.nodes import keyword
from lockstep.lint.analysis.origins import Origin, Origins

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
        return self.wrapper_name(self.names.qualify(site.call.func, site.scope) or "", site.call)

    def wrapper_name(self, full: str, call: ast.Call) -> str:
        """The wrapper that a full name stands for."""
        if not full.endswith(("Parallel", "DDP")):
            return ""
        name = full.rsplit(".", 1)[-1]
        if name == DDP or (name == "DDP" and "parallel" in full):
            return "ddp"
        if name == "DataParallel" and full.startswith("torch.nn"):
            return "dp"
        return "fsdp" if name == "FullyShardedDataParallel" else ""

    def wrapped(self, node: ast.expr, scope: Scope) -> Iterator[tuple[str, ast.Call, Origin]]:
        """The wrappers that a value may come from."""
        for origin in self.origins.of(node, scope):
            call = origin.call
            if call is not None:
                kind = self.wrapper_name(self.names.qualify(call.func, origin.scope), call)
                if kind:
                    yield kind, call, origin

    def inner(self, call: ast.Call) -> ast.expr | None:
        """The model that a wrapper call wraps."""
        return call.args[0] if call.args else keyword(call, "module")
