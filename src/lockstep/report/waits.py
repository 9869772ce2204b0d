"""What a run's own accounts say where time was lost: one line at its end and in its report, none for a healthy run.

line = waits({"steps": 900.0, "data": 400.0, "saves": 1.0}, workers=0, ranks=1)     # seconds
"""

from collections.abc import Mapping

__all__ = ["waits"]

_LEAST = 10.0  # seconds of steps, saves and evaluations: in less, starting is most of what is seen
# Of all that time. Each part is normal below: loaders that keep up leave next to nothing, an exchange takes some of a
# step wherever it is not hidden, and who evaluates wants to see it.
_NORMAL = {"data": 0.1, "exchange": 0.3, "saves": 0.05, "evaluation": 0.25}


def waits(seconds: Mapping[str, float], *, workers: int, ranks: int) -> str:
    """A sentence on the part that stands out most, by how much more it takes than is normal; "" where none does.

    Args:
        seconds: of `steps` in all, of which `data` waited for samples and `exchange` for gradients; and beside the
            steps of `saves` and `evaluation`. What is not known is left out.
        workers: loader processes of a rank.
        ranks: of the run.
    """
    whole = sum(seconds.get(name, 0.0) for name in ("steps", "saves", "evaluation"))
    if whole < _LEAST:
        return ""
    shares = {name: seconds.get(name, 0.0) / whole for name in _NORMAL}
    most = max(shares, key=lambda name: shares[name] - _NORMAL[name])
    if shares[most] <= _NORMAL[most]:
        return ""
    others = " or for another rank" if ranks > 1 else ""
    what, advice = {
        "data": (f"waiting for samples{others}", f"--data.workers {workers + 1} or more loads beside the steps"),
        "exchange": ("exchanging gradients", "a larger --batch-size with the same micro-batches exchanges less often"),
        "saves": ("waiting for checkpoints", "a larger --ckpt-freq, or --checkpoint.mode async, waits less"),
        "evaluation": ("evaluating", "a larger --eval-freq evaluates less often"),
    }[most]
    return f"{shares[most]:.0%} of the time went into {what}: {advice}; `lockstep profile` says what that would gain"
