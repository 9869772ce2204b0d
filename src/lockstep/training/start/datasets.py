"""Make a run's datasets, and compare their samples between the ranks.

training, evaluation, samples = make_datasets(task, world, seed)        # collective
loaded = with_retries(config, training, world)
notes = check_samples(config, training, evaluation, world, batches, accept)         # collective
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from lockstep.config.schema import SPANS, Config, flag, lookup, nearest_divisor
from lockstep.data.batches import Batches
from lockstep.data.loader import Loader, Loading, check_dataset, generators_kept, seeded_alike
from lockstep.data.stream_adapters import is_stream, source_of
from lockstep.data.stream_batches import StreamBatches, StreamData
from lockstep.data.stream_mixture import MixtureSource
from lockstep.data.streams import StreamSource
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError
from lockstep.guards.contents import KEY, Contents, alike, check_contents, digest
from lockstep.guards.samples import RetryingDataset
from lockstep.task import Task, has_own
from lockstep.training.evaluation import sets_by_name

__all__ = [
    "check_samples",
    "check_stream",
    "make_dataset",
    "make_datasets",
    "with_retries",
]


def make_datasets(task: Task, world: World, seed: int) -> tuple[Any, dict[str, Any], int]:
    """Make the training set and the evaluation sets. Collective.

    Args:
        seed: the run's.

    Returns:
        The training set, the evaluation sets by name, and the number of training samples; 0 for a stream.

    Raises:
        DataError: one is no dataset, or the training set is empty.
    """

    return on_all_ranks(world, lambda: _task_datasets(task, seed))  # collective


def make_dataset(task: Task, split: str, seed: int) -> Any:
    """Call the task's `dataset`, with all generators set to a seed of the split."""
    with seeded_alike(seed):
        return task.dataset(split)


def check_stream(config: Config, task: Task, source: StreamSource | MixtureSource) -> None:
    """Refuse what a training set without an index cannot have.

    Raises:
        ConfigError: a setting, named by its flag, or an `order` of the task.
    """
    start = f"the training set is a stream ({source.name}), which has no length"
    if not config.max_steps:
        raise ConfigError(f"{start}: give --max-steps in place of --num-epochs (or of --extend-to in epochs)")
    spans = []
    for name in sorted(SPANS):
        if str(lookup(config, name)).endswith(("epoch", "epochs")):
            spans.append(name)
    if spans:
        raise ConfigError(f"{start}: give {flag(spans[0])} in steps, or as a share of the plan")
    if config.limit_train_batches:
        raise ConfigError(f"{start}: leave out --limit-train-batches; --max-steps limits a run")
    if config.guards.bad_samples:
        raise ConfigError(
            f"--guards.bad-samples {config.guards.bad_samples}: a stream has no other sample in place of a bad one; "
            "leave it out, and let the stream itself pass over bad samples"
        )
    if config.micro_batch_size and config.batch_size % config.micro_batch_size:
        near = nearest_divisor(config.batch_size, config.micro_batch_size)
        raise ConfigError(
            f"--batch-size {config.batch_size} is not a multiple of --micro-batch-size {config.micro_batch_size}, as a "
            f"stream needs; use --micro-batch-size {near}, or remove it"
        )
    if config.guards.audit:
        raise ConfigError(
            f"--guards.audit {config.guards.audit:g} loads single micro-batches again, and a stream is read in order; "
            "leave it out"
        )
    if has_own(task, "order"):
        raise ConfigError("the task has an `order`, which is for a training set with an index: a stream has its own")


def with_retries(config: Config, dataset: Any, world: World) -> RetryingDataset | StreamData:
    """Wrap a dataset with retries and skips, by --guards.retries and --guards.bad-samples."""
    guards = config.guards
    if is_stream(dataset):
        return StreamData(source_of(dataset), guards.retries)
    return RetryingDataset(dataset, retries=guards.retries, skips=guards.bad_samples, rank=world.rank)


def check_samples(
    config: Config,
    training: Any,
    evaluation: Mapping[str, Any],
    world: World,
    batches: Batches,
    accept: Callable[[Mapping[str, Any]], list[str]],
) -> list[str]:
    """Compare a few samples of each set between the ranks. Collective.

    A loader process loads them, if training has such processes.

    Args:
        batches: of the training set.
        accept: compares the digests with those of a checkpoint; see `check_contents`.

    Returns:
        A line for the log about each part that cannot be compared.

    Raises:
        DifferenceError: a rank has different samples.
        ResumeError: by `accept`.
    """
    has_index = not isinstance(batches, StreamBatches)
    datasets = {"training set": training} if has_index else {}
    datasets |= {
        f"evaluation set '{name}'" if name else "evaluation set": dataset for name, dataset in evaluation.items()
    }
    retries = config.guards.retries
    # Separate wrappers: the run does not count their retries.
    sets = {}
    for name, dataset in datasets.items():
        sets[name] = RetryingDataset(dataset, retries=retries, skips=0, rank=world.rank)

    def read() -> dict[str, Any]:
        with generators_kept():
            if isinstance(batches, StreamBatches):
                contents = _read_stream(batches)
            else:
                contents = {}
            loading = Loading(min(config.data.workers, 1), 1, retries)
            loader = Loader(Contents(sets, config.seed), loading, world.rank, False)
            with closing(loader.stream(iter([KEY]))) as samples:
                contents |= next(data for _, data, _ in samples)
            return contents

    digests = on_all_ranks(world, read)  # collective
    return check_contents(world, digests, accept)  # collective


def _read_stream(batches: StreamBatches) -> dict[str, Any]:
    """Return a digest of a stream's first samples.

    Raises:
        DataError: two readings differ, so that a resume would not find its place.
    """
    batches.try_reading(digest, alike)
    reference, repeated = (digest(batches.first_samples()) for _ in range(2))
    if not alike(reference, repeated):
        raise DataError(
            "two readings of the stream of the task's dataset('train') differ in its first samples, so a resume "
            "would lose or repeat some; give its shuffles a seed, and draw from torch, numpy or random alone"
        )
    return {"first samples of the stream": reference}


def _task_datasets(task: Task, seed: int) -> tuple[Any, dict[str, Any], int]:
    training = make_dataset(task, "train", seed)
    evaluation = make_dataset(task, "evaluation", seed)
    samples = 0 if is_stream(training) else _count(training)
    return training, sets_by_name(evaluation), samples


def _count(training: Any) -> int:
    check_dataset(training, "train")
    if not len(training):
        raise DataError(
            "the training set is empty: the task's dataset('train') has no samples; look at its path and its filters"
        )
    return len(training)
