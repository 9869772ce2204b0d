"""Give this process its rank, device and groups among the processes of the run.

    world = World.join(device="auto", timeout=60.0)
    ...
    world.leave()

A process of torchrun or srun joins the others; any other is a world of one, without a process group. Small
agreements between ranks (`gather`, `barrier`, `check_same`) use one CPU (gloo) group, `control`, so they neither wait
for a device nor interleave with the training group's collectives.

Agreements that follow each other travel together: in `with world.together():` an action of `on_all_ranks` and a value
of `check_same` or `defer` wait for the next gather, which carries the errors of all ranks too.

Several ranks may hold one model between them: `form_replicas(world, tensor=2)` of `distributed.replicas` makes
`world.replica` and `world.data_parallel`, Worlds of some of the ranks. Code that divides data or sums over it uses
`world.data_parallel`; code that agrees, saves, reports or names a rank uses `world`.

A default group that already exists in this process (from accelerate, or a script) is used, and left open at the end.

A process may join and leave many times, and torchrun's agent keeps one meeting point over all restarts. So ranks write
there only under a prefix unique to this join: rank 0 draws it (see `_agree_on_scope`).
"""

import contextlib
import gc
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
import xxhash

# Only this private module types the stores; the names are the same since torch 2.11.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from lockstep.distributed.descriptors import CONNECT_ON_DEMAND, connects_on_demand, descriptors_of, ensure_descriptors
from lockstep.distributed.devices import check_unshared, identity, local_device
from lockstep.distributed.launcher import (
    ROUND_VARIABLE,
    check_reachable,
    choose_interface,
    launcher_number,
    limit_opencv,
    listen,
)
from lockstep.distributed.membership import check_store, forget_lost_peers, lost_peers
from lockstep.distributed.outcomes import compare, outcome, results
from lockstep.distributed.progress import MEETING_VARIABLE, rank_label, renumber
from lockstep.distributed.starters import read_starter
from lockstep.errors import ConfigError, LockstepError, PeerError

__all__ = [
    "Replicas",
    "World",
    "meeting_point",
    "meeting_store",
]


# Bytes in front of a gathered value, with its length.
_LENGTH = 8
# Bytes of a value that the first collective carries. Most agreements are shorter.
_SHORT = 120
# By process, host and port: a forked process must not use its parent's connection.
_STORES: dict[tuple[int, str, int], TCPStore] = {}
# Worlds of failed runs. The next join leaves them first.
_ABANDONED: list["World"] = []
# Seconds for ranks that have just reported to arrive; gloo waits five times as long.
_REGROUP_SECONDS = 0.75
# Seconds. NCCL's watchdog aborts the process, and lockstep must report the missing rank before that.
_NCCL_MORE = 30.0
# Seconds between two looks for rank 0's answer: short at first, for quick starts; then longer, for large worlds.
_FIRST_PAUSE = 0.002
_LAST_PAUSE = 0.25
# Seconds for ranks with the same error to reach the next join.
_PATIENCE = 5.0
# The launcher's variables, each with its least value, which is also the default.
_LAUNCHER = (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))


T = TypeVar("T")
Check = Callable[[list[Any]], None]


@dataclass(slots=True)
class _Phase:
    """What waits for the next exchange of `World.together`.

    Attributes:
        pending: values of this rank, each with the check of all ranks' values.
        is_exchanging: the checks run: what they gather is an exchange of its own.
        error: what ended the phase on every rank; no further exchange follows.
        is_closed: the phase is over, before the end of its context.
    """

    pending: list[tuple[Any, Check]] = field(default_factory=list)
    is_exchanging: bool = False
    error: Exception | None = None
    is_closed: bool = False


