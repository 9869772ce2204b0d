"""Try each kind of loss at each moment of a run of three ranks, and judge what the run does and says.

    python tests/chaos/loss_table.py --engine ddp                       # the whole table
    python tests/chaos/loss_table.py --engine fsdp --only kill:save segv:trial

A row is right if the run ends in time, its last line names a rank that is lost, and why, and no process is left. A run
that goes on ends with the weights of an undisturbed one, to the bit.
"""

import argparse
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import warm
from harness import environment

from lockstep import checkpoint

HERE = Path(__file__).resolve().parent
SILENT = "sent no heartbeat|did not arrive|no progress"
KINDS = {  # what happens, and what the line must say of it
    "kill": ({"do": "kill"}, "SIGKILL"),
    "segv": ({"do": "segv"}, "SIGSEGV"),
    "abort": ({"do": "abort"}, "SIGABRT"),
    "raise": ({"do": "raise", "error": "ValueError"}, "ValueError: planted"),
    "runtime": ({"do": "raise"}, "RuntimeError: planted"),
    "memory": ({"do": "raise", "error": "MemoryError"}, "memory|MemoryError"),
    "exit0": ({"do": "exit", "code": 0}, "code 0"),
    "exit1": ({"do": "exit", "code": 1}, "code 1"),
    "exit3": ({"do": "exit", "code": 3}, "code 3"),
    "exit75": ({"do": "exit", "code": 75}, "code 75"),
    "sysexit": ({"do": "sysexit"}, r"sys\.exit\(1\)|code 1|SystemExit: 1"),
    "stop": ({"do": "stop"}, SILENT),
    "hang": ({"do": "sleep"}, SILENT),
    "interrupt": ({"do": "raise", "error": "KeyboardInterrupt"}, "SIGINT|KeyboardInterrupt: planted"),
    "timeout": ({"do": "raise", "error": "TimeoutError"}, "TimeoutError: planted"),
}
SLOW = {"stop", "hang"}
ENDS = {"raise", "runtime", "memory", "sysexit", "interrupt", "timeout"}  # before step 1 they are the program's own
LOSS = "loss_moments:in_loss"
MOMENTS = {
    "import": {"at": "loss_moments:in_import"},
    "meet": {"at": "lockstep.distributed.world:_connect"},
    "model": {"at": "loss_moments:in_model"},
    "data": {"at": "loss_moments:in_data"},
    "trial": {"at": LOSS, "call": 2},
    "groups": {"at": "lockstep.distributed.world:World.new_group", "call": 2},
    "first": {"at": LOSS, "step": 0},
    "middle": {"at": LOSS, "step": 5},
    "backward": {"at": "loss_moments:in_backward", "step": 5},
    "update": {"at": "lockstep.engines.optimizer_step:OptimizerStep.__call__", "step": 5},
    "evaluation": {"at": "loss_moments:in_evaluation", "step": 3},
    "save": {"at": "lockstep.checkpoint.write:write_file", "step": 3},
    "recovery": {"at": "lockstep.training.recovery.regroup:_restore"},
    "last": {"at": LOSS, "step": 7},
    "end": {"at": "lockstep.training.step.recorder:RunRecorder.finish"},
    "worker": {"at": "loss_moments:in_worker", "call": 20},
}
INTERNAL = {"meet", "groups", "save", "recovery", "end", "worker"}  # an error there ends no rank
BEFORE = {"import", "meet", "model", "data", "trial", "groups"}  # before step 1
LIMIT = 180.0  # seconds; a machine may be busy
_END = 10.0  # seconds for the last processes to end
SETTINGS = "--max-steps 8 --batch-size 12 --micro-batch-size 2 --ckpt-freq 4 --eval-freq 4 --log-freq 1 --no-report"


class Row(NamedTuple):
    """One run: what was planted, what it did, and why it is wrong ("" if it is right)."""

    kind: str
    moment: str
    code: int | None
    seconds: float
    line: str
    wrong: str


def plant(kind: str, moment: str, rank: int, folder: Path) -> list[dict[str, object]]:
    """Return the faults of a row; in a recovery the other rank is lost before."""
    fault = {**KINDS[kind][0], **MOMENTS[moment], "rank": rank, "once": str(folder / "planted")}
    if moment != "recovery":
        return [fault]
    return [{"do": "kill", "at": LOSS, "step": 4, "rank": 2, "once": str(folder / "before")}, fault]


def command(engine: str, folder: Path, moment: str, python: str) -> list[str]:
    flags = [*SETTINGS.split(), "--task", f"{HERE / 'inject' / 'loss_task.py'}:Classes", "--device", "cpu"]
    flags += [] if engine == "fsdp" else ["--exact"]  # with it fsdp has no trial, and its ranks do not change
    flags += ["--engine", engine, "--timeout", "8", "--save-dir", str(folder / "out")]
    flags += ["--data.workers", "1"] if moment == "worker" else []
    return [python, "-m", "lockstep", "launch", "--nproc-per-node", "3", "--", "train", *flags]


