"""Run the guards after each step, and balance the ranks' shares.

guards = RunGuards(built, exchange, step_loader, seed, clock)
for record in steps(..., StepControl(..., guards.limit, ..., guards.audit)):
    for step in guards.read(record): ...    # steps whose numbers are on the host, checked
    guards.after_step(record)
    ...
    for step in guards.flush(): ...         # before a checkpoint, an evaluation, the end
"""

import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint.check import not_finite_line
from lockstep.clock import Clock
from lockstep.config.engine_options import ENGINES
from lockstep.data.batches import StepLoader
from lockstep.distributed.balance import ShareReport, check_same_shares
from lockstep.distributed.exchange import MOST_STEPS, StepExchange
from lockstep.engines.buffers import restore_tensors
from lockstep.engines.registry import kinds, name_of, replaced_copies
from lockstep.errors import DifferenceError, LockstepError
from lockstep.files import bytes_text
from lockstep.guards import desync
from lockstep.guards.audit import Audit, Recomputer
from lockstep.guards.nonfinite import DeferredReader, ReadStep, Rollback, Skips, origin
from lockstep.guards.spike import Spike
from lockstep.guards.straggler import Straggler
from lockstep.loop import NO_AUDIT, Audits, loss_of
from lockstep.records import StepRecord
from lockstep.task import has_step_loss
from lockstep.training.state.finite import describe_ranks, find_bad_parameters
from lockstep.training.state.parts import RunParts
from lockstep.training.state.run_dir import RunFolder
from lockstep.training.state.trained_set import trained_digest
from lockstep.training.trial.compilation import choose_kernels
from lockstep.whole_step import zero_of

__all__ = [
    "RunGuards",
    "ShareReporter",
    "describe_unequal_devices",
    "format_ranges",
    "name_and_memory",
    "skips_file",
]


# --- devices of the ranks

# Share up to which memory sizes and speeds count as equal: firmware takes some of a host's memory.
_TOLERANCE = 0.05


def name_and_memory(device: torch.device) -> list[Any]:
    """Return [name, bytes of memory] of a device, or of the CPU and its host."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return [properties.name, properties.total_memory]
    return [_processor_name(), _host_memory()]


def describe_unequal_devices(devices: Sequence[Sequence[Any]], speeds: Sequence[float] = ()) -> str:
    """Describe the ranks' devices if their names, memories or speeds differ; otherwise return "".

    Args:
        devices: by rank, from `name_and_memory`.
        speeds: by rank, relative to the fastest; () if unknown.
    """
    speeds = speeds or [1.0] * len(devices)
    kinds: list[tuple[str, int, float, list[int]]] = []
    for rank, ((name, size), speed) in enumerate(zip(devices, speeds, strict=True)):
        for group in kinds:
            if (
                group[0] == name
                and abs(group[1] - size) <= _TOLERANCE * group[1]
                and abs(group[2] - speed) <= _TOLERANCE
            ):
                group[3].append(rank)
                break
        else:
            kinds.append((name, size, speed, [rank]))
    if len(kinds) < 2:
        return ""
    groups = [
        f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}: {name}, {bytes_text(size)}"
        + (f", speed {speed:.2g}" if min(speeds) < 1.0 else "")
        for name, size, speed, ranks in kinds
    ]
    return f"unequal devices: {'; '.join(groups)}"


def format_ranges(ranks: Sequence[int]) -> str:
    """Format sorted numbers as `0-3, 6`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in spans)


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        # Not Linux, or no line with a model name.
        return platform.processor() or platform.machine()


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


# --- balance of shares

_LOG = logging.getLogger("lockstep")
# Seconds. Until then slow parts are only in the log file: a run of a minute gains nothing by them.
_YOUNG = 60.0
# Share of the free memory that larger shares may use.
_USABLE_MEMORY = 0.5


def skips_file(folder: RunFolder) -> Path:
    """Return the path of the file with the run's skipped steps."""
    return folder.checkpoints / "skips.json"


