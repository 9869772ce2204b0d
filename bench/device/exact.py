"""Exact mode on this device: python bench/device/exact.py [--toy]

GPT-2, eager and compiled: do two runs of ten steps end with the same bits, and what does a step cost beside one without
--exact? Aim: 1.25.
"""

import tempfile
from pathlib import Path

import torch
from common import failed, figure, given, sizes
from parts import measured, running

from lockstep.checkpoint import fingerprint, list_steps, path_of

STEPS = 10


def ended(folder, name, shape, **setting):
    """The fingerprint of a run's last checkpoint."""
    with running(folder, name, shape, max_steps=STEPS, ckpt_freq=STEPS, exact=True, **setting) as records:
        for _ in records:
            pass
    path = Path(folder) / name
    return fingerprint(path_of(path, list_steps(path)[-1]))


def main():
    arguments = given()
    shape, device = sizes("gpt2", arguments), arguments.device
    for compiled in (False, True):
        what = "compiled" if compiled else "eager"
        setting = {"device": device.type, "engine": "single", "compile": compiled}
        try:
            with tempfile.TemporaryDirectory() as folder:
                same = ended(folder, "one", shape, **setting) == ended(folder, "two", shape, **setting)
                figure(f"exact, {what}: two runs have the same bits", int(same), "0 or 1", aim=1)
                spent = {}
                for exact in (False, True):
                    with running(folder, f"t{exact}", shape, exact=exact, **setting) as records:
                        spent[exact], _, _ = measured(records, device, *((1, 2) if arguments.toy else (5, 10)))
                ratio = spent[True] / spent[False]
                figure(f"exact, {what}: a step", ratio, "of a step without", aim=1.25, better="less")
        except Exception as error:
            failed(f"exact, {what}", error)
        torch.use_deterministic_algorithms(False)  # which exact mode turns on for the process


if __name__ == "__main__":
    main()
