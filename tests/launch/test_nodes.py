"""Decisions over several nodes: launchers in one process, over real sockets. `chaos/test_lost_nodes.py` has runs."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from refusals import names
from torch.distributed import HashStore, PrefixStore, TCPStore

from lockstep.distributed.failures import ProcessFailure
from lockstep.distributed.launcher import FOLLOWER_VARIABLE
from lockstep.distributed.membership import Generation, LeaveReport, key_prefix
from lockstep.distributed.progress import MEETING_VARIABLE, note_end
from lockstep.errors import LockstepError
from lockstep.launch import nodes
from lockstep.launch.job import Job
from lockstep.launch.losses import Membership

KEYS = key_prefix("token")


def job(**changes):
    settings = {"command": [], "processes": 2, "nodes": (2, 2), "backend": "c10d", "endpoint": "127.0.0.1:0"}
    rest = {"options": {}, "run_id": "test", "is_host": True, "restarts": 0, "environment": {}, "losses": 8}
    return Job(**{**settings, **rest, **changes})


class Launchers:
    """The launchers of nodes of two ranks each; node 0's decides."""

    def __init__(self, folder, count=2, **changes):
        self.store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
        self.changes = {"endpoint": f"127.0.0.1:{self.store.port}", **changes}
        self.living, self.ended = [set() for _ in range(count)], [{} for _ in range(count)]
        self.folders = [folder / str(number) for number in range(count)]
        self.each = []
        for number, own in enumerate(self.folders):
            own.mkdir()
            self.each.append(nodes.open_decisions(job(is_host=number == 0, **self.changes), str, own))
        self.first, self.second = self.each[:2]
        self.survives, self.rounds = [None] * count, 0
        self.begin()

    def begin(self):
        self.rounds += 1
        prefix = f"round{self.rounds}"  # torch's own rounds do not share keys: an old address has an old secret

        def one(number):
            names = [str(2 * number), str(2 * number + 1)]
            workers = [SimpleNamespace(world_size=2 * len(self.each))]
            store = TCPStore("127.0.0.1", self.store.port, None, False, timedelta(seconds=5), wait_for_workers=False)
            group = SimpleNamespace(
                store=PrefixStore(prefix, store), group_rank=number, group_world_size=len(self.each), workers=workers
            )
            self.living[number], self.ended[number] = set(names), {}
            self.survives[number] = self.each[number].begin("token", names, group)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(self.each))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)

    def meeting(self):
        """The ranks' store, whose address is the same on all nodes."""
        host, _, port = os.environ[MEETING_VARIABLE].rpartition(":")
        store = TCPStore(host, int(port), None, False, timedelta(seconds=5), wait_for_workers=False)
        for slot in range(2 * len(self.each)):
            store.set(f"{KEYS}/ready/{slot}", "yes")
        return store

    def poll(self, until=lambda: False, seconds=10.0):
        """Poll all launchers that are not closed, until something holds; return their last reasons."""
        deadline = time.monotonic() + seconds
        while True:
            reasons = [
                one.update(self.living[number], self.ended[number]) for number, one in enumerate(self.each) if one
            ]
            if until() or time.monotonic() > deadline:
                return reasons
            time.sleep(0.01)

    def lose(self, name, code=-9, message=""):
        number = int(name) // 2
        self.living[number].discard(name)
        self.ended[number][name] = ProcessFailure(int(name), code, message, when=time.time(), at_start=int(name))

    def vanish(self, number):
        """A launcher ends."""
        self.each[number].close()
        self.each[number] = None


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """The variables of another launcher around these; what these set does not outlive a test."""
    monkeypatch.setenv(MEETING_VARIABLE, "elsewhere:1")
    monkeypatch.setenv(FOLLOWER_VARIABLE, "1")


@pytest.fixture
def launchers(tmp_path):
    made = []

    def make(**changes):
        made.append(Launchers(tmp_path, **changes))
        return made[-1]

    yield make
    for each in made:
        for one in filter(None, each.each):
            one.close()


