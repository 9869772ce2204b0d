"""`lockstep evaluate RUN`: the evaluation that the run itself makes, of one of its checkpoints."""

import contextlib
import json
import sys
from dataclasses import asdict

from lockstep.config.secrets import printable
from lockstep.distributed.world import on_all_ranks
from lockstep.errors import DataError
from lockstep.records import EvaluationRecord
from lockstep.run.evaluate import evaluate_all
from lockstep.run.evaluation_sets import batches_of, named_sets
from lockstep.run.using import Used, Wanted, opened
from lockstep.sinks.jsonl import plain
from lockstep.sinks.waiting import waiting

__all__ = ["evaluate_run"]


def evaluate_run(wanted: Wanted, *, as_json: bool = False) -> EvaluationRecord:
    """Evaluates and prints loss and metrics, on rank 0. On as many processes as a launcher started.

    Raises:
        CheckpointError, ConfigError: see `run.using.opened`.
        DataError: there is no evaluation set.
    """
    aside = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with aside, opened(wanted) as used:  # what the task prints
        record, is_main = _record(used), used.world.is_main
    if is_main:
        _print(record, wanted, as_json)
    return record


def _record(used: Used) -> EvaluationRecord:
    found = on_all_ranks(used.world, lambda: named_sets(used.task.dataset("evaluation")))
    sets = batches_of(used.config, used.task, found, used.world)
    if not sets:
        raise DataError("the task has no evaluation set: its dataset('evaluation') is None or empty")
    with waiting("evaluating", shown=used.world.is_main) as progress:
        return evaluate_all(used, used.task, sets, used.world, step=used.step, seed=used.config.seed, progress=progress)


def _print(record: EvaluationRecord, wanted: Wanted, as_json: bool) -> None:
    if as_json:
        found = asdict(record)
        numbers = {name: plain(value) for name, value in found.pop("metrics").items()}
        found = {"run": wanted.run, **{name: plain(value) for name, value in found.items()}, "metrics": numbers}
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    counts = {name: value for name, value in record.metrics.items() if name.endswith("/items")}  # of several sets
    on = ", ".join(f"{value:,.0f} items of {name.removesuffix('/items')}" for name, value in counts.items())
    which = ", averaged weights" if wanted.ema else ""
    print(f"{printable(wanted.run)} after step {record.step}{which}, on {on or f'{record.items:,} items'}")
    shown = {"loss": record.loss, **record.metrics} if not counts else record.metrics
    width = max(map(len, shown))
    for name, value in shown.items():
        if name not in counts:
            print(f"{printable(name):<{width}}  {value:.6g}")
