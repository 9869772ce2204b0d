"""Search for what fits: the largest sizes, and engines and techniques by estimated speed.

answer = searched(Planner(config, subject, size, device), fast=False, open_batch=True)
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from lockstep.config.engine_options import EngineOptions
from lockstep.config.schema import Config
from lockstep.diagnose.plan.devices import DeviceSpec
from lockstep.diagnose.plan.estimate import MemoryEstimate, Planner, Sizes, Times, largest, step_time
from lockstep.diagnose.plan.recorder import Work
from lockstep.engines.registry import exchanged, least_held, variants
from lockstep.errors import UsageError
from lockstep.transforms.precision import PARAMETERS

__all__ = ["PlanResult", "PlanRow", "searched"]

_POLICIES = ("none", "selective", "full")
_MOST = 1 << 14  # samples of a micro-batch
_LONGEST = 64  # times the requested length, if the model has no limit
_SHOWN = 12  # rows
_RETRIES = 3  # micro-batches tried for a row
_DEEPEST = 1 << 12


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRow:
    """A way to train.

    Attributes:
        config: of it.
        flags: to add to the command.
        peak: bytes a rank.
        times: of a step.
        traced: it was estimated by itself, and not combined from others.
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


def searched(planner: Planner, *, fast: bool, open_batch: bool) -> PlanResult:
    """Answer the planner's request.

    Args:
        fast: only that; and if it does not fit, the micro-batch that would.
        open_batch: other batch sizes may be proposed.

    Raises:
        UsageError: it cannot be planned.
    """
    config, device, size = planner.config, planner.device, planner.size
    found = planner.estimate(config)
    fits = found.peak <= device.room
    times = _times(planner, found)
    plain = PlanResult(config, device, size, planner.sizes, found, times, fits, note=planner.note)
    if fast or planner.note:
        return (
            plain if fits or planner.note else dataclasses.replace(plain, micro_batch=_micro_batch(planner, open_batch))
        )
    rows = _rows(planner, open_batch)
    return dataclasses.replace(
        plain,
        micro_batch=_micro_batch(planner, open_batch),
        seq_len=_seq_len(planner, found),
        layers=_layers(planner),
        rows=tuple(rows),
        advice="" if fits else _advice(planner, rows, open_batch),
    )


def _micro_batch(planner: Planner, open_batch: bool) -> int:
    config = planner.config
    low = 2 if config.micro_size > 1 and not planner.device.host else 1

    def evaluate(size: int) -> float:
        return planner.estimate(_sized(planner, config, size, open_batch)).peak

    return largest(
        evaluate, [size for size in _micro_sizes(planner, open_batch, every=True) if size >= low], planner.device.room
    )


