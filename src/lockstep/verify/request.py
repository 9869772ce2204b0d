"""Define the request of a verification, the run of each combination, and the resulting table.

request = VerifyRequest(Config(batch_size=8), engines=["single", "ddp"], world_sizes=[1, 2])
combinations = combine(request.engines, request.world_sizes, compiled=False)          single x1, ddp x1, ddp x2
spec = run_spec(request, combinations[2], folder, Fault(), coarsest="float64")

`Fault` is the base of planted faults, `STAGES` explains each stage, `VerifyTable` is the result.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.config.engine_options import ENGINES, PLAIN
from lockstep.config.schema import Config
from lockstep.data.batches import Batches, StepLoader
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.exact import check_servable
from lockstep.errors import ConfigError
from lockstep.task import Task
from lockstep.verify.tolerance import EXACT, Tolerance, tolerance_of

__all__ = [
    "REFERENCE",
    "STAGES",
    "Combination",
    "Difference",
    "Fault",
    "FaultContext",
    "RunSpec",
    "Seed",
    "TableRow",
    "VerifyRequest",
    "VerifyTable",
    "combine",
    "disturbed_spec",
    "listed",
    "reference_specs",
    "refusal",
    "run_spec",
]


Seed = Callable[[int, int], None]


@dataclass
class FaultContext:
    """The time and place of a fault.

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
        """Whether this is the rank with the fault: the last."""
        return self.world.rank == self.world.size - 1


class Fault:
    """No fault: every part is returned unchanged. Each subclass changes one.

    Attributes:
        name: for `--plant`.
        text: one line.
        stage: the cause that the comparison has to name.
        moment: "start", "step", "resume" or "end": when it shows.
        everywhere: the single process has it too, where it is harmless.
    """

    name, text, stage, moment = "", "", "", "start"
    everywhere = False

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


@dataclass(frozen=True, slots=True)
class Combination:
    """An engine at a world size, eager or compiled, that computes the same steps."""

    engine: str
    world_size: int
    compiled: bool = False

    @property
    def key(self) -> str:
        """A name for files: `ddp-2-compiled`."""
        return f"{self.engine}-{self.world_size}{'-compiled' * self.compiled}"

    def __str__(self) -> str:
        return f"{self.engine} x{self.world_size}{' compiled' * self.compiled}"


REFERENCE = Combination(PLAIN, 1)
_ANY = Tolerance(1, 1.0, 1.0)
_COMPILED = Combination(PLAIN, 1, compiled=True)


@dataclass(frozen=True)
class VerifyRequest:
    """A verification to run. The fields are the arguments of `lockstep.verify`.

    Attributes:
        engines: () is every engine that needs no further package and no GPU.
        precision: "" is float64; the config's with `config.exact`, or if one of the engines has no float64.
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

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"--steps is {self.steps}: it must be at least 1")
        if not 0 <= self.resume < self.steps:
            raise ConfigError(f"--resume-at is {self.resume}: it must be below --steps {self.steps}; 0 leaves it out")
        if not 0 <= self.fault_step < self.steps:
            raise ConfigError(f"--plant-at is {self.fault_step}: it must be below --steps {self.steps}")

    @property
    def resume(self) -> int:
        """The step before which every combination is saved, ended and resumed."""
        return self.steps // 2 if self.resume_at is None else self.resume_at

    @property
    def fault_step(self) -> int:
        """The step of a fault that shows at a step."""
        if self.plant_at is not None:
            return self.plant_at
        usual = min(2, self.steps - 1)
        return max(0, usual - (usual == self.resume))  # not where a resume could be mistaken for it

    def resolved(self) -> "VerifyRequest":
        """Fill in the defaults, and turn off sinks and early stops."""
        engines = self.engines or tuple(name for name, entry in ENGINES.items() if entry.everywhere)
        wide = not self.config.exact and all(ENGINES[name].float64 for name in engines if name in ENGINES)
        given, own = ("" if name == "auto" else name for name in (self.precision, self.config.precision))
        precision = given or ("float64" if wide else own or "float32")  # not the device's default: name what to prove
        plain = dataclasses.replace(self.config, wandb=False, tensorboard=False, stop_at=0, resume_anyway=False)
        config = dataclasses.replace(plain, precision=precision)
        return dataclasses.replace(self, config=config, engines=engines, precision=precision)


@dataclass(frozen=True)
class RunSpec:
    """The run of one combination.

    Attributes:
        key: names its traces; the reference's is "reference".
        folder: of traces, checkpoints and the reference's tensors.
        reference: the key of the trace to compare with; "" writes one.
        tolerance: the allowed differences from it.
        fault: the planted fault, if any.
        disturbed: its sums are rounded differently, to measure the effect; see `wrappers.Disturbed`.
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
        """The step before which the run is saved, ended and resumed; 0: never.

        It is 0 for the reference.
        """
        return self.request.resume if self.reference and not self.disturbed else 0


