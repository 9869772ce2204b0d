"""The loss of a rank, a launcher or a node on several nodes: python bench/nodes.py [--seed 0] [--only 2 4]

The nodes are network namespaces of this machine (root). In each run ranks, launchers (each alone) and nodes (all their
processes at once) are killed at random moments, one after the other, but neither node 0 nor its launcher. Each time: do
all other ranks keep their processes; how long until the next step is done (the second record after the kill). At the
end node 0's launcher gets SIGTERM: are the bits those of a run on two processes of one node that nothing disturbed.
Aims: 30 kills, all kept, the next step within 1 s at the median, bits equal.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "chaos")]

from harness import Run, arguments, end, environment, launch, until_step, workers  # noqa: E402
from losses import BACK, drained, latest, machine, size_of  # noqa: E402
from namespaces import CABLE, cluster  # noqa: E402

FLAGS = ("--batch-size", "12", "--ckpt-freq", "50")
RANK, LAUNCHER, NODE = "rank", "launcher", "node"
RUNS = {  # nodes and ranks of each: what is killed, in this order
    2: (2, [[RANK] * 6 + [LAUNCHER], [RANK] * 3 + [NODE], [LAUNCHER], [NODE]]),
    4: (
        1,
        [[RANK] * 3 + [LAUNCHER, NODE, RANK, LAUNCHER], [RANK] * 2 + [NODE, RANK, LAUNCHER, RANK, NODE], [NODE] * 3],
    ),
}


def start(node, rank, size, ranks, data, out):
    where = ["--nnodes", str(size), "--node-rank", str(rank), "--master-addr", "node0"]
    command = arguments(data, out, *FLAGS, "--max-steps", "100000", "--timeout", "30", processes=ranks, losses=100)
    at = command.index("launch") + 1
    return node.start([*command[:at], *where, *command[at:]], env=environment(GLOO_SOCKET_IFNAME=CABLE))


def kill(kind, node, process, ranks, draw):
    """The processes that are lost."""
    if kind == RANK:
        lost = [draw.choice(sorted(ranks))]
        os.kill(ranks[lost[0]], signal.SIGKILL)
        return lost
    if kind == NODE:
        node.kill()
    else:
        os.kill(process.pid, signal.SIGKILL)
    return list(ranks)


def hit(kinds, size, ranks, data, out, draw):
    """Kinds and seconds to the next step, how many kills spared all others, whether the bits are equal, steps."""
    folder, seconds, kept = out / "default", [], 0
    with cluster(size) as nodes:
        processes = [start(node, rank, size, ranks, data, out) for rank, node in enumerate(nodes)]
        said = [drained(process) for process in processes]
        alive = list(range(size))
        try:
            until_step(out, 5, processes[0], 120.0)
            for kind in kinds:
                time.sleep(draw.uniform(0.0, 1.0))
                before = {number: workers(processes[number]) for number in alive}
                where = draw.choice([number for number in alive if number or kind == RANK])
                stood = max(latest(folder))
                lost = kill(kind, nodes[where], processes[where], before[where], draw)
                began, now = time.monotonic(), stood
                while now < stood + 2:
                    assert processes[0].poll() is None, "".join(said[0][-20:])
                    time.sleep(0.002)
                    now = max(latest(folder))
                seconds.append((kind, time.monotonic() - began))
                alive = [number for number in alive if kind == RANK or number != where]
                there = {rank: pid for number in alive for rank, pid in workers(processes[number]).items()}
                others = {rank: pid for each in before.values() for rank, pid in each.items()}
                kept += all(there.get(rank) == pid for rank, pid in others.items() if rank not in lost)
                until = time.monotonic() + BACK
                while (size_of(folder) or (0, 0))[0] != len(alive) * ranks and time.monotonic() < until:
                    time.sleep(0.1)
            processes[0].send_signal(signal.SIGTERM)
            codes = [processes[number].wait(timeout=60) for number in alive]
            assert set(codes) == {75}, (codes, "".join(said[0][-20:]))
        finally:
            for process in processes:
                with contextlib.suppress(ValueError):
                    end(process)
    run = Run(processes[0].returncode, "".join(said[0]), 0.0, folder)
    steps = run.state["global_step"]
    alone = launch(data, out.with_name(f"{out.name}-alone"), *FLAGS, "--max-steps", "100000", "--stop-at", str(steps))
    return seconds, kept, run.mark()[:3] == alone.mark()[:3], steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", type=int, default=list(RUNS), help="numbers of nodes")
    given = parser.parse_args()
    data, draw, every, kept = Path(tempfile.mkdtemp(prefix="nodes-")), random.Random(given.seed), [], 0
    print("| nodes x ranks | kills | next step, median | at worst | others kept | bits |\n|---|---|---|---|---|---|")
    try:
        for size in given.only:
            ranks, runs = RUNS[size]
            for number, kinds in enumerate(runs):
                seconds, spared, same, steps = hit(kinds, size, ranks, data, data / f"{size}-{number}", draw)
                every, kept = every + seconds, kept + spared
                times = [each for _, each in seconds]
                print(
                    f"| {size} x {ranks} | {', '.join(kinds)} in {steps} steps | {statistics.median(times):.2f} s | "
                    f"{max(times):.2f} s | {spared}/{len(kinds)} | {'equal' if same else 'DIFFER'} |",
                    flush=True,
                )
        for kind in (RANK, LAUNCHER, NODE):
            times = [each for name, each in every if name == kind]
            if times:
                print(f"{kind}: {len(times)} kills, median {statistics.median(times):.2f} s, worst {max(times):.2f} s")
        times = [each for _, each in every]
        print(f"all: {len(every)} kills, median {statistics.median(times):.2f} s, kept {kept}")
    finally:
        shutil.rmtree(data, ignore_errors=True)
    print(machine())


if __name__ == "__main__":
    main()
