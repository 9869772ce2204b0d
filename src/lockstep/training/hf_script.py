"""Run a script of the Hugging Face Trainer with lockstep as its `Trainer.train`.

    code = run_script(Script(Path("run_clm.py"), Path("args.json")), {"engine": "fsdp", "exact": True})

The script reads its arguments from the JSON file, as the scripts of transformers' examples folder do if that is their
only argument. It does everything else itself: data, tokenizer, model, and what is evaluated and saved afterwards.
"""

import math
import runpy
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lockstep.adapters.hf_trainer.convert import TrainerTask, from_trainer
from lockstep.adapters.hf_trainer.data import of_transformers
from lockstep.adapters.hf_trainer.flags import Script
from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.errors import ConfigError, UsageError, error_origin
from lockstep.logging import jsonl
from lockstep.models.hf import as_it_is
from lockstep.tensors import is_dtensor
from lockstep.training.inference import load
from lockstep.training.run import Result, Run

__all__ = [
    "run_script",
]


def run_script(script: Script, told: Mapping[str, Any]) -> int:
    """Run the script to its end, and return its exit code.

    If a signal ended its run, the code is the run's.

    Args:
        script: see `lockstep.adapters.hf_trainer.flags`.
        told: options of the run by dotted name; they win over the Trainer's arguments.

    Raises:
        ConfigError: transformers is not installed, the script does not know an argument of the file, or its Trainer
            uses an unsupported feature.
        UsageError: the script ended without a call of `trainer.train()`.
        LockstepError: the run failed.
    """
    trainers = as_it_is("--hf-script", str(script.path)).Trainer
    training = _Training(told)
    with _bound(trainers, training), _as_started(script):
        try:
            runpy.run_path(str(script.path), run_name="__main__")
        except SystemExit as end:
            if end.code:
                return _code(end.code)
        except ValueError as error:
            if error_origin(error) == "transformers.hf_argparser:parse_dict":
                raise ConfigError(f"--hf-args {script.arguments}: {str(error).splitlines()[0]}") from error
            raise
    if not training.folders:
        raise UsageError(
            f"--hf-script {script.path} ended without a call of trainer.train(): set "
            f'"do_train": true in {script.arguments}; a script without a Trainer is not served'
        )
    return 0


class _Training:
    """Replacement for `Trainer.train`.

    Attributes:
        folders: of the runs that were trained.
    """

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._told = told
        self.folders: list[tuple[str, str]] = []

    def __call__(self, trainer: Any, resume_from_checkpoint: Any = None, trial: Any = None) -> Any:
        """Train, and return the Trainer's own TrainOutput. If a signal ended the run, exit the script."""
        if isinstance(resume_from_checkpoint, str):
            raise ConfigError(
                f"trainer.train(resume_from_checkpoint='{resume_from_checkpoint}'): a run resumes by its folder; a "
                "Trainer's checkpoint gives weights: name it as the model, and leave this out"
            )
        if trial is not None:
            raise ConfigError("trainer.train(trial=...): a search is a loop of runs here, as in examples/sweep.py")
        config, task = from_trainer(trainer)
        ends = {"max_steps": 0} if "num_epochs" in self._told else {}  # max_steps would win over --num-epochs
        said = {**cli.flatten(config, own_task=True), **ends, **self._told}
        config = cli.build({**said, "log_freq": _recorded(trainer, cli.build(said))})
        folder = (config.save_dir, config.experiment_name)
        if folder in self.folders:
            raise ConfigError(
                f"the script calls trainer.train() a second time with output_dir '{'/'.join(folder)}', where the first "
                "run lies, finished: give the second Trainer an output_dir of its own"
            )
        self.folders.append(folder)
        began = time.perf_counter()
        run = Run(config, task)
        try:
            result = run()
        except KeyboardInterrupt:
            if run.status != "interrupted":
                raise
            result = run.result
        if result.exit_code:
            raise SystemExit(result.exit_code)
        return _output(trainer, config, task, result, time.perf_counter() - began)


def _recorded(trainer: Any, config: Config) -> int | str:
    """Return `log_freq`, adjusted so that a short run has one record.

    The script reads the loss from it.
    """
    epoch = config.limit_train_batches or len(trainer.train_dataset) / config.batch_size
    whole = isinstance(epoch, int | float) and not config.max_steps
    steps = config.num_epochs * epoch if whole else config.max_steps
    return "100%" if isinstance(config.log_freq, int) and config.log_freq > steps > 0 else config.log_freq


def _output(trainer: Any, config: Config, task: TrainerTask, result: Result, seconds: float) -> Any:
    """Set what the script reads afterwards: the model, `trainer.state` and the numbers."""
    epochs = result.global_step * config.batch_size / max(len(trainer.train_dataset), 1)
    state, history = trainer.state, _history(trainer, result)
    state.global_step = state.max_steps = result.global_step
    state.epoch, state.log_history = epochs, history
    if result.best:
        state.best_metric, state.best_model_checkpoint = result.best.value, result.best.path
    best = trainer.args.load_best_model_at_end
    if best or any(map(is_dtensor, trainer.model.parameters())):
        load(result.folder, task, "best" if best else "last", trainer.args.device)  # in trainer.model
    losses = [entry["loss"] for entry in history if "loss" in entry]
    loss = math.fsum(losses) / len(losses) if losses else math.nan
    metrics = {"train_runtime": seconds, "train_loss": loss, "epoch": epochs}
    return of_transformers(trainer).TrainOutput(result.global_step, loss, metrics)


def _history(trainer: Any, result: Result) -> list[dict[str, Any]]:
    """Return the run's records in the Trainer's format; [] except on the first process."""
    if not trainer.is_world_process_zero():
        return []
    return [dict(_renamed(record)) for record in jsonl.read(result.folder / "metrics.jsonl")]


_THEIRS = {"running_loss": "loss", "lr": "learning_rate", "grad_norm": "grad_norm", "global_step": "step"}


def _renamed(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if name in _THEIRS:
            yield _THEIRS[name], value
        elif name.startswith("evaluation/"):
            yield f"eval_{name.removeprefix('evaluation/')}", value
    if "epoch" in record:
        yield "epoch", record["epoch"] + record.get("epoch_progress", 0.0)


@contextmanager
def _bound(trainers: Any, training: _Training) -> Iterator[None]:
    """Replace `train` of every Trainer class in this process, subclasses included, by `training`."""
    theirs = trainers.train

    def train(
        self: Any, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        return training(self, resume_from_checkpoint, trial)

    trainers.train = train
    try:
        yield
    finally:
        trainers.train = theirs


@contextmanager
def _as_started(script: Script) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as if Python had been started with the script."""
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(script.path), str(script.arguments)], [str(script.path.parent.absolute())]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _code(code: Any) -> int:
    """Return an exit code as Python does: a string is printed, and means failure."""
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1
