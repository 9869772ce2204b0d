"""`lockstep profile`: a short run in a folder of its own, NAME-profile-TIME, of which traces, verdict and log stay.

code = profile(config, steps=10, warmup=5)
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
from lockstep.records import Best, EvaluationRecord, Step, checked_log
from lockstep.training.session import Session
from lockstep.training.trainer import Training, training

__all__ = [
    "Result",
    "Run",
    "profile",
    "train",
]


_LAST: list[weakref.ref[Training]] = []  # the run that began last in this process


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to.

    Attributes:
        status: "finished" (the plan's last step was taken), "stopped" (run.stop(), --stop-at, or the loop was left),
            "abandoned" (run.abandon()), "interrupted" (Ctrl-C) or "preempted" (a signal, or the file STOP).
        global_step: steps taken, in all starts of the run.
        evaluation: the last one in this process, or None.
        best: the best evaluation of the run by `--best-metric`, or None.
        folder: where records, log and checkpoints lie.
        exit_code: what the command ends with: 0, 75 (preempted) or 130 (interrupted).
    """

    status: str
    global_step: int
    evaluation: EvaluationRecord | None
    best: Best | None
    folder: Path
    exit_code: int


class Run:
    """A training run. It begins in `with`, or with its loop, and nothing is written before.

        for step in lockstep.Run(config, task): ...     # records, evaluations and checkpoints as under the command
        result = lockstep.Run(config, task)()           # without a loop

    The same experiment name resumes. A process trains one run at a time, and as many as it likes one after the other;
    one that was left in the middle is ended when the next one begins. Leaving the loop (`break`, an error in its body)
    saves and ends the run where all ranks leave it after the same step.

    Args:
        config: everything but the task.
        task: a `lockstep.Task`, or an object with its methods; None: what the config names.
        world: one that this process joined already, and will leave itself; None: joined here, and left at the end.
    """

    def __init__(self, config: Config, task: Any = None, world: World | None = None, *, _least_steps: int = 0) -> None:
        self._session = Session(config, task, world, least_steps=_least_steps)
        self._steps: Training | None = None

    def __enter__(self) -> Self:
        """Begins: joins the ranks, makes model, data and optimizer, claims the folder, loads what is to be resumed.

        Raises:
            UsageError: what was asked for cannot be done; nothing was written.
            LockstepError: the run failed.
        """
        if self._steps is not None or self._session.status != "new":
            raise UsageError(f"this run is {self.status}: make another Run to go on, with the same config to resume")
        steps = training(self._session)
        if self._session.world is None:  # who joined one keeps count of what runs in it
            _take_turn(weakref.ref(steps))
        self._steps = steps
        next(steps)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            failures.note(error)  # of the loop's body; the run has noted its own
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def __iter__(self) -> Iterator[Step]:
        """The steps to come, each once everything that follows it has been done. Raises as `__enter__` does.

        Raises:
            KeyboardInterrupt: after Ctrl-C, once all is saved.
        """
        if self._steps is None:
            self.__enter__()
        steps, self._steps = self._steps, None  # the loop alone holds it: leaving the loop closes it
        assert steps is not None
        return _only_steps(steps, self._session)

    def __call__(self) -> Result:
        """Trains to the end. Raises as the loop does."""
        self._session.has_body = False
        for _ in self:
            pass
        return self.result

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Puts `values` into every sink, at the present step: the console, metrics.jsonl, TensorBoard, W&B.

        To be called on any ranks; rank 0's values are taken. Reading a tensor waits for the device.

        Raises:
            UsageError: a name is one of the run's own records, or a value is no number; nothing was written.
        """
        present, step = self._session.present, self._session.global_step
        values = checked_log(values, present.record.numbers if present else ())
        if self._session.is_main:
            self._session.sinks.log({"global_step": step, **{name: float(value) for name, value in values.items()}})

    def stop(self) -> None:
        """Saves and ends the run after the present step, where every rank asks for it in that step's body.

        What a rank asks for alone is agreed on with the next exchange, so a few steps later, on all ranks at once.
        """
        self._session.wants_stop = True

    def abandon(self) -> None:
        """End the run in the present step without saving it.

        Every rank calls it in the body of the same step, before the body ends or leaves the loop. A checkpoint that
        is being written is finished; earlier ones stay, and the next start resumes from them.

        Raises:
            UsageError: the run has not begun, or has ended.
        """
        if self.status != "running":
            raise UsageError(f"this run is {self.status}: there is nothing to abandon")
        self._session.abandoned = True

    def keep(self, name: str, what: Any) -> None:
        """Keeps an object of one's own (an average of the weights, a queue) in the checkpoints of this run.

        To be called on every rank, after `with` and before the loop. Where the run resumes, the object is filled here.

        Args:
            name: letters, digits, "-" and "_".
            what: has `state_dict()`, tensors by name that are the same on every rank, and `load_state_dict(state)`.

        Raises:
            UsageError: it comes too late, or is no such object.
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
        """As in `Result`; "new" before the run begins, then "running"; "failed" after an error."""
        return self._session.status

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which alone should print."""
        return self._session.is_main

    @property
    def best(self) -> Best | None:
        """The best evaluation so far by `--best-metric`, of all starts of the run; None before the first."""
        return self._session.best

    @property
    def model(self) -> nn.Module:
        """The model as the task made it, on its device. After a rollback it is another object.

        Raises:
            UsageError: the run has not begun, so there is none yet.
        """
        if self._session.model is None:
            raise UsageError("the run has not begun, so it has no model: ask within `with Run(...) as run` or later")
        return self._session.model

    @property
    def result(self) -> Result:
        """What the run came to, once it has ended. Raises UsageError before."""
        session = self._session
        if session.status in ("new", "running", "failed"):
            raise UsageError(f"the run is {session.status}, so it has no result yet")
        folder = Path(session.config.save_dir).expanduser() / session.config.experiment_name
        return Result(session.status, session.global_step, session.evaluation, session.best, folder, session.exit_code)


def train(config: Config, task: Any = None, world: World | None = None) -> Result:
    """Trains `task` to the end and returns what it came to: `Run(config, task, world)()`.

    Raises:
        UsageError: what was asked for cannot be done; nothing was written.
        LockstepError: the run failed.
        KeyboardInterrupt: Ctrl-C; all is saved.
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
    """Ends the run of this process that was begun before and left in the middle: it holds lock, log and groups."""
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
    """Trains `warmup` steps, traces `steps` more, takes a last one and ends; the exit code. Collective, if joined.

    No run that exists is touched: the weights are a new run's, or those of --init-from.

    Raises:
        UsageError: what was asked for cannot be done; nothing was written.
        LockstepError: the run failed, or gave no verdict.
    """
    if config.profile:
        raise ConfigError("--profile is for train: here --steps and --warmup say what is traced")
    first, last = warmup + 1, warmup + steps
    name = f"{config.experiment_name[:160]}-profile-{time.strftime('%Y%m%d-%H%M%S')}"  # that of rank 0 is taken
    traced = f"{first}:{last}"
    config = dataclasses.replace(config, experiment_name=name, profile=traced, stop_at=last + 1, report=False)
    run = Run(config, task, _least_steps=last + 1)  # however small the training set is
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # the run's summary is not asked for
        result = run()
    if run.is_main:
        folder = result.folder / "profile" / f"{first}-{last}"
        shutil.rmtree(result.folder / "checkpoints", ignore_errors=True)
        if not (folder / FILE).is_file():
            raise LockstepError(f"the steps were trained and gave no verdict; {result.folder}/logs says why")
        if not (sys.stdout.isatty() and sys.stderr.isatty()):  # a terminal has it from the run's own lines
            print(json.loads((folder / FILE).read_text(encoding="utf-8"))["sentence"])
    return result.exit_code
