"""GPT-2 with 1.5 billion parameters, and a Llama of one: python bench/device/large.py [--toy]

A few steps and a save: MFU (aim 52%), peak memory, bytes pinned for the save, how long the loop stood still for it
(aim 0.1 s), and the steps that ran beside it. Of the Llama, which `transformers` builds, the MFU (aim 50%).
"""

import tempfile
import time

import torch
from common import counted, failed, figure, given, mfu, sizes, synchronize
from parts import measured, running


def main():
    arguments = given()
    shape, device = sizes("gpt2-xl", arguments), arguments.device
    setting = {"device": device.type, "engine": "single", "compile_scope": "blocks", "ckpt_freq": 12}
    with tempfile.TemporaryDirectory() as folder, running(folder, "r", shape, **setting) as records:
        spent, first, peak = measured(records, device, 4, 6)
        tokens = shape.batch * shape.time / spent
        more = {"tokens_per_second": tokens, "first_steps_s": first, "peak_gib": peak / 2**30}
        figure("gpt2-xl, MFU", mfu(tokens, shape, device), "", aim=0.52, **more)
        times = []
        for _ in range(5):  # the save is after the 12th step
            began = time.perf_counter()
            next(records)
            synchronize(device)
            times.append(time.perf_counter() - began)
        usual = spent
        figure("gpt2-xl, a save holds the loop", max(times) - usual, "s", aim=0.1, better="less", steps=times)
        if device.type == "cuda":
            found = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
            pinned = found.get("allocated_bytes.peak", 0)
            states = 3 * 4 * counted(shape)[0]
            figure("gpt2-xl, bytes pinned for a save", pinned / states, "of the states", aim=1.1, better="less")
            figure("gpt2-xl, peak memory with a save", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    shape = sizes("llama-1b", arguments)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            running(folder, "l", shape, **setting | {"ckpt_freq": 0}) as records,
        ):
            spent, first, peak = measured(records, device, 4, 6)
            tokens = shape.batch * shape.time / spent
            more = {"tokens_per_second": tokens, "first_steps_s": first, "peak_gib": peak / 2**30}
            figure("llama-1b, MFU", mfu(tokens, shape, device), "", aim=0.50, **more)
    except Exception as error:
        failed("llama-1b", error)


if __name__ == "__main__":
    main()
