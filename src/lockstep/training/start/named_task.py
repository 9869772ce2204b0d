"""Make the task that `--task`, `--model-name` and `--dataset-name` name."""

import copy
import dataclasses
import difflib
import importlib
from collections.abc import Callable
from pathlib import Path

from lockstep.config.cli import describe_preset
from lockstep.config.fields import is_hub_name
from lockstep.config.schema import DEFAULTS, Config, flag, is_auto
from lockstep.config.sections import Data
from lockstep.config.task_options import LIGHTNING, OWN, kind_of
from lockstep.errors import ConfigError
from lockstep.models.gpt import PRESETS
from lockstep.task import Task, as_task, check_class
from lockstep.task_file import construct, import_class
from lockstep.tasks.language_model import CausalLM, HubCausalLM, corpus_for, hub_task, loss_inside
from lockstep.text.token_store import TokenizerToTrain

__all__ = [
    "load_task",
    "make_task",
    "replace_data",
]


# Modules whose `make(config, say)` makes a task. Imported on demand, since each needs packages of its own.
_MAKERS = {
    "images": "lockstep.tasks.images",
    "classification": "lockstep.tasks.classification",
    "regression": "lockstep.tasks.regression",
}


def make_task(config: Config, say: Callable[[str], None]) -> Task:
    """Make the configured task: --task, or the named language model on its data.

    Tokenizes the data if that was not done before.

    Raises:
        ConfigError: an unknown model, or one that the sequence length does not fit.
        DataError: data that is missing, empty or too short.
    """
    name = kind_of(config.task)
    if name == OWN:
        return _load_own(config)
    if name in _MAKERS:
        task: Task = importlib.import_module(_MAKERS[name]).make(config, say)
        return task
    if config.preset == "source":
        say(describe_preset(config))
    if is_hub_name(config.model_name) or (Path(config.model_name).expanduser() / "config.json").is_file():
        return hub_task(config, say)
    return _make_built_in(config, say)


def load_task(name: str) -> Task:
    """Load the task class `FILE.py:CLASS`, and construct it without arguments.

    Raises:
        ConfigError: no such file or class, or it cannot be constructed without arguments.
    """
    if name.startswith(LIGHTNING):
        module: Task = importlib.import_module("lockstep.adapters.lightning.convert").load(name)
        return module
    task_class = import_class(name, "--task")
    if isinstance(task_class, type):
        check_class(task_class)
    try:
        task = construct(task_class)
    except Exception as error:
        raise ConfigError(
            f"--task '{name}': {task_class.__name__}() failed ({error}); it must need no arguments"
        ) from error
    return as_task(task)


def replace_data(task: Task, config: Config, name: str, say: Callable[[str], None]) -> Task:
    """Copy a language model's task with other data, encoded by its own tokenizer.

    Args:
        config: of the run. Its data options for a hub dataset do not apply to the other data.
        name: as for --dataset-name.

    Raises:
        ConfigError: the task is no built-in or hub language model.
        DataError: data that is missing, empty or too short.
    """
    if not isinstance(task, CausalLM | HubCausalLM):
        raise ConfigError(f"--data {name}: the task {type(task).__name__} has its own data; leave --data out")
    tokenizer = task.corpus.tokenizer
    plain = Data()
    defaults = {}
    for key in ("subset", "split", "revision", "text_column", "encoding"):
        defaults[key] = getattr(plain, key)
    data = dataclasses.replace(config.data, **defaults)
    config = dataclasses.replace(config, dataset_name=name, tokenizer="", data=data)
    task = copy.copy(task)
    task.corpus = corpus_for(config, lambda: tokenizer, say).corpus
    return task


def _load_own(config: Config) -> Task:
    names = ("model_name", "dataset_name")
    flags = []
    for name in names:
        if getattr(config, name) != getattr(DEFAULTS, name):
            flags.append(flag(name))
    if flags:
        raise ConfigError(f"--task {config.task} has its own model and data: leave out {' and '.join(flags)}")
    return load_task(config.task)


def _make_built_in(config: Config, say: Callable[[str], None]) -> CausalLM:
    if config.model_name not in PRESETS:
        close = difflib.get_close_matches(config.model_name, PRESETS, n=1, cutoff=0.4)
        if close:
            hint = f"did you mean {close[0]}?"
        else:
            hint = f"choose one of {', '.join(PRESETS)}."
        raise ConfigError(
            f"--model-name '{config.model_name}' is unknown: {hint} A hub model is OWNER/NAME, a local one its folder"
        )
    preset = PRESETS[config.model_name]
    if config.seq_len > preset.context and not is_auto(config, "seq_len"):
        raise ConfigError(
            f"--seq-len {config.seq_len} is longer than the context of {config.model_name}, {preset.context}; lower it"
        )
    choice = corpus_for(config, lambda: TokenizerToTrain(config.data.vocab_size), say, preset.context)
    shape = dataclasses.replace(preset, vocab_size=choice.corpus.vocab_size, dropout=config.model.dropout)
    if choice.revision:
        sources = {config.dataset_name: choice.revision}
    else:
        sources = None
    return CausalLM(
        choice.corpus,
        shape,
        sources,
        prompt=config.data.prompt,
        loss_chunk=config.model.loss_chunk,
        inside=loss_inside(config),
    )
