"""Rows of bench/chaos.py that need more than one planted fault: root, other nodes, other benchmarks and tests."""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import (
    BEAT,
    ODD,
    UNLIKE,
    arguments,
    end,
    finish,
    in_group,
    launch,
    memory_group,
    preloaded,
    start,
    until_step,
    workers,
)
from namespaces import cluster
from test_lost_replicas import FAULTS, survived
from test_network import on_node

from lockstep.distributed.progress import rank_label

ROOT = Path(__file__).resolve().parent.parent
LOSS = "lockstep.tasks.language_model:CausalLM.loss"
NEEDS_ROOT = "skipped: needs root"
HOSTILE = (
    "tests/guards/test_hostile_input.py",
    "tests/checkpoint/test_checkpoint_damage.py",
    "tests/checkpoint/test_checkpoint_command.py",
    "tests/test_environment.py",
    "tests/test_config.py",
)
PARTS = {
    "rank": r"rank \d",
    "step": r"step \d",
    "cause": r"SIG[A-Z]+|not finite|differ|did not arrive|not see|space|uneven|another|memory|cannot|killed|failed|"
    "called exit",
    "way out": r"; .*(resume|again|raise|lower|give|fix|start|check|repair|look|leave|use|go back|make room|traceback)",
}


@contextlib.contextmanager
def mounted(path, *options):
    """Whether `path`, made here, is a mount of its own now."""
    path.mkdir()
    done = subprocess.run(["mount", *options, str(path)], capture_output=True, check=False).returncode == 0
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "-l", str(path)], check=False)


def r9(bench):
    """One rank has work for fewer steps."""
    at = "lockstep.distributed.exchange:StepExchange.__init__"
    fault = {"rank": 1, "at": at, "do": "argument", "position": 4, "value": 9}
    run, lines = bench.timed(faults=[fault])
    told = next((seconds for seconds, line in lines if "uneven work" in line), float("nan"))
    counts = "rank 0 has 14, rank 1 has 9" in run.last
    return f"{'counts named' if counts else 'NOT named'}; no hang; {told:.1f} s after the first beat is set up"


def r10(bench):
    """Ranks that start unlike each other."""
    found = 0
    for key, fault in UNLIKE.items():
        run = bench.run(faults=[{"rank": 1, **fault}])
        found += run.code in (1, 3) and key in run.last and "rank 1" in run.last and not run.steps
    return f"{found}/{len(UNLIKE)} refused before step 1, key and rank named ({', '.join(UNLIKE)})"


def r13(bench):
    """The link between two nodes is cut, then mended."""
    try:
        with cluster(2) as nodes:
            return _cut(bench, nodes)
    except pytest.skip.Exception:
        return NEEDS_ROOT


def _cut(bench, nodes):
    out, steps = bench.out(), 400
    whole = bench.run("--max-steps", str(steps))
    both = [on_node(node, rank, bench.data, out, steps) for rank, node in enumerate(nodes)]
    until_step(out, 6, both[0])
    nodes[0].unplug()
    cut = time.monotonic()
    ended = [finish(process, out, cut, 90) for process in both]
    named = all(f"rank {1 - rank}" in run.said for rank, run in enumerate(ended))
    nodes[0].plug()
    both = [on_node(node, rank, bench.data, out, steps) for rank, node in enumerate(nodes)]
    again = [finish(process, out, time.monotonic(), 120) for process in both]
    same = again[0].code == 0 and again[0].mark() == whole.mark()
    seconds = max(run.seconds for run in ended) - 6
    peer = "peer named by both" if named else "peer NOT named"
    return f"timeout + {seconds:.1f} s; {peer}; resumes {'bitwise' if same else 'DIFFERENT'}"


