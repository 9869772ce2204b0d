"""`--optim.schedule plateau`: the rate falls where the evaluation gets no better.

    looked_at(config, state, better=True)       # after each evaluation; says in the log where the rate falls
    fallen(state)                               # how often it has

As torch's ReduceLROnPlateau, its `threshold` absolute: what is judged is `--best-metric`, by how much it must get
better is `--min-delta` (0 beside `--patience-metric`), and its `min_lr` is `--optim.floor`. The count lies in the run's
state, which is the same on every rank and in every checkpoint, so a resume or a rollback goes on with the rate of its
step.
"""

import logging
from typing import Any

from lockstep.config.config import Config
from lockstep.run.best import shown

__all__ = ["fallen", "looked_at"]

_LOG = logging.getLogger("lockstep")


def looked_at(config: Config, state: dict[str, Any], *, better: bool) -> None:
    """Counts an evaluation in `state`, where the schedule is this one; `better`: it is the best so far."""
    if config.optim.schedule != "plateau":
        return
    known = _known(state)
    bad, cooling = 0 if better else known["bad"] + 1, known.get("cooling", 0)
    if cooling:
        bad, cooling = 0, cooling - 1
    falls = bad > config.optim.plateau_patience
    cooling = config.optim.plateau_cooldown if falls else cooling
    state["plateau"] = {"bad": 0 if falls else bad, "fallen": fallen(state) + falls, "cooling": cooling}
    if falls:
        _LOG.info(
            "the rate falls to %.3g of --lr, unless --optim.floor is above: %d evaluations were no better than %s",
            *(config.optim.gamma ** fallen(state), bad, shown(state)),
        )


def fallen(state: dict[str, Any]) -> int:
    """How often the rate has fallen."""
    return int(_known(state)["fallen"])


def _known(state: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = state.get("plateau", {"bad": 0, "fallen": 0})
    return found
