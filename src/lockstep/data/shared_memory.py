"""Detect that /dev/shm has no room for what loader processes share.

    counts = shared_zeros(2)        # written by loader processes, read here; needs no /dev/shm
    shortage(error)                 # "/dev/shm ... has too little room", or "" for an error of another kind

Loader processes send batches through /dev/shm, whose size in a container is 64 MiB by default.
"""

import errno
import mmap
import os

import torch
from torch import Tensor

from lockstep.errors import error_origin

__all__ = ["no_room", "shared_zeros", "shortage"]

_FOLDER = "/dev/shm"
# Private functions of torch.storage, since torch 2.0, that raise when /dev/shm is full.
_TORCH = ("_new_shared", "_share_fd_cpu_", "_share_filename_cpu_")
# Bytes of an int64.
_ITEM = 8


def shared_zeros(size: int) -> Tensor:
    """Return int64 zeros that forked processes share: memory without a file, so none of /dev/shm."""
    return torch.frombuffer(mmap.mmap(-1, _ITEM * size), dtype=torch.int64)


def shortage(error: BaseException) -> str:
    """Describe an error that was raised for want of shared memory; "" for any other."""
    module, _, function = error_origin(error).partition(":")
    of_torch = module == "torch.storage" and function in _TORCH
    of_python = module == "multiprocessing.synchronize" and isinstance(error, OSError) and error.errno == errno.ENOSPC
    if of_torch or of_python:
        return no_room()
    return ""


def no_room() -> str:
    """Return what is missing, and the ways out."""
    try:
        status = os.statvfs(_FOLDER)
        room = f" ({status.f_bavail * status.f_frsize >> 10} of {status.f_blocks * status.f_frsize >> 10} KiB are free)"
    except OSError:
        room = ""
    return (
        f"{_FOLDER}{room}, by which loader processes send batches, has too little room; enlarge it (--shm-size or "
        "--ipc=host of a container), or load in the training process with --data.workers 0"
    )
