"""Manage a run's folder, `save_dir/experiment_name`: lock, paths and small files.

    outputs/EXPERIMENT/
      config.toml  environment.json  state.json  metrics.jsonl  timeline.jsonl  run.lock  ended.json
      report.html  logs/rank-00000.log
      checkpoints/step-00000500/

Only rank 0 writes here, except for logs and the shards of checkpoints. One process at a time holds the lock.
"""

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.secrets import is_secret_name, mask, mask_args, printable
from lockstep.distributed.cpus import affinity_cores
from lockstep.errors import ConfigError, LockstepError
from lockstep.files import bytes_text, retry_io, storage_error, write_whole
from lockstep.run_state import RunState, Selection

__all__ = [
    "RunFolder",
    "describe_owner",
    "describe_process",
    "has_ended",
    "read_sources",
    "split_environment",
    "write_description",
]


# --- description of the process

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "OMP_", "MKL_", "CUDA_")
_NAMES = {
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "SLURM_JOB_ID",
    "WORLD_SIZE",
}

# No other user needs the id by which the launchers meet.
_IDS = {"TORCHELASTIC_RUN_ID"}

# Seconds. A repository on a slow network disk must not delay a run.
_GIT_TIMEOUT = 2.0


def describe_process(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None, *, devices: bool = True
) -> dict[str, Any]:
    """Describe this process: versions, machine, devices, git commit, command line, environment.

    Imports torch.

    Args:
        argv: the command line; None: this process's.
        environ: the environment; None: this process's.
        devices: list CUDA's devices, which initialises CUDA.

    Returns:
        JSON values with secrets masked. Memory is in bytes; a part that does not exist (CUDA, git) is None.
    """
    variables = dict(os.environ if environ is None else environ)
    values, names = split_environment(variables)
    return {
        "versions": _versions(),
        "machine": _machine(),
        "devices": _devices() if devices else [],
        "git": _git(),
        "command": mask_args(sys.argv if argv is None else argv, variables),
        "environment": values,
        "environment_names": names,
    }


def split_environment(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Split an environment into variables whose values may be stored, and names of the others.

    Values are masked. Both are sorted by name.
    """
    values = {}
    names = []
    for name in sorted(environ):
        if name in _NAMES or (name.startswith(_PREFIXES) and name not in _IDS):
            values[mask(name, environ)] = "***" if is_secret_name(name) else mask(environ[name], environ)
        else:
            # The name itself may contain a secret.
            names.append(mask(name, environ))
    return values, names


def write_description(path: Path, description: Mapping[str, Any]) -> None:
    """Write the description as JSON, atomically.

    Raises:
        OSError: the folder is missing, full or not writable.
    """
    write_whole(path, json.dumps(description, indent=2) + "\n")


def read_sources(run: Path) -> dict[str, str]:
    """Read the sources of a run's task from its folder; {} if that fails."""
    try:
        sources: dict[str, str] = json.loads((run / "environment.json").read_text(encoding="utf-8"))["sources"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}
    return sources


def _versions() -> dict[str, str | None]:
    import torch

    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    # torch has no annotations for the versions of cuDNN and NCCL.
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        # A script's Python may lack it.
        "lockstep": getattr(sys.modules["lockstep"], "__version__", None),
        "python": platform.python_version(),
        # A TorchVersion, which is no plain str.
        "torch": str(torch.__version__),
        "numpy": _package_version("numpy"),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        # A tuple of numbers.
        "nccl": _join_version(torch.cuda.nccl.version()) if nccl else None,  # type: ignore[no-untyped-call]
    }


def _join_version(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)


def _package_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        # Run from a source tree.
        return None


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "hostname": platform.node(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpu_usable": affinity_cores(),
        "memory": _memory(),
    }


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            models = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
            return next(models, None) or platform.machine()
    except OSError:
        # Not Linux.
        return platform.processor() or None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        # Not known on this system.
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        devices.append(torch.cuda.get_device_properties(index))
    entries = []
    for device in devices:
        entries.append(
            {"name": device.name, "memory": device.total_memory, "capability": f"{device.major}.{device.minor}"}
        )
    return entries


