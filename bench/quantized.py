"""Measure the size and the error of a base in 4 or 8 bits: python bench/quantized.py [--width 512]

A Llama of two layers with random weights, saved and loaded as `--model.load-in` does. Counted are its quantized layers:
bits a weight, scales included, and the root mean square of the error as a share of that of the weights.
"""

import argparse
import json
import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep.models.quantized import Quantization, dequantize, quantized_layers, scales


def measure(folder, load_in):
    """Return (bits a weight, error) of all quantized layers together."""
    whole = LlamaForCausalLM.from_pretrained(folder)
    quantization = Quantization(load_in, None)
    model = quantization.prepare(LlamaForCausalLM.from_pretrained(folder, **quantization.arguments(transformers)))
    weights = stored = error = size = 0
    for name, layer in quantized_layers(model):
        weight = whole.get_parameter(f"{name}.weight").detach()
        weights += weight.numel()
        stored += layer.weight.numel() * layer.weight.element_size()
        error += float((dequantize(layer, torch.float32) - weight).square().sum())
        size += float(weight.square().sum())
    stored += sum(tensor.numel() * tensor.element_size() for name, tensor in scales(model).items() if _is_scale(name))
    return 8 * stored / weights, (error / size) ** 0.5


def _is_scale(name):
    """Whether it grows with the layer: the rest is a table of 16 values, and a description."""
    return not name.endswith(("quant_map", "weight_format")) and ".quant_state." not in name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    width = parser.parse_args().width
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=256,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        for load_in in ("8bit", "4bit"):
            bits, error = measure(folder, load_in)
            print(json.dumps({"load_in": load_in, "bits_a_weight": round(bits, 3), "error": round(error, 4)}))


if __name__ == "__main__":
    main()
