"""R13: two nodes, each a network namespace of its own, whose link is cut; needs root."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import SETTINGS, end, environment, finish, launch, text_in, until_step
from refusals import names

pytestmark = pytest.mark.slow


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@contextlib.contextmanager
def cabled():
    """The names of two namespaces with a cable between them; None where that is not allowed."""
    names = [f"lockstep{os.getpid()}{side}" for side in "ab"]
    try:
        if any(ip("netns", "add", name).returncode for name in names):
            yield None
            return
        ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "wire")
            for link in ("lo", "wire"):
                assert not ip("-n", name, "link", "set", link, "up").returncode
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.fixture
def nodes():
    with cabled() as names:
        if names is None:
            pytest.skip("network namespaces can be made as root alone")
        yield names


def on_node(name, rank, folder, out, steps=2000):
    data = ["--dataset-name", str(text_in(folder)), "--data.cache", str(folder / "cache")]
    where = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "10.77.0.1", "--master-port", "29555"]
    train = ["train", "--save-dir", str(out), *SETTINGS.split(), *data, "--max-steps", str(steps), "--timeout", "6"]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-m", "lockstep", "launch", *where, "--", *train],
        env=environment(GLOO_SOCKET_IFNAME="wire"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def test_r13_a_cut_link_names_the_peer(tmp_path, nodes):
    launch(tmp_path, tmp_path / "first", "--max-steps", "2", processes=0)  # prepares the data
    both = [on_node(name, rank, tmp_path, tmp_path / "out") for rank, name in enumerate(nodes)]
    try:
        try:
            until_step(tmp_path / "out", 3, both[0])
        except AssertionError:
            pytest.fail("\n".join(finish(process, tmp_path / "out", time.monotonic(), 9).said for process in both))
        ip("-n", nodes[0], "link", "set", "wire", "down")
        cut = time.monotonic()
        first, second = (finish(process, tmp_path / "out", cut, 60) for process in both)
    finally:
        for process in both:
            with contextlib.suppress(ValueError):
                end(process)
    assert (first.code, second.code) == (1, 1)
    assert "rank 1 did not arrive" in first.said
    assert names(second.said, "10.77.0.1", "rank 0")
    assert first.seconds < 30
