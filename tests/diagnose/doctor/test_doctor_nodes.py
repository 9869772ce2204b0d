"""Two nodes, each a network namespace of its own; needs root."""

import contextlib
import os
import platform
import subprocess
import sys

import pytest
from shell import environment

HOST = platform.node()


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def nodes():
    """The names of two namespaces with a cable between them."""
    names = [f"doctor{os.getpid()}{side}" for side in "ab"]
    try:
        try:
            made = not any(ip("netns", "add", name).returncode for name in names)
        except FileNotFoundError:
            made = False
        if not made:
            pytest.skip("network namespaces can be made as root alone")
        ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "wire")
            for link in ("lo", "wire"):
                assert not ip("-n", name, "link", "set", link, "up").returncode
        yield names
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                ip("netns", "del", name)


def on_node(names, rank, folder, *, master="10.78.0.1", wait=15, **more):
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_PORT": "29666",
    }
    return subprocess.Popen(
        [
            *("ip", "netns", "exec", names[rank], sys.executable, "-m", "lockstep", "doctor"),
            *("--wait", str(wait), "--save-dir", str(folder)),
        ],
        env=environment(**variables, MASTER_ADDR=master, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def test_two_nodes_whose_names_lead_to_loopback_and_then_the_way_out(nodes, tmp_path):
    one, other = [on_node(nodes, rank, tmp_path, GLOO_SOCKET_IFNAME="lo") for rank in (0, 1)]
    code, out, _ = ended(one)
    ended(other)
    assert code == 3, out
    assert f"FAIL  names           rank 1 on {HOST}: its host name resolves to 127.0.0.1" in out
    assert "GLOO_SOCKET_IFNAME is the loopback" in out
    assert "set GLOO_SOCKET_IFNAME to the interface between the nodes" in out
    assert f"rank 0 on {HOST} cannot reach rank 1 on {HOST} at 127.0.0.1:" in out
    one, other = [on_node(nodes, rank, tmp_path, GLOO_SOCKET_IFNAME="wire") for rank in (0, 1)]
    code, out, error = ended(one)
    assert (code, ended(other)[0]) == (0, 0), out + error
    assert "gloo: 3 on all ranks" in out
    assert "ok    names           gloo uses 10.78.0.1 (wire)" in out


def test_a_master_at_an_address_that_nobody_has_or_that_a_firewall_hides(nodes, tmp_path):
    ip("-n", nodes[1], "route", "add", "blackhole", "10.79.0.0/24")
    hidden = on_node(nodes, 1, tmp_path, master="10.79.0.1", wait=2)
    loop = on_node(nodes, 1, tmp_path, master="127.0.0.1", wait=2)
    code, _, error = ended(hidden)
    assert code == 3
    assert f"rank 1 on {HOST} cannot reach rank 0 at 10.79.0.1:29666: " in error
    code, _, error = ended(loop)
    assert code == 3
    assert "connection refused" in error
    assert f"MASTER_ADDR 127.0.0.1 is the loopback on rank 1 on {HOST}" in error
