"""One run, and what it shows: python bench/device/one.py [--model gpt2-xl] [--only rate waits ...] [--toy | --tiny]

    python bench/device/one.py                                              # all parts, in one process, compiled once
    python bench/device/one.py --only rate --set residual_dtype=bf16        # a variant: its rate alone
    python bench/device/one.py --model gpt2-xl --only rate first-save --steps 6 --save-every 16

rate: MFU over some steps. first-save, second-save: how much longer some steps take for the save among them (aim 0.1 s).
waits: steps under torch's synchronisation warnings, each place with its line (aim: none). profile: the share of the
time in which the device has nothing to do, and its longest kernels.
"""

import argparse
import collections
import tempfile
import time
import warnings
from pathlib import Path

import torch
from common import LLM_C, SIZES, STRETCH, failed, figure, option, read_arguments, sizes, throughput
from runs import measured, profiled, running

BEGAN = time.perf_counter()
PARTS = ("rate", "first-save", "waits", "second-save", "profile")  # in this order
AROUND = 4  # steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2", choices=SIZES)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--micro", type=int, default=0, help="samples of a micro-batch (default: the model's)")
    parser.add_argument("--batch", type=int, default=0, help="samples of a step (default: the model's)")
    parser.add_argument("--scope", default="blocks", choices=["blocks", "whole", "none"], help="what is compiled")
    parser.add_argument("--loss-chunk", type=int, default=0, help="as --model.loss-chunk; -1 is the command's default")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="further options of the run")
    parser.add_argument("--steps", type=int, default=12, help="of `rate`")
    text = "steps from save to save: the first comes after `rate`, the second after `waits`"
    parser.add_argument("--save-every", type=int, default=24, help=text)
    arguments = read_arguments(parser)
    device = arguments.device
    shape = sizes(arguments.model, arguments, micro=arguments.micro, batch=arguments.batch)
    setting = {"device": device.type, "engine": "single"}
    setting |= {"compile": False} if arguments.scope == "none" else {"compile_scope": arguments.scope}
    setting |= dict(map(option, arguments.set))
    if {"first-save", "second-save"} & set(arguments.only):
        setting["ckpt_freq"] = arguments.save_every
    label = ", ".join([arguments.model, f"compiled: {arguments.scope}", *arguments.set])
    label += f", loss in chunks of {arguments.loss_chunk}" if arguments.loss_chunk else ""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(folder, "r", shape, loss_chunk=arguments.loss_chunk, **setting) as (_, records),
    ):
        steps = 2 if arguments.small else arguments.steps
        spent, _, peak = measured(records, device, 4, steps)
        taken = 4 + steps
        more = {
            "first_steps_after_s": time.perf_counter() - BEGAN - steps * spent,
            "peak_gib": peak / 2**30,
            "stretch": STRETCH.get(arguments.model),
        }
        throughput(label, spent, shape, device, aim=LLM_C.get(arguments.model), **more)
        for part in PARTS[1:]:
            if part not in arguments.only:
                continue
            try:
                if part.endswith("save"):
                    taken = save(part, records, device, taken, arguments.save_every)
                elif part == "waits":
                    taken = waits(records, device, taken, 6 if arguments.small else 16)
                else:
                    profiled(records, device)
            except Exception as error:
                failed(f"{label}: {part}", error)


def save(part, records, device, taken, every):
    """Times the steps around the next save beside as many without; how many steps were taken by then.

    The device is waited for at their ends alone, so that the host runs ahead as it does in a training.
    """
    until = every * (taken // every + 1)
    for _ in range(until - 1 - AROUND - taken):
        next(records)
    usual = measured(records, device, 0, AROUND)[0] * AROUND
    around = measured(records, device, 0, AROUND)[0] * AROUND  # the first of them ends with the save
    title = f"the {part.replace('-', ' ')} holds the loop over {AROUND} steps"
    figure(title, around - usual, "s", aim=0.1, better="less", usual_s=usual, around_s=around)
    return until - 1 + AROUND


def waits(records, device, taken, steps):
    """Counts what waits for the device in some steps, by the line that does; how many steps were taken by then."""
    cuda = device.type == "cuda"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            next(records)
        if cuda:
            torch.cuda.set_sync_debug_mode("default")
    # torch warns once of the mode itself, in words that a search for "synchroniz" alone would count.
    calls = [each for each in said if "called a synchronizing" in str(each.message)]
    places = collections.Counter(f"{Path(each.filename).name}:{each.lineno}" for each in calls)
    for place, count in places.most_common(10):
        print(f"waits: {count} times {place}")
    where = " ".join(f"{place} x{count}" for place, count in places.most_common(5))
    figure("waits for the device a step", len(calls) / steps, "", aim=0, better="less", where=where)
    return taken + steps


if __name__ == "__main__":
    main()