class ShareReporter:
    """This rank's reports to the balancer of shares. Its constructor is collective.

    Raises:
        LockstepError: the ranks divide the first step differently.
    """

    def __init__(self, built: RunParts, clock: Clock) -> None:
        self._built = built
        self._balancer = built.balancer
        self._clock = clock
        data = built.config.data
        # Steps that loader processes may prefetch if a step has one slot.
        self._ahead = data.workers * data.prefetch
        # Turns of a stream that are no steps were requested too.
        if built.setup.training.order is None:
            self._ahead += MOST_STEPS
        self._count = 0
        self._bounded = not built.config.exact
        # Facts of a run's first steps. After a failure the ranks are others.
        facts = built.lock_facts
        if facts:
            devices = facts.devices
        else:
            # All ranks compare their devices again, because the ranks have changed.
            devices = built.world.gather(name_and_memory(built.world.device))
        line = describe_unequal_devices(devices, self._speeds)
        # The exchanges compare the shares of the later steps.
        if self._balancer:
            # No exchange precedes the first step, so its shares are compared here.
            check_same_shares(built.world.gather(self._balancer.check(built.start, built.start + 1)))
        if line and built.world.is_main:
            if self._balancer or not self._shares:
                hint = ""
            else:
                hint = "; --shares auto divides the work by speed"
            _LOG.info(line + hint)

    @property
    def _shares(self) -> bool:
        """Whether the engine's ranks may have unequal shares."""
        return ENGINES[name_of(self._built.config.engine, self._built.world)].shares

    @property
    def _speeds(self) -> list[float]:
        """By rank, speed relative to the fastest, as measured before a resume; [] if unknown."""
        costs = self._balancer.costs if self._balancer else ()
        if len(set(costs)) > 1:
            return [min(costs) / cost for cost in costs]
        return []

    def report(self, step: int, stop: int, wait: float) -> list[float]:
        """Return this rank's `ShareReport` as numbers; [] without a balancer.

        Args:
            step, stop: range of the steps that the exchange covers.
            wait: seconds that this rank has waited in exchanges, which loading includes.
        """
        if self._balancer is None:
            return []
        seconds = self._clock.spent()
        stop = min(stop, self._built.run_plan.step_plan.steps)
        data = seconds.get("data", 0.0) - wait
        forward = seconds.get("forward", 0.0)
        own_backward = seconds.get("backward/alone", 0.0)
        return list(ShareReport(self._clock.steps, data, forward, own_backward, self._balancer.check(step, stop)))

    def update(self, exchange: StepExchange) -> None:
        """Pass the ranks' last reports to the balancer. Collective the first time with `--exact`.

        Raises:
            LockstepError: the ranks divide the steps differently.
        """
        if self._balancer is None or exchange.count == self._count:
            return
        self._count = exchange.count
        first_step = exchange.horizon + self._ahead
        line = self._balancer.update([ShareReport(*row) for row in exchange.extra_by_rank], first_step)
        if not self._bounded:
            self._bounded = True
            self._bound_shares(first_step)
        if line:
            self._store_state()
            if self._built.world.is_main and first_step < self._built.run_plan.step_plan.steps:
                _LOG.info(line)

    def _bound_shares(self, first: int) -> None:
        """Bound each rank's share by the memory that step 1 left free. Collective.

        Only `--exact` needs it: the memory of its sums grows with the share.
        """
        built = self._built
        balancer = self._balancer
        assert balancer is not None
        count = built.config.micro_batches
        current_slots = max(built.batches.sharing.now.slots)
        gradients = sum(p.numel() * p.element_size() for p in built.model.parameters() if p.requires_grad)
        slots = max_slots(count, current_slots, gradients, int(_USABLE_MEMORY * _free_memory(built.world.device)))
        # The limits of all ranks decide the shares.
        balancer.bound(built.world.gather(slots), first)
        self._store_state()

    def _store_state(self) -> None:
        assert self._balancer is not None
        self._built.state.shares = self._balancer.state


