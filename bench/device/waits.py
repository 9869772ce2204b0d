"""Does a step wait for the device? python bench/device/waits.py [--toy]

Twenty steps of GPT-2 as `lockstep train` makes them, under torch's synchronisation warnings, without loader workers and
with one, with a record every step and every tenth. Each place that waits is printed with its line. Aim: none a step
but where docs/gpu.md says so.
"""

import collections
import tempfile
import warnings
from pathlib import Path

import torch
from common import figure, given, sizes
from parts import running

STEPS = 20


def main():
    arguments = given()
    shape, device = sizes("gpt2", arguments), arguments.device
    for workers in (0, 1):
        for freq in (1, 10):
            setting = {"device": device.type, "engine": "single", "data.workers": workers, "log_freq": freq}
            with tempfile.TemporaryDirectory() as folder, running(folder, "r", shape, **setting) as records:
                for _ in range(1 if arguments.toy else 5):
                    next(records)
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    if device.type == "cuda":
                        torch.cuda.set_sync_debug_mode("warn")
                    for _ in range(3 if arguments.toy else STEPS):
                        next(records)
                    if device.type == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
            places = collections.Counter(
                f"{Path(each.filename).name}:{each.lineno}" for each in said if "synchroniz" in str(each.message)
            )
            for place, count in places.most_common(10):
                print(f"workers {workers}, a record each {freq} steps: {count} times {place}")
            each = sum(places.values()) / STEPS
            figure(f"waits a step, {workers} workers, a record each {freq} steps", each, "", aim=0, better="less")


if __name__ == "__main__":
    main()
