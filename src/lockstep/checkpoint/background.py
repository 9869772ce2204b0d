"""Checkpoints beside the training: copied to host memory at once, written by a thread while the steps go on.

    saver = Saver(world, background=True, policy="continue")
    saver.begin(tensors, write)         # returns as soon as the copy is made, or, on a device, ordered
    saver.order()                       # before an update: a device makes it after the copies; the host does not wait
    saver.settle()                      # waits for the save before; raises what the policy says

The thread talks over a gloo group of its own, so that it never stands between two collectives of the training. What is
copied is this rank's share alone, in buffers that are kept, and the next save waits for the one before: there are never
two. On a device a stream of its own copies what an update alone changes, beside the next step's forward and backward:
whoever is about to change it calls `order` first, so that no later step can be in it. The rest is copied on the stream
that computes.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Container

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.layout import Piece, Share, share_out
from lockstep.checkpoint.pinned import Pinned
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
        self._pinned = Pinned()
        self._beside: torch.cuda.Stream | None = None
        self._copying: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._pending, self._row, self._step = False, 0, 0
        self._left = False
        self.blocked = self.writing = 0.0

    def begin(
        self, tensors: dict[str, Tensor], write: Write, step: int = 0, resting: Container[str] = frozenset()
    ) -> None:
        """Copies this rank's share of `tensors` and has `write` called with it. Collective.

        Args:
            write: called in the thread.
            step: for messages.
            resting: names of tensors that nobody changes before the next call of `order`.

        Raises:
            LockstepError: an earlier save failed, and the policy ends the run.
        """
        self.settle()
        self._step = step
        began = time.perf_counter()
        share = share_out(tensors, self._world)
        if self._background:
            share, ready = self._copied(share, resting)
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

    def order(self) -> None:
        """What the device is given from now on comes after the copies of the save before. The host does not wait."""
        if self._copying is not None:
            torch.cuda.current_stream(self._world.device).wait_event(self._copying)
            self._copying = None

    def _copied(self, share: Share, resting: Container[str] = frozenset()) -> tuple[Share, "torch.cuda.Event | None"]:
        """The share in host memory, and what to wait for before it is there; None: it is there."""
        self.order()
        places = iter(self._pinned.places([piece.local for piece in share.pieces if piece.local.is_cuda]))
        pieces, later = [], []
        for piece in share.pieces:
            local = piece.local
            held = next(places) if local.is_cuda else self._held(piece)
            if local.is_cuda and piece.name in resting:
                later.append((held, local))
            else:
                held.copy_(local, non_blocking=True)  # in the order of the stream: before what changes it
            pieces.append(Piece(piece.name, piece.shape, piece.offsets, held))
        on_device = any(piece.local.is_cuda for piece in share.pieces)
        ready = self._copied_beside(later) if on_device else None
        return Share(pieces, share.aliases, share.summary), ready

    def _held(self, piece: Piece) -> Tensor:
        """Where a piece that lies in host memory is copied to."""
        held = self._buffers.get(piece.name)
        if held is None or held.shape != piece.local.shape or held.dtype != piece.local.dtype:
            held = self._buffers[piece.name] = torch.empty(piece.local.shape, dtype=piece.local.dtype)
        return held

    def _copied_beside(self, pairs: list[tuple[Tensor, Tensor]]) -> "torch.cuda.Event":
        """Copies the second of each pair into the first on a stream of its own, after all that was ordered so far."""
        device = self._world.device
        beside = self._beside = self._beside or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(device))
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(beside):
            for held, local in pairs:
                held.copy_(local, non_blocking=True)
                local.record_stream(beside)  # whose memory may be given back meanwhile
            ready.record(beside)
        self._copying = ready
        return ready

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
