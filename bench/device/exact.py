"""Exact mode on this device: python bench/device/exact.py [--toy | --tiny]

GPT-2 with micro-batches of 16, eager and compiled: do two runs of ten steps end with the same bits, and what does a
step cost beside one without --exact (aim 1.25)? Every run has a process of its own, since the switches of exact mode
are the process's. All begin side by side; those that are timed then wait for their turn, the plain ones first.
"""

import argparse
import json
import subprocess
import sys
import tempfile

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
            measured(records, device, 1 if arguments.small else 5, 1)
            print(json.dumps({"ready": True}), flush=True)
            sys.stdin.readline()  # its turn
            spent, _, _ = measured(records, device, 1, 2 if arguments.small else 12)
            print(json.dumps({"seconds": spent}), flush=True)
        else:
            for _ in range(STEPS):
                step = next(records)
            print(json.dumps({"digest": digest(run.model), "loss": step.loss}), flush=True)


class Asked:
    """A run in a process of its own."""

    def __init__(self, arguments, *flags):
        own = [flag for flag in ("--toy", "--tiny") if getattr(arguments, flag.removeprefix("--"))]
        self.flags = " ".join(flags)
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--run", *own, *flags],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
        )

    def hear(self):
        """The next object that it prints. Raises RuntimeError where it ends without one."""
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.said.seek(0)
        said = self.said.read().strip()
        print(said, file=sys.stderr)
        raise RuntimeError(f"{self.flags}: exit {self.process.wait()}: {said.splitlines()[-1:]}")

    def take_turn(self):
        """Seconds of a step, measured now."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.hear()["seconds"]


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
    ways = {way: ["--compile"] * compiled for way, compiled in WAYS.items()}
    pairs = {way: [Asked(arguments, "--exact", *more) for _ in "ab"] for way, more in ways.items()}
    for way, pair in pairs.items():
        try:
            one, two = (each.hear() for each in pair)
            same = one["digest"] == two["digest"]
            figure(f"exact, {way}: two runs have the same bits", int(same), "0 or 1", aim=1, loss=one["loss"])
        except RuntimeError as error:
            failed(f"exact, {way}: bits", error)
    kinds = {"plain": [], "exact": ["--exact"]}
    timed = {
        way: {kind: Asked(arguments, "--timed", *own, *more) for kind, own in kinds.items()}
        for way, more in ways.items()
    }
    well = [way for way in ways if ready(way, timed[way].values())]  # all: a turn is to be taken in quiet
    for way in well:
        plain, exact = (timed[way][kind].take_turn() for kind in kinds)
        title = f"exact, {way}: a step beside one without"
        figure(title, exact / plain, "times", aim=1.25, better="less", plain_s=plain, exact_s=exact)


def ready(way, runs):
    """Whether runs have taken their first steps."""
    try:
        return [run.hear() for run in runs]
    except RuntimeError as error:
        failed(f"exact, {way}: time", error)
        return False


if __name__ == "__main__":
    main()
