"""Prove that N ranks train what a single process trains.

    table = lockstep.verify(task, config, engines=("single", "ddp"), world_sizes=(1, 2), steps=8)
    print(table)
    assert table.ok

A single process takes the steps and stores every tensor of each. Then, in every combination of engine and world size,
each rank compares its own tensors with these as it goes. See docs/verify.md. Importing this package does not load
torch; `verify` imports the working modules.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.errors import SETTINGS

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.verify.request import VerifyTable

__all__ = ["FAULTS", "verify"]

# Names of the faults to plant; `lockstep/verify/faults.py` has the class of each.
FAULTS = (
    "per-rank-seed",
    "per-rank-weights",
    "overlapping-data",
    "dropped-sample",
    "unsent-gradient",
    "local-batchnorm",
    "rank-average",
    "other-rate",
    "rank-dropout",
    "extra-step",
    "bit-flip",
    "clip-before-unscale",
    "padded-evaluation",
    "swapped-state",
)


def verify(  # noqa: PLR0913
    task: Any = None,
    config: "Config | None" = None,
    *,
    engines: Sequence[str] = (),
    world_sizes: Sequence[int] = (1, 2),
    steps: int = 8,
    precision: str = "",
    resume_at: int | None = None,
    compile: bool = False,
    plant: str = "",
    plant_at: int | None = None,
    skip_unavailable: bool = False,
    scratch: str = "",
) -> "VerifyTable":
    """Run the same steps in every combination, and compare each with a single process.

    The processes are started here; they import the module of `task`, which must therefore not start them itself when it
    is imported. Under torchrun the job's own ranks are used, at their world size.

    Args:
        task: the task to train; None: the config's. It must be picklable, except under torchrun.
        config: of the run. With `exact` every bit must agree.
        engines, world_sizes: all pairs of them; engines of a single process appear once. No engines: every engine that
            needs no further package and no GPU.
        steps: number of first steps of the run.
        precision: "" is float64, or the config's with `config.exact`; else the named one. If one of the engines has no
            float64, "" is the config's.
        resume_at: the step before which each combination is saved and resumed; None: half-way; 0: never.
        compile: also compare compiled with eager.
        plant: a fault to plant, to check that it is found (one of lockstep.verify.FAULTS).
        plant_at: the step of the fault.
        skip_unavailable: leave out combinations that cannot run here.
        scratch: a folder for about 4 copies of the model a step; "": the system's.

    Returns:
        The table; `ok` is False if anything differs.

    Raises:
        ConfigError: the request is impossible, or something cannot run here and `skip_unavailable` is False.
        LockstepError: the single process itself failed.
    """
    request = importlib.import_module("lockstep.verify.request").VerifyRequest(
        config or importlib.import_module("lockstep.config.schema").Config(),
        task,
        engines=engines,
        world_sizes=world_sizes,
        steps=steps,
        precision=precision,
        resume_at=resume_at,
        compile=compile,
        plant=plant,
        plant_at=plant_at,
        skip_unavailable=skip_unavailable,
        scratch=scratch,
    )
    table: VerifyTable = importlib.import_module("lockstep.verify.verification").prove(request)
    return table


SETTINGS.fields |= {"--" + name.replace("_", "-"): name for name in verify.__kwdefaults__ or ()}
