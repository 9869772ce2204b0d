"""Derive every random number from a key, never from what ran before.

    derive(seed, "micro", step, index)      the randomness of micro-batch `index` of step `step`

The key depends only on names and numbers: it is the same on any rank, in any worker, after any resume. Keys are mixed
with splitmix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), whose finaliser
makes neighbouring keys unrelated.
"""

from functools import cache

__all__ = ["derive"]

_MASK = (1 << 64) - 1


def derive(seed: int, purpose: str, *path: int) -> int:
    """Return a 64-bit key for `purpose` at `path`, under the run's `seed`.

    Args:
        path: step and micro-batch, epoch and sample, or similar.
    """
    state = _root(seed, purpose)
    for number in path:
        state = _mix(state ^ number)
    return state


@cache
def _root(seed: int, purpose: str) -> int:
    state = _mix(seed)
    for byte in purpose.encode():
        state = _mix(state ^ byte)
    return state


# splitmix64 (Steele, Lea and Flood, 2014): one call mixes all bits of the state.
def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
