"""Train a task: with `Run` step by step, or with `train` in one call.

    result = train(config, task)
    code = profile(config, steps=10, warmup=5)

`profile` is `lockstep profile`: a short run in its own folder, NAME-profile-TIME, which keeps traces, verdict and log.
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
from lockstep.config.schema import Config, check_typed
from lockstep.distributed import failures
from lockstep.distributed.world import World
from lockstep.errors import SETTINGS, ConfigError, LockstepError, UsageError
from lockstep.records import VERDICT_FILE, Best, EvaluationRecord, Step, check_log, float_of
from lockstep.training.state.status import RunSpec, RunStatus
from lockstep.training.trainer import Training, run_training

__all__ = [
    "Result",
    "Run",
    "profile",
    "train",
]


# The last run that began in this process.
_LATEST_RUN: list[weakref.ref[Training]] = []


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a run.

    Attributes:
        status: "finished" (the plan's last step is done), "stopped" (run.stop(), --stop-at, or the loop was left),
            "abandoned" (run.abandon()), "interrupted" (Ctrl-C) or "preempted" (a signal, or the file STOP).
        global_step: steps trained, over all starts of the run.
        evaluation: the last evaluation of this process, or of a run that had ended before it; None: there was none.
        best: the run's best evaluation by `--best-metric`; None: there was none.
        folder: the run's folder, with records, log and checkpoints.
        exit_code: exit code of the command: 0, 75 (preempted) or 130 (interrupted).
        is_main: whether this process is rank 0, the only one that should print.
    """

    status: str
    global_step: int
    evaluation: EvaluationRecord | None
    best: Best | None
    folder: Path
    exit_code: int
    is_main: bool = True


