"""Define the built-in tasks' names, defaults and options, without torch.

    kind_of("images")                   # "images"; of "" the language model, of FILE.py:CLASS "own"

The tasks of an option: `option(..., tasks="images, classification")`; builtin=True alone means the language model.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.config.fields import FieldError, FieldName, option, suggest_fields

__all__ = [
    "BOUNDS",
    "IMAGE_OPTIONS",
    "LANGUAGE",
    "LIGHTNING",
    "OWN",
    "TASKS",
    "Images",
    "TaskSpec",
    "check_task_options",
    "is_option_of",
    "kind_of",
    "with_task_defaults",
]


# FILE.py:CLASS, or an object in Python.
OWN = "own"
# Prefix of FILE.py:CLASS of a LightningModule, then maybe "," and that of a datamodule.
LIGHTNING = "lightning:"
# The default task.
LANGUAGE = "causal-lm"


class TaskSpec(NamedTuple):
    """A built-in task.

    Attributes:
        what: a few words for it.
        defaults: dotted name -> the default of an option with this task.
        helps: dotted name -> the help text of an option with this task.
        common: the task's own options that `--help` lists; none: those that no other task has.
    """

    what: str
    defaults: Mapping[str, Any] = {}
    helps: Mapping[str, str] = {}
    common: tuple[str, ...] = ()


TASKS: dict[str, TaskSpec] = {
    LANGUAGE: TaskSpec(
        "a language model on text",
        common=(
            *("model.pretrained", "lora.rank", "model.load_in", "tokenizer", "seq_len", "data.packing", "data.labels"),
            *("data.text_column", "data.evaluation", "data.prompt", "model.loss_chunk"),
        ),
    ),
    "images": TaskSpec(
        "a class for each image",
        {
            "model_name": "builtin:resnet",
            "dataset_name": "builtin:digits",
            "num_epochs": 20,
            "batch_size": 64,
            "data.evaluation": 0.2,
        },
        {
            "model_name": "builtin:resnet, builtin:vit, timm:NAME, or the folder or hub name of a transformers model",
            "dataset_name": "builtin:digits, a folder with a subfolder of images for each class, or a hub dataset",
            "data.evaluation": "share of the images held out for evaluation, if the data has no split for it",
            "lr": "peak learning rate; auto: 3e-3, 5e-5 if pretrained; sgd 1e-2",
        },
    ),
    "classification": TaskSpec(
        "a class for each text",
        {
            "model_name": "distilbert/distilbert-base-uncased",
            "dataset_name": "",
            "num_epochs": 3,
            "batch_size": 16,
            "seq_len": 128,
            "data.evaluation": 0.1,
            "model.pretrained": True,
        },
        {
            "model_name": "folder or hub name of a transformers model",
            "dataset_name": "a csv, json, jsonl or parquet file, a folder of them, or a hub dataset",
            "seq_len": "maximum tokens per text; longer texts are truncated",
            "tokenizer": "a hub name or a folder (default: the model's own)",
            "data.evaluation": "share of the rows held out for evaluation, if the data has no split for it",
            "data.text_column": "column with the text, or FIRST,SECOND (default: text, sentence, or the only one)",
        },
    ),
    "regression": TaskSpec(
        "a number for each row of a table",
        {
            "model_name": "builtin:mlp",
            "dataset_name": "builtin:diabetes",
            "num_epochs": 30,
            "batch_size": 32,
            "data.evaluation": 0.2,
        },
        {
            "model_name": "builtin:mlp",
            "dataset_name": "builtin:diabetes, a csv, json or parquet file, a folder of them, or a hub dataset",
            "data.evaluation": "share of the rows held out for evaluation, if the data has no split for it",
        },
    ),
}


@suggest_fields()
@dataclass(frozen=True, slots=True)
class Images:
    """Preparation of images."""

    size: int = option(
        0, "height and width in pixels; 0: 8 for the digits, else the model's own, else 64", tasks="images"
    )
    padding: int = option(-1, "pixels of padding before a random crop; -1: 1/8 of the size", tasks="images")
    flip: str = option(
        "auto", "mirror half of the images; auto: except the digits", "auto", "true", "false", tasks="images"
    )
    label_smoothing: float = option(0.0, "share of a label that is spread over all classes", tasks="images")
    randaugment: int = option(
        0, "magnitude of RandAugment, 1 to 30, commonly 9; needs torchvision; 0: off", tasks="images"
    )
    mixup: float = option(
        0.0, "alpha of mixup in each micro-batch, commonly 0.2; needs torchvision; 0: off", tasks="images"
    )
    cutmix: float = option(
        0.0, "alpha of cutmix, commonly 1; with --images.mixup one of both at random; 0: off", tasks="images"
    )


# option -> (least, most, what it must be)
BOUNDS: dict[str, tuple[float, float, str]] = {
    "images.size": (0, 4096, "a number of pixels, or 0"),
    "images.padding": (-1, 1024, "a number of pixels, or -1"),
    "images.label_smoothing": (0, 0.9, "a share from 0 to 0.9"),
    "images.randaugment": (0, 30, "a magnitude from 1 to 30, or 0"),
    "images.mixup": (0, 100, "a number from 0 to 100"),
    "images.cutmix": (0, 100, "a number from 0 to 100"),
}

IMAGE_OPTIONS = tuple(f"images.{spec.name}" for spec in dataclasses.fields(Images))


def kind_of(task: str) -> str:
    """Return the name of the built-in task that `task` names, or OWN."""
    if task in ("", *TASKS):
        return task or LANGUAGE
    return OWN


def is_option_of(spec: "dataclasses.Field[Any]", kind: str) -> bool:
    """Whether tasks of this kind have the option; "": whether any has it."""
    tasks = spec.metadata.get("tasks", ())
    return not (tasks and kind) or kind in tasks


def with_task_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of the task to the arguments of a Config."""
    if isinstance(task := fields.get("task", ""), str):
        entry = TASKS.get(task)
    else:
        entry = None
    result = dict(fields)
    for name, value in (entry.defaults if entry else {}).items():
        section, _, key = name.rpartition(".")
        if not section:
            result.setdefault(name, value)
        elif isinstance(section_values := result.get(section, {}), dict):
            result[section] = {key: value, **section_values}
    return result


def check_task_options(task: str, options: Iterable[tuple[Any, str, "dataclasses.Field[Any]"]]) -> None:
    """Check that the task exists, and has the options that are set.

    Args:
        task: the value of --task.
        options: the configuration's, each with the object that has it, and its dotted name.

    Raises:
        FieldError: an unknown task, or an option of another task.
    """
    if task not in ("", *TASKS) and ":" not in task and "." not in task and "/" not in task:
        close = difflib.get_close_matches(task, TASKS, n=1, cutoff=0.5)
        if close:
            advice = f"did you mean {close[0]}?"
        else:
            advice = f"choose one of {', '.join(TASKS)},"
        if os.path.isfile(f"{task}.py"):
            advice = f"did you mean a class of {task}.py, {task}.py:CLASS?"
        raise FieldError(FieldName("task"), f" is '{task}': {advice} or give your own task, FILE.py:CLASS")
    task_kind = kind_of(task)
    if task_kind == OWN:
        return
    for owner, name, spec in options:
        if not is_option_of(spec, task_kind) and getattr(owner, spec.name) != spec.default:
            tasks = " or ".join(spec.metadata["tasks"])
            raise FieldError(
                FieldName(name),
                " is not an option of ",
                FieldName("task"),
                f" {task_kind}, but of {tasks}; remove it",
            )
