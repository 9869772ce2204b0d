"""The proof that N ranks train what one does.

    table = lockstep.verify(task, config, engines=("single", "ddp"), world_sizes=(1, 2), steps=8)
    print(table)
    assert table.ok

A single process takes the steps and writes down every tensor of each; then, in every combination of engine and world
size, each rank compares its own with these as it goes. See docs/verify.md.
"""

import dataclasses
import shutil
from collections.abc import Sequence
from typing import Any

from lockstep.config import Config
from lockstep.diagnose.executor import Executor, Joined, Started, launched
from lockstep.diagnose.proof import Proof
from lockstep.diagnose.table import Table
from lockstep.diagnose.wanted import DEFAULT_ENGINES, Wanted

__all__ = ["prove", "verify"]


def verify(
    task: Any = None,
    config: Config | None = None,
    *,
    engines: Sequence[str] = DEFAULT_ENGINES,
    world_sizes: Sequence[int] = (1, 2),
    steps: int = 8,
    precision: str = "",
    resume_at: int | None = None,
    compile: bool = False,
    plant: str = "",
    plant_at: int | None = None,
    skip_unavailable: bool = False,
    scratch: str = "",
) -> Table:
    """Runs the same steps in every combination, and compares each with a single process, tensor by tensor.

    The processes are started here; they import the module of `task`, which must therefore not start them itself when
    it is imported. Under torchrun the job's own ranks are used, at their world size.

    Args:
        task: what is trained; None: what the config names. It has to go through pickle, except under torchrun.
        config: of the run. With `exact` every bit must agree.
        engines, world_sizes: all pairs of them, single aside, which is one process.
        steps: how many of the run's first steps.
        precision: "" is float64 without `config.exact`, else the config's; a name is that one.
        resume_at: the step before which each combination is saved and resumed; None: half-way; 0: never.
        compile: also compare compiled with eager.
        plant: a fault to plant, to see it found (lockstep.diagnose.plant.FAULTS); plant_at: the step at which.
        skip_unavailable: leave out what cannot run here.
        scratch: a folder for about 4 copies of the model a step; "": the system's.

    Returns:
        the table; `ok` is False where anything differs.

    Raises:
        ConfigError: what was asked for cannot be done, or something cannot run here and `skip_unavailable` is False.
        LockstepError: the single process itself failed.
    """
    config = config or Config()
    precision = precision or (config.precision if config.exact else "float64")
    config = dataclasses.replace(config, precision=precision)
    return prove(
        Wanted(
            config,
            task,
            engines=engines,
            world_sizes=world_sizes,
            steps=steps,
            resume_at=resume_at,
            compile=compile,
            plant=plant,
            plant_at=plant_at,
            skip_unavailable=skip_unavailable,
            scratch=scratch,
        )
    )


def prove(wanted: Wanted) -> Table:
    """`verify`, from what is wanted. Its files are removed at the end."""
    config = dataclasses.replace(wanted.config, wandb=False, tensorboard=False, stop_at=0, resume_anyway=False)
    wanted = dataclasses.replace(wanted, config=config)
    executor: Executor = Joined(config) if launched() else Started(config)
    folder = executor.folder(wanted.scratch)
    try:
        table = Proof(wanted, executor, folder).table()
        executor.close()
    finally:
        if executor.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return table
