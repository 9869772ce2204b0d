"""Select the best evaluation, and count evaluations for patience and the plateau schedule.

    is_best = select_best(config, selection, record)        # after each evaluation
    update_plateau(config, selection, better=is_best)       # logs when the learning rate falls
    plateau_drops(selection)                                # how often it fell

`--optim.schedule plateau` works as torch's ReduceLROnPlateau with an absolute `threshold`: it uses `--best-metric`, the
threshold is `--min-delta` (0 with `--patience-metric`), and `min_lr` is `--optim.floor`. The counts are part of the
run's state, which is the same on every rank and in every checkpoint, so a resume or a rollback continues with the rate
of its step.
"""

import difflib
import logging
import math
from collections.abc import Iterable
from typing import NamedTuple

from lockstep.config.schema import Config
from lockstep.errors import ConfigError
from lockstep.records import EvaluationRecord
from lockstep.run_state import BestEvaluation, PatienceCount, PlateauCount, Selection
from lockstep.training.evaluation import MORE_NAMES

__all__ = [
    "Criterion",
    "abbreviate_best",
    "check_criteria",
    "criterion_of",
    "depends_on_evaluations",
    "describe_best",
    "explain_early_stop",
    "out_of_patience",
    "plateau_drops",
    "select_best",
    "select_value",
    "update_plateau",
]


class Criterion(NamedTuple):
    """A metric that evaluations are compared by.

    Attributes:
        metric: "loss", or the name of a metric of the task.
        sign: -1 if lower is better, 1 if higher is.
        delta: minimum improvement.
    """

    metric: str
    sign: int
    delta: float

    def value(self, record: EvaluationRecord) -> float:
        """Return the record's value of the metric. Raises ConfigError if it has none."""
        if self.metric == "loss":
            return record.loss
        _check_metric(self, record.metrics)
        return record.metrics[self.metric]


def criterion_of(config: Config) -> Criterion:
    """Return the criterion of `--best-metric`.

    Its delta is `--min-delta`; 0 with `--patience-metric`, to which `--min-delta` belongs then.
    """
    return _parse_criterion(config.best_metric, 0.0 if config.patience_metric else config.min_delta)


def _parse_criterion(text: str, delta: float) -> Criterion:
    """Parse `METRIC` or `METRIC:max`."""
    name, _, direction = text.partition(":")
    return Criterion(name, 1 if direction == "max" else -1, delta)


def _patience_criterion(config: Config) -> Criterion | None:
    """Return the criterion of `--patience-metric`; None: patience uses `--best-metric`."""
    if config.patience_metric:
        return _parse_criterion(config.patience_metric, config.min_delta)
    return None


def depends_on_evaluations(config: Config) -> bool:
    """Whether the configuration needs evaluations to compare."""
    return bool(config.patience) or config.best_metric != "loss" or config.optim.schedule == "plateau"


def check_criteria(config: Config, metrics: Iterable[str] | None) -> None:
    """Raise ConfigError if the task's evaluation lacks a metric that the configuration needs.

    Args:
        metrics: names of the task's metrics; None: it has no evaluation.
    """
    if metrics is not None:
        _check_metric(criterion_of(config), metrics)
        if patience := _patience_criterion(config):
            _check_metric(patience, metrics, "--patience-metric")
    elif depends_on_evaluations(config):
        flag = "--patience" if config.patience else "--best-metric"
        if config.optim.schedule == "plateau":
            flag = "--optim.schedule plateau"
        raise ConfigError(f"{flag} needs an evaluation: return a dataset from the task's dataset('evaluation')")


def _check_metric(criterion: Criterion, metrics: Iterable[str], flag: str = "--best-metric") -> None:
    """Raise ConfigError if the evaluation has no metric of this name."""
    names = ["loss", *metrics]
    if criterion.metric not in names and not any(name.split("/")[-1] == MORE_NAMES for name in names):
        close = difflib.get_close_matches(criterion.metric, names, n=1)
        if close:
            hint = f"did you mean {close[0]}?"
        else:
            hint = f"it has {', '.join(names)}"
        raise ConfigError(f"{flag}: the task's evaluation has no '{criterion.metric}'; {hint}")


