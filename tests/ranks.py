"""The one helper of all distributed tests: a plain function, run on N processes.

    def total(world, number):                       # at module level
        return sum(world.gather(number + world.rank))

    assert run(total, 2, 10) == [21, 21]            # the results by rank

It is the package's own starter with a test's manners: warnings are errors, and a failure shows tracebacks. A hang is a
failure, and no process outlives its test.

Every call forks new ranks, so that no test finds what another left behind. A start costs 60 ms of CPU for each rank,
which is all that a pool of warm ranks would save. Imports cost seconds, so the server makes them (`_LIBRARIES`).
"""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lockstep.distributed.spawn import RankFailure, start
from lockstep.training import trainer

__all__ = ["RankError", "forget_exact_runs", "run"]


class RankError(AssertionError):
    """A rank raised, died or did not end. `rank` is the one that did so first; the message has its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


# What most ranks import, loaded once by the server they are forked from: half a second of each.
_PRELOADED = (
    *("pytest", "hypothesis", "lockstep.training.trainer", "lockstep.verify.worker", "lockstep.training.run"),
    *("lockstep.engines.ddp", "lockstep.engines.zero", "lockstep.engines.fsdp.engine"),
)
# DeepSpeed imports MLflow and pandas, and its engine the compiler: three seconds of each rank. Accelerate, and so the
# Trainer, imports it where it is installed.
_DEEPSPEED = ("deepspeed", "torch._inductor.compile_fx")
# Where the tests that were collected load one of these, the server does so too: one to two seconds of each rank.
_LIBRARIES = {
    "transformers": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    "torchmetrics": ("torchmetrics",),
    "peft": ("peft",),
    "bitsandbytes": ("bitsandbytes",),
    "lightning": ("lightning.pytorch",),
    "lockstep.engines.deepspeed.engine": _DEEPSPEED,
    "accelerate": _DEEPSPEED,
}


def run(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, device: str = "cpu"
) -> list[Any]:
    """What `function(world, *args)` returned on each of `world_size` processes (gloo, one thread each), by rank.

    Raises:
        RankError: a rank raised (its traceback is in the message), died, or had not ended after `timeout` seconds.
    """
    forget_exact_runs()
    before = _strict if device == "cpu" else None  # CUDA libraries have warnings of their own
    try:
        return start(
            *(_plain, world_size, (function, args)),
            device=device,
            patience=timeout,
            preload=[*_PRELOADED, *(_libraries() if device == "cpu" else ())],
            before=before,
        )
    except RankFailure as failed:
        text = str(failed).replace("gave no sign of life for", "had not ended after")
        stacks = "\n--- then ".join(f"rank {rank}: {found}" for rank, found in failed.details.items())
        raise RankError(failed.rank, f"{text}\n--- {stacks}") from None


def forget_exact_runs() -> None:
    """Unset the variable that an exact run leaves: the server of the ranks keeps what it finds at its start."""
    os.environ.pop("TORCHINDUCTOR_DETERMINISTIC", None)


def _libraries() -> list[str]:
    found = [module for library, modules in _LIBRARIES.items() if library in sys.modules for module in modules]
    # DeepSpeed chooses its device at its import, and a server's next ranks may want another.
    return [module for module in found if module != "deepspeed" or not torch.cuda.is_available()]


def _plain(world: Any, say: Callable[[], None], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(world, *args)


def _strict() -> None:
    warnings.simplefilter("error")
    trainer._MIN_OBJECTS = sys.maxsize  # as in tests/conftest.py
