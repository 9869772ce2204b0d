"""Check that all ranks start from the same folder, data and weights.

    check_shared(RunFolder("outputs", "a"), world)          # ConfigError: the rank, its host and its path

Also logs where each rank computes, and gives every rank rank 0's values of a model that was made before the run.
"""

import functools
import itertools
import logging
import platform
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from lockstep.config.schema import Config
from lockstep.data.loader import Loader, Loading, check_dataset, generators_kept
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import ConfigError, DataError
from lockstep.files import created
from lockstep.guards.contents import KEY, Contents, check_contents
from lockstep.guards.samples import RetryingDataset
from lockstep.task import Task
from lockstep.training.evaluation import named_sets
from lockstep.training.run_dir import RunFolder

__all__ = [
    "align",
    "check_samples",
    "check_shared",
    "datasets_of",
    "guarded",
    "log_ranks",
    "watch_new_modules",
]


def datasets_of(task: Task, world: World) -> tuple[Any, dict[str, Any], int]:
    """Make the training set and the evaluation sets. Collective.

    Returns:
        The training set, what the task returned for the evaluation, and the number of training samples.

    Raises:
        DataError: one is no dataset, or the training set is empty.
    """
    plain, evaluation = on_all_ranks(world, lambda: _datasets(task))  # collective
    return plain, evaluation, on_all_ranks(world, lambda: _size(plain))  # collective


def guarded(config: Config, dataset: Any, world: World) -> RetryingDataset:
    """Wrap a dataset with the retries and skips of `--guards.retries` and `--guards.bad-samples`."""
    guards = config.guards
    return RetryingDataset(dataset, retries=guards.retries, skips=guards.bad_samples, rank=world.rank)


def check_samples(config: Config, training: Any, evaluation: Mapping[str, Any], world: World) -> list[str]:
    """Compare a few samples of each set between the ranks. Collective.

    The samples are loaded where training loads them: in a loader process, if there are any.

    Returns:
        A line for the log for each thing that cannot be compared.

    Raises:
        DifferenceError: a rank has different samples.
    """
    if world.size == 1:
        return []
    named = {"training set": training}
    named |= {f"evaluation set '{name}'" if name else "evaluation set": each for name, each in evaluation.items()}
    retries = config.guards.retries
    sets = {
        name: RetryingDataset(each, retries=retries, skips=0, rank=world.rank) for name, each in named.items()
    }  # separate wrappers: their retries and skips do not count as the run's

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


# --- log

_FEW = 16  # ranks that have a line each
_LOG = logging.getLogger("lockstep")


def log_ranks(world: World) -> None:
    """Write the host and device of every rank to rank 0's log file. Collective."""
    found = world.gather([platform.node(), str(world.device)])  # collective
    for line in lines_of(found) if world.is_main else ():
        _LOG.info(line, extra={"only_file": True})


