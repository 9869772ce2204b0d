"""Define the request of a verification, the run of each combination, and the resulting table.

request = VerifyRequest(Config(batch_size=8), engines=["single", "ddp"], world_sizes=[1, 2])
combinations = combine(request.engines, request.world_sizes, compiled=False)          single x1, ddp x1, ddp x2
spec = run_spec(request, combinations[2], folder, Fault(), coarsest="float64")

`Fault` is the base of planted faults, `STAGES` explains each stage, `VerifyTable` is the result.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.config.engine_options import ENGINES, PLAIN
from lockstep.config.parallel_options import DEGREES, Parallel, supports
from lockstep.config.schema import SINK_FLAGS, Config
from lockstep.data.batches import Batches, StepLoader
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.exact import check_servable
from lockstep.errors import ConfigError
from lockstep.task import Task
from lockstep.verify.tolerance import EXACT, Tolerance, tolerance_of

__all__ = [
    "REFERENCE",
    "Combination",
    "Difference",
    "Fault",
    "FaultContext",
    "Seed",
    "TableRow",
    "TrainingSpec",
    "VerifyRequest",
    "VerifyTable",
    "combine",
    "disturbed_spec",
    "format_numbers",
    "reference_specs",
    "refusal",
    "run_spec",
    "with_one_replica",
]


Seed = Callable[[int, int], None]


@dataclass
class FaultContext:
    """Step, rank and parts of the run that a fault changes.

    Attributes:
        step: the step of the fault, if it shows at a step.
        begin: the first step since the run was started or resumed.
        model: the engine's plain module, once built.
        step_loader: this rank's batches, once built.
    """

    world: World
    config: Config
    step: int
    begin: int
    model: nn.Module | None = None
    step_loader: StepLoader | None = None

    @property
    def resumed(self) -> bool:
        """Whether the run has just been resumed."""
        return self.begin > 0

    def parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters in order."""
        assert self.model is not None
        return list(self.model.parameters())

    @property
    def is_target_rank(self) -> bool:
        """Whether this is the rank with the fault, which is the last one."""
        return self.world.rank == self.world.size - 1


class Fault:
    """Base of planted faults: returns every part unchanged; a subclass changes one.

    Attributes:
        name: for `--plant`.
        text: description, one line.
        stage: the cause that the comparison must report.
        moment: when it shows: "start", "step", "resume" or "end".
        everywhere: whether the single process has it too, where it is harmless.
        divided: the degree without which it does not show; "": it shows without.
    """

    name = ""
    text = ""
    stage = ""
    moment = "start"
    everywhere = False
    divided = ""

    def check(self, config: Config, steps: int, resume: int) -> None:
        """Check that the fault can show in this run.

        Raises:
            ConfigError: it cannot.
        """

    def task(self, task: Task, context: FaultContext) -> Task:
        return task

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        """Wrap the engine below the recorder, for a fault of engine or machine."""
        return engine

    def outside(self, engine: Engine, context: FaultContext) -> Engine:
        """Wrap the engine above the recorder, for a fault of the loop."""
        return engine

    def seed(self, seed: Seed, context: FaultContext) -> Seed:
        return seed

    def evaluation(self, batches: Batches, context: FaultContext) -> Any:
        return batches

    def close(self) -> None:
        """Remove the hooks of the fault from this process."""


_UNDIVIDED = Parallel()


@dataclass(frozen=True, slots=True)
class Combination:
    """Engine, world size, eager or compiled, and degrees: one row of the table."""

    engine: str
    world_size: int
    compiled: bool = False
    parallel: Parallel = _UNDIVIDED

    @property
    def key(self) -> str:
        """Name for files, such as `ddp-2-compiled`."""
        degrees = self.parallel.label.replace(" ", "-")
        return f"{self.engine}-{self.world_size}{'-compiled' * self.compiled}{'-' * bool(degrees)}{degrees}"

    @property
    def is_divided(self) -> bool:
        """Whether several ranks hold one model."""
        return self.parallel.size > 1

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.world_size // self.parallel.size

    @property
    def one_replica(self) -> "Combination":
        """The same with a single replica, whose bits those of several replicas must have in exact mode."""
        return dataclasses.replace(self, world_size=self.parallel.size)

    def __str__(self) -> str:
        label = self.parallel.label
        return f"{self.engine} x{self.world_size}{' compiled' * self.compiled}{' ' * bool(label)}{label}"


