"""Choose the kernel of `scaled_dot_product_attention`, and explain why not another.

order = order_of(facts_of(device), masked=False)             # what "auto" comes to
model = attention(model, "auto", model.blocks, order)
line = describe(model, "auto", torch.bfloat16, device, order)
# "attention: flash (12 heads of 64, bfloat16, causal, no mask); not cudnn: ..."

"auto" keeps torch's own order except for cuDNN, whose attention is the fastest on Hopper (1.7 to 2.3 times,
huggingface/transformers#48163) and has had faults: see `order_of`.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.errors import ConfigError

__all__ = [
    "attention",
    "describe",
    "facts_of",
    "order_of",
]

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NAMES = {int(backend.value): name for name, backend in _BACKENDS.items()}


# Above this version of cuDNN torch puts it first on Hopper, because of out-of-bounds reads before (pytorch#171627).
_CUDNN_FIRST = 91500
# From this version on cuDNN's backward with a mask has no NaN on Hopper (pytorch#196678).
_CUDNN_MASKS = 92600


class AttentionFacts(NamedTuple):
    """The facts that decide the kernels.

    Attributes:
        capability: of the CUDA device; (0, 0) for any other device.
        cudnn: its version in torch's form, 91500 for 9.15.0; 0 without cuDNN.
        deterministic: torch must use deterministic algorithms.
    """

    capability: tuple[int, int]
    cudnn: int
    deterministic: bool


class KernelOrder(NamedTuple):
    """The kernels that attention may use, best first; () for torch's own order.

    Attributes:
        names: of the kernels.
        without: (kernel, why it is left out, or why torch does not try it first).
    """

    names: tuple[str, ...] = ()
    without: tuple[tuple[str, str], ...] = ()


AS_TORCH = KernelOrder()


def facts_of(device: torch.device) -> AttentionFacts:
    """Query the facts of a device in this process."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    if device.type != "cuda" or torch.version.hip:
        return AttentionFacts((0, 0), 0, deterministic)
    # torch gives the method no types.
    version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return AttentionFacts(torch.cuda.get_device_capability(device), int(version), deterministic)


def order_of(facts: AttentionFacts, *, masked: bool | None) -> KernelOrder:
    """Choose the kernels of `--attention auto` on a device.

    Without a mask cuDNN is first on Hopper (sm90) above 9.15.0; torch does so itself, except in builds for older CUDA.
    It is left out under deterministic algorithms, which refuse it, and on Hopper before 9.26 if there is or may be a
    mask, since torch would choose it. From 9.26 on, a model that may have masks uses torch's own order.

    Its NaN gradients for a single query (NVIDIA/cudnn-frontend#1072, in 9.26 too) need no rule: they occur with one
    query over many keys. Without a mask lockstep puts cuDNN first only for causal language models, which in training
    have as many keys as queries. Generation has one query, but no gradients.

    Args:
        facts: see `facts_of`.
        masked: attention gets a mask; None: unknown.
    """
    if facts.capability == (0, 0):
        return AS_TORCH
    plain = tuple(name for name in _BACKENDS if name != "cudnn")
    hopper = facts.capability[0] == 9
    if facts.deterministic:
        return KernelOrder(plain, (("cudnn", "deterministic algorithms refuse it"),))
    if masked is not False and hopper and facts.cudnn < _CUDNN_MASKS:
        why = "with a mask it gives NaN before 9.26"
        return KernelOrder(plain, (("cudnn", why if masked else f"{why}, and this task may have one"),))
    if masked is None:
        return AS_TORCH
    if hopper and facts.cudnn > _CUDNN_FIRST and _HAS_PRIORITY:
        return KernelOrder(("cudnn", *plain))
    return KernelOrder((), (("cudnn", "torch tries it first only above 9.15.0"),) if hopper else ())


def attention(
    model: nn.Module, choice: str, blocks: Sequence[nn.Module] = (), order: KernelOrder = AS_TORCH
) -> nn.Module:
    """Restrict the model's attention to one kernel. In place.

    "auto" allows the kernels of `order`.

    Args:
        model: to be changed.
        choice: "auto" or the name of a kernel.
        blocks: those that may be recomputed in the backward, outside the model's own forward.
        order: the kernels for "auto".
    """
    names = order.names if choice == "auto" else (choice,)
    if not names:
        return model
    for module in dict.fromkeys((*blocks, model)):
        module.forward = _restrict(module.forward, names)
    return model


