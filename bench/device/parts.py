"""Where a step of the command's path goes: python bench/device/parts.py [--toy] [--model gpt2]

Runs of GPT-2 as `lockstep train` makes them, in turn: what is compiled (nothing, blocks, whole), the residual stream in
bf16, micro-batches of 16, 32 and 64. Each: milliseconds a micro-batch, tokens a second, MFU, peak memory. The default
run is profiled over five steps: the share of the time in which the device has nothing to do, and its longest kernels.
"""

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import time

import torch
from common import failed, figure, given, language_model, mfu, sizes, synchronize
from torch.profiler import ProfilerActivity, profile

import lockstep
from lockstep.config import options
from lockstep.config.config import Config

MIB = 2**20


def settings(name, shape, **changed):
    """A Config of the run `name`; what this version does not know is refused by name."""
    return options.build(
        options.flat(Config(experiment_name=name, save_dir="unused"))
        | {
            "batch_size": shape.batch,
            "micro_batch_size": shape.micro,
            "max_steps": 100_000,
            "ckpt_freq": 0,
            "eval_freq": 0,
            "log_freq": 10,
            "precision": "bf16",
            "matmul_precision": "high",
            "compile": True,
        }
        | changed
    )


@contextlib.contextmanager
def running(folder, name, shape, **changed):
    """The steps of a run, one at a time; nothing is printed."""
    config = settings(name, shape, save_dir=str(folder), **changed)
    task = language_model(f"{folder}/tokens", shape)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        run = lockstep.Run(config, task)
        found = iter(run)
        yield found
        found.close()
    del run, found, task
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measured(records, device, warm, steps):
    """(seconds a step, seconds until the first steps were done, peak bytes)."""
    began = time.perf_counter()
    for _ in range(warm):
        next(records)
    synchronize(device)
    first = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps):
        next(records)
    synchronize(device)
    spent = (time.perf_counter() - began) / steps
    return spent, first, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def profiled(records, device, steps=5):
    """The device's idle share over some steps, and its longest kernels."""
    on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_device]) as found:
        for _ in range(steps):
            next(records)
        synchronize(device)
    if device.type != "cuda":
        return
    kernels = [each for each in found.events() if str(each.device_type).endswith("CUDA")]
    spans = sorted((each.time_range.start, each.time_range.end) for each in kernels)
    busy, until = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    figure("device idle in a step", 1 - busy / (until - spans[0][0]), "of the time", aim=0.02, better="less")
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)[:15]
    kernels = [[row.key[:80], row.self_device_time_total / 1e3 / steps] for row in rows]
    print(json.dumps({"kernels": kernels}), file=sys.__stdout__)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2")
    arguments = given(parser)
    device = arguments.device
    shape = sizes(arguments.model, arguments)
    wide = [sizes(arguments.model, arguments, micro=k * shape.micro, batch=2 * k * shape.micro) for k in (2, 4)]
    runs = [
        ("blocks and the loss", shape, {"compile_scope": "blocks"}),
        ("whole", shape, {"compile_scope": "whole"}),
        ("nothing", shape, {"compile": False}),
        ("bf16 residual stream", shape, {"residual_dtype": "bf16"}),
        *((f"micro-batch of {each.micro}", each, {}) for each in wide),
    ]
    where = {"device": device.type, "engine": "single"}
    for name, each, changed in runs:
        title = f"compiled: {name}" if each is shape and "residual" not in name else name
        try:
            with tempfile.TemporaryDirectory() as folder, running(folder, "r", each, **where, **changed) as records:
                spent, first, peak = measured(records, device, *((1, 2) if arguments.toy else (5, 15)))
                tokens = each.batch * each.time / spent
                flops = mfu(tokens, each, device)
                figure(
                    f"{arguments.model}, {title}",
                    1e3 * spent * each.micro / each.batch,
                    "ms a micro-batch",
                    tokens_per_second=tokens,
                    mfu=flops,
                    first_steps_s=first,
                    peak_mib=peak / MIB,
                )
                if name.startswith("blocks"):
                    profiled(records, device)
        except Exception as error:
            failed(title, error)


if __name__ == "__main__":
    main()
