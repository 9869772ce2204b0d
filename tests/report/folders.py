"""Folders as runs leave them, written by hand: for what a report makes of them."""

import json


def made(folder, records=(), **files):
    """A run's folder with these records; files by name with "_" for ".": dicts become JSON, text stays."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def records(count, loss=lambda step: 3.0 + 5.0 / (step + 1), freq=10, **more):
    """Training records of `count` windows of `freq` steps."""
    for window in range(1, count + 1):
        step = window * freq
        plain = {"epoch": 0, "epoch_progress": 0.5, "num_batches_remaining": 3, "lr": 1e-3, "grad_norm": 1.0 + 1 / step}
        times = {"time/data": 1.0, "time/forward": 5.0, "time/backward": 10.0, "time/total": 16.0}
        yield {"global_step": step, **plain, "running_loss": loss(step), "memory": 1 << 30, **times, **more}


def state(step=100, seed=0, **more):
    """state.json of a run that has a plan."""
    plan = {"seed": seed, "batch_size": 8, "samples": 40, "dataset_samples": 40, "data": "", "task": "T", "steps": step}
    return {"global_step": step, "plan": plan, "world_size": 2, **more}
