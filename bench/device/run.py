"""Everything that only a GPU shows, in two commands: make gpu, or python bench/device/run.py [--call 1] [--toy]

    python bench/device/run.py --call 1 --out outputs/gpu     # at most 510 s: tests, contest, waits and saves, exact
    python bench/device/run.py --call 2 --out outputs/gpu     # at most 240 s: 1.5B parameters, variants
    python bench/device/run.py --only probe plan              # stages by name, those of no call too
    python bench/device/run.py --toy                          # a rehearsal of all at tiny size on a CPU

Stages are programs of their own, one after the other, each with a time limit; one that fails or takes too long ends
nothing else, but for call 1's `tests`: beside them every other stage is rehearsed at tiny size on the device, and the
full-size graphs are compiled into the cache. What fails there is left out later, and where `one` does, the call ends:
time on a device is worth more once that is mended. With the Python that is on PATH: nothing is installed. All that is
worth keeping lies under --out: logs.tgz and gpu-results.md, written anew after each stage. A later call adds to them.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = Path(tempfile.gettempdir()) / "lockstep-gpu-cache"  # of the compiler: the second call finds it again
LIMITS = {1: 510, 2: 240}  # seconds of a call
LEAST = 20  # seconds without which a stage is not begun
GRACE = 8  # seconds of a stage that is interrupted at its limit: pytest prints its failures then
TESTS = "-m pytest -m gpu -W default -v --no-header -p no:cacheprovider -n 6 --maxfail 12 --timeout 120 --tb short -rf"
FILES = (
    *("test_gpu.py", "test_gpu_runs.py", "engines/test_engine_gpu.py", "guards/test_guards_gpu.py"),
    "models/test_gpt.py",
)

# Off until a device has measured them: each by itself, then together.
OPTIONS = "residual_dtype=bf16 weight_copies=step,grad_dtype=bf16"
ALL_OPTIONS = "residual_dtype=bf16,weight_copies=step,grad_dtype=bf16"


@dataclass(frozen=True)
class Stage:
    """A program with its limit.

    Attributes:
        call: in which it runs; 0: in none, by name alone.
        limit: seconds.
        command: what Python is given.
        rehearsed: its flags in a rehearsal; None: it is not rehearsed on the device, and on a CPU as it stands.
    """

    call: int
    limit: int
    command: str
    rehearsed: str | None = None

    def rehearsal(self, size):
        """The command at tiny size; `size` is --toy, on the CPU, or --tiny, on the device."""
        return self.command if self.rehearsed is None else f"{self.command.split()[0]} {size} {self.rehearsed}"


STAGES = {
    "machine": Stage(1, 20, "bench/device/machine.py", ""),
    "tests": Stage(1, 140, f"{TESTS} {' '.join(f'tests/{name}' for name in FILES)}"),
    "contest": Stage(
        1, 110, "bench/gpu.py --only bare lockstep 'bare again' --rounds 8 --seconds 90", "--only bare lockstep"
    ),
    "one": Stage(1, 60, "bench/device/one.py", ""),
    "exact": Stage(1, 70, "bench/device/exact.py", ""),
    "peers": Stage(
        1,
        110,
        "bench/gpu.py --only bare lightning hf accelerate --rounds 3 --steps 4",
        "--only bare lightning hf accelerate",
    ),
    "large": Stage(
        2,
        100,
        "bench/device/one.py --model gpt2-xl --only rate first-save --steps 6 --save-every 16",
        "--model gpt2-xl --only rate first-save --save-every 16",
    ),
    "options": Stage(
        2,
        90,
        "bench/gpu.py --at-once 6 --micro 16 --batch 64 --rounds 4 --seconds 75 "
        f"--only lockstep {OPTIONS} {ALL_OPTIONS}",
        f"--only lockstep {ALL_OPTIONS} --at-once 6",
    ),
    "whole": Stage(2, 50, "bench/device/one.py --only rate --scope whole", "--only rate --scope whole"),
    "large-options": Stage(
        0,
        100,
        f"bench/device/one.py --model gpt2-xl --only rate --steps 6 --set {ALL_OPTIONS.replace(',', ' ')}",
        "",
    ),
    "default-loss": Stage(
        0, 90, "bench/device/one.py --only rate --loss-chunk -1 --micro 16 --batch 32", "--only rate --loss-chunk -1"
    ),
    "llama": Stage(0, 90, "bench/device/one.py --model llama-1b --only rate --steps 6", "--model llama-1b --only rate"),
    "probe": Stage(0, 150, "bench/device/probe.py", ""),
    "plan": Stage(0, 90, "bench/device/plan.py", ""),
}
# What runs beside the tests, where nothing is timed.
BESIDE = {
    "warm": "bench/gpu.py --only bare lockstep --rounds 0",  # the graphs that later stages need, at full size
    "commands": "bench/device/commands.py",  # as a user types them
}
ESSENTIAL = "one"  # what nearly all others are made of


class Started:
    """A program that runs, with its log; in a session of its own, so that what it started ends with it."""

    def __init__(self, name, command, folder, variables):
        self.name, self.log, self.began = name, folder / f"{name.replace(' ', '-')}.log", time.monotonic()
        arguments = [sys.executable, *shlex.split(command)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                arguments, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )

    def result(self, limit):
        """Wait for its end, at most `limit` seconds from its start, and collect its figures."""
        late = not self.wait(self.began + limit - GRACE)
        if late:
            self.process.send_signal(signal.SIGINT)
            self.wait(self.began + limit)
        self.kill()  # what is left of its session, too
        code = self.process.wait()
        ended = f"took longer than {limit - GRACE:.0f} s" if late else f"exit {code}" if code else "done"
        said = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        objects = [found for line in said if (found := _json(line)) is not None]
        return {
            "stage": self.name,
            "ended": ended,
            "late": late,
            "seconds": round(time.monotonic() - self.began, 1),
            "figures": list({each["figure"]: each for each in objects if "figure" in each}.values()),
            "other": [each for each in objects if "figure" not in each],
            "last": [line[:240] for line in said if line.strip() and _json(line) is None][-6:],
            "failures": list(dict.fromkeys(name for line in said if (name := failure(line))))[:16],
        }

    def wait(self, until):
        """Whether it has ended by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
            return True
        return False

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def failure(line):
    """The test that a line of pytest's names as failed, as the line says it; "" in any other line."""
    found = re.search(r"\b(?:FAILED|ERROR) (tests/\S+.*)", line)
    return found[1][:240].strip() if found else ""