def _micro_sizes(planner: Planner, open_batch: bool, every: bool = False) -> list[int]:
    """The allowed micro-batch sizes: those that divide a fixed batch."""
    if open_batch:
        return list(range(1, 513)) if every else [1 << power for power in range(_MOST.bit_length())]
    batch = planner.config.batch_size
    found = [size for size in range(1, batch + 1) if batch % size == 0]
    least = planner.size if planner.config.exact else 1
    return [size for size in found if batch // size >= least] or [1]


def _sized(planner: Planner, config: Config, micro: int, open_batch: bool) -> Config:
    """Set the micro-batch size, and keep the micro-batches a step if the batch is open."""
    batch = config.batch_size
    if open_batch:
        batch = micro * max(planner.size, planner.config.batch_size // planner.config.micro_size)
    return dataclasses.replace(config, micro_batch_size=micro, batch_size=batch, eval_micro_batch_size=micro)


def _seq_len(planner: Planner, asked: MemoryEstimate) -> int | None:
    subject, config = planner.subject, planner.config
    if subject.windows is None:
        return None
    windows, most = subject.windows, subject.context or _LONGEST * config.seq_len
    step = 64 if config.seq_len % 64 == 0 else max(1, config.seq_len // 8)
    made: dict[int, Any] = {}
    known = ((0, asked.held), (config.seq_len, asked.peak))

    def evaluate(tokens: int) -> float:
        made[tokens] = windows(tokens)  # kept, since traces are known by it
        return planner.estimate(dataclasses.replace(config, seq_len=tokens), subject=made[tokens]).peak

    return largest(evaluate, list(range(step, most + 1, step)), planner.device.room, known)


def _layers(planner: Planner) -> int | None:
    if planner.sizes.layers < 6 or planner.config.activation_checkpointing.startswith("every:"):
        return None
    deep = list(range(6, _DEEPEST))
    return largest(lambda layers: planner.estimate(planner.config, layers).peak, deep, planner.device.room)


def _times(planner: Planner, found: MemoryEstimate) -> Times:
    width = PARAMETERS[found.config.precision].itemsize
    sizes, config = planner.sizes, found.config
    split = exchanged(config.engine, config.engine_options, width * sizes.parameters, width * sizes.trained)
    return step_time(found, planner.device, planner.size, split)


def _rows(planner: Planner, open_batch: bool) -> list[PlanRow]:
    """Combine engines and policies, each with its fastest micro-batch that fits."""
    width, sizes = PARAMETERS[planner.config.precision].itemsize, planner.sizes
    held = (width * sizes.parameters, width * sizes.trained, 2.0 * width * sizes.trained)
    found = list[PlanRow]()
    base: dict[tuple[str, int], MemoryEstimate] = {}
    first: tuple[str, EngineOptions] | None = None
    for name, options in variants(planner.size, planner.config.engine_options):
        plain = dataclasses.replace(planner.config, engine=name, engine_options=options)
        states = held[2] if plain.optim.name in ("adamw", "adam") else 0.0
        if least_held(name, options, planner.size, (*held[:2], states)) > planner.device.room:
            continue
        try:
            own = planner.estimate(_at(planner, plain, "none", 1, open_batch))
            first = first or (name, options)
            if not base:
                base = _policies(planner, first, open_batch)
        except UsageError:
            continue
        for policy in _POLICIES:
            if (policy, 1) in base:
                found += _best_row(planner, plain, policy, own, base, open_batch)
    return _confirmed(planner, found, open_batch)


def _at(planner: Planner, config: Config, policy: str, times: int, open_batch: bool) -> Config:
    sizes = _micro_sizes(planner, open_batch)
    norm = planner.config.micro_size > 1 and len(sizes) > 2
    size = sizes[min(times - 1 + norm, len(sizes) - 1)]
    return dataclasses.replace(_sized(planner, config, size, open_batch), activation_checkpointing=policy)


def _policies(
    planner: Planner, first: tuple[str, EngineOptions], open_batch: bool
) -> dict[tuple[str, int], MemoryEstimate]:
    """Estimate each policy with the first engine, at two micro-batch sizes.

    The key is (policy, 1 for the smallest or 2 for a larger micro-batch). At the larger one only the first policy is
    traced: memory that does not grow with the micro-batch (parameters, states, gathered weights) is the same for the
        others.
    The final rows are traced by themselves.
    """
    found = {}
    config = dataclasses.replace(planner.config, engine=first[0], engine_options=first[1])
    for policy in _POLICIES:
        try:
            one = found[policy, 1] = planner.estimate(_at(planner, config, policy, 1, open_batch))
            larger = _at(planner, config, policy, 2, open_batch)
            plain = found.get(("none", 2))
            found[policy, 2] = _grown(one, found["none", 1], plain, larger) if plain else planner.estimate(larger)
        except UsageError:  # no blocks are known
            continue
    return found


def _grown(one: MemoryEstimate, low: MemoryEstimate, high: MemoryEstimate, config: Config) -> MemoryEstimate:
    """Scale `one` to larger micro-batches; `low` and `high` determine its constant part."""
    small, large = low.config.micro_size, high.config.micro_size
    if small == large:
        return dataclasses.replace(one, config=config)

    def grown(mine: float, less: float, more: float) -> float:
        fixed = less - small * (more - less) / (large - small)
        return mine + (large - small) * max(0.0, mine - fixed) / small

    phases = {
        name: grown(size, low.phases[name], high.phases[name])
        for name, size in one.phases.items()
        if name in low.phases and name in high.phases
    }
    mine, less, more = (each.work["compute"] for each in (one, low, high))
    compute = Work(
        grown(mine.flops, less.flops, more.flops),
        grown(mine.moved, less.moved, more.moved),
        grown(mine.calls, less.calls, more.calls),
    )
    work = {**one.work, "compute": compute}
    return dataclasses.replace(one, config=config, phases=phases, work=work, batch=one.batch * large / small)


def _best_row(
    planner: Planner,
    config: Config,
    policy: str,
    own: MemoryEstimate,
    base: dict[tuple[str, int], MemoryEstimate],
    open_batch: bool,
) -> Iterable[PlanRow]:
    """The fastest size that fits.

    It is interpolated between two estimates of the first engine, plus this engine's difference in each phase.
    """
    low, high, plain = base[policy, 1], base.get((policy, 2), base[policy, 1]), base["none", 1]
    best: PlanRow | None = None
    for size in _micro_sizes(planner, open_batch):
        sized = dataclasses.replace(_sized(planner, config, size, open_batch), activation_checkpointing=policy)
        made = _scaled(low, high, own, plain, sized, planner)
        if made.peak > planner.device.room:
            break
        row = PlanRow(sized, _flags(planner, sized), made.peak, _times(planner, made))
        if best is None or row.rate > 1.02 * best.rate:
            best = row
    return [best] if best else []


def _scaled(
    low: MemoryEstimate,
    high: MemoryEstimate,
    own: MemoryEstimate,
    plain: MemoryEstimate,
    config: Config,
    planner: Planner,
) -> MemoryEstimate:
    one, other = low.config.micro_size, high.config.micro_size
    times = (config.micro_size - one) / (other - one) if other > one else 0.0

    def line(a: float, b: float) -> float:
        return a + times * (b - a)

    phases = {
        name: line(size, high.phases[name]) + own.phases[name] - plain.phases[name]
        for name, size in low.phases.items()
        if name in high.phases and name in own.phases and name in plain.phases
    }
    one_micro, other_micro = low.work["compute"], high.work["compute"]
    mine, theirs = own.work["compute"], plain.work["compute"]
    compute = Work(
        line(one_micro.flops, other_micro.flops) + mine.flops - theirs.flops,
        line(one_micro.moved, other_micro.moved) + mine.moved - theirs.moved,
        line(one_micro.calls, other_micro.calls) + mine.calls - theirs.calls,
    )
    work = {"compute": compute, "update": own.work["update"]}
    slots = -(-config.micro_batches // planner.size)
    batch = line(low.batch, high.batch) * planner.batches(slots)
    peak = (1 + planner.device.fragments) * (max(phases.values()) + batch)
    return dataclasses.replace(low, config=config, peak=peak, phases=phases, work=work, slots=slots)


def _confirmed(planner: Planner, rows: list[PlanRow], open_batch: bool) -> list[PlanRow]:
    """Trace each row, with a smaller micro-batch if it does not fit."""
    found = list[PlanRow]()
    for row in sorted(rows, key=lambda row: -row.rate)[:_SHOWN]:
        sizes = [size for size in _micro_sizes(planner, open_batch) if size <= row.config.micro_size]
        for size in sizes[: -_RETRIES - 1 : -1]:
            config = _sized(planner, row.config, size, open_batch)
            try:
                made = planner.estimate(config)
            except UsageError:
                break
            if made.peak <= planner.device.room:
                found.append(PlanRow(config, _flags(planner, config), made.peak, _times(planner, made), traced=True))
                break
    return sorted(found, key=lambda row: -row.rate)


def _flags(planner: Planner, config: Config) -> tuple[str, ...]:
    """The flags that a command needs for this configuration."""
    asked = planner.asked
    found = ["--engine", config.engine]
    if config.engine_options.sharding != asked.engine_options.sharding:
        found += ["--engine.sharding", config.engine_options.sharding]
    found += ["--activation-checkpointing", config.activation_checkpointing]
    found += ["--batch-size", str(config.batch_size), "--micro-batch-size", str(config.micro_size)]
    return tuple(found)


def _advice(planner: Planner, rows: list[PlanRow], open_batch: bool) -> str:
    """The first change to make."""
    if rows:
        return f"change first: {' '.join(rows[0].flags)}"
    config, room = planner.config, planner.device.room
    *_, last = variants(planner.size, config.engine_options)
    least = dataclasses.replace(
        _at(planner, config, "full", 1, open_batch), engine=last[0], engine_options=last[1], exact=config.exact
    )
    least = dataclasses.replace(
        least, engine_options=dataclasses.replace(last[1], sharding=config.engine_options.sharding)
    )
    tried = [("", least)]
    if config.precision == "bf16" and planner.size > 1:
        narrow = dataclasses.replace(least.engine_options, param_dtype="bf16")
        tried.append(
            (
                "--precision float32 --engine.param-dtype bf16, ",
                dataclasses.replace(least, precision="float32", engine_options=narrow),
            )
        )
    tried.append(("--precision bf16-true, ", dataclasses.replace(least, precision="bf16-true")))
    needed = math.inf
    for said, changed in tried:
        for policy in ("full", "none"):
            try:
                peak = planner.estimate(dataclasses.replace(changed, activation_checkpointing=policy)).peak
            except UsageError:
                continue
            needed = min(needed, peak)
            if peak <= room:
                return f"change first: {said}{' '.join(_flags(planner, changed))}"
    if not math.isfinite(needed):
        return "no engine can take it"
    return (
        "change first: the model, the length of its samples or the device: the least of all ways takes "
        f"{needed / room:.2f} times its room"
    )