def select_best(config: Config, selection: Selection, record: EvaluationRecord) -> bool:
    """Update the best evaluation and the patience count.

    A value that is not finite is never the best. A best by another metric is discarded. `--patience-metric` has a best
    and a count of its own.

    Returns:
        Whether this evaluation is the best.
    """
    better, selection.best = _compare(criterion_of(config), selection.best, record)
    selection.since_best = 0 if better else (selection.since_best or 0) + 1
    if patience := _patience_criterion(config):
        before = selection.patience or PatienceCount()
        improved, best = _compare(patience, before.best, record)
        selection.patience = PatienceCount(best, 0 if improved else before.since + 1)
    else:
        selection.patience = None
    return better


def select_value(selection: Selection, criterion: Criterion, step: int, value: float) -> bool:
    """Update the best by a training value, without evaluations; return whether it is the best."""
    record = EvaluationRecord(step, value, 0.0, {criterion.metric: value})
    better, selection.best = _compare(criterion, selection.best, record)
    return better


def _compare(
    criterion: Criterion, best: BestEvaluation | None, record: EvaluationRecord
) -> tuple[bool, BestEvaluation | None]:
    """Return whether this evaluation is better than the best so far, and the new best."""
    value = criterion.value(record)
    if best and best.metric != criterion.metric:
        best = None
    before = best.metric_value if best else None
    if math.isfinite(value) and (before is None or criterion.sign * (value - before) > criterion.delta):
        return True, BestEvaluation(record.step, record.loss, criterion.metric, value)
    return False, best


def out_of_patience(config: Config, selection: Selection) -> bool:
    """Whether `--patience` evaluations in a row did not improve on the best.

    With `--patience-metric`, on the best by that metric.
    """
    if config.patience_metric:
        since = selection.patience.since if selection.patience else 0
    else:
        since = selection.since_best or 0
    return bool(config.patience) and since >= config.patience


def explain_early_stop(config: Config, selection: Selection) -> str:
    """Explain why a run ended early: `the best was accuracy 0.93 after step 400`."""
    line = f"the best was {describe_best(selection.best)}"
    if not config.patience_metric:
        return line
    return f"{line}, of --patience-metric {describe_best(selection.patience.best if selection.patience else None)}"


def abbreviate_best(best: BestEvaluation | None) -> str:
    """Describe the best for a progress line: `best accuracy 0.93 at 400`; "": none."""
    if best:
        return "best " + describe_best(best).replace(" after step ", " at ")
    return ""


def describe_best(best: BestEvaluation | None) -> str:
    """Describe the best evaluation: `accuracy 0.93 after step 400`."""
    if best:
        return f"{best.metric} {best.metric_value:.4g} after step {best.step}"
    return "none that is finite"


_LOG = logging.getLogger("lockstep")


def update_plateau(config: Config, selection: Selection, *, better: bool) -> None:
    """Count an evaluation for the plateau schedule, and lower the rate if that is due.

    Args:
        better: the evaluation is the best so far.
    """
    if config.optim.schedule != "plateau":
        return
    before = selection.plateau or PlateauCount()
    bad = 0 if better else before.bad + 1
    cooling = before.cooling
    if cooling:
        bad = 0
        cooling = cooling - 1
    falls = bad > config.optim.plateau_patience
    cooling = config.optim.plateau_cooldown if falls else cooling
    selection.plateau = PlateauCount(0 if falls else bad, before.fallen + falls, cooling)
    if falls:
        _LOG.info(
            "the learning rate falls to %.3g of --lr, or to --optim.floor: %d evaluations did not improve on %s",
            *(config.optim.gamma ** plateau_drops(selection), bad, describe_best(selection.best)),
        )


def plateau_drops(selection: Selection) -> int:
    """Return how often the plateau schedule has lowered the rate."""
    if selection.plateau:
        return selection.plateau.fallen
    return 0