@dataclass(slots=True)
class World:
    """This process's rank and device, and a gloo group for small exchanges.

    Attributes:
        rank: 0 .. size - 1, over all nodes.
        local_rank: index of this process on its node. Its device has the same index, or 0 if it sees only one.
        size: number of processes in the run.
        device: of the model and the batches.
        timeout: seconds after which a collective fails that a peer did not join.
        control: gloo group for agreements; None in a world of one that no launcher started.
        group: the training backend's group; None: torch's default one, of all ranks of the run.
        mesh: of these ranks, a dimension of the mesh of all ranks of the run; None without replicas.
        replicas: the worlds of some of the ranks, see `replicas.form_replicas`; None: each rank has a whole model.
        quiet: print nothing to the user, since the process is not yet one that reports.
        leads: for each rank the first one that sees the same run folder; (): all see rank 0's.
        loaded: kind -> [epochs, steps] of the `lockstep.loader`s so far; the next of the kind continues there.
        meshes: by joined names of their dimensions, the meshes of replicas so far, to which a model's tensors refer.
            They outlive a regroup: `replicas.form_replicas` gives these objects the new ranks and groups.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = 600.0
    control: dist.ProcessGroup | None = None
    group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = field(default=None, repr=False, compare=False)
    replicas: "Replicas | None" = field(default=None, repr=False, compare=False)
    quiet: bool = False
    leads: tuple[int, ...] = ()
    loaded: dict[str, list[int]] = field(default_factory=dict, compare=False)
    meshes: dict[str, DeviceMesh] = field(default_factory=dict, repr=False, compare=False)
    _scope: str = ""
    _name_counts: dict[str, int] = field(default_factory=dict)
    _patience: float = 0.0
    # The default group was created, and will be destroyed, by other code.
    _is_guest: bool = False
    # The ranks in the run of those in this world, if these are some of them.
    _global_ranks: tuple[int, ...] = ()
    # Not copied by `dataclasses.replace`.
    _phase: _Phase | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Resolve a CUDA device without an index to the current one."""
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)

    @classmethod
    def join(cls, device: str = "auto", timeout: float = 600.0, *, check_devices: bool = True) -> Self:
        """Join the world of the launcher's environment (RANK, LOCAL_RANK, WORLD_SIZE). Creates its groups.

        Args:
            device: "auto" (the CUDA device of the local rank if there is one, else the CPU), "cpu" or "cuda".
            timeout: seconds, for every collective.
            check_devices: find devices that ranks share; False: the caller calls `defer_device_check`.

        Raises:
            ConfigError: the device does not exist or is shared with another rank, the launcher's variables are
                invalid, or a scheduler started several processes without a launcher.
            PeerError: not all ranks arrived within the timeout.
        """
        read_starter(os.environ)
        renumber([])
        # Leave the worlds that failed runs of this process abandoned.
        while _ABANDONED:
            _ABANDONED.pop().leave(_PATIENCE)
        rank, local_rank, size = (launcher_number(name, least) for name, least in _LAUNCHER)
        neighbours = launcher_number("LOCAL_WORLD_SIZE", 1)
        if neighbours > 1:
            limit_opencv(os.environ)
        rank_device = local_device(device, local_rank, neighbours)
        world = cls(rank, local_rank, size, rank_device, timeout)
        if rank_device.type == "cuda":
            # Select the device before anything touches CUDA, or every rank creates a context on device 0.
            torch.cuda.set_device(rank_device)
        if dist.is_available() and "WORLD_SIZE" in os.environ:
            if dist.is_initialized():
                world._use_existing_group()
            else:
                world._make_groups()
            if check_devices:
                world._check_devices()
        return world

    @classmethod
    def alone(cls, device: str, timeout: float) -> Self:
        """Return a world of this rank alone, in a process that has peers."""
        local_rank = launcher_number(*_LAUNCHER[1])
        rank_device = local_device(device, local_rank, launcher_number("LOCAL_WORLD_SIZE", 1))
        if rank_device.type == "cuda":
            torch.cuda.set_device(rank_device)
        return cls(0, local_rank, 1, rank_device, timeout, quiet=True)

    def regroup(self, rank: int, size: int, generation: int, tries: int = 0) -> "World":
        """Form the world of the ranks that left this one (see `drop_groups`). Collective.

        Args:
            generation: 1, 2, ...
            tries: failed attempts so far: each doubles the time, for busy machines.

        Raises:
            PeerError: a rank did not arrive, because it was lost too.
        """
        world = World(rank, self.local_rank, size, self.device, self.timeout)
        world._patience = min(_REGROUP_SECONDS * 2.0 ** min(tries, 5), self.timeout)
        world.meshes = self.meshes
        world._make_groups(f"{_round_prefix()}/generation-{generation}")
        return world

    def drop_groups(self, extra: "list[dist.ProcessGroup | None]") -> None:
        """Leave all groups after losing ranks, without waiting. Drop other references first.

        A group with an exchange in flight is freed only once that has failed, which may need another rank to leave
        another group first. So each is dropped in its own thread.

        Args:
            extra: groups other than the default one and `control`, without other references; emptied.
        """
        groups = [*self._release_groups(), *extra]
        self._is_guest = False
        extra.clear()
        if dist.is_initialized():
            groups.append(dist.group.WORLD)
            dist.destroy_process_group()
        # torch.distributed.nn keeps a reference to the default group, and so its links open. The other ranks would wait
        # for this one until the timeout.
        _forget_group()
        while groups:
            box = [groups.pop()]
            threading.Thread(target=box.clear, name="lockstep-forsake", daemon=True).start()

    def form_part(self, purpose: str, ranks: list[int]) -> "World":
        """Form the world of some of the ranks, this one included. Collective over them."""
        part = type(self)(ranks.index(self.rank), self.local_rank, len(ranks), self.device, self.timeout)
        part.group = self.new_group(ranks, backend=None)  # collective
        part.control = self.new_group(ranks)  # collective
        part._scope = f"{self._scope}/{purpose}-{ranks[0]}"
        part._patience = self._patience
        part._global_ranks = tuple(ranks)
        return part

    @property
    def data_parallel(self) -> "World":
        """The data-parallel group: the ranks that compute different samples; this world without replicas."""
        return self.replicas.data_parallel if self.replicas else self

    @property
    def gradient_group(self) -> "World":
        """The ranks over which gradients are summed: the data-parallel group, of all context coordinates."""
        return self.replicas.gradient_group if self.replicas else self

    @property
    def replica(self) -> "World":
        """The ranks that hold one model between them, this one included."""
        return self.replicas.replica if self.replicas else self._alone()

    def part(self, dimension: str) -> "World":
        """Return the ranks of this rank's replica that differ in one dimension alone: "pp", "cp" or "tp"."""
        parts = self.replicas.parts if self.replicas else {}
        return parts.get(dimension) or self._alone()

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The ranks of all replicas that hold this rank's pipeline stage; all ranks without a pipeline."""
        if self.replicas is None:
            return tuple(range(self.size))
        return self.replicas.stages[self.part("pp").rank]

    def _alone(self) -> "World":
        alone = World(0, self.local_rank, 1, self.device, self.timeout)
        alone._global_ranks = (self.global_rank,)
        return alone

    @property
    def global_rank(self) -> int:
        """This rank in the run."""
        return self._global_ranks[self.rank] if self._global_ranks else self.rank

    @property
    def label(self) -> str:
        """The name of this rank in messages."""
        return rank_label(self.global_rank)

    @property
    def counts(self) -> bool:
        """Whether this rank counts for its replica, whose other ranks have the same samples, items and losses."""
        return self.replicas is None or self.rank in self.replicas.leaders

    @property
    def adds_losses(self) -> bool:
        """Whether this rank's losses are added to the others': of a replica, each context rank has a part of a loss."""
        return self.replicas is None or self.rank in self.replicas.loss_ranks

    def gather_counted(self, value: Any, *, losses: bool = False) -> list[Any]:
        """Return the `value` of each rank that counts, one a replica, in order. Collective, as `gather`.

        Args:
            losses: the values are losses, of each rank that `adds_losses`.
        """
        if self.replicas is None:
            return self.gather(value)
        ranks = self.replicas.loss_ranks if losses else self.replicas.leaders
        values = self.gather(value if self.rank in ranks else None)
        return [values[rank] for rank in ranks]

    def _release_groups(self) -> "list[dist.ProcessGroup | None]":
        """Give up the groups of this world and its parts, except the default one."""
        groups = [self.control]
        parts: list[World] = []
        if self.replicas:
            replicas = self.replicas
            parts = [replicas.data_parallel, replicas.gradient_group, replicas.replica, *replicas.parts.values()]
        for part in parts:
            # One dimension's ranks may be all of the replica's.
            if part.control not in groups:
                groups += [part.control, part.group]
        for part in parts:
            # A pipeline keeps its part until it gets the next one.
            part.control = part.group = None
        self.control = self.replicas = None
        for mesh in self.meshes.values():
            # Private to DeviceMesh: its registry keeps references to the groups.
            mesh._pg_registry.clear()
        return groups

    def new_group(self, ranks: list[int] | None = None, backend: str | None = "gloo") -> dist.ProcessGroup:
        """Create another group. Collective over its ranks; None: all.

        Args:
            ranks: of this world.
            backend: None: that of the training.

        Raises:
            PeerError: one of them is lost, or did not come in time.
        """
        wait = timedelta(seconds=self._patience or self.timeout)
        if self._global_ranks:
            ranks = [self._global_ranks[rank] for rank in ranks or range(self.size)]
        # Collective over `ranks`: lockstep forms gloo groups for agreements, the step exchange and the saver.
        try:
            group: dist.ProcessGroup = dist.new_group(  # collective
                ranks, backend=backend, timeout=wait, use_local_synchronization=ranks is not None
            )
            # NCCL connects by itself with the first collective.
            if backend or self.device.type == "cpu":
                _connect(group)
        except RuntimeError as error:
            # gloo reports a rank that did not come as a plain RuntimeError.
            raise lost_peers(self.global_rank) from error
        if self._patience or backend is None:
            _let_wait(group, self.timeout)
        return group

    def _make_groups(self, scope: str = "") -> None:
        wait = timedelta(seconds=self._patience or self.timeout)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        hosts_store = self.rank == 0 and not meeting_point()[2]
        # A large world may need more open files than the soft limit allows.
        ensure_descriptors(descriptors_of(self.size, hosts_store), f"rank {self.rank} of {self.size}")
        os.environ.setdefault(CONNECT_ON_DEMAND, str(int(connects_on_demand(self.size))))
        store = None
        forget_lost_peers()
        # On one node the launcher has chosen loopback already.
        if not _is_one_node():
            choose_interface(meeting_point()[0], os.environ)
        try:
            store = meeting_store(self.rank, self.size, wait)
            if scope:
                self._scope = scope
                # The key by which `_why_apart` finds the ranks that did not come.
                store.set(f"{scope}/here-{self.rank}", "")
            else:
                self._agree_on_scope(store, wait)
            # All of torch's keys go under this join's prefix, so that an earlier join's keys do not count.
            scoped_store = PrefixStore(self._scope, store)
            dist.init_process_group(backend, timeout=wait, store=scoped_store, rank=self.rank, world_size=self.size)
            _forget_group()
            if backend == "gloo":
                # NCCL connects by itself with the first collective; gloo connects here, under the shorter timeout.
                _connect(None)
            if dist.group.WORLD is not None:
                _let_wait(dist.group.WORLD, self.timeout)
            self.control = self.new_group()
        except (PeerError, RuntimeError, ValueError) as error:
            # The next join opens a new connection.
            _STORES.clear()
            why, names = self._why_apart(store)
            apart = PeerError(f"rank {self.rank} of {self.size} could not join the others: {why}")
            apart.names_nobody = not names
            raise apart from error

    def _why_apart(self, store: TCPStore | None) -> tuple[str, bool]:
        """Explain which ranks did not come, and return whether that names a rank too."""
        if store is None:
            host, port, _ = meeting_point()
            why = f"not all met at {host}:{port} within --timeout {self.timeout:g} s"
            return f"{why}; check that every process was started, with one MASTER_ADDR and MASTER_PORT", False
        try:
            store.set_timeout(timedelta(seconds=_PATIENCE))
            present = (store.check([f"{self._scope}/here-{rank}"]) for rank in range(self.size))
            absent = []
            for rank, is_here in enumerate(present):
                if not is_here:
                    absent.append(rank)
        except RuntimeError:
            # The process that serves the meeting point has ended.
            return "the meeting point is gone; the first error is in the log of the rank that failed", False
        # Without a scope rank 0 did not write one.
        if not self._scope:
            absent = [0]
        if absent:
            names = " and ".join(map(rank_label, absent[:8]))
            return f"{names} did not arrive within --timeout {self.timeout:g} s; see its log", True
        return "all arrived, and do not reach each other; test the network: lockstep doctor on the same ranks", False

    def _use_existing_group(self) -> None:
        """Use the existing default group. Raises ConfigError if it has other ranks."""
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.size):
            raise ConfigError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in its own process group, and rank "
                f"{self.rank} of {self.size} for its launcher; destroy that group before the run"
            )
        self._is_guest = True
        # The group's own store, since it may listen on the meeting point's port. torch has no public name for it; the
        # private one is the same since torch 2.11.
        self._agree_on_scope(dist.distributed_c10d._get_default_store(), timedelta(seconds=self.timeout))
        self.control = self.new_group()

    def _check_devices(self) -> None:
        """Raise ConfigError on all ranks if two share a device under NCCL. Collective.

        Not needed after a loss: a replacement process has its predecessor's variables, and so its device.
        """
        try:
            # All ranks, once: a shared device would fail in the first collective on it.
            self.defer_device_check()  # collective
        except LockstepError:
            self.leave(_PATIENCE)
            raise

    def defer_device_check(self) -> None:
        """Compare the ranks' devices with the next gather. Before the first collective on a device.

        Raises:
            ConfigError: by that gather, on all ranks: two share a device under NCCL.
        """
        if self.size > 1:
            is_cuda = self.device.type == "cuda"
            # An existing group may be gloo, which allows several ranks on a device.
            by_nccl = is_cuda and "nccl" in dist.get_backend_config()
            self.defer(identity(self.device) if by_nccl else None, check_unshared)  # collective

    def _agree_on_scope(self, store: Store, wait: timedelta) -> None:
        """Choose a prefix for the keys of this join, the same on all ranks.

        Rank 0 draws it. The store may be older than these processes and still hold the prefix of an earlier start,
        and no count in the environment identifies a start: on several nodes each torchrun counts its own restarts. So
        each rank greets rank 0 under the prefix that it finds, and only a rank 0 that runs now answers.

        Raises:
            RuntimeError: not all ranks came within `wait`.
        """
        key = f"{_round_prefix()}/scope"
        token = secrets.token_hex(8)
        deadline = time.monotonic() + wait.total_seconds()
        if self.rank == 0:
            self._scope = f"{_round_prefix()}/{token}"
            store.set(f"{self._scope}/here-0", "")
            store.set(key, self._scope)
            if greetings := [f"{self._scope}/here-{rank}" for rank in range(1, self.size)]:
                store.wait(greetings, wait)
                answers = []
                for greeting in store.multi_get(greetings):
                    answers.append(f"{self._scope}/welcome-{greeting.decode()}")
                # Clear the key, so that the next join waits for the next prefix.
                store.set(key, "")
                # torch's stub lacks multi_set.
                store.multi_set(answers, [""] * len(answers))  # type: ignore[attr-defined]
            return
        # Every other rank looks for rank 0's answer, and greets again when the prefix changes.
        store.wait([key], wait)
        pause = _FIRST_PAUSE
        while time.monotonic() < deadline:
            if (scope := store.get(key).decode()) not in ("", self._scope):
                self._scope = scope
                store.set(f"{scope}/here-{self.rank}", token)
            if self._scope and store.check([f"{self._scope}/welcome-{token}"]):
                return
            time.sleep(pause)
            pause = min(1.5 * pause, _LAST_PAUSE)
        raise dist.DistError("rank 0 did not answer")

    def name(self, purpose: str) -> str:
        """Return a key prefix for `purpose`: the same on all ranks, new at each call."""
        self._name_counts[purpose] = self._name_counts.get(purpose, 0) + 1
        return f"{self._scope}/{purpose}-{self._name_counts[purpose]}"

    @property
    def is_first(self) -> bool:
        """Whether the launcher started these ranks; False for those that continue after a loss."""
        return not self._patience

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes shared files and prints."""
        return self.rank == 0

    def print(self, *values: object) -> None:
        """Print on rank 0 only."""
        if self.is_main:
            print(*values, flush=True)

    @property
    def leads_folder(self) -> bool:
        """Whether this rank is the first of those that see its run folder."""
        return (self.leads[self.rank] if self.leads else 0) == self.rank

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value`, which travels as JSON. Two small collectives."""
        if self.size == 1:
            return value
        payload = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(payload)])
        # Both broadcasts reach all ranks: first the length in bytes, then the bytes. The control group is on the CPU.
        try:
            dist.broadcast(size, group_src=0, group=self.control)  # collective
            data = torch.frombuffer(bytearray(payload or int(size)), dtype=torch.uint8)
            dist.broadcast(data, group_src=0, group=self.control)  # collective
        except RuntimeError as error:
            raise lost_peers(self.global_rank) from error
        return json.loads(data.numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order. Collective: one exchange, or two for long values.

        Values travel as JSON, never as pickles. In `together` it carries what was deferred, and raises as that does.
        """
        if self.size == 1:
            return [value]
        if self._phase and self.is_deferring:
            return self._exchange(self._phase, value, None)  # collective
        return self._gather(value)  # collective

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Defer agreements to the next gather or the end of the context. Collective.

        Inside, `on_all_ranks`, `check_same` and `defer` exchange nothing. An error of one rank is raised on the others
        by their next gather, so a call of `agree` belongs before other collectives (an engine's, a user's) and before
        the first write. A context inside another is part of it.

        Raises:
            LockstepError: as by single agreements, in the order of the calls.
        """
        if self.size == 1 or self._phase:
            yield
            return
        phase = self._phase = _Phase()
        try:
            yield
            if phase.error is None and not phase.is_closed:
                self._exchange(phase, None, None)  # collective
        except Exception as error:
            # The other ranks wait in their exchange: join it, so that they learn of this error.
            if phase.error is None and not phase.is_closed:
                self._exchange(phase, None, error)  # collective; raises
            raise
        finally:
            self._phase = None

    def agree(self) -> None:
        """Exchange what was deferred in `together`. Collective; does nothing outside it."""
        if self.is_deferring:
            self.gather(None)  # collective

    def close_together(self) -> None:
        """End `together` here, without its last exchange. Right after a gather, on all ranks."""
        if self._phase:
            self._phase.is_closed = True

    def defer(self, value: Any, check: Check) -> None:
        """Call `check` with every rank's `value`, now or by the next gather. Collective.

        In `together` the call waits for the next gather.

        Args:
            check: raises LockstepError, or keeps what it gets; the same on every rank. It may gather.
        """
        if self._phase and self.is_deferring:
            self._phase.pending.append((value, check))
        else:
            _check_alike(check, self.gather(value))  # collective

    @property
    def is_deferring(self) -> bool:
        """Whether errors wait for the next gather (see `together`)."""
        return self._phase is not None and not (self._phase.is_exchanging or self._phase.is_closed)

    def _exchange(self, phase: _Phase, value: Any, error: Exception | None) -> list[Any]:
        """Exchange deferred values, errors and `value`. Collective.

        A rank with an error has deferred less than the others. What all have deferred is checked first, in order.

        Returns:
            Every rank's `value`.
        """
        # The phase has ended before, and the caller caught its error.
        if phase.error is not None:
            raise phase.error
        pending = phase.pending
        phase.pending = []
        phase.is_exchanging = True
        try:
            try:
                # All ranks take part: one exchange carries what they deferred, their errors and `value`.
                ranks = self._gather([[entry for entry, _ in pending], *outcome(value, error)])  # collective
            except PeerError as loss:
                # This rank's own error explains more than the loss.
                raise error or loss  # noqa: B904
            # A rank with an error deferred fewer checks: run those that all ranks deferred.
            for position in range(min(len(values) for values, _, _ in ranks)):
                _check_alike(pending[position][1], [values[position] for values, _, _ in ranks])
            return results([entry[1:] for entry in ranks], error, self._global_ranks)
        except Exception as caught:
            phase.error = caught
            raise
        finally:
            phase.is_exchanging = False

    def _gather(self, value: Any) -> list[Any]:
        payload = json.dumps(value).encode()
        try:
            # All ranks take part. The first gather has a fixed length, so that most values need one exchange.
            short_rows = self._gather_bytes(
                len(payload).to_bytes(_LENGTH, "little") + payload[:_SHORT], _LENGTH + _SHORT
            )
            lengths = [int.from_bytes(row[:_LENGTH], "little") for row in short_rows]
            texts = []
            for row, length in zip(short_rows, lengths, strict=True):
                texts.append(row[_LENGTH : _LENGTH + length])
            # Some value is longer. All ranks know the longest, so all join the second gather.
            if (longest := max(lengths)) > _SHORT:
                long_rows = self._gather_bytes(payload[_SHORT:], longest - _SHORT)
                texts = [
                    text + row[: max(0, length - _SHORT)]
                    for text, row, length in zip(texts, long_rows, lengths, strict=True)
                ]
        except RuntimeError as error:
            raise lost_peers(self.global_rank) from error
        values: list[Any] = json.loads(b"[" + b",".join(texts) + b"]")
        return values

    def _gather_bytes(self, payload: bytes, length: int) -> list[bytes]:
        """Return every rank's payload, padded with zeros to `length`, the same on every rank. Collective."""
        sent = torch.frombuffer(bytearray(payload.ljust(length, b"\0")), dtype=torch.uint8)
        received = torch.empty(self.size, length, dtype=torch.uint8)
        # All ranks, on the CPU: no device waits for it.
        dist.all_gather(list(received.unbind()), sent, group=self.control)  # collective
        flat = received.numpy().tobytes()
        return [flat[start : start + length] for start in range(0, len(flat), length)]

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        if self.size > 1:
            try:
                # All ranks, on the CPU group: no device waits for it.
                dist.barrier(group=self.control)  # collective
            except RuntimeError as error:
                raise lost_peers(self.global_rank) from error

    def check(self, error: Exception | None) -> None:
        """Raise on every rank if any rank passes an error. Collective.

        Raises its own error, or a PeerError that names the first failed rank. Every action that may fail on one rank
        only (reading data, opening a folder) ends with this call, or the others would wait. The exit code is the
        failed rank's, so that bad input ends every process with 2.
        """
        self.gather_checked(None, error)

    def gather_checked(self, value: Any, error: Exception | None) -> list[Any]:
        """Return every rank's `value`, in rank order, or raise as `check`. Collective."""
        if self.is_deferring:
            if error is not None:
                raise error
            return self.gather(value)  # collective
        return results(self.gather(outcome(value, error)), error, self._global_ranks)  # collective

    def check_same(self, subject: str, values: dict[str, Any]) -> None:
        """Raise LockstepError unless all ranks hold equal values. Collective.

        Args:
            subject: names the values in the error, which also gives the differing keys and the rank.
            values: to be compared with rank 0's.
        """
        digest = xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())

        def check(digests: list[str]) -> None:
            if len(set(digests)) > 1:
                # All ranks compare the same digests, so all join this gather. Its result names the differing keys.
                compare(subject, self.gather(values), self._global_ranks)  # collective

        self.defer(digest, check)  # collective

    def leave(self, patience: float | None = None) -> None:
        """Leave without hanging: collect wrappers, wait for every rank, then destroy the groups.

        The caller drops its references to engines first. DDP's reducer joins gloo's thread while it holds the
        interpreter lock, so it must be gone before the groups are. Does nothing in a world without groups.

        Args:
            patience: seconds to wait for ranks that may never come; None: the timeout, after which they are lost.

        Raises:
            PeerError: not all ranks arrived within the timeout.
        """
        if self.control is None:
            return
        # Collect reference cycles: an engine in one would keep its reducer alive.
        gc.collect()
        try:
            if patience is None:
                self.barrier()
            else:
                with contextlib.suppress(RuntimeError):
                    # A peer may be gone, so do not wait for it longer than `patience`.
                    dist.barrier(group=self.control, async_op=True).wait(timedelta(seconds=patience))  # collective
        finally:
            groups = self._release_groups()
            # The default group belongs to other code.
            for group in groups if self._is_guest else [None]:
                dist.destroy_process_group(group)

    def abandon(self) -> None:
        """Leave at the next join: other ranks may be gone, and tracebacks hold the engine."""
        if self.control is not None:
            _ABANDONED.append(self)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Worlds of some of the ranks, where several ranks hold one model between them.

    Attributes:
        data_parallel: the ranks at this rank's coordinate of each replica, which compute different samples.
        replica: the ranks of this rank's replica.
        gradient_group: the ranks over which gradients are summed, which divides into the data-parallel groups of each
            context coordinate; see its own `data_parallel` and `part("cp")`.
        parts: mesh dimension of at least 2 ranks, "pp", "cp" or "tp" -> the ranks of the replica along it.
        leaders: by replica, the rank that counts for it.
        loss_ranks: by replica, the ranks that have its losses or parts of them.
        stages: by pipeline stage, the ranks of all replicas that hold it; without "pp" all ranks.
    """

    data_parallel: World
    replica: World
    gradient_group: World
    parts: dict[str, World]
    leaders: tuple[int, ...]
    loss_ranks: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]


def _check_alike(check: Check, values: list[Any]) -> None:
    """Call `check` on every rank's values, and mark its error as shared by all."""
    try:
        check(values)
    except LockstepError as error:
        error.shared = not error.relayed
        raise


