"""`python bench/lightning_overhead.py`: what a step costs besides what it computes, under Lightning and under lockstep.

A tiny module (a linear layer, Adam, a logged loss) on one device, so that hardly anything is computed. In each round a
plain PyTorch loop, Lightning's Trainer and lockstep take the same steps, in turns; a step's overhead is its time less
that of the plain loop. Reported is the median over the rounds, and the ratio of the two overheads. Neither writes
checkpoints, evaluates or shows progress; both record every 50 steps, lockstep into its run's folder.
"""

import argparse
import contextlib
import dataclasses
import importlib
import io
import logging
import platform
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def module_of(L: Any) -> Any:
    class Tiny(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = F.cross_entropy(self.layer(x), y)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    return Tiny()


def plain(data: TensorDataset, steps: int) -> float:
    module = nn.Linear(16, 4)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    began = time.perf_counter()
    for _, (x, y) in zip(range(steps), DataLoader(data, 8), strict=False):
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / steps


def theirs(L: Any, data: TensorDataset, steps: int) -> float:
    seen: list[float] = []

    class Clock(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append(time.perf_counter())

        def on_train_end(self, *_: Any) -> None:
            seen.append(time.perf_counter())

    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Clock()],
    )
    trainer.fit(module_of(L), DataLoader(data, 8))
    return (seen[1] - seen[0]) / steps


def ours(L: Any, data: TensorDataset, steps: int) -> float:
    config, task = lockstep.from_lightning(module_of(L), DataLoader(data, 8))
    with tempfile.TemporaryDirectory() as folder:
        changes = {"max_steps": steps, "save_dir": folder, "ckpt_freq": 0, "log_freq": 50, "report": False}
        with lockstep.Run(dataclasses.replace(config, **changes), task) as run:
            began = 0.0
            for _ in run:
                began = began or time.perf_counter()  # the first step makes what the others use
                ended = time.perf_counter()
            return (ended - began) / (steps - 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    L = importlib.import_module("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows = 8 * asked.steps
    data = TensorDataset(torch.randn(rows, 16, generator=generator), torch.randint(0, 4, (rows,), generator=generator))
    found: dict[str, list[float]] = {"plain": [], "Lightning": [], "lockstep": []}
    for _ in range(asked.rounds):
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            found["plain"].append(plain(data, asked.steps))
            found["Lightning"].append(theirs(L, data, asked.steps))
            found["lockstep"].append(ours(L, data, asked.steps))
    middle = {name: statistics.median(times) for name, times in found.items()}
    print(f"{platform.machine()}, torch {torch.__version__}, lightning {L.__version__}, {asked.steps} steps a round")
    for name, value in middle.items():
        print(f"{name:<10} {1e6 * value:8.0f} us a step")
    lost = {name: middle[name] - middle["plain"] for name in ("Lightning", "lockstep")}
    print(f"overhead   Lightning {1e6 * lost['Lightning']:.0f} us, lockstep {1e6 * lost['lockstep']:.0f} us")
    print(f"ratio      {lost['lockstep'] / lost['Lightning']:.2f}  (aim: 0.50 or less)")


if __name__ == "__main__":
    main()
