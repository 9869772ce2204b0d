"""The scoreboard of reliability, measured: python bench/chaos.py [--only R1 R11] [--rounds 20] [--write]

Each row plants a fault in a real run on two gloo processes and prints row, metric, goal and what was measured; --write
puts the table into docs/inside/reliability.md with the machine described. Times are of this machine, under its present
load. A row that cannot run here (it needs root) says so. R9, R10, R13, R14, R17, R20 to R23 and R25 to R29 are in
bench/chaos_more.py.
"""

import argparse
import os
import platform
import queue
import random
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "chaos")]

from chaos_more import NEEDS_ROOT, mounted, r9, r10, r13, r14, r17, r20, r21, r22, r23, r25, r26, r27, r28, r29  # noqa: E402
from harness import BEAT, Run, arguments, end, launch, start, until_step  # noqa: E402

from lockstep import checkpoint  # noqa: E402

WRITE = "lockstep.checkpoint.write:write_file"
UPDATE = "lockstep.engines.optimizer_step:OptimizerStep.__call__"
BLOCK = "lockstep.models.gpt:Block.forward"
LOSS = "lockstep.tasks.language_model:CausalLM.loss"
TIMEOUT = 6


@dataclass
class Bench:
    """Where the rows run: the data, a folder for each run, the undisturbed run's mark, the failed runs' last lines."""

    data: Path
    rounds: int
    count: int = 0
    whole: object = None
    lasts: list = field(default_factory=list)

    def out(self):
        self.count += 1
        return self.data / f"run-{self.count}"

    def run(self, *flags, **kinds):
        return self.keep(launch(self.data, self.out(), *flags, **kinds))

    def keep(self, run):
        """The run, its last line kept for R22 where it failed."""
        if run.code not in (0, 75):
            self.lasts.append(run.last)
        return run

    def timed(self, *flags, faults, restarts=0, processes=2):
        """A run whose lines have times: (run, [(seconds since the fault, line)])."""
        out, mark = self.out(), self.data / f"mark-{self.count}"
        command = arguments(self.data, out, *flags, processes=processes, restarts=restarts)
        process, lines, began = start(command, faults, LOCKSTEP_CHAOS_MARK=str(mark)), queue.SimpleQueue(), time.time()

        def read():
            for line in process.stdout:
                lines.put((time.time(), line))

        reader = threading.Thread(target=read)
        reader.start()
        process.wait(120)
        ended = time.time()
        reader.join()
        found = [lines.get() for _ in range(lines.qsize())]
        when = float(mark.read_text().split()[0]) if mark.exists() else began
        run = Run(process.returncode, "".join(line for _, line in found), ended - when, out / "default")
        return self.keep(run), [(at - when, line) for at, line in found]


def at(lines, word):
    return next((seconds for seconds, line in lines if seconds > 0 and word in line), float("nan"))


def r1(bench):
    """Kill -9 at random steps."""
    good, detect, redone = 0, [], []
    recover = {0: [], 2: []}  # loader processes -> seconds from the restart to the next step
    for seed in range(bench.rounds):
        draw, workers = random.Random(seed), 2 * (seed % 2)
        step, rank = draw.randint(1, 12), draw.randint(0, 1)
        fault = {"rank": rank, "step": step, "at": BEAT, "do": "kill"}
        run, lines = bench.timed("--data.workers", str(workers), faults=[fault], restarts=1)
        good += run.code == 0 and run.mark() == bench.whole and f"rank {rank} was the first to end" in run.said
        detect.append(at(lines, "restart 1 of 1"))
        resumed = [line for _, line in lines if "resumed from" in line]
        back = int(resumed[0].rpartition("step ")[2].split()[0]) if resumed else 0
        redone.append(step - back)  # the beat of a step is before its work, so `step` of them were done
        recover[workers].append(at(lines, f"step {back + 1}/14") - detect[-1])
    times = f"detect {max(detect):.1f} s; recover {max(recover[0], default=0):.1f} s"
    loaders = f", with loader processes {max(recover[2]):.1f} s" if recover[2] else ""
    return f"{good}/{bench.rounds} bitwise; redone <= {max(redone)}; {times}{loaders}"