def report(store, names, number=1):
    for name in names:
        store.set(f"{KEYS}/here/{number}/{name}", json.dumps(list(LeaveReport(7, -1, "a", False, 60.0))))
        store.set(f"{KEYS}/here/{number}", "")


def test_a_rank_lost_on_another_node_is_replaced_there(launchers):
    run = launchers()
    store = run.meeting()
    assert run.survives == [True, True]
    run.lose("3")
    report(store, "012")
    assert run.poll(lambda: run.second.replace) == ["", ""]
    assert (run.first.replace, run.second.replace) == ([], ["3"])
    assert run.second.members == run.first.members == ["0", "1", "2"]
    assert [run.second.rank_of(name) for name in ("2", "3")] == [2, None]
    run.ended[1] = {}
    run.second.add_new("3.1")
    run.living[1].add("3.1")
    store.set(f"{KEYS}/new/3.1", json.dumps(list(LeaveReport(-2, -1, "a", False, 60.0))))
    run.poll(lambda: store.check([f"{KEYS}/wish/1"]))
    report(store, "012", 2)
    run.poll(lambda: run.second.number == 2)
    assert run.second.members == ["0", "1", "2", "3.1"]


def test_launcher_that_ends_is_one_loss_and_not_replaced(launchers):
    run = launchers(losses=1)
    store = run.meeting()
    run.poll(lambda: run.second.members)
    run.vanish(1)
    report(store, "01")
    run.poll(lambda: run.first.number == 1)
    (line,) = Generation.read(store.get(f"{KEYS}/members/1").decode()).lost
    assert f"node 1 ({socket.gethostname()}, with ranks 2 and 3) is lost" in line
    assert (run.first.members, run.first.replace, run.first.causes[0].rank) == (["0", "1"], [], 2)


def test_node_that_returns_takes_its_place_between_two_steps(launchers):
    run = launchers()
    store = run.meeting()
    run.poll(lambda: run.second.members)
    run.vanish(1)
    back, seats = nodes.open_decisions(job(is_host=False, **run.changes), str, run.folders[1]), []
    asking = threading.Thread(target=lambda: seats.append(back.rejoin(2)))
    asking.start()
    run.poll(seconds=0.3)
    assert not seats  # the loss is not settled
    report(store, "01")
    run.poll(lambda: seats)
    asking.join()
    assert seats == [nodes.Seat(1, 2, ["2.1", "3.1"], 4, "token")]
    assert back.begin("token", seats[0].names, None)
    run.each[1], run.living[1], run.ended[1] = back, {"2.1", "3.1"}, {}
    for name in ("2.1", "3.1"):
        store.set(f"{KEYS}/new/{name}", json.dumps(list(LeaveReport(-2, -1, "a", False, 60.0))))
    run.poll(lambda: store.check([f"{KEYS}/wish/1"]))
    report(store, "01", 2)
    run.poll(lambda: back.number == 2)
    assert back.members == ["0", "1", "2.1", "3.1"]
    assert run.first.rejoin(2) is None  # a restart: from now on all meet
    other = nodes.open_decisions(job(is_host=False, **run.changes), str, run.folders[1])
    assert other.rejoin(2) is None


def test_a_launcher_that_is_one_too_many_is_told_why_and_ends(launchers, monkeypatch):
    monkeypatch.setattr(nodes, "_SEAT_SECONDS", 0.2)
    run = launchers()
    run.meeting()
    said, ends = [], []
    changes = {**run.changes, "is_host": False, "options": {"join_timeout": "2"}}
    more = nodes.open_decisions(job(**changes), str, run.folders[1], said.append)

    def ask():
        try:
            more.rejoin(2)
        except LockstepError as error:
            ends.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    run.poll(lambda: ends)
    asking.join()
    for line in (*said, *ends):
        assert names(line, run.changes["endpoint"], 2, socket.gethostname())
    assert (len(said), len(ends)) == (1, 1)


