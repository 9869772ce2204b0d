"""Everything that only a GPU shows, in 25 minutes: make gpu, or python bench/device/run.py [--toy] [--only probe waits]

Stages are programs of their own, one after the other, each with a time limit; one that fails or takes too long ends
nothing else. With the Python that is on PATH: nothing is installed. Figures are kept in --out as JSON, so that stages
may be run in several calls, and docs/gpu-results.md is written from all that lie there, each beside its aim. With --toy
everything runs at tiny size on a CPU, and the results are written into --out: a rehearsal.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# name: (seconds, what to run)
STAGES = {
    "machine": (60, "bench/device/machine.py"),
    "tests": (240, "-m pytest -m gpu -q --no-header -p no:cacheprovider"),
    "probe": (150, "bench/device/probe.py"),
    "parts": (240, "bench/device/parts.py"),
    "waits": (90, "bench/device/waits.py"),
    "contest": (300, "bench/gpu.py"),
    "exact": (150, "bench/device/exact.py"),
    "large": (210, "bench/device/large.py"),
    "plan": (60, "bench/device/plan.py"),
}


def run(name, command, limit, folder, toy):
    """Runs a stage; its figures. What it prints lies in NAME.log."""
    arguments = [sys.executable, *shlex.split(command)]
    if toy and name != "tests":
        arguments.append("--toy")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench"), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if not toy:
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        environment.setdefault("TORCH_LOGS", "recompiles,graph_breaks")
    began = time.monotonic()
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            arguments, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit)
            ended = "done" if not code else f"exit {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own
            process.wait()
            ended = f"took longer than {limit} s"
    said = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
    objects = [found for line in said if (found := _json(line)) is not None]
    result = {
        "stage": name,
        "ended": ended,
        "seconds": round(time.monotonic() - began, 1),
        "figures": [each for each in objects if "figure" in each],
        "other": [each for each in objects if "figure" not in each],
        "last": next((line for line in reversed(said) if line.strip() and _json(line) is None), ""),
    }
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def _json(line):
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def met(figure):
    """ "yes" or "no" where there is an aim and a value."""
    value, aim = figure["value"], figure["aim"]
    if value is None or aim is None:
        return ""
    return "yes" if (value <= aim if figure["better"] == "less" else value >= aim) else "no"


def shown(value):
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def row(figure):
    more = "; ".join(
        f"{name} {shown(value)}"
        for name, value in figure.items()
        if name not in ("figure", "value", "unit", "aim", "better") and isinstance(value, int | float)
    )
    sign = {"more": ">=", "less": "<="}[figure["better"]]
    aim = "" if figure["aim"] is None else f"{sign} {shown(figure['aim'])}"
    return f"| {figure['figure']} | {shown(figure['value'])} {figure['unit']} | {aim} | {met(figure)} | {more} |"


def document(results, toy):
    """The page, from the results of all stages that were run."""
    lines = ["# What a GPU showed", ""]
    if toy:
        lines += ["**A rehearsal at tiny size on a CPU: the figures mean nothing.**", ""]
    lines += ["Written by `make gpu`; each stage is a program in `bench/device/`, or `bench/gpu.py`.", ""]
    for result in results:
        for each in result["other"]:
            for name in ("versions", "nvidia_smi"):
                if name in each:
                    lines += ["; ".join(f"{key} {value}" for key, value in each[name].items() if value), ""]
    for result in results:
        lines += [f"## {result['stage']}: {result['ended']} in {result['seconds']} s", ""]
        lines += [f"- not had: {each['failed']}: {each['why']}" for each in result["other"] if "failed" in each]
        if result["figures"]:
            lines += ["", "| what | measured | aim | met | more |", "|---|---|---|---|---|"]
            lines += [*map(row, result["figures"]), ""]
        elif result["last"]:
            lines += [f"`{result['last'][:200]}`", ""]
    return "\n".join(lines)


def check():
    """Ends here, before anything is written, where this Python has no GPU to measure."""
    asked = "import torch; raise SystemExit(not torch.cuda.is_available())"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    if found.returncode:
        why = (found.stderr.strip().splitlines() or ["torch sees no CUDA device"])[-1]
        way = "name a Python that has both, make gpu PYTHON=..., or rehearse: make gpu ARGS=--toy"
        print(f"make gpu: {sys.executable}: {why}; {way}")
        raise SystemExit(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU: a rehearsal")
    parser.add_argument("--only", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu")
    given = parser.parse_args()
    if not given.toy:
        check()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, (limit, command) in STAGES.items():
        if name not in given.only:
            continue
        print(f"{name} (at most {limit} s) ...", flush=True)
        result = run(name, command, limit, given.out, given.toy)
        print(f"  {result['ended']} in {result['seconds']} s; {result['last'][:160]}", flush=True)
        for figure in result["figures"]:
            print("  " + row(figure), flush=True)
        for each in result["other"]:
            if "failed" in each:
                print(f"  not had: {each['failed']}: {each['why']}", flush=True)
    kept = [path for name in STAGES if (path := given.out / f"{name}.json").exists()]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in kept]
    target = given.out / "gpu-results.md" if given.toy else ROOT / "docs" / "gpu-results.md"
    target.write_text(document(results, given.toy) + "\n", encoding="utf-8")
    failed = [each["stage"] for each in results if each["stage"] in given.only and each["ended"] != "done"]
    missed = [each for result in results for each in result["figures"] if met(each) == "no"]
    print(f"{target}: {len(results)} stages, {len(failed)} of them not done{': ' * bool(failed)}{', '.join(failed)}")
    print(f"{len(missed)} aims not met" + "".join(f"\n  {each['figure']}: {shown(each['value'])}" for each in missed))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
