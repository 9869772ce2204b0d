"""Estimate a rank's peak memory and step time, extrapolated from two traced depths.

    plan = Planner(config, subject, world_size, device)
    estimate = plan.estimate(plan.config)
    estimate.peak, estimate.parts

A model of many equal blocks is traced with three and with four of them. The memory of each phase of a step (a block's
forward, the loss, a block's backward, the update) is a linear function of the depth. The same holds for the doublings
of a step's micro-batches in exact mode, whose tree has one more sum for each.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lockstep.config.engine_options import ENGINES
from lockstep.config.parallel_options import Parallel
from lockstep.config.schema import Config
from lockstep.data.device import AHEAD
from lockstep.diagnose.plan.devices import DeviceSpec, device_of
from lockstep.diagnose.plan.fakes import fake_world, without_modes
from lockstep.diagnose.plan.recorder import OperationRecorder, Work
from lockstep.diagnose.plan.subject import Subject, call_task, layers_of
from lockstep.diagnose.plan.trace import PlanTrace, Untraceable, probe_step, trace_step, unlike
from lockstep.engines.exact import check_servable, held_at_most
from lockstep.engines.registry import engine_class, name_of
from lockstep.errors import ConfigError, LockstepError
from lockstep.loop import describe_value
from lockstep.parallel.stages import StageIndex, check_pipeline
from lockstep.tensors import local_of
from lockstep.training.start.replicas import divide_model, divide_sequences, make_pipeline
from lockstep.training.start.resolve import Facts, resolve

__all__ = [
    "NODE",
    "MemoryEstimate",
    "Planner",
    "Sizes",
    "Times",
    "check_size",
    "largest",
    "step_time",
]


# Estimates in a search.
_TRIES = 7


def largest(
    evaluate: Callable[[int], float],
    candidates: Sequence[int],
    room: float,
    points: Sequence[tuple[int, float]] = (),
) -> int:
    """Return the largest of the ascending candidates whose bytes fit; 0: none.

    Every answer has been evaluated. Guesses interpolate linearly between the two sizes nearest to the room.

    Args:
        evaluate: size -> bytes.
        candidates: sizes, ascending.
        room: bytes.
        points: (size, bytes) of sizes that need not be candidates, for a better first guess.
    """
    bytes_by_size = dict(points)
    fitting = dict[int, bool]()

    def fits(place: int) -> bool:
        size = candidates[place]
        bytes_by_size[size] = evaluate(size)
        fitting[place] = bytes_by_size[size] <= room
        return fitting[place]

    # Indices: all up to `low` fit, none from `high` on does.
    low = -1
    high = len(candidates)
    for _ in range(_TRIES):
        if high - low < 2:
            break
        if len(bytes_by_size) > 1:
            guess = _interpolate(bytes_by_size, candidates, room)
        else:
            # Without two points begin with the smallest candidate, then the next larger one.
            guess = 0 if low < 0 else low + 1
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    # All guesses were too large: try the smallest.
    if low < 0:
        if candidates and 0 not in fitting and fits(0):
            return candidates[0]
        return 0
    return candidates[low]


def _interpolate(bytes_by_size: dict[int, float], candidates: Sequence[int], room: float) -> int:
    """Return the last index whose bytes should fit, by the two nearest sizes."""
    low, high = sorted(sorted(bytes_by_size, key=lambda size: abs(bytes_by_size[size] - room))[:2])
    if bytes_by_size[high] <= bytes_by_size[low]:
        return len(candidates) - 1
    slope = (bytes_by_size[high] - bytes_by_size[low]) / (high - low)
    most = low + (room - bytes_by_size[low]) / slope
    return sum(size <= most for size in candidates) - 1


# Blocks of the two traces that a deep model is extrapolated from.
_SHALLOW = (3, 4)
# Blocks from which a model is extrapolated.
_DEEP = 6
# Largest share of this machine's memory for a measurement here.
_MEASURABLE = 0.5
# Devices of a world.
_LARGEST = 1 << 17
# Steps of a plan whose data is not known.
_MANY = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model, or of what a rank of a replica has of it.

    Attributes:
        parameters, trained: numbers of parameters.
        layers: equal blocks in one list; 0: none.
    """

    parameters: int
    trained: int
    layers: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """A rank's memory in bytes, and the work of one micro-batch.

    Attributes:
        config: the estimated one, without "auto".
        peak: the maximum, with the device's allowance.
        phase: of the peak.
        stage: of the pipeline, which has the peak; 0 without one.
        parts: bytes by name at the peak; their sum is `peak`.
        phases: the maximum of the tensors in each phase, without batches and allowance. Of a pipeline, those of the
            stages that may take most, as "stage 0 forward 1".
        held: between two steps, without batches; of the stage that holds most.
        work: by "compute" and "update"; of the slowest stage.
        slots: micro-batches of the busiest rank in a step.
        batch: bytes of one.
    """

    config: Config
    peak: float
    phase: str
    parts: dict[str, float]
    phases: dict[str, float]
    held: float
    work: dict[str, Work]
    slots: int
    batch: float = 0.0
    stage: int = 0

    @property
    def bubble(self) -> float:
        """The share of a step's passes in which a stage of the pipeline waits; 0 without one.

        It is (P - 1) / (M + P - 1), with M micro-batches: Narayanan et al., arXiv 2104.04473, section 2.2.1.
        """
        others = self.config.parallel.pipeline - 1
        return others / (self.slots + others)


