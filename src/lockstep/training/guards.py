"""Run the guards after each step, and balance the ranks' shares.

guards = RunGuards(built, exchange, step_loader, seed, clock)
for record in steps(..., StepControl(..., guards.limit, ..., guards.audit)):
    for step in guards.read(record): ...    # whose numbers are on the host by now, checked
    guards.after(record)
    ...
    for step in guards.rest(): ...          # before a checkpoint, an evaluation, the end
"""

import logging
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint.check import not_finite_line
from lockstep.clock import Clock
from lockstep.config.engine_options import ENGINES
from lockstep.data.batches import StepLoader
from lockstep.distributed.balance import ShareReport, check_alike
from lockstep.distributed.exchange import StepExchange
from lockstep.engines.buffers import unmoved
from lockstep.engines.registry import kinds, name_of
from lockstep.errors import LockstepError
from lockstep.files import bytes_text
from lockstep.guards import desync
from lockstep.guards.audit import Again, Audit
from lockstep.guards.nonfinite import DeferredReader, ReadStep, Rollback, Skips, origin
from lockstep.guards.spike import Spike
from lockstep.guards.straggler import Straggler
from lockstep.loop import UNAUDITED, Audits, loss_of
from lockstep.records import StepRecord
from lockstep.task import looks_at_whole_step
from lockstep.training.build import Built
from lockstep.training.build_engine import kernels_of
from lockstep.training.open_run import describe_ranks, find_bad_parameters
from lockstep.training.trainable import trained_digest
from lockstep.whole_step import zero_of

__all__ = [
    "Balancing",
    "RunGuards",
    "device_of",
    "differing",
    "ranges",
]


# --- devices of the ranks

_SAME = 0.05  # relative difference of memory sizes that counts as equal: a host's depends on its firmware


def device_of(device: torch.device) -> list[Any]:
    """Return [name, bytes of memory] of a rank's device.

    Of a CPU it is the model's name and the host's memory.
    """
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return [found.name, found.total_memory]
    return [_processor(), _host_memory()]


def differing(devices: Sequence[Sequence[Any]], speeds: Sequence[float] = ()) -> str:
    """Describe ranks' devices that differ in name, memory or speed; "" if they are alike.

    Args:
        devices: by rank, from `device_of`.
        speeds: by rank, relative to the fastest; () if unknown.
    """
    speeds = speeds or [1.0] * len(devices)
    kinds: list[tuple[str, int, float, list[int]]] = []
    for rank, ((name, size), speed) in enumerate(zip(devices, speeds, strict=True)):
        for kind in kinds:
            if kind[0] == name and abs(kind[1] - size) <= _SAME * kind[1] and abs(kind[2] - speed) <= _SAME:
                kind[3].append(rank)
                break
        else:
            kinds.append((name, size, speed, [rank]))
    if len(kinds) < 2:
        return ""
    shown = [
        f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}: {name}, {bytes_text(size)}"
        + (f", speed {speed:.2g}" if min(speeds) < 1.0 else "")
        for name, size, speed, ranks in kinds
    ]
    return f"unequal devices: {'; '.join(shown)}"


def ranges(ranks: Sequence[int]) -> str:
    """Format sorted numbers as `0-3, 6`."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or no "model name" line
        return platform.processor() or platform.machine()


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


# --- balance of shares

_LOG = logging.getLogger("lockstep")
_SPARED = 0.5  # share of the free memory that larger shares may use


class Balancing:
    """Measure this rank, and let the balancer decide the shares. Its constructor is collective.

    Raises:
        LockstepError: the ranks divide the first step differently.
    """

    def __init__(self, built: Built, clock: Clock) -> None:
        self._built, self._balancer, self._clock = built, built.balancer, clock
        data = built.config.data
        self._ahead = data.workers * data.prefetch  # steps that loader processes may prefetch, with one slot each
        self._count, self._bounded = 0, not built.config.exact
        line = differing(built.world.gather(device_of(built.world.device)), self._speeds)  # collective
        if self._balancer:  # the first step; later ones are compared in each exchange
            check_alike(built.world.gather(self._balancer.check(built.start, built.start + 1)))  # collective
        if line and built.world.is_main:
            hint = "" if self._balancer or not self._shares else "; --shares auto gives each what it can do"
            _LOG.info(line + hint)

    @property
    def _shares(self) -> bool:
        """Whether the engine's ranks may have unequal shares."""
        return ENGINES[name_of(self._built.config.engine, self._built.world)].shares

    @property
    def _speeds(self) -> list[float]:
        """By rank, speed relative to the fastest, as measured before a resume; [] if unknown."""
        costs = self._balancer.costs if self._balancer else ()
        return [min(costs) / cost for cost in costs] if len(set(costs)) > 1 else []

    def told(self, step: int, stop: int, waited: float) -> list[float]:
        """Return this rank's `ShareReport` as numbers; [] without a balancer. See `StepExchange`."""
        if self._balancer is None:
            return []
        spent, stop = self._clock.spent(), min(stop, self._built.run_plan.step_plan.steps)
        data, forward = spent.get("data", 0.0) - waited, spent.get("forward", 0.0)
        alone = spent.get("backward/alone", 0.0)
        return list(ShareReport(self._clock.steps, data, forward, alone, self._balancer.check(step, stop)))

    def after(self, exchange: StepExchange) -> None:
        """Process the ranks' last reports. Collective the first time with `--exact`.

        Raises:
            LockstepError: the ranks divide the steps differently.
        """
        if self._balancer is None or exchange.count == self._count:
            return
        self._count, first = exchange.count, exchange.until + self._ahead
        line = self._balancer.heard([ShareReport(*row) for row in exchange.also], first)
        if not self._bounded:
            self._bounded = True
            self._bound(first)
        if line:
            self._keep()
            if self._built.world.is_main and first < self._built.run_plan.step_plan.steps:
                _LOG.info(line)

    def _bound(self, first: int) -> None:
        """Bound each rank's share, once step 1 shows how much memory is free. Collective.

        Only with `--exact`, whose sums take memory that grows with the share.
        """
        built, balancer = self._built, self._balancer
        assert balancer is not None
        count, now = built.config.micro_batches, max(built.batches.sharing.now.slots)
        gradients = sum(p.numel() * p.element_size() for p in built.model.parameters() if p.requires_grad)
        own = most_slots(count, now, gradients, int(_SPARED * _free(built.world.device)))
        balancer.bound(built.world.gather(own), first)  # collective
        self._keep()

    def _keep(self) -> None:
        assert self._balancer is not None
        self._built.state.shares = self._balancer.state


