"""The loss in chunks beside the plain one: python bench/chunked.py [--rounds 5] [--tokens 2048] [--vocab 128256]

One forward and backward of a small built-in GPT with a large vocabulary, on the CPU or a GPU: the most memory that it
takes beyond the model, and its time, both ways taking turns. Each measurement of memory is a process of its own.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time

import torch

from lockstep.models.chunked_loss import summed_cross_entropy
from lockstep.models.gpt import GPT, GPTConfig


def made(given):
    """The model, a batch, and where they are."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = GPTConfig(layers=2, heads=8, width=given.width, vocab_size=given.vocab, context=1024)
    with device:
        model = GPT(config)
        ids = torch.randint(0, given.vocab, (max(1, given.tokens // 1024), min(1024, given.tokens)))
    return model, ids, device


def step(model, ids, chunk, device):
    """Seconds of a forward and a backward."""
    model.zero_grad(set_to_none=False)
    begin = time.perf_counter()
    loss = model(ids, labels=ids, chunk=chunk) if chunk else summed_cross_entropy(model(ids), ids)
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def peak(given, chunk):
    """Bytes at the peak of a step beyond what is there before it: gradients are there, results are not."""
    model, ids, device = made(given)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(model, ids, chunk, device)
        return torch.cuda.max_memory_allocated() - before
    step(model, ids[:1, :8], chunk, device)  # what torch loads at its first step
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(model, ids, chunk, device)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def in_process(given, chunk):
    """`peak` in a new process: a process's peak never falls."""
    numbers = [f"--{name}={getattr(given, name)}" for name in ("tokens", "vocab", "width")]
    command = [sys.executable, __file__, *numbers, f"--peak={chunk}"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("rounds", 5), ("tokens", 2048), ("vocab", 128256), ("width", 256), ("peak", -1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.peak >= 0:
        print(json.dumps(peak(given, given.peak)))
        return
    chunks = (0, 512, 128)
    memory = {chunk: in_process(given, chunk) for chunk in chunks}
    model, ids, device = made(given)
    times = {chunk: [] for chunk in chunks}
    for _ in range(given.rounds + 1):  # the first is not counted
        for chunk in chunks:
            times[chunk].append(step(model, ids, chunk, device))
    plain = times[0][1:]
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{given.tokens} tokens, vocabulary {given.vocab}, width {given.width}; {name}, torch {torch.__version__}")
    print("| chunk | memory beyond the model | of plain | time, of plain |\n|---|---|---|---|")
    for chunk in chunks:
        ratio = statistics.median(own / other for own, other in zip(times[chunk][1:], plain, strict=True))
        share = memory[chunk] / memory[0]
        print(f"| {chunk or 'none'} | {memory[chunk] / 2**20:.0f} MiB | {share:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
