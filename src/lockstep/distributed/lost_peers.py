"""Lost peers and errors of the program, told apart by where they were raised and by the links, never by their text.

    with typed_errors():
        ...                             # a collective of torch's whose peer is gone raises PeerError

`World` and `StepExchange` raise PeerError from their own collectives (`lost_peers`). DDP's reducer, FSDP's hooks,
DTensors and a task's own collectives raise what gloo raised, a plain RuntimeError, through torch's code. Such an error
is a lost peer where torch was communicating and a link of a group is closed. A wrong argument, or a backward that
cannot be computed, leaves all links open.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.distributed.rank_label import rank_label
from lockstep.errors import LockstepError, PeerError

__all__ = ["is_lost_peer", "lost_peers", "typed_errors"]

# Modules in which torch communicates; DDP's reducer does so within the backward.
_COMMUNICATING = ("torch.distributed.", "torch.nn.parallel.distributed", "torch.autograd.graph", "deepspeed.")
_BETWEEN = ("torch._ops", "torch.utils._contextlib")  # what lies between them and the backend
_TAG = 0x6C6B  # of a message that nobody sends


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise PeerError for a lost peer, and LockstepError for `sys.exit`; any other error stays the program's own."""
    try:
        yield
    except SystemExit as left:
        raise _ended_early(left) from left
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise lost_peers(dist.get_rank(), error) from error


def lost_peers(rank: int, error: Exception, when: str = "") -> PeerError:
    """Make the error of a collective of `rank` that failed with `error`.

    Args:
        when: of the run, as "before step 7".
    """
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    found = PeerError(
        f"{rank_label(rank)} lost the other ranks{' ' if when else ''}{when}: {reason}; the first error is in the "
        "log of the rank that failed; for slow steps or data raise --timeout"
    )
    found.names_nobody = True
    return found


def is_lost_peer(error: BaseException) -> bool:
    """Whether torch raised `error` since another rank is gone, or did not answer in time."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = next((name for name in reversed(modules) if name not in _BETWEEN), "")
    if not f"{innermost}.".startswith(_COMMUNICATING):
        return False
    # Subclasses of RuntimeError have a meaning of their own: out of memory, a kernel that failed.
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and _is_a_link_closed())


def _is_a_link_closed() -> bool:
    """Whether a gloo group of this process has a link that is closed: by its other end, or after a timeout.

    Gloo refuses at once to receive over such a link. Over an open one the message never comes: this process is ending.
    """
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    for group in groups:
        with suppress(RuntimeError):  # it has no backend for tensors of a CPU
            backend = group._get_backend(torch.device("cpu"))
            if backend.name() == "gloo" and not all(_is_open(backend, peer) for peer in range(group.size())):
                return True
    return False


def _is_open(backend: Any, peer: int) -> bool:
    try:
        if peer != backend.rank():
            backend.recv([torch.empty(1)], peer, _TAG)
    except RuntimeError:
        return False
    return True


def _ended_early(left: SystemExit) -> LockstepError:
    """The error of a rank whose code calls `sys.exit` before the run's end."""
    where = traceback.extract_tb(left.__traceback__)[-1]
    error = LockstepError(
        f"sys.exit({left.code!r}) was called before the run's end, in {Path(where.filename).name}:{where.lineno} "
        f"({where.name}); raise an error there, or end the run with run.stop() on all ranks"
    )
    error.exit_code = left.code if isinstance(left.code, int) and left.code else 1
    return error
