"""Attack the launchers' ports: no code of an attacker runs, and no unsigned message is obeyed."""

import base64
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from refusals import names, refuses
from shell import environment, free_port
from test_nodes import Launchers, job
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError

from lockstep.distributed.launcher import FOLLOWER_VARIABLE
from lockstep.distributed.progress import MEETING_VARIABLE
from lockstep.errors import ConfigError, LockstepError
from lockstep.launch import rendezvous
from lockstep.launch.link import Link
from lockstep.launch.secret import NO_SECRET, SECRET_VARIABLE, Secret, SignatureError, read_secret

OURS, THEIRS = Secret(b"ours and nobody's"), Secret(b"an attacker's own")


class Canary:
    """A pickle that writes a file where it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def connected(port):
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False)


def first_launcher(port, secret):
    asked = job(endpoint=f"127.0.0.1:{port}", secret=secret, options={"join_timeout": "1"})
    return rendezvous.open_rendezvous(asked, print)


@pytest.mark.parametrize("secret", [OURS, NO_SECRET], ids=["a secret", "no secret"])
def test_a_pickle_in_the_meeting_points_store_is_not_run(tmp_path, secret):
    port = free_port()
    handler = first_launcher(port, secret)
    attacker = connected(port)
    spoilt = base64.b64encode(pickle.dumps(Canary(tmp_path / "canary"))).decode()
    attacker.set("torch.rendezvous.test", spoilt)
    with pytest.raises(RendezvousStateError):
        handler.next_rendezvous()
    assert not (tmp_path / "canary").exists()


def test_a_state_that_somebody_else_signed_is_refused():
    ours, theirs = free_port(), free_port()
    handler, other = first_launcher(ours, OURS), first_launcher(theirs, THEIRS)
    stores = [connected(port) for port in (ours, theirs)]
    with refuses(LockstepError, "1 of 2 nodes"):
        other.next_rendezvous()  # which writes a state of its own
    stores[0].set("torch.rendezvous.test", stores[1].get("torch.rendezvous.test"))
    with pytest.raises(RendezvousStateError):
        handler.next_rendezvous()


def test_launchers_with_different_secrets_do_not_meet():
    port = free_port()
    kept = first_launcher(port, OURS)
    for other in (THEIRS, NO_SECRET):
        with refuses(ConfigError, "--rdzv-secret-file", SECRET_VARIABLE, f"127.0.0.1:{port}"):
            rendezvous.open_rendezvous(job(endpoint=f"127.0.0.1:{port}", is_host=False, secret=other), print)
    kept.shutdown()


def test_without_a_secret_one_line_says_who_can_end_the_run(monkeypatch):
    said = []
    monkeypatch.setattr(rendezvous, "_is_loopback", lambda endpoint: False)
    for secret in (OURS, NO_SECRET):
        asked = job(endpoint=f"127.0.0.1:{free_port()}", secret=secret)
        rendezvous.open_rendezvous(asked, said.append).shutdown()
    (line,) = said
    assert names(line, "--rdzv-secret-file", SECRET_VARIABLE)


def test_who_reads_the_store_but_has_no_secret_is_no_launcher(tmp_path, monkeypatch):
    for name in (MEETING_VARIABLE, FOLLOWER_VARIABLE):
        monkeypatch.setenv(name, "elsewhere")  # so that what the launchers set does not outlive the test
    run = Launchers(tmp_path, secret=OURS)
    info = json.loads(run.store.get("round1/lockstep/launcher/0").decode().partition(" ")[2])
    connection = socket.create_connection((info["host"], info["port"]))
    attacker = Link(connection, THEIRS.derive(info["number"]), is_server=False)
    attacker.send({"node": 7, "names": ["8", "9"], "host": "evil"})
    until = time.monotonic() + 10
    while attacker.is_open and time.monotonic() < until:
        run.first._accept()
        attacker.receive()
    assert not attacker.is_open
    assert [node.number for node in run.first._nodes] == [1]
    for each in (attacker, *run.each):
        each.close()


@pytest.fixture
def pair():
    """Both ends of a connection."""
    made = []

    def make():
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname())
            made.extend([Link(server.accept()[0], OURS, is_server=True), Link(client, OURS, is_server=False)])
        return made[-2:]

    yield make
    for link in made:
        link.close()


def test_a_message_that_is_repeated_or_sent_back_closes_the_link(pair):
    server, client = pair()
    line = OURS.sign("message 0 of the client", {"stop": 15}) + b"\n"
    client.send({"stop": 15})
    assert server.wait_for_message(5.0) == [{"stop": 15}]
    client._connection.sendall(line)
    assert server.wait_for_message(5.0) == []
    assert not server.is_open
    server, client = pair()
    server._connection.sendall(line)
    assert client.wait_for_message(5.0) == []
    assert not client.is_open


def test_a_value_is_read_only_for_its_purpose_and_with_its_secret():
    data = OURS.sign("settings", {"b": 1, "a": [None]})
    assert OURS.read("settings", data) == {"a": [None], "b": 1}
    for secret, purpose, given in (
        (THEIRS, "settings", data),
        (OURS, "round", data),
        (OURS, "settings", data.replace(b"1", b"2")),
        (OURS, "settings", b""),
        (OURS.derive("1"), "settings", data),
    ):
        with pytest.raises(SignatureError):
            secret.read(purpose, given)
    assert "ours" not in repr(OURS)


def test_a_secret_comes_from_a_private_file_or_the_environment_and_goes_no_further(tmp_path):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    around = {SECRET_VARIABLE: "fedcba9876543210"}
    of_file = read_secret(str(path), around)
    assert around == {}
    assert of_file.read("x", Secret(b"0123456789abcdef").sign("x", 1)) == 1
    assert read_secret(None, {SECRET_VARIABLE: "fedcba9876543210"})
    assert not read_secret(None, {})
    with refuses(ConfigError, SECRET_VARIABLE, 5, 16):
        read_secret(None, {SECRET_VARIABLE: "short"})
    path.chmod(0o640)
    with refuses(ConfigError, "--rdzv-secret-file", path, "chmod 600"):
        read_secret(str(path), {})
    path.write_text("short")
    path.chmod(0o600)
    with refuses(ConfigError, "--rdzv-secret-file", path, 5, 16):
        read_secret(str(path), {})
    with refuses(ConfigError, "--rdzv-secret-file", tmp_path / "none"):
        read_secret(str(tmp_path / "none"), {})


LISTENING = """
import os, sys
listening = {}
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for row in open(table).read().splitlines()[1:]:
        words = row.split()
        if words[3] == "0A":
            listening[f"socket:[{words[9]}]"] = words[1].partition(":")[0]
folder = f"/proc/{os.getppid()}/fd"
links = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")]
print("LISTENS", sorted(listening[link] for link in links if link in listening), os.environ.get("LOCKSTEP_RDZV_SECRET"))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("ranks", "addresses"), [(1, []), (2, ["0100007F"])])
def test_the_launcher_of_one_node_listens_to_nobody_but_its_ranks(tmp_path, ranks, addresses):
    script = tmp_path / "listening.py"
    script.write_text(LISTENING)
    words = [sys.executable, "-m", "lockstep", "launch", f"--nproc-per-node={ranks}", "--", str(script)]
    around = environment() | {SECRET_VARIABLE: "0123456789abcdef"}
    done = subprocess.run(words, env=around, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"LISTENS {addresses} None") == ranks, done.stdout
