"""`--shares auto` while a run goes on: what this rank tells of itself, and what all decide.

    balancing = Balancing(built, clock)
    exchange = StepExchange(..., further=balancing.told)
    balancing.after(exchange)               # after each step, on every rank

Without `--shares auto` it only says, before the first step, where the ranks' devices differ.
"""

import logging
import math
import os

import torch

from lockstep.clock import Clock
from lockstep.distributed.balance import Report, check_alike
from lockstep.distributed.step_exchange import StepExchange
from lockstep.engines.make import SHARING, name_of
from lockstep.run.build import Built
from lockstep.run.devices import device_of, differing

__all__ = ["Balancing", "most_slots"]

_LOG = logging.getLogger("lockstep")
_SPARED = 0.5  # of the memory that is free, what larger shares may take


class Balancing:
    """Measures this rank, and has the balancer decide. Making it is collective.

    Raises:
        LockstepError: the ranks share out the first step differently.
    """

    def __init__(self, built: Built, clock: Clock) -> None:
        self._built, self._balancer, self._clock = built, built.balancer, clock
        data = built.config.data
        self._ahead = data.workers * data.prefetch  # steps that loader processes may be ahead, with one slot each
        self._count, self._bounded = 0, not built.config.exact
        line = differing(built.world.gather(device_of(built.world.device)), self._speeds)  # collective
        if self._balancer:  # the first step; the others are compared with each exchange
            check_alike(built.world.gather(self._balancer.check(built.start, built.start + 1)))  # collective
        if line and built.world.is_main:
            hint = "" if self._balancer or not self._shares else "; --shares auto gives each what it can do"
            _LOG.info(line + hint)

    @property
    def _shares(self) -> bool:
        """Whether the engine's ranks may have unequal shares."""
        return name_of(self._built.config.engine, self._built.world) in SHARING

    @property
    def _speeds(self) -> list[float]:
        """By rank, beside the fastest's, as they were measured before a resume; [] where they are not known."""
        costs = self._balancer.costs if self._balancer else ()
        return [min(costs) / cost for cost in costs] if len(set(costs)) > 1 else []

    def told(self, step: int, stop: int, waited: float) -> list[float]:
        """A `Report` as numbers; [] where nothing is balanced. See `StepExchange`."""
        if self._balancer is None:
            return []
        spent, stop = self._clock.spent(), min(stop, self._built.run_plan.step_plan.steps)
        data, forward = spent.get("data", 0.0) - waited, spent.get("forward", 0.0)
        alone = spent.get("backward/alone", 0.0)
        return list(Report(self._clock.steps, data, forward, alone, self._balancer.check(step, stop)))

    def after(self, exchange: StepExchange) -> None:
        """Looks at what was heard last. Raises LockstepError where the ranks share out the steps differently."""
        if self._balancer is None or exchange.count == self._count:
            return
        self._count, first = exchange.count, exchange.until + self._ahead
        line = self._balancer.heard([Report(*row) for row in exchange.also], first)
        if not self._bounded:
            self._bounded = True
            self._bound(first)
        if line:
            self._keep()
            if self._built.world.is_main and first < self._built.run_plan.step_plan.steps:
                _LOG.info(line)

    def _bound(self, first: int) -> None:
        """Once the first step has shown what is free: how long a rank's run may be where sums are exact. Collective."""
        built, balancer = self._built, self._balancer
        assert balancer is not None
        count, now = built.config.micro_batches, max(built.batches.sharing.now.slots)
        gradients = sum(p.numel() * p.element_size() for p in built.model.parameters() if p.requires_grad)
        own = most_slots(count, now, gradients, int(_SPARED * _free(built.world.device)))
        balancer.bound(built.world.gather(own), first)  # collective
        self._keep()

    def _keep(self) -> None:
        assert self._balancer is not None
        self._built.state["shares"] = self._balancer.state


def most_slots(micro_batches: int, now: int, gradients: int, free: int) -> int:
    """Micro-batches that a rank may have where so many bytes are free beside what `now` of them take: `now` or more.

    A run of n holds up to 2 log2(n) + 2 sums of the gradients' size (see docs/exactness.md); nothing else on the device
    grows with it.
    """
    held = 2 * math.ceil(math.log2(now))
    fitting = (held + free // max(gradients, 1)) // 2
    return micro_batches if fitting >= micro_batches.bit_length() else min(micro_batches, max(now, 1 << fitting))


def _free(device: torch.device) -> int:
    """Bytes: of a CUDA device what no step has needed so far, of a host this process's part of what is available."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        return max(0, whole - torch.cuda.max_memory_reserved(device))
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):  # not Linux
        return 1 << 62
    return found // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
