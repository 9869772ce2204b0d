"""Define the engines' names, abilities and options, without torch.

The configuration, the help and the errors need them. `engines/registry.py` loads an engine's class by its entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from lockstep.config.fields import FieldError, FieldName, suggest_fields
from lockstep.errors import ConfigError

__all__ = [
    "BOUNDS",
    "ENGINES",
    "LAUNCHER_FLAGS",
    "PLAIN",
    "EngineOptions",
    "check_quantized",
    "own_options",
    "translate_launcher_flags",
]


_CLOSURE = "it evaluates the loss several times a step, and the engine cannot repeat a pass"
_SPARSE = "it takes sparse gradients only, and the engine takes dense ones"
_WHOLE = "its update needs whole matrices, and the engine holds rows of them"
_IN_PLACE = "it sets single elements in place, which torch cannot do in a shard"


class EngineEntry(NamedTuple):
    """Abilities of an engine, known before its module is loaded.

    Attributes:
        path: its module within `lockstep.engines`, and its class: "fsdp.engine:FSDP".
        one_process: it runs in one process at any world size.
        everywhere: it needs no further package and no GPU.
        float64: it can update in float64.
        plain: it needs, or is fastest with, models that are neither compiled nor under autocast: "auto" is off.
        own_gradients: its update uses the gradients that its backward stored, and ignores replaced ones.
        shares: a forward and backward involve no other rank, so ranks may have unequal shares of a step, and one can
            compute another's micro-batch.
        survives_loss: its states can be on several ranks, or on several groups of ranks (`BareEngine.replica_size`), so
            that the others can go on if one is lost.
        replicas: several ranks may hold one model between them (`World.replica`).
        stages: the model may be a stage of a pipeline.
        own_steps: a task may step its optimizers itself.
        block_norms: it can measure the norm of each gradient.
        penalty: a term of the parameters alone can be added once a step.
        exact_penalty: so it can in exact mode.
        weight_copies: low-precision copies can replace the weights in a forward.
        remade: it can be built again around its model, when the trained parameters have changed.
        places_model: it moves the model to the device itself.
        sparse_gradients: an embedding may have sparse gradients, without `--exact`.
        quantized: values of --model.load-in whose frozen weights it can hold, besides "full".
        refused: optimizer classes of torch that do not work with it -> why. docs/engines.md has the same table.
    """

    path: str
    one_process: bool = False
    everywhere: bool = True
    float64: bool = True
    plain: bool = False
    own_gradients: bool = False
    shares: bool = False
    survives_loss: bool = False
    replicas: bool = False
    stages: bool = False
    own_steps: bool = False
    block_norms: bool = False
    penalty: bool = True
    exact_penalty: bool = True
    weight_copies: bool = False
    remade: bool = True
    places_model: bool = False
    sparse_gradients: bool = False
    quantized: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}


_BITS = ("4bit", "8bit")
ENGINES = {
    "single": EngineEntry(
        "single:Single",
        one_process=True,
        shares=True,
        own_steps=True,
        block_norms=True,
        weight_copies=True,
        sparse_gradients=True,
        quantized=_BITS,
    ),
    "ddp": EngineEntry(
        "ddp:DDP",
        shares=True,
        survives_loss=True,
        replicas=True,
        stages=True,
        own_steps=True,
        block_norms=True,
        quantized=_BITS,
        refused={"SparseAdam": _SPARSE},
    ),
    "fsdp": EngineEntry(
        "fsdp.engine:FSDP",
        survives_loss=True,
        replicas=True,
        block_norms=True,
        exact_penalty=False,
        places_model=True,
        quantized=("4bit",),
        refused={
            "LBFGS": _CLOSURE,
            "SparseAdam": _SPARSE,
            "Adafactor": _WHOLE,
            "Rprop": _IN_PLACE,
            "Muon": _WHOLE,
        },
    ),
    "zero": EngineEntry(
        "zero:Zero",
        shares=True,
        block_norms=True,
        quantized=_BITS,
        refused={"LBFGS": _CLOSURE, "SparseAdam": _SPARSE},
    ),
    "deepspeed": EngineEntry(
        "deepspeed.engine:DeepSpeed",
        everywhere=False,
        float64=False,
        plain=True,
        own_gradients=True,
        penalty=False,
        remade=False,
        refused={
            "LBFGS": _CLOSURE,
            "SparseAdam": _SPARSE,
            "Adafactor": _WHOLE,
            "Muon": _WHOLE,
            "MuonAdamW": _WHOLE,
        },
    ),
    "data-parallel": EngineEntry(
        "data_parallel:DataParallel",
        one_process=True,
        everywhere=False,
        plain=True,
        refused={"LBFGS": _CLOSURE, "SparseAdam": _SPARSE},
    ),
}
# It splits nothing, and is the reference for all others.
PLAIN = "single"


def _engine_option(engines: str, default: Any, text: str, *choices: str) -> Any:
    """Define an option of these engines, "ddp, zero"."""
    names = tuple(engines.split(", "))
    return field(default=default, metadata={"help": f"{engines}: {text}", "choices": choices, "engines": names})


_HALVES = ("bf16", "fp16")
_DTYPES = ("same", *_HALVES, "float32")


@suggest_fields()
@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engines, with flags `--engine.` and the table [engine_options].

    An engine refuses an option that it does not have, unless it has its default.
    """

    find_unused_parameters: str = _engine_option(
        "single, ddp, zero, fsdp, data-parallel",
        "auto",
        "a backward pass may leave parameters without a gradient; auto: the first step finds out",
        *("auto", "true", "false"),
    )
    static_graph: bool = _engine_option("ddp, zero", False, "the graph is the same in every step")
    gradient_as_bucket_view: bool = _engine_option(
        "ddp, zero", True, "gradients are views of the communication buckets"
    )
    bucket_cap_mb: float = _engine_option("ddp, zero", 25.0, "size of these buckets, MiB")
    broadcast_buffers: bool = _engine_option(
        "ddp, zero, fsdp, deepspeed",
        True,
        "broadcast rank 0's buffers that a forward pass changes, after each step",
    )
    compression: str = _engine_option("ddp, zero", "none", "dtype in which gradients are exchanged", "none", *_HALVES)
    sharding: str = _engine_option(
        "fsdp", "full", "what is sharded, and over which ranks", "full", "grad-op", "hybrid", "none"
    )
    shard_size: int = _engine_option(
        "fsdp", 0, "hybrid: processes that share one copy of the model; 0: those of a node"
    )
    accumulate: str = _engine_option(
        "fsdp",
        "nosync",
        "nosync: keep full gradients until the last micro-batch; shard: scatter those of each micro-batch",
        *("nosync", "shard"),
    )
    cpu_offload: bool = _engine_option(
        "fsdp, deepspeed", False, "keep optimizer states in host memory; fsdp: parameters and gradients too"
    )
    param_dtype: str = _engine_option("fsdp", "same", "dtype of gathered parameters", *_DTYPES)
    reduce_dtype: str = _engine_option("fsdp", "same", "dtype in which gradients are summed", *_DTYPES)
    output_dtype: str = _engine_option("fsdp", "same", "dtype of the model's output", *_DTYPES)
    prefetch: int = _engine_option("fsdp", 0, "blocks to gather ahead; 0: the next one, as FSDP does by itself")
    meta_init: bool = _engine_option(
        "fsdp", False, "initialize weights on rank 0 only and send the other ranks their shards"
    )
    config: str = _engine_option("deepspeed", "", "a DeepSpeed JSON file; it must not contradict a flag")
    zero_stage: int = _engine_option("deepspeed", -1, "ZeRO stage, 0 to 3; -1: that of the file, else 2")


