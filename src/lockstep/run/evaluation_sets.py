"""The sets that a run is evaluated on, each cut into micro-batches.

    found = named_sets(task.dataset("evaluation"))
    sets = batches_of(config, task, found, world)       # {} where there is none, {"": batches} for one alone

Each set is one step, whose micro-batches are shared out over the ranks; for a loss over all samples of a step it is cut
into steps as the training is. Which samples it has, in which order and in which micro-batches, depends on neither the
world nor the loader processes.
"""

import re
from collections.abc import Mapping
from typing import Any

from lockstep.config.config import Config
from lockstep.config.spans import in_batches
from lockstep.data.batches import Batches, Loading, StepPlan
from lockstep.data.fetch import check_dataset
from lockstep.data.order import Sequential
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError
from lockstep.guards.loader import RetryingDataset
from lockstep.run.evaluate import one_step
from lockstep.task import Task, looks_at_whole_step

__all__ = ["batches_of", "named_sets"]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def named_sets(found: Any) -> dict[str, Any]:
    """What `task.dataset("evaluation")` returned, by name: one set alone is named "", and none is {}.

    A mapping whose keys are all texts is several sets; with other keys it is a dataset like any other.

    Raises:
        DataError: a set that is no dataset, or one of several that is empty or whose name cannot be shown.
    """
    if not (isinstance(found, Mapping) and found and all(isinstance(name, str) for name in found)):
        if found is not None:
            check_dataset(found, "evaluation")
        return {} if found is None or not len(found) else {"": found}
    for name, dataset in found.items():
        if not _NAME.fullmatch(name):
            raise DataError(
                f"the task's dataset('evaluation') has a set named {name!r}: use letters, digits, '-', '_' and '.'"
            )
        check_dataset(dataset, "evaluation", name)
        if not len(dataset):
            raise DataError(f"the task's dataset('evaluation')['{name}'] is empty: leave it out of the dict")
    return dict(found)


def batches_of(config: Config, task: Task, sets: Mapping[str, Any], world: World) -> dict[str, Batches]:
    """The sets as steps, in their order. Collective.

    Raises:
        LockstepError: the ranks have other sets, or sets of other sizes.
    """
    sizes = {name: len(dataset) for name, dataset in sets.items()}
    world.check_same("evaluation set", {"names": list(sizes), "samples": list(sizes.values())})  # collective
    return {name: _one(config, task, dataset, world) for name, dataset in sets.items()}


def _one(config: Config, task: Task, dataset: Any, world: World) -> Batches:
    micro_size = config.eval_micro_batch_size or config.micro_size
    workers = config.data.workers if config.eval_workers < 0 else config.eval_workers
    whole = one_step(len(dataset), micro_size).micro_batches
    samples = min(len(dataset), in_batches(config.limit_eval_batches, whole) * micro_size)
    loading = Loading(workers, config.data.prefetch, config.guards.retries)
    step_plan, order = _cut(config, task, samples, micro_size), Sequential(len(dataset))
    guards = config.guards
    dataset = RetryingDataset(dataset, retries=guards.retries, skips=guards.bad_samples, rank=world.rank)
    return Batches(task, dataset, order, step_plan, world, seed=config.seed, loading=loading)


def _cut(config: Config, task: Task, samples: int, micro_size: int) -> StepPlan:
    """One step; or steps as in the training, for a loss that looks at all samples of a step."""
    if not looks_at_whole_step(task):
        return one_step(samples, micro_size)
    if config.batch_size % micro_size:
        raise ConfigError(
            f"--eval-micro-batch-size {micro_size} does not divide --batch-size {config.batch_size}: the loss looks at "
            "all samples of a step, in an evaluation too; leave it out, or give a divisor"
        )
    return StepPlan(config.batch_size, micro_size, samples)
