"""`python corpus/speed.py [FOLDER] [--files 1000] [--parts N]`: how long the linter takes for many files.

Without FOLDER, training scripts are made from the rules' own examples: about 200 lines each, a hundred to a folder,
every tenth imported by its neighbours. With FOLDER, files that are drawn from it (by a fixed lot) are checked where
they lie. With --parts the same files are checked again in parts of N, in another order, and the findings are compared.
Files that could not be checked are counted.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from lockstep_lint.command import find_files

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from rule_examples import all_examples

LINES = 200


def scripts(folder, count):
    """Writes `count` scripts of about LINES lines each."""
    examples = all_examples("bad", "good")
    for i in range(count):
        home = folder / f"project{i // 100:02d}"
        home.mkdir(exist_ok=True)
        parts = [f"import common{i // 10 * 10:04d}\n"] if i % 10 else []
        while sum(part.count("\n") for part in parts) < LINES:
            parts.append(examples[(i + 7 * len(parts)) % len(examples)])
        name = f"script{i:04d}.py" if i % 10 else f"common{i:04d}.py"
        (home / name).write_text("\n".join(parts))


def measure(paths):
    """The wall and the processor seconds of one command over the paths, its exit code, and the findings."""
    start, before = time.perf_counter(), os.times()
    command = [sys.executable, "-m", "lockstep_lint", "--select", "ALL", "--format", "json", *paths]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    used = os.times()
    worked = used.children_user + used.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, worked, done.returncode, json.loads(done.stdout or "[]")


def apart(paths, size):
    """The findings of the same files in parts of `size`, in an order drawn by lot."""
    paths = random.Random(1).sample(paths, len(paths))
    return [one for i in range(0, len(paths), size) for one in measure(paths[i : i + size])[3]]


def main():
    """Measures and prints a line, and another for the parts."""
    flags = argparse.ArgumentParser()
    flags.add_argument("folder", nargs="?")
    flags.add_argument("--files", type=int, default=1000)
    flags.add_argument("--parts", type=int, metavar="N")
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if args.folder:
            there = find_files([args.folder])
            given = paths = random.Random(0).sample(there, min(args.files, len(there)))
        else:
            scripts(Path(temporary), args.files)
            given, paths = [temporary], find_files([temporary])
        lines = sum(Path(path).read_bytes().count(b"\n") for path in paths)
        seconds, worked, code, findings = measure(given)
        print(f"{len(paths)} files, {lines} lines: {seconds:.1f} s, {worked:.1f} s of processor time (exit {code})")
        unread = Counter(one["message"].split(": ")[1] for one in findings if one["rule"] == "LS000")
        print(f"{len(findings)} findings; of files that could not be checked: {dict(unread)}")
        if args.parts:
            same = sorted(map(json.dumps, findings)) == sorted(map(json.dumps, apart(paths, args.parts)))
            print(f"in parts of {args.parts}, in another order: {'the same findings' if same else 'OTHER FINDINGS'}")


if __name__ == "__main__":
    main()
