"""Compare micro-batches of BatchNorm for the default: held-out loss and errors over seeds, beside the whole batch's.

    OMP_NUM_THREADS=1 python bench/batchnorm_default.py [--seeds 20] [--seconds 600] [--tasks digits breast_cancer]

Each run is `lockstep.train` on one process with the default optimizer. The sizes are candidates for the default of a
task with BatchNorm: an eighth of the batch of 128 (today's default), a quarter, a half, and the whole batch. Tasks: the
digits of scikit-learn with a convolutional network, and its breast cancer table with a multilayer perceptron.
"""

import argparse
import contextlib
import io
import math
import tempfile
import time
from statistics import mean, stdev
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn

import lockstep

BATCH, SIZES, STEPS, RATE = 128, (16, 32, 64, 128), 120, 5e-3


def _data(name: str) -> tuple[Tensor, Tensor]:
    table: Any = getattr(datasets, f"load_{name}")(return_X_y=True)
    features, labels = torch.tensor(table[0], dtype=torch.float32), torch.tensor(table[1])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    features = (features - features.mean(0)) / features.std(0).clamp(min=1e-6)
    return features[order], labels[order]


class Labels(lockstep.Task):
    """Classify rows; a quarter is held out.

    Attributes:
        name: of a data set of scikit-learn.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.features, self.labels = _data(name)

    def model(self) -> nn.Module:
        if self.name == "digits":
            return nn.Sequential(
                *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
                *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)),
            )
        return nn.Sequential(
            *(nn.Linear(30, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()),
            nn.Linear(32, 2),
        )

    def dataset(self, split: str) -> Any:
        held_out = len(self.labels) // 4
        part = slice(held_out, None) if split == "train" else slice(held_out)
        return torch.utils.data.TensorDataset(self.features[part], self.labels[part])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        return {"errors": ((model(batch[0]).argmax(1) != batch[1]).sum(), len(batch[1]))}


def measure(task: Labels, size: int, seed: int, folder: str) -> tuple[float, float, float]:
    """Train once.

    Returns:
        Held-out loss, share of errors, seconds.
    """
    config = lockstep.Config(
        batch_size=BATCH, micro_batch_size=size, max_steps=STEPS, eval_freq=STEPS, lr=RATE, seed=seed, device="cpu",
        save_dir=folder, experiment_name=f"{task.name}-{size}-{seed}", report=False, ckpt_freq=0,
        checkpoint=lockstep.Checkpoint(mode="none"),
    )  # fmt: skip
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = lockstep.train(config, task).evaluation
    assert found is not None
    return found.loss, found.metrics["errors"], time.perf_counter() - start


def main() -> None:
    """Print a row for each task and size, with the paired difference from the whole batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600, help="begin no other seed after so many")
    parser.add_argument("--tasks", nargs="+", default=["digits", "breast_cancer"])
    args, began = parser.parse_args(), time.monotonic()
    torch.set_num_threads(1)
    tasks = [Labels(name) for name in args.tasks]
    rows: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            if time.monotonic() - began > args.seconds:
                break
            for task in tasks:
                for size in SIZES:
                    rows.setdefault((task.name, size), []).append(measure(task, size, seed, folder))
    for (name, size), found in rows.items():
        losses, errors, seconds = zip(*found, strict=True)
        wholes = rows[name, BATCH]
        differences = [one[0] - whole[0] for one, whole in zip(found, wholes, strict=True)]
        spread = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        print(
            f"{name:14} micro-batch {size:3}  seeds {len(found)}  loss {mean(losses):.4f}  errors {mean(errors):.2%}  "
            f"loss above the whole batch's {mean(differences):+.4f} +- {spread:.4f}  {mean(seconds):.2f} s"
        )


if __name__ == "__main__":
    main()
