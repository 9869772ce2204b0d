"""`python corpus/kept.py FOLDER`: count the linter's errors in five well-kept repositories.

FOLDER has each at its commit as FOLDER/OWNER+NAME, with a folder `.git`. Prints a row per repository, and each error.
"""

import argparse
import time
from pathlib import Path

from lockstep_lint.command import find_files
from lockstep_lint.config import configure
from lockstep_lint.finding import Severity
from lockstep_lint.runner import check_paths

REPOSITORIES = {
    "pytorch/torchtitan": "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a",
    "allenai/OLMo-core": "fa6c5014c9f6e9ee789da2d9c20d5126fee8df0d",
    "mosaicml/composer": "6405188805a0054b4551ec49e4919c54c971d0e8",
    "Lightning-AI/pytorch-lightning": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "google-deepmind/optax": "2edbcbe2390da13983b92cbef94ac0460ecde1c5",
}


def main() -> None:
    """Check the repositories and print their errors."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("folder", type=Path)
    args = flags.parse_args()
    print("| repository | commit | files | errors | seconds |\n|---|---|---|---|---|")
    errors = []
    for name, commit in REPOSITORIES.items():
        folder = args.folder / name.replace("/", "+")
        if not folder.is_dir():
            flags.error(f"{folder} is not there: check {name} out at {commit}")
        files, start = find_files([str(folder)]), time.perf_counter()
        found = [f for f in check_paths(files, configure({}, None, None)) if f.severity is Severity.ERROR]
        errors += found
        seconds = time.perf_counter() - start
        print(f"| {name} | {commit[:10]} | {len(files)} | {len(found)} | {seconds:.1f} |")
    for finding in errors:
        print(f"{finding.path}:{finding.line}: {finding.rule} {finding.message}")


if __name__ == "__main__":
    main()