REFERENCE = Combination(PLAIN, 1)
_ANY = Tolerance(1, 1.0, 1.0)
_COMPILED = Combination(PLAIN, 1, compiled=True)


@dataclass(frozen=True)
class VerifyRequest:
    """A verification to run. The fields are the arguments of `lockstep.verify`.

    Attributes:
        engines: () is every engine that needs no further package and no GPU.
        precision: "" is float64; the config's if one of the engines has no float64, or with `config.exact` and without
            divided models.
        tensor, context, pipeline: degrees of these; () is the config's. The config has the largest.
    """

    config: Config
    task: Any = None
    engines: Sequence[str] = ()
    world_sizes: Sequence[int] = (1, 2)
    steps: int = 8
    precision: str = ""
    resume_at: int | None = None
    compile: bool = False
    plant: str = ""
    plant_at: int | None = None
    skip_unavailable: bool = False
    scratch: str = ""
    tensor: Sequence[int] = ()
    context: Sequence[int] = ()
    pipeline: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"--steps {self.steps} must be at least 1")
        if not 0 <= self.resume < self.steps:
            raise ConfigError(f"--resume-at {self.resume} must be below --steps {self.steps}; use 0 for no resume")
        if not 0 <= self.fault_step < self.steps:
            raise ConfigError(f"--plant-at {self.plant_at} must be a step of the run: 1 to --steps {self.steps}")

    @property
    def resume(self) -> int:
        """Step after which every combination is saved, ended and resumed."""
        if self.resume_at is None:
            return self.steps // 2
        return self.resume_at

    @property
    def fault_step(self) -> int:
        """Step, 0-based, at which a fault of moment "step" begins."""
        if self.plant_at is not None:
            return self.plant_at - 1
        usual = min(2, self.steps - 1)
        # Not at the resume, where another cause would be likely.
        return max(0, usual - (usual == self.resume))

    def resolve(self) -> "VerifyRequest":
        """Fill in the defaults, and turn off sinks and early stops."""
        engines = self.engines or tuple(name for name, entry in ENGINES.items() if entry.everywhere)
        degrees: dict[str, Any] = {}
        for name in DEGREES:
            degrees[name] = tuple(dict.fromkeys(getattr(self, name) or (getattr(self.config.parallel, name),)))
            _check_degrees(name, degrees[name])
        most = {name: max(values) for name, values in degrees.items()}
        # One process and several that share its model differ by rounding, which float64 tells from a mistake.
        wide = (not self.config.exact or max(most.values()) > 1) and all(
            ENGINES[name].float64 for name in engines if name in ENGINES
        )
        requested, configured = ("" if name == "auto" else name for name in (self.precision, self.config.precision))
        # Not the device's default: a proof names its precision.
        precision = requested or ("float64" if wide else configured or "float32")
        off: dict[str, Any] = dict.fromkeys(SINK_FLAGS, False)
        plain = dataclasses.replace(
            self.config,
            **off,
            stop_at=0,
            resume_anyway=False,
            on_oom="stop",
            # This checks the other options, too.
            parallel=self.config.parallel.with_degrees(most),
        )
        config = dataclasses.replace(plain, precision=precision)
        return dataclasses.replace(self, config=config, engines=engines, precision=precision, **degrees)

    @property
    def divisions(self) -> list[Parallel]:
        """List the divisions of models: every combination of the degrees, where an empty list means 1."""
        found = []
        for degrees in product(*(getattr(self, name) or (1,) for name in DEGREES)):
            found.append(_UNDIVIDED.with_degrees(dict(zip(DEGREES, degrees, strict=True))))
        return found


