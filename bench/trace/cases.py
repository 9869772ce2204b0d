"""Planted mistakes in scripts of four frameworks, and healthy pairs: what `lockstep trace` and `compare` say of them.

    python bench/trace/cases.py                          all of them
    python bench/trace/cases.py --only ddp:              those whose name holds one of these
    python bench/trace/cases.py --dtype bf16             all of them with autocast
    python bench/trace/cases.py --grid                   all of them in two dtypes, two orders, equal and ragged
    python bench/trace/cases.py --warm                   faster: forked from a process that has the frameworks loaded
    python bench/trace/cases.py --check                  no tracing: that each mistake does what table.py says of it

A mistake counts as named where compare ends with 3 and names step, stage and cause as table.py has them, which was
written first. A healthy pair counts as silent where compare ends with 0.
"""

import argparse
import importlib
import json
import platform
import re
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from running import Failed, checked, command, journals, ran
from table import Case, Healthy, grid, saved_at, with_settings

AIM = 0.9
FRAMEWORKS = {"accelerate": "transformers", "hf": "transformers", "lightning": "lightning"}  # as `ranks.run` loads them


class Bench:
    """Runs what is asked for once, and keeps it in a folder, whence another call takes it."""

    def __init__(self, folder: Path, traced: bool) -> None:
        self.folder, self.traced = folder, traced

    def _place(self, *parts: object) -> Path:
        """A folder whose name says nothing, since compare repeats it."""
        return self.folder / f"{zlib.crc32(repr(parts).encode()):08x}"

    def run(self, script: str, world: int, flags: tuple[str, ...], again: int = 0) -> Path:
        """The folder of the run: `trace/` and the journals `out.0`, `out.1`, ..."""
        place = self._place(script, world, *flags, *([again] if again else []))
        if not (place / "done").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            words = command(script, world, (*flags, "--out", str(place / "out")))
            if self.traced:
                words = [sys.executable, "-m", "lockstep", "trace", "-o", str(place / "trace"), "--", *words]
            done = ran(words)
            (place / "done").write_text(" ".join(words) + "\n" + done.stdout + done.stderr)
        return place

    def checkpoint(self, script: str, flags: tuple[str, ...]) -> str:
        """Where a checkpoint of the correct script on two processes lies."""
        place = self._place(script, "saved", *flags)
        if not (place / "done").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            ran(command(script, 2, (*flags, "--save", str(place / "saved"), "--save-at", str(saved_at(script)))))
            (place / "done").touch()
        place = place / "saved"
        if script == "hf":
            return str(place / f"checkpoint-{saved_at(script)}")
        return str(place / "epoch=0.ckpt") if script == "lightning" else str(place)

    def going_on(self, script: str, flags: tuple[str, ...]) -> tuple[str, ...]:
        """The flags of a resume."""
        return ("--resume", self.checkpoint(script, flags), "--save-at", str(saved_at(script)))

    def mistake(self, case: Case) -> tuple[Path, Path]:
        """Of the correct script on one process, and of the mistaken one on two."""
        more = self.going_on(case.script, case.flags) if case.resumed else ()
        one = self.run(case.script, 1, (*case.flags, *(("--mistake", case.mistake) if case.both else ())))
        return one, self.run(case.script, 2, (*case.flags, *more, "--mistake", case.mistake))

    def healthy(self, pair: Healthy) -> tuple[Path, Path]:
        more = self.going_on(pair.script, pair.two[1]) if pair.resumed else ()
        return self.run(pair.script, *pair.one), self.run(pair.script, pair.two[0], (*pair.two[1], *more), again=1)


