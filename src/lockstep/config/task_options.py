"""The built-in tasks: their names, defaults and options. The configuration and the help need them without torch.

    kind_of("images")                   # "images"; of "" the language model, of FILE.py:CLASS "own"

A part of the ground floor: the configuration stands on it, and it stands on `config/fields` alone. An option says which
tasks have it with `option(..., tasks="images, classification")`; builtin=True alone means the language model.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.config.fields import FieldError, FieldName, named, option

__all__ = [
    "BOUNDS",
    "FIXED",
    "LANGUAGE",
    "LIGHTNING",
    "OWN",
    "TASKS",
    "Images",
    "TaskSpec",
    "belongs",
    "check",
    "kind_of",
    "suited",
]


OWN = "own"  # FILE.py:CLASS, or an object in Python
LIGHTNING = "lightning:"  # before the name of a LightningModule's file and class, and perhaps of a datamodule's
LANGUAGE = "causal-lm"  # what is trained where no task is named


class TaskSpec(NamedTuple):
    """A built-in task.

    Attributes:
        what: in a few words.
        defaults: fields of the configuration, by dotted name, whose default is another with it.
        helps: fields whose help text is another with it.
    """

    what: str
    defaults: Mapping[str, Any] = {}
    helps: Mapping[str, str] = {}


TASKS: dict[str, TaskSpec] = {
    LANGUAGE: TaskSpec("a language model on text"),
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
            "model_name": "builtin:resnet, builtin:vit, timm:NAME, or a transformers model: its folder or OWNER/NAME",
            "dataset_name": "builtin:digits, a folder with a folder of images for each class, or a hub dataset",
            "data.evaluation": "share of the images kept aside where the data has no part for it",
            "lr": "peak learning rate; auto: 3e-3, 5e-5 for a pretrained model; sgd 1e-2",
        },
    ),
    "classification": TaskSpec(
        "a class for each text",
        {
            "model_name": "distilbert/distilbert-base-uncased",
            "dataset_name": "",
            "num_epochs": 3,
            "data.evaluation": 0.1,
            "model.pretrained": True,
        },
        {
            "model_name": "a transformers model, its folder or OWNER/NAME",
            "dataset_name": "a csv, json, jsonl or parquet file, a folder of them, or a hub dataset",
            "seq_len": "tokens of a text at most; longer ones are cut",
            "tokenizer": "a hub name or a folder (default: the model's own)",
            "data.evaluation": "share of the rows kept aside where the data has no split for it",
            "data.text_column": "column that holds the text, or FIRST,SECOND (default: text, sentence, or the one)",
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
            "data.evaluation": "share of the rows kept aside where the data has no split for it",
        },
    ),
}


@named()
@dataclass(frozen=True, slots=True)
class Images:
    """How images are prepared."""

    size: int = option(0, "height and width, pixels; 0: digits 8, the model's own, else 64", tasks="images")
    padding: int = option(
        -1, "pixels put around an image before a random crop of its size; -1: an eighth of it", tasks="images"
    )
    flip: str = option("auto", "mirror half of the images; auto: not digits", "auto", "true", "false", tasks="images")
    label_smoothing: float = option(0.0, "share of a label that goes to all classes alike", tasks="images")


# option -> (least, most, what it must be)
BOUNDS: dict[str, tuple[float, float, str]] = {
    "images.size": (0, 4096, "a number of pixels, or 0"),
    "images.padding": (-1, 1024, "a number of pixels, or -1"),
    "images.label_smoothing": (0, 0.9, "a share from 0 to 0.9"),
}

# Those that change what is computed: a resume must find them unchanged.
FIXED = tuple(f"images.{spec.name}" for spec in dataclasses.fields(Images))


def kind_of(task: str) -> str:
    """The name of the built-in task that --task names, or OWN."""
    return task or LANGUAGE if task in ("", *TASKS) else OWN


def belongs(spec: "dataclasses.Field[Any]", kind: str) -> bool:
    """Whether a task of this kind has the option; "": whether any has it."""
    tasks = spec.metadata.get("tasks", ())
    return not (tasks and kind) or kind in tasks


def suited(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration with the defaults of its task where they say nothing."""
    entry = TASKS.get(task) if isinstance(task := fields.get("task", ""), str) else None
    found = dict(fields)
    for name, value in (entry.defaults if entry else {}).items():
        section, _, key = name.rpartition(".")
        if not section:
            found.setdefault(name, value)
        elif isinstance(held := found.get(section, {}), dict):
            found[section] = {key: value, **held}
    return found


def check(task: str, sections: Iterable[tuple[Any, str]]) -> None:
    """Raises FieldError for a task that is neither known nor a file's, and for options that another task has."""
    if task not in ("", *TASKS) and ":" not in task and "." not in task and "/" not in task:
        close = difflib.get_close_matches(task, TASKS, n=1, cutoff=0.5)
        meant = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(TASKS)},"
        raise FieldError(FieldName("task"), f" is '{task}': {meant} or give FILE.py:CLASS for a task of your own")
    kind = kind_of(task)
    if kind == OWN:
        return
    for owner, prefix in sections:
        for spec in dataclasses.fields(owner):
            name = prefix + spec.name
            if not belongs(spec, kind) and getattr(owner, spec.name) != spec.default:
                tasks = " or ".join(spec.metadata["tasks"])
                raise FieldError(
                    FieldName(name), " is no option of ", FieldName("task"), f" {kind}, but of {tasks}: leave it out"
                )
