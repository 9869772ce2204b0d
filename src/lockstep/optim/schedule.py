"""The learning rate as a pure function of the step: `factor(step, horizon, warmup, floor)` times the base rate.

Nothing is stepped and nothing is saved: a resume, a skipped step or another world size cannot put it out of place.
"""

import math

__all__ = ["factor"]


def factor(
    step: int, horizon: int, warmup: int, floor: float, shape: str = "cosine", *, cooldown: float = 0.2
) -> float:
    """What the base learning rate is multiplied by in `step` (0-based).

    Linear warm-up over `warmup` steps, reaching 1 in step `warmup - 1`'s successor, then `shape`:

    - "cosine" to `floor` at `horizon` (Loshchilov & Hutter, "SGDR", arXiv 1608.03983, without restarts);
    - "linear" to `floor` at `horizon` (Devlin et al., "BERT", arXiv 1810.04805; the default of the HF Trainer, to 0);
    - "wsd", warm-up, stable, decay (Hu et al., "MiniCPM", arXiv 2404.06395): 1, and over the last `cooldown` share of
      `horizon` down to `floor` as 1 - sqrt(x) (Haegele et al., arXiv 2405.18392, section 3);
    - "constant";
    - "cosine-periodic", which after `horizon` rises again, the closed form of torch's CosineAnnealingLR.

    From `horizon` on it is `floor`, but 1 for "constant".
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if shape == "constant":
        return 1.0
    if step >= horizon and shape != "cosine-periodic":
        return floor
    begin = max(warmup, horizon - round(cooldown * horizon)) if shape == "wsd" else warmup
    progress = max(0.0, (step - begin) / max(1, horizon - begin))
    if shape == "linear":
        share = 1.0 - progress
    elif shape == "wsd":
        share = 1.0 - math.sqrt(progress)
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1.0 - floor) * share