def most_slots(micro_batches: int, now: int, gradients: int, free: int) -> int:
    """Return how many micro-batches a rank may have in the free memory: `now` or more.

    A run of n micro-batches holds up to 2 log2(n) + 2 sums of the gradients' size (see docs/exactness.md); nothing else
    on the device grows with it.

    Args:
        now: micro-batches that it has, whose memory is taken already.
        gradients: bytes of all gradients.
        free: bytes that are still free.
    """
    held = 2 * math.ceil(math.log2(now))
    fitting = (held + free // max(gradients, 1)) // 2
    return micro_batches if fitting >= micro_batches.bit_length() else min(micro_batches, max(now, 1 << fitting))


def _free(device: torch.device) -> int:
    """Return free bytes of a device or of this process's part of a host.

    Of a CUDA device it is what no step has reserved so far.
    """
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        return max(0, whole - torch.cuda.max_memory_reserved(device))
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):  # not Linux
        return 1 << 62
    return found // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


# --- guards


class RunGuards:
    """The guards of a run. Every rank calls each method at the same steps.

    Attributes:
        audit: passed to the loop.
    """

    def __init__(
        self,
        built: Built,
        exchange: StepExchange,
        step_loader: StepLoader,
        seed: Callable[[int, int], None],
        clock: Clock,
    ) -> None:
        self._built, self._exchange, self._step_loader, self._seed = built, exchange, step_loader, seed
        self._config = built.config.guards
        self._skips = Skips(built.folder.checkpoints / "skips.json", self._config.limit, built.world, built.plan)
        self._first, self._dropped = built.start, frozenset(self._skips.steps)  # read now: a save moves `built.start`
        if self._dropped:  # the checkpoint may have been written before the list
            built.state.steps_left_out = len(self._dropped)
        self._reader, self._spike = DeferredReader(built.world.device), Spike()
        self._learnt_with = trained_digest(built.state.trained)  # the parameters whose gradient norms it has learnt
        if learnt := built.state.spike:
            self._spike.load(learnt)
            self._learnt_with = self._learnt_with if learnt.trained is None else learnt.trained
        relieved = {"relieved": built.balancer.relieves} if built.balancer else {}
        self._straggler = Straggler(self._config.straggler, **relieved)
        self._fp16 = built.config.precision == "fp16"
        self._loss, self._whole = loss_of(built.task), looks_at_whole_step(built.task)
        self.audit: Audits = self._audit(clock) if self._config.audit else UNAUDITED
        if built.start and built.world.size > 1:  # a new run's weights were compared in `build`
            desync.check(built.all_tensors(), built.world, built.start, self._kinds)  # collective

    def _audit(self, clock: Clock) -> Audit:
        built = self._built
        kernels = kernels_of(built.config.compile, built.run_plan.step_plan)
        again = Again(built.model, built.task, self._loss, self._seed, built.world.device, kernels)
        share, seed, folder = self._config.audit, built.config.seed, built.folder.path
        kept = partial(checkpoint.list_steps, folder)
        return Audit(share, seed, built.start, built.world, built.batches, built.model, again, clock, kept)

    def limit(self, step: int) -> float:
        """Return the norm below which the gradient of `step` is applied."""
        if step in self._dropped:
            return -math.inf
        if self._config.spike != "off" and (trained := trained_digest(self._built.state.trained)) != self._learnt_with:
            self._spike.forget(step)
            self._learnt_with = trained
        return self._spike.limit(step) if self._config.spike == "skip" else math.inf

    @property
    def late(self) -> bool:
        """Whether a step's numbers arrive after the step, as from a device."""
        return self._reader.late

    def read(self, record: StepRecord) -> Iterator[ReadStep]:
        """Add a step, and yield the steps whose numbers are on the host, once checked.

        Raises:
            LockstepError: a guard stops the run.
            Rollback: the run rolls back.
        """
        for step in self._reader.add(record, self._step_loader.present):
            self._look(step)
            yield step

    def rest(self, *, look: bool = True) -> Iterator[ReadStep]:
        """Yield the steps that were added and not yielded yet. Raises as `read`.

        Args:
            look: check them; False if the run ends by another error anyway.
        """
        for step in self._reader.rest():
            if look:
                self._look(step)
            yield step

    def after(self, record: StepRecord) -> None:
        """Check stragglers and replicas after a step.

        Raises:
            LockstepError: the ranks' replicas differ.
        """
        slow = self._straggler.after(record.step, self._exchange)
        if slow and self._built.world.is_main:
            _LOG.warning(slow)
        freq, done = self._config.desync_freq, record.step + 1
        replicas = freq and self._built.world.size > 1
        if replicas and (done % freq == 0 or done == self._built.last):  # the final weights are compared too
            desync.check(self._built.all_tensors(), self._built.world, done, self._kinds)  # collective

    def _kinds(self) -> dict[str, str]:
        return kinds(self._built.engine)

    def keep(self) -> None:
        """Store what the spike guard has learnt in the run's state."""
        if self._config.spike != "off":
            self._built.state.spike = self._spike.state(self._learnt_with)

    def _look(self, step: ReadStep) -> None:
        number = step.record.step
        if number in self._dropped:
            return
        if not math.isfinite(step.norm):  # the same on every rank
            if self._is_fault(step):
                self._bad(step)
        elif self._config.spike != "off" and self._spike.sees(number, step.norm):
            self._spiked(step)

    def _is_fault(self, step: ReadStep) -> bool:
        """Whether more than a float16 loss scale that was too large is at fault.

        If only the scale was, every loss is finite. Collective for fp16.
        """
        if not self._fp16:
            return True
        finite = all(math.isfinite(loss) for loss in step.losses)
        return not all(self._built.world.gather(finite))  # collective

    def _bad(self, step: ReadStep) -> None:
        built = self._built
        # With manual optimization this step has already changed the weights, so its samples are examined.
        bad = {} if step.record.applied else find_bad_parameters(built)  # collective; waits for the device
        if bad:
            self._bad_weights(step, not_finite_line([*bad], describe_ranks(bad, built.world)))
            return
        with unmoved(built.own.values()):  # which the loss may change
            told = built.batches.samples, built.world
            found = origin(step, built.model, self._loss_of, self._seed, *told, whole=self._whole)  # collective
        what = f"step {step.record.step}: the gradient is not finite (norm {step.norm}) and was not applied; {found}"
        self._left_out(step.record.step, what, self._config.nonfinite)

    def _bad_weights(self, step: ReadStep, line: str) -> None:
        """Stop or roll back if the weights themselves are not finite.

        No sample is at fault, and no later step repairs them.

        Args:
            line: which tensors are not finite.
        """
        number, first = step.record.step, self._first
        what = f"step {number}: the gradient is not finite (norm {step.norm}) and was not applied; {line}"
        updates = (n for n in range(number - 1, first - 1, -1) if n not in self._skips.steps)
        update = next(updates, None)  # the last one that was applied
        if update is None:
            raise LockstepError(f"{what} since the run began at step {first}; begin with other weights")
        what += f" since the update of step {update}"
        if self._config.nonfinite != "rollback":
            raise LockstepError(
                f"{what}; lower --lr, look at the optimizer, or leave that update out: --guards.nonfinite rollback"
            )
        self._left_out(update, what, "rollback")

    def _loss_of(self, batch: Any) -> Tensor:
        built = self._built
        if self._whole:  # single samples have no loss here: test their outputs instead
            return zero_of(built.task.outputs(built.engine.model, batch.data))
        return self._loss(built.engine.model, batch)

    def _spiked(self, step: ReadStep) -> None:
        number = step.record.step
        limit = self._spike.limit(number)
        what = f"step {number}: the gradient's norm {step.norm:.4g} is above {limit:.4g}, three times the usual or more"
        if self._config.spike != "warn":
            self._left_out(number, what, self._config.spike)
        elif self._built.world.is_main:
            _LOG.warning("%s; --guards.spike skip or rollback would leave it out", what)

    def _left_out(self, step: int, what: str, action: str) -> None:
        if action == "stop":
            raise LockstepError(
                f"{what}; lower --lr, look at these samples, or leave such steps out: --guards.nonfinite skip"
            )
        self._skips.add(step, what)  # collective
        self._built.state.steps_left_out = len(self._skips.steps)
        if self._built.world.is_main:
            _LOG.warning("%s; left out (%d so far)", what, len(self._skips.steps))
        if action == "rollback":
            raise Rollback(f"step {step}: back to the newest whole checkpoint")