class Planner:
    """Estimator of a task on `size` equal devices.

    Attributes:
        asked: the configuration.
        config: the same with all open values resolved.
        sizes: of the whole model.
        note: how it was estimated, if the model could not be traced; else "".

    Raises:
        UsageError: as in training.
    """

    def __init__(self, config: Config, subject: Subject, size: int, device: DeviceSpec) -> None:
        self.subject = subject
        self.size = size
        self.device = device
        self.asked = config
        self.note = ""
        self._parts: dict[Parallel, Sizes] = {}
        self.config, self.sizes = self._resolve(config)
        self._traces: dict[tuple[Any, ...], PlanTrace] = {}

    def _resolve(self, config: Config) -> tuple[Config, Sizes]:
        world: Any = _EngineWorld(self.size)
        engine = name_of(config.engine, world)
        engine_class(engine).check_planned(config.engine_options)
        if ENGINES[engine].one_process and self.size > 1:
            raise ConfigError(f"--engine {engine} with {self.size} processes: use --engine auto, or --world-sizes 1")
        precision = config.precision
        if precision == "auto":
            precision = "bf16" if self.device.bf16 else "float32"
        config = dataclasses.replace(config, engine=engine, precision=precision, compile=False, attention="auto")
        try:
            with fake_world(1), OperationRecorder():
                resolved, sizes = self._find_sizes(config, self.subject.task.model())
        except LockstepError:
            raise
        except Exception:
            # The model needs values while it is made. Or it fails, which the next line reports.
            resolved, sizes = self._find_sizes(config, call_task("model", self.subject.task.model))
        if config.exact:
            check_servable(resolved.micro_batches, self.replicas(config))
        return resolved, sizes

    def replicas(self, config: Config) -> int:
        """Return the number of replicas, which share the micro-batches of a step."""
        return self.size // config.parallel.size

    def gradient_ranks(self, config: Config) -> int:
        """Return the number of ranks over which gradients are summed, and over which an engine shards."""
        return self.replicas(config) * config.parallel.context

    def part_sizes(self, config: Config) -> Sizes:
        """Return the sizes of what a rank of a replica has, before its engine shards it.

        Of a pipeline's stages it is the one with most parameters.

        Raises:
            UsageError: the model cannot be divided so.
        """
        parallel = config.parallel
        if parallel.size == 1:
            return self.sizes
        if parallel not in self._parts:
            self._parts[parallel] = self._divide(config)
        return self._parts[parallel]

    def _divide(self, config: Config) -> Sizes:
        found = Sizes(0, 0, self.sizes.layers)
        for stage in _largest_stages(config.parallel.pipeline, self.sizes.layers):
            sizes = self._divide_for(config, stage)
            if sizes.parameters > found.parameters:
                found = sizes
        return found

    def _divide_for(self, config: Config, stage: int) -> Sizes:
        """Return the sizes of what a rank of a stage has."""
        task = self.subject.task
        parallel = config.parallel
        # One replica, since another one has the same parts.
        with fake_world(parallel.size, degrees=parallel.degrees, stage=stage) as world, OperationRecorder():
            model = call_task("model", task.model)
            divide_model(config, task, model, world)
            task = divide_sequences(config, task, model, world)
            if parallel.pipeline > 1:
                with without_modes():
                    batch = self.subject.batch(config.micro_size)
                micro_batches = config.micro_batches // self.replicas(config)
                make_pipeline(config, task, model, world, micro_batches, lambda: batch)
            count = 0
            trained = 0
            for p in model.parameters():
                own = local_of(p).numel()
                count += own
                trained += own * p.requires_grad
        return Sizes(count, trained, self.sizes.layers)

    def _find_sizes(self, config: Config, model: nn.Module) -> tuple[Config, Sizes]:
        task = self.subject.task
        samples = self.subject.samples or config.batch_size * _MANY
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the task's `model` returned {describe_value(model)}: it must return a torch.nn.Module")
        layers = call_task("blocks", lambda: layers_of(task, model))
        count = 0
        trained = 0
        for p in model.parameters():
            count += p.numel()
            trained += p.numel() * p.requires_grad
        sizes = Sizes(count, trained, layers)
        return resolve(config, Facts.of(task, model, samples)).config, sizes

    def estimate(self, config: Config, layers: int = 0, subject: Subject | None = None) -> MemoryEstimate:
        """Estimate a configuration without "auto", with `layers` blocks; 0: the model's own.

        Raises:
            Untraceable: the model reads values of tensors.
            UsageError: the engine or the model refuses.
        """
        layers = layers or self.sizes.layers
        replicas = self.replicas(config)
        slots = -(-config.micro_batches // replicas)
        if config.parallel.pipeline == 1:
            trace, copies = self._trace_stage(config, layers, subject, slots, 0)
            return self._total(config, trace, slots, copies)
        if config.parallel.context > 1:
            # The hidden states that a stage receives would be of a part of each sequence.
            raise ConfigError(f"{config.parallel.flags}: plan does not know both together yet; leave one out")
        # Not with the trace, which may be that of another number of micro-batches.
        task = self.subject.task
        check_pipeline(config.parallel.pipeline, config.micro_batches // replicas, task, hooks=task.hooks is not None)
        traces = {}
        copies = 0.0
        for stage in _largest_stages(config.parallel.pipeline, layers):
            traces[stage], more = self._trace_stage(config, layers, subject, slots, stage)
            copies = max(copies, more)
        return self._total(config, _join_stages(traces), slots, copies)

    def _trace_stage(
        self, config: Config, layers: int, subject: Subject | None, slots: int, stage: int
    ) -> tuple[PlanTrace, float]:
        """Trace a rank of a stage; return the sums of exact mode that it lacks, as a number of gradients, too."""
        # Micro-batches until as many are in flight as ever are, and one more, which finds gradients there.
        in_flight = config.parallel.pipeline - stage
        if config.exact:
            return self._exact(config, layers, subject, slots, stage)
        traced = min(slots, max(unlike(config), in_flight + 1))
        return self._at_depth(config, layers, subject, traced, stage), 0.0

    def _exact(
        self, config: Config, layers: int, subject: Subject | None, slots: int, stage: int
    ) -> tuple[PlanTrace, float]:
        """Extrapolate rank 0's tree by its doublings, and return the worst rank's extra memory."""
        steps = slots.bit_length() - 1
        degree = config.parallel.pipeline
        # The doublings of the smaller trace, in which a pipeline is full.
        first = max(1, (degree - 1).bit_length())
        replicas = self.replicas(config)
        traced = 1 << steps
        if steps <= first + 1:
            # A pipeline with fewer micro-batches would have fewer in flight.
            traced = slots if degree > 1 else traced
            trace = self._at_depth(config, layers, subject, traced, stage)
        else:
            low, high = (self._at_depth(config, layers, subject, 1 << power, stage) for power in (first, first + 1))
            trace = _between(low, high, float(steps - first))
        worst = held_at_most(config.micro_batches, replicas)
        return trace, float(max(0, worst - held_at_most(replicas * traced, replicas)))

    def _at_depth(self, config: Config, layers: int, subject: Subject | None, slots: int, stage: int) -> PlanTrace:
        policy = config.activation_checkpointing
        degree = config.parallel.pipeline
        blocks = len(StageIndex(stage, degree).own(layers))
        # DeepSpeed's buckets end elsewhere at each depth, so the memory is no linear function of it.
        if blocks < _DEEP or policy.startswith("every:") or ENGINES[config.engine].own_gradients:
            full_depth = layers == self.sizes.layers
            return self._trace_step(config, subject, 0 if full_depth else layers, slots, stage)
        low, high = (self._trace_step(config, subject, count * degree, slots, stage) for count in _SHALLOW)
        apart = _SHALLOW[1] - _SHALLOW[0]
        trace = _between(low, high, (blocks - _SHALLOW[0]) / apart)
        # A stage is cut out of the whole model, which is made first.
        start = low.peaks["start"] + (layers / degree - _SHALLOW[0]) / apart * (
            high.peaks["start"] - low.peaks["start"]
        )
        return trace._replace(peaks=trace.peaks | {"start": start})

    def _trace_step(
        self, config: Config, subject: Subject | None, layers: int, slots: int, stage: int = 0
    ) -> PlanTrace:
        source = subject or self.subject
        # A trace has its own number of slots, so the batch size of the step must not be in the key.
        alike = dataclasses.replace(config, batch_size=config.micro_size)
        key = (repr(alike), id(source), layers, slots, stage)
        if key not in self._traces:
            try:
                self._traces[key] = trace_step(
                    config, source, self.size, layers=layers, slots=slots, fused=not self.device.host, stage=stage
                )
            except Untraceable as error:
                self._traces[key] = self._probe_step(config, source, slots, error)
        return self._traces[key]

    def _probe_step(self, config: Config, subject: Subject, slots: int, error: Untraceable) -> PlanTrace:
        """Measure one process here, with real numbers."""
        if config.parallel.size > 1:
            raise Untraceable(
                f"{error}; one process cannot measure a part of it instead: leave {config.parallel.flags} out"
            ) from error
        room = _MEASURABLE * device_of("cpu").memory
        if 16 * self.sizes.parameters > room:
            raise Untraceable(
                f"{error}; measuring a step here instead would take half of this machine's memory or "
                "more: plan a smaller model of its kind"
            ) from error
        trace = probe_step(config, subject, slots)
        if ENGINES[config.engine].one_process:
            more = ""
        else:
            more = ", without its engine's sharding and exchange"
        self.note = f"{error}; measured on this machine's CPU instead, in one process{more}"
        return trace

    def _total(self, config: Config, trace: PlanTrace, slots: int, copies: float) -> MemoryEstimate:
        """Add batches, sums of a tree, and the device's allowance to a step's tensors."""
        phases = {}
        for name, size in trace.peaks.items():
            # A model is made on the host. The stages of a pipeline are cut on the device.
            if name != "start" or self.device.host:
                phases[name] = size
        phase = max(phases, key=lambda name: phases[name])
        stage, of_stage, own_phase = _split_phase(phase)
        parts = dict(trace.parts.get(phase, {"parameters": phases[phase], "rest": 0.0}))
        unnamed = parts.pop("rest")
        gradients = trace.parts.get(f"{of_stage}update", {}).get("gradients", 0.0)
        parts |= {"activations and temporaries": unnamed, "sums of exact mode": copies * gradients}
        parts["batches"] = trace.batch * self.batches(slots)
        parts["fragments"] = self.device.fragments * sum(parts.values())
        parts = {name: size for name, size in parts.items() if size}
        peak = math.fsum(parts.values())
        return MemoryEstimate(config, peak, own_phase, parts, phases, trace.held, trace.work, slots, trace.batch, stage)

    def batches(self, slots: int) -> int:
        """Count the micro-batches in the device's memory: a step's, or those prefetched."""
        if self.device.host:
            return slots
        return min(slots + 1, AHEAD + 1)


class _EngineWorld:
    """The part of a world that engine names are resolved by."""

    def __init__(self, size: int) -> None:
        self.control = size > 1 or None


def _between(low: PlanTrace, high: PlanTrace, times: float) -> PlanTrace:
    """Extrapolate: low + times * (high - low), number by number.

    Phases that only one of them has are dropped. After each operation the memory is linear in the depth; a phase's
    maximum is the maximum of these lines, and may be at another operation than in either trace.
    """

    def line(first: float, second: float) -> float:
        return first + times * (second - first)

    def lines(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
        fitted = {}
        for name, value in first.items():
            if name in second:
                fitted[name] = line(value, second[name])
        return fitted

    peaks = lines(low.peaks, high.peaks)
    parts = {}
    for name, low_parts in low.parts.items():
        if name not in high.parts:
            continue
        parts[name] = lines(low_parts, high.parts[name])
        low_levels = low.levels.get(name, [])
        high_levels = high.levels.get(name, [])
        # Traces of other lengths differ by parameters, as in an update, whose last operations hold most.
        if low_levels and len(low_levels) == len(high_levels):
            peaks[name] = max(map(line, low_levels, high_levels))
            parts[name]["rest"] += peaks[name] - sum(parts[name].values())
    return PlanTrace(
        peaks,
        {},
        parts,
        line(low.held, high.held),
        {name: Work.of_each(line, work, high.work[name]) for name, work in low.work.items()},
        low.batch,
    )


def _largest_stages(stages: int, layers: int) -> list[int]:
    """Return the stages of a pipeline of which one takes most memory.

    A later stage has fewer micro-batches in flight. So it takes more than the first only with more blocks, or as the
    last, which has what follows them.

    Args:
        layers: equal blocks; 0: they are not equal, so each stage may take most.
    """
    if stages == 1:
        return [0]
    if not layers:
        return list(range(stages))
    first = len(StageIndex(0, stages).own(layers))
    for stage in range(1, stages - 1):
        if len(StageIndex(stage, stages).own(layers)) > first:
            return [0, stage, stages - 1]
    return [0, stages - 1]


def _join_stages(traces: dict[int, PlanTrace]) -> PlanTrace:
    """Return the phases of several stages by their names in `MemoryEstimate.phases`, and the work of the slowest."""
    peaks: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    for stage, trace in traces.items():
        for name, size in trace.peaks.items():
            peaks[f"stage {stage} {name}"] = size
        for name, sizes in trace.parts.items():
            parts[f"stage {stage} {name}"] = sizes
    first, *others = traces.values()
    held = first.held
    batch = first.batch
    work = dict(first.work)
    for trace in others:
        held = max(held, trace.held)
        batch = max(batch, trace.batch)
        for name, stage_work in trace.work.items():
            work[name] = Work.of_each(max, work[name], stage_work)
    return PlanTrace(peaks, {}, parts, held, work, batch)


def _split_phase(name: str) -> tuple[int, str, str]:
    """Return the stage in a phase's name, the name's beginning with it, and its end; 0 and "" without a pipeline."""
    if not name.startswith("stage "):
        return 0, "", name
    _, stage, phase = name.split(" ", 2)
    return int(stage), f"stage {stage} ", phase


def check_size(size: int, parallel: Parallel) -> None:
    """Check the size of a world.

    Raises:
        ConfigError: it is out of range, or no whole number of replicas.
    """
    if not 1 <= size <= _LARGEST:
        raise ConfigError(f"--world-sizes {size}: give the number of devices, from 1 to {_LARGEST}")
    if size % parallel.size:
        raise ConfigError(
            f"{parallel.flags}: --world-sizes {size} is not a multiple of {parallel.size}; change one of them"
        )


# Share of the peak in a training's large products; PaLM's overall MFU is 0.46 (arXiv 2204.02311).
_PRODUCTS = 0.55
# Share of the bandwidth in a kernel that only moves data.
_MEMORY = 0.75
# Bytes moved by compiled kernels, relative to eager ones.
_FUSED = 0.5
# Share of a link's bandwidth that a collective reaches.
_LINK = 0.7
# Devices of a node.
NODE = 8
# Seconds for each collective and doubling of the ranks.
_LATENCY = 20e-6
# Seconds to launch a kernel from eager code; an estimate.
_CALL = 5e-6
# Seconds of Python, autograd and dispatch around an operation on a CPU: docs/inside/plan.md.
_HOST_CALL = 12e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step.

    Attributes:
        compute: forwards and backwards.
        update: of the optimizer.
        exposed: exchanges that are not hidden behind computation.
        launching: what the host takes to launch the operations of `compute`, part of it.
        computing: what the device takes to run them.
    """

    compute: float
    update: float
    exposed: float
    launching: float = 0.0
    computing: float = 0.0

    @property
    def step(self) -> float:
        return self.compute + self.update + self.exposed

    @property
    def launch_bound(self) -> bool:
        """Whether launching the operations takes longer than running them."""
        return self.launching > self.computing


def step_time(estimate: MemoryEstimate, device: DeviceSpec, size: int, split: tuple[float, float]) -> Times:
    """Estimate the times of a step.

    Args:
        split: bytes that a rank gathers for each micro-batch, and bytes that all sum once a step.
    """
    config = estimate.config
    half = config.precision not in ("float32", "float64")
    if half:
        peak = device.half
    else:
        peak = device.single * (0.5 if config.precision == "float64" else 1.0)
    compute = estimate.work["compute"]
    products = compute.flops / (peak * _PRODUCTS)
    moving = compute.moved * (1.0 if device.host else _FUSED) / (device.bandwidth * _MEMORY)
    call = _HOST_CALL if device.host else _CALL * _FUSED
    launching = compute.calls * call
    # Most moving overlaps with products; a kernel that only moves data waits for the memory.
    computing = max(products + 0.3 * moving, moving)
    # A device runs while the host launches the next operations.
    if device.host:
        micro = launching + computing
    else:
        micro = max(launching, computing)
    update_work = estimate.work["update"]
    update = update_work.moved / (device.bandwidth * _MEMORY)
    ordering = update_work.calls * call
    update = update + ordering if device.host else max(update, ordering)
    gather_bytes, sum_bytes = split
    replica = config.parallel.size
    gradient_ranks = size // replica * config.parallel.context
    # Until a pipeline's last stage has its first micro-batch, and the first stage the last one's gradient.
    rounds = estimate.slots + config.parallel.pipeline - 1
    exposed = 0.0
    if replica > 1:
        # A rank has nothing to compute before the others' parts are there.
        rate = _LINK * (device.link if replica <= NODE else device.network)
        wait = _LATENCY * (replica - 1).bit_length()
        exposed += rounds * (compute.sent / rate + compute.messages * wait)
    if gradient_ranks > 1:
        rate = _LINK * (device.link if size <= NODE else device.network)
        wait = _LATENCY * (gradient_ranks - 1).bit_length()
        # A ring sends this share of the bytes over each link.
        ring = (gradient_ranks - 1) / gradient_ranks
        # Most of a gather overlaps with the computation of its micro-batch.
        per_micro = max(0.0, gather_bytes * ring / rate - 0.8 * micro) + (wait if gather_bytes else 0.0)
        # The sum of the gradients moves the bytes twice, and overlaps with the last backward in part.
        exchange_seconds = 2 * sum_bytes * ring / rate
        exposed += estimate.slots * per_micro + max(0.05 * exchange_seconds, exchange_seconds - 0.6 * micro) + wait
    return Times(rounds * micro, update, exposed, rounds * launching, rounds * computing)
