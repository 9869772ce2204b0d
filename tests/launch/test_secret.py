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
from pathlib import Path

import pytest
from namespaces import CABLE, cluster
from refusals import names, refuses
from shell import environment, free_port
from test_nodes import Launchers, job
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError

from lockstep.distributed.launcher import FOLLOWER_VARIABLE
from lockstep.distributed.progress import MEETING_VARIABLE
from lockstep.errors import ConfigError
from lockstep.launch import rendezvous
from lockstep.launch.link import Link
from lockstep.launch.rendezvous_state import SignedBackend
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


def test_foreign_state_is_refused_and_a_deleted_one_not_awaited():
    state = {"round": 7, "complete": False, "deadline": None, "closed": False, "participants": [], "wait_list": []}
    state |= {"redundancy_list": [], "last_heartbeats": []}
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    backend = SignedBackend(store, "test", job(secret=OURS).run_secret)

    def write(secret, run):
        signed = job(secret=secret, run_id=run).run_secret.sign("state", state)
        store.set("torch.rendezvous.test", base64.b64encode(signed).decode())

    write(OURS, "test")
    assert backend.get_state()
    for secret, run in ((THEIRS, "test"), (OURS, "another"), (NO_SECRET, "test")):
        write(secret, run)
        with pytest.raises(RendezvousStateError):
            backend.get_state()
    store.delete_key("torch.rendezvous.test")
    began = time.monotonic()
    with pytest.raises(RendezvousStateError):
        backend.get_state()
    assert time.monotonic() - began < 10


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
    link = run.second._link  # whose first two lines are now sent again
    again = socket.create_connection((info["host"], info["port"]), timeout=10)
    hello = link._secret.sign("message 0 of the client", {"host": "h", "label": 0, "node": 1, "names": ["2", "3"]})
    again.sendall(f"{link.number}\n".encode() + hello + b"\n")
    until = time.monotonic() + 10
    while (run.first._accept() or run.first._waiting) and time.monotonic() < until:
        time.sleep(0.01)
    assert again.recv(1) == b""
    again.close()
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


def test_replayed_reflected_or_foreign_message_closes_the_link(pair):
    def meet():
        server, client = pair()
        client.send({"stop": 15})
        assert server.wait_for_message(5.0) == [{"stop": 15}]
        return server, client, client._secret.sign("message 0 of the client", {"stop": 15}) + b"\n"

    server, client, recorded = meet()
    client._connection.sendall(recorded)
    assert (server.wait_for_message(5.0), server.is_open) == ([], False)
    server, client, other = meet()
    server._connection.sendall(other)
    assert (client.wait_for_message(5.0), client.is_open) == ([], False)
    server, client = pair()
    client._flush()
    client._connection.sendall(recorded)
    assert (server.wait_for_message(5.0), server.is_open) == ([], False)


def test_value_is_read_only_for_its_purpose_with_its_secret():
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


def test_secret_comes_from_a_private_file_or_the_environment(tmp_path):
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
def test_launcher_of_one_node_listens_only_to_its_ranks(tmp_path, ranks, addresses):
    script = tmp_path / "listening.py"
    script.write_text(LISTENING)
    words = [sys.executable, "-m", "lockstep", "launch", f"--nproc-per-node={ranks}", "--", str(script)]
    around = environment() | {SECRET_VARIABLE: "0123456789abcdef"}
    done = subprocess.run(words, env=around, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"LISTENS {addresses} None") == ranks, done.stdout


