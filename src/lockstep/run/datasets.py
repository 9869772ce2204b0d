"""The datasets of a run: as the task makes them, checked, guarded, and the same on every rank.

plain, evaluation, samples = datasets_of(task, world)
lines = check_samples(config, plain, evaluation, world)     # DifferenceError: another content on a rank
"""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from lockstep.config.config import Config
from lockstep.data.fetch import check_dataset, generators_kept
from lockstep.data.loader import Loader, Loading
from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import DataError
from lockstep.guards.contents import KEY, Contents, check_contents
from lockstep.guards.loader import RetryingDataset
from lockstep.run.evaluation_sets import named_sets
from lockstep.task import Task

__all__ = ["check_samples", "datasets_of", "guarded"]


def datasets_of(task: Task, world: World) -> tuple[Any, dict[str, Any], int]:
    """Make the training set and the evaluation's sets, and count the samples of the first. Collective.

    Raises:
        DataError: one is no dataset, or the training set is empty.
    """
    plain, evaluation = on_all_ranks(world, lambda: _datasets(task))  # collective
    return plain, evaluation, on_all_ranks(world, lambda: _size(plain))  # collective


def guarded(config: Config, dataset: Any, world: World) -> RetryingDataset:
    """Wrap a dataset as `--guards.retries` and `--guards.bad-samples` say."""
    guards = config.guards
    return RetryingDataset(dataset, retries=guards.retries, skips=guards.bad_samples, rank=world.rank)


def check_samples(config: Config, training: Any, evaluation: Mapping[str, Any], world: World) -> list[str]:
    """Compare a few samples of each set between the ranks, and return lines on what cannot be compared. Collective.

    They are loaded where the training loads them: in a loader process, if there are any.

    Raises:
        DifferenceError: a rank has other samples.
    """
    if world.size == 1:
        return []
    named = {"training set": training}
    named |= {f"evaluation set '{name}'" if name else "evaluation set": each for name, each in evaluation.items()}
    retries = config.guards.retries
    sets = {
        name: RetryingDataset(each, retries=retries, skips=0, rank=world.rank) for name, each in named.items()
    }  # whose counts are not the run's

    def read() -> dict[str, Any]:
        loading = Loading(min(config.data.workers, 1), 1, retries)
        loader = Loader(Contents(sets, config.seed), loading, world.rank, False)
        with generators_kept(), closing(loader.stream(iter([KEY]))) as found:
            return next(data for _, data, _ in found)

    return check_contents(world, on_all_ranks(world, read))  # collective


def _datasets(task: Task) -> tuple[Any, dict[str, Any]]:
    training, evaluation = task.dataset("train"), task.dataset("evaluation")
    check_dataset(training, "train")
    return training, named_sets(evaluation)


def _size(dataset: Any) -> int:
    if not len(dataset):
        raise DataError("the training set is empty: the task's dataset('train') has no samples")
    return len(dataset)
