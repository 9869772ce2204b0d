"""The tensor plan of a model of `transformers`, from the one that comes with its architecture.

    cut(model, mesh, tensor_plan(model, degree))

The plan is read by name and applied with lockstep's own layers. Those of `transformers` sum the gradient of a head's
norm by a hook on `.grad`, which multiplies the gradients of earlier micro-batches again (`transformers` 5.23,
distributed/tensor_parallel.py: ReplicatedWithGradAllReduce).
"""

from typing import Any

from torch import nn

from lockstep.errors import ConfigError
from lockstep.tensors import reaches

__all__ = ["tensor_plan"]


# The styles of `transformers` that mean the same as a word of `parallel.tensor`.
_WORDS = {"colwise": "columns", "rowwise": "rows", "replicated_with_grad_allreduce": "replicated"}
# Numbers of heads in a configuration.
_HEADS = ("num_attention_heads", "num_key_value_heads")


def tensor_plan(model: Any, degree: int, *, vocabulary: bool = True) -> dict[str, str]:
    """Return how a causal language model is cut over `degree` ranks, see `parallel.tensor.cut`.

    Args:
        model: whole, from `transformers`.
        degree: number of ranks.
        vocabulary: cut the token table and the head too.

    Raises:
        ConfigError: the architecture has no plan or one of other styles, the degree does not divide its heads or its
            vocabulary, or it has dropout in attention.
    """
    flag = f"--parallel.tensor {degree}: {type(model).__name__}"
    config = model.config
    # Models of several towers have a plan for each of them, and none of their own.
    theirs = getattr(config, "base_model_tp_plan", None)
    if not theirs:
        raise ConfigError(f"{flag} has no plan for tensor parallelism in transformers; use --engine fsdp")
    for name in _HEADS:
        heads = getattr(config, name, None) or degree
        if heads % degree:
            raise ConfigError(f"{flag} has {name} {heads}; use a degree that divides it")
    if getattr(config, "attention_dropout", 0):
        raise ConfigError(
            f"{flag} has attention_dropout {config.attention_dropout}, whose draws would depend on the degree; set it "
            "to 0"
        )
    names = [name for name, _ in model.base_model.named_modules() if name]
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    plan = {}
    for pattern, style in theirs.items():
        # A family's plan may name layers that only some of its models have.
        if not any(reaches(pattern, name) for name in names):
            continue
        if style not in _WORDS:
            raise ConfigError(f"{flag} plans {pattern} as '{style}', which is not supported; use --engine fsdp")
        plan[prefix + pattern] = _WORDS[style]
    return plan | _vocabulary_plan(model, degree, flag) if vocabulary else plan


def _vocabulary_plan(model: Any, degree: int, flag: str) -> dict[str, str]:
    """Return the plan of the token table and the head."""
    plan = {}
    tables: tuple[nn.Module | None, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if module in tables:
            plan[name] = "vocabulary"
            tokens = module.weight.shape[0]
            if tokens % degree:
                raise ConfigError(
                    f"{flag} has a vocabulary of {tokens} tokens; use a degree that divides it, or "
                    "--parallel.vocabulary false"
                )
    return plan