def r2(bench):
    """Kill at every file of a save."""
    good = total = 0
    for processes in (1, 2):
        for call in range(1, 7):
            fault = {"rank": call % processes, "step": 4, "at": WRITE, "do": "kill", "call": call}
            run = bench.run(faults=[fault], processes=processes, restarts=1)
            good += run.code == 0 and run.mark() == bench.whole
            total += 1
    return f"{good}/{total} resumed, nothing deleted by hand"


def r3(bench):
    """A scheduler's signals to one rank."""
    lost, worst, codes = 0, 0.0, set()
    for rank in (0, 1):
        for how in ("term", "usr1", "usr2"):
            run, _ = bench.timed("--max-steps", "60", faults=[{"rank": rank, "step": 6, "at": BEAT, "do": how}])
            lost += run.steps[-1] - run.state["global_step"]
            worst, codes = max(worst, run.seconds), codes | {run.code}
    return f"{lost} steps lost; {worst:.1f} s; code {sorted(codes)}"


def r4(bench):
    """A full disk."""
    path = bench.out()
    with mounted(path, "-t", "tmpfs", "-o", "size=34m", "tmpfs") as done:
        if not done:
            return NEEDS_ROOT
        run = bench.keep(launch(bench.data, path, "--max-steps", "40", "--checkpoint.keep", "9"))
        steps = checkpoint.list_steps(run.folder)
        whole = sum(not checkpoint.verify(checkpoint.path_of(run.folder, step)) for step in steps)
        return f"code {run.code}; {whole}/{len(steps)} checkpoints whole"


def r5(bench):
    """Damage at 200 positions of a checkpoint's files."""
    run = bench.run()
    path, draw = checkpoint.newest(run.folder, say=print), random.Random(0)
    found = named = 0
    worst = 0.0
    for number in range(200):
        file = draw.choice(sorted(path.iterdir()))
        kept = file.read_bytes()
        place = draw.randrange(len(kept))
        if number % 3 == 0:
            file.write_bytes(kept[:place] + bytes([kept[place] ^ 1]) + kept[place + 1 :])
        elif number % 3 == 1:
            file.write_bytes(kept[:place])
        else:
            file.unlink()
        said, began = [], time.perf_counter()
        other = checkpoint.newest(run.folder, say=said.append)
        worst = max(worst, time.perf_counter() - began)
        found += other != path
        named += any(file.name in line for line in said)
        file.write_bytes(kept)
    return f"{found}/200 detected, {named}/200 name the file; falls back in {worst:.2f} s"


def r6(bench):
    """One rank of two dies in a save."""
    run = bench.run(faults=[{"rank": 1, "step": 4, "at": WRITE, "do": "kill"}], restarts=1)
    return f"{'0' if run.mark() == bench.whole else 'some'} mixed versions"


def r7(bench):
    """NaN in a forward."""
    run = bench.run(faults=[{"rank": 1, "step": 7, "at": BLOCK, "do": "nan", "always": True}])
    named = "step 7" in run.last and "micro-batch 1 (samples" in run.last and "module 'blocks.0" in run.last
    saved = checkpoint.read_state(checkpoint.newest(run.folder, say=print))["global_step"]
    return f"{'named' if named else 'NOT named'}; newest checkpoint is of step {saved}"


def r8(bench):
    """A bit of a parameter flips on one rank."""
    run = bench.run("--guards.desync-freq", "2", faults=[{"rank": 1, "step": 7, "at": UPDATE, "do": "flip"}])
    right = "after step 8 rank 0 and rank 1 differ" in run.last and "model/blocks.0.attention.inputs.weight" in run.last
    return f"{'found at the next check, tensor named' if right else 'MISSED'}; with two ranks both are named"


