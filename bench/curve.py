"""The picture of a run's loss: python bench/curve.py outputs/first-light docs/first-light.svg"""

import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from lockstep.logging.jsonl import read


def main(run, out):
    records = read(Path(run) / "metrics.jsonl")
    training = [(r["global_step"], r["running_loss"]) for r in records if "running_loss" in r]
    evaluation = [(r["global_step"], r["evaluation/loss"]) for r in records if "evaluation/loss" in r]
    matplotlib.rcParams["svg.hashsalt"] = "lockstep"  # the same run gives the same file
    figure = Figure(figsize=(7, 3))
    axes = figure.subplots()
    axes.plot(*zip(*training, strict=True), label="training", linewidth=1.5)
    axes.plot(*zip(*evaluation, strict=True), "o", label="evaluation", markersize=5)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="make train: a GPT of 1.35M parameters on two cores")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
