"""`--micro-batch-size auto` on a device that the default one does not fit: the largest that does, by `lockstep plan`.

    config = fitted(config, state, world, own_task, say)

A new run alone asks, and only on a CUDA device, where an upper bound does not show that the default fits anyway. What
it is told stands in the run's config and in its checkpoints, so that a resume has the same, on another device and at
another world size too.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.config import options
from lockstep.config.config import Config, default_micro_batch_size, is_auto
from lockstep.distributed.world import World
from lockstep.run.memory_bound import memory_bound

__all__ = ["asked", "fitted"]

_PATIENCE = 300.0  # seconds
_PLAIN = 0.5  # of a device's memory: where a bound is below it, the default size fits plainly
_LIKE = "h100-80"  # whose name stands for a device with the memory that is given


def fitted(
    config: Config,
    state: Mapping[str, Any],
    world: World,
    own_task: bool,
    say: Callable[[str], None],
    ask: Callable[[Config, int, float], int] | None = None,
) -> Config:
    """The config, its micro-batch size settled where a checkpoint says it, or the default one does not fit. Collective.

    Args:
        state: of the checkpoint that the run goes on from.
        own_task: the task is an object of the caller's, which no other process can make.
        ask: (config, ranks, bytes) -> the largest size that fits, 0 where the default does or nothing is known; None:
            `asked`, on the memory of the smallest device.
    """
    if not is_auto(config, "micro_batch_size"):
        return config
    plan = state.get("plan", {})
    if plan:
        same = plan.get("batch_size") == config.batch_size
        return dataclasses.replace(config, micro_batch_size=plan["micro_batch_size"]) if same else config
    if world.device.type != "cuda" or own_task:
        return config
    room = min(world.gather(_memory(world.device) if ask is None else 0.0))  # collective
    bound = memory_bound(config, default_micro_batch_size(config.batch_size))
    if bound is not None and bound < _PLAIN * room:
        return config
    say(
        "--micro-batch-size auto: `lockstep plan` computes whether the default size fits this device, in a process of "
        "its own; --micro-batch-size N does without"
    )
    size = world.gather((ask or asked)(config, world.size, room) if world.is_main else 0)[0]  # collective
    if not size:
        return config
    say(
        f"--micro-batch-size auto: {size}, since a larger one does not fit this device by `lockstep plan`; it is kept "
        "for this run"
    )
    return dataclasses.replace(config, micro_batch_size=size)


def _memory(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory)


def asked(config: Config, ranks: int, room: float) -> int:
    """What `lockstep plan` says in a process of its own, without a device: the largest size that fits where the default
    one does not; 0 where that fits, where none does, or where it cannot be planned."""
    apart = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    own = {name: value for name, value in os.environ.items() if name not in apart and "TORCHELASTIC" not in name}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(options.to_toml(dataclasses.replace(config, compile=False)), encoding="utf-8")
        command = [sys.executable, "-m", "lockstep", "plan", "--config", str(file), "--fast", "--json"]
        command += ["--world-size", str(ranks), "--device", _LIKE, "--memory", f"{room / 2**30:.4f}GiB"]
        try:
            done = subprocess.run(
                command,
                env={**own, "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
                check=False,
            )
            found = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            return 0
    return 0 if found["fits"] else int(found["largest"]["micro_batch_size"] or 0)
