"""Load a model's linear layers in 4 or 8 bits. Only this file needs `bitsandbytes`.

    quantization = Quantization("4bit", torch.bfloat16)     # --model.load-in 4bit
    model = AutoModelForCausalLM.from_pretrained(name, **quantization.arguments())
    quantization.settle(model)

4 bits are NF4 in blocks of 64 with quantized scales (Dettmers et al., "QLoRA", arXiv 2305.14314), 8 bits are LLM.int8()
(arXiv 2208.07339). Weights are quantized on the host, so they have the same bits on every device. The layers are
bitsandbytes' own; they are recognised by their module, so that a run without them does not load the package.
"""

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError

__all__ = [
    "Quantization",
    "bits_of",
    "dequantized",
    "hold_still",
    "is_quantized",
    "is_turned_over",
    "quantized_layers",
    "scales",
]

_FLAG = "--model.load-in"
_BLOCK = 64  # weights that share a scale
_OUTLIER = 6.0  # inputs above it are multiplied in float16, as the paper has it


class Quantization(NamedTuple):
    """How to load a base.

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
                raise ConfigError(
                    f"{_FLAG} {self.load_in} needs the package {package}: pip install 'torch-lockstep[quantized]'"
                )

    def config(self, skipped: list[str] | None = None) -> Any:
        """Return the `quantization_config` of `transformers`."""
        self.check()
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a line for each forward of an 8-bit layer
        from transformers import BitsAndBytesConfig

        if self.load_in == "8bit":
            return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=_OUTLIER)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.compute or torch.float32,
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained`."""
        return {"quantization_config": self.config(), "device_map": {"": "cpu"}}

    def settle(self, model: nn.Module) -> nn.Module:
        """Choose the layers' dtype, and make sure that a forward leaves their tensors as they are."""
        stored = getattr(model, "dtype", torch.float32)
        for _, layer in quantized_layers(model):
            if hasattr(layer, "compute_dtype"):
                layer.compute_dtype, layer.compute_type_is_set = self.compute or stored, True
        return hold_still(model)


    def sized(self, model: nn.Module) -> nn.Module:
        """Give a new model quantized layers with weights and scales of the right sizes, and no values: for a plan."""
        config = self.config()
        from bitsandbytes.functional import QuantState
        from bitsandbytes.nn import Int8Params, Params4bit
        from transformers.integrations import replace_with_bnb_linear
        from transformers.quantizers.base import get_keys_to_not_convert

        kept = get_keys_to_not_convert(model)
        dtypes = {name: getattr(layer, "weight", None) for name, layer in model.named_modules()}
        replace_with_bnb_linear(model, modules_to_not_convert=kept, quantization_config=config)
        for name, layer in quantized_layers(model):
            before = dtypes[name]
            rows, columns = layer.out_features, layer.in_features
            if layer.bias is not None:
                layer.bias = nn.Parameter(torch.empty(rows, dtype=before.dtype), requires_grad=False)
            if self.load_in == "8bit":
                weight = torch.empty(rows, columns, dtype=torch.int8)
                layer.weight = Int8Params(weight, requires_grad=False, CB=weight, SCB=torch.empty(rows))
                continue
            blocks = -(-rows * columns // _BLOCK)
            inner = QuantState(torch.empty(-(-blocks // 256)), code=torch.empty(256), blocksize=256)
            state = QuantState(
                torch.empty(blocks, dtype=torch.uint8),
                shape=torch.Size((rows, columns)),
                code=torch.empty(16),
                blocksize=_BLOCK,
                quant_type="nf4",
                dtype=before.dtype,
                offset=torch.empty(()),
                state2=inner,
            )
            packed = torch.empty(-(-rows * columns // 2), 1, dtype=torch.uint8)
            layer.weight = Params4bit(packed, quant_state=state, quant_type="nf4", bnb_quantized=True, module=layer)
            layer.quant_state = state
        model.is_loaded_in_4bit, model.is_loaded_in_8bit = self.load_in == "4bit", self.load_in == "8bit"
        return self.settle(model)


def is_quantized(module: nn.Module) -> bool:
    """Whether a module is a linear layer of bitsandbytes."""
    return type(module).__module__.startswith("bitsandbytes.") and isinstance(module, nn.Linear)


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and layer of the quantized linear layers."""
    return ((name, module) for name, module in model.named_modules() if is_quantized(module))


def bits_of(layer: Any) -> str:
    """Return the value of --model.load-in that makes such a layer."""
    return "8bit" if hasattr(layer, "state") else "4bit"


def hold_still(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Make forwards leave the tensors of quantized layers unchanged. In place; a second call changes nothing.

    bitsandbytes itself changes them in three places: on CPUs with AVX512-BF16 an evaluation packs 4-bit weights in
    another order and rounds their scales; a bias takes the dtype of the input; and the scales of an 8-bit layer stay
    where they were when the model around it moves.

    Args:
        device: that the weights will be moved to; their scales are moved now. None: they stay.
    """
    for _, layer in quantized_layers(model):
        if bits_of(layer) == "8bit":
            _follow(layer)
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
    if layer.state.SCB is not None and layer.state.SCB.device != layer.weight.device:
        layer.state.SCB = layer.state.SCB.to(layer.weight.device)  # once, after a move; waits for the device
    layer.state.CB = layer.weight.data


def scales(model: nn.Module) -> dict[str, Tensor]:
    """Return what a model's state has of its quantized layers besides parameters: scales, and how they are stored."""
    found: dict[str, Tensor] = {}
    for name, layer in quantized_layers(model):
        own = {key for key, _ in layer.named_parameters()}
        found |= {f"{name}.{key}": value for key, value in layer.state_dict().items() if key not in own}
    return found


def is_turned_over(layer: Any) -> bool:
    """Whether the weight was [inputs, outputs] before the layer was quantized, as GPT-2's are."""
    return getattr(layer, "source_cls", nn.Linear).__name__ == "Conv1D"


@torch.no_grad()
def dequantized(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight of a quantized layer, [outputs, inputs]."""
    from bitsandbytes import functional

    if bits_of(layer) == "8bit":
        _follow(layer)
        weight = functional.int8_vectorwise_dequant(layer.weight.data, layer.state.SCB)
    else:
        weight = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight.to(dtype)
