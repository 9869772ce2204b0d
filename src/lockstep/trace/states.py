"""Digests of the states of the generators that a training may draw from.

Most forwards draw from none of them, so each is first looked at for whether it moved at all: its bytes lie in memory.
"""

import _random
import ctypes
import hashlib
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["seed_digests", "state_digests"]

# name -> (bytes of the generator that were there, their digest)
_seen: dict[str, tuple[Any, str]] = {}


def state_digests(own: Iterable[tuple[str, torch.Generator]] = ()) -> dict[str, str]:
    """name -> digest: torch on the CPU and on the device, python, numpy, and the model's `own`.

    A CUDA generator's state lies in host memory: nothing waits.
    """
    found = {"torch": _of("torch", torch.get_rng_state()), "python": _python()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = _of("cuda", torch.cuda.get_rng_state())
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        found["numpy"] = _numpy(numpy.random)
    for name, generator in own:
        found[name] = _of("", generator.get_state())
    return found


def seed_digests(own: Iterable[tuple[str, torch.Generator]] = ()) -> dict[str, str]:
    """Digest the seed of each generator of torch, which a draw leaves as it is.

    Args:
        own: the model's generators by name.

    Returns:
        A generator's name to the digest of its seed. Python's and numpy's do not know theirs.
    """
    found = {"torch": torch.initial_seed(), **{name: generator.initial_seed() for name, generator in own}}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.initial_seed()
    return {name: hashlib.blake2b(str(seed).encode(), digest_size=4).hexdigest() for name, seed in found.items()}


def _of(name: str, state: torch.Tensor) -> str:
    raw = ctypes.string_at(state.data_ptr(), state.numel())
    before = _seen.get(name)
    if before is not None and before[0] == raw:
        return before[1]
    digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
    _seen[name] = raw, digest
    return digest


def _python() -> str:
    """Of the generator behind the module's functions: all that moves lies in its C object and in `gauss_next`."""
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    now = (_memory(generator), generator.gauss_next)
    before = _seen.get("python")
    if _SHOWN and before is not None and before[0] == now:
        return before[1]
    version, keys, gauss = random.getstate()
    number = hash((version, keys, gauss is None, gauss or 0.0))  # hash(None) is an address before Python 3.12
    digest = f"{number & 0xFFFFFFFFFFFFFFFF:016x}"
    _seen["python"] = now, digest
    return digest


def _memory(generator: Any) -> bytes:
    head = object.__basicsize__
    return ctypes.string_at(id(generator) + head, _random.Random.__basicsize__ - head)


def _shows() -> bool:
    """Whether a draw is seen in a generator's memory, as it is in CPython."""
    generator = random.Random(1)
    before = _memory(generator)
    generator.random()
    return before != _memory(generator)


_SHOWN = _shows()


def _numpy(module: Any) -> str:
    """Of numpy's global generator. A number that its Gauss has ready is not in the memory that is looked at."""
    raw = None
    if hasattr(module, "get_bit_generator"):
        bits = module.get_bit_generator()
        if type(bits).__name__ == "MT19937":
            raw = ctypes.string_at(bits.ctypes.state_address, 625 * 4)  # 624 words and the place among them
            before = _seen.get("numpy")
            if before is not None and before[0] == raw:
                return before[1]
    _, keys, place, *gauss = module.get_state()
    digest = hashlib.blake2b(keys.tobytes() + repr((place, *gauss)).encode(), digest_size=8).hexdigest()
    _seen["numpy"] = (None if gauss[0] else raw), digest
    return digest
