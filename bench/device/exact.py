"""Exact mode on this device: python bench/device/exact.py [--toy | --tiny]

GPT-2 with micro-batches of 16, eager and compiled: do two runs of ten steps end with the same bits, and what does a
step cost beside one without --exact (aim 1.25)? Every run has a process of its own, since the switches of exact mode
are the process's. Those whose bits are compared run side by side; those that are timed run alone, the plain one first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from common import failed, figure, read_arguments, sizes
from runs import measured, running

STEPS = 10
WAYS = {"eager": False, "compiled": True}


def digest(model):
    """A number of all bits of a model's tensors."""
    found = xxhash.xxh3_128()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())  # waits for the device
    return found.hexdigest()


def one_run(arguments):
    """A run in this process: prints its digest after some steps and, where asked, the seconds of a step."""
    device = arguments.device
    shape = sizes("gpt2", arguments, micro=16, batch=32)
    setting = {"device": device.type, "engine": "single", "exact": arguments.exact, "compile": arguments.compile}
    with tempfile.TemporaryDirectory() as folder, running(folder, "r", shape, **setting) as (run, records):
        if arguments.timed:
            spent, _, _ = measured(records, device, *((1, 2) if arguments.small else (5, 12)))
            print(json.dumps({"seconds": spent}), flush=True)
        else:
            for _ in range(STEPS):
                step = next(records)
            print(json.dumps({"digest": digest(run.model), "loss": step.loss}), flush=True)


def asked(arguments, *flags):
    """What a process of its own prints of such a run."""
    own = [flag for flag in ("--toy", "--tiny") if getattr(arguments, flag.removeprefix("--"))]
    command = [sys.executable, __file__, "--run", *own, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing was printed").splitlines()
        print(done.stderr, file=sys.stderr)
        raise RuntimeError(f"{' '.join(flags)}: exit {done.returncode}: {said[-1][:300]}")
    return json.loads(lines[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="one run, in this process")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--timed", action="store_true")
    arguments = read_arguments(parser)
    if arguments.run:
        one_run(arguments)
        return
    flags = {way: ["--compile"] * compiled for way, compiled in WAYS.items()}
    with ThreadPoolExecutor(1 if arguments.toy else 4) as pool:
        pairs = {way: [pool.submit(asked, arguments, "--exact", *more) for _ in "ab"] for way, more in flags.items()}
    for way, pair in pairs.items():
        try:
            one, two = (each.result() for each in pair)
            same = one["digest"] == two["digest"]
            figure(f"exact, {way}: two runs have the same bits", int(same), "0 or 1", aim=1, loss=one["loss"])
        except RuntimeError as error:
            failed(f"exact, {way}: bits", error)
    for way, more in flags.items():
        try:
            plain = asked(arguments, "--timed", *more)["seconds"]
            exact = asked(arguments, "--timed", "--exact", *more)["seconds"]
            title = f"exact, {way}: a step beside one without"
            figure(title, exact / plain, "times", aim=1.25, better="less", plain_s=plain, exact_s=exact)
        except RuntimeError as error:
            failed(f"exact, {way}: time", error)


if __name__ == "__main__":
    main()