def r11(bench):
    """A stopped rank."""
    run, _ = bench.timed("--timeout", str(TIMEOUT), faults=[{"rank": 1, "step": 7, "at": BEAT, "do": "stop"}])
    stacks = len(list((run.folder / "logs").glob("hang-*.txt")))
    named = "rank 1 did not arrive" in run.last
    said = f"{'named' if named else 'NOT named'}; {stacks} stack file(s)"
    return f"timeout + {run.seconds - TIMEOUT:.1f} s, launcher included; {said}"


def r12(bench):
    """A slow rank; and ten clean runs."""
    right = 0
    for rank in (0, 1):
        fault = {"rank": rank, "step": 2, "at": LOSS, "do": "sleep", "seconds": 0.05, "always": True}
        run = bench.run("--max-steps", "60", faults=[fault])
        right += f"rank {rank} is slow: " in run.log()
    alarms = sum("is slow" in bench.run("--max-steps", "40").said for _ in range(10))
    return f"{right}/2 right; {alarms} false alarms in 10 clean runs"


def r15(bench):
    """Two runs in one folder."""
    out = bench.out()
    first = start(arguments(bench.data, out, "--max-steps", "100000", processes=0))
    try:
        until_step(out, 2, first)
        second = launch(bench.data, out, "--max-steps", "100000", processes=0)
    finally:
        end(first)
    return f"code {second.code} after {second.seconds:.1f} s, start included"


def r16(bench):
    """A loader process dies."""
    run = bench.run("--data.workers", "1", faults=[{"rank": 1, "step": 4, "at": BEAT, "do": "killworker"}])
    return "0 lost or duplicated" if run.code == 0 and run.mark() == bench.whole else "DIFFERS"


def r18(bench):
    """2 -> 1 -> 2 ranks."""
    out = bench.out()
    for processes, stop in ((2, "4"), (1, "9"), (2, "14")):
        run = launch(bench.data, out, "--stop-at", stop, processes=processes)
    same = run.mark()[0] == bench.whole[0] and run.steps == list(range(1, 15))
    return "exactly once, tensors equal" if same else "DIFFERS"


def r19(bench):
    """A minute with a fault every few seconds."""
    draw, began = random.Random(0), time.perf_counter()
    faults = [
        {"rank": draw.randint(0, 1), "step": 120 * (n + 1), "at": BEAT, "do": "kill", "attempt": n} for n in range(6)
    ]
    flags = ["--max-steps", "900", "--log-freq", "10", "--ckpt-freq", "20"]
    quiet = bench.run(*flags, timeout=300)
    run = bench.run(*flags, faults=faults, restarts=6, timeout=300)
    same = run.code == 0 and run.mark() == quiet.mark()
    spent = time.perf_counter() - began
    good = f"{'bitwise' if same else 'DIFFERS'}; {run.state['restarts']} restarts"
    return f"{good}; goodput {quiet.seconds / run.seconds:.0%} ({spent:.0f} s in all)"


def r24(bench):
    """An update makes a weight NaN, with each policy; and the last update does."""
    weight = "model/blocks.0.attention.inputs.weight"
    ended = resumed = 0
    for policy, step in (("stop", 9), ("skip", 9), ("rollback", 9), ("stop", 13)):
        faults = [{"rank": rank, "step": step, "at": UPDATE, "do": "spoil"} for rank in (0, 1)]
        run = bench.run("--guards.nonfinite", policy, faults=faults)
        right = run.code == 0 if policy == "rollback" else run.code == 1 and weight in run.last
        newest = checkpoint.read_state(checkpoint.newest(run.folder, say=str))["global_step"]
        ended += right and newest == (14 if policy == "rollback" else 5 if step == 9 else 10)
        again = launch(bench.data, run.folder.parent)
        resumed += again.code == 0 and again.state["global_step"] == 14
    return f"{ended}/4 end rightly, none is kept as whole; {resumed}/4 go on from a usable checkpoint"


