"""The learning rate as a pure function of the step: `factor(step, horizon, warmup, floor)` times the base rate.

Nothing is stepped and nothing is saved: a resume, a skipped step or another world size cannot put it out of place.
"""

import math

__all__ = ["factor"]


def factor(step: int, horizon: int, warmup: int, floor: float, shape: str = "cosine") -> float:
    """What the base learning rate is multiplied by in `step` (0-based).

    Linear warm-up over `warmup` steps, reaching 1 in step `warmup - 1`'s successor, then `shape`:
    "cosine" to `floor` at `horizon` (Loshchilov & Hutter, "SGDR", arXiv 1608.03983, without restarts), "constant", or
    "cosine-periodic", which after `horizon` rises again, the closed form of torch's CosineAnnealingLR.
    From `horizon` on it is `floor` (cosine) or 1 (constant).
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if shape == "constant":
        return 1.0
    if step >= horizon and shape != "cosine-periodic":
        return floor
    progress = (step - warmup) / max(1, horizon - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