# A user without rights and without the secret: reads what is open, writes over all that the stores hold and deletes it,
# and stands in for a launcher.
ATTACKER = """
import base64, encodings.idna, os, pickle, re, socket, struct, sys
from datetime import timedelta
from torch.distributed import TCPStore
host, canary, *ports = sys.argv[1:]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)

class Canary:
    def __reduce__(self):
        return os.mkdir, (canary,)

evil = pickle.dumps(Canary())
forms = [evil, base64.b64encode(evil), os.urandom(64)]
wrote, found = 0, []
for port in map(int, ports):
    try:
        with socket.create_connection((host, port), timeout=1) as connection:
            connection.sendall(evil)
        with socket.create_connection((host, port), timeout=1) as connection:
            connection.sendall(struct.pack("=BIBI", 0, 0x3C85F7CE, 13, 5))  # a store answers its client's greeting
            if connection.recv(4) != struct.pack("=I", 5):
                continue
        store = TCPStore(host, port, None, False, timedelta(seconds=1), wait_for_workers=False)
        for number, key in enumerate([*store.list_keys(), "torch.rendezvous.lockstep", "lockstep/settings"]):
            found += re.findall(rb'"port": ([0-9]+)', store.get(key)) if store.check([key]) else []
            store.delete_key(key) if number % 4 == 3 else store.set(key, forms[number % 4].decode("latin-1"))
            wrote += 1
    except (OSError, RuntimeError):
        pass  # no store listens there
for port in map(int, found):
    with socket.create_connection((host, port), timeout=1) as connection:
        connection.sendall(b'00\\n' + b'0' * 64 + b' {"host": "x", "label": 1, "node": 1, "names": ["1"]}\\n' + evil)
print("WROTE", wrote, len(found))
"""


def attack(folder, host, ports, start=subprocess.Popen, **options):
    """Attack these ports as another user; return the numbers of overwritten values and of launchers found by them."""
    canary = folder / "canary"
    words = [sys.executable, "-c", ATTACKER, host, str(canary), *map(str, ports)]
    process = start(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    said = process.communicate(timeout=60)[0]
    assert (process.returncode, "WROTE" in said, canary.exists()) == (0, True, False), said
    return [int(word) for word in said.split()[-2:]]


def command(folder, *flags):
    task = Path(__file__).parents[1] / "slurm" / "slow_steps.py"
    train = f"train --task {task}:Slow --device cpu --batch-size 8 --max-steps 100000 --log-freq 1 --no-report"
    words = [sys.executable, "-m", "lockstep", "launch", *flags, "--", *train.split(), "--save-dir", str(folder)]
    return words, environment(STEP_SECONDS="0.02") | {SECRET_VARIABLE: "0123456789abcdef"}


def listeners(pids):
    """The ports at which these processes listen."""
    links = {os.readlink(path) for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    rows = [row.split() for row in Path(f"/proc/{pids[0]}/net/tcp").read_text().splitlines()[1:]]
    own = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    return {int(row[1].partition(":")[2], 16) for row in own}


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_step(launcher, step):
    """Return what it said until then."""
    said = ""
    for line in launcher.stdout:
        said += line
        if line.startswith(f"step {step}/"):
            return said
    raise AssertionError(said)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_of_the_machine_runs_no_code_in_a_run(tmp_path):
    words, around = command(tmp_path, "--nproc-per-node=2")
    launcher = subprocess.Popen(words, env=around, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for_step(launcher, 3)
        ports = listeners([launcher.pid, *children(launcher.pid)])
        assert attack(tmp_path, "127.0.0.1", ports, text=True)[0] > 0
        launcher.terminate()
        said = launcher.communicate(timeout=60)[0]
    finally:
        launcher.kill()  # its ranks end with it
        launcher.communicate()
    assert not (tmp_path / "canary").exists()
    assert said.count("lockstep: error") <= 1, said
    assert "Traceback" not in said


@pytest.mark.slow
def test_machine_without_the_secret_can_do_nothing(tmp_path):
    with cluster(3) as (*nodes, stranger):
        launchers = []
        words, around = command(tmp_path, "--nnodes=2", "--node-rank=1", "--master-addr=node0")
        other = stranger.start(words, env=around | {SECRET_VARIABLE: "an attacker's own one"})
        for number, node in enumerate(nodes):
            words, around = command(tmp_path, "--nnodes=2", f"--node-rank={number}", "--master-addr=node0")
            launchers.append(node.start(words, env=around | {"GLOO_SOCKET_IFNAME": CABLE}))
        wait_for_step(launchers[0], 3)
        assert names(other.communicate(timeout=60)[0], "--rdzv-secret-file")
        assert other.returncode == 2
        wrote, found = attack(tmp_path, "node0", [29400], stranger.start)
        assert wrote > found > 0
        step = len((tmp_path / "default" / "metrics.jsonl").read_text().splitlines())
        said = wait_for_step(launchers[0], step + 5)
        launchers[0].terminate()
        ends = [launcher.communicate(timeout=60)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [75, 75], ends
    assert names(said + ends[0], "node0:29400", "secret")
    assert not (tmp_path / "canary").exists()