def lines_of(places: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line for each rank, or for each host where there are many.

    Args:
        places: [host, device] by rank.
    """
    if len(places) <= _FEW:
        yield from (f"{rank_label(rank)}: {host}, {device}" for rank, (host, device) in enumerate(places))
        return
    for host, group in groupby(enumerate(places), key=lambda item: item[1][0]):
        ranks, devices = zip(*((rank, device) for rank, (_, device) in group), strict=True)
        yield f"{_span('rank', ranks)}: {host}, {_joined(devices)}"


def _span(word: str, numbers: Sequence[int]) -> str:
    return f"{word} {numbers[0]}" if len(numbers) == 1 else f"{word}s {numbers[0]} to {numbers[-1]}"


def _joined(devices: Sequence[str]) -> str:
    """Shorten to `cpu` if all are equal, or to a range if numbered in order."""
    if len(set(devices)) == 1:
        return devices[0]
    kind, _, first = devices[0].partition(":")
    if list(devices) == [f"{kind}:{int(first or 0) + place}" for place in range(len(devices))]:
        return f"{devices[0]} to {devices[-1]}"
    return ", ".join(devices)


# --- initial weights


@contextmanager
def watch_new_modules() -> Iterator[list[nn.Module]]:
    """Collect every module that is constructed inside the context."""
    new: list[nn.Module] = []
    init = nn.Module.__init__

    @functools.wraps(init)
    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        new.append(self)
        init(self, *args, **kwargs)

    nn.Module.__init__ = noted  # type: ignore[method-assign]
    try:
        yield new
    finally:
        nn.Module.__init__ = init  # type: ignore[method-assign]


@torch.no_grad()
def align(model: nn.Module, new: list[nn.Module], world: World) -> int:
    """Copy rank 0's parameters and buffers of modules that are not new. Collective.

    Modules that `task.model()` constructs draw their weights under the run's seed. They are left to the comparison of
    all weights (see lockstep.guards.startup), and so are tensors whose shapes or dtypes differ.

    Args:
        new: the modules that `task.model()` constructed.

    Returns:
        The number of tensors that differed on some rank.
    """
    if world.size == 1:
        return 0
    held = _held(model, {id(module) for module in new})
    mine = {name: [f"{t.dtype} {list(t.shape)}", _hash(t)] for name, t in held.items()}
    ranks = world.gather(mine)  # collective
    kinds = [{name: kind for name, (kind, _) in each.items()} for each in ranks]
    if any(each != kinds[0] for each in kinds):
        return 0
    odd = [name for name, value in ranks[0].items() if any(each[name] != value for each in ranks)]
    for name in odd:
        tensor = held[name]
        sent = _bytes(tensor).clone()
        dist.broadcast(sent, src=0, group=world.control)  # collective
        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))
    return len(odd)


def _held(model: nn.Module, new: set[int]) -> dict[str, Tensor]:
    """Collect the tensors of modules that existed before, each once, except those without memory."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        if id(module) not in new:
            own = itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            for name, tensor in own:
                if not tensor.is_meta and tensor.layout == torch.strided:
                    found.setdefault(id(tensor), (f"{prefix}.{name}", tensor))
    return dict(found.values())


def _bytes(tensor: Tensor) -> Tensor:
    """Copy a tensor's bytes to host memory, row by row. uint8 [n]"""
    return tensor.detach().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8)  # waits for the device


def _hash(tensor: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(_bytes(tensor).numpy().data)


# --- shared run folder

_PAUSES = (0.0, 0.1, 0.2, 0.5, 1.2)  # seconds; a network file system may show a new file late


def check_shared(folder: RunFolder, world: World) -> None:
    """Check that every rank sees rank 0's run folder. Collective.

    Rank 0 writes a token that every rank reads. Device and inode numbers are not compared: two nodes may see different
    numbers for one shared folder, and equal numbers for two folders. The token exists for a moment only; if the folder
    does not exist yet, it is written into the nearest parent.

    Raises:
        ConfigError: on every rank, if rank 0 cannot write there or a rank does not see what it wrote.
    """
    if world.size == 1:
        return
    path = folder.path.absolute()
    with ExitStack() as stack:
        write = lambda: stack.enter_context(_token(folder)) if world.is_main else ("", 0)  # noqa: E731
        token, above = world.gather(on_all_ranks(world, write))[0]  # collective
        seen = world.is_main or _sees(path, token, above)
        ranks = world.gather([socket.gethostname(), str(path), seen])  # collective
    odd = [rank for rank, (_, _, seen) in enumerate(ranks) if not seen]
    if odd:
        (host, theirs, _), more = ranks[odd[0]], f" (and {len(odd) - 1} more ranks)" if len(odd) > 1 else ""
        raise ConfigError(
            f"rank {odd[0]} on {host}{more} does not see the run's folder: its {theirs} is not {ranks[0][1]} of rank 0 "
            f"on {ranks[0][0]}; give --save-dir a folder that all nodes share, by its absolute path"
        )


@contextmanager
def _token(folder: RunFolder) -> Iterator[tuple[str, int]]:
    """Write a temporary file into the folder, or its nearest parent.

    Yields:
        Its name, and the number of levels above the folder.
    """
    token, where = f".lockstep.tmp-{secrets.token_hex(8)}", folder.nearest_existing().absolute()
    path = where / token
    try:
        try:
            with created(path) as file:
                file.write(token.encode())
        except OSError as error:
            raise folder.write_error(where, error) from error
        yield token, len(folder.path.absolute().parts) - len(where.parts)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _sees(path: Path, token: str, above: int) -> bool:
    """Whether the token is visible here, this many levels above `path`."""
    if above > len(path.parents):
        return False
    file = (path / "x").parents[above] / token
    for pause in _PAUSES:
        time.sleep(pause)
        with suppress(OSError):
            if file.read_bytes() == token.encode():
                return True
    return False
