"""Give each loader process its own offsets in the files open before the fork.

    files = open_files()                # before the fork
    reopen(files)                       # in the forked process
    check_connections({"dataset": dataset})

A forked process shares the offset of each open file with its parent and its siblings: a read of one moves the offset
of all. A descriptor's number stays as it is, so that every object above it (buffers, archives, libraries in C) stays
valid. Linux alone; processes that are not forked inherit no descriptors.
"""

import fcntl
import functools
import os
import socket
import stat
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from lockstep.errors import DataError

__all__ = ["check_connections", "open_files", "reachable", "reopen"]

_DESCRIPTORS = Path("/proc/self/fd")


def open_files() -> dict[int, int]:
    """Return the readable descriptors of regular files, and their offsets."""
    offsets: dict[int, int] = {}
    if not _DESCRIPTORS.exists():
        return offsets
    for name in os.listdir(_DESCRIPTORS):
        descriptor = int(name)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode) and _reads(descriptor):
                offsets[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)
        except OSError:
            # The descriptor was closed since, such as that of the listing itself.
            continue
    return offsets


def _reads(descriptor: int) -> bool:
    """Whether a descriptor is for reading; one that appends has no offset of its own."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    return flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_APPEND


def reopen(files: Mapping[int, int]) -> None:
    """Reopen the files of these descriptors under the same numbers, at the same offsets.

    Args:
        files: of `open_files`, called before the fork: another process may have moved the offset since.
    """
    for descriptor, offset in files.items():
        try:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
            # Through /proc it is the same file, even if its name is gone.
            descriptor_here = os.open(_DESCRIPTORS / str(descriptor), flags)
        except OSError:
            # The descriptor was closed at the fork, or its rights have changed.
            continue
        try:
            os.lseek(descriptor_here, offset, os.SEEK_SET)
            os.dup2(descriptor_here, descriptor, inheritable=os.get_inheritable(descriptor))
        finally:
            os.close(descriptor_here)


# --- connections

_PACKAGE = f"{__name__.partition('.')[0]}."
_WRAPPED = ("_inner", "_dataset", "dataset", "inner", "sources")
# Most objects that are examined.
_MAX_OBJECTS = 20_000
# Most elements of a container that is examined; a longer one holds samples.
_MAX_ELEMENTS = 1_000
# Module and class of connections that a forked process must not use, according to their libraries' documents.
_CONNECTIONS = {
    ("socket", "socket"): "socket",
    ("sqlite3", "Connection"): "connection to SQLite",
    # A type written in C, which names no module.
    ("builtins", "Environment"): "environment of LMDB",
    ("lmdb", "Environment"): "environment of LMDB",
    ("duckdb", "DuckDBPyConnection"): "connection to DuckDB",
    ("psycopg", "Connection"): "connection to PostgreSQL",
    ("psycopg2", "connection"): "connection to PostgreSQL",
}
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, Tensor, np.ndarray, nn.Module)


def check_connections(roots: Mapping[str, Any]) -> None:
    """Refuse connections and sockets that loader processes would share after a fork.

    Args:
        roots: name -> object; all that hangs on its attributes is looked at.

    Raises:
        DataError: one is found; it names the attribute.
    """
    for path, owner in reachable(roots):
        owner_type: Any = type(owner)
        connection = _connection(owner_type)
        if connection and not (isinstance(owner, socket.socket) and socket.socket.fileno(owner) < 0):
            raise DataError(
                f"{path} is an open {connection}, which forked loader processes would share; open it in `__getitem__` "
                "(or `iter`) when a process first needs it, or load in the training process with --data.workers 0"
            )


@functools.lru_cache(maxsize=4096)
def _connection(kind: type) -> str:
    """Return the name of a class of connections; "" for any other class."""
    for base in kind.__mro__:
        package = str(base.__module__).partition(".")[0].removeprefix("_")
        if name := _CONNECTIONS.get((package, base.__name__)):
            return name
    return ""


def reachable(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) of everything reachable from the roots, the nearest first.

    Calls no method of a user's object.
    """
    waiting = deque(roots.items())
    seen = set[int]()
    while waiting and len(seen) < _MAX_OBJECTS:
        path, owner = waiting.popleft()
        if id(owner) in seen or isinstance(owner, _ATOMS):
            continue
        seen.add(id(owner))
        yield path, owner
        waiting.extend(_parts(path, owner))


def _parts(path: str, owner: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, dict):
        if len(owner) <= _MAX_ELEMENTS:
            yield from ((f"{path}[{key!r}]", value) for key, value in dict.items(owner))
    elif isinstance(owner, list | tuple | set | frozenset | deque):
        if len(owner) <= _MAX_ELEMENTS:
            yield from ((f"{path}[{index}]", value) for index, value in enumerate(tuple(owner)))
    elif isinstance(owner, types.MethodType):
        yield path, owner.__self__
    elif isinstance(owner, types.FunctionType):
        yield from ((path, cell.cell_contents) for cell in owner.__closure__ or () if _is_filled(cell))
    elif isinstance(owner, functools.partial):
        yield from ((path, each) for each in (owner.func, *owner.args, *owner.keywords.values()))
    # In a wrapper of lockstep only the wrapped object is the user's.
    if str(type(owner).__module__).startswith(_PACKAGE):
        yield from ((path, value) for name, value in _attributes(owner).items() if name in _WRAPPED)
        return
    names = getattr(type(owner), "__slots__", ())
    slots = {}
    for name in (names,) if isinstance(names, str) else names:
        slots[name] = _read(owner, name)
    yield from ((f"{path}.{name}", value) for name, value in (*_attributes(owner).items(), *slots.items()))


def _attributes(owner: Any) -> dict[str, Any]:
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    if isinstance(attributes, dict):
        return dict(attributes)
    return {}


def _read(owner: Any, name: str) -> Any:
    """Read a slot, by its descriptor alone."""
    member = vars(type(owner)).get(name)
    try:
        if isinstance(member, types.MemberDescriptorType):
            return member.__get__(owner, type(owner))
        return None
    except AttributeError:
        # The slot is empty.
        return None


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
