"""`python bench/lint/speed.py [FOLDER] [--files 1000]`: how long `lockstep lint` takes for many files.

Without FOLDER, training scripts are made from the rules' own examples: about 200 lines each, a hundred to a folder,
every tenth imported by its neighbours. With FOLDER, its first files are checked where they lie.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lockstep.lint.discover import find_files
from lockstep.lint.rules import RULES

LINES = 200


def scripts(folder, count):
    """Writes `count` scripts of about LINES lines each."""
    examples = [text for rule in RULES.values() for text in (*rule.bad, *rule.good)]
    for i in range(count):
        home = folder / f"project{i // 100:02d}"
        home.mkdir(exist_ok=True)
        parts = [f"import common{i // 10 * 10:04d}\n"] if i % 10 else []
        while sum(part.count("\n") for part in parts) < LINES:
            parts.append(examples[(i + 7 * len(parts)) % len(examples)])
        name = f"script{i:04d}.py" if i % 10 else f"common{i:04d}.py"
        (home / name).write_text("\n".join(parts))


def measure(paths):
    """The wall and the processor seconds of one command over the paths, and its exit code."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "lockstep", "lint", "--select", "ALL", "--format", "json", *paths]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    used = os.times()
    return time.perf_counter() - start, used.children_user + used.children_system, code


def main():
    """Measures and prints one line."""
    flags = argparse.ArgumentParser()
    flags.add_argument("folder", nargs="?")
    flags.add_argument("--files", type=int, default=1000)
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if args.folder:
            paths = find_files([args.folder])[: args.files]
        else:
            scripts(Path(temporary), args.files)
            paths = [temporary]
        lines = sum(Path(path).read_bytes().count(b"\n") for path in find_files(paths))
        seconds, worked, code = measure(paths)
    print(f"{args.files} files, {lines} lines: {seconds:.1f} s, {worked:.1f} s of processor time (exit {code})")


if __name__ == "__main__":
    main()
