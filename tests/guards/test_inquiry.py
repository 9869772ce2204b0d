"""Who is missing, and what a failed exchange means: the watch and its questions, without processes."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from lockstep.distributed.exchange import StepExchange
from lockstep.distributed.progress import COMPUTING, FOLDER_VARIABLE, IN_BODY, READING, SAVING, Progress, RankProgress
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, PeerError
from lockstep.guards import watchdog
from lockstep.guards import watchdog as module
from lockstep.guards.watchdog import HangWatchdog, Heartbeats, Inquiry, all_do, waited_for


class Store:
    """A meeting point of one process; `gone`: it no longer answers."""

    def __init__(self, gone=False, **held):
        self.held, self.gone = {f"k/{key.replace('_', '/')}": text for key, text in held.items()}, gone
        self.requests, self.numbers = 0, 0  # requests, and the keys or answers in them

    def check(self, keys):
        self.requests, self.numbers = self.requests + 1, self.numbers + len(keys)
        if self.gone:
            raise RuntimeError("the meeting point is gone")
        return all(key in self.held for key in keys)

    def set(self, key, value):
        self.check([key])
        self.held[key] = value

    def get(self, key):
        self.check([key])
        self.numbers += self.held[key].count("\n")
        return self.held[key].encode()

    def wait(self, keys, timeout):
        if not self.check(keys):
            raise dist.DistStoreError("not in time")

    def multi_get(self, keys):
        self.check(keys)
        return [self.held[key].encode() for key in keys]

    def append(self, key, value):
        self.set(key, self.held.get(key, "") + value)

    def add(self, key, number):
        self.set(key, str(int(self.held.get(key, "0")) + number))
        return int(self.held[key])


@pytest.fixture
def asking(tmp_path, monkeypatch):
    """An Inquiry of rank 1 of 3 over a Store, in step 4."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(module, "_ANSWER_TIME", 0.0)

    def made(store):
        progress = Progress()
        progress.at(4, COMPUTING)
        inquiry = Inquiry(World(rank=1, size=3), progress, tmp_path)
        inquiry.heartbeats = Heartbeats(store, "k", 3)
        inquiry._keys = "k"
        inquiry.connect = lambda *_: None if store.gone else inquiry.heartbeats
        return inquiry

    return made


def test_rank_reports_its_place_and_hears_a_call_once(asking):
    store = Store()
    inquiry = asking(store)
    inquiry.tell(inquiry.heartbeats)
    assert store.held["k/at/1"] == "4 step 5 (loading or computing)"
    inquiry.listen(inquiry.heartbeats)
    assert not inquiry.called
    assert "k/answers" not in store.held
    store.held["k/call"] = "1"
    inquiry.listen(inquiry.heartbeats)
    inquiry.listen(inquiry.heartbeats)
    assert inquiry.called
    assert store.held["k/answers"].count('"rank": 1') == 1
    store.gone = True
    inquiry.tell(inquiry.heartbeats)  # nobody to tell is no error


def answer(rank, step, waits, line="a.py:1 in f"):
    return (
        f'{{"rank": {rank}, "step": {step}, "number": {step + 1}, "line": "{line}", "waits": {str(waits).lower()}}}\n'
    )


@pytest.mark.parametrize(
    ("told", "said"),
    [
        # a silent rank is named, with its last heartbeat
        ({"answers": answer(0, 4, True)}, "rank 2 did not arrive"),
        (
            {"answers": answer(0, 4, True), "at_2": "2 step 3 (x)"},
            "rank 2 did not arrive: it was in step 3 (x) at its last",
        ),
        ({}, "rank 0 did not arrive and rank 2 did not arrive"),
        # of those that answer the one that does not wait, else the one that is behind
        ({"answers": answer(0, 4, True) + answer(2, 9, False)}, "rank 2 did not arrive: it is in step 10, at a"),
        ({"answers": answer(0, 3, True) + answer(2, 4, True)}, "rank 0 did not arrive: it is in step 4, at a"),
    ],
)
def test_who_is_missing_is_told(asking, told, said):
    store = Store(**told)
    inquiry = asking(store)
    found = inquiry.verdict("an exchange failed")
    assert found.startswith(said)
    assert found.count("did not arrive") == said.count("did not arrive")
    assert store.held["k/call"] == "1"  # the others are asked, and hear where this one is
    assert '"rank": 1, "step": 4' in store.held["k/answers"]
    assert store.held["k/verdict"] == found  # the others read it
    store.held.clear()
    assert inquiry.verdict("another reason") == found  # once a process