def meeting_point() -> tuple[str, int, bool]:
    """Return the meeting point's host and port, and whether the launcher serves it."""
    host, _, port = os.environ.get(MEETING_VARIABLE, "").rpartition(":")
    if host:
        return host, int(port), True
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("MASTER_ADDR", ""), launcher_number("MASTER_PORT", 0), by_launcher


def meeting_store(rank: int, size: int, wait: timedelta, *, all_ranks: bool = True) -> TCPStore:
    """Return the store of the ranks' meeting point.

    Rank 0's listens on MASTER_ADDR only; torch's own would listen on every interface. If torchrun's agent holds a
    store (TORCHELASTIC_USE_AGENT_STORE), it is used. The store stays open for further joins.

    Args:
        rank: of this process.
        size: number of ranks.
        wait: timeout of the store's operations.
        all_ranks: wait until all have arrived; False: return at once.

    Raises:
        ConfigError: no MASTER_ADDR, or rank 0 cannot listen there.
    """
    host, port, by_launcher = meeting_point()
    if not host:
        raise ConfigError(
            "the environment variable MASTER_ADDR is not set; start the ranks with torchrun or `lockstep launch`"
        )
    key = (os.getpid(), host, port)
    if key not in _STORES:
        is_host = rank == 0 and not by_launcher
        if is_host and "LOCAL_WORLD_SIZE" in os.environ and size > launcher_number("LOCAL_WORLD_SIZE", 1):
            check_reachable("MASTER_ADDR", host)
        # Refuse another service on the port at once: torch's client would wait for the whole timeout.
        if not (is_host or by_launcher):
            check_store(host, port, wait.total_seconds(), f"MASTER_PORT {port} on {host}")
        # torch would listen on every interface. It takes over this socket, which listens on `host` alone.
        listener = listen(host, port) if is_host else None
        handle = listener.detach() if listener else None
        most = size if all_ranks else None
        _STORES[key] = TCPStore(host, port, most, is_host, wait, wait_for_workers=all_ranks, master_listen_fd=handle)
    _STORES[key].set_timeout(wait)
    return _STORES[key]