def test_stopped_launcher_is_named_once_and_others_end(launchers, monkeypatch):
    monkeypatch.setattr(nodes, "_QUIET", 0.1)
    monkeypatch.setattr(nodes, "_LEAVE", 0.3)
    run = launchers(node_rank=4)
    run.meeting()
    run.poll(lambda: run.second.members)
    said = [[], []]
    run.first._say, run.second._say = said[0].append, said[1].append
    stopped, run.each[1] = run.each[1], None
    run.poll(seconds=0.3)
    assert names(*said[0], "node 4", socket.gethostname())
    run.each = [None, stopped]  # and the other way round
    run.poll(seconds=0.2)
    assert names(*said[1], "node 0")
    run.living[1] = set()
    assert run.poll(lambda: stopped.is_over) == [""]
    assert stopped.is_over
    assert stopped.update(set(), {"2": ProcessFailure(2, 1)}) == "-"  # a rank that nobody replaces
    assert names(str(stopped.fatal), run.changes["endpoint"], "node 0's launcher", "has not answered")
    run.each[0] = run.first


def test_a_stopped_launcher_does_not_spoil_the_end_of_a_run(launchers, monkeypatch):
    monkeypatch.setattr(nodes, "_LEAVE", 0.1)
    run = launchers()
    run.meeting()
    run.poll(lambda: run.second.members)
    run.each[1], stopped = None, run.each[1]
    run.living[0] = set()
    assert run.poll(lambda: run.first.is_over) == [""]
    assert (run.first.is_over, run.first.fatal, run.first.causes) == (True, None, [])
    stopped.close()


def test_silent_node_is_lost_when_others_wait_for_its_ranks(launchers, monkeypatch):
    monkeypatch.setattr(nodes, "_DEAF", 0.05)
    run = launchers()
    store = run.meeting()
    run.poll(lambda: run.second.members)
    run.first._membership._now = lambda: time.monotonic() * 1000  # the ranks' patience in a blink
    run.each[1], silent = None, run.each[1]  # connected, and polls no more
    report(store, "01")
    run.poll(lambda: run.first.number == 1)
    assert run.first.members == ["0", "1"]
    silent._link._flush()
    while silent.update({"2", "3"}, {}) == "" and silent._link.is_open:
        time.sleep(0.01)
    assert silent.update(set(), {"2": ProcessFailure(2, 1)}) == "-"  # the others went on without it
    assert silent.is_orphaned
    assert names(str(silent.fatal), "node 1", socket.gethostname(), "ranks 2 and 3", "its launcher is silent", "again")
    silent.close()


def test_what_no_run_survives_ends_all_nodes_with_its_cause(launchers):
    run = launchers()
    store = run.meeting()
    store.set(f"{KEYS}/ready/3", "--engine zero splits the states")
    run.lose("3", 1, "KeyError")
    reasons = run.poll(lambda: run.first.fatal and run.poll()[1])
    assert reasons == ["--engine zero splits the states"] * 2
    assert (run.first.fatal.message, run.second.fatal) == ("KeyError", None)  # the second has it itself
    run.begin()
    store = run.meeting()
    run.poll(lambda: run.second.members)  # node 1 is connected
    run.lose("0", 2, "bad input")
    run.poll(lambda: run.second.fatal)
    assert (run.second.fatal.code, run.second.fatal.message) == (2, "bad input")


def test_without_node_0_a_node_ends_with_75_once_its_ranks_have(launchers):
    run = launchers()
    run.poll(lambda: run.second.members)
    run.vanish(0)
    time.sleep(0.05)
    assert run.second.update({"2", "3"}, {}) == ""  # they may be saving
    assert not run.second.is_over
    assert run.second.update({"2"}, {"3": ProcessFailure(3, 1)}) == "-"
    assert (run.second.is_orphaned, run.second.fatal.code) == (True, 75)
    assert names(str(run.second.fatal), run.changes["endpoint"], "node 0's launcher", "is lost")


