"""Runs of models that are divided over ranks, and how they are compared with one process."""

import json

import small_runs
import torch
from toys import Network, Ragged

import lockstep
from lockstep import checkpoint
from lockstep.config.parallel_options import Parallel
from lockstep.models.gpt import GPT, GPTConfig

# Of each tensor's largest value, in float64, after some steps of AdamW.
ROUNDING = 1e-9
# What the clock, the memory and the number of ranks decide.
OF_THE_MACHINE = ("time", "memory", "second", "world_size", "mfu", "eta", "run_id")


class TinyGPT(Ragged):
    """The built-in GPT, which lockstep divides by itself."""

    def model(self):
        return GPT(GPTConfig(layers=2, heads=4, width=16, vocab_size=29, context=16, dropout=self.dropout))


class Planned(Ragged):
    """An own model with an own plan, and dropout outside of the divided layers."""

    def model(self):
        return Network(self.dropout)

    def parallelize(self, model):
        return {"blocks.*.1": "columns", "blocks.*.3": "rows"}


def train(world, folder, task, degree, **changes):
    """(rank 0's records, loss and items of each step) of a run whose weights are in its checkpoint."""
    config = small_runs.config(
        folder,
        **{"parallel": Parallel(tensor=degree), "max_steps": 4, "log_freq": 1, "eval_freq": 2, "optim": {"clip": 0.5}}
        | {"report": False}
        | changes,
    )
    body = []
    with lockstep.Run(config, task, world) as made:
        for step in made:
            body.append((float(step.loss), step.items))
    records = []
    for line in (folder / "r" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        records.append({key: value for key, value in record.items() if not any(w in key for w in OF_THE_MACHINE)})
    return records, body


def weights(folder):
    """All tensors of the newest checkpoint, whole: weights, moments, the average."""
    with checkpoint.read.open_tensors(checkpoint.newest(folder / "r", say=print)) as tensors:
        return {name: tensors.read(name).double() for name in tensors.contents}


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        torch.testing.assert_close(other[name], tensor, rtol=0.0, atol=ROUNDING * max(largest, 1e-3), msg=name)