@dataclass(frozen=True)
class TrainingSpec:
    """Run of one combination.

    Attributes:
        key: names its traces; the reference's is "reference".
        folder: of traces, checkpoints and the reference's tensors.
        reference: the key of the trace to compare with; "" writes one.
        tolerance: the allowed differences from it.
        fault: the planted fault, if any.
        disturbed: round its sums differently, to measure the effect; see `wrappers.Disturbed`.
    """

    key: str
    combination: Combination
    request: VerifyRequest
    folder: Path
    reference: str
    tolerance: Tolerance = EXACT
    fault: Fault = dataclasses.field(default_factory=Fault)
    disturbed: bool = False

    @property
    def resume(self) -> int:
        """Step before which the run is saved, ended and resumed; 0: never.

        The reference is never resumed.
        """
        if self.reference and not self.disturbed:
            return self.request.resume
        return 0


def _check_degrees(name: str, degrees: Sequence[int]) -> None:
    for degree in degrees:
        if degree < 1:
            raise ConfigError(f"--parallel.{name} {degree} must be at least 1")


def combine(
    engines: Sequence[str],
    world_sizes: Sequence[int],
    compiled: bool,
    divisions: Sequence[Parallel] = (_UNDIVIDED,),
    *,
    exact: bool = False,
) -> list[Combination]:
    """List every engine at every world size in ascending order, and those of divided models.

    The repeated single process comes first.

    A single-process engine appears once.

    Args:
        divisions: of models; each is combined with the engines that support it, at the world sizes that it divides.
        exact: in exact mode.

    Raises:
        ConfigError: an unknown engine, a world size below 1, or degrees that do not fit engines or world sizes.
    """
    for name in engines:
        if name not in ENGINES:
            raise ConfigError(f"--engines '{name}' is unknown; choose from {', '.join(ENGINES)}")
    for size in world_sizes:
        if size < 1:
            raise ConfigError(f"--world-sizes {size} must be at least 1")
    # An engine of one process ignores the world sizes.
    single = []
    for name, entry in ENGINES.items():
        if entry.one_process:
            single.append(name)
    pairs = []
    for name in single:
        if name in engines or name == PLAIN:
            pairs.append((name, 1))
    if _UNDIVIDED in divisions:
        pairs += [(name, size) for size in world_sizes for name in engines if name not in single]
    combinations = [
        Combination(name, size, how)
        for how in ((False, True) if compiled else (False,))
        for name, size in dict.fromkeys(pairs)
    ]
    combinations += _divided(engines, world_sizes, divisions, exact=exact)
    return sorted(combinations, key=lambda entry: (entry.world_size, entry != REFERENCE, entry.compiled))


def _divided(
    engines: Sequence[str], world_sizes: Sequence[int], divisions: Sequence[Parallel], *, exact: bool
) -> list[Combination]:
    """List the combinations in which several ranks hold one model.

    Raises:
        ConfigError: no engine does that, or a degree and the world sizes do not fit.
    """
    several = [parallel for parallel in divisions if parallel.size > 1]
    if not several:
        return []
    shown = ", ".join(parallel.flags for parallel in several)
    for size in world_sizes:
        # The single process runs in any case.
        if size > 1 and all(size % parallel.size for parallel in divisions):
            raise ConfigError(f"--world-sizes {size} is not a multiple of {shown}; use multiples, or leave it out")
    combinations = []
    for parallel in several:
        able = [name for name in engines if supports(name, parallel, exact=exact)]
        if not able:
            raise ConfigError(f"--engines {','.join(engines)} does not work with {parallel.flags} yet; add ddp")
        sizes = [size for size in world_sizes if size % parallel.size == 0]
        if not sizes:
            raise ConfigError(
                f"{parallel.flags}: none of --world-sizes {','.join(map(str, world_sizes))} is a multiple of "
                f"{parallel.size}; add {parallel.size}"
            )
        for size in sizes:
            combinations += [Combination(name, size, parallel=parallel) for name in able]
    return list(dict.fromkeys(combinations))


def with_one_replica(combinations: Sequence[Combination], job_size: int) -> list[Combination]:
    """Add the runs with one replica, with which --exact compares the bits of several.

    Args:
        job_size: the only world size that can run; 0: any.

    Raises:
        ConfigError: one replica cannot run.
    """
    every = list(combinations)
    for combination in combinations:
        one = combination.one_replica
        if not combination.is_divided or one in every:
            continue
        if job_size:
            raise ConfigError(
                f"--exact compares {combination.replicas} replicas of {combination.parallel.flags} with one, "
                f"which needs {one.world_size} ranks; run it without torchrun"
            )
        every.append(one)
    return sorted(every, key=lambda entry: entry.world_size)


