"""Save checkpoints in the background: copy to host memory, and write in a thread.

    saver = Saver(world, background=True, policy="continue")
    saver.prepare(tensors)              # once they exist: the first save need not wait for host memory
    saver.begin(tensors, write)         # returns once the copy is made, or queued on a device
    saver.order()                       # before an update: a device makes it after the copies; the host does not wait
    saver.settle()                      # waits for the last save; raises if the policy says so

The thread has its own gloo group, so that it never interleaves with the training's collectives. Only this rank's share
is copied, into reused buffers. A save waits for the one before, so there are never two.

A device takes a snapshot in its own memory, in milliseconds, of as much as fits, and a second stream copies it to the
host while training continues. Tensors that a forward may write (parameters, buffers) come first: those that do not fit
are copied to the host by the compute stream, and the loop waits. Tensors that only an update changes (optimizer states)
come next: those that do not fit are copied by the second stream, before the snapshots, during the next step's forward
and backward. An update calls `order` first, so that no later step can get into the copy.
"""

import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Container

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.layout import Share, TensorPiece, gather_stages, in_file_order, share_out
from lockstep.checkpoint.write import HostBuffer, contiguous_runs, span
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import LockstepError, PeerError, StorageError

__all__ = [
    "Saver",
]


_LOG = logging.getLogger("lockstep")
# Bytes that snapshots leave free on the device.
_SPARE = 2**30
# Bytes of a snapshot per allocation and per copy to the host.
_PART = 2**30

Write = Callable[[Share, World], None]
# (target, source) of each copy.
_Pairs = list[tuple[Tensor, Tensor]]