def _git() -> dict[str, Any] | None:
    # A repository's settings may name a program as file system monitor, which must not run here.
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT, env=environ, check=True)
    except (OSError, subprocess.SubprocessError):
        # No git, no repository, or no answer in time.
        return None
    lines = answer.stdout.decode(errors="replace").splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    changed = any(not line.startswith("#") for line in lines)
    return {"commit": None if commit == "(initial)" else commit, "changed": changed}


# --- lock

# Seconds that the children of an ended owner may take to exit.
_EXIT_GRACE = 10.0
# Seconds between two attempts.
_POLL_SECONDS = 0.05


class RunLock:
    """A lock file that contains a line about its owner.

    It is an flock, which also works between nodes on NFS with its lock service. On a file system without locks the
    owner's line decides: the lock is held by an owner on another node, or by one that is alive on this node. A process
    forked from the owner closes the file, or the lock would outlive the owner.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(self, *, make: bool) -> str:
        """Acquire the lock.

        Waits some seconds for a dead owner's children to exit, which still hold its lock.

        Args:
            make: create the file and write this process's line; False: neither.

        Returns:
            The line of a previous owner that ended without releasing the lock, or "".

        Raises:
            ConfigError: another process holds it.
            OSError: the file cannot be opened, or is a link.
        """
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
        self._handle = retry_io(lambda: os.open(self._path, flags, 0o644))
        _OPEN_LOCKS.add(self)
        is_locked, owner, has_locks = self._try_lock(self._handle)
        if not is_locked and not has_locks and not _is_local(owner):
            self.release(erase=False)
            raise ConfigError(
                f"{self._path.parent} is in use by {owner}, by its lock file; the file system has no locks, so if that "
                f"process has ended, remove {self._path}"
            )
        if not is_locked:
            self.release(erase=False)
            children = "children of " if owner and not _may_be_alive(owner) else ""
            raise ConfigError(
                f"{self._path.parent} is in use by {children}{owner or 'another process'}; wait for it, or choose "
                "another --experiment-name"
            )
        if make:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{describe_owner()}\n".encode(), 0)
        return owner

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        return self._handle is not None

    def owner(self) -> tuple[str, bool]:
        """Return the owner's line, and whether it holds the lock now.

        ("", False) if the lock was released or never acquired. A released lock is not touched, so that this call never
        blocks a start.
        """
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return "", False
        owner = ""
        try:
            owner = _read_owner(handle)
            if owner:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            # Another error number: the file system has no locks.
            return owner, error.errno in (errno.EWOULDBLOCK, errno.EACCES) or _may_be_alive(owner)
        finally:
            os.close(handle)
        return owner, False

    def release(self, erase: bool = True) -> None:
        """Release the lock. Safe to call twice.

        Args:
            erase: erase the owner's line, which is this process's.
        """
        if self._handle is None:
            return
        # The disk may be full. The next owner then reports an unclean end.
        with contextlib.suppress(OSError):
            if erase:
                os.ftruncate(self._handle, 0)
        with contextlib.suppress(OSError):
            # This unlocks the file for a forked process too.
            fcntl.flock(self._handle, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close the file without unlocking it, as a forked child must."""
        if self._handle is not None:
            handle = self._handle
            self._handle = None
            os.close(handle)

    __del__ = close

    def _try_lock(self, handle: int) -> tuple[bool, str, bool]:
        """Lock the file if no living process holds the lock.

        Returns:
            Whether this process has the lock, the line of its current or last owner, and whether the file system has
            locks.
        """
        deadline = time.monotonic() + _EXIT_GRACE
        while True:
            owner = _read_owner(handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return not _may_be_alive(owner), owner, False
                if not owner or _may_be_alive(owner) or time.monotonic() > deadline:
                    return False, owner, True
                time.sleep(_POLL_SECONDS)
            else:
                return True, owner, True


_OPEN_LOCKS: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _close_inherited() -> None:
    for lock in list(_OPEN_LOCKS):
        lock.close()


os.register_at_fork(after_in_child=_close_inherited)


def _read_owner(handle: int) -> str:
    """Read the owner's line; "" if the lock was released."""
    lines = os.pread(handle, 300, 0).decode("utf-8", "replace").splitlines()
    if lines:
        return printable(lines[0].strip())
    return ""


_OWNER = re.compile(r"process (\d{1,9}) on (\S+), started .*")


def _is_local(owner: str) -> bool:
    """Whether the owner's process is, or was, on this machine."""
    match = _OWNER.fullmatch(owner)
    return match is not None and match[2] == socket.gethostname()


def _may_be_alive(owner: str) -> bool:
    """Whether the owner's process may be alive; on another machine it always may."""
    match = _OWNER.fullmatch(owner)
    if not match or match[2] != socket.gethostname():
        return bool(owner)
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def describe_owner() -> str:
    """Describe this process as the owner of a run."""
    return f"process {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%dT%H:%M:%S%z')}"


def has_ended(owner: str) -> bool:
    """Whether the process of an owner's line has certainly ended, or is this one."""
    match = _OWNER.fullmatch(owner)
    is_own = match is not None and int(match[1]) == os.getpid() and match[2] == socket.gethostname()
    return is_own or not _may_be_alive(owner)


# --- folder

_END = "ended.json"
# Removed together with the checkpoints.
_EVALUATED = "checkpoints/evaluated.json"
_ID = "checkpoints/run.json"
_MICRO_BATCH = "micro-batch.json"


class RunFolder:
    """The folder of a run: paths, checks before writing, lock and small files.

    Attributes:
        dead_owner: line of a dead process whose lock `claim` cleared; "": none.
    """

    def __init__(self, save_dir: str, experiment_name: str) -> None:
        self.path = Path(save_dir).expanduser() / experiment_name
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.timeline = self.path / "timeline.jsonl"
        self.config = self.path / "config.toml"
        self.environment = self.path / "environment.json"
        self.dead_owner = ""
        self._lock = RunLock(self.path / "run.lock")

    def check_writable(self, size: int) -> None:
        """Raise ConfigError unless the folder is writable and has `size` bytes free."""
        parent = self.nearest_existing()
        try:
            with tempfile.TemporaryFile(dir=parent):
                pass
            free = shutil.disk_usage(parent).free
        except OSError as error:
            raise storage_error(error) or self.write_error(parent, error) from error
        if free < size:
            raise ConfigError(
                f"--save-dir: {parent} has {bytes_text(free)} free, and a checkpoint of this run needs "
                f"{bytes_text(size)}; make room, or choose another folder"
            )

    def nearest_existing(self) -> Path:
        """Return the folder, or its nearest existing parent."""
        return next(path for path in (self.path, *self.path.absolute().parents) if path.exists())

    @staticmethod
    def write_error(path: Path, error: OSError) -> ConfigError:
        """Return the error for a folder that is not writable."""
        return ConfigError(f"--save-dir: cannot write to {path}: {error.strerror or error}; choose another folder")

    def claim(self) -> None:
        """Create the folder and acquire its lock, which ends with this process.

        Raises:
            ConfigError: another process holds the lock, or the folder cannot be written to.
            StorageError: the storage does not answer.
        """
        try:
            retry_io(lambda: self.checkpoints.mkdir(parents=True, exist_ok=True))
            self.dead_owner = self._lock.acquire(make=True)
        except OSError as error:
            raise storage_error(error) or ConfigError(
                f"--save-dir: cannot write to {self.path}: {error.strerror or error}"
            ) from error

    def check_free(self) -> None:
        """Raise ConfigError if another process holds the lock. Writes nothing."""
        with self.hold():
            pass

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock within the context, without changing the owner's line.

        Raises:
            ConfigError: another process holds the lock.
        """
        # If the folder is missing or unreadable, `claim` will raise.
        with contextlib.suppress(OSError):
            self._lock.acquire(make=False)
        try:
            yield
        finally:
            self._lock.release(erase=False)

    @property
    def is_locked(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock.is_held

    @property
    def owner(self) -> tuple[str, bool]:
        """The owner's line, and whether it holds the lock now; see `RunLock.owner`."""
        return self._lock.owner()

    def release(self) -> None:
        """Release the lock. Safe to call twice."""
        self._lock.release()

    def write_end(self, code: int, step: int, status: str, losses: str = "") -> None:
        """Record how this start of the run ended.

        Args:
            code: for plain torchrun: 75 or 130 if the run saved itself on a signal, otherwise 0 or 1.
            step: steps trained.
            status: as in `run.Result`, or "failed".
            losses: description of the ranks that this start lost.
        """
        job = os.environ.get("TORCHELASTIC_RUN_ID", "")
        end = {"status": status, "code": code, "step": step, "job": job} | ({"losses": losses} if losses else {})
        self.write(_END, json.dumps(end) + "\n")

    def read_end(self) -> dict[str, Any]:
        """Read the record of `write_end`; {} while the run trains, or if it was killed."""
        return self._read(_END)

    def remove_end(self) -> None:
        """Remove the record that `write_end` made in an earlier start."""
        (self.path / _END).unlink(missing_ok=True)

    @property
    def stop_file(self) -> Path:
        """Path of a file that asks the run to end; the run removes it."""
        return self.path / "STOP"

    def write(self, name: str, text: str) -> None:
        """Write a small file of the folder atomically. Raises OSError or StorageError."""
        retry_io(lambda: write_whole(self.path / name, text))

    def write_evaluated(self, step: int, selection: Selection) -> None:
        """Record the evaluation after `step`, and the selection that follows from it.

        The checkpoint of that step lacks them: it is written before the evaluation.

        Raises:
            LockstepError: it cannot be written.
            StorageError: the storage does not answer.
        """
        try:
            self.write(_EVALUATED, json.dumps({"step": step, **selection.to_json()}) + "\n")
        except OSError as error:
            raise LockstepError(
                f"step {step}: {self.path / _EVALUATED}: {error.strerror}; make room or check the permissions of "
                "--save-dir, and start again: the run resumes from its newest checkpoint"
            ) from error

    def read_evaluated(self) -> tuple[int, Selection]:
        """Read the last record of `write_evaluated`; its step is -1 if there is none."""
        record = self._read(_EVALUATED)
        return record.get("step", -1), Selection.from_json(record)

    def write_id(self, run_id: str) -> None:
        """Record the run's id, which its checkpoints have too. Raises OSError or StorageError."""
        if self.read_id() != run_id:
            self.write(_ID, json.dumps({"id": run_id}) + "\n")

    def read_id(self) -> str:
        """Read the record of `write_id`; "" if there is none."""
        run_id = self._read(_ID).get("id", "")
        if isinstance(run_id, str):
            return run_id
        return ""

    def write_micro_batch(self, size: int, line: str) -> None:
        """Record the largest micro-batch from now on. Raises OSError or StorageError.

        Args:
            line: why.
        """
        before = self._read(_MICRO_BATCH)
        cuts = [*before.get("cuts", []), line]
        self.write(_MICRO_BATCH, json.dumps({"micro_batch_size": size, "cuts": cuts}, indent=1) + "\n")

    def read_micro_size(self) -> int:
        """Read the samples of a forward from the resolved configuration; 0 without one."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(tomllib.loads(self._text("config.toml"))["micro_batch_size"])
        return 0

    def read_micro_batch(self) -> int:
        """Read the size of the last `write_micro_batch`; 0 if there is none."""
        size = self._read(_MICRO_BATCH).get("micro_batch_size", 0)
        if type(size) is int and size > 0:
            return size
        return 0

    def _read(self, name: str) -> dict[str, Any]:
        """Read the JSON object in a small file; {} if there is none. Raises StorageError."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            value = json.loads(retry_io(lambda: self._text(name)))
            if isinstance(value, dict):
                return value
        return {}

    def _text(self, name: str) -> str:
        file = self.path / name
        if stat.S_ISREG(file.stat().st_mode):
            return file.read_text(encoding="utf-8")
        return ""

    def write_state(self, state: RunState) -> None:
        """Write `state.json` for users and scripts. A resume reads the checkpoint's own state."""
        self.write("state.json", json.dumps(state.to_json(), indent=1) + "\n")
