"""Checkpoints beside the training: copied to host memory at once, written by a thread while the steps go on.

    saver = Saver(world, background=True, policy="continue")
    saver.begin(tensors, write)         # returns as soon as the copy is made, or, on a device, ordered
    saver.settle()                      # waits for the save before; raises what the policy says

The thread talks over a gloo group of its own, so that it never stands between two collectives of the training. What is
copied is this rank's share alone, in buffers that are kept, and the next save waits for the one before: there are never
two. On a device the copies are ordered on the stream that computes, so that no later step can be in them.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.layout import Piece, Share, share_out
from lockstep.distributed.world import World
from lockstep.errors import LockstepError, PeerError

__all__ = ["Saver"]

_LOG = logging.getLogger("lockstep")

Write = Callable[[Share, World], None]


class Saver:
    """One save at a time, in a thread or, with `background` False, in the caller.

    Args:
        world: the ranks; every rank makes one at the same time (collective).
        background: write in a thread.
        policy: "stop": the first save that fails ends the run; "continue": the `limit`-th in a row does.
        limit: saves that may fail in a row, less one.
        failed: called in the thread as soon as the policy says that the run must end.

    Attributes:
        blocked: seconds for which callers were kept, in all.
        writing: seconds spent in writing, in all.
    """

    def __init__(
        self,
        world: World,
        *,
        background: bool = True,
        policy: str = "continue",
        limit: int = 2,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._world = self._own = world
        self._limit, self._failed = (1 if policy == "stop" else limit), failed
        self._background = background
        if background and world.size > 1:
            self._own = dataclasses.replace(world, control=world.new_group())  # collective
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._pending, self._row, self._step = False, 0, 0
        self._left = False
        self.blocked = self.writing = 0.0

    def begin(self, tensors: dict[str, Tensor], write: Write, step: int = 0) -> None:
        """Copies this rank's share of `tensors` and has `write` called with it. Collective. `step` is for messages.

        Raises:
            LockstepError: an earlier save failed, and the policy ends the run.
        """
        self.settle()
        self._step = step
        began = time.perf_counter()
        share = share_out(tensors, self._world)
        if self._background:
            share, ready = self._copied(share)
            self._thread = threading.Thread(target=self._work, args=(share, ready, write), name="lockstep-save")
            self._thread.daemon = True  # a process that must end does not wait for a disk
            self._pending = True
            self._thread.start()
        else:
            self._pending = True
            self._work(share, None, write)
        self.blocked += time.perf_counter() - began

    def settle(self, *, last: bool = False) -> None:
        """Waits until the save before is done, on all ranks. Collective where there was one.

        Args:
            last: no save comes after it that could make good for it: it fails the run whatever the policy.

        Raises:
            LockstepError: it failed, and the policy ends the run; alike on every rank.
        """
        began = time.perf_counter()
        if self._thread:
            self._thread.join()
            self._thread = None
        if not self._pending:
            return
        self._pending = False
        mine = [isinstance(self._error, PeerError), self._world.rank, str(self._error)] if self._error else None
        found = sorted(problem for problem in self._world.gather(mine) if problem)  # collective
        self.blocked += time.perf_counter() - began
        self._row = self._row + 1 if found else 0
        if found and (last or self._row >= self._limit):
            many = f"{self._row} saves in a row failed, the last" if self._row > 1 else "the save"
            _, rank, why = found[0]  # what a rank saw itself comes before what it heard of another
            where = f"after step {self._step} " + ("failed " if self._row == 1 else "") + f"on rank {rank}"
            raise LockstepError(f"{many} {where}: {why}; start again when that is repaired: it resumes")

    def abandon(self, seconds: float, *, leave: bool = True) -> None:
        """Gives a save that is going on `seconds` to end; for a run that has failed. Not collective.

        Args:
            leave: the group too, where the save has ended; False: `left` is to hand it out.
        """
        if self._thread:
            self._thread.join(seconds)
        if leave and self._own is not self._world and not (self._thread and self._thread.is_alive()):
            dist.destroy_process_group(self._own.control)
            self._own = self._world

    def left(self) -> "dist.ProcessGroup | None":
        """Hands out the group, to be left after the loss of a rank (see `World.forsake`); waits for nobody."""
        group = self._own.control if self._own is not self._world else None
        self._own, self._left = self._world, True
        return group

    def _copied(self, share: Share) -> tuple[Share, "torch.cuda.Event | None"]:
        """The share in host memory, and what to wait for before it is there; None: it is there."""
        pieces, ready = [], None
        for piece in share.pieces:
            local, held = piece.local, self._buffers.get(piece.name)
            if held is None or held.shape != local.shape or held.dtype != local.dtype:
                held = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._buffers[piece.name] = held
            held.copy_(local, non_blocking=True)  # in the order of the stream: before the next step's update
            if local.is_cuda:
                ready = ready or torch.cuda.Event()  # type: ignore[no-untyped-call]
            pieces.append(Piece(piece.name, piece.shape, piece.offsets, held))
        if ready:
            ready.record()
        return Share(pieces, share.aliases, share.summary), ready

    def _work(self, share: Share, ready: "torch.cuda.Event | None", write: Write) -> None:
        began = time.perf_counter()
        self._error = None
        try:
            if ready:
                torch.cuda.set_device(self._world.device)  # a thread begins on device 0, and would take memory there
                ready.synchronize()  # waits for the device, in this thread
            write(share, self._own)
        except Exception as error:
            self._error = error
            last = self._row + 1 >= self._limit
            after = "the run ends" if last else "the run goes on; the checkpoints before are as they were"
            once = {"only_file": self._left or isinstance(error, PeerError)}  # the loop meets the same, and says it
            _LOG.warning("the save after step %d failed: %s; %s", self._step, error, after, extra=once)
            if last:
                self._failed()
        finally:
            self.writing += time.perf_counter() - began
