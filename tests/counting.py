"""A backend for torch.compile that counts: how many graphs are made, and what is in them.

with counted() as seen:                     # torch.compile, told nothing else, has this backend
    ...
seen.graphs, seen.breaks, seen.operations()
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

from lockstep.transforms import precision

# What an exact run changes for its process.
NAMES = ("automatic_dynamic_shapes", "optimize_ddp", "recompile_limit", "fail_on_recompile_limit_hit")
AS_TORCH = {name: torch._dynamo.config._config[name].default for name in NAMES}


@dataclass
class Seen:
    """The graphs of torch's own operations, forward and backward, in the order in which they were made."""

    forwards: list[GraphModule] = field(default_factory=list)
    backwards: list[GraphModule] = field(default_factory=list)
    captured: int = 0  # graphs that were handed to the backend
    reasons: list[str] = field(default_factory=list)

    @property
    def breaks(self) -> int:
        return sum(counters["graph_break"].values())

    def operations(self, which: int) -> list[str]:
        """The names of the operations of a forward's graph."""
        return [str(node.target) for node in self.forwards[which].graph.nodes if node.op == "call_function"]


@contextmanager
def counted() -> Iterator[Seen]:
    torch._dynamo.reset()
    counters.clear()
    seen = Seen()

    def forward(graph, inputs):
        seen.forwards.append(graph)
        return make_boxed_func(graph.forward)

    def backward(graph, inputs):
        seen.backwards.append(graph)
        return make_boxed_func(graph.forward)

    made = aot_autograd(fw_compiler=forward, bw_compiler=backward)

    def backend(graph, inputs, **options):
        seen.captured += 1
        return made(graph, inputs, **options)

    before = precision.HOW
    precision.HOW = {"backend": backend}
    try:
        with torch._dynamo.config.patch(**AS_TORCH):
            yield seen
    finally:
        precision.HOW = before
        torch._dynamo.reset()
