"""Search for the largest sizes that fit, and for engines and techniques by estimated speed.

answer = find_plan(Planner(config, subject, size, device), fast=False, open_batch=True)
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from lockstep.config.engine_options import EngineOptions
from lockstep.config.parallel_options import Parallel
from lockstep.config.schema import Config, requested_seq_len
from lockstep.diagnose.plan.devices import DeviceSpec
from lockstep.diagnose.plan.estimate import NODE, MemoryEstimate, Planner, Sizes, Times, largest, step_time
from lockstep.diagnose.plan.recorder import Work
from lockstep.engines.registry import engine_class, variants
from lockstep.errors import UsageError
from lockstep.transforms.precision import PARAMETERS

__all__ = ["PlanResult", "PlanRow", "find_plan"]

_POLICIES = ("none", "selective", "full")
# Samples of a micro-batch.
_MOST = 1 << 14
# Times the requested length, if the model has no limit.
_LONGEST = 64
# Rows of the table.
_SHOWN = 12
# Micro-batch sizes that are tried for a row.
_RETRIES = 3
# Blocks in the search for the deepest model.
_DEEPEST = 1 << 12


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRow:
    """A configuration that fits.

    Attributes:
        config: all options.
        flags: to add to the command.
        peak: bytes a rank.
        times: of a step.
        traced: it was estimated by a trace of its own, not combined from others.
    """

    config: Config
    flags: tuple[str, ...]
    peak: float
    times: Times
    traced: bool = False

    @property
    def rate(self) -> float:
        """Samples a second, over all ranks."""
        return self.config.batch_size / self.times.step


@dataclasses.dataclass(frozen=True, slots=True)
class PlanResult:
    """The answer of `lockstep plan`.

    Attributes:
        found: the estimate of the request; its `config` has every value.
        fits: whether that fits.
        micro_batch, seq_len, layers: the largest that fit, all else as requested; 0: none; None: no such size, or not
            searched.
        rows: alternatives, the fastest first.
        advice: the first change to make if the request does not fit; else "".
        note: see `Planner`; with a note nothing else is searched.
    """

    config: Config
    device: DeviceSpec
    size: int
    sizes: Sizes
    found: MemoryEstimate
    times: Times
    fits: bool
    micro_batch: int | None = None
    seq_len: int | None = None
    layers: int | None = None
    rows: tuple[PlanRow, ...] = ()
    advice: str = ""
    note: str = ""


def find_plan(planner: Planner, *, fast: bool, open_batch: bool) -> PlanResult:
    """Answer the planner's request.

    Args:
        fast: only that; and if it does not fit, the micro-batch that would.
        open_batch: other batch sizes may be proposed.

    Raises:
        UsageError: it cannot be planned.
    """
    config = planner.config
    device = planner.device
    size = planner.size
    estimate = planner.estimate(config)
    fits = estimate.peak <= device.room
    times = _times(planner, estimate)
    plain = PlanResult(config, device, size, planner.sizes, estimate, times, fits, note=planner.note)
    if fast or planner.note:
        if fits or planner.note:
            return plain
        return dataclasses.replace(plain, micro_batch=_micro_batch(planner, open_batch))
    rows = _rows(planner, open_batch)
    return dataclasses.replace(
        plain,
        micro_batch=_micro_batch(planner, open_batch),
        seq_len=_seq_len(planner, estimate),
        layers=_layers(planner),
        rows=tuple(rows),
        advice="" if fits else _advice(planner, rows, open_batch),
    )


def _micro_batch(planner: Planner, open_batch: bool) -> int:
    config = planner.config
    low = 2 if config.micro_size > 1 and not planner.device.host else 1

    def evaluate(size: int) -> float:
        return planner.estimate(_with_micro(planner, config, size, open_batch)).peak

    return largest(
        evaluate,
        [size for size in _micro_sizes(planner, config, open_batch, every=True) if size >= low],
        planner.device.room,
    )


def _micro_sizes(planner: Planner, config: Config, open_batch: bool, every: bool = False) -> list[int]:
    """Return the allowed micro-batch sizes: those that divide a fixed batch."""
    if open_batch:
        if every:
            return list(range(1, 513))
        return [1 << power for power in range(_MOST.bit_length())]
    batch = planner.config.batch_size
    divisors = []
    for size in range(1, batch + 1):
        if batch % size == 0:
            divisors.append(size)
    least = planner.replicas(config) if config.exact else 1
    if config.parallel.pipeline > 1:
        # Each stage of a replica works on a micro-batch of its own.
        least = planner.replicas(config) * config.parallel.pipeline
    return [size for size in divisors if batch // size >= least] or [1]


def _with_micro(planner: Planner, config: Config, micro: int, open_batch: bool) -> Config:
    """Set the micro-batch size, and keep the micro-batches a step if the batch is open."""
    batch = config.batch_size
    if open_batch:
        batch = micro * max(planner.replicas(config), planner.config.batch_size // planner.config.micro_size)
    return dataclasses.replace(config, micro_batch_size=micro, batch_size=batch, eval_micro_batch_size=micro)


def _seq_len(planner: Planner, estimate: MemoryEstimate) -> int | None:
    subject = planner.subject
    config = planner.config
    if subject.windows is None:
        return None
    windows = subject.windows
    length = requested_seq_len(config)
    # The subject was built with this length too.
    if subject.context:
        length = min(length, subject.context)
    most = subject.context or _LONGEST * length
    step = 64 if length % 64 == 0 else max(1, length // 8)
    subjects: dict[int, Any] = {}
    points = ((0, estimate.held), (length, estimate.peak))

    def evaluate(tokens: int) -> float:
        # Keep the subject: its id is part of the key of its traces, and must not be used again.
        subjects[tokens] = windows(tokens)
        return planner.estimate(dataclasses.replace(config, seq_len=tokens), subject=subjects[tokens]).peak

    return largest(evaluate, list(range(step, most + 1, step)), planner.device.room, points)


def _layers(planner: Planner) -> int | None:
    # Fewer blocks on a stage are traced and not extrapolated, so a task would have to make a deeper model.
    least = 6 * planner.config.parallel.pipeline
    if planner.sizes.layers < least or planner.config.activation_checkpointing.startswith("every:"):
        return None
    deep = list(range(least, _DEEPEST))
    return largest(lambda layers: planner.estimate(planner.config, layers).peak, deep, planner.device.room)


def _times(planner: Planner, estimate: MemoryEstimate) -> Times:
    width = PARAMETERS[estimate.config.precision].itemsize
    config = estimate.config
    sizes = planner.part_sizes(config)
    kind = engine_class(config.engine)
    split = kind.count_exchanged(config.engine_options, width * sizes.parameters, width * sizes.trained)
    return step_time(estimate, planner.device, planner.size, split)


def _rows(planner: Planner, open_batch: bool) -> list[PlanRow]:
    """Combine engines and policies, each with its fastest micro-batch that fits.

    Layers are divided over more ranks only where the model does not fit otherwise, or as requested: that sends more.
    """
    rows = list[PlanRow]()
    for parallel in _divisions(planner):
        if not rows or parallel == planner.config.parallel:
            rows += _rows_of(planner, dataclasses.replace(planner.config, parallel=parallel), open_batch)
    return _trace_rows(planner, rows, open_batch)


def _divisions(planner: Planner) -> Iterator[Parallel]:
    """Yield the ways to divide layers that a run takes, the fewest ranks first; stages and sequences as requested."""
    asked = planner.config.parallel
    tensor = {1, asked.tensor}
    for power in range(1, NODE.bit_length()):
        tensor.add(1 << power)
    for degree in sorted(tensor):
        whole = asked.vocabulary or degree == 1
        parallel = dataclasses.replace(asked, tensor=degree, vocabulary=whole)
        if planner.size % parallel.size:
            continue
        try:
            # Options or layers of the run may not go with it, as its engine may not; others are tried.
            any_engine = dataclasses.replace(planner.config, engine="auto", engine_options=EngineOptions())
            planner.part_sizes(dataclasses.replace(any_engine, parallel=parallel))
        except UsageError:
            continue
        yield parallel


def _rows_of(planner: Planner, config: Config, open_batch: bool) -> list[PlanRow]:
    """Combine engines and policies for the degrees of `config`."""
    width = PARAMETERS[config.precision].itemsize
    sizes = planner.part_sizes(config)
    state_bytes = (width * sizes.parameters, width * sizes.trained, 2.0 * width * sizes.trained)
    rows = list[PlanRow]()
    base: dict[tuple[str, int], MemoryEstimate] = {}
    for name, options in variants(planner.size, config.engine_options, config.parallel.size):
        try:
            # A run would refuse what the request does not go with.
            dataclasses.replace(planner.asked, engine=name, engine_options=options, parallel=config.parallel)
        except UsageError:
            continue
        plain = dataclasses.replace(config, engine=name, engine_options=options)
        if plain.optim.name in ("adamw", "adam"):
            states = state_bytes[2]
        else:
            states = 0.0
        # Skip engines that cannot fit even without activations: a trace takes seconds.
        least = engine_class(name).least_held(options, planner.gradient_ranks(config), (*state_bytes[:2], states))
        if least > planner.device.room:
            continue
        try:
            engine_estimate = planner.estimate(_at(planner, plain, "none", 1, open_batch))
            if not base:
                base = _policies(planner, plain, open_batch)
        except UsageError:
            continue
        for policy in _POLICIES:
            if (policy, 1) in base:
                rows += _best_row(planner, plain, policy, engine_estimate, base, open_batch)
    return rows


def _at(planner: Planner, config: Config, policy: str, times: int, open_batch: bool) -> Config:
    sizes = _micro_sizes(planner, config, open_batch)
    norm = planner.config.micro_size > 1 and len(sizes) > 2
    size = sizes[min(times - 1 + norm, len(sizes) - 1)]
    return dataclasses.replace(_with_micro(planner, config, size, open_batch), activation_checkpointing=policy)


def _policies(planner: Planner, config: Config, open_batch: bool) -> dict[tuple[str, int], MemoryEstimate]:
    """Estimate each policy with the first engine, that of `config`, at two micro-batch sizes.

    The key is (policy, 1 for the smallest or 2 for a larger micro-batch). At the larger one only the first policy is
    traced: memory that does not grow with the micro-batch (parameters, states, gathered weights) is the same for the
        others.
    The final rows are traced by themselves.
    """
    estimates = {}
    for policy in _POLICIES:
        try:
            small = estimates[policy, 1] = planner.estimate(_at(planner, config, policy, 1, open_batch))
            larger = _at(planner, config, policy, 2, open_batch)
            plain = estimates.get(("none", 2))
            estimates[policy, 2] = (
                _extrapolate(small, estimates["none", 1], plain, larger) if plain else planner.estimate(larger)
            )
        except UsageError:
            # The model has no known blocks, which the policy needs.
            continue
    return estimates


def _extrapolate(estimate: MemoryEstimate, low: MemoryEstimate, high: MemoryEstimate, config: Config) -> MemoryEstimate:
    """Scale `estimate` to larger micro-batches.

    `low` and `high` determine its constant part.
    """
    small = low.config.micro_size
    large = high.config.micro_size
    if small == large:
        return dataclasses.replace(estimate, config=config)

    def extrapolate(value: float, less: float, more: float) -> float:
        fixed = less - small * (more - less) / (large - small)
        return value + (large - small) * max(0.0, value - fixed) / small

    phases = {}
    for name, size in estimate.phases.items():
        if name in low.phases and name in high.phases:
            phases[name] = extrapolate(size, low.phases[name], high.phases[name])
    scaled_work, less, more = (entry.work["compute"] for entry in (estimate, low, high))
    work = {**estimate.work, "compute": Work.of_each(extrapolate, scaled_work, less, more)}
    return dataclasses.replace(estimate, config=config, phases=phases, work=work, batch=estimate.batch * large / small)


def _best_row(
    planner: Planner,
    config: Config,
    policy: str,
    own: MemoryEstimate,
    base: dict[tuple[str, int], MemoryEstimate],
    open_batch: bool,
) -> Iterable[PlanRow]:
    """Return the fastest size that fits.

    It is interpolated between two estimates of the first engine, plus this engine's difference in each phase.
    """
    low = base[policy, 1]
    high = base.get((policy, 2), base[policy, 1])
    plain = base["none", 1]
    best: PlanRow | None = None
    for size in _micro_sizes(planner, config, open_batch):
        sized = dataclasses.replace(_with_micro(planner, config, size, open_batch), activation_checkpointing=policy)
        estimate = _combine(low, high, own, plain, sized, planner)
        # Larger micro-batches need more memory, so none of them fits.
        if estimate.peak > planner.device.room:
            break
        row = PlanRow(sized, _flags(planner, sized), estimate.peak, _times(planner, estimate))
        # A larger micro-batch must be faster by 2 %: the estimate is not finer than that.
        if best is None or row.rate > 1.02 * best.rate:
            best = row
    if best:
        return [best]
    return []


def _combine(
    low: MemoryEstimate,
    high: MemoryEstimate,
    own: MemoryEstimate,
    plain: MemoryEstimate,
    config: Config,
    planner: Planner,
) -> MemoryEstimate:
    small = low.config.micro_size
    large = high.config.micro_size
    if large > small:
        times = (config.micro_size - small) / (large - small)
    else:
        times = 0.0

    def line(a: float, b: float) -> float:
        return a + times * (b - a)

    phases = {}
    for name, size in low.phases.items():
        if name in high.phases and name in own.phases and name in plain.phases:
            phases[name] = line(size, high.phases[name]) + own.phases[name] - plain.phases[name]
    compute = Work.of_each(
        lambda small, large, engine, first: line(small, large) + engine - first,
        *(entry.work["compute"] for entry in (low, high, own, plain)),
    )
    work = {"compute": compute, "update": own.work["update"]}
    slots = -(-config.micro_batches // planner.replicas(config))
    batch = line(low.batch, high.batch) * planner.batches(slots)
    peak = (1 + planner.device.fragments) * (max(phases.values()) + batch)
    return dataclasses.replace(low, config=config, peak=peak, phases=phases, work=work, slots=slots)


def _trace_rows(planner: Planner, rows: list[PlanRow], open_batch: bool) -> list[PlanRow]:
    """Trace each row, with a smaller micro-batch if it does not fit."""
    traced_rows = list[PlanRow]()
    for row in sorted(rows, key=lambda row: -row.rate)[:_SHOWN]:
        sizes = []
        for size in _micro_sizes(planner, row.config, open_batch):
            if size <= row.config.micro_size:
                sizes.append(size)
        for size in sizes[: -_RETRIES - 1 : -1]:
            config = _with_micro(planner, row.config, size, open_batch)
            try:
                estimate = planner.estimate(config)
            except UsageError:
                break
            if estimate.peak <= planner.device.room:
                traced_rows.append(
                    PlanRow(config, _flags(planner, config), estimate.peak, _times(planner, estimate), traced=True)
                )
                break
    return sorted(traced_rows, key=lambda row: -row.rate)


def _flags(planner: Planner, config: Config) -> tuple[str, ...]:
    """Return the flags that a command needs for this configuration."""
    request = planner.asked
    flags = ["--engine", config.engine]
    if config.engine_options.sharding != request.engine_options.sharding:
        flags += ["--engine.sharding", config.engine_options.sharding]
    if config.parallel.tensor != request.parallel.tensor:
        flags += ["--parallel.tensor", str(config.parallel.tensor)]
    flags += ["--activation-checkpointing", config.activation_checkpointing]
    flags += ["--batch-size", str(config.batch_size), "--micro-batch-size", str(config.micro_size)]
    return tuple(flags)


def _advice(planner: Planner, rows: list[PlanRow], open_batch: bool) -> str:
    """Return the first change to make."""
    if rows:
        return f"change first: {' '.join(rows[0].flags)}"
    config = planner.config
    room = planner.device.room
    *_, last_variant = variants(planner.size, config.engine_options, config.parallel.size)
    least = dataclasses.replace(
        _at(planner, config, "full", 1, open_batch),
        engine=last_variant[0],
        engine_options=last_variant[1],
        exact=config.exact,
    )
    least = dataclasses.replace(
        least, engine_options=dataclasses.replace(last_variant[1], sharding=config.engine_options.sharding)
    )
    candidates: list[tuple[str, dict[str, Any]]] = [("", {})]
    if config.precision == "bf16" and planner.size > 1:
        narrow = dataclasses.replace(least.engine_options, param_dtype="bf16")
        candidates.append(
            ("--precision float32 --engine.param-dtype bf16, ", {"precision": "float32", "engine_options": narrow})
        )
    candidates.append(("--precision bf16-true, ", {"precision": "bf16-true"}))
    least_peak = math.inf
    for prefix, changes in candidates:
        for policy in ("full", "none"):
            try:
                # A divided model does not go with every precision.
                candidate = dataclasses.replace(least, activation_checkpointing=policy, **changes)
                peak = planner.estimate(candidate).peak
            except UsageError:
                continue
            least_peak = min(least_peak, peak)
            if peak <= room:
                return f"change first: {prefix}{' '.join(_flags(planner, candidate))}"
    if not math.isfinite(least_peak):
        return "no engine can train it here"
    return (
        "change first: the model, the sample length or the device: the smallest configuration needs "
        f"{least_peak / room:.2f} times the device's memory"
    )
