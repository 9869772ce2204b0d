"""Time the trial of a task before step 1: python bench/proof.py --before OTHER_CHECKOUT [--rounds 3] [-- TRAIN_FLAGS]

Each round starts `lockstep train` for one step with this checkout and with the other one, in turns. Reported are the
medians of the trial's seconds and processor seconds, and the largest resident memory before and after it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GPT2 = [
    *("--model-name", "builtin:gpt2", "--seq-len", "32", "--batch-size", "4"),
    *("--micro-batch-size", "2", "--limit-eval-batches", "1"),
]
CHILD = """
import json, resource, sys, time
import lockstep.training.start.build as build
from lockstep.__main__ import main

check = build.check_task

def timed(*arguments):
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock, processor = time.perf_counter(), time.process_time()
    found = check(*arguments)
    seconds = time.perf_counter() - clock, time.process_time() - processor
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("TRIAL", json.dumps([*seconds, memory / 1024, after / 1024]), flush=True)
    return found

build.check_task = timed
sys.exit(main())
"""


def trial_of(source: Path, flags: list[str]) -> list[float]:
    """Return the trial's seconds, its processor seconds, and MiB of memory before and after it."""
    paths = os.pathsep.join(map(str, [source / "src", source / "packages/lint/src"]))
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--max-steps", "1", "--checkpoint.mode", "none", "--save-dir", folder, "--device", "cpu"]
        words = [sys.executable, "-c", CHILD, "train", *fixed, *flags]
        printed = subprocess.run(
            words, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=True
        )
    line = next(line for line in printed.stdout.splitlines() if line.startswith("TRIAL"))
    return list(json.loads(line.removeprefix("TRIAL")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="another checkout of lockstep")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="of `lockstep train`; default: a GPT-2 of 124M parameters")
    given = parser.parse_args()
    rows = [[trial_of(source, given.flags or GPT2) for source in (given.before, ROOT)] for _ in range(given.rounds)]
    print("         seconds  processor  MiB before  MiB after")
    for name, place in (("before", 0), ("now", 1)):
        columns = zip(*(row[place] for row in rows), strict=True)
        print(f"{name:8} " + "  ".join(f"{statistics.median(column):9.2f}" for column in columns))
    ratios = [now[1] / before[1] for before, now in rows]
    print(f"ratio of the processor seconds: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