def _restrict(forward: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    def forward_restricted(*inputs: Any, **kwargs: Any) -> Any:
        with _only(names):
            return forward(*inputs, **kwargs)

    return forward_restricted


def _only(names: tuple[str, ...]) -> AbstractContextManager[Any]:
    backends = [_BACKENDS[name] for name in names]
    if len(names) > 1 and names[0] == "cudnn":
        return sdpa_kernel(backends, set_priority=True)
    return sdpa_kernel(backends)


# Older versions of torch have no argument for the order.
_HAS_PRIORITY = "set_priority" in inspect.signature(sdpa_kernel).parameters


class Shape(NamedTuple):
    """A layer's number of attention heads, their size, and the dropout of the weights."""

    heads: int
    size: int
    dropout: float


def describe(
    model: nn.Module,
    choice: str,
    dtype: torch.dtype,
    device: torch.device,
    order: KernelOrder = AS_TORCH,
    *,
    masked: bool | None = False,
) -> str | None:
    """Describe in one line which kernel will run, and why each other does not.

    Tests causal attention, as in the training of language models.

    Args:
        model: with attention heads.
        choice: "auto" or the name of a kernel.
        dtype: of the attention.
        device: of the model.
        order: the kernels for "auto".
        masked: attention gets a mask, such as that of packed documents; None: unknown, tested without one.

    Returns:
        The line; None for a model without heads.

    Raises:
        ConfigError: the chosen kernel cannot run this.
    """
    shape = heads_of(model)
    if shape is None:
        return None
    # A small query: which kernel torch chooses depends on shape, dtype and device, not on the length.
    query = torch.zeros(1, shape.heads, 16, shape.size, dtype=dtype, device=device, requires_grad=True)
    if masked:
        mask = torch.ones(16, 16, dtype=torch.bool, device=device).tril().expand(1, 1, 16, 16)
    else:
        mask = None
    refusals = {}
    for name in _BACKENDS:
        if name != "math":
            refusals[name] = _refusal(name, query, mask, shape.dropout)
    reasons = {}
    for name, reason in refusals.items():
        reasons[name] = reason or dict(order.without).get(name, "")
    # Otherwise the kernels are left out only in doubt, or not at all. The user may choose such a kernel by name.
    if masked is not None and order.names:
        refusals = reasons
    if refusals.get(choice):
        fits = ", ".join(name for name in (*refusals, "math") if not refusals.get(name))
        raise ConfigError(f"--attention {choice} cannot run here: {refusals[choice]}; use auto, or one of {fits}")
    names = order.names if choice == "auto" else (choice,)
    with _only(names) if names else nullcontext():
        # Private to torch: the choice that `scaled_dot_product_attention` itself makes.
        runs = _NAMES.get(torch._fused_sdp_choice(query, query, query, mask, shape.dropout, not masked), "math")
    shape_text = f"{shape.heads} heads of {shape.size}, {str(dtype).removeprefix('torch.')}, causal, "
    shape_text += {True: "a mask", False: "no mask", None: "masks unknown"}[masked]
    unnamed = "another is faster" if choice == "auto" else f"--attention {choice}"
    exclusions = []
    for name in _BACKENDS:
        if name != runs:
            exclusions.append(f"not {name}: {reasons.get(name) or unnamed}")
    if facts_of(device).cudnn:
        version = f"; cuDNN {_format_version(facts_of(device).cudnn)}"
    else:
        version = ""
    return f"attention: {runs} ({shape_text}); {'; '.join(exclusions)}{version}"


def _format_version(version: int) -> str:
    """Format a version, 91501 -> 9.15.1, as from cuDNN 9 on."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def heads_of(model: nn.Module) -> Shape | None:
    """Return the heads of the model's attention, from its configuration or layers; None if unknown."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            return Shape(module.num_heads, module.head_dim, module.dropout)
        config = getattr(module, "config", None)
        heads = _number(config, "heads", "num_attention_heads")
        width = _number(config, "width", "hidden_size")
        size = _number(config, "head_dim") or width // (heads or 1)
        if heads and size:
            return Shape(int(heads), int(size), _number(config, "dropout", "attention_dropout", "attn_pdrop"))
    return None


def _number(config: Any, *names: str) -> float:
    values = (getattr(config, name, None) for name in names)
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    return 0


def _refusal(name: str, query: Tensor, mask: Tensor | None, dropout: float) -> str:
    """Return why the kernel cannot compute attention over `query`; "" if it can."""
    if query.device.type == "cpu":
        if name != "flash":
            return "it has no CPU kernel"
        if dropout:
            return "its CPU kernel has no dropout"
        return ""
    can = getattr(torch.backends.cuda, f"can_use_{name}_attention")
    params = torch.backends.cuda.SDPAParams(query, query, query, mask, dropout, mask is None, False)
    # torch reports why a kernel is not usable as a warning, and only with debug=True.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if can(params, debug=True):
            return ""
    if caught:
        reason = " ".join(str(caught[-1].message).split())
    else:
        reason = "this GPU or this build of torch lacks it"
    return reason.split(" (Triggered")[0].rstrip(".")