def combine(engines: Sequence[str], world_sizes: Sequence[int], compiled: bool) -> list[Combination]:
    """List every engine at every world size, ascending, after the single process run again.

    An engine of one process appears once.

    Raises:
        ConfigError: an unknown engine, or a world size below 1.
    """
    for name in engines:
        if name not in ENGINES:
            raise ConfigError(f"--engines has '{name}': choose from {', '.join(ENGINES)}")
    for size in world_sizes:
        if size < 1:
            raise ConfigError(f"--world-sizes has {size}: each must be at least 1")
    single = [name for name, entry in ENGINES.items() if entry.one_process]
    pairs = [(name, 1) for name in single if name in engines or name == PLAIN]
    pairs += [(name, size) for size in world_sizes for name in engines if name not in single]
    found = [
        Combination(name, size, how)
        for how in ((False, True) if compiled else (False,))
        for name, size in dict.fromkeys(pairs)
    ]
    return sorted(found, key=lambda one: (one.world_size, one != REFERENCE, one.compiled))


def refusal(one: Combination, config: Config) -> str | None:
    """Return why this combination cannot run, as far as known before it starts; else None.

    Args:
        config: if its micro-batch is still "auto", the model decides how a step is split, and the answer is None.
    """
    if config.exact and config.micro_batch_size:
        try:
            check_servable(config.micro_batches, one.world_size)
        except ConfigError as error:
            return str(error)
    return None


def reference_specs(request: VerifyRequest, folder: Path, fault: Fault, *, compiled: bool) -> list[RunSpec]:
    """Return the single process, and in exact mode the compiled one too.

    Compiled code has other bits than eager code.
    """
    planted = fault if fault.everywhere else Fault()
    specs = [RunSpec("reference", REFERENCE, request, folder, "", fault=planted)]
    if compiled and request.config.exact:
        specs.append(RunSpec("reference-compiled", _COMPILED, request, folder, "", fault=planted))
    return specs


def disturbed_spec(request: VerifyRequest, folder: Path, fault: Fault) -> RunSpec:
    """Return the single process with its sums rounded differently, to measure how far it moves."""
    planted = fault if fault.everywhere else Fault()
    return RunSpec("reference-disturbed", REFERENCE, request, folder, "reference", _ANY, planted, disturbed=True)


def run_spec(
    request: VerifyRequest,
    one: Combination,
    folder: Path,
    fault: Fault,
    coarsest: str,
    measured: tuple[float, ...] = (),
) -> RunSpec:
    """Return the run of a combination that is compared with its reference.

    Args:
        fault: planted on combinations of several ranks.
        coarsest: the coarsest dtype that the reference's model computes in.
        measured: see Tolerance.
    """
    exact = request.config.exact and one.compiled and one != _COMPILED
    reference = "reference-compiled" if exact else "reference"
    planted = fault if fault.everywhere or one.world_size > 1 else Fault()
    eager = one.compiled and reference == "reference"
    allowed = EXACT
    if one != REFERENCE:
        allowed = tolerance_of(request.config, one.world_size, coarsest, other_kernels=eager, measured=measured)
    return RunSpec(one.key, one, request, folder, reference, allowed, planted)


