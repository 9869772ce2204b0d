"""`--optim.schedule plateau`: the rate falls where the evaluation gets no better.

    looked_at(config, state, better=True)       # after each evaluation; says in the log where the rate falls
    fallen(state)                               # how often it has

As torch's ReduceLROnPlateau, its `threshold` absolute: what is judged is `--best-metric`, by how much it must get
better is `--min-delta` (0 beside `--patience-metric`), and its `min_lr` is `--optim.floor`. The count lies in the run's
state, which is the same on every rank and in every checkpoint, so a resume or a rollback goes on with the rate of its
step.
"""

import difflib
import logging
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from lockstep.config.schema import Config
from lockstep.errors import ConfigError
from lockstep.records import EvaluationRecord
from lockstep.training.evaluation import ANY

__all__ = [
    "JUDGED",
    "Judge",
    "brief",
    "check_evaluated",
    "fallen",
    "judged",
    "judged_by",
    "judges",
    "looked_at",
    "out_of_patience",
    "shown",
    "stopped_by",
]


JUDGED = ("best", "since_best", "patience", "plateau")  # what an evaluation puts into the state


class Judge(NamedTuple):
    """What an evaluation is judged by.

    Attributes:
        metric: "loss", or the name of a metric of the task.
        sign: -1 where lower is better, 1 where higher is.
        delta: by how much one must be better to count.
    """

    metric: str
    sign: int
    delta: float

    def value(self, record: EvaluationRecord) -> float:
        """The record's number. Raises ConfigError where it has none of that name."""
        if self.metric == "loss":
            return record.loss
        _check_known(self, record.metrics)
        return record.metrics[self.metric]


def judged_by(config: Config) -> Judge:
    """What `--best-metric` says, and `--min-delta` where it is not of `--patience-metric`."""
    return _judge(config.best_metric, 0.0 if config.patience_metric else config.min_delta)


def _judge(said: str, delta: float) -> Judge:
    name, _, way = said.partition(":")
    return Judge(name, 1 if way == "max" else -1, delta)


def _waiting(config: Config) -> Judge | None:
    """What `--patience-metric` says; None: patience goes by the best."""
    return _judge(config.patience_metric, config.min_delta) if config.patience_metric else None


def judges(config: Config) -> bool:
    """Whether what is trained, or for how long, depends on a judgement."""
    return bool(config.patience) or config.best_metric != "loss" or config.optim.schedule == "plateau"


def check_evaluated(config: Config, metrics: Iterable[str] | None) -> None:
    """Raises ConfigError where the task's evaluation cannot be judged; `metrics`: its names, None for no evaluation."""
    if metrics is not None:
        _check_known(judged_by(config), metrics)
        if waiting := _waiting(config):
            _check_known(waiting, metrics, "--patience-metric")
    elif judges(config):
        what = "--patience" if config.patience else "--best-metric"
        what = "--optim.schedule plateau" if config.optim.schedule == "plateau" else what
        raise ConfigError(f"{what} needs an evaluation, and the task's dataset('evaluation') gives none; return a set")


def _check_known(judge: Judge, metrics: Iterable[str], flag: str = "--best-metric") -> None:
    """Raises ConfigError where the evaluation has no number of the judge's name."""
    known = ["loss", *metrics]
    if judge.metric not in known and not any(name.split("/")[-1] == ANY for name in known):
        close = difflib.get_close_matches(judge.metric, known, n=1)
        meant = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
        raise ConfigError(f"{flag}: the task's evaluation has no '{judge.metric}'; {meant}")


def judged(config: Config, state: dict[str, Any], record: EvaluationRecord) -> bool:
    """Puts the evaluation into `state`: as the best, or as one more since. Whether it is the best.

    A value that is not finite is never the best. What was judged by another metric before says nothing here.
    `--patience-metric` has a best of its own, by which alone it counts.
    """
    better, state["best"] = _better(judged_by(config), state.get("best"), record)
    state["since_best"] = 0 if better else state.get("since_best", 0) + 1
    if waiting := _waiting(config):
        held = state.get("patience", {"best": None, "since": 0})
        fresh, best = _better(waiting, held["best"], record)
        state["patience"] = {"best": best, "since": 0 if fresh else held["since"] + 1}
    else:
        state.pop("patience", None)
    return better


def _better(judge: Judge, best: dict[str, Any] | None, record: EvaluationRecord) -> tuple[bool, dict[str, Any] | None]:
    """Whether this evaluation is better than the best so far, and which of them is the best now."""
    value = judge.value(record)
    if best and best.get("metric", "loss") != judge.metric:
        best = None
    before: float | None = best.get("value", best["loss"]) if best else None
    if math.isfinite(value) and (before is None or judge.sign * (value - before) > judge.delta):
        return True, {"step": record.step, "loss": record.loss, "metric": judge.metric, "value": value}
    return False, best


def out_of_patience(config: Config, state: dict[str, Any]) -> bool:
    """Whether `--patience` evaluations in a row were no better than the best, or than that of `--patience-metric`."""
    since = state.get("patience", {}).get("since", 0) if config.patience_metric else state.get("since_best", 0)
    return bool(config.patience) and since >= config.patience


def stopped_by(config: Config, state: dict[str, Any]) -> str:
    """Why a run ended early, in a few words: `the best was accuracy 0.93 after step 400`."""
    told = f"the best was {shown(state)}"
    return f"{told}, of --patience-metric {shown(state['patience'])}" if config.patience_metric else told


def brief(state: dict[str, Any]) -> str:
    """The same in fewer words, for a line that is redrawn: `best accuracy 0.93 at 400`; "" where there is none."""
    return "best " + shown(state).replace(" after step ", " at ") if state.get("best") else ""


def shown(state: dict[str, Any]) -> str:
    """The best evaluation in a few words: `accuracy 0.93 after step 400`."""
    best = state.get("best")
    if not best:
        return "none that is finite"
    return f"{best.get('metric', 'loss')} {best.get('value', best['loss']):.4g} after step {best['step']}"


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
