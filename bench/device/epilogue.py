"""The layers of --fused-kernels by themselves: python bench/device/epilogue.py [--toy] [--micro 16] [--limit 15]

Milliseconds of one layer of GPT-2 124M for 16 sequences of 1024 tokens, in bfloat16: the product before the GELU as the
compiler has it, with the backward of `models.fused`, and with the GELU in the product's kernel, by each way of cutting
it; queries, keys and values around attention, plain and with one pass over their gradients; and beside these the
products without a stacked gradient, which save no bytes by count. First: whether the kernels compute what ATen does.
"""

import argparse
import functools
import time

import torch
from common import failed, figure, read_arguments, sizes, timed
from torch.nn import functional as F

from lockstep.models import fused
from lockstep.models.fused import GeluLinear, QkvLinear
from lockstep.models.gpt import GPTConfig, _Attention


def attempt(name, work, until):
    """A figure that cannot be had here ends nothing; what begins after `until` is left out."""
    if time.monotonic() > until:
        failed(name, TimeoutError("left out, see --limit"))
        return
    try:
        work()
    except Exception as error:
        failed(name, error)


def plain_gelu(linear, x):
    return F.gelu(linear(x), approximate="tanh")


class Chained(torch.autograd.Function):
    """Queries, keys and values whose backward accumulates in the product to the inputs: three products, no stack."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias).chunk(3, dim=-1)

    @staticmethod
    def backward(ctx, *parts):
        x, weight = ctx.saved_tensors
        rows, weights = x.flatten(0, -2), weight.chunk(3)
        parts = [part.reshape(-1, part.shape[-1]) for part in parts]
        to_x = parts[0] @ weights[0]
        for part, own in zip(parts[1:], weights[1:], strict=True):
            to_x = torch.addmm(to_x, part, own)
        to_weight = torch.cat([part.t() @ rows for part in parts])
        return to_x.view(x.shape), to_weight, torch.cat([part.sum(0) for part in parts])


class ChainedLinear(QkvLinear):
    def forward(self, x):
        return Chained.apply(*self._operands(x))


def measured(name, work, leaves, shape, device):
    """Forward, and forward with backward, of a compiled function; the first call compiles."""
    compiled = torch.compile(work)
    out = compiled()
    gradient = torch.randn_like(out)

    def both():
        compiled().backward(gradient)
        for leaf in leaves:
            leaf.grad = None

    with torch.no_grad():
        forward = timed(compiled, device, warm=2, turns=8)
    figure(f"{name}, {shape}: forward", forward, "ms")
    figure(f"{name}, {shape}: forward and backward", timed(both, device, warm=2, turns=8), "ms")


def gelu(size, rows, device, until):
    width = size.model.width
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    linear = torch.nn.Linear(width, 4 * width, device=device, dtype=torch.bfloat16)
    leaves, shape = (x, linear.weight, linear.bias), f"{rows} tokens"
    own = {"GELU after its product, backward in one pass": False, "GELU in its product": True}
    ways = {"GELU after its product, compiled": functools.partial(plain_gelu, linear, x)}
    ways |= {name: functools.partial(GeluLinear.of(linear, epilogue=each), x) for name, each in own.items()}
    attempt("the kernels beside ATen", lambda: check(x, linear), until)
    attempt("GELU in its product, by blocks", lambda: cuts(x, linear, shape, device), until)
    for name, work in ways.items():
        attempt(name, lambda name=name, work=work: measured(name, work, leaves, shape, device), until)


@torch.no_grad()
def cuts(x, linear, shape, device):
    """The product's kernel by each way of cutting it, beside cuBLAS's product alone."""
    figure(f"product alone, {shape}", timed(lambda: linear(x), device, warm=2, turns=8), "ms")
    if device.type == "cpu":
        return
    from lockstep.models.fused_triton import CONFIGS, linear_gelu

    for blocks in CONFIGS:
        spent = timed(lambda each=blocks: linear_gelu(x, linear.weight, linear.bias, each), device, warm=2, turns=8)
        name = f"{blocks.rows} x {blocks.columns} x {blocks.depth}, {blocks.stages} stages"
        figure(f"GELU in its product, {name}, {shape}", spent, "ms")


@torch.no_grad()
def check(x, linear):
    """Largest distance of the kernels' results from ATen's, in shares of the largest value."""
    hidden, activated = fused.linear_gelu(x, linear.weight, linear.bias)
    wanted = F.linear(x, linear.weight, linear.bias)
    gradient, sums = fused.gelu_gradient(activated, hidden)
    expected = torch.ops.aten.gelu_backward(activated, hidden, approximate="tanh")
    pairs = {
        "product": (hidden, wanted),
        "GELU": (activated, F.gelu(hidden, approximate="tanh")),
        "gradient": (gradient, expected),
        "sums": (sums, expected.sum(0, dtype=torch.float32)),
    }
    for name, (found, other) in pairs.items():
        off = (found.float() - other.float()).abs().max() / other.float().abs().max()
        figure(f"distance of the kernels from ATen: {name}", float(off), "", aim=0.01, better="less")


def qkv(size, micro, device, until):
    config = GPTConfig(layers=1, heads=size.model.heads, width=size.model.width)
    x = torch.randn(micro, size.time, config.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    layer = _Attention(config).to(device, torch.bfloat16)
    leaves, shape, linear = (x, *layer.parameters()), f"{micro * size.time} tokens", layer.inputs
    ways = {
        "attention, gradients stacked by the compiler": linear,
        "attention, gradients stacked in one pass": QkvLinear.of(linear),
        "attention, gradients not stacked": ChainedLinear.of(linear),
    }
    for name, inputs in ways.items():
        layer.inputs = inputs
        attempt(name, lambda name=name: measured(name, functools.partial(layer, x), leaves, shape, device), until)
        torch._dynamo.reset()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro", type=int, default=16, help="sequences in a forward")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds after which nothing more is begun")
    arguments = read_arguments(parser)
    until, device = time.monotonic() + arguments.limit, arguments.device
    size = sizes("gpt2", arguments)
    micro = size.micro if arguments.small else arguments.micro
    attempt("GELU", lambda: gelu(size, micro * size.time, device, until), until)
    attempt("attention", lambda: qkv(size, micro, device, until), until)


if __name__ == "__main__":
    main()
