"""The parts of a step of GPT-2 by themselves: python bench/device/probe.py [--toy]

The six products of a block and its head, the attention kernels, the cross entropy eager, compiled and in chunks, AdamW,
the clipping, and a batch's way to the device. docs/inside/gpu.md has the stages.
"""

import torch
from common import failed, figure, read_arguments, sizes, timed
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.models.chunked_loss import summed_cross_entropy, summed_loss
from lockstep.models.gpt import GPT

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attempt(name, work):
    """A figure that cannot be had here ends nothing."""
    try:
        work()
    except Exception as error:
        failed(name, error)


def products(shape, device):
    width, rows = shape.model.width, shape.micro * shape.time
    layers = {
        "queries, keys, values": (width, 3 * width),
        "attention output": (width, width),
        "expand": (width, 4 * width),
        "contract": (4 * width, width),
        "head": (width, shape.model.padded_vocab),
    }
    for name, (into, out) in layers.items():
        x = torch.randn(rows, into, device=device, dtype=torch.bfloat16)
        w = torch.randn(out, into, device=device, dtype=torch.bfloat16)
        g = torch.randn(rows, out, device=device, dtype=torch.bfloat16)
        for what, work in (
            ("forward", lambda x=x, w=w: F.linear(x, w)),
            ("to inputs", lambda g=g, w=w: g @ w),
            ("to weights", lambda g=g, x=x: g.t() @ x),
        ):
            spent = timed(work, device)
            rate = 2 * rows * into * out / (spent * 1e-3) / 1e12
            figure(f"product: {name}, {what}", spent, "ms", tflops=rate)


def attentions(shape, device):
    heads, size = shape.model.heads, shape.model.width // shape.model.heads

    def one(kernel):
        parts = [
            torch.randn(shape.micro, heads, shape.time, size, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]

        def work():
            with sdpa_kernel(KERNELS[kernel]):
                out = F.scaled_dot_product_attention(*parts, is_causal=True)
            out.sum().backward()

        figure(f"attention: {kernel}, forward and backward", timed(work, device), "ms")

    for kernel in KERNELS:
        attempt(f"attention: {kernel}", lambda kernel=kernel: one(kernel))


def losses(shape, device):
    rows, vocabulary, width = shape.micro * shape.time, shape.model.padded_vocab, shape.model.width
    labels = torch.randint(shape.model.vocab_size, (rows,), device=device)
    hidden = torch.randn(1, rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def head(x):
        return F.linear(x, weight)

    def whole(x):
        return summed_cross_entropy(head(x), labels)

    ways = {
        "eager": whole,
        "compiled": torch.compile(whole),
        "in chunks, eager": lambda x: summed_loss(head, x, labels[None], max(rows // 8, 1)),
    }
    for name, way in ways.items():

        def one(name=name, way=way):
            def work():
                way(hidden).backward()
                hidden.grad = weight.grad = None

            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            spent = timed(work, device)
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
            figure(f"head and cross entropy: {name}, forward and backward", spent, "ms", peak_gib=peak)

        attempt(f"cross entropy {name}", one)


def update(shape, device):
    model = GPT(shape.model).to(device)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    figure("AdamW, fused", timed(optimizer.step, device), "ms")
    gradients = [parameter.grad for parameter in parameters]
    figure("norm of the gradient", timed(lambda: torch._foreach_norm(gradients), device), "ms")
    by = torch.ones((), device=device)
    figure("clipping by a product", timed(lambda: torch._foreach_mul_(gradients, by), device), "ms")


def copies(shape, device):
    batch = torch.zeros(shape.micro, shape.time, dtype=torch.int64)
    figure("a batch to the device, pageable", timed(lambda: batch.to(device, non_blocking=True), device), "ms")
    if device.type == "cuda":
        pinned = batch.pin_memory()
        figure("a batch to the device, pinned", timed(lambda: pinned.to(device, non_blocking=True), device), "ms")


def main():
    arguments = read_arguments()
    shape, device = sizes("gpt2", arguments, micro=16), arguments.device
    for part in (products, attentions, losses, update, copies):
        attempt(part.__name__, lambda part=part: part(shape, device))


if __name__ == "__main__":
    main()
