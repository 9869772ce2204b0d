"""What is asked for, and from it what the run of each combination of engine and world size is to do.

request = Request(Config(batch_size=8), engines=["single", "ddp"], world_sizes=[1, 2])
combinations = combine(request.engines, request.world_sizes, compiled=False)          single x1, ddp x1, ddp x2
spec = run_spec(request, combinations[2], folder, Fault(), coarsest="float64")
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.config import Config
from lockstep.engines.options import ENGINES, PLAIN
from lockstep.engines.shared.exact import check_servable
from lockstep.errors import ConfigError
from lockstep.verify.fault import Fault
from lockstep.verify.tolerance import EXACT, Tolerance, tolerance_of

__all__ = [
    "REFERENCE",
    "Combination",
    "Request",
    "RunSpec",
    "combine",
    "disturbed_spec",
    "reference_specs",
    "refusal",
    "run_spec",
]


@dataclass(frozen=True, slots=True)
class Combination:
    """One way to compute the same steps."""

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
class Request:
    """What is to be proved. The fields are the arguments of `lockstep.verify`, besides:

    Attributes:
        engines: () is every engine that needs no further package and no GPU.
        precision: "" is float64, but for `config.exact` and where one of the engines has none: then the config's.
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
        """The step of a fault that has a moment."""
        if self.plant_at is not None:
            return self.plant_at
        usual = min(2, self.steps - 1)
        return max(0, usual - (usual == self.resume))  # not where a resume could be taken for it

    def resolved(self) -> "Request":
        """The same with its defaults filled in, and without what a proof leaves alone: the sinks, an end in between."""
        engines = self.engines or tuple(name for name, entry in ENGINES.items() if entry.everywhere)
        wide = not self.config.exact and all(ENGINES[name].float64 for name in engines if name in ENGINES)
        given, own = ("" if name == "auto" else name for name in (self.precision, self.config.precision))
        precision = given or ("float64" if wide else own or "float32")  # not the device's default: name what to prove
        plain = dataclasses.replace(self.config, wandb=False, tensorboard=False, stop_at=0, resume_anyway=False)
        config = dataclasses.replace(plain, precision=precision)
        return dataclasses.replace(self, config=config, engines=engines, precision=precision)


@dataclass(frozen=True)
class RunSpec:
    """What the run of one combination is to do.

    Attributes:
        key: names its traces; the reference's is "reference".
        folder: where traces, checkpoints and the reference's tensors lie.
        reference: the key of the trace that is compared with; "" writes one.
        tolerance: what may differ from it.
        fault: what is planted, if anything.
        disturbed: its sums are rounded otherwise, to measure what that makes; see `wrappers.Disturbed`.
    """

    key: str
    combination: Combination
    request: Request
    folder: Path
    reference: str
    tolerance: Tolerance = EXACT
    fault: Fault = dataclasses.field(default_factory=Fault)
    disturbed: bool = False

    @property
    def resume(self) -> int:
        """The step before which the run is saved, ended and begun again; 0: never, as the reference."""
        return self.request.resume if self.reference and not self.disturbed else 0


def combine(engines: Sequence[str], world_sizes: Sequence[int], compiled: bool) -> list[Combination]:
    """Every engine at every world size, world sizes ascending; first the single process itself, run again.

    An engine that is one process appears once.

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
    """Why this combination cannot run, as far as that can be said without starting it; else None.

    Args:
        config: where its micro-batch is still "auto" the model decides how a step is cut: then nothing is said yet.
    """
    if config.exact and config.micro_batch_size:
        try:
            check_servable(config.micro_batches, one.world_size)
        except ConfigError as error:
            return str(error)
    return None


def reference_specs(request: Request, folder: Path, fault: Fault, *, compiled: bool) -> list[RunSpec]:
    """The single process, and in exact mode the compiled one too, since compiled has other bits than eager."""
    planted = fault if fault.everywhere else Fault()
    specs = [RunSpec("reference", REFERENCE, request, folder, "", fault=planted)]
    if compiled and request.config.exact:
        specs.append(RunSpec("reference-compiled", _COMPILED, request, folder, "", fault=planted))
    return specs


def disturbed_spec(request: Request, folder: Path, fault: Fault) -> RunSpec:
    """The single process with its sums rounded otherwise, compared with the reference only to see how far it moves."""
    planted = fault if fault.everywhere else Fault()
    return RunSpec("reference-disturbed", REFERENCE, request, folder, "reference", _ANY, planted, disturbed=True)


def run_spec(
    request: Request, one: Combination, folder: Path, fault: Fault, coarsest: str, measured: tuple[float, ...] = ()
) -> RunSpec:
    """The run that is compared with its reference.

    Args:
        fault: planted on combinations of several ranks.
        coarsest: dtype that the reference's model computes in, at its coarsest.
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
