"""Load a model's linear layers in 4 or 8 bits. Only this file needs `bitsandbytes`.

    quantization = Quantization("4bit", torch.bfloat16)     # --model.load-in 4bit
    model = AutoModelForCausalLM.from_pretrained(name, **quantization.arguments(transformers))
    quantization.prepare(model)

4 bits are NF4 in blocks of 64 with quantized scales (Dettmers et al., "QLoRA", arXiv 2305.14314), 8 bits are LLM.int8()
(arXiv 2208.07339). Weights are quantized on the host, so they have the same bits on every device. The layers are
bitsandbytes' own; they are recognised by their module, so that a run without them does not load the package.
"""

import logging
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.extras import install_extra

__all__ = [
    "PlaceholderLinear",
    "Quantization",
    "bits_of",
    "dequantize",
    "is_transposed",
    "keep_unchanged",
    "quantized_layers",
    "quiet",
    "scales",
]

_FLAG = "--model.load-in"
# Block sizes of bitsandbytes: weights that share a scale, and scales that share a second one.
_BLOCK = 64
_NESTED = 256
# Inputs above this threshold are multiplied in float16 (section 3.2 of the LLM.int8() paper).
_OUTLIER = 6.0


class Quantization(NamedTuple):
    """Bits and dtype in which to load a base.

    Attributes:
        load_in: "4bit" or "8bit".
        compute: dtype of autocast, in which 4-bit layers multiply; None: the dtype that the weights are stored in.
    """

    load_in: str
    compute: torch.dtype | None

    def check(self) -> None:
        """Raise ConfigError if a package is missing."""
        for package in ("bitsandbytes", "accelerate"):
            if find_spec(package) is None:
                raise ConfigError(f"{_FLAG} {self.load_in} needs the package {package}: {install_extra('quantized')}")

    def _config(self, transformers: Any) -> Any:
        self.check()
        quiet()
        if self.load_in == "8bit":
            return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=_OUTLIER)
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.compute or torch.float32,
        )

    def arguments(self, transformers: Any) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` of this package."""
        return {"quantization_config": self._config(transformers), "device_map": {"": "cpu"}}

    def prepare(self, model: nn.Module) -> nn.Module:
        """Set the layers' dtype, and keep forwards from changing their tensors."""
        stored = getattr(model, "dtype", torch.float32)
        for _, layer in quantized_layers(model):
            if hasattr(layer, "compute_dtype"):
                layer.compute_dtype = self.compute or stored
                layer.compute_type_is_set = True
        return keep_unchanged(model)

    def use_placeholders(self, model: nn.Module, layers: Collection[str], dtype: torch.dtype) -> nn.Module:
        """Replace layers by `PlaceholderLinear` and move the model to the CPU, in place.

        The model is on the meta device.

        Args:
            layers: names of the linear layers to replace.
            dtype: of the other parameters.
        """
        for name in layers:
            model.set_submodule(name, PlaceholderLinear(model.get_submodule(name), self.load_in, self.compute or dtype))
        floating = {torch.float32: dtype}
        # Tied tensors stay tied: each is replaced once. The two dicts of nn.Module are private in torch.
        moved: dict[Tensor, Tensor] = {}
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in tables:
                for name, tensor in list(tensors.items()):
                    if tensor is not None:
                        new = torch.empty_like(tensor, dtype=floating.get(tensor.dtype, tensor.dtype), device="cpu")
                        is_parameter = isinstance(tensor, nn.Parameter)
                        moved.setdefault(tensor, nn.Parameter(new, tensor.requires_grad) if is_parameter else new)
                        tensors[name] = moved[tensor]
        return model


def quiet() -> None:
    """Silence bitsandbytes' warnings about missing kernels and about 8-bit forwards."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def is_quantized(module: nn.Module) -> bool:
    """Whether a module is a linear layer of bitsandbytes."""
    return type(module).__module__.startswith("bitsandbytes.") and isinstance(module, nn.Linear)


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and layer of the quantized linear layers."""
    return ((name, module) for name, module in model.named_modules() if is_quantized(module))


class PlaceholderLinear(nn.Linear):
    """Layer without values, with a quantized one's memory and work, for `lockstep plan`.

    Args:
        layer: on the meta device.
        load_in: see `Quantization`.
        compute: dtype of its products.
    """

    def __init__(self, layer: Any, load_in: str, compute: torch.dtype) -> None:
        transposed = type(layer).__name__ == "Conv1D"
        rows, columns = reversed(layer.weight.shape) if transposed else layer.weight.shape
        super().__init__(columns, rows, bias=False, device="meta")
        # In 8 bits bitsandbytes stores a float32 scale for each row. In 4 bits two weights share a byte,
        # each block has a scale of one byte, and each block of scales a float32 scale.
        shape, scales = ((rows, columns), 4 * rows) if load_in == "8bit" else ((-(-rows * columns // 2), 1), 0)
        if not scales:
            blocks = -(-rows * columns // _BLOCK)
            scales = blocks + 4 * -(-blocks // _NESTED)
        dtype = torch.int8 if load_in == "8bit" else torch.uint8
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device="meta"))
        self.bias = layer.bias
        self.compute = compute

    def forward(self, input: Tensor) -> Tensor:
        # torch does not annotate Function.apply.
        output: Tensor = _PlaceholderProduct.apply(input.to(self.compute), self.in_features, self.out_features)  # type: ignore[no-untyped-call]
        return (output if self.bias is None else output + self.bias.to(self.compute)).to(input.dtype)


class _PlaceholderProduct(torch.autograd.Function):
    """Product with a weight that exists only while it is computed, as in bitsandbytes."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, columns: int, rows: int) -> Tensor:
        ctx.shape = rows, columns
        return input @ input.new_empty(columns, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ grad.new_empty(ctx.shape), None, None


def bits_of(layer: Any) -> str:
    """Return the value of --model.load-in that makes such a layer."""
    if hasattr(layer, "state"):
        return "8bit"
    return "4bit"


def keep_unchanged(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Make forwards leave the tensors of quantized layers unchanged, in place.

    A second call changes nothing.

    bitsandbytes itself changes them in three places: on CPUs with AVX512-BF16 an evaluation packs 4-bit weights in
    another order and rounds their scales; a bias takes the dtype of the input; and the scales of an 8-bit layer stay
    on their device when the model around it moves.

    Args:
        device: that the weights will be moved to; their scales are moved now. None: they stay.
    """
    for _, layer in quantized_layers(model):
        if bits_of(layer) == "8bit":
            _follow(layer)
            # torch has no public list of a module's hooks.
            if _before_int8 not in layer._forward_pre_hooks.values():
                layer.register_forward_pre_hook(_before_int8)
            continue
        layer.support_avx512bf16_for_cpu = False
        if device is not None:
            layer.weight.quant_state.to(device)
        if layer.bias is not None and layer.compute_dtype is not None:
            layer.bias.data = layer.bias.data.to(layer.compute_dtype)
    return model


def _before_int8(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    _follow(layer)
    if layer.bias is None or inputs[0].dtype is layer.bias.dtype:
        return None
    return inputs[0].to(layer.bias.dtype), *inputs[1:]


def _follow(layer: Any) -> None:
    """Move the scales of an 8-bit layer to its weight's device."""
    if layer.weight.CB is not None:
        layer.init_8bit_state()
    # init_8bit_state sets SCB where the weight was; `Module.to` does not move it.
    if layer.state.SCB is not None and layer.state.SCB.device != layer.weight.device:
        # Waits for the device, once after each move.
        layer.state.SCB = layer.state.SCB.to(layer.weight.device)
    layer.state.CB = layer.weight.data


def scales(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of quantized layers that is no parameter: scales and formats."""
    tensors: dict[str, Tensor] = {}
    for name, layer in quantized_layers(model):
        parameters = {key for key, _ in layer.named_parameters()}
        for key, value in layer.state_dict().items():
            if key not in parameters:
                tensors[f"{name}.{key}"] = value
    return tensors


def is_transposed(layer: Any) -> bool:
    """Whether the weight was [inputs, outputs] before the layer was quantized, as GPT-2's are."""
    return getattr(layer, "source_cls", nn.Linear).__name__ == "Conv1D"


@torch.no_grad()
def dequantize(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight of a quantized layer, [outputs, inputs]."""
    from bitsandbytes import functional

    if bits_of(layer) == "8bit":
        _follow(layer)
        weight: Tensor = functional.int8_vectorwise_dequant(layer.weight.data, layer.state.SCB)
    else:
        weight = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight.to(dtype)
