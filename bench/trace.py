"""What `lockstep trace` costs a training loop: seconds of a step with it and without it, interleaved.

    python bench/trace.py                       three models, five rounds
    python bench/trace.py --only transformer --rounds 9
    python bench/trace.py --turns --rounds 20       the tiny model in one process, the recorder on and off in turn

Each round runs the same script twice, in a process of its own, once under `lockstep trace`; which comes first changes
from round to round. The figure is the median over the rounds of (mean step with) / (mean step without). The first
steps, in which every module's output is digested too, are left out, and shown apart. --cpu counts processor time, for a
machine that has other work; so does --turns, which leaves out what the hooks take while the recorder is off.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AIM = 1.3
FIRST = 3  # steps in which everything is digested


def train(name: str, steps: int, cpu: bool) -> list[float]:
    """Seconds of each step of a plain loop; `cpu`: of processor time."""
    clock = time.process_time if cpu else time.perf_counter
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    if name == "transformer":  # 3.4 million parameters, 1024 tokens a step
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
        body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        model: nn.Module = nn.Sequential(nn.Embedding(512, 256), body, nn.Linear(256, 512))
        data = torch.randint(0, 512, (16 * (steps + 1), 65))
        size = 16
    else:  # a step of a millisecond, or of a few: what the recorder's own calls cost
        width, size = (128, 64) if name == "tiny" else (384, 256)
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        data = torch.randint(0, 10, (size * (steps + 1), 65))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    times, began = [], clock()
    for (rows,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), size):
        if name == "transformer":
            loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        else:
            loss = nn.functional.cross_entropy(model(rows[:, :-1].float()), rows[:, -1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        now = clock()
        times.append(now - began)
        began = now
        if len(times) == steps:
            break
    return times


def timed(name: str, steps: int, cpu: bool, folder: Path | None) -> list[float]:
    """The same in a process of its own, traced into `folder`."""
    command = [sys.executable, __file__, "--child", name, "--steps", str(steps), *(["--cpu"] if cpu else [])]
    if folder is not None:
        command = [sys.executable, "-m", "lockstep", "trace", "-o", str(folder), "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def turns(rounds: int) -> list[list[float]]:
    """[mean seconds of processor time of a tiny step with the recorder on, the same with it off] of each round."""
    import torch  # brings the recorder

    torch.set_num_threads(1)
    journal = sys.modules["lockstep.trace.record.hooks"].present().journal  # this process is traced
    train("tiny", 100, True)
    found = []
    for number in range(rounds):
        means = {}
        for on in (False, True) if number % 2 else (True, False):
            journal.on = on
            means[on] = statistics.mean(train("tiny", 50, True)[2:])
        found.append([means[True], means[False]])
    journal.on = True
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", choices=["", "transformer", "small", "tiny"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="of the Transformer; of the others ten times as many")
    parser.add_argument("--cpu", action="store_true", help="processor time, for a machine that has other work")
    parser.add_argument("--turns", action="store_true", help="the tiny model in one process, by processor time")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child and args.turns:
        print(json.dumps(turns(args.rounds)))
        return
    if args.child:
        print(json.dumps(train(args.child, args.steps, args.cpu)))
        return
    import torch

    print(
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread", flush=True
    )
    with tempfile.TemporaryDirectory() as temporary:
        if args.turns:
            command = [sys.executable, "-m", "lockstep", "trace", "-o", f"{temporary}/turns", "--", sys.executable]
            command += [__file__, "--child", "tiny", "--turns", "--rounds", str(args.rounds)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            pairs = json.loads(done.stdout.splitlines()[-1])
            ratios = sorted(on / off for on, off in pairs)
            print(
                f"tiny, in turns: {statistics.median(ratios):.2f} times the step ({ratios[0]:.2f} to {ratios[-1]:.2f}; "
                f"aim {AIM}), {1e3 * statistics.median(off for _, off in pairs):.1f} ms without"
            )
            return
        for name in ("transformer", "small", "tiny"):
            if args.only not in ("", name):
                continue
            steps = args.steps if name == "transformer" else 10 * args.steps  # short ones
            ratios, firsts, size, plain = [], [], 0.0, []
            for number in range(args.rounds):
                folder = Path(temporary) / f"{name}{number}"
                order = [None, folder] if number % 2 else [folder, None]
                found = {where: timed(name, steps, args.cpu, where) for where in order}
                later = {where: statistics.mean(times[FIRST:]) for where, times in found.items()}
                ratios.append(later[folder] / later[None])
                plain.append(later[None])
                firsts.append(statistics.median(found[folder][1:FIRST]) / later[None])
                size = sum(path.stat().st_size for path in folder.iterdir()) / steps / 1024
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"{name}: {statistics.median(ratios):.2f} times the step ({spread}; aim {AIM}), "
                f"{1e3 * statistics.median(plain):.1f} ms without; {statistics.median(firsts):.2f} times in the first "
                f"{FIRST} steps; {size:.0f} KiB a step",
                flush=True,
            )


if __name__ == "__main__":
    main()
