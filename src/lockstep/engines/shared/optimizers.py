"""Which optimizer goes with which engine. The table stands in docs/engines.md; a test holds the two together.

An optimizer whose update of an element depends on that element alone goes with every engine. The others are listed
here, with what they need that an engine cannot give. One that is not torch's own is the user's to judge.
"""

from torch import nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError

__all__ = ["REFUSED", "check_embeddings", "check_optimizer"]

_CLOSURE = "it evaluates the loss several times a step, and the engine can repeat no pass"
_SPARSE = "it takes sparse gradients only, and the engine takes dense ones"
_WHOLE = "its update needs whole matrices, and the engine holds rows of them"
_IN_PLACE = "it sets single elements in place, which torch cannot do in a shard"

# class of torch.optim -> (engines that refuse it, why)
REFUSED = {
    "LBFGS": (("fsdp", "zero", "deepspeed", "data-parallel"), _CLOSURE),
    "SparseAdam": (("ddp", "fsdp", "zero", "deepspeed", "data-parallel"), _SPARSE),
    "Adafactor": (("fsdp", "deepspeed"), _WHOLE),
    "Rprop": (("fsdp",), _IN_PLACE),
    "Muon": (("fsdp", "deepspeed"), _WHOLE),
    "MuonAdamW": (("deepspeed",), _WHOLE),
}


def check_embeddings(engine: str, model: nn.Module, *, exact: bool, once: str) -> None:
    """Raise ConfigError for an embedding with sparse gradients where gradients must be dense.

    Args:
        exact: they are added up in a fixed tree.
        once: another flag under which they must be; "": there is none.
    """
    if engine == "single" and not exact and not once:
        return
    why = "--exact" if exact else once or f"--engine {engine}"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            where = f"{name}.weight".lstrip(".")
            raise ConfigError(
                f"the gradient of {where} is sparse, and {why} takes dense ones: make the embedding with "
                "sparse=False, or use --engine single without --exact"
            )


def check_optimizer(engine: str, optimizer: Optimizer, *, exact: bool) -> None:
    """Raises ConfigError where the optimizer does not go with the engine, or, among several ranks, with exact mode."""
    engines, why = next(
        (REFUSED[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in REFUSED), ((), "")
    )
    name = type(optimizer).__name__
    if engine in engines:
        raise ConfigError(f"--engine {engine} does not go with {name}: {why}; use AdamW, or see docs/engines.md")
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    if engine == "zero" and len(dtypes) > 1:
        shown = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(f"--engine zero: the parameters are {shown}, and it splits those of one dtype; use ddp")
    if engine == "deepspeed" and any(dtype.is_complex for dtype in dtypes):
        raise ConfigError("--engine deepspeed keeps parameters as real numbers, and some are complex; use --engine ddp")
    if engine == "deepspeed" and any(group.get("dampening") for group in optimizer.param_groups):
        # Its first step takes the whole gradient; under ZeRO the momentum is there before, as zeros.
        raise ConfigError(f"--engine deepspeed does not go with the dampening of {name}; use dampening=0, or ddp")
    if exact and engine == "fsdp" and any(group.get("fused") for group in optimizer.param_groups):
        raise ConfigError(
            f"--exact with --engine fsdp: the fused {name} rounds by an element's place in its shard; use fused=False"
        )