# option -> (least, most, what it must be)
BOUNDS: dict[str, tuple[float, float, str]] = {
    "bucket_cap_mb": (0.001, 10**6, "a number of MiB above 0"),
    "shard_size": (0, 10**6, "a number of processes, or 0 for those of a node"),
    "prefetch": (0, 1000, "a number of blocks, or 0"),
    "zero_stage": (-1, 3, "a stage from 0 to 3, or -1 for that of the file"),
}


# These move or cast weights without their scales.
_WHOLE_ONLY = ("cpu_offload", "param_dtype", "meta_init")


def check_quantized(bits: str, engine: str, options: EngineOptions) -> None:
    """Check that an engine can hold quantized weights.

    Args:
        bits: "4bit" or "8bit".
        engine: its name; "auto" is always able.
        options: its options.

    Raises:
        FieldError: it cannot, or not with one of these options.
    """
    name = FieldName("model.load_in")
    if engine in ENGINES and bits not in ENGINES[engine].quantized:
        able = ", ".join(engine_name for engine_name, spec in ENGINES.items() if bits in spec.quantized)
        raise FieldError(name, f" {bits} does not work with ", FieldName("engine"), f" {engine}: use one of {able}")
    plain = EngineOptions()
    for option in _WHOLE_ONLY:
        if getattr(options, option) != getattr(plain, option):
            field_name = FieldName(f"engine_options.{option}")
            raise FieldError(field_name, " does not work with ", name, f" {bits}, as it leaves out scales: remove it")


def own_options(name: str) -> list[str]:
    """Return the names of the engine's options."""
    names = []
    for spec in fields(EngineOptions):
        if name in spec.metadata["engines"]:
            names.append(spec.name)
    return names


# Flags of the `deepspeed` launcher and of scripts written for it -> arguments of `add_argument`.
LAUNCHER_FLAGS: dict[str, dict[str, Any]] = {
    "local_rank": {"type": int},
    "deepspeed": {"action": "store_true"},
    "deepspeed_config": {"metavar": "FILE"},
}


def translate_launcher_flags(values: dict[str, Any]) -> None:
    """Replace LAUNCHER_FLAGS in `values` by options of lockstep.

    Raises:
        ConfigError: they contradict each other.
    """
    # The environment has it too.
    values.pop("local_rank", None)
    deepspeed = values.pop("deepspeed", False)
    file = values.pop("deepspeed_config", None)
    if (deepspeed or file) and values.setdefault("engine", "deepspeed") != "deepspeed":
        raise ConfigError(f"--deepspeed and --engine {values['engine']} contradict each other; remove one")
    if file and values.setdefault("engine_options.config", file) != file:
        raise ConfigError("--deepspeed_config and --engine.config name two files; remove one")
