"""A row of bench/lightning.jsonl made into objects: the module, unedited, with small arguments, and synthetic data.

The arguments and the data are described in JSON, a small language, so that no line of other people's code lies here:

- {"object": "torch.nn.functional.mse_loss"} is what has this name; {"call": NAME, "args": [...], "kwargs": {...}} is
  what it returns, {"partial": NAME, "kwargs": {...}} a functools.partial of it, {"namespace": {...}} an
  argparse.Namespace; other values are themselves.
- A sample: {"normal": [3, 8, 8]} and {"uniform": [3, 8, 8]} are float32 of this shape, {"classes": 10, "shape": []}
  int64 below 10, {"ones": [4]} float32; {"text": ["ab", "c"]} and {"value": [0.1, 0.5]} go through their lists in turn,
  {"nothing": true} is None. A list is a tuple of such, {"fields": {...}} a dict, {"tuple": NAME, "fields": {...}} a
  named tuple.

Sample i is the same in every process: its numbers come from a generator seeded with i.
"""

import argparse
import functools
import hashlib
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

ROWS = Path(__file__).parents[1] / "lightning.jsonl"
EPOCHS, BATCHES = 2, 3  # so that what happens at the end of an epoch happens before the last step


def rows():
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def named(name):
    """The object of a dotted name, whatever part of it is a module."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        try:
            if importlib.util.find_spec(module) is None:
                continue
        except ModuleNotFoundError as error:  # a shorter name may be a module; what a module of theirs lacks is said
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            continue
        found = importlib.import_module(module)
        for part in parts[cut:]:
            if not hasattr(found, part):
                raise SystemExit(f"{name}: {module} has no {'.'.join(parts[cut:])}")
            found = getattr(found, part)
        return found
    raise SystemExit(f"{name}: there is nothing of this name")


def value(given):
    """What an argument's description stands for."""
    if isinstance(given, list):
        return [value(each) for each in given]
    if not isinstance(given, dict):
        return given
    args, kwargs = value(given.get("args", [])), {key: value(each) for key, each in given.get("kwargs", {}).items()}
    if "object" in given:
        return named(given["object"])
    if "call" in given:
        return named(given["call"])(*args, **kwargs)
    if "partial" in given:
        return functools.partial(named(given["partial"]), *args, **kwargs)
    if "namespace" in given:
        return argparse.Namespace(**{key: value(each) for key, each in given["namespace"].items()})
    return {key: value(each) for key, each in given.items()}


def sample(described, index, draw):
    """The `index`th sample of a description, its numbers from the generator `draw`."""
    if isinstance(described, list):
        return tuple(sample(each, index, draw) for each in described)
    if "fields" in described:
        fields = {key: sample(each, index, draw) for key, each in described["fields"].items()}
        return named(described["tuple"])(**fields) if "tuple" in described else fields
    if "nothing" in described:
        return None
    for kind in ("text", "value"):
        if kind in described:
            return described[kind][index % len(described[kind])]
    if "classes" in described:
        return torch.randint(described["classes"], described["shape"], generator=draw)
    if "ones" in described:
        return torch.ones(described["ones"])
    if "normal" in described:
        return torch.randn(described["normal"], generator=draw)
    return torch.rand(described["uniform"], generator=draw)


class Samples(Dataset):
    """`length` samples of a description; those of another `begin` are others."""

    def __init__(self, described, length, begin=0):
        self.described, self.length, self.begin = described, length, begin

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return sample(self.described, self.begin + index, torch.Generator().manual_seed(self.begin + index))


def collate(samples):
    """The default collation; where all samples have None, the batch has None."""
    if samples[0] is None:
        return None
    if type(samples[0]) is tuple:
        return [collate(each) for each in zip(*samples, strict=True)]
    return default_collate(samples)


def prepare(row, folder):
    """Checks the file of the row in `folder` against its digest, and lets its repository be imported."""
    place = Path(folder, row["repository"].replace("/", "+"))
    file = place / row["path"]
    if not file.is_file():
        raise SystemExit(f"{file}: not there; lay {row['repository']} at {row['commit'][:12]} into {place}")
    if hashlib.sha256(file.read_bytes()).hexdigest() != row["sha256"]:
        raise SystemExit(f"{file}: another file than at {row['commit'][:12]}; lay that commit into {place}")
    sys.path[1:1] = [str(place / root) for root in row["roots"]]


def make(row):
    """The row's module, made with torch's seed at 0."""
    torch.manual_seed(0)
    made = named(f"{row['module']}.{row['class']}")(**value(row["arguments"]))
    for name, given in row.get("attributes", {}).items():
        setattr(made, name, value(given))
    return made


def loaders(row, parts=1):
    """The loader of training and those of validation; each batch of the row's is in `parts`."""
    data = row["data"]
    training = Samples(data["sample"], data["batch"] * BATCHES * parts)
    others = [
        Samples(data.get("validation_sample", data["sample"]), data["batch"] * 2 - 1, 10_000 * (place + 1))
        for place in range(data.get("validation", 0))
    ]
    return (
        DataLoader(training, batch_size=data["batch"], collate_fn=collate),
        [DataLoader(each, batch_size=data["batch"], collate_fn=collate) for each in others],
    )