def run(
    engine: str, folder: Path, moment: str, faults: list[dict[str, object]], python: str
) -> tuple[int | None, float, str, int]:
    """Return exit code (None: it had to be ended), seconds, what was printed, and the processes that were left."""
    began, log = time.monotonic(), folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command(engine, folder, moment, python),
            env=environment(faults),
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        code = None
    seconds = time.monotonic() - began
    until = time.monotonic() + _END
    while (left := _with_argument(str(folder))) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    return code, seconds, log.read_text(errors="replace"), len(left)


def _with_argument(word: str) -> list[int]:
    """Return the other processes with `word` in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (path / "cmdline").read_bytes() and int(path.name) != os.getpid():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def final_weights(folder: Path) -> str:
    """Return a hash of the weights after the last step; "" if there are none."""
    path = checkpoint.newest(folder / "out" / "default", say=lambda line: None)
    return checkpoint.fingerprint(path) if path and path.name.endswith("00000008") else ""


def judge(engine: str, kind: str, moment: str, rank: int, folder: Path, right: str) -> Row:
    """Run one row and judge it."""
    folder.mkdir(parents=True)
    faults = plant(kind, moment, rank, folder)
    python = sys.executable if kind == "stop" else warm.python()  # a process that is forked there is not the child
    code, seconds, said, left = run(engine, folder, moment, faults, python)
    lines = [line for line in said.splitlines() if line.strip()]
    told = [line for line in lines if re.search("so all start again|; restarting|^finished on", line)]
    last = lines[-1] if lines else ""
    line = ((told[-1] if told else last) if code == 0 else last).replace(str(folder), "FOLDER")  # it names the kind
    wrong = []
    if not (folder / "planted").exists():
        wrong.append("not reached")
    if code is None:
        wrong.append("hangs")
    if left and code is not None:
        wrong.append(f"{left} processes left")
    named = re.findall(r"rank (\d+) \(rank (\d+) at the start\)|rank (\d+)", line)
    ranks = {int(start or now) for _, start, now in named}
    if ranks - {rank, 2 if moment == "recovery" else rank}:
        wrong.append("a healthy rank")
    if rank not in ranks:
        wrong.append("no rank")
    cause = "a loader process died" if moment == "worker" and code == 0 and kind not in SLOW else KINDS[kind][1]
    if not re.search(cause, line):
        wrong.append("no cause")
    if code == 0 and final_weights(folder) != right:
        wrong.append("other weights")
    goes_on = kind not in ENDS if moment in BEFORE else engine == "ddp" and moment != "end"
    if code != 0 and goes_on:
        wrong.append("ends")
    return Row(kind, moment, code, seconds, line, ", ".join(wrong))


def table(engine: str) -> list[tuple[str, str]]:
    """Return the rows of an engine: where the states are split there is no recovery."""
    moments = [moment for moment in MOMENTS if engine == "ddp" or moment != "recovery"]
    return [(kind, moment) for moment in moments for kind in KINDS if moment not in INTERNAL or kind not in ENDS]


def undisturbed(engine: str, folder: Path) -> str:
    """Return a hash of the weights of a run without a fault."""
    folder.mkdir(parents=True)
    code, _, said, _ = run(engine, folder, "", [], warm.python())
    weights = final_weights(folder)
    if code != 0 or not weights:
        raise RuntimeError(said)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="kind:moment, either may be *")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("-j", type=int, default=2)
    args = parser.parse_args()
    base = args.folder or Path(tempfile.mkdtemp(prefix="losses-"))
    rows = table(args.engine)
    if args.only:
        asked = [each.split(":") for each in args.only]
        rows = [
            (kind, moment) for kind, moment in rows if any(k in ("*", kind) and m in ("*", moment) for k, m in asked)
        ]
    right = undisturbed(args.engine, base / "right")
    wrong = 0
    with concurrent.futures.ThreadPoolExecutor(args.j) as pool:
        jobs = [
            pool.submit(judge, args.engine, kind, moment, args.rank, base / f"{kind}-{moment}", right)
            for kind, moment in rows
        ]
        for job in concurrent.futures.as_completed(jobs):
            row = job.result()
            wrong += bool(row.wrong)
            verdict = row.wrong or "right"
            print(f"{row.kind:9} {row.moment:10} {row.code!s:4} {row.seconds:5.1f} s  {verdict}")
            print(f"    {row.line[:300]}", flush=True)
    print(f"{args.engine}: {len(rows) - wrong} of {len(rows)} right; the runs are in {base}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
