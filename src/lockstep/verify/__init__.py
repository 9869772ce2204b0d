"""Prove that N ranks give the same training as a single process.

    table = lockstep.verify(task, config, engines=("single", "ddp"), world_sizes=(1, 2), steps=8)
    print(table)
    assert table.ok

A single process runs the steps and stores every tensor of each. Then each rank of every combination of engine and
world size compares its tensors with these in every step. See docs/verify.md. Importing this package does not load
torch; `verify` imports the modules that do.
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
    "unsummed-input",
    "counted-twice",
    "items-of-all",
    "plain-shard",
    "restarted-positions",
    "unsummed-keys",
    "local-draws",
    "tied-ends",
)


# A public function: its many settings are keywords with defaults.
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
    tensor: Sequence[int] = (),
    context: Sequence[int] = (),
    pipeline: Sequence[int] = (),
) -> "VerifyTable":
    """Run the same steps in every combination, and compare each with a single process.

    This function starts the processes. They import the module of `task`, so its import must not call `verify`. Under
    torchrun the ranks of the job are used, at their world size.

    Args:
        task: task to train, picklable except under torchrun; None: the config's.
        config: of the run. With `exact` every bit must agree.
        engines, world_sizes: all pairs of them; engines of a single process appear once. No engines: every engine that
            needs no further package and no GPU.
        steps: number of steps to run.
        precision: of weights and sums; "": float64, or the config's with `config.exact` or if an engine has no
            float64.
        resume_at: step after which each combination is saved and resumed; None: half-way; 0: never.
        compile: also compare compiled with eager.
        plant: fault to plant, to check that it is reported (one of lockstep.verify.FAULTS).
        plant_at: step of the fault, from 1.
        skip_unavailable: skip combinations that cannot run here.
        tensor, context, pipeline: degrees of these, each at the world sizes that it divides; () is the config's.
        scratch: folder for about 4 copies of the model per step; "": the system's.

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
        tensor=tensor,
        context=context,
        pipeline=pipeline,
    )
    table: VerifyTable = importlib.import_module("lockstep.verify.verification").prove(request)
    return table


# Errors name these settings as flags on the command line, and as arguments in Python.
SETTINGS.fields |= {"--" + name.replace("_", "-"): name for name in verify.__kwdefaults__ or ()}
