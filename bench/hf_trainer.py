"""`python bench/hf_trainer.py`: ten kinds of Hugging Face scripts under their Trainer and under lockstep, or trl's.

Each has a tiny model and data that are made on the spot; none draws anything. A line a kind: the largest difference of
a step's loss, and the loss at the end. With `--accumulate 2` each step has two micro-batches: models that are told the
number of labels and do not use it then have the Trainer's loss twice as large (docs/hf-trainer.md).

`--trl` compares SFTTrainer, DPOTrainer and RewardTrainer of trl, and times a step: `--rounds` runs of each in turns,
the median of the steps after the first three, and the median of the rounds' ratios (below 1: lockstep is faster).
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import lockstep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "adapters"))
WARM_UP = 3  # steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=256, help="of the models of --trl")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    more = {"max_steps": asked.steps, "gradient_accumulation_steps": asked.accumulate}
    with tempfile.TemporaryDirectory() as folder:
        if asked.trl:
            compare_trl(Path(folder), asked, more)
        else:
            compare_kinds(Path(folder), more)


def compare_kinds(folder: Path, more: dict[str, Any]) -> None:
    """Print a line for each kind of the Trainer's scripts."""
    trainers = importlib.import_module("hf_trainers")
    print(f"{'kind':<22} {'largest difference':>18} {'first loss':>10} {'last loss':>10} {'theirs':>10}")
    kinds = trainers.KINDS | ({"sft": trainers.sft} if importlib.util.find_spec("trl") else {})
    for place, (kind, make) in enumerate(kinds.items()):
        with quiet():
            theirs = trainers.their_losses(make(folder / f"theirs-{place}", **more))
            config, task = lockstep.from_trainer(make(folder / f"ours-{place}", **more))
            ours = [step.loss for step in lockstep.Run(config, task)]
        off = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
        print(f"{kind:<22} {off:>18.1e} {ours[0]:>10.5f} {ours[-1]:>10.5f} {theirs[-1]:>10.5f}", flush=True)


def compare_trl(folder: Path, asked: argparse.Namespace, more: dict[str, Any]) -> None:
    """Print a line for each trainer of trl: losses, and times of a step in ms."""
    trainers = importlib.import_module("trl_trainers")
    trainers.TINY.update(hidden_size=asked.width, intermediate_size=2 * asked.width)
    kinds = {"sft": ("sft", {}), "sft, LoRA": ("sft", {"peft": True})}
    kinds |= {"dpo": ("dpo", {}), "dpo, LoRA": ("dpo", {"peft": True}), "reward": ("reward", {})}
    print(f"{'kind':<12} {'largest difference':>18} {'trl, ms':>9} {'lockstep, ms':>13} {'ratio':>7}")
    for kind, (name, options) in kinds.items():
        given = {**more, **options, "dtype": torch.float32, "held": False, "learning_rate": 1e-4}
        off, times = 0.0, list[tuple[float, float]]()
        for round_ in range(asked.rounds):
            with quiet():
                stamps = Stamps()
                trainer = trainers.KINDS[name](
                    folder / f"{kind}-{round_}-theirs", callbacks=[stamps.callback()], **given
                )
                theirs = importlib.import_module("hf_trainers").their_losses(trainer)
                config, task = lockstep.from_trainer(trainers.KINDS[name](folder / f"{kind}-{round_}-ours", **given))
                own, ours = Stamps(), list[float]()
                for step in lockstep.Run(config, task):
                    own.add()
                    ours.append(step.loss)
            off = max(off, *(abs(a - b) for a, b in zip(theirs, ours, strict=True)))
            times.append((stamps.median(), own.median()))
        ratio = statistics.median(ours / theirs for theirs, ours in times)
        theirs, ours = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"{kind:<12} {off:>18.1e} {theirs:>9.1f} {ours:>13.1f} {ratio:>7.2f}", flush=True)


class Stamps:
    """Times at which steps ended."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def add(self) -> None:
        self._times.append(time.perf_counter())

    def median(self) -> float:
        """Return the median time of a step after the first ones, in ms."""
        spans = [1000 * (after - before) for before, after in zip(self._times, self._times[1:], strict=False)]
        return statistics.median(spans[WARM_UP:])

    def callback(self) -> Any:
        """Return a callback for a Trainer that adds each step."""
        add = self.add

        class Each(importlib.import_module("transformers").TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *_: Any, **__: Any) -> None:
                add()

        return Each()


@contextlib.contextmanager
def quiet() -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


if __name__ == "__main__":
    main()
