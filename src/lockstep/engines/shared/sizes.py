"""What engines hold and send, by arithmetic: for `lockstep plan`, before any of them is made.

for name, options in variants(size, given): ...
gathered, summed = exchanged(name, options, parameters, trained)
"""

import dataclasses
from collections.abc import Iterator

from lockstep.engines.deepspeed_file import read_json
from lockstep.engines.options import ENGINES, EngineOptions, own_options
from lockstep.errors import ConfigError

__all__ = ["check_planned", "exchanged", "least_held", "variants"]

_SPLIT = ("full", "grad-op")


def variants(size: int, given: EngineOptions) -> Iterator[tuple[str, EngineOptions]]:
    """The engines that `size` processes can have and that can be traced, each in its ways of splitting a model.

    Args:
        given: the options that were asked for; each engine takes those that it has.
    """
    for name, entry in ENGINES.items():
        if not entry.everywhere or entry.one_process != (size == 1):
            continue
        own = EngineOptions(**{option: getattr(given, option) for option in own_options(name)})
        if "sharding" not in own_options(name) or own.sharding not in _SPLIT:
            yield name, own
            continue
        for sharding in _SPLIT:
            yield name, dataclasses.replace(own, sharding=sharding)


def check_planned(name: str, options: EngineOptions) -> None:
    """Raises ConfigError for an engine, or a way of it, whose memory cannot be told without its devices."""
    if name == "data-parallel":
        raise ConfigError(
            "--engine data-parallel cannot be planned: one process copies the model to all of its GPUs in each "
            "forward; plan --engine ddp, which is better too"
        )
    if "zero_stage" not in own_options(name):
        return
    zero = read_json(options.config).get("zero_optimization", {})
    zero = zero if isinstance(zero, dict) else {}
    if options.zero_stage == 3 or (options.zero_stage < 0 and zero.get("stage") == 3):
        raise ConfigError(
            f"--engine {name} cannot be planned in stage 3: it asks the other ranks for numbers in each forward; plan "
            "--engine fsdp, which splits the same"
        )
    offload = zero.get("offload_optimizer")
    if options.cpu_offload or (isinstance(offload, dict) and offload.get("device", "cpu") != "none"):
        raise ConfigError(
            f"--engine {name} cannot be planned with states in host memory: a trace has one memory; plan it without"
        )


def exchanged(name: str, options: EngineOptions, parameters: float, trained: float) -> tuple[float, float]:
    """Bytes that a rank gathers for each micro-batch, and bytes whose sum over all ranks it takes part in, a step.

    Args:
        parameters, trained: bytes of the model's parameters, and of those that are trained.
    """
    if name == "fsdp" and options.sharding in ("full", "hybrid"):
        return 2 * parameters, trained / 2  # for the forward and the backward; a reduce-scatter is half of a sum
    if name == "fsdp":
        return parameters, trained / 2
    if name == "zero":
        return 0.0, 1.5 * trained  # the owners' broadcasts besides
    return 0.0, trained


def least_held(name: str, options: EngineOptions, size: int, held: tuple[float, float, float]) -> float:
    """Bytes that a rank holds at least at the end of a backward: what does not fit then need not be traced.

    Args:
        held: bytes of parameters, gradients and optimizer states of the whole model.
    """
    parameters, gradients, states = held
    if name == "fsdp" and options.sharding != "none":
        size = options.shard_size or size
        return (parameters + gradients + states) / size
    return parameters + gradients + (states / size if name == "zero" else states)
