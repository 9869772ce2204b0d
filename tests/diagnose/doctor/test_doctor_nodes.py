"""Two nodes, each a network namespace of its own; needs root."""

import subprocess

import pytest
import warm
from namespaces import CABLE, cluster
from shell import environment


@pytest.fixture
def nodes():
    with cluster(2) as made:
        yield made


def on_node(nodes, rank, folder, *, master=None, wait=15, **more):
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_PORT": "29666",
    }
    return nodes[rank].start(
        [warm.python(), "-m", "lockstep", "doctor", "--wait", wait, "--save-dir", folder],
        env=environment(**variables, MASTER_ADDR=master or nodes[0].address, **more),
        stderr=subprocess.PIPE,
    )


def ended(process):
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def test_two_nodes_resolving_to_loopback_and_the_way_out(nodes, tmp_path):
    for node in nodes:
        node.name_hosts("127.0.0.1 localhost node0 node1\n")
    one, other = [on_node(nodes, rank, tmp_path, GLOO_SOCKET_IFNAME="lo") for rank in (0, 1)]
    code, out, _ = ended(one)
    ended(other)
    assert code == 3, out
    assert "FAIL  names           rank 1 on node1: its host name resolves to 127.0.0.1" in out
    assert "GLOO_SOCKET_IFNAME is the loopback" in out
    assert "set GLOO_SOCKET_IFNAME to the interface between the nodes" in out
    assert "rank 0 on node0 cannot reach rank 1 on node1 at 127.0.0.1:" in out
    one, other = [on_node(nodes, rank, tmp_path, GLOO_SOCKET_IFNAME=CABLE) for rank in (0, 1)]
    code, out, error = ended(one)
    assert (code, ended(other)[0]) == (0, 0), out + error
    assert "gloo: 3 on all ranks" in out
    assert "ok    names           gloo uses 10.77.0.1 (wire)" in out


def test_master_at_an_unknown_or_firewalled_address(nodes, tmp_path):
    nodes[1].ip("route", "add", "blackhole", "10.79.0.0/24")
    hidden = on_node(nodes, 1, tmp_path, master="10.79.0.1", wait=2)
    loop = on_node(nodes, 1, tmp_path, master="127.0.0.1", wait=2)
    code, _, error = ended(hidden)
    assert code == 3
    assert "rank 1 on node1 cannot reach rank 0 at 10.79.0.1:29666: " in error
    code, _, error = ended(loop)
    assert code == 3
    assert "connection refused" in error
    assert "MASTER_ADDR 127.0.0.1 is the loopback on rank 1 on node1" in error
