"""The engines' names and options: what the configuration, the help and a wrong flag need, without torch.

The ground floor of `engines/`: the configuration stands on it, and it stands on `config/fields` alone.
"""

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from lockstep.config.fields import named
from lockstep.errors import ConfigError

__all__ = [
    "BOUNDS",
    "ENGINES",
    "LAUNCHER_FLAGS",
    "PLAIN",
    "EngineOptions",
    "from_launcher",
    "own_options",
]


class EngineSpec(NamedTuple):
    """What is to be known of an engine before it is imported.

    Attributes:
        one_process: whether it is a single process, whatever the world.
        everywhere: whether it needs no further package and no GPU.
        float64: whether it can update in float64.
        plain: whether it takes models that are neither compiled nor under autocast alone, or is at its best with them:
            what is automatic on a new GPU is off there.
        own_gradients: whether an update takes gradients that its backward kept, and none that were put in their place.
        shares: whether a forward and a backward take no other rank, so that ranks may have unequal shares of a step,
            and one can compute another's micro-batch.
        survives_loss: whether every rank holds all of the states, so that the others go on where one is lost.
        own_steps: whether a task may step its optimizers itself.
        block_norms: whether it takes the norm of each gradient.
        penalty: whether a term of the parameters alone can be added once a step.
        weight_copies: whether low-precision copies of the weights can stand in for them.
        remade: whether it can be made again around its model, when what is trained has changed.
        places_model: whether it puts the model on the device itself.
    """

    one_process: bool = False
    everywhere: bool = True
    float64: bool = True
    plain: bool = False
    own_gradients: bool = False
    shares: bool = False
    survives_loss: bool = False
    own_steps: bool = False
    block_norms: bool = False
    penalty: bool = True
    weight_copies: bool = False
    remade: bool = True
    places_model: bool = False


# `engines/registry.py` has the class of each.
ENGINES = {
    "single": EngineSpec(one_process=True, shares=True, own_steps=True, block_norms=True, weight_copies=True),
    "ddp": EngineSpec(shares=True, survives_loss=True, own_steps=True, block_norms=True),
    "fsdp": EngineSpec(block_norms=True, places_model=True),
    "zero": EngineSpec(shares=True, block_norms=True),
    "deepspeed": EngineSpec(
        everywhere=False, float64=False, plain=True, own_gradients=True, penalty=False, remade=False
    ),
    "data-parallel": EngineSpec(one_process=True, everywhere=False, plain=True),
}
PLAIN = "single"  # the one that splits nothing: what all others have to agree with


def _of(engines: str, default: Any, text: str, *choices: str) -> Any:
    """An option that these engines have, "ddp, zero"."""
    own = tuple(engines.split(", "))
    return field(default=default, metadata={"help": f"{engines}: {text}", "choices": choices, "engines": own})


_HALVES = ("bf16", "fp16")
_DTYPES = ("same", *_HALVES, "float32")


@named()
@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine splits the model. Its flags begin with `--engine.`; in a file the table is [engine_options].

    An engine refuses the options that it does not have, where they are set away from their default.
    """

    find_unused_parameters: str = _of(
        "single, ddp, zero, fsdp, data-parallel",
        "auto",
        "parameters that a backward may leave out; auto: the first step finds out",
        *("auto", "true", "false"),
    )
    static_graph: bool = _of("ddp, zero", False, "every step has the same graph")
    gradient_as_bucket_view: bool = _of("ddp, zero", True, "gradients lie in the buffers that are exchanged")
    bucket_cap_mb: float = _of("ddp, zero", 25.0, "size of these buffers, MiB")
    broadcast_buffers: bool = _of(
        "ddp, zero, fsdp, deepspeed",
        True,
        "rank 0's values of buffers that a forward writes go to all after each step",
    )
    compression: str = _of("ddp, zero", "none", "dtype in which gradients are exchanged", "none", *_HALVES)
    sharding: str = _of("fsdp", "full", "what is split, and among whom", "full", "grad-op", "hybrid", "none")
    shard_size: int = _of("fsdp", 0, "hybrid: processes that share one copy of the model; 0: those of a node")
    accumulate: str = _of(
        "fsdp",
        "nosync",
        "keep full gradients until the last micro-batch, or scatter each one's",
        *("nosync", "shard"),
    )
    cpu_offload: bool = _of(
        "fsdp, deepspeed", False, "optimizer states lie in host memory; fsdp: parameters and gradients too"
    )
    param_dtype: str = _of("fsdp", "same", "dtype of gathered parameters", *_DTYPES)
    reduce_dtype: str = _of("fsdp", "same", "dtype in which gradients are summed", *_DTYPES)
    output_dtype: str = _of("fsdp", "same", "dtype of the model's output", *_DTYPES)
    prefetch: int = _of("fsdp", 0, "blocks gathered ahead; 0: the next one, by itself")
    meta_init: bool = _of("fsdp", False, "rank 0 alone draws the weights, the others receive their shards")
    config: str = _of("deepspeed", "", "a DeepSpeed JSON file; what contradicts a flag is refused")
    zero_stage: int = _of("deepspeed", -1, "ZeRO stage, 0 to 3; -1: the file's, else 2")


# option -> (least, most, what it must be)
BOUNDS: dict[str, tuple[float, float, str]] = {
    "bucket_cap_mb": (0.001, 10**6, "a number of MiB above 0"),
    "shard_size": (0, 10**6, "a number of processes, or 0 for those of a node"),
    "prefetch": (0, 1000, "a number of blocks, or 0"),
    "zero_stage": (-1, 3, "a stage from 0 to 3, or -1 for the configuration's"),
}


def own_options(name: str) -> list[str]:
    """The options that the engine has."""
    return [spec.name for spec in fields(EngineOptions) if name in spec.metadata["engines"]]


# What the `deepspeed` launcher and scripts written for it bring -> what argparse is to do with it.
LAUNCHER_FLAGS: dict[str, dict[str, Any]] = {
    "local_rank": {"type": int},
    "deepspeed": {"action": "store_true"},
    "deepspeed_config": {"metavar": "FILE"},
}


def from_launcher(given: dict[str, Any]) -> None:
    """Turns LAUNCHER_FLAGS into ours, in `given`.

    Raises:
        ConfigError: they contradict each other.
    """
    given.pop("local_rank", None)  # the environment says the same
    wanted, file = given.pop("deepspeed", False), given.pop("deepspeed_config", None)
    if (wanted or file) and given.setdefault("engine", "deepspeed") != "deepspeed":
        raise ConfigError(f"--deepspeed and --engine {given['engine']} contradict each other; leave one out")
    if file and given.setdefault("engine_options.config", file) != file:
        raise ConfigError("--deepspeed_config and --engine.config name two files; leave one out")