def test_signal_and_exit_code_reach_all_nodes(launchers, monkeypatch):
    run = launchers(count=3)
    run.poll(lambda: run.each[2].members)
    run.each[2].stop_signal = signal.SIGTERM
    run.poll(lambda: run.second.stop_signal)
    assert run.first.stop_signal == run.second.stop_signal == signal.SIGTERM
    monkeypatch.setenv("LOCKSTEP_PROGRESS", str(run.folders[1]))
    note_end(75)
    run.living[0], run.living[2] = set(), set()
    assert run.poll(seconds=0.1) == ["", "", ""]
    assert not run.first.is_over  # node 1 is still saving
    run.living[1] = set()
    run.poll(lambda: run.each[2].is_over)
    assert [(one.is_over, one.code) for one in run.each] == [(True, 75)] * 3


def test_strangers_at_the_launchers_port_are_ignored(launchers, monkeypatch):
    monkeypatch.setattr(nodes, "_HELLO_SECONDS", 0.1)
    run = launchers()
    run.poll(lambda: run.second.members)
    address = run.first._listener.getsockname()
    strangers = [socket.create_connection(address) for _ in range(4)]
    strangers[0].sendall(b'{"secret": "", "node": 1, "host": "x", "names": ["2", "3"]}\n')
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[2].sendall(b"x" * 100_000)
    run.poll(lambda: not run.first._waiting, seconds=5.0)
    assert run.poll(seconds=0.3) == ["", ""]
    for stranger in strangers:
        stranger.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    assert [node.slots for node in run.first._nodes] == [["2", "3"]]


@pytest.mark.parametrize(
    ("changes", "survives"), [({"losses": 0}, False), ({"backend": "etcd-v2"}, None), ({"losses": 1}, True)]
)
def test_node_0s_max_losses_counts_on_all_nodes(tmp_path, changes, survives):
    if survives is None:
        assert nodes.open_decisions(job(is_host=False, **changes), str, tmp_path) is None
        return
    first = nodes.open_decisions(job(is_host=True, **changes), str, tmp_path)
    assert (MEETING_VARIABLE in os.environ) == survives
    second = nodes.open_decisions(job(is_host=False, **changes), str, tmp_path)
    assert isinstance(second, nodes.Follower)  # it asks node 0
    first.close()


def test_one_node_needs_no_connection(tmp_path):
    alone = nodes.open_decisions(job(nodes=(1, 1)), str, tmp_path)
    group = SimpleNamespace(store=None, group_rank=0, group_world_size=1, workers=[SimpleNamespace(world_size=2)])
    assert alone.begin("token", ["0", "1"], group)
    assert alone.update({"0", "1"}, {}) == ""
    assert alone.update(set(), {}) == ""
    assert alone.is_over
    alone.close()


def test_a_node_is_sent_the_members_once_and_then_beats(tmp_path):
    """At thousands of ranks the whole state to every node once a second took a third of a core."""
    sent = [[] for _ in range(8)]
    first = nodes.Coordinator(Membership(HashStore()), "x:1", None, tmp_path)
    ranks = [str(rank) for rank in range(16)]
    first._membership.begin("token", ranks)
    first._world, first._own = set(ranks), set(ranks[:2])
    for number in range(1, 8):
        link = SimpleNamespace(send=sent[number].append, receive=list, is_open=True, heard=time.monotonic())
        slots = ranks[2 * number : 2 * number + 2]
        first._nodes.append(nodes._Node(number, number, "host", link, slots, set(slots)))
    for _ in range(3):
        for node in first._nodes:
            node.sent_at = -1e9
        first.update(set(ranks[:2]), {})
    for messages in sent[1:]:
        assert [message.get("members") for message in messages] == [ranks, None, None]
    first._membership.replace = ["5"]
    first.stop_signal = signal.SIGTERM
    first.update(set(ranks[:2]), {})
    assert [message.get("replace") for message in sent[2][3:]] == [["5"], None]
    assert [message["stop"] for message in sent[3][3:]] == [signal.SIGTERM]
