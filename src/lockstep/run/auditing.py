"""What `--guards.audit` needs of a run.

check_auditable(config, world)      # raises where micro-batches cannot be computed again
check_auditable_loss(config, task)
"""

from lockstep.config.config import Config
from lockstep.distributed.world import World
from lockstep.engines.make import check_audit, name_of
from lockstep.errors import ConfigError
from lockstep.task import Task, looks_at_whole_step
from lockstep.transforms.determinism import autotuned, pin_compiler

__all__ = ["check_auditable", "check_auditable_loss"]


def check_auditable(config: Config, world: World) -> None:
    """Refuses what cannot be audited; a compiler is told to choose its kernels alike on all ranks.

    Raises:
        ConfigError: an engine, a BatchNorm or a compiler that `--guards.audit` does not go with.
    """
    if not config.guards.audit:
        return
    check_audit(name_of(config.engine, world))
    if config.weight_copies == "step":
        raise ConfigError(
            "--guards.audit does not go with --weight-copies step, where gradients come to the copies first: leave "
            "either out"
        )
    if config.batchnorm == "sync":
        raise ConfigError(
            "--guards.audit does not go with --batchnorm sync, whose forward takes all ranks: use --batchnorm replay"
        )
    if config.compile:
        if asked := autotuned():
            raise ConfigError(
                f"--guards.audit with --compile cannot hold with {asked[0]}=1, which takes the kernel that happens to "
                "be fastest; unset it"
            )
        pin_compiler()


def check_auditable_loss(config: Config, task: Task) -> None:
    """Raises ConfigError where the loss looks at the whole step, so that no rank has a micro-batch's by itself."""
    if config.guards.audit and looks_at_whole_step(task):
        raise ConfigError(
            "--guards.audit does not go with a task that has `outputs` and `step_loss`, whose gradient takes all of a "
            "step's samples: leave it out"
        )
