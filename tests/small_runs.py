"""A small run's configuration, and what its folder holds at the end."""

from lockstep import checkpoint
from lockstep.config.schema import Config


def config(folder, **changes):
    settings = {"experiment_name": "r", "batch_size": 8, "micro_batch_size": 2, "log_freq": 2, "ckpt_freq": 3}
    return Config(**settings | {"save_dir": str(folder), "max_steps": 12, "lr": 0.01, "precision": "float64"} | changes)


def mark(folder, name="r"):
    path = folder / name
    newest = checkpoint.newest(path, say=print)
    return checkpoint.fingerprint(newest), checkpoint.read_state(newest)["running_loss"]