def environment(toy, compilers=0):
    """Build the environment of a stage; a variable that is set already stays as it is.

    Args:
        compilers: processes that compile; 0: all cores but two.
    """
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench"), str(ROOT / "tests")])
    found = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "LOCKSTEP_CACHE": str(CACHE / "data")}
    if not toy:
        found |= {
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(compilers or max(1, (os.cpu_count() or 2) - 2)),
            "TORCH_LOGS": "recompiles,graph_breaks",
            "TRITON_CACHE_DIR": str(CACHE / "triton"),
        }
    return found | os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


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
        if name not in ("figure", "value", "unit", "aim", "better") and value not in (None, "")
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
        lines += [f"- `{line}`" for line in result["failures"]]
        if result["figures"]:
            lines += ["", "| what | measured | aim | met | more |", "|---|---|---|---|---|"]
            lines += [*map(row, result["figures"]), ""]
        elif result["last"]:
            lines += [f"`{result['last'][-1]}`", ""]
        for each in result["other"]:
            if "kernels" in each:
                lines += ["| kernel | a step | ms a step |", "|---|---|---|"]
                lines += [f"| `{name}` | {count:g} | {spent:.3f} |" for name, count, spent in each["kernels"]]
                lines.append("")
    return "\n".join(lines) + "\n"


def printed(result):
    """Prints what a stage showed, few lines of it."""
    print(f"## {result['stage']}: {result['ended']} in {result['seconds']} s", flush=True)
    for each in result["figures"]:
        print("  " + row(each)[2:-2])
    for each in result["other"]:
        if "failed" in each:
            print(f"  not had: {each['failed']}: {each['why'][:300]}")
        for name, _, spent in each.get("kernels", [])[:12]:
            print(f"  {spent:8.3f} ms {name[:80]}")
    for line in result["failures"]:
        print(f"  {line}")
    if result["ended"] != "done" or not result["figures"]:
        for line in result["last"]:
            print(f"  | {line}")
    sys.stdout.flush()


