"""What --precision auto and --compile auto stand for: by the devices of all ranks, and what a run was begun with.

    config = on_device(config, state, world, say)

On CUDA devices of sm80 or newer bf16 and compile are the default, since float32 and eager code reach a few percent of
what such a device can do; elsewhere float32 and eager code.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lockstep.config.config import Config, is_auto
from lockstep.distributed.world import World
from lockstep.engines.make import name_of
from lockstep.engines.options import ENGINES

__all__ = ["NEW", "capability", "on_device"]

NEW = (8, 0)  # Ampere: the first that multiplies bfloat16


def on_device(config: Config, state: Mapping[str, Any], world: World, say: Callable[[str], None]) -> Config:
    """The config with these two settled, alike on every rank: the weakest device decides. Collective.

    Args:
        state: of the checkpoint that the run goes on from: what it was begun with stays, whatever the device.
        say: takes the one line about it.
    """
    open_ones = [name for name in ("precision", "compile") if _is_open(config, name)]
    if not open_ones:
        return config
    plan = state.get("plan", {})
    new = _all_new(config, world)
    suited = {"precision": "bf16" if new else "float32", "compile": new}
    # A run that is older than these defaults was begun without them.
    begun = {"precision": plan.get("precision", "float32"), "compile": bool(state.get("compile"))} if plan else suited
    values: dict[str, Any] = {name: begun[name] for name in open_ones}
    if any(values[name] != suited[name] for name in open_ones):
        say(f"as the run was begun: {_flags(values)}; the default of this device is {_flags(_of(suited, open_ones))}")
    elif new:
        other = _of({"precision": "float32", "compile": False}, open_ones)
        say(f"device default: {_flags(values)}; {_flags(other)} for the other")
    return dataclasses.replace(config, **values)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Of a CUDA device; None of any other, whose numbers mean other things."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


def _all_new(config: Config, world: World) -> bool:
    own = capability(world.device)
    every = world.gather(own is not None and own >= NEW)  # collective
    return all(every) and not ENGINES[name_of(config.engine, world)].plain


def _is_open(config: Config, name: str) -> bool:
    return is_auto(config, name) or getattr(config, name) == "auto"


def _of(values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _flags(values: Mapping[str, Any]) -> str:
    """`--precision bf16 --compile`."""
    said = {True: "--compile", False: "--no-compile"}
    return " ".join(said[value] if name == "compile" else f"--{name} {value}" for name, value in values.items())
