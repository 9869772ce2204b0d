"""The first lines of a start: where each rank computes, what a step is, what takes it, and what is worth a warning.

announce(built)         # collective; into the log
"""

import logging

from lockstep.run import extending
from lockstep.run.build import Built
from lockstep.run.defaults import described_loss, described_optimizer, described_step, warnings
from lockstep.run.rank_table import log_ranks
from lockstep.task import has_own

__all__ = ["announce"]

_LOG = logging.getLogger("lockstep")


def announce(built: Built) -> None:
    """Log where each rank computes, what a step is and what is worth a warning. Collective."""
    log_ranks(built.world)  # collective
    _LOG.info(described_step(built.run_plan, built.world.size))
    if line := described_loss(built.run_plan, built.task):
        _LOG.info(line)
    if not has_own(built.task, "optimizer"):
        _LOG.info(described_optimizer(built.run_plan))
    if built.config.checkpoint.mode == "none" and built.world.is_main:
        _LOG.warning(
            "--checkpoint.mode none: no checkpoint is written; what this start trains cannot be resumed or loaded"
        )
    if line := extending.described(built.state, built.run_plan.step_plan.steps, built.lr * built.rate(built.start)):
        _LOG.info(line)
    for line in warnings(built.run_plan, built.model) if built.world.is_main else ():
        _LOG.warning(line)
