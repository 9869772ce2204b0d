"""Restarts over several nodes: each launcher counts its own restarts, and all ranks of a round meet all the same."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from namespaces import cluster
from shell import environment, free_port, inspected
from warm import python

from lockstep.logging.jsonl import read

# Each rank that VICTIMS names kills itself once, in the step named.
TASK = """
import os, signal
from pathlib import Path
import torch, lockstep

CALLS = []

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), index % 2

class Mortal(lockstep.Task):
    def model(self):
        return torch.nn.Linear(8, 2)

    def dataset(self, split):
        return Numbers()

    def loss(self, model, batch):
        for victim in filter(None, os.environ.get("VICTIMS", "").split()):
            rank, calls = map(int, victim.split(":"))
            mark = Path(__file__).with_name(f"dead-{victim}")
            if os.environ.get("RANK") == str(rank) and not mark.exists():
                CALLS.append(rank)  # of this process; the trial's too
                if len(CALLS) == calls:
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def training(folder, out, *flags):
    (folder / "mortal.py").write_text(TASK)
    sizes = "--batch-size 4 --micro-batch-size 2 --max-steps 12 --ckpt-freq 3 --eval-freq 0 --log-freq 1 --exact"
    where = ["--task", f"{folder / 'mortal.py'}:Mortal", "--save-dir", str(folder / out), "--device", "cpu"]
    return ["train", *where, *sizes.split(), "--timeout", "20", *flags]


def launched(interpreter, number, host, port, train, *flags):
    nodes = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", host, "--master-port", str(port)]
    return [interpreter, "-m", "lockstep", "launch", *nodes, *flags, "--", *train]


def ended(processes, seconds=240):
    said = [process.communicate(timeout=seconds)[0] for process in processes]
    return [process.returncode for process in processes], said


def steps(folder):
    return [each["global_step"] for each in read(folder / "default" / "metrics.jsonl") if "lr" in each]


def undisturbed(folder):
    """The fingerprint of the run that nobody interrupted, on one process."""
    command = [python(), "-m", "lockstep", *training(folder, "whole")]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    return inspected(folder / "whole" / "default")


def test_second_lost_rank_restarts_both_nodes_bitwise(tmp_path):
    """The first is replaced, while the others go on; then --max-losses is reached."""
    port, train = free_port(), training(tmp_path, "out")
    more = environment(VICTIMS="1:10 0:10")  # in step 5, and again five steps after the restart
    processes = [
        subprocess.Popen(
            launched(python(), number, "127.0.0.1", port, train, "--max-restarts", "4", "--max-losses", "1"),
            env=more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in (0, 1)
    ]
    codes, said = ended(processes)
    assert codes == [0, 0], "\n".join(said)
    assert {path.name for path in tmp_path.glob("dead-*")} == {"dead-1:10", "dead-0:10"}
    assert steps(tmp_path / "out") == list(range(1, 13))
    assert inspected(tmp_path / "out" / "default") == undisturbed(tmp_path)


def torchrun(number, host, port, train, *more):
    if more == ("static",):
        where = ["--node-rank", str(number), "--master-addr", host, "--master-port", str(port)]
    else:
        conf = f"is_host={int(number == 0)}"
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}", "--rdzv-conf", conf]
    own = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", *where]
    return [sys.executable, "-m", "torch.distributed.run", *own, "-m", "lockstep", *train]


def in_namespace(**more):
    return {name: value for name, value in environment(**more).items() if name != "GLOO_SOCKET_IFNAME"}


def start_all(nodes, command, **more):
    return [node.start(command(number), env=in_namespace(**more)) for number, node in enumerate(nodes)]


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", ["launch", "static", "c10d"])
def test_a_rank_that_is_killed_on_either_node_comes_back(tmp_path, kind, victim):
    train = training(tmp_path, "out")

    def command(number):
        if kind == "launch":
            return launched(sys.executable, number, "node0", 29400, train, "--max-restarts", "2", "--max-losses", "0")
        return torchrun(number, "node0", 29400, train, kind)

    with cluster(2) as nodes:
        codes, said = ended(start_all(nodes, command, VICTIMS=f"{victim}:9"))
    assert codes == [0, 0], "\n".join(said)
    assert (tmp_path / f"dead-{victim}:9").exists()
    assert inspected(tmp_path / "out" / "default") == undisturbed(tmp_path)


@pytest.mark.slow
def test_a_node_that_is_lost_and_returns_trains_again(tmp_path):
    train = training(tmp_path, "out", "--max-steps", "2000")
    elastic = ["--max-restarts", "3", "--max-losses", "0", "--rdzv-conf", "last_call_timeout=2"]

    def command(number):
        words = launched(sys.executable, number, "node0", 29400, train, *elastic)
        words[words.index("--nnodes") + 1] = "1:2"
        return words

    def reached():
        with contextlib.suppress(OSError):
            return max(steps(tmp_path / "out"), default=0)
        return 0

    with cluster(2) as nodes:
        first, second = start_all(nodes, command)
        wait_for(lambda: reached() > 5)
        nodes[1].kill()
        second.communicate()
        seen = reached()
        wait_for(lambda: reached() > seen + 5)
        again = nodes[1].start(command(1), env=in_namespace())
        wait_for(lambda: nodes[1].ranks())
        seen = reached()
        wait_for(lambda: reached() > seen + 5)
        os.kill(first.pid, signal.SIGTERM)
        codes, said = ended([first, again])
    assert codes == [75, 75], "\n".join(said)
    starts = [json.loads(line) for line in (tmp_path / "out" / "default" / "timeline.jsonl").read_text().splitlines()]
    assert [each["world"] for each in starts if each["what"] == "start"] == [2, 1, 2]
