"""R13: two nodes, each a network namespace of its own, whose link is cut; needs root."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import SETTINGS, environment, finish, launch, text_in, until_step
from namespaces import CABLE, cluster
from refusals import names

pytestmark = pytest.mark.slow


def on_node(node, rank, folder, out, steps=2000):
    data = ["--dataset-name", str(text_in(folder)), "--data.cache", str(folder / "cache")]
    where = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "node0", "--master-port", "29555"]
    where += ["--max-losses", "0"]  # else node 0 goes on alone: test_lost_nodes.py
    train = ["train", "--save-dir", str(out), *SETTINGS.split(), *data, "--max-steps", str(steps), "--timeout", "6"]
    command = [sys.executable, "-m", "lockstep", "launch", *where, "--", *train]
    return node.start(command, env=environment(GLOO_SOCKET_IFNAME=CABLE))


def test_r13_a_cut_link_names_the_peer(tmp_path):
    launch(tmp_path, tmp_path / "first", "--max-steps", "2", processes=0)  # prepares the data
    with cluster(2) as nodes:
        both = [on_node(node, rank, tmp_path, tmp_path / "out") for rank, node in enumerate(nodes)]
        try:
            until_step(tmp_path / "out", 3, both[0])
        except AssertionError:
            pytest.fail("\n".join(finish(process, tmp_path / "out", time.monotonic(), 9).said for process in both))
        nodes[0].unplug()
        cut = time.monotonic()
        first, second = (finish(process, tmp_path / "out", cut, 60) for process in both)
    assert (first.code, second.code) == (1, 1)
    assert "rank 1 did not arrive" in first.said
    assert names(second.said, "10.77.0.1", "rank 0")
    assert first.seconds < 30