class Run:
    """A training run, iterated step by step.

        for step in lockstep.Run(config, task): ...     # records, evaluations and checkpoints as under the command
        result = lockstep.Run(config, task)()           # without a loop

    A run starts at `with`, or at its loop; nothing is written before. The same experiment name resumes. A process
    trains one run at a time, any number in turn; a run that was left in the middle ends when the next starts. Leaving
    the loop (`break`, an error in its body) saves and ends the run, if all ranks leave it after the same step.

    Args:
        config: everything except the task.
        task: a `lockstep.Task`, or an object with its methods; None: the task that the configuration names.
        world: the process groups that the caller joined, and will leave; None: the run joins and leaves its own.

    Raises:
        ConfigError: the command line has a flag that only the built-in tasks read.
    """

    def __init__(self, config: Config, task: Any = None, world: World | None = None, *, _min_steps: int = 0) -> None:
        if task is not None:
            check_typed(SETTINGS.typed, SETTINGS.defaults, is_script=True)
        self._spec = RunSpec(config, task, world, _min_steps)
        self._status = RunStatus.of(self._spec)
        self._steps: Training | None = None

    def __enter__(self) -> Self:
        """Start the run.

        Joins the ranks, makes model, data and optimizer, locks the folder, and loads the checkpoint to resume from.

        Raises:
            UsageError: the configuration cannot be run; nothing was written.
            LockstepError: the run failed.
        """
        if self._steps is not None or self._status.name != "new":
            raise UsageError(f"this run is {self.status}: to resume it, make another Run with the same config")
        steps = run_training(self._spec, self._status)
        # A caller that passes a world keeps track of its own runs.
        if self._spec.world is None:
            _end_earlier_run(weakref.ref(steps))
        self._steps = steps
        next(steps)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            # The run reports only its own errors, and this one came from the loop's body.
            failures.note(error)
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def __iter__(self) -> Iterator[Step]:
        """Yield each step after its record and evaluation. Raises as `__enter__` does.

        A step is saved after its body.

        Raises:
            KeyboardInterrupt: after Ctrl-C, once everything is saved.
        """
        if self._steps is None:
            self.__enter__()
        # Only the loop holds the generator, so leaving the loop closes the run.
        steps = self._steps
        self._steps = None
        assert steps is not None
        return _yield_steps(steps, self._status)

    def __call__(self) -> Result:
        """Train to the end. Raises as the loop does."""
        self._status.has_body = False
        for _ in self:
            pass
        return self.result

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Log `values` at the current step: console, metrics.jsonl, TensorBoard, W&B.

        Any rank may call it; only rank 0's values are logged. Reading a tensor waits for the device.

        Raises:
            UsageError: a name belongs to the run's own records, or a value is not a number; nothing was written.
        """
        current = self._status.current_step
        step = self._status.global_step
        values = check_log(values, current.record.numbers if current else ())
        if self._status.ranks.is_main:
            # Waits for the device if a value is a tensor.
            numbers = {name: float_of(value) for name, value in values.items()}
            self._status.outputs.sinks.log({"global_step": step, **numbers})

    def stop(self) -> None:
        """Save and end the run after the current step.

        If only some ranks call it in that step's body, all end together a few steps later, after the next exchange.
        """
        self._status.wants_stop = True

    def abandon(self) -> None:
        """End the run in the current step without saving it.

        All ranks call it in the body of the same step, before the body ends or leaves the loop. A checkpoint that is
        being written is completed; earlier ones stay, and the next start resumes from them.

        Raises:
            UsageError: the run has not started, or has ended.
        """
        if self.status != "running":
            raise UsageError(f"this run is {self.status}: there is nothing to abandon")
        self._status.abandoned = True

    def keep(self, name: str, what: Any) -> None:
        """Store your own object (an average of the weights, a queue) in the run's checkpoints.

        All ranks call it, after `with` and before the loop. If the run resumes, the object is loaded here.

        Args:
            name: letters, digits, "-" and "_".
            what: has `state_dict()`, with tensors by name that are the same on every rank, and
                `load_state_dict(state)`.

        Raises:
            UsageError: the call is too late, or the object has no such methods.
            CheckpointError: the checkpoint to resume from has no such state.
        """
        built = self._status.built
        if built is None or self._status.current_step is not None:
            raise UsageError(f"run.keep('{name}', ...) belongs between `with Run(...) as run` and the loop")
        built.keep(name, what)
        tensors = built.object_tensors(name)
        if built.setup.source is None:
            survives_loss = self._status.ranks.member is not None
            self._status.inputs.copy_tensors(tensors, survives_loss=survives_loss)
        else:
            checkpoint.load(
                built.setup.source, tensors, built.world, verified=True, leave=built.is_elsewhere
            )  # collective
            built.load_state_dict(tensors)

    @property
    def status(self) -> str:
        """The status of `Result`; before the end "new" or "running", after an error "failed"."""
        return self._status.name

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, the only one that should print."""
        return self._status.ranks.is_main

    @property
    def best(self) -> Best | None:
        """The best evaluation so far by `--best-metric`; None before the first."""
        return self._status.best

    @property
    def model(self) -> nn.Module:
        """The model as the task made it, on its device. A rollback replaces the object.

        Raises:
            UsageError: the run has not started.
        """
        if self._status.model is None:
            raise UsageError("the run has not started, so it has no model: read run.model after `with Run(...) as run`")
        return self._status.model

    @property
    def result(self) -> Result:
        """The result of a run that has ended. Raises UsageError before the end."""
        status = self._status
        if status.name in ("new", "running", "failed"):
            raise UsageError(f"the run is {status.name}, so it has no result yet")
        config = status.inputs.config
        folder = Path(config.local_dir).expanduser() / config.experiment_name
        return Result(
            status.name,
            status.global_step,
            status.evaluation,
            status.best,
            folder,
            status.exit_code,
            status.ranks.is_main,
        )


