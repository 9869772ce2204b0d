"""How long until something happens: python bench/start.py [--rounds 7]

`lockstep --help`, and the first training step of a tiny MLP: by `lockstep.train` and by a bare loop, each in a process
of its own, by turns. Seconds from the start of the process; medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from contest import machine

BARE = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
x, y = torch.randn(4096, 64), torch.randint(10, (4096,))
loss = F.cross_entropy(model(x[:64]), y[:64])
loss.backward()
optimizer.step()
"""

OURS = """
import lockstep, torch
from torch import nn
from torch.nn import functional as F
class Task:
    items_per_sample = 1
    def model(self): return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    def dataset(self, split): return torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
    def collate(self, samples): return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
    def count(self, batch): return len(batch[1])
    def loss(self, model, batch): return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
config = lockstep.Config(save_dir={folder!r}, experiment_name={name!r}, batch_size=64, micro_batch_size=64, max_steps=9)
next(iter(lockstep.Run(config, Task())))
"""

DONE = "\nimport time, os; print(time.time() - float(os.environ['STARTED'])); os._exit(0)"


def seconds(*arguments, prints=True):
    environment = os.environ | {"STARTED": str(time.time()), "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1]) if prints else time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    found = {"lockstep --help": [], "first step, bare": [], "first step, lockstep": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(given.rounds + 1):
            ours = OURS.replace("{folder!r}", repr(folder)).replace("{name!r}", repr(f"run-{turn}"))
            times = [
                seconds("-m", "lockstep", "--help", prints=False),
                seconds("-c", BARE + DONE),
                seconds("-c", ours + DONE),
            ]
            if turn:  # the first turn fills the file cache
                for column, value in zip(found.values(), times, strict=True):
                    column.append(value)
    print(machine())
    for name, column in found.items():
        print(f"  {name:<24} {statistics.median(column):.3f} s   ({min(column):.3f} to {max(column):.3f})")
    later = [ours - bare for ours, bare in zip(found["first step, lockstep"], found["first step, bare"], strict=True)]
    print(f"  {'later than bare by':<24} {statistics.median(later):.3f} s")
    print(json.dumps({name: statistics.median(column) for name, column in found.items()}))


if __name__ == "__main__":
    main()