def refusal(combination: Combination, config: Config) -> str | None:
    """Return why this combination cannot run, or None.

    Checks only what is known before the start.

    Args:
        config: with micro-batch "auto" the model decides how a step is split, so the result is None.
    """
    if config.exact and config.micro_batch_size:
        try:
            check_servable(config.micro_batches, combination.replicas)
        except ConfigError as error:
            return str(error)
    return None


def reference_specs(request: VerifyRequest, folder: Path, fault: Fault, *, compiled: bool) -> list[TrainingSpec]:
    """Return the spec of the single process; in exact mode also of the compiled one.

    Compiled and eager code give different bits.
    """
    planted = fault if fault.everywhere else Fault()
    specs = [TrainingSpec("reference", REFERENCE, request, folder, "", fault=planted)]
    if compiled and request.config.exact:
        specs.append(TrainingSpec("reference-compiled", _COMPILED, request, folder, "", fault=planted))
    return specs


def disturbed_spec(request: VerifyRequest, folder: Path, fault: Fault) -> TrainingSpec:
    """Return the spec of a single process with differently rounded sums.

    It measures the effect of rounding.
    """
    planted = fault if fault.everywhere else Fault()
    return TrainingSpec("reference-disturbed", REFERENCE, request, folder, "reference", _ANY, planted, disturbed=True)


def run_spec(
    request: VerifyRequest,
    combination: Combination,
    folder: Path,
    fault: Fault,
    coarsest: str,
    measured: tuple[float, ...] = (),
) -> TrainingSpec:
    """Return the spec of a combination's run.

    Args:
        fault: planted on combinations of several ranks.
        coarsest: the coarsest dtype that the reference's model computes in.
        measured: see Tolerance.
    """
    exact = request.config.exact and combination.compiled and combination != _COMPILED
    reference = "reference-compiled" if exact else "reference"
    several = getattr(combination.parallel, fault.divided) if fault.divided else combination.world_size
    if fault.everywhere or several > 1:
        planted = fault
    else:
        planted = Fault()
    # Inductor's kernels round differently, so a compiled run is not bitwise equal to an eager one.
    eager = combination.compiled and reference == "reference"
    tolerance = EXACT
    if combination != REFERENCE:
        tolerance = tolerance_of(
            request.config,
            combination.world_size,
            coarsest,
            other_kernels=eager,
            measured=measured,
            divided=combination.is_divided,
        )
    return TrainingSpec(combination.key, combination, request, folder, reference, tolerance, planted)


# Shares from here on are shown in per cent.
_PERCENT_FROM = 1e-4

# The stages of a step in the order of comparison, with the meaning of a first difference there. The inputs of a stage
# are compared before it, so the first that differs is the cause.
STAGES = {
    "determinism": "the same program gives other results when it runs again; no engine is at fault",
    "initial weights": "the ranks do not start with the same weights",
    "weights": "something other than the optimizer changed the weights between two updates",
    "data": "the ranks do not read this step's samples in the run's order",
    "randomness": "random numbers depend on more than the step and the micro-batch",
    "forward": "the model computes another loss from the same weights, data and generators",
    "normalisation": "the loss is not divided by the items of the global step",
    "buffers": "the model's buffers depend on the assignment of micro-batches to ranks",
    "reduction": "the gradient is not the sum over all micro-batches of all ranks",
    "clipping": "the gradient is not clipped by the norm of the full, unscaled gradient",
    "optimizer": "the same gradient gives another update",
    "schedule": "the learning rate is not the scheduled one of this step",
    "evaluation": "the evaluation does not count every sample exactly once",
    "evaluation kernels": "the evaluation has the same items, but other kernels compute its forward",
    "optimizer state": "the optimizer state is not the one of this step",
}