def max_slots(micro_batches: int, now: int, gradients: int, free: int) -> int:
    """Return how many micro-batches of a step fit the free memory: `now` or more.

    The exact sums of n micro-batches take up to 2 log2(n) + 2 times the gradients' memory; nothing else on the device
    grows with n. See docs/inside/exactness.md.

    Args:
        now: micro-batches that the rank has, whose memory is in use.
        gradients: bytes of all gradients.
        free: bytes.
    """
    sums = 2 * math.ceil(math.log2(now))
    max_level = (sums + free // max(gradients, 1)) // 2
    if max_level >= micro_batches.bit_length():
        return micro_batches
    return min(micro_batches, max(now, 1 << max_level))


def _free_memory(device: torch.device) -> int:
    """Return the unreserved bytes of a CUDA device, or this process's share of the host's."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return max(0, total - torch.cuda.max_memory_reserved(device))
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        # Not Linux: the free memory is unknown, so there is no limit.
        return 1 << 62
    return available // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


# --- guards


class RunGuards:
    """The guards of a run; every rank calls each method at the same steps.

    Attributes:
        audit: for the loop, which recomputes micro-batches of other ranks with it.
    """

    def __init__(
        self,
        built: RunParts,
        exchange: StepExchange,
        step_loader: StepLoader,
        seed: Callable[[int, int], None],
        clock: Clock,
    ) -> None:
        self._built = built
        self._exchange = exchange
        self._step_loader = step_loader
        self._seed = seed
        self._config = built.config.guards
        skipped = built.lock_facts and built.lock_facts.skipped_steps
        built.lock_facts = None
        path = skips_file(built.setup.folder)
        self._skips = Skips(
            path, self._config.limit, built.world, built.setup.plan, skipped
        )  # collective after a lost rank
        # A save moves `built.start`, so keep its value.
        self._first = built.start
        self._skipped_steps = frozenset(self._skips.steps)
        # The checkpoint may be older than the list.
        if self._skipped_steps:
            built.state.steps_left_out = len(self._skipped_steps)
        self._reader = DeferredReader(built.world.device)
        self._spike = Spike()
        self._has_warned_of_spike = False
        # The parameters whose norms the spike guard has seen.
        self._spike_digest = trained_digest(built.state.trained)
        if stored := built.state.spike:
            self._spike.load(stored)
            if stored.trained is not None:
                self._spike_digest = stored.trained
        if built.balancer:
            relieved = {"relieved": built.balancer.can_relieve}
        else:
            relieved = {}
        self._straggler = Straggler(self._config.straggler, **relieved)
        # A young run reports slow parts only in its log file (`_YOUNG`).
        self._began = time.monotonic()
        self._is_young = True
        self._fp16 = built.config.precision == "fp16"
        self._loss = loss_of(built.task)
        self._whole_step = has_step_loss(built.task)
        self.audit: Audits = self._audit(clock) if self._config.audit else NO_AUDIT
        # `build` compared the weights of a new run; these come from a checkpoint.
        if built.start and built.world.size > 1:
            self._compare(built.start)  # collective

    def _audit(self, clock: Clock) -> Audit:
        built = self._built
        kernels = choose_kernels(built.config.compile, built.run_plan.step_plan)
        recompute = Recomputer(built.model, built.task, self._loss, self._seed, built.world.device, kernels)
        share = self._config.audit
        seed = built.config.seed
        folder = built.setup.folder.path
        list_checkpoints = partial(checkpoint.list_steps, folder)
        return Audit(
            share, seed, built.start, built.world, built.batches, built.model, recompute, clock, list_checkpoints
        )

    def limit(self, step: int) -> float:
        """Return the norm below which the gradient of `step` is applied."""
        if step in self._skipped_steps:
            return -math.inf
        if self._config.spike != "off" and (trained := trained_digest(self._built.state.trained)) != self._spike_digest:
            self._spike.forget(step)
            self._spike_digest = trained
        if self._config.spike == "skip":
            return self._spike.limit(step)
        return math.inf

    @property
    def late(self) -> bool:
        """Whether a step's numbers arrive after the step, as from a device."""
        return self._reader.late

    def read(self, record: StepRecord) -> Iterator[ReadStep]:
        """Add a step; check and yield the steps whose numbers are on the host.

        Raises:
            LockstepError: a guard stops the run.
            Rollback: the run rolls back.
        """
        for step in self._reader.add(record, self._step_loader.present):
            yield self._check(step)

    def flush(self, *, check: bool = True) -> Iterator[ReadStep]:
        """Yield the steps that `read` has not yielded yet; raises the same errors.

        Args:
            check: False if the run is failing by another error.
        """
        for step in self._reader.rest():
            yield self._check(step) if check else step

    def after_step(self, record: StepRecord, *, saves: bool = False) -> None:
        """Check for stragglers, and compare the replicas if that is due.

        Args:
            saves: a save is due, which compares them unless a hook prevents it.

        Raises:
            LockstepError: the ranks' replicas differ.
        """
        if self._is_young and time.monotonic() - self._began > _YOUNG:
            self._is_young = False
            self._straggler.repeat()
        slow = self._straggler.after(record.step, self._exchange)
        if slow and self._built.world.is_main:
            _LOG.warning(slow, extra={"only_file": self._is_young})
        freq = self._config.desync_freq
        global_step = record.step + 1
        # Without hooks the save of this step compares the replicas.
        is_compared_later = saves and not self._built.task.hooks
        if freq and global_step % freq == 0 and not is_compared_later:
            self.compare(global_step)  # collective

    def compare(self, step: int) -> None:
        """Compare the replicas' states after `step` steps, unless `--guards.desync-freq` is 0. Collective.

        Each save begins with it, so that no checkpoint has a difference that is found later.

        Raises:
            DifferenceError: they differ; the newest checkpoint is named.
        """
        if self._config.desync_freq and self._built.world.size > 1:
            self._compare(step)  # collective

    def _compare(self, step: int) -> None:
        built = self._built
        try:
            replaced = {}
            for name, total in replaced_copies(built.engine).items():
                replaced[desync.REPLACED + name] = total
            desync.check(built.all_tensors() | replaced, built.world, step, self._kinds)  # collective
        except DifferenceError as error:
            has_saved = built.start > 0 and built.config.checkpoint.mode != "none"
            if has_saved:
                line = f"; the newest checkpoint, of step {built.start}, is from before it"
            else:
                line = ""
            difference = DifferenceError(f"{error}{line}")
            difference.goes_back = True
            raise difference from None

    def _kinds(self) -> dict[str, str]:
        return kinds(self._built.engine)

    def store_state(self) -> None:
        """Store the spike guard's statistics in the run's state."""
        if self._config.spike != "off":
            self._built.state.spike = self._spike.state(self._spike_digest)

    def _check(self, step: ReadStep) -> ReadStep:
        """Check a step, and return it, with a mark if its gradient is a spike."""
        number = step.record.step
        if number in self._skipped_steps:
            return step
        # The norm is the same on every rank.
        if not math.isfinite(step.norm):
            if self._is_real_fault(step):
                self._handle_gradient(step)
        elif self._config.spike != "off" and self._spike.sees(number, step.norm):
            self._handle_spike(step)
            return step._replace(is_spike=True)
        return step

    def _is_real_fault(self, step: ReadStep) -> bool:
        """Whether the gradient overflowed for another reason than a large float16 loss scale.

        Collective for fp16: if only the scale is too large, every loss is finite.
        """
        if not self._fp16:
            return True
        finite = all(math.isfinite(loss) for loss in step.losses)
        # A loss that is not finite on one rank is a real fault for all.
        return not all(self._built.world.gather(finite))

    def _handle_gradient(self, step: ReadStep) -> None:
        built = self._built
        # With manual optimization this step has already changed the weights, so examine its samples.
        # Collective. Waits for the device, after a fault only.
        bad = {} if step.record.applied else find_bad_parameters(built)
        if bad:
            self._handle_weights(step, not_finite_line([*bad], describe_ranks(bad, built.world)))
            return
        # The loss may change them.
        with restore_tensors(built.own_tensors.values()):
            source = built.batches.samples, built.world
            cause = origin(step, built.model, self._loss_of, self._seed, *source, whole=self._whole_step)  # collective
        message = (
            f"step {step.record.step + 1}: the gradient is not finite (norm {step.norm}) and was not applied; {cause}"
        )
        self._skip_step(step.record.step, message, self._config.nonfinite)

    def _handle_weights(self, step: ReadStep, line: str) -> None:
        """Stop or roll back, because weights are not finite and no later step repairs them.

        Args:
            line: names the tensors.
        """
        number = step.record.step
        start_step = self._first
        message = f"step {number + 1}: the gradient is not finite (norm {step.norm}) and was not applied; {line}"
        updates = (n for n in range(number - 1, start_step - 1, -1) if n not in self._skips.steps)
        # The last update that was applied.
        update = next(updates, None)
        if update is None:
            raise LockstepError(f"{message} since the run began after step {start_step}; start from other weights")
        message += f" since the update of step {update + 1}"
        if self._config.nonfinite != "rollback":
            raise LockstepError(
                f"{message}; lower --lr, check the optimizer, or skip that update with --guards.nonfinite rollback"
            )
        self._skip_step(update, message, "rollback")

    def _loss_of(self, batch: Any) -> Tensor:
        built = self._built
        # A single sample has no loss over the step: test its outputs instead.
        if self._whole_step:
            return zero_of(built.task.outputs(built.engine.model, batch.data))
        return self._loss(built.engine.model, batch)

    def _handle_spike(self, step: ReadStep) -> None:
        number = step.record.step
        limit = self._spike.limit(number)
        message = (
            f"step {number + 1}: the gradient's norm {step.norm:.4g} is above {limit:.4g}, three times the usual or "
            "more"
        )
        if self._config.spike != "warn":
            self._skip_step(number, message, self._config.spike)
        elif self._built.world.is_main:
            if self._has_warned_of_spike:
                _LOG.warning("%s", message, extra={"only_file": True})
            else:
                _LOG.warning("%s; --guards.spike skip or rollback would skip it; later ones are counted", message)
            self._has_warned_of_spike = True

    def _skip_step(self, step: int, message: str, action: str) -> None:
        if action == "stop":
            raise LockstepError(
                f"{message}; lower --lr, check these samples, or skip such steps with --guards.nonfinite skip"
            )
        self._skips.add(step, message)  # collective
        self._built.state.steps_left_out = len(self._skips.steps)
        if self._built.world.is_main:
            _LOG.warning("%s; skipped (%d so far)", message, len(self._skips.steps))
        if action == "rollback":
            raise Rollback(f"step {step + 1}: rolling back to the newest complete checkpoint")