class Call:
    """The stages that were asked for, one after the other.

    Attributes:
        results: of all stages, those of earlier calls first.
    """

    def __init__(self, out, toy, seconds):
        self.out, self.toy, self.seconds, self.began = out, toy, seconds, time.monotonic()
        self.results, self.logs = earlier(out / "logs.tgz")
        self.own, self.broken = [], set()

    def left(self):
        return self.seconds - (time.monotonic() - self.began)

    def run(self, names, folder):
        """Runs the stages; False where what nearly all are made of does not even run at tiny size."""
        for name in names:
            limit = min(STAGES[name].limit, self.left())
            if name in self.broken:
                self.keep({**nothing(name), "ended": "left out: its rehearsal failed"}, folder)
            elif limit < LEAST:
                self.keep({**nothing(name), "ended": "left out: no time"}, folder)
            else:
                command = STAGES[name].rehearsal("--toy") if self.toy else STAGES[name].command
                stage = Started(name, command, folder, environment(self.toy))
                beside = self.rehearse(names, folder) if name == "tests" and not self.toy else {}
                self.keep(stage.result(limit), folder)
                for other, program in beside.items():
                    found = program.result(limit)
                    well = found["ended"] == "done" and (found["figures"] or other in BESIDE)
                    if not well and not found["late"]:  # many run at once: to be late says nothing
                        self.broken.add(other)
                    if not well or other == "commands":
                        self.keep(found, folder)
            if ESSENTIAL in self.broken:
                print(f"the rehearsal of `{ESSENTIAL}` on the device failed: this call ends here")
                return False
        return True

    def rehearse(self, names, folder):
        """Begins what runs beside the tests, and rehearsals of both calls on the device, with few compilers each."""
        if names == ["tests"]:
            return {}
        found = {name: Started(name, command, folder, environment(False)) for name, command in BESIDE.items()}
        few = environment(False, compilers=2)
        for name, stage in STAGES.items():
            if stage.call and stage.rehearsed is not None and name != "machine":
                found[name] = Started(f"rehearsal of {name}", stage.rehearsal("--tiny"), folder, few)
        return found

    def keep(self, result, folder):
        """Prints a result, and writes page and tarball anew."""
        printed(result)
        self.own.append(result)
        self.results = [each for each in self.results if each["stage"] != result["stage"]] + [result]
        self.logs |= {path.name: path.read_bytes() for path in folder.glob("*.log")}
        write(self.out, self.results, self.logs, self.toy)


def nothing(name):
    return {"stage": name, "seconds": 0, "figures": [], "other": [], "last": [], "failures": []}


def earlier(path):
    """(results, logs by name) of the calls before; of none where there were none."""
    if not path.is_file():
        return [], {}
    with tarfile.open(path) as archive:
        logs = {each.name: archive.extractfile(each).read() for each in archive.getmembers() if each.isfile()}
    return json.loads(logs.pop("results.json")), logs


def write(out, results, logs, toy):
    """Writes the page and the tarball, each whole."""
    files = logs | {"results.json": json.dumps(results, indent=1).encode()}
    with tarfile.open(out / "logs.tgz.new", "w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    os.replace(out / "logs.tgz.new", out / "logs.tgz")
    (out / "gpu-results.md").write_text(document(results, toy), encoding="utf-8")


def check(out, toy):
    """Ends here, before anything is written, where there is no GPU to measure or no place for what it shows."""
    if not toy:
        asked = "import torch; raise SystemExit(not torch.cuda.is_available())"
        found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
        if found.returncode:
            why = (found.stderr.strip().splitlines() or ["torch sees no CUDA device"])[-1]
            way = "name a Python that has both, make gpu PYTHON=..., or rehearse: make gpu ARGS=--toy"
            print(f"make gpu: {sys.executable}: {why}; {way}")
            raise SystemExit(2)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "logs.tgz.new").write_bytes(b"")
        (out / "logs.tgz.new").unlink()
    except OSError as error:
        print(f"make gpu: --out {out}: {error.strerror}; give a folder that can be written")
        raise SystemExit(2) from None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--call", type=int, choices=LIMITS, help="the stages of this call alone (default: of both)")
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--seconds", type=float, help="for all stages together (default: the calls' limits)")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU: a rehearsal")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu")
    given = parser.parse_args()
    check(given.out, given.toy)
    calls = [given.call] if given.call else list(LIMITS)
    names = given.only or [name for name, stage in STAGES.items() if stage.call in calls]
    most = given.seconds or (sum(STAGES[name].limit for name in names) if given.only else sum(map(LIMITS.get, calls)))
    call = Call(given.out, given.toy, most)
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        well = call.run(names, Path(folder))
    failed = [each["stage"] for each in call.own if each["ended"] != "done"]
    missed = [each for result in call.own for each in result["figures"] if met(each) == "no"]
    spent = time.monotonic() - call.began
    print(f"{given.out}: {len(call.own)} stages in {spent:.0f} s, {len(failed)} not done{': ' * bool(failed)}", end="")
    print(", ".join(failed))
    print(f"{len(missed)} aims not met" + "".join(f"\n  {each['figure']}: {shown(each['value'])}" for each in missed))
    raise SystemExit(bool(failed) or not well)


if __name__ == "__main__":
    main()