class Saver:
    """Writer of one checkpoint at a time, in a thread or in the caller.

    Args:
        world: the ranks; every rank creates its saver at the same time (collective).
        background: write in a thread.
        policy: "stop": the first failed save ends the run; "continue": the `limit`-th in a row does.
        limit: number of failures in a row that end the run.
        on_failure: called in the thread as soon as the policy ends the run.

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
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._world = self._own = world
        self._limit = 1 if policy == "stop" else limit
        self._on_failure = on_failure
        self._background = background
        if background and world.size > 1:
            # The thread exchanges while the loop does, so it needs a group for itself.
            self._own = dataclasses.replace(world, control=world.new_group())
        # Two buffers: a task's host tensors may change shape between saves, and locking memory takes seconds.
        self._pinned = HostBuffer()
        self._pageable = HostBuffer()
        # Bytes of the device: the peak of the steps, and the snapshots of the last save.
        self._peak = self._snapshot_bytes = 0
        self._stream: torch.cuda.Stream | None = None
        self._copy_event: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._pending = False
        self._failures = 0
        self._step = 0
        self._is_released = self._is_final = False
        self.blocked = self.writing = 0.0

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Allocate host memory for saves of such tensors, in a thread. Collective over a pipeline's stages."""
        if self._background:
            stages = gather_stages(tensors, self._world)  # collective
            pieces = in_file_order(share_out(tensors, self._world, stages).pieces)
            self._pinned.prepare([piece.local for piece in pieces if piece.local.is_cuda], self._world.device)

    def begin(
        self,
        tensors: dict[str, Tensor],
        write: Write,
        step: int = 0,
        stable: Container[str] = frozenset(),
        *,
        final: bool = False,
    ) -> None:
        """Copy this rank's share of `tensors`, and call `write` with it. Collective.

        Args:
            write: called in the thread.
            step: for messages.
            stable: names of tensors that do not change before the next call of `order`.
            final: the run ends after this save, and `settle(last=True)` reports its failure.

        Raises:
            LockstepError: an earlier save failed, and the policy ends the run.
        """
        self.settle()
        self._step = step
        self._is_final = final
        began = time.perf_counter()
        stages = gather_stages(tensors, self._world)  # collective
        share = share_out(tensors, self._world, stages)
        if self._background:
            share, ready = self._copy(share, stable)
            self._thread = threading.Thread(target=self._work, args=(share, ready, write), name="lockstep-save")
            # A process that must exit does not wait for a disk.
            self._thread.daemon = True
            self._pending = True
            self._thread.start()
        else:
            self._pending = True
            self._work(share, None, write)
        self.blocked += time.perf_counter() - began

    def settle(self, *, last: bool = False) -> None:
        """Wait until the last save has ended on all ranks. Collective if there was one.

        Args:
            last: no later save can make up for it, so a failure ends the run whatever the policy.

        Raises:
            LockstepError: it failed, and the policy ends the run; the same on every rank.
            StorageError: the same, since the storage does not respond.
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
        where = [self._world.rank, socket.gethostname()]
        if error:
            report = [isinstance(error, PeerError), *where, str(error), code]
        else:
            report = None
        # The ranks count failed saves together, so that all of them end, or none.
        problems = sorted(filter(None, self._world.gather(report)))
        self.blocked += time.perf_counter() - began
        self._failures = self._failures + 1 if problems else 0
        if problems and (last or self._failures >= self._limit):
            if self._failures > 1:
                attempts = f"{self._failures} saves in a row failed, the last"
            else:
                attempts = "the save"
            # The error of a rank itself sorts before one relayed from another rank.
            _, rank, host, why, code = problems[0]
            failed = "failed " if self._failures == 1 else ""
            location = f"after step {self._step} {failed}on {rank_label(rank)} ({host})"
            advice = "start again once that is fixed; the run resumes from the previous checkpoint, if there is one"
            error_class = StorageError if code == StorageError.exit_code else LockstepError
            failure = error_class(f"{attempts} {location}: {why}; {advice}")
            # Every rank raises the same error, whichever of them ends first.
            failure.shared = True
            raise failure

    def abandon(self, seconds: float, *, leave: bool = True) -> None:
        """Give a running save `seconds` to finish, in a run that has failed. Not collective.

        Args:
            leave: destroy the group too, if the save has finished; False: `release_group` will return it.
        """
        if self._thread:
            self._thread.join(seconds)
        if leave and self._own is not self._world and not (self._thread and self._thread.is_alive()):
            dist.destroy_process_group(self._own.control)
            self._own = self._world

    def release_group(self) -> "dist.ProcessGroup | None":
        """Return the group after a rank was lost, for `World.drop_groups`. Does not wait."""
        group = self._own.control if self._own is not self._world else None
        self._own = self._world
        self._is_released = True
        return group

    def order(self) -> None:
        """Order later work of the device after the last copies. Does not wait."""
        if self._copy_event is not None:
            torch.cuda.current_stream(self._world.device).wait_event(self._copy_event)
            self._copy_event = None

    def _copy(self, share: Share, stable: Container[str] = frozenset()) -> tuple[Share, "torch.cuda.Event | None"]:
        """Copy the share to host memory.

        Returns:
            (the copy, the event after which it is complete; None: it is).
        """
        self.order()
        # In file order the writer finds long contiguous runs.
        pieces = in_file_order(share.pieces)
        pinned = iter(self._pinned.places([piece.local for piece in pieces if piece.local.is_cuda]))
        pageable = iter(self._pageable.places([piece.local for piece in pieces if not piece.local.is_cuda]))
        copies: list[TensorPiece] = []
        later: _Pairs = []
        changing: _Pairs = []
        for piece in pieces:
            local = piece.local
            target = next(pinned if local.is_cuda else pageable)
            if local.is_cuda:
                (later if piece.name in stable else changing).append((target, local))
            else:
                target.copy_(local)
            copies.append(dataclasses.replace(piece, local=target))
        ready = self._copy_in_stream(later, changing) if later or changing else None
        return dataclasses.replace(share, pieces=copies), ready

    def _copy_in_stream(self, stable: _Pairs, changing: _Pairs) -> "torch.cuda.Event":
        """Copy each pair's source to its target, on a second stream where possible.

        Args:
            stable: pairs whose sources only an update writes.
            changing: pairs whose sources a forward may write.

        Returns:
            The event after the last copy. An update need not wait for the copies of snapshots (`order`).
        """
        device = self._world.device
        room = self._room()
        self._snapshot_bytes = 0
        snapshots, changing = self._snapshot(changing, room)
        more, stable = self._snapshot(stable, room - self._snapshot_bytes)
        snapshots += more
        for target, local in changing:
            # On the compute stream, so that the copy comes before any change.
            target.copy_(local, non_blocking=True)
        # torch has no annotations for streams.
        stream = self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The second stream starts when the tensors and the snapshots have their values.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            if stable:
                ready = self._copy_event = _queue_copies(stable, stream)
                if not snapshots:
                    return ready
            return _queue_copies(snapshots, stream)

    def _room(self) -> int:
        """Return the device's bytes that the next step and the snapshots do not need."""
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
            (pairs of bytes for the snapshots, the pairs that did not fit): both are still to be copied to the host.
        """
        snapshots: _Pairs = []
        rest: _Pairs = []
        for run in contiguous_runs([target for target, _ in pairs], _PART):
            group = pairs[run.start : run.stop]
            sizes = [local.nbytes for _, local in group]
            memory = self._allocate(sum(sizes)) if sum(sizes) <= room else None
            if memory is None:
                rest += group
                continue
            room -= memory.nbytes
            self._snapshot_bytes += memory.nbytes
            copies = memory.split_with_sizes(sizes)
            # Private: it copies many tensors in few kernels, where `copy_` takes one for each.
            torch._foreach_copy_(
                [copy.view(local.dtype).view(local.shape) for copy, (_, local) in zip(copies, group, strict=True)],
                [local for _, local in group],
            )
            snapshots.append((span([target for target, _ in group]), memory))
        return snapshots, rest

    def _allocate(self, nbytes: int) -> Tensor | None:
        """Allocate device memory; None if there is none in one piece."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._world.device)
        except torch.cuda.OutOfMemoryError:
            # Memory is fragmented, or another process was faster.
            return None

    def _work(self, share: Share, ready: "torch.cuda.Event | None", write: Write) -> None:
        began = time.perf_counter()
        self._error = None
        try:
            if ready:
                # A thread starts on device 0, and would use memory there.
                torch.cuda.set_device(self._world.device)
                # Waits for the device, in this thread only.
                ready.synchronize()
            write(share, self._own)
        except Exception as error:
            self._error = error
            is_limit = self._failures + 1 >= self._limit
            ends = is_limit or self._is_final
            if ends:
                after = "the run ends"
            else:
                after = "the run continues; earlier checkpoints are unchanged"
            # The loop reports the same error on the console.
            once = self._is_released or self._is_final or isinstance(error, PeerError)
            _LOG.warning("the save after step %d failed: %s; %s", self._step, error, after, extra={"only_file": once})
            if is_limit:
                self._on_failure()
        finally:
            self.writing += time.perf_counter() - began


def _queue_copies(pairs: _Pairs, stream: "torch.cuda.Stream") -> "torch.cuda.Event":
    """Queue the copies on `stream`, the current one, and return the event after them."""
    for target, local in pairs:
        target.copy_(local, non_blocking=True)
        # The tensor's memory may be freed before the copy.
        local.record_stream(stream)
    # Blocking: the thread sleeps until the event. torch has no annotations for it.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
