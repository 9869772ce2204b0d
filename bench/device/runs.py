"""Runs of lockstep for the stages: made as `lockstep train` makes them, taken a step at a time, left without a save.

with running(folder, "r", shape, device="cuda", engine="single") as (run, records):
    seconds, first, peak = measured(records, device, warm=5, steps=15)
"""

import contextlib
import gc
import json
import sys
import time

import torch
from common import figure, language_model, synchronize
from torch.profiler import ProfilerActivity, profile

import lockstep
from lockstep.config import cli
from lockstep.config.schema import Config


def settings(name, shape, **changed):
    """A Config of the run `name`; an option that does not exist is refused by name."""
    return cli.build(
        cli.flatten(Config(experiment_name=name, save_dir="unused"))
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
def running(folder, name, shape, *, loss_chunk=0, **changed):
    """A run, and its steps one at a time. It is abandoned at the end: nothing is saved."""
    run = lockstep.Run(
        settings(name, shape, save_dir=str(folder), **changed),
        language_model(f"{folder}/tokens", shape, loss_chunk=loss_chunk),
    )
    records = iter(run)
    try:
        yield run, records
        run.abandon()
    finally:
        records.close()
        del run, records
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measured(records, device, warm, steps):
    """(seconds a step, seconds until the first steps were done, peak bytes)."""
    synchronize(device)
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
    """Prints the device's idle share over some steps, and its longest kernels."""
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
    rows = [row for row in found.key_averages() if str(row.device_type).endswith("CUDA")]
    rows.sort(key=lambda row: -row.self_device_time_total)
    longest = [[row.key[:100], row.count / steps, row.self_device_time_total / 1e3 / steps] for row in rows[:25]]
    print(json.dumps({"kernels": longest}), file=sys.__stdout__, flush=True)
