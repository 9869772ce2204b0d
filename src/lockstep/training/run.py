"""Train a task: with `Run` step by step, or with `train` in one call.

    result = train(config, task)
    code = profile(config, steps=10, warmup=5)

`profile` is `lockstep profile`: a short run in its own folder, NAME-profile-TIME, of which traces, verdict and log are
kept.
"""

import contextlib
import dataclasses
import inspect
import json
import os
import shutil
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.config.schema import Config
from lockstep.diagnose.profile.verdict import FILE
from lockstep.distributed import failures
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.records import Best, EvaluationRecord, Step, check_log
from lockstep.training.session import Session
from lockstep.training.trainer import Training, training

__all__ = [
    "Result",
    "Run",
    "profile",
    "train",
]


_LAST: list[weakref.ref[Training]] = []  # the last run that began in this process


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a run.

    Attributes:
        status: "finished" (the plan's last step is done), "stopped" (run.stop(), --stop-at, or the loop was left),
            "abandoned" (run.abandon()), "interrupted" (Ctrl-C) or "preempted" (a signal, or the file STOP).
        global_step: steps trained, over all starts of the run.
        evaluation: the last one in this process, or None.
        best: the best evaluation of the run by `--best-metric`, or None.
        folder: of records, log and checkpoints.
        exit_code: of the command: 0, 75 (preempted) or 130 (interrupted).
    """

    status: str
    global_step: int
    evaluation: EvaluationRecord | None
    best: Best | None
    folder: Path
    exit_code: int


class Run:
    """A training run, iterated step by step.

        for step in lockstep.Run(config, task): ...     # records, evaluations and checkpoints as under the command
        result = lockstep.Run(config, task)()           # without a loop

    It begins with `with`, or with its loop; nothing is written before. The same experiment name resumes. A process
    trains one run at a time, any number one after another; a run that was left in the middle ends when the next begins.
    Leaving the loop (`break`, an error in its body) saves and ends the run, if all ranks leave it after the same step.

    Args:
        config: everything except the task.
        task: a `lockstep.Task`, or an object with its methods; None: the task that the configuration names.
        world: a world that this process joined already, and will leave itself; None: it is joined here, and left at the
            end.
    """

    def __init__(self, config: Config, task: Any = None, world: World | None = None, *, _least_steps: int = 0) -> None:
        self._session = Session(config, task, world, least_steps=_least_steps)
        self._steps: Training | None = None

    def __enter__(self) -> Self:
        """Begin the run.

        Joins the ranks, makes model, data and optimizer, locks the folder, and loads the checkpoint to resume from.

        Raises:
            UsageError: the configuration cannot be run; nothing was written.
            LockstepError: the run failed.
        """
        if self._steps is not None or self._session.status != "new":
            raise UsageError(f"this run is {self.status}: make another Run to go on, with the same config to resume")
        steps = training(self._session)
        if self._session.world is None:  # whoever passes a world keeps track of its runs
            _take_turn(weakref.ref(steps))
        self._steps = steps
        next(steps)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            failures.note(error)  # an error of the loop's body; the run reports its own
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def __iter__(self) -> Iterator[Step]:
        """Yield each step, after its record, checkpoint and evaluation. Raises as `__enter__`.

        Raises:
            KeyboardInterrupt: after Ctrl-C, once everything is saved.
        """
        if self._steps is None:
            self.__enter__()
        steps, self._steps = self._steps, None  # only the loop holds it: leaving the loop closes it
        assert steps is not None
        return _only_steps(steps, self._session)

    def __call__(self) -> Result:
        """Train to the end. Raises as the loop does."""
        self._session.has_body = False
        for _ in self:
            pass
        return self.result

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Log `values` at the current step to every sink.

        Sinks are the console, metrics.jsonl, TensorBoard and W&B. Any ranks may call it; only rank 0's values are
        logged. Reading a tensor waits for the device.

        Raises:
            UsageError: a name belongs to the run's own records, or a value is not a number; nothing was written.
        """
        present, step = self._session.present, self._session.global_step
        values = check_log(values, present.record.numbers if present else ())
        if self._session.is_main:
            self._session.sinks.log({"global_step": step, **{name: float(value) for name, value in values.items()}})

    def stop(self) -> None:
        """Save and end the run after the current step.

        That is if every rank calls it in that step's body. If only some do, the ranks agree with the next exchange, a
        few steps later, and all end together.
        """
        self._session.wants_stop = True

    def abandon(self) -> None:
        """End the run in the current step without saving it.

        Every rank calls it in the body of the same step, before the body ends or leaves the loop. A checkpoint that
        is being written is finished; earlier ones stay, and the next start resumes from them.

        Raises:
            UsageError: the run has not begun, or has ended.
        """
        if self.status != "running":
            raise UsageError(f"this run is {self.status}: there is nothing to abandon")
        self._session.abandoned = True

    def keep(self, name: str, what: Any) -> None:
        """Store your own object (an average of the weights, a queue) in this run's checkpoints.

        Call it on every rank, after `with` and before the loop. If the run resumes, the object is loaded here.

        Args:
            name: letters, digits, "-" and "_".
            what: has `state_dict()`, with tensors by name that are the same on every rank, and
                `load_state_dict(state)`.

        Raises:
            UsageError: the call is too late, or the object has no such methods.
            CheckpointError: the checkpoint to resume from has no such state.
        """
        built = self._session.built
        if built is None or self._session.present is not None:
            raise UsageError(f"run.keep('{name}', ...) belongs between `with Run(...) as run` and the loop")
        built.keep(name, what)
        own = built.own_of(name)
        if built.source is None:
            self._session.note_first(own)
        else:
            checkpoint.load(built.source, own, built.world, verified=True)  # collective
            built.load_state_dict(own)

    @property
    def status(self) -> str:
        """The status as in `Result`; before it "new", "running", or "failed" after an error."""
        return self._session.status

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, the only one that should print."""
        return self._session.is_main

    @property
    def best(self) -> Best | None:
        """The best evaluation so far by `--best-metric`, over all starts; None before the first."""
        return self._session.best

    @property
    def model(self) -> nn.Module:
        """The model as the task made it, on its device. A rollback replaces the object.

        Raises:
            UsageError: the run has not begun, so there is none yet.
        """
        if self._session.model is None:
            raise UsageError("the run has not begun, so it has no model: ask within `with Run(...) as run` or later")
        return self._session.model

    @property
    def result(self) -> Result:
        """The result of a run that has ended. Raises UsageError before."""
        session = self._session
        if session.status in ("new", "running", "failed"):
            raise UsageError(f"the run is {session.status}, so it has no result yet")
        folder = Path(session.config.save_dir).expanduser() / session.config.experiment_name
        return Result(session.status, session.global_step, session.evaluation, session.best, folder, session.exit_code)


def train(config: Config, task: Any = None, world: World | None = None) -> Result:
    """Train `task` to the end: `Run(config, task, world)()`.

    Raises:
        UsageError: the configuration cannot be run; nothing was written.
        LockstepError: the run failed.
        KeyboardInterrupt: Ctrl-C; everything is saved.
    """
    return Run(config, task, world)()


def _only_steps(steps: Training, session: Session) -> Iterator[Step]:
    try:
        for step in () if session.abandoned else steps:
            if step is not None:
                yield step
            if session.abandoned:
                break
    finally:
        steps.close()


def _take_turn(run: "weakref.ref[Training]") -> None:
    """End this process's earlier run, if it was left in the middle.

    It would hold lock, log and groups.
    """
    earlier = _LAST[-1]() if _LAST else None
    state = inspect.getgeneratorstate(earlier) if earlier else inspect.GEN_CLOSED
    if state == inspect.GEN_RUNNING:
        raise UsageError("this process trains already, in another thread or around this call: one run at a time")
    _LAST[:] = [run]
    if earlier and state == inspect.GEN_SUSPENDED:
        if os.environ.get("RANK", "0") == "0":
            print("the run that this process left in the middle is ended: one at a time", file=sys.stderr, flush=True)
        earlier.close()


def profile(config: Config, steps: int, warmup: int, task: Any = None) -> int:
    """Profile a short run: `warmup` steps, `steps` traced ones, and a last one. Collective.

    No existing run is changed: the weights are a new run's, or those of --init-from.

    Returns:
        The exit code.

    Raises:
        UsageError: the configuration cannot be run; nothing was written.
        LockstepError: the run failed, or gave no verdict.
    """
    if config.profile:
        raise ConfigError("--profile is for train: here --steps and --warmup say what is traced")
    first, last = warmup + 1, warmup + steps
    name = f"{config.experiment_name[:160]}-profile-{time.strftime('%Y%m%d-%H%M%S')}"  # rank 0's is used
    traced = f"{first}:{last}"
    config = dataclasses.replace(config, experiment_name=name, profile=traced, stop_at=last + 1, report=False)
    run = Run(config, task, _least_steps=last + 1)  # however small the training set is
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # the run's summary is not wanted
        result = run()
    if run.is_main:
        folder = result.folder / "profile" / f"{first}-{last}"
        shutil.rmtree(result.folder / "checkpoints", ignore_errors=True)
        if not (folder / FILE).is_file():
            raise LockstepError(f"the steps were trained and gave no verdict; {result.folder}/logs says why")
        if not (sys.stdout.isatty() and sys.stderr.isatty()):  # a terminal has it in the run's own lines
            print(json.loads((folder / FILE).read_text(encoding="utf-8"))["sentence"])
    return result.exit_code
