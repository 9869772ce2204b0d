"""What a report costs: python bench/report.py [--records 1000000] [--keep DIR]

Makes a run's folder with so many training records (an evaluation every hundredth, a spike in the middle), writes its
report in a process of its own, and prints the seconds, the bytes of the page, and the memory above what the process had
after its imports. Aims: 300 MB, 300 KB.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import resource, sys, time
from pathlib import Path
from lockstep.report.page import write
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, began = peak(), time.perf_counter()
write([Path(each) for each in sys.argv[2:]], Path(sys.argv[1]))
print(f"{time.perf_counter() - began:.2f} {Path(sys.argv[1]).stat().st_size} {peak() - before:.0f}")
"""


def made(folder, count, seed=0, rate=1.0):
    """A run's folder as one of `count` records would have left it, without checkpoints."""
    folder.mkdir(parents=True)
    draw, every = random.Random(seed), 10
    with open(folder / "metrics.jsonl", "w") as file:
        for window in range(1, count + 1):
            step, done = window * every, window / count
            loss = 2.2 + 8.5 * math.exp(-9 * done * rate) + draw.gauss(0, 0.06) + (6.0 if window == count // 2 else 0)
            record = {
                "global_step": step,
                "epoch": int(done * 3),
                "epoch_progress": (done * 3) % 1,
                "num_batches_remaining": 0,
                "lr": 3e-4 * min(1.0, 50 * done) * (0.55 + 0.45 * math.cos(math.pi * done)),
                "running_loss": loss,
                "grad_norm": math.exp(draw.gauss(0, 0.35)) * (1 + 3 * math.exp(-20 * done)),
                "items_per_second": 182_000 + draw.gauss(0, 4000),
                "memory": 38_400_000_000 + (2_000_000_000 if done > 0.3 else 0),
                "time/data": 1.1 + draw.random(),
                "time/forward": 61 + draw.gauss(0, 1),
                "time/backward": 118 + draw.gauss(0, 2),
                "time/update": 9 + draw.random(),
                "time/total": 191.0,
            }
            file.write(json.dumps(record) + "\n")
            if window % max(1, count // 60) == 0:
                evaluation = {"evaluation/loss": 2.3 + 8 * math.exp(-9 * done * rate), "evaluation/items": 5_000_000}
                file.write(
                    json.dumps({"global_step": step, **evaluation, "evaluation/accuracy": 0.6 * done**0.3}) + "\n"
                )
    whole = count * every
    best = {"step": whole, "loss": 2.3017, "metric": "loss", "value": 2.3017}
    plan = {"seed": 0, "batch_size": 512, "samples": 1_000_000, "dataset_samples": 1_000_000, "steps": whole}
    state = {"global_step": whole, "best": best, "plan": plan, "world_size": 8, "restarts": 1, "losses": 2}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "ended.json").write_text(json.dumps({"status": "finished", "code": 0, "step": whole}))
    (folder / "config.toml").write_text(
        f"max_steps = {whole}\nseed = 0\nlr = {3e-4 * rate}\nbatch_size = 512\nlog_freq = 10\n"
    )
    now, lines = 1.7e9, []
    lines.append({"t": now, "what": "start", "step": 0, "world": 8, "spent": {"start": 41.0}})
    for part in range(1, 2001):
        spent = {"training": 100.0, "loading": 0.6, "saves": 0.3, "evaluation": 1.4}
        now += sum(spent.values())
        lines.append({"t": now, "what": "at", "step": whole * part // 2000, "spent": spent})
        if part == 900:
            now += 240.0
            lines.append({"t": now, "what": "start", "step": whole * 880 // 2000, "world": 8, "spent": {"start": 35.0}})
    lines.append({"t": now + 4, "what": "end", "step": whole, "status": "finished", "spent": {"ending": 4.0}})
    (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def measured(out, *folders):
    """(seconds, bytes, MB above the start) of one report, in a process of its own."""
    command = [sys.executable, "-c", CHILD, str(out), *map(str, folders)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(said[0]), int(said[1]), float(said[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = given.keep or Path(scratch)
        few, one = made(base / "few", 100), made(base / "one", given.records)
        print("| report of | seconds | bytes | MB above the start |\n|---|---|---|---|")
        tell("100 records", measured(base / "page.html", few))
        tell(f"{given.records:,} records", measured(base / "page.html", one))
        other = made(base / "other", given.records, seed=1, rate=1.2)
        tell("two of these", measured(base / "page.html", one, other))


def tell(name, found):
    seconds, size, memory = found
    print(f"| {name} | {seconds:.2f} | {size:,} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()
