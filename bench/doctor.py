"""Clean runs of `lockstep doctor`: how many raise an alarm, and how long each takes.

    python bench/doctor.py --runs 50 --processes 1,2

Prints a line for each number of processes, and every alarm. Exit code 1 where there is one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TASK = """
import torch, lockstep
from torch import nn
from torch.nn import functional as F

class Digits(lockstep.Task):
    def model(self): return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    def dataset(self, split):
        torch.manual_seed(0)
        return torch.utils.data.TensorDataset(torch.randn(2048, 8, 8), torch.randint(10, (2048,)))
    def loss(self, model, batch): return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
"""


def examined(folder, processes):
    """The report of one run, as a dict; {} where it gave none."""
    doctor = ["doctor", "--json", "--task", f"{folder}/digits.py:Digits", "--save-dir", str(folder)]
    launch = ["launch", "--nproc-per-node", str(processes), "--"] if processes > 1 else []
    command = [sys.executable, "-m", "lockstep", *launch, *doctor]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=dict(os.environ))
    try:
        return json.loads(done.stdout)
    except ValueError:
        print(f"  no report: {done.stdout[-300:]}{done.stderr[-300:]}")
        return {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--processes", default="1,2")
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "digits.py").write_text(TASK)
        for processes in map(int, given.processes.split(",")):
            alarms, seconds = 0, []
            for number in range(given.runs):
                found = examined(folder, processes)
                seconds.append(found.get("seconds", 0.0))
                said = [each for each in found.get("findings", ()) if each["level"] != "ok"]
                alarms += bool(said) or not found
                for each in said:
                    print(f"  run {number}: {each['level']} {each['check']}: {each['text']}", flush=True)
            wrong += alarms
            middle, most = statistics.median(seconds), max(seconds)
            print(f"{processes} processes: {alarms} of {given.runs} runs with an alarm", end="; ")
            print(f"{middle:.1f} s each, {most:.1f} at most", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