ROWS = {
    "R1": (r1, "kill -9 at a random step", "20/20 bitwise, <= 5 redone, detect <= 2 s, recover <= 8 s"),
    "R2": (r2, "kill -9 at every phase of a save", "100% resumable"),
    "R3": (r3, "SIGTERM, SIGUSR1 or SIGUSR2 to one rank", "0 steps lost, <= 3 s, 75"),
    "R4": (r4, "no space in a save", "earlier ones intact"),
    "R5": (r5, "a checkpoint's files damaged", "0 undetected, named, <= 1 s"),
    "R6": (r6, "a torn save of two ranks", "0 mixed versions"),
    "R7": (r7, "NaN in a forward", "<= 1 step, never saved, named"),
    "R8": (r8, "a parameter's bit flips", "within one interval, rank and tensor"),
    "R9": (r9, "uneven work", "no hang, <= 2 s, counts per rank"),
    "R10": (r10, "other weights, config, code or data on a rank", "before step 1, key named"),
    "R11": (r11, "a stopped rank", "<= timeout + 2 s, named, stacks"),
    "R12": (r12, "a slow rank", "right rank, 0 false alarms"),
    "R13": (
        r13,
        "a link between two nodes is cut, `--max-losses 0`",
        "<= timeout + 2 s, peer named, resumes bitwise",
    ),
    "R14": (r14, "port, host name, read-only, space, clock", "one line, <= 3 s after imports"),
    "R15": (r15, "two runs in one folder", "refused <= 2 s"),
    "R16": (r16, "a loader process dies", "0 lost or duplicated"),
    "R17": (r17, "a rank killed for want of memory", "cause stated"),
    "R18": (r18, "2, 1, 2 ranks", "exactly once, tensors equal"),
    "R19": (r19, "a minute of kills", "bitwise, goodput >= 50%"),
    "R20": (r20, "a save of 57 MB", "blocked <= 10% of a synchronous save"),
    "R21": (r21, "hostile input", "18/18, canary never made"),
    "R23": (r23, "an error of the program with the words of a lost connection", "shown as that rank's own: 100%"),
    "R24": (r24, "an update makes a weight NaN", "named, never resumed from, exit 1; a rollback goes further back"),
    "R25": (r25, "the process that replacements are forked from is killed", "all go on to the same bits"),
    "R26": (r26, "a rank exits with 0 in the middle", "named, recovered or not 0"),
    "R27": (r27, "ranks in different folders", "before step 1, rank, host and path named"),
    "R28": (r28, "other sample content on one rank", "before step 1, sample named, 0 false alarms"),
    "R29": (
        r29,
        "kill -9 of a rank of two replicas (hybrid sharding)",
        "the other replica goes on bitwise, from memory",
    ),
    "R22": (r22, "the last lines of all failed runs above", "rank, step, cause, way out: 100%"),
}


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores ({model}), {versions}, load {os.getloadavg()[0]:.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="put the table into docs/inside/reliability.md")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    bench, lines = Bench(folder, given.rounds), ["| row | fault | goal | measured |", "|---|---|---|---|"]
    try:
        whole = bench.run()
        bench.whole = whole.mark()
        for row in given.only:
            function, what, goal = ROWS[row]
            try:
                measured = function(bench)
            except Exception as error:
                measured = f"FAILED: {type(error).__name__}: {str(error)[:100]}"
            lines.append(f"| {row} | {what} | {goal} | {measured} |")
            print(lines[-1], flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(machine())
    if given.write:
        path = ROOT / "docs" / "inside" / "reliability.md"
        text, begin, finish = path.read_text(), "<!-- measured -->", "<!-- end -->"
        head, tail = text.partition(begin)[0], text.partition(finish)[2]
        path.write_text(f"{head}{begin}\n{machine()}\n\n" + "\n".join(lines) + f"\n{finish}{tail}")


if __name__ == "__main__":
    main()
