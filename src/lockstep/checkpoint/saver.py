"""Save checkpoints in the background: copy to host memory, and write in a thread.

    saver = Saver(world, background=True, policy="continue")
    saver.prepare(tensors)              # once they are there: the first save then need not wait for host memory
    saver.begin(tensors, write)         # returns as soon as the copy is made, or, on a device, ordered
    saver.order()                       # before an update: a device makes it after the copies; the host does not wait
    saver.settle()                      # waits for the save before; raises what the policy says

The thread has its own gloo group, so that it never comes between two collectives of the training. Only this rank's
share is copied, into buffers that are reused, and a save waits for the one before: there are never two.

A device takes a snapshot in its own memory, in milliseconds, of as much as it has room for, and a second stream copies
it to the host while training goes on. Room goes first to what a forward may write (parameters, buffers): what does not
fit is copied to the host by the compute stream itself, and the loop waits. Next comes what only an update changes (an
optimizer's states): what does not fit is copied by the second stream, before the snapshots, during the next step's
forward and backward. Whoever changes it calls `order` first, so that no later step can get into the copy.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Container

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.layout import Share, TensorPiece, in_file_order, share_out
from lockstep.checkpoint.write import Pinned, runs, span
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import LockstepError, PeerError, StorageError

__all__ = [
    "Saver",
]


_LOG = logging.getLogger("lockstep")
_SPARE = 2**30  # bytes that snapshots leave free on the device
_PART = 2**30  # bytes of a snapshot per allocation and per copy to the host

Write = Callable[[Share, World], None]
_Pairs = list[tuple[Tensor, Tensor]]  # (target, source)


class Saver:
    """Writer of one checkpoint at a time, in a thread or in the caller.

    Args:
        world: the ranks; every rank makes one at the same time (collective).
        background: write in a thread.
        policy: "stop": the first save that fails ends the run; "continue": the `limit`-th in a row does.
        limit: number of failures in a row that end the run.
        failed: called in the thread as soon as the policy ends the run.

    Attributes:
        blocked: seconds that callers were blocked, in total.
        writing: seconds spent writing, in total.
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
        # Separate: host tensors of a task may change shape between saves, and locking memory takes seconds.
        self._pinned, self._pageable = Pinned(), Pinned()
        self._peak = self._snapshot_bytes = 0  # bytes of the device: peak of the steps, and the last save's snapshots
        self._beside: torch.cuda.Stream | None = None
        self._copying: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._pending, self._row, self._step = False, 0, 0
        self._left = False
        self.blocked = self.writing = 0.0

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Allocate the host memory of a coming save of such tensors, in a thread."""
        if self._background:
            pieces = in_file_order(share_out(tensors, self._world).pieces)
            self._pinned.prepare([piece.local for piece in pieces if piece.local.is_cuda], self._world.device)

    def begin(
        self, tensors: dict[str, Tensor], write: Write, step: int = 0, resting: Container[str] = frozenset()
    ) -> None:
        """Copy this rank's share of `tensors`, and call `write` with it. Collective.

        Args:
            write: called in the thread.
            step: for messages.
            resting: names of tensors that do not change before the next call of `order`.

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
            self._thread.daemon = True  # a process that must exit does not wait for a disk
            self._pending = True
            self._thread.start()
        else:
            self._pending = True
            self._work(share, None, write)
        self.blocked += time.perf_counter() - began

    def settle(self, *, last: bool = False) -> None:
        """Wait until the last save is done on all ranks. Collective if there was one.

        Args:
            last: no later save can make up for it: a failure ends the run whatever the policy.

        Raises:
            LockstepError: it failed, and the policy ends the run; the same on every rank.
            StorageError: the same, since the storage does not answer.
        """
        began = time.perf_counter()
        if self._thread:
            self._thread.join()
            self._thread = None
        if not self._pending:
            return
        self._pending = False
        error = self._error
        code = getattr(error, "exit_code", 1)
        mine = [isinstance(error, PeerError), self._world.rank, str(error), code] if error else None
        found = sorted(problem for problem in self._world.gather(mine) if problem)  # collective
        self.blocked += time.perf_counter() - began
        self._row = self._row + 1 if found else 0
        if found and (last or self._row >= self._limit):
            many = f"{self._row} saves in a row failed, the last" if self._row > 1 else "the save"
            _, rank, why, code = found[0]  # a rank's own error comes before one relayed from another
            where = f"after step {self._step} " + ("failed " if self._row == 1 else "") + f"on {rank_label(rank)}"
            again = "start again when that is repaired: it goes on from the checkpoint before, if there is one"
            kind = StorageError if code == StorageError.exit_code else LockstepError
            raise kind(f"{many} {where}: {why}; {again}")

    def abandon(self, seconds: float, *, leave: bool = True) -> None:
        """Give a running save `seconds` to finish, in a run that has failed. Not collective.

        Args:
            leave: destroy the group too, if the save has finished; False: `left` will return it.
        """
        if self._thread:
            self._thread.join(seconds)
        if leave and self._own is not self._world and not (self._thread and self._thread.is_alive()):
            dist.destroy_process_group(self._own.control)
            self._own = self._world

    def release_group(self) -> "dist.ProcessGroup | None":
        """Return the group, to leave it after the loss of a rank. Waits for no rank.

        See `World.forsake`.
        """
        group = self._own.control if self._own is not self._world else None
        self._own, self._left = self._world, True
        return group

    def order(self) -> None:
        """Order later work of the device after the copies of the last save.

        The host does not wait.
        """
        if self._copying is not None:
            torch.cuda.current_stream(self._world.device).wait_event(self._copying)
            self._copying = None

    def _copied(self, share: Share, resting: Container[str] = frozenset()) -> tuple[Share, "torch.cuda.Event | None"]:
        """Copy the share to host memory.

        Returns:
            The copy, and the event after which it is complete; None: it is.
        """
        self.order()
        pieces = in_file_order(share.pieces)  # so that the writer finds long contiguous runs
        pinned = iter(self._pinned.places([piece.local for piece in pieces if piece.local.is_cuda]))
        pageable = iter(self._pageable.places([piece.local for piece in pieces if not piece.local.is_cuda]))
        copies: list[TensorPiece] = []
        later: _Pairs = []
        now: _Pairs = []
        for piece in pieces:
            local = piece.local
            place = next(pinned if local.is_cuda else pageable)
            if local.is_cuda:
                (later if piece.name in resting else now).append((place, local))
            else:
                place.copy_(local)
            copies.append(TensorPiece(piece.name, piece.shape, piece.offsets, place))
        ready = self._copied_beside(later, now) if later or now else None
        return Share(copies, share.aliases, share.summary), ready

    def _copied_beside(self, resting: _Pairs, others: _Pairs) -> "torch.cuda.Event":
        """Copy each pair's source to its target, on a second stream if possible.

        That is if nobody writes the source meanwhile.

        Returns:
            The event after the last copy. An update need not wait for the copies of snapshots (`order`).
        """
        device = self._world.device
        room, self._snapshot_bytes = self._room(), 0
        snapshots, others = self._snapshot(others, room)
        more, resting = self._snapshot(resting, room - self._snapshot_bytes)
        snapshots += more
        for place, local in others:
            place.copy_(local, non_blocking=True)  # on the compute stream: before anything changes it
        beside = self._beside = self._beside or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            if resting:
                ready = self._copying = _copied(resting, beside)
                if not snapshots:
                    return ready
            return _copied(snapshots, beside)

    def _room(self) -> int:
        """Return the bytes of the device that no step needs.

        The next step runs while snapshots exist.
        """
        device = self._world.device
        free, _ = torch.cuda.mem_get_info(device)
        # The peak since the last save includes its snapshots, whose memory the allocator has back by now.
        self._peak = max(self._peak, torch.cuda.max_memory_allocated(device) - self._snapshot_bytes)
        return free + torch.cuda.memory_reserved(device) - self._peak - _SPARE

    def _snapshot(self, pairs: _Pairs, room: int) -> tuple[_Pairs, _Pairs]:
        """Copy tensors on the device, in the compute stream, while `room` bytes last.

        The copies are referenced only until their own copies are ordered: the allocator gets their memory back once the
        second stream is done with it, and waits for that if a step lacks memory.

        Returns:
            What to copy to the host: pairs of bytes for the snapshots, and the pairs that did not fit.
        """
        made: _Pairs = []
        left: _Pairs = []
        for run in runs([place for place, _ in pairs], _PART):
            part = pairs[run.start : run.stop]
            sizes = [local.nbytes for _, local in part]
            taken = self._allocated(sum(sizes)) if sum(sizes) <= room else None
            if taken is None:
                left += part
                continue
            room -= taken.nbytes
            self._snapshot_bytes += taken.nbytes
            copies = taken.split_with_sizes(sizes)
            torch._foreach_copy_(
                [copy.view(local.dtype).view(local.shape) for copy, (_, local) in zip(copies, part, strict=True)],
                [local for _, local in part],
            )
            made.append((span([place for place, _ in part]), taken))
        return made, left

    def _allocated(self, nbytes: int) -> Tensor | None:
        """Allocate device memory; None if there is none in one piece."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._world.device)
        except torch.cuda.OutOfMemoryError:  # fragmented, or another process was faster
            return None

    def _work(self, share: Share, ready: "torch.cuda.Event | None", write: Write) -> None:
        began = time.perf_counter()
        self._error = None
        try:
            if ready:
                torch.cuda.set_device(self._world.device)  # a thread starts on device 0, and would use memory there
                ready.synchronize()  # waits for the device, in this thread
            write(share, self._own)
        except Exception as error:
            self._error = error
            last = self._row + 1 >= self._limit
            after = "the run ends" if last else "the run goes on; the checkpoints before are as they were"
            once = {"only_file": self._left or isinstance(error, PeerError)}  # the loop reports the same error
            _LOG.warning("the save after step %d failed: %s; %s", self._step, error, after, extra=once)
            if last:
                self._failed()
        finally:
            self.writing += time.perf_counter() - began


def _copied(pairs: _Pairs, stream: "torch.cuda.Stream") -> "torch.cuda.Event":
    """Queue the copies on `stream`, the current one, and return the event after them."""
    for place, local in pairs:
        place.copy_(local, non_blocking=True)
        local.record_stream(stream)  # its memory may be freed meanwhile
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # the thread sleeps till then
    done.record(stream)
    return done