def test_one_rank_asks_and_the_others_read_its_verdict(asking):
    assert asking(Store(call="1", verdict="rank 2 did not arrive")).verdict("late") == "rank 2 did not arrive"
    left = asking(Store(call="1", answers=answer(0, 4, True), at_2="2 step 3 (x)")).verdict("late")
    assert left.startswith("rank 2 did not arrive: it was in step 3 (x)")


@pytest.mark.parametrize("size", [8, 1024])
@pytest.mark.parametrize("lost", [[1], [0, 700]])
def test_verdict_of_a_thousand_ranks_accuses_only_the_lost(tmp_path, monkeypatch, size, lost):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(module, "dump", lambda *_: None)  # the same stacks a thousand times
    monkeypatch.setattr(module, "_ANSWER_TIME", 0.05)
    monkeypatch.setattr(module, "_ANSWER_SHARE", 0.0)
    store, progress = Store(), Progress()
    progress.at(4, COMPUTING)
    lost = [rank % size for rank in lost]
    ranks = [Inquiry(World(rank=rank, size=size), progress, tmp_path) for rank in range(size) if rank not in lost]
    for each in ranks:
        each.heartbeats, each._keys = Heartbeats(store, "k", size), "k"
        each.connect = lambda *_: Heartbeats(store, "k", size)
        each.tell(each.heartbeats)
    store.set("k/call", "0")
    for each in ranks[1:]:
        each.listen(each.heartbeats)
    del store.held["k/call"]
    store.requests = store.numbers = 0
    verdicts = {each.verdict("an exchange failed") for each in ranks}
    names = " and ".join(f"rank {rank} did not arrive" for rank in sorted(lost))
    assert verdicts == {names}
    assert store.requests < 8 * size + 200  # a few of each rank; before, 2 N of each
    assert store.numbers < 40 * size  # answers are read by one rank


def test_reading_all_places_takes_two_requests_of_bounded_size():
    store = Store(**{f"at_{rank}": f"{rank} step {rank + 1} (a)" for rank in range(1024)})
    places = Heartbeats(store, "k", 1024)
    assert places.find_passed(1021) == [1022, 1023]
    assert store.requests == 2
    assert 1024 * 2 / (places.interval / 4) < 1000  # requests a second where every rank looks
    del store.held["k/at/7"]  # not in its steps yet: nobody is past one
    assert places.find_passed(3) == []


