"""A rank, a launcher or a node of several is lost, and the others go on to the same bits: real launchers.

Most run on loopback. Those marked slow that pull a cable need nodes of their own, as network namespaces.
"""

import contextlib
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import warm

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import BEAT, Run, arguments, end, environment, finish, launch, on_node, start, until_step
from namespaces import CABLE, cluster
from shell import free_port

LOSS = "lockstep.tasks.language_model:CausalLM.loss"
FLAGS = ("--micro-batch-size", "1", "--eval-freq", "5")
SLOW = {"at": LOSS, "do": "sleep", "seconds": 0.1, "always": True, "replaced": "any"}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    """The result of an undisturbed run of one process."""
    run = launch(data, tmp_path_factory.mktemp("whole"), *FLAGS, processes=0, python=warm.python())
    assert run.code == 0, run.said
    return run.mark()


@contextlib.contextmanager
def launchers(data, out, size, *flags, faults=(), ranks=1, **more):
    """The launchers of `size` nodes on loopback."""
    port, processes = free_port(), []
    try:
        for rank in range(size):
            command = arguments(data, out, *FLAGS, *flags, processes=ranks, losses=8, **more)
            processes.append(start(on_node(command, rank, size, port), faults, GLOO_SOCKET_IFNAME="lo"))
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ValueError):
                end(process)


def ended(processes, out, seconds=90.0):
    return [finish(process, out, time.monotonic(), seconds) for process in processes]


@pytest.mark.slow
def test_run_survives_a_lost_rank_and_another_nodes_launcher(data, tmp_path, whole):
    faults = [
        {"rank": 1, "step": 4, "at": BEAT, "do": "kill"},
        {"rank": 2, "step": 8, "at": BEAT, "do": "killlauncher"},
    ]
    with launchers(data, tmp_path, 3, faults=faults) as processes:
        first, second, third = ended(processes, tmp_path)
    assert (first.code, second.code, third.code) == (0, 0, -signal.SIGKILL), first.said + second.said
    assert first.mark()[:3] == whole[:3]
    assert f"rank 1 on {socket.gethostname()} was the first to end, killed by SIGKILL" in first.said
    assert f"node 2 ({socket.gethostname()}, with rank" in first.said
    assert first.state["losses"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["rank", "node"])
def test_rank_is_replaced_node_returns_and_signal_ends_all(data, tmp_path, lost):
    slow = [{**SLOW, "rank": rank} for rank in range(2)]
    flags = ("--max-steps", "400")
    kill = {"rank": 1, "step": 4, "at": BEAT, "do": "kill" if lost == "rank" else "killlauncher"}
    with launchers(data, tmp_path / "lost", 2, *flags, faults=[kill, *slow]) as processes:
        until_step(tmp_path / "lost", 5, processes[0])
        if lost == "node":
            dead = processes.pop()
            dead.communicate()
            command = dead.args
            processes.append(start(command, slow, GLOO_SOCKET_IFNAME="lo"))
        log, deadline = tmp_path / "lost" / "default" / "logs" / "rank-00000.log", time.monotonic() + 60
        while "2 ranks continue" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "1 of them new" in log.read_text()
        processes[1].send_signal(signal.SIGTERM)
        runs = ended(processes, tmp_path / "lost")
    assert [run.code for run in runs] == [75, 75], runs[0].said + runs[1].said
    steps = runs[0].state["global_step"]
    alone = launch(data, tmp_path / "whole", *FLAGS, *flags, "--stop-at", str(steps), processes=0)
    assert Run(0, "", 0.0, tmp_path / "lost" / "default").mark()[:3] == alone.mark()[:3]


@pytest.mark.slow
@pytest.mark.parametrize("kills", ["killlauncher", "node"])
def test_without_node_0_the_run_ends_with_75_and_says_so(data, tmp_path, kills):
    """If node 0's launcher alone is lost, all ranks save first."""
    fault = {"rank": 0, "step": 6, "at": BEAT, "do": "killlauncher"}
    faults = [fault, {**fault, "do": "kill"}] if kills == "node" else [fault]
    with launchers(data, tmp_path, 2, "--max-steps", "100000", "--ckpt-freq", "3", faults=faults) as processes:
        first, second = ended(processes, tmp_path)
    assert (first.code, second.code) == (-signal.SIGKILL, 75), second.said
    if kills == "node":
        assert "node 0's launcher at 127.0.0.1:" in second.last
        assert "resumes from the newest checkpoint" in second.last


@pytest.mark.slow
def test_loss_with_split_states_ends_all_nodes_with_the_reason(data, tmp_path):
    fault = {"rank": 1, "step": 6, "at": BEAT, "do": "kill"}
    with launchers(data, tmp_path, 2, "--engine", "fsdp", faults=[fault]) as processes:
        runs = ended(processes, tmp_path)
    for run in runs:
        assert run.code == 1, run.said
        assert f"rank 1 on {socket.gethostname()} was the first to end, killed by SIGKILL" in run.last
        assert "--engine fsdp splits the states" in run.last


@pytest.mark.slow
def test_node_without_network_is_lost_after_the_timeout(data, tmp_path, whole):
    slow = [{**SLOW, "rank": rank} for rank in range(2)]
    with cluster(2) as nodes:
        processes = []
        for rank, node in enumerate(nodes):
            command = arguments(data, tmp_path, *FLAGS, "--timeout", "6", losses=8, processes=1)
            variables = environment(slow, GLOO_SOCKET_IFNAME=CABLE)
            processes.append(node.start(on_node(command, rank, 2, 29400, "node0"), env=variables))
        try:
            until_step(tmp_path, 5, processes[0])
            nodes[1].unplug()
            first, second = ended(processes, tmp_path)
        finally:
            for process in processes:
                with contextlib.suppress(ValueError):
                    end(process)
    assert first.code == 0, first.said
    assert first.mark()[:3] == whole[:3]
    assert "node 1 (node1, with rank 1) is lost: its launcher is silent" in first.said
    assert second.code != 0