def r14(bench):
    """What cannot be started; and clocks that differ."""
    taken = socket.create_server(("127.0.0.1", 0))
    cases = {
        "host": ["--nnodes", "2", "--master-addr", "no.such.host.invalid"],
        "port": ["--master-port", "70000"],
        "taken port": ["--master-port", str(taken.getsockname()[1])],
    }
    good, worst, said = 0, 0.0, []
    for flags in cases.values():
        began = time.perf_counter()
        command = [sys.executable, "-m", "lockstep", "launch", *flags, "--", "train"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        worst = max(worst, time.perf_counter() - began)
        good += done.returncode == 2 and done.stderr.count("\n") == 1
    taken.close()
    mounts = {
        "read-only": (("-t", "tmpfs", "-o", "ro", "tmpfs"), "--save-dir: cannot write to"),
        "space": (("-t", "tmpfs", "-o", "size=2m", "tmpfs"), "MB free, and a checkpoint of this run needs"),
    }
    for name, (options, words) in mounts.items():
        out = bench.out()
        with mounted(out, *options) as done:
            if not done:
                said.append(f"{name} {NEEDS_ROOT}")
                continue
            run = launch(bench.data, out)
            good += run.code == 2 and words in run.last
    faults = [
        {"rank": 1, "at": BEAT, "do": "clock", "seconds": -86400.0},
        {"rank": 0, "step": 7, "at": BEAT, "do": "kill"},
    ]
    run = bench.run(faults=faults, restarts=1)
    clock = run.code == 0 and run.mark() == bench.whole and "rank 0 was the first to end" in run.said
    total = len(cases) + len(mounts) - len(said)
    said.append(f"a clock a day behind {'changes nothing' if clock else 'CHANGES the run'}")
    return f"{good}/{total} one line; {worst:.1f} s, imports included; {'; '.join(said)}"


def r17(bench):
    """A rank eats all memory of its group."""
    with memory_group(1800) as group:
        if group is None:
            return NEEDS_ROOT + " and cgroup v1"
        out = bench.out()
        command = in_group(group, arguments(bench.data, out))
        process = start(command, [{"rank": 1, "step": 3, "at": BEAT, "do": "eat"}])
        run = bench.keep(finish(process, out, time.monotonic()))
    return "out of memory, stated" if "out of memory, by the kernel's count" in run.last else "NOT stated"


def r20(bench):
    """A checkpoint of about 57 MB, by bench/checkpoint.py."""
    command = [sys.executable, str(ROOT / "bench" / "checkpoint.py"), "--width", "630", "--folder", str(bench.data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = {
        name: (float(a), float(b)) for name, a, b in re.findall(r"\| (\w+) \| ([\d.]+) \| ([\d.-]+) \|", done.stdout)
    }
    if "lockstep_sync" not in rows:
        return f"FAILED: {done.stderr.strip().splitlines()[-1:]}"
    (blocked, lost), (whole, whole_lost) = rows["lockstep"], rows["lockstep_sync"]
    times = f"{1e3 * blocked:.0f} of {1e3 * whole:.0f} ms"
    return (
        f"blocked {blocked / whole:.0%} ({times}); lost in all {1e3 * lost:.0f}, synchronous {1e3 * whole_lost:.0f} ms"
    )


def r21(bench):
    """The tests of hostile input, counted."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "slow or not slow", *HOSTILE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return f"{done.stdout.strip().splitlines()[-1].strip('= ')} (the table below names the test of each input)"


TEXTS = [
    "SkipConnection: expected 8 channels",
    "Connection closed by peer",
    "socket timeout",
    "NCCL and gloo are installed",
    "reset by peer: timed out",
]


def r23(bench):
    """An error of the program, with the words of a lost connection, on any rank, engine and launcher."""
    right, cases = (
        0,
        [(rank, engine, losses) for rank in (0, 1) for engine in ("ddp", "zero", "fsdp") for losses in (0, 8)],
    )
    for (rank, engine, losses), text in zip(cases, itertools.cycle(TEXTS)):
        fault = {"step": 7, "at": LOSS, "do": "raise", "text": text}
        faults = [{**fault, "rank": rank}, {**fault, "rank": 1 - rank, "call": 2}]  # when it computes what was left
        run = bench.run("--engine", engine, faults=faults[: 1 + bool(losses)], losses=losses)
        recovers = engine == "ddp" and bool(losses)
        first = 1 - rank if recovers else rank
        who = rank_label(0, first) if recovers else rank_label(first)
        own = f"{who} failed first at step 7" in run.last and f"RuntimeError: {text}" in run.last
        absorbed = not recovers or f"RuntimeError: {text}" in run.said.partition("the others continue")[0]
        good = run.code == 1 and own and absorbed and f"rank {1 - first} did not" not in run.last
        right += good
        if not good:
            print(f"rank {rank}, {engine}, --max-losses {losses}: code {run.code}: {run.last}", flush=True)
    return f"{right}/{len(cases)} shown as that rank's own, with step, class and text"


def r26(bench):
    """A rank that ends with code 0 in the middle of the run."""
    fault = {"rank": 1, "step": 7, "at": LOSS, "do": "exit", "code": 0}
    line, good = "rank 1 ended with code 0 before the run's end, at step 7", 0
    ended = bench.run(faults=[fault])
    good += ended.code == 1 and line in ended.last
    absorbed = bench.run(faults=[fault], losses=8)
    good += absorbed.code == 0 and line in absorbed.said and absorbed.mark()[0] == bench.whole[0]
    again = bench.run(faults=[fault], restarts=1)
    good += again.code == 0 and line in again.said and again.mark() == bench.whole
    return f"{good}/3 named; ended with 1, or recovered to the same bits"


def r22(bench):
    """The last lines of all the runs above that failed."""
    lasts = bench.lasts
    if not lasts:
        return "no run above failed: take more rows"
    short = [
        (name, line) for line in lasts for name, words in PARTS.items() if not re.search(words, line, re.IGNORECASE)
    ]
    whole = len(lasts) - len({line for _, line in short})
    missing = f"; first without {short[0][0]}: {short[0][1][:90]}" if short else ""
    return f"{whole}/{len(lasts)} last lines name rank, step, cause and way out{missing}"


def r25(bench):
    """The process that replacements are forked from is killed: while idle, and while it replaces a rank."""
    slow = [{"rank": rank, "at": LOSS, "do": "sleep", "seconds": 0.05, "always": True} for rank in range(2)]
    slow.append({**slow[1], "replaced": 1})
    flags, delays = ("--max-steps", "400"), (None, 0.0, 0.02, 0.05, 0.1, 0.2)
    quiet = bench.run(*flags).mark()
    good = 0
    for delay in delays:  # seconds from the loss of the rank to that of the process; None: once it has replaced it
        out, began = bench.out(), time.monotonic()
        process = start(arguments(bench.data, out, *flags, losses=2), slow)
        try:
            until_step(out, 7, process)
            while preloaded(process) is None:
                time.sleep(0.1)
            time.sleep(6.0)  # it says to the launcher alone when it has loaded
            before = workers(process)
            os.kill(before[1], signal.SIGKILL)
            if delay is None:
                while workers(process).get(1, before[1]) == before[1]:
                    time.sleep(0.01)
            time.sleep(1.0 if delay is None else delay)
            os.kill(preloaded(process), signal.SIGKILL)
            run = bench.keep(finish(process, out, began))
        finally:
            end(process)
        good += run.code == 0 and run.mark() == quiet and run.state["losses"] == 1
    return f"{good}/{len(delays)} bitwise, one loss each"


def r29(bench):
    """A rank of either replica is killed under hybrid sharding, at each place of the tests."""
    good, cases = 0, [(rank, fault) for fault in FAULTS for rank in (1, 2)]
    for rank, fault in cases:
        try:
            survived(bench.data, bench.out(), [{**fault, "rank": rank, "do": "kill"}], python=sys.executable)
            good += 1
        except AssertionError as error:
            print(f"rank {rank}, {fault}: {str(error)[:200]}", flush=True)
    return f"{good}/{len(cases)} to the bits of the run resumed on the ranks that were left"


def r27(bench):
    """Rank 1 has another file system where the run's folder lies: at a start, and at a resume."""
    good = 0
    for resumes in (False, True):
        out, elsewhere = Path(bench.out().name), bench.out()
        elsewhere.mkdir()
        fault = {"rank": 1, "at": "lockstep.training.start.build:build_together", "do": "chdir", "path": str(elsewhere)}
        with contextlib.chdir(bench.data):
            if resumes:
                bench.keep(launch(bench.data, out, "--stop-at", "5"))
            run = bench.keep(launch(bench.data, out, faults=[fault]))
            taken = run.steps if (run.folder / "metrics.jsonl").exists() else []
        named = f"rank 1 on {socket.gethostname()}" in run.last and str(elsewhere / out) in run.last
        good += run.code == 2 and named and taken == list(range(1, 6)) * resumes and not list(elsewhere.iterdir())
    return f"{good}/2 refused before step 1 (start, resume); rank, host and path named"


def r28(bench):
    """One sample of 64 is another one on rank 1; and the same run, whose samples are drawn at random, without that."""
    file = bench.data / "odd.py"
    file.write_text(ODD)
    refused, clean, wanted = 0, 0, ("train", "evaluation", "")
    for loaders in (0, 2):
        for odd in wanted:
            out = bench.out()
            command = [sys.executable, "-m", "lockstep", "launch", "--nproc-per-node", "2", "--max-losses", "0", "--"]
            command += ["train", "--task", f"{file}:Odd", "--save-dir", str(out), "--max-steps", "4"]
            command += ["--batch-size", "8", "--data.workers", str(loaders)]
            run = bench.keep(finish(start(command, ODD=odd), out, time.monotonic()))
            name = {"train": "sample 63 of the training set", "evaluation": "sample 63 of the evaluation set"}.get(odd)
            if odd:
                refused += run.code == 3 and name in run.last and "rank 1" in run.last and not run.folder.exists()
            else:
                clean += run.code == 0
    return f"{refused}/4 refused before step 1, rank and sample named; {2 - clean} false alarms in 2 clean runs"
