"""Several runs in one process, and the best of them: python examples/sweep.py --max-steps 300

Each run has a name, so a sweep that was interrupted goes on: what is finished is told, not trained again. On several
processes: lockstep launch --nproc-per-node 2 -- examples/sweep.py. `lockstep runs outputs/sweep` shows a table.
"""

import dataclasses

from own_task import Spirals

import lockstep

RATES = (1e-3, 1e-2, 1e-1)


def main():
    base = lockstep.Config.from_args(save_dir="outputs/sweep", max_steps=400, batch_size=64, log_freq=100)
    found = {}
    for lr in RATES:
        config = dataclasses.replace(base, lr=lr, experiment_name=f"lr-{lr:g}")
        result = lockstep.train(config, Spirals())
        found[lr] = result.best
    lr, best = min(found.items(), key=lambda each: each[1].loss)
    model = lockstep.load(f"{base.save_dir}/lr-{lr:g}", Spirals())
    if result.is_main:  # once, not once per rank
        count = sum(p.numel() for p in model.parameters())
        print(f"best: lr {lr:g}, evaluation loss {best.loss:.4f}, {count} parameters")


if __name__ == "__main__":
    main()