def _round_prefix() -> str:
    """Return the prefix of these processes' keys in the meeting point.

    Under `lockstep launch` it is new after each restart.
    """
    return f"lockstep/{os.environ.get(ROUND_VARIABLE, 'start')}"


def _is_one_node() -> bool:
    """Whether all ranks are on this node, by the launcher's variables."""
    return launcher_number("LOCAL_WORLD_SIZE", 0) == launcher_number("WORLD_SIZE", 1)


def _connect(group: dist.ProcessGroup | None) -> None:
    """Connect the ranks of a gloo group, None for the default one. Collective.

    The links are those of gloo's rings and trees. A rank that fails later closes its link, which fails at once. A new
    connection to it would be tried again.
    """
    dist.barrier(group=group)  # collective


def _let_wait(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of the group's collectives, in seconds; NCCL's is a little longer."""
    for device in ("cpu", "cuda"):
        # The group has no backend for this device.
        # torch has no public call that changes a timeout after the start. Both names are the same since torch 2.11.
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(torch.device(device))
            backend._set_default_timeout(timedelta(seconds=seconds + _NCCL_MORE * (backend.name() == "nccl")))


def _forget_group() -> None:
    """Make torch.distributed.nn use the current default group, not the one of its import."""
    loaded = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(loaded).values() if loaded else ():
        if defaults := getattr(function, "__defaults__", None):
            function.__defaults__ = tuple(
                None if isinstance(default, dist.ProcessGroup) else default for default in defaults
            )
