"""`python bench/hf_trainer.py`: ten kinds of Hugging Face scripts, and trl's SFTTrainer where it is installed, under
their Trainer and under lockstep.

Each has a tiny model and data that are made on the spot; none draws anything. A line a kind: the largest difference of
a step's loss, and the loss at the end. With `--accumulate 2` each step has two micro-batches: models that are told the
number of labels and do not use it then have the Trainer's loss twice as large (docs/hf-trainer.md).
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import sys
import tempfile
from pathlib import Path

import torch

import lockstep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tasks"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=1)
    asked = parser.parse_args()
    trainers = importlib.import_module("hf_trainers")
    torch.set_num_threads(1)
    more = {"max_steps": asked.steps, "gradient_accumulation_steps": asked.accumulate}
    print(f"{'kind':<22} {'largest difference':>18} {'first loss':>10} {'last loss':>10} {'theirs':>10}")
    with tempfile.TemporaryDirectory() as folder:
        kinds = trainers.KINDS | ({"sft": trainers.sft} if importlib.util.find_spec("trl") else {})
        for place, (kind, make) in enumerate(kinds.items()):
            quiet = io.StringIO()
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                theirs = trainers.their_losses(make(Path(folder, f"theirs-{place}"), **more))
                config, task = lockstep.from_trainer(make(Path(folder, f"ours-{place}"), **more))
                ours = [step.loss for step in lockstep.Run(config, task)]
            off = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
            print(f"{kind:<22} {off:>18.1e} {ours[0]:>10.5f} {ours[-1]:>10.5f} {theirs[-1]:>10.5f}", flush=True)


if __name__ == "__main__":
    main()