def train(config: Config, task: Any = None, world: World | None = None, *, exit_early: bool = True) -> Result:
    """Train `task` to the end: `Run(config, task, world)()`.

    What follows the call in a script needs a trained model. So if a signal (or the file STOP) or the flag --stop-at
    ends the training early, the call ends the process, once everything is saved.

    Args:
        config: everything except the task.
        task: as for `Run`.
        world: as for `Run`; if given, the call always returns.
        exit_early: False: return after a signal and --stop-at too; `Result.status` has the difference.

    Raises:
        UsageError: the configuration cannot be run; nothing was written.
        LockstepError: the run failed.
        KeyboardInterrupt: Ctrl-C; everything is saved.
        SystemExit: the training ended early, with the exit code of `lockstep train`: 75 after a signal, else 0.
    """
    result = Run(config, task, world)()
    # At a prompt, as in a notebook, the user sees the summary and continues.
    if exit_early and world is None and not hasattr(sys, "ps1") and _is_early(result, config):
        raise SystemExit(failures.process_code(result.exit_code))
    return result


def _is_early(result: Result, config: Config) -> bool:
    """Whether a signal, the file STOP or the flag --stop-at ended the run."""
    # What a script sets in code it also handles; a flag comes from somebody who only starts the script.
    is_typed = SETTINGS.typed.get("stop_at") == config.stop_at == result.global_step
    return result.status == "preempted" or (result.status == "stopped" and is_typed)


def _yield_steps(steps: Training, status: RunStatus) -> Iterator[Step]:
    """Yield the steps until the run ends or is abandoned, and close it."""
    try:
        for step in () if status.abandoned else steps:
            if step is not None:
                yield step
            if status.abandoned:
                break
    finally:
        steps.close()


def _end_earlier_run(run: "weakref.ref[Training]") -> None:
    """End the earlier run of this process if it was left in the middle.

    It holds lock, log and groups, which `run` needs.
    """
    earlier = _LATEST_RUN[-1]() if _LATEST_RUN else None
    if earlier:
        state = inspect.getgeneratorstate(earlier)
    else:
        state = inspect.GEN_CLOSED
    if state == inspect.GEN_RUNNING:
        raise UsageError("this process is training already, in another thread or around this call: one run at a time")
    _LATEST_RUN[:] = [run]
    if earlier and state == inspect.GEN_SUSPENDED:
        if os.environ.get("RANK", "0") == "0":
            line = "the earlier run, which this process left in the middle, is ended: one run at a time"
            print(line, file=sys.stderr, flush=True)
        earlier.close()


def profile(config: Config, steps: int, warmup: int, task: Any = None) -> int:
    """Profile a short run: `warmup` steps, `steps` traced ones, and a last one. Collective.

    No existing run is changed: the weights are new, or those of --init-from.

    Returns:
        The exit code.

    Raises:
        UsageError: the configuration cannot be run; nothing was written.
        LockstepError: the run failed, or gave no verdict.
    """
    if config.profile:
        raise ConfigError("--profile belongs to `lockstep train`: here use --steps and --warmup")
    first_step = warmup + 1
    last_step = warmup + steps
    # Every rank adopts rank 0's name.
    name = f"{config.experiment_name[:160]}-profile-{time.strftime('%Y%m%d-%H%M%S')}"
    span = f"{first_step}:{last_step}"
    config = dataclasses.replace(
        config, experiment_name=name, save_dir=config.local_dir, profile=span, stop_at=last_step + 1, report=False
    )
    # A small training set has enough steps too.
    run = Run(config, task, _min_steps=last_step + 1)
    # Hide the run's summary.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        result = run()
    if run.is_main:
        folder = result.folder / "profile" / f"{first_step}-{last_step}"
        shutil.rmtree(result.folder / "checkpoints", ignore_errors=True)
        if not (folder / VERDICT_FILE).is_file():
            raise LockstepError(f"the profile has no verdict; see the warnings in {result.folder}/logs")
        # On a terminal the run's own lines have shown it.
        if not (sys.stdout.isatty() and sys.stderr.isatty()):
            print(json.loads((folder / VERDICT_FILE).read_text(encoding="utf-8"))["sentence"])
    return result.exit_code
