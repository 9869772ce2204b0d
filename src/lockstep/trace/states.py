"""Digests of the states of the generators that a training may draw from."""

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterable

import torch

__all__ = ["state_digests"]


def state_digests(own: Iterable[tuple[str, torch.Generator]] = ()) -> dict[str, str]:
    """name -> digest: torch on the CPU and on the device, python, numpy, and the model's `own`.

    A CUDA generator's state lies in host memory: nothing waits.
    """
    version, keys, gauss = random.getstate()
    python = hash((version, keys, gauss is None, gauss or 0.0))  # hash(None) is an address before Python 3.12
    found = {"torch": _of(torch.get_rng_state()), "python": f"{python & 0xFFFFFFFFFFFFFFFF:016x}"}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = _of(torch.cuda.get_rng_state())
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        _, keys, place, *rest = numpy.random.get_state()
        found["numpy"] = hashlib.blake2b(keys.tobytes() + repr((place, *rest)).encode(), digest_size=8).hexdigest()
    for name, generator in own:
        found[name] = _of(generator.get_state())
    return found


def _of(state: torch.Tensor) -> str:
    return hashlib.blake2b(ctypes.string_at(state.data_ptr(), state.numel()), digest_size=8).hexdigest()
