"""Run a Hugging Face Trainer script, with lockstep in place of `Trainer.train`.

    code = run_script(Script(Path("run_clm.py"), Path("args.json")), {"engine": "fsdp", "exact": True})

The script reads its arguments from the JSON file, as the scripts of transformers' examples folder do if that is their
only argument, or from the YAML file behind `--config`, as those of trl do. It does everything else itself: data,
tokenizer, model, and what is evaluated and saved afterwards.
"""

import math
import runpy
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lockstep.adapters.hf_trainer.convert import from_trainer
from lockstep.adapters.hf_trainer.data import of_transformers
from lockstep.adapters.hf_trainer.flags import YAML, Script
from lockstep.adapters.hf_trainer.task import TrainerTask
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


def run_script(script: Script, options: Mapping[str, Any]) -> int:
    """Run the script to its end, and return its exit code, or the run's.

    Args:
        options: of the run, by dotted name; they override the Trainer's arguments.

    Raises:
        ConfigError: transformers is missing, the script rejects an argument, or its Trainer uses an unsupported
            feature.
        UsageError: the script ended without a call of `trainer.train()`.
        SystemExit: the script called sys.exit; not if it ended with the run's own code.
        LockstepError: the run failed.
    """
    trainers = as_it_is("--hf-script", str(script.path)).Trainer
    training = _TrainReplacement(options)
    with _replace_train(trainers, training), _script_environment(script):
        try:
            runpy.run_path(str(script.path), run_name="__main__")
        except SystemExit as end:
            if end.code and end.code == training.exit_code:
                return training.exit_code
            if end.code:
                raise
        except ValueError as error:
            if error_origin(error) == "transformers.hf_argparser:parse_dict":
                raise ConfigError(f"--hf-args {script.arguments}: {str(error).splitlines()[0]}") from error
            raise
    if not training.folders:
        raise UsageError(
            f"--hf-script {script.path} ended without a call of trainer.train(): set "
            f'"do_train": true in {script.arguments}; scripts without a Trainer are not supported'
        )
    return 0


class _TrainReplacement:
    """Replacement for `Trainer.train`.

    Attributes:
        folders: (SAVE_DIR, EXPERIMENT_NAME) of each run so far.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self.folders: list[tuple[str, str]] = []
        # Of the last run.
        self.exit_code = 0

    def __call__(self, trainer: Any, resume_from_checkpoint: Any = None, trial: Any = None) -> Any:
        """Train, and return the Trainer's TrainOutput. Exit if a signal ended the run."""
        if isinstance(resume_from_checkpoint, str):
            raise ConfigError(
                f"trainer.train(resume_from_checkpoint='{resume_from_checkpoint}'): a run resumes from its own "
                "folder; leave this out, and to start from a Trainer's checkpoint, name it as the model"
            )
        if trial is not None:
            raise ConfigError("trainer.train(trial=...) is not supported: search in a loop, as examples/sweep.py does")
        config, task = from_trainer(trainer)
        # max_steps would win over --num-epochs.
        override = {"max_steps": 0} if "num_epochs" in self._options else {}
        values = {**cli.flatten(config, own_task=True), **override, **self._options}
        config = cli.build({**values, "log_freq": _log_freq(trainer, cli.build(values))})
        folder = (config.local_dir, config.experiment_name)
        if folder in self.folders:
            raise ConfigError(
                f"the script calls trainer.train() twice with output_dir '{'/'.join(folder)}', which has the first "
                "run: set another output_dir for the second Trainer"
            )
        self.folders.append(folder)
        start = time.perf_counter()
        run = Run(config, task)
        try:
            result = run()
        except KeyboardInterrupt:
            if run.status != "interrupted":
                raise
            result = run.result
        self.exit_code = result.exit_code
        if result.exit_code:
            raise SystemExit(result.exit_code)
        return _set_results(trainer, config, task, result, time.perf_counter() - start)


def _log_freq(trainer: Any, config: Config) -> int | str:
    """Return `log_freq`, lowered so that a short run has a record of its loss."""
    epoch = config.limit_train_batches or len(trainer.train_dataset) / config.batch_size
    by_epochs = isinstance(epoch, int | float) and not config.max_steps
    steps = config.num_epochs * epoch if by_epochs else config.max_steps
    if isinstance(config.log_freq, int) and config.log_freq > steps > 0:
        return "100%"
    return config.log_freq


def _set_results(trainer: Any, config: Config, task: TrainerTask, result: Result, seconds: float) -> Any:
    """Set the model and `trainer.state`, and return the numbers, for the script to read."""
    epochs = result.global_step * config.batch_size / max(len(trainer.train_dataset), 1)
    state = trainer.state
    history = _read_history(trainer, result)
    state.global_step = state.max_steps = result.global_step
    state.epoch = epochs
    state.log_history = history
    if result.best:
        state.best_metric = result.best.value
        state.best_model_checkpoint = result.best.path
    best = trainer.args.load_best_model_at_end
    if best or any(map(is_dtensor, trainer.model.parameters())):
        # The weights are loaded into trainer.model.
        load(result.folder, task, "best" if best else "last", trainer.args.device)
    losses = []
    for entry in history:
        if "loss" in entry:
            losses.append(entry["loss"])
    loss = math.fsum(losses) / len(losses) if losses else math.nan
    metrics = {"train_runtime": seconds, "train_loss": loss, "epoch": epochs}
    return of_transformers(trainer).TrainOutput(result.global_step, loss, metrics)


def _read_history(trainer: Any, result: Result) -> list[dict[str, Any]]:
    """Return the run's records in the Trainer's format; [] on other processes than the first."""
    if not trainer.is_world_process_zero():
        return []
    history = []
    for record in jsonl.read(result.folder / "metrics.jsonl"):
        history.append(dict(_rename(record)))
    return history


_TRAINER_NAMES = {"running_loss": "loss", "lr": "learning_rate", "grad_norm": "grad_norm", "global_step": "step"}


def _rename(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if name in _TRAINER_NAMES:
            yield _TRAINER_NAMES[name], value
        elif name.startswith("evaluation/"):
            yield f"eval_{name.removeprefix('evaluation/')}", value
        elif name.startswith("train/"):
            yield name.removeprefix("train/"), value
    if "epoch" in record:
        yield "epoch", record["epoch"] + record.get("epoch_progress", 0.0)


@contextmanager
def _replace_train(trainers: Any, training: _TrainReplacement) -> Iterator[None]:
    """Replace `Trainer.train`, in subclasses too, by `training`."""
    original = trainers.train

    def train(
        self: Any, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        return training(self, resume_from_checkpoint, trial)

    trainers.train = train
    try:
        yield
    finally:
        trainers.train = original


@contextmanager
def _script_environment(script: Script) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as if Python had been started with the script."""
    argv = sys.argv
    path = list(sys.path)
    flags = ["--config"] if script.arguments.suffix in YAML else []
    sys.argv, sys.path[:0] = [str(script.path), *flags, str(script.arguments)], [str(script.path.parent.absolute())]
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path
