"""Check that all ranks start from the same configuration, folder and weights.

    with ExitStack() as stack:
        first = exchange_first_facts(config, world, stack, check)         # compares the configurations
        check_shared_folder(folder, world, first.token)     # ConfigError: the rank, its host and its path

A model that was made before the run gets rank 0's values. The device of each rank is logged here too.
"""

import dataclasses
import functools
import itertools
import logging
import platform
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.distributed import collectives
from lockstep.distributed.agreement import LONG, gather_results
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import LockstepError
from lockstep.tensors import as_bytes, from_bytes, host_bytes
from lockstep.training.start.shared_folder import Token, write_token
from lockstep.training.state.run_dir import RunFolder
from lockstep.transforms.precision import is_fast

__all__ = [
    "collect_new_modules",
    "copy_from_rank0",
    "exchange_first_facts",
    "log_ranks",
]


# --- log

# With more ranks than this, log a line for each host.
_MAX_RANK_LINES = 16
_LOG = logging.getLogger("lockstep")


def log_ranks(places: Sequence[Sequence[str]]) -> None:
    """Write the host and device of every rank to the log file. On rank 0.

    Args:
        places: [host, device] by rank.
    """
    for line in rank_lines(places):
        _LOG.info(line, extra={"only_file": True})


def rank_lines(places: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line for each rank, or for each host if there are many ranks.

    Args:
        places: [host, device] by rank.
    """
    if len(places) <= _MAX_RANK_LINES:
        yield from (f"{rank_label(rank)}: {host}, {device}" for rank, (host, device) in enumerate(places))
        return
    for host, group in groupby(enumerate(places), key=lambda item: item[1][0]):
        ranks, devices = zip(*((rank, device) for rank, (_, device) in group), strict=True)
        yield f"{_number_range('rank', ranks)}: {host}, {_device_range(devices)}"


def _number_range(word: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    return f"{word}s {numbers[0]} to {numbers[-1]}"


def _device_range(devices: Sequence[str]) -> str:
    """Join device names: `cpu` if all are equal, a range if numbered in order."""
    if len(set(devices)) == 1:
        return devices[0]
    device_type, _, start = devices[0].partition(":")
    if list(devices) == [f"{device_type}:{int(start or 0) + offset}" for offset in range(len(devices))]:
        return f"{devices[0]} to {devices[-1]}"
    return ", ".join(devices)


# --- initial weights


@contextmanager
def collect_new_modules() -> Iterator[list[nn.Module]]:
    """Collect all modules that are constructed inside the context."""
    new: list[nn.Module] = []
    init = nn.Module.__init__

    @functools.wraps(init)
    def init_and_collect(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        new.append(self)
        init(self, *args, **kwargs)

    # torch has no hook for the construction of a module. mypy forbids the assignment to a method.
    nn.Module.__init__ = init_and_collect  # type: ignore[method-assign]
    try:
        yield new
    finally:
        # The patch must not outlive the context.
        nn.Module.__init__ = init  # type: ignore[method-assign]


@torch.no_grad()
def copy_from_rank0(model: nn.Module, new: list[nn.Module], world: World) -> int:
    """Copy rank 0's parameters and buffers of modules that are not new. Collective.

    New modules have drawn their weights under the run's seed. They are left to the comparison of all weights
    (guards/startup.py), and so are tensors whose shapes or dtypes differ.

    Args:
        new: the modules that `task.model()` constructed.

    Returns:
        The number of tensors that differed on some rank.
    """
    if world.size == 1:
        return 0
    tensors = _existing_tensors(model, {id(module) for module in new})
    hashes = {name: [f"{t.dtype} {list(t.shape)}", _hash(t)] for name, t in tensors.items()}
    # One digest from each rank: equal models, the usual case, need no table of tensors.
    if len(set(world.gather(xxhash.xxh3_64_hexdigest(repr(hashes).encode())))) == 1:
        return 0
    # All ranks need the table, to agree which tensors differ.
    ranks = world.gather(hashes)
    kinds = [{name: form for name, (form, _) in table.items()} for table in ranks]
    if any(table != kinds[0] for table in kinds):
        return 0
    unequal = [name for name, value in ranks[0].items() if any(table[name] != value for table in ranks)]
    for name in unequal:
        tensor = tensors[name]
        # Waits for the device, once for each tensor that differs.
        buffer = as_bytes(tensor.cpu()).clone()
        # Only differing tensors travel, through host memory and the control group.
        collectives.broadcast(buffer, src=0, group=world.control)
        tensor.copy_(from_bytes(buffer, tensor.dtype, tensor.shape))
    return len(unequal)


def _existing_tensors(model: nn.Module, new: set[int]) -> dict[str, Tensor]:
    """Return the strided tensors with values of modules that are not new, each once."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        if id(module) not in new:
            members = itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            for name, tensor in members:
                if not tensor.is_meta and tensor.layout == torch.strided:
                    tensors.setdefault(id(tensor), (f"{prefix}.{name}", tensor))
    return dict(tensors.values())


def _hash(tensor: Tensor) -> str:
    # Waits for the device, once for each tensor at the start.
    return xxhash.xxh3_64_hexdigest(host_bytes(tensor.detach().cpu()))


# --- the first exchange


class FirstFacts(NamedTuple):
    """What the ranks exchange first.

    Attributes:
        config: this rank's, with rank 0's experiment name.
        fast: by rank, whether its device suits bf16 and compilation.
        places: [host, device] by rank.
        token: None: there is none.
        micro_batch: the smallest micro-batch size that a rank's folder records, with --on-oom smaller; 0: none.
        run_id: that rank 0's folder records, else a new one.
    """

    config: Config
    fast: list[bool]
    places: list[list[str]]
    token: Token | None
    micro_batch: int
    run_id: str


def exchange_first_facts(
    config: Config, world: World, stack: ExitStack | None, check_first: Callable[[], None]
) -> FirstFacts:
    """Compare the configurations, and exchange what is known before anything is made. Collective.

    Belongs into `World.together`, which raises rank 0's error about the token on all ranks.

    A name that contains the time differs between ranks: rank 0's is used.

    Args:
        stack: keeps the token, for `check_shared_folder`; None: without a token.
        check_first: called first, and may take any time.

    Raises:
        LockstepError: the configurations differ, `check_first` fails, or rank 0 cannot write the token.
    """
    values = cli.flatten(config)
    name = values.pop("experiment_name")
    errors = list[LockstepError]()

    def own_facts() -> list[Any]:
        check_first()
        token = None
        if stack and world.is_main and world.size > 1:
            try:
                token = stack.enter_context(write_token(RunFolder(config.local_dir, name)))
            except LockstepError as error:
                # Raised below, after any difference between the configurations.
                errors.append(error)
        folder = RunFolder(config.local_dir, name)
        if config.on_oom == "smaller":
            recorded = folder.read_micro_batch()
        else:
            recorded = 0
        if world.is_main:
            run_id = folder.read_id() or secrets.token_hex(8)
        else:
            run_id = ""
        return [name, is_fast(world.device), [platform.node(), str(world.device)], token, recorded, run_id]

    # Ranks with different settings would train different models; report that first.
    world.check_same("configuration", values)
    ranks = gather_results(world, own_facts, signs=LONG)  # collective
    if errors:
        raise errors[0]
    names, fast, places, tokens, sizes, ids = zip(*ranks, strict=True)
    if config.experiment_name != names[0]:
        config = dataclasses.replace(config, experiment_name=names[0])
    smallest = min((size for size in sizes if size), default=0)
    return FirstFacts(config, list(fast), list(places), tokens[0] and Token(*tokens[0]), smallest, ids[0])