def compare(one: Path, two: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and what `lockstep compare --json` says."""
    words = [sys.executable, "-m", "lockstep", "compare", str(one / "trace"), str(two / "trace"), "--json"]
    done = ran(words, good=(0, 3))
    return done.returncode, json.loads(done.stdout)


def judged(case: Case, code: int, found: dict[str, Any]) -> list[str]:
    """Which of alarm, step, stage and cause are not as the table has them."""
    if code != 3:
        return ["alarm"]
    first = found["finding"]
    wrong = [] if first["step"] - 1 in case.steps else ["step"]  # compare counts from 1, the table from 0
    wrong += [] if first["stage"] in case.stages else ["stage"]
    return wrong + ([] if all(re.search(cause, said(found), re.IGNORECASE) for cause in case.causes) else ["cause"])


def of_case(bench: Bench, case: Case) -> tuple[bool, str]:
    """(as it should be, a line)."""
    one, two = bench.mistake(case)
    wrong = checked(case, journals(one / "out", 1)[0], journals(two / "out", 2))
    if wrong:
        return False, f"NOT A MISTAKE: {wrong}"
    if not bench.traced:
        return True, "does what the table says"
    code, found = compare(one, two)
    missed = judged(case, code, found)
    return not missed, f"{'named' if not missed else 'missed: ' + ', '.join(missed)} | {said(found)}"


def of_pair(bench: Bench, pair: Healthy) -> tuple[bool, str]:
    """(as it should be, a line)."""
    one, two = bench.healthy(pair)
    ones, twos = journals(one / "out", pair.one[0]), journals(two / "out", pair.two[0])
    wrong = unequal(pair, ones, twos)
    if wrong:
        return False, f"NOT EQUAL: {wrong}"
    if not bench.traced:
        return True, "equal" if pair.equal != "random" else "the masks differ, as they must"
    code, found = compare(one, two)
    return code == 0, f"{'silent' if code == 0 else 'ALARM'} | {said(found)}"


def unequal(pair: Healthy, ones: list[dict[str, Any]], twos: list[dict[str, Any]]) -> str:
    """ "" where the journals are what `equal` promises."""
    case = Case(pair.script, "", (0,), (), (), flags=pair.two[1], resumed=pair.resumed)
    parts = checked(case, ones[0], twos)  # "the weights part at None" where they never do
    if pair.equal == "random":
        return "" if not parts else f"dropout's masks agree, or differ late: {parts}"
    if pair.equal == "bits":
        begin = saved_at(pair.script) if pair.resumed else 0
        same = all(a["weights"][begin:] == b["weights"] for a, b in zip(ones, twos, strict=True))
        return "" if same else "the bits differ"
    return "" if parts.endswith("None") else parts or "the weights part at 0"


def said(found: dict[str, Any]) -> str:
    """compare's answer in a line."""
    first = found["finding"]
    if first is None:
        return found["unproven"] or f"the same, {found['steps_with_the_same_bits']} of {found['steps']} steps in bits"
    rank = f", rank {first['rank']}" if first["rank"] >= 0 else ""
    return f"step {first['step']}{rank}, {first['stage']}: {first['text']} ({first['way']})"


def warm_python(scripts: set[str]) -> str:
    """Return an interpreter whose processes are forked from one that has torch and the scripts' frameworks loaded."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    for script in scripts & FRAMEWORKS.keys():
        importlib.import_module(FRAMEWORKS[script])
    return str(importlib.import_module("warm").python())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="names that hold one of these, with commas between: ddp:,:bit-flip,healthy:hf:"
    )
    parser.add_argument("--check", action="store_true", help="run the scripts without tracing them")
    parser.add_argument("--dtype", default="", choices=["", "float32", "bf16"], help="of every script; bf16: autocast")
    parser.add_argument("--order", default="", choices=["", "pad-shift", "shift-pad"], help="of padding and shift")
    parser.add_argument("--grid", action="store_true", help="in both dtypes, both orders, with equal and ragged labels")
    parser.add_argument(
        "--warm", action="store_true", help="fork the processes from one that has loaded what they need"
    )
    parser.add_argument("--folder", default="", help="keep runs and traces here, and take those that are here")
    args = parser.parse_args()
    cases, pairs = grid() if args.grid else with_settings(args.dtype, args.order)
    wanted: list[tuple[str, Any, Any]] = [(case.name, of_case, case) for case in cases]
    wanted += [(f"healthy:{pair.script}:{pair.name}", of_pair, pair) for pair in pairs]
    wanted = [
        (name, judge, which) for name, judge, which in wanted if any(part in name for part in args.only.split(","))
    ]
    if args.warm:
        sys.executable = warm_python({which.script for _, _, which in wanted})
    print(f"{platform.machine()}, Python {platform.python_version()}", flush=True)
    scores: dict[str, list[bool]] = {"planted": [], "own": [], "healthy": []}
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(Path(args.folder or temporary).resolve(), not args.check)
        for name, judge, which in wanted:
            began = time.perf_counter()
            try:
                good, line = judge(bench, which)
            except Failed as failed:
                good, line = False, f"FAILED: {failed}"
            kind = "healthy" if isinstance(which, Healthy) else "own" if which.own else "planted"
            scores[kind].append(good)
            print(f"{'ok ' if good else 'NO '} {name:32} {line}  ({time.perf_counter() - began:.0f} s)", flush=True)
    named = scores["planted"] + scores["own"]
    if named:
        print(f"mistakes: {sum(named)} of {len(named)} = {sum(named) / len(named):.2f} (aim {AIM})")
    if scores["healthy"]:
        print(f"healthy pairs: {sum(scores['healthy'])} of {len(scores['healthy'])} without an alarm (aim: all)")
    sys.exit(0 if all(scores["healthy"]) and sum(named) >= AIM * len(named) else 1)


if __name__ == "__main__":
    main()
