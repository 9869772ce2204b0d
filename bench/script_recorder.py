"""Measure what `lockstep goodput|report|profile -- COMMAND` adds to the steps of a plain script.

    python bench/script_recorder.py [--rounds 40] [--layers 18]

One process trains a small model, in turns of 20 steps with and without its recorder, and compares the processor
time. Without it the wrappers stay, each of which then costs a call.
"""

import argparse
import json
import os
import tempfile
import time
from statistics import median

import torch
from torch import nn

TURN = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--layers", type=int, default=18)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOCKSTEP_SCRIPT"] = json.dumps({"folder": folder, "trace": None})
        from lockstep.diagnose.script import hooks

        hooks.attach(torch)
        recorder = hooks._listeners[0].recorder
        blocks = [each for _ in range(args.layers) for each in (nn.Linear(128, 128), nn.ReLU())]
        model = nn.Sequential(nn.Linear(64, 128), *blocks, nn.Linear(128, 10))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        samples = 64 * TURN * 2 * (args.rounds + 1)
        data = torch.utils.data.TensorDataset(torch.randn(samples, 64), torch.randint(0, 10, (samples,)))
        spent: dict[bool, list[float]] = {False: [], True: []}
        began = time.thread_time()
        for step, (x, y) in enumerate(torch.utils.data.DataLoader(data, 64)):
            if step % TURN == 0:
                recorder.off = step // TURN % 2 == 1
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            now = time.thread_time()
            if step >= 2 * TURN and step % TURN:  # the first step of a turn is partly of the other
                spent[not recorder.off].append(now - began)
            began = now
        recorder.close()
    without, recorded = (1e3 * median(spent[on]) for on in (False, True))
    low, high = (1e3 * sum(sorted(spent[on])[: len(spent[on]) // 2]) / (len(spent[on]) // 2) for on in (False, True))
    print(f"without {without:.3f} ms, recorded {recorded:.3f} ms: {recorded / without:.4f} times (medians)")
    print(f"means of the quicker half: {low:.3f} and {high:.3f} ms: {high / low:.4f} times")


if __name__ == "__main__":
    main()