@dataclass(frozen=True)
class Difference:
    """First difference between a combination and the reference.

    Attributes:
        step: steps taken before it: the 0-based step that differs, or all, for the evaluation after them.
        stage: the cause, a key of STAGES.
        where: the tensor, or the micro-batch.
        rank: the first rank that differs, -1 if no rank is at fault.
        text: a description of the difference.
        ranks: all ranks that differ, if known.
    """

    step: int
    stage: str
    where: str
    rank: int
    text: str
    ranks: list[int] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Number of the step for users, from 1."""
        if self.stage.startswith("evaluation"):
            return self.step
        return self.step + 1


@dataclass(frozen=True)
class TableRow:
    """Result of one combination.

    Attributes:
        verdict: "equal" (all bits), "close" (within the tolerance), "different", "not proved", "failed" or
            "unavailable".
        largest: the largest relative difference of a weight after the last step, and its tensor.
        hidden: smallest difference that would show, as a share of a step's gradient norm.
        apart: of a divided model: the largest difference of a gradient, as a share of its norm.
        difference: the first difference, if the verdict is "different".
        reason: why the combination failed, cannot run or proves nothing.
    """

    combination: Combination
    verdict: str
    largest: tuple[float, str] = (0.0, "")
    difference: Difference | None = None
    reason: str = ""
    hidden: float = 0.0
    apart: float = 0.0

    @property
    def ok(self) -> bool:
        return self.verdict in ("equal", "close")

    @property
    def text(self) -> str:
        """The row's text in the table."""
        label = self.combination.parallel.label
        if self.verdict == "equal":
            return f"bitwise equal to {label} x 1 replica" if label else "bitwise equal"
        if self.verdict == "close" and label:
            return (
                f"equal to one process within rounding; the largest difference is {self.apart:.1g} of a gradient, the "
                f"bound {self.hidden:.1g}"
            )
        if self.verdict == "close":
            largest, tensor = self.largest
            size = f"within rounding: {f'{largest:.1e} at most, in {tensor}' if tensor else 'equal weights at the end'}"
            if self.hidden < _PERCENT_FROM:
                under = f"{self.hidden:.2g}"
            else:
                under = f"{self.hidden:.2%}"
            return f"{size}; a difference below {under} of the gradient's norm would not show"
        if self.difference:
            return _describe(self.difference, with_rank=self.combination.world_size > 1)
        return f"{self.verdict}: {self.reason}"


@dataclass
class VerifyTable:
    """Result of `verify`: `print(table)` shows it, `table.ok` is True if everything agrees.

    Attributes:
        rows: one for each combination.
        title: the compared run and the required precision.
        notes: remarks about all rows, such as a nondeterministic task or a planted fault.
        difference: difference between the single process and its repeat, or another machine's certificate.
        certificate: the content of a certificate; None if nothing ran.
    """

    title: str
    rows: list[TableRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    difference: Difference | None = None
    certificate: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """Whether every combination that ran agrees."""
        ran = [row for row in self.rows if row.verdict != "unavailable"]
        return self.difference is None and bool(ran) and all(row.ok for row in ran)

    @property
    def unavailable(self) -> list[TableRow]:
        return [row for row in self.rows if row.verdict == "unavailable"]

    def __str__(self) -> str:
        width = max((len(str(row.combination)) for row in self.rows), default=0)
        lines = []
        for row in self.rows:
            lines.append(f"  {'ok' if row.ok else '--':<3} {row.combination!s:<{width}}  {row.text}")
        notes = [f"  {note}" for note in self.notes]
        return "\n".join([self.title, *lines, *notes])


def _describe(difference: Difference, *, with_rank: bool) -> str:
    """Describe a difference; `with_rank`: several ranks ran, so name the wrong ones."""
    peers = [rank for rank in difference.ranks if rank != difference.rank]
    also = f" (and {format_numbers(peers)})" if peers else ""
    if with_rank and difference.rank >= 0:
        rank = f"rank {difference.rank}{also}, "
    else:
        rank = ""
    return (
        f"DIFFERENT from step {difference.number}, {rank}{difference.where}: {difference.text}. "
        f"Cause: {difference.stage}: {STAGES[difference.stage]}"
    )


def format_numbers(numbers: Iterable[int]) -> str:
    """Format numbers as `0, 1, 2`, shortened if there are many."""
    texts = [str(number) for number in sorted(numbers)]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], f"... ({len(texts)} of them)"])
