"""Try rising learning rates, and print where the loss falls fastest: python examples/find_lr.py

Put your task in place of Spirals, and give the flags of its training, which are those of `lockstep train`.
"""

import numpy as np
from own_task import Spirals

import lockstep

LOWEST = 1e-7
HIGHEST = 10.0
STEPS = 100
WINDOW = 9  # steps to average, since a single batch may be hard


class Rising(Spirals):
    """The task, with a rate that grows by the same factor in each step."""

    def schedule(self, step, steps):
        return (HIGHEST / LOWEST) ** (step / max(1, steps - 1))


def main():
    guards = {"nonfinite": "skip", "spike": "off"}  # the rates are meant to become too high
    defaults = {"experiment_name": "find-lr", "batch_size": 256, "log_freq": STEPS, "checkpoint": {"mode": "none"}}
    config = lockstep.Config.from_args(lr=LOWEST, max_steps=STEPS, guards=guards, **defaults)
    rates = []
    losses = []
    with lockstep.Run(config, Rising()) as run:
        for step in run:
            rates.append(step.lr)
            losses.append(step.loss)  # on every rank: it is the mean over all of them
            if run.is_main:
                print(f"rate {rates[-1]:.1e} loss {losses[-1]:.4f}")
            if not losses[-1] - min(losses) < 2 * abs(losses[0]):  # diverged, or NaN
                run.abandon()
    smoothed = np.convolve(losses, np.full(WINDOW, 1 / WINDOW), "valid")
    lowest = int(np.argmin(smoothed))
    answer = "the loss falls at no rate: check the data, the labels and the loss"
    if lowest > 0:
        fastest = int(np.argmin(np.diff(smoothed[: lowest + 1]))) + WINDOW // 2
        answer = f"the loss falls fastest at a rate of {rates[fastest]:.1e}"
    if run.is_main:
        print(answer)
    raise SystemExit(run.result.exit_code)


if __name__ == "__main__":
    main()