def test_silent_ranks_place_is_read_from_the_launchers_folder(asking, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    Progress.of(2).at(7, SAVING)
    found = asking(Store(answers=answer(0, 4, True), at_2="2 step 3 (x)")).verdict("late")
    assert found == f"rank 2 did not arrive: it was in {RankProgress.read(tmp_path / '2')}"


def test_silent_meeting_point_accuses_its_node_and_no_rank(asking, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(module, "_STORE", module.timedelta(seconds=0.05))
    silent = asking(Store(gone=True)).verdict("late")
    assert "node7:29500" in silent
    assert "did not arrive" not in silent
    alone = asking(Store())
    alone.heartbeats = None
    assert alone.verdict("late").startswith("rank 1 made no progress: it is in step 5 (loading or computing), at ")


def test_waiting_rank_sees_those_beyond_and_ends_by_patience():
    told = Heartbeats(Store(at_0="7 step 8 (a)", at_1="8 step 9 (b)"), "k", 2)
    assert waited_for(told, 7) == [1]
    assert waited_for(told, 8, patience=0.01) == []
    assert waited_for(told, 7, patience=0.0) == []
    gone = Heartbeats(Store(gone=True), "k", 2)
    assert waited_for(gone, 7) == []
    assert not all_do(gone, "stop", 7, lambda: 9.0)
    assert all_do(None, "stop", 7, lambda: 9.0)  # a world of one


class Watch:
    """A watch of rank 0 of 2 with a timeout of 8 s, at a time of one's own."""

    def __init__(self, folder, monkeypatch, phase, size=2):
        self.now, self.failed, store = 100.0, False, Store(at_0="3 step 4 (a)", at_1="3 step 4 (a)")
        self.held = store.held
        progress = SimpleNamespace(phase=phase, since=100.0, step=3)
        exchange = SimpleNamespace(progress=progress, has_failed=lambda: self.failed)
        self.watch = HangWatchdog(World(size=size, timeout=8.0), exchange, folder)
        self.watch._inquiry.heartbeats = Heartbeats(store, "k", 2) if size > 1 else None
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("lockstep.guards.watchdog.time", clock)

    def at(self, seconds):
        self.now = 100.0 + seconds
        return self.watch._reason()


def test_failed_exchange_gets_a_second_to_come_back(tmp_path, monkeypatch):
    watch = Watch(tmp_path, monkeypatch, COMPUTING)
    watch.failed = True
    assert [watch.at(0.0), watch.at(0.9)] == ["", ""]
    watch.failed = False
    assert watch.at(1.5) == ""
    watch.failed = True
    assert [watch.at(2.0), watch.at(2.9), watch.at(3.1)] == ["", "", "an exchange failed"]
    watch.failed = False
    watch.watch._inquiry.called = True
    assert watch.at(3.2) == "another rank reports a missing rank"


def test_a_loss_that_one_rank_reads_alone_is_told_after_a_second(tmp_path, monkeypatch):
    watch = Watch(tmp_path, monkeypatch, READING)
    assert watch.at(1.1) == ""  # the other may read it too
    watch.held["k/at/1"] = "4 step 5 (a)"
    assert watch.at(0.9) == ""
    assert str(watch.at(1.4)).startswith("rank 0: the loss was read after step 4, and not on rank 1")
    alone = Watch(tmp_path, monkeypatch, READING, size=1)
    assert (alone.at(7.9), alone.at(8.1)) == ("", "no progress for 8 s")


def test_long_body_is_warned_of_once_at_half_the_timeout(tmp_path, monkeypatch, caplog):
    watch = Watch(tmp_path, monkeypatch, IN_BODY)
    assert watch.at(3.9) == ""
    assert not caplog.records
    assert [watch.at(4.1), watch.at(5.0)] == ["", ""]
    assert len(caplog.records) == 1
    assert watch.at(8.1) == "no progress for 8 s"
    alone = Watch(tmp_path, monkeypatch, IN_BODY, size=1)
    assert alone.at(800.0) == ""
    assert len(caplog.records) == 1


def test_errors_that_only_say_a_rank_is_gone_name_it(tmp_path):
    def left(error, size=2):
        """What leaves the watch, and whether it watched and no thread of its would have kept the process."""
        watch = HangWatchdog(World(size=size), StepExchange(World(), lambda step: 1, None), tmp_path)
        watch._inquiry.verdict = lambda reason: f"rank 1 did not arrive ({reason})"
        watched = False
        try:
            with watch:
                mine = [each for each in threading.enumerate() if each.name.startswith("lockstep-")]
                watched = watch._exchange.progress.phase == COMPUTING and bool(mine) and all(t.daemon for t in mine)
                raise error
        except BaseException as found:
            assert watched
            return found

    relayed = PeerError("rank 1 failed")
    relayed.relayed = True
    own = RuntimeError("Connection closed by peer\nmore")
    for error in (own, dist.DistError(""), ConfigError("no"), relayed, KeyboardInterrupt()):
        assert left(error) is error
    lost = PeerError("timed out")
    assert left(lost, size=1) is lost
    found = left(lost)
    assert isinstance(found, PeerError)
    assert str(found).startswith("rank 1 did not arrive (lost the other ranks: timed out); ")
    assert found.__cause__ is lost


def test_dump_has_all_stacks_collectives_and_earlier_text(tmp_path, monkeypatch):
    entries = [f'{{"process_group": "g", "collective_seq_id": {i}, "state": "started"}}' for i in range(30)]
    recorder = torch._C._distributed_c10d
    name = "_dump_fr_trace_json"
    monkeypatch.setattr(recorder, name, lambda: f'{{"entries": [{", ".join(entries)}]}}', raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "1000")
    ended = threading.Event()

    def sits_here():
        ended.wait(60)

    other = threading.Thread(target=sits_here)
    other.start()
    path = watchdog.dump(tmp_path, 3, "first reason")
    ended.set()
    other.join()
    monkeypatch.setattr(recorder, name, None)
    assert watchdog.dump(tmp_path, 3, "second reason") == path == tmp_path / "hang-00003.txt"
    text = path.read_text()
    assert text.index("first reason") < text.index("second reason")
    assert f"rank 3, process {os.getpid()}: first reason" in text
    assert "in sits_here" in text
    assert "the last 20 collectives, oldest first:\n  g #10 ?  started\n" in text
    assert "  g #29 ?  started\n" in text
    assert "set TORCH_FR_BUFFER_SIZE=1000" in text.partition("second reason")[2]
    (tmp_path / "hang-00004.txt").symlink_to(tmp_path / "elsewhere")
    watchdog.dump(tmp_path, 4, "third reason")
    assert not (tmp_path / "elsewhere").exists()
