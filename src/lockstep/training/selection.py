"""Judge evaluations: the best one, patience, and the plateau schedule.

    looked_at(config, state, better=True)       # after each evaluation; says in the log where the rate falls
    fallen(state)                               # how often it has

`--optim.schedule plateau` works as torch's ReduceLROnPlateau with an absolute `threshold`: it judges `--best-metric`,
the threshold is `--min-delta` (0 with `--patience-metric`), and `min_lr` is `--optim.floor`. The counts are part of the
run's state, which is the same on every rank and in every checkpoint, so a resume or a rollback continues with the rate
of its step.
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


JUDGED = ("best", "since_best", "patience", "plateau")  # what an evaluation changes in the state


class Judge(NamedTuple):
    """The criterion that compares evaluations.

    Attributes:
        metric: "loss", or the name of a metric of the task.
        sign: -1 if lower is better, 1 if higher is.
        delta: by how much a value must be better to count.
    """

    metric: str
    sign: int
    delta: float

    def value(self, record: EvaluationRecord) -> float:
        """Return the record's value. Raises ConfigError if it has none of that name."""
        if self.metric == "loss":
            return record.loss
        _check_known(self, record.metrics)
        return record.metrics[self.metric]


def judged_by(config: Config) -> Judge:
    """Return the criterion of `--best-metric`.

    Its delta is `--min-delta`, or 0 if `--patience-metric` uses that.
    """
    return _judge(config.best_metric, 0.0 if config.patience_metric else config.min_delta)


def _judge(said: str, delta: float) -> Judge:
    name, _, way = said.partition(":")
    return Judge(name, 1 if way == "max" else -1, delta)


def _waiting(config: Config) -> Judge | None:
    """Return the criterion of `--patience-metric`; None: patience uses the best metric's."""
    return _judge(config.patience_metric, config.min_delta) if config.patience_metric else None


def judges(config: Config) -> bool:
    """Whether training depends on how evaluations compare."""
    return bool(config.patience) or config.best_metric != "loss" or config.optim.schedule == "plateau"


def check_evaluated(config: Config, metrics: Iterable[str] | None) -> None:
    """Raise ConfigError if the task's evaluation lacks a metric that the configuration needs.

    Args:
        metrics: names of its metrics; None: there is no evaluation.
    """
    if metrics is not None:
        _check_known(judged_by(config), metrics)
        if waiting := _waiting(config):
            _check_known(waiting, metrics, "--patience-metric")
    elif judges(config):
        what = "--patience" if config.patience else "--best-metric"
        what = "--optim.schedule plateau" if config.optim.schedule == "plateau" else what
        raise ConfigError(f"{what} needs an evaluation, and the task's dataset('evaluation') gives none; return a set")


def _check_known(judge: Judge, metrics: Iterable[str], flag: str = "--best-metric") -> None:
    """Raise ConfigError if the evaluation has no number of the criterion's name."""
    known = ["loss", *metrics]
    if judge.metric not in known and not any(name.split("/")[-1] == ANY for name in known):
        close = difflib.get_close_matches(judge.metric, known, n=1)
        meant = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
        raise ConfigError(f"{flag}: the task's evaluation has no '{judge.metric}'; {meant}")


def judged(config: Config, state: dict[str, Any], record: EvaluationRecord) -> bool:
    """Update the best evaluation and the patience counts in `state`.

    A value that is not finite is never the best. A best by another metric is discarded. `--patience-metric` has its own
    best and its own count.

    Returns:
        Whether this evaluation is the best.
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
    """Return whether this evaluation is better than the best so far, and the new best."""
    value = judge.value(record)
    if best and best.get("metric", "loss") != judge.metric:
        best = None
    before: float | None = best.get("value", best["loss"]) if best else None
    if math.isfinite(value) and (before is None or judge.sign * (value - before) > judge.delta):
        return True, {"step": record.step, "loss": record.loss, "metric": judge.metric, "value": value}
    return False, best


def out_of_patience(config: Config, state: dict[str, Any]) -> bool:
    """Whether `--patience` evaluations in a row were no better than the best.

    With `--patience-metric` it is the best of that metric.
    """
    since = state.get("patience", {}).get("since", 0) if config.patience_metric else state.get("since_best", 0)
    return bool(config.patience) and since >= config.patience


def stopped_by(config: Config, state: dict[str, Any]) -> str:
    """Describe why a run ended early: `the best was accuracy 0.93 after step 400`."""
    told = f"the best was {shown(state)}"
    return f"{told}, of --patience-metric {shown(state['patience'])}" if config.patience_metric else told


def brief(state: dict[str, Any]) -> str:
    """Describe the best for a progress line: `best accuracy 0.93 at 400`; "" without one."""
    return "best " + shown(state).replace(" after step ", " at ") if state.get("best") else ""


def shown(state: dict[str, Any]) -> str:
    """Describe the best evaluation: `accuracy 0.93 after step 400`."""
    best = state.get("best")
    if not best:
        return "none that is finite"
    return f"{best.get('metric', 'loss')} {best.get('value', best['loss']):.4g} after step {best['step']}"


_LOG = logging.getLogger("lockstep")


def looked_at(config: Config, state: dict[str, Any], *, better: bool) -> None:
    """Count an evaluation for the plateau schedule, and lower the rate if it is due.

    Args:
        better: it is the best so far.
    """
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
    """Return how often the plateau schedule has lowered the rate."""
    return int(_known(state)["fallen"])


def _known(state: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = state.get("plateau", {"bad": 0, "fallen": 0})
    return found