_SHARE = 1e-4  # shares from here on are shown in per cent

# The stages of a step in the order of comparison, and the meaning of a first difference there. The inputs of a stage
# are compared before it, so the first that differs is the cause.
STAGES = {
    "determinism": "the same program computes something else when it runs again, so no engine is to blame",
    "initial weights": "the ranks do not begin with the same weights",
    "weights": "something other than the optimizer changed the weights between two updates",
    "data": "the ranks do not read the samples of this step in the run's order",
    "randomness": "random numbers do not depend on the step and the micro-batch alone",
    "forward": "with the same weights, data and generators the model computes another loss",
    "normalisation": "the loss is not divided by the items of the whole step",
    "buffers": "the model's buffers depend on which rank computed what",
    "reduction": "gradients are not the sum over all micro-batches of all ranks",
    "clipping": "the gradient is not clipped by the norm of the whole, unscaled gradient",
    "optimizer": "the same gradient leads to another update",
    "schedule": "the learning rate is not the one of this step",
    "evaluation": "the evaluation does not count every sample once",
    "evaluation kernels": "the evaluation has the same items, but its forward is computed by other kernels",
    "optimizer state": "the optimizer's state is not the one of this step",
}


@dataclass(frozen=True)
class Difference:
    """The first difference of a combination from the reference.

    Attributes:
        step: 0-based.
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


@dataclass(frozen=True)
class TableRow:
    """The result of one combination.

    Attributes:
        verdict: "equal" (all bits), "close" (within the tolerance), "different", "not proved", "failed" or
            "unavailable".
        largest: the largest relative difference of a weight after the last step, and its tensor.
        hidden: share of a step's gradient below which a difference would not show.
        difference: the first difference, if the verdict is "different".
        reason: why it failed, cannot run or proves nothing.
    """

    combination: Combination
    verdict: str
    largest: tuple[float, str] = (0.0, "")
    difference: Difference | None = None
    reason: str = ""
    hidden: float = 0.0

    @property
    def ok(self) -> bool:
        return self.verdict in ("equal", "close")

    @property
    def text(self) -> str:
        """The row's text in the table."""
        if self.verdict == "equal":
            return "bitwise equal"
        if self.verdict == "close":
            found = f"within rounding: {self.largest[0]:.1e} at most, in {self.largest[1]}"
            under = f"{self.hidden:.2g}" if self.hidden < _SHARE else f"{self.hidden:.2%}"
            return f"{found}; a difference under {under} of the whole gradient's length would not show"
        if self.difference:
            return _shown(self.difference, named=self.combination.world_size > 1)
        return f"{self.verdict}: {self.reason}"


@dataclass
class VerifyTable:
    """The result of `verify`: `print(table)` shows it, `table.ok` is whether everything agreed.

    Attributes:
        rows: one for each combination.
        title: what was compared, and how exactly.
        notes: facts about all rows: a task that is not deterministic, a planted fault.
        difference: between the single process and itself, or another machine's certificate.
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
        lines = [f"  {'ok' if row.ok else '--':<3} {row.combination!s:<{width}}  {row.text}" for row in self.rows]
        notes = [f"  {note}" for note in self.notes]
        return "\n".join([self.title, *lines, *notes])


def _shown(found: Difference, *, named: bool) -> str:
    """Describe a difference; `named`: there is more than one rank to name."""
    others = [rank for rank in found.ranks if rank != found.rank]
    also = f" (and {listed(others)})" if others else ""
    rank = f"rank {found.rank}{also}, " if named and found.rank >= 0 else ""
    return (
        f"DIFFERENT from step {found.step} on, {rank}{found.where}: {found.text}. "
        f"Cause: {found.stage}: {STAGES[found.stage]}"
    )


def listed(numbers: Iterable[int]) -> str:
    """Format numbers as `0, 1, 2`, shortened if there are many."""
    texts = [str(number) for number in sorted(numbers)]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], f"... ({len(texts)} of them)"])
