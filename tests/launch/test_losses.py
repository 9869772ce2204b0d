"""Who goes on where a process is lost: the launcher's decisions, over a store that counts what it is asked."""

import json
import threading
import time

import pytest
from refusals import refuses

from lockstep.distributed.failures import ProcessFailure
from lockstep.distributed.membership import STARTING, Generation, LeaveReport, Member, lost_peers
from lockstep.distributed.progress import RankProgress, rank_label
from lockstep.distributed.world import World
from lockstep.errors import PeerError
from lockstep.launch.losses import AGAIN, Membership

KEYS = "lockstep/members/0"


class Store:
    """A meeting point in this process, which counts messages and their bytes by who sends them."""

    def __init__(self):
        self.values, self.asked, self.changed = {}, 0, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.asked += 1
            self.values[key] = value if isinstance(value, bytes) else value.encode()
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            self.asked += 1
            return self.values[key]

    def check(self, keys):
        with self.changed:
            self.asked += 1
            return all(key in self.values for key in keys)

    def wait(self, keys, patience):
        with self.changed:
            self.asked += 1
            if not self.changed.wait_for(lambda: all(key in self.values for key in keys), patience.total_seconds()):
                raise RuntimeError(f"wait timeout after {patience}")


class Run:
    """The launcher's side of a run of `count` processes, all ready, on a clock of its own."""

    def __init__(self, count, **settings):
        self.store, self.time, self.ended = Store(), 0.0, {}
        self.losses = Membership(self.store, now=lambda: self.time, **settings)
        self.living = {str(slot) for slot in range(count)}
        self.losses.begin("0", [str(slot) for slot in range(count)])
        for name in self.living:
            self.store.set(f"{KEYS}/ready/{name}", "yes")

    def lose(self, name, code=-9, message="", **more):
        self.living.discard(name)
        self.ended[name] = ProcessFailure(int(name.partition(".")[0]), code, message, **more)
        return self.update()

    def update(self):
        return self.losses.update(self.living, self.ended)

    def report(self, name, taken=7, plan="a", waited=False, where=None):
        said = LeaveReport(taken, -1, plan, waited, 60.0)
        where = where or f"here/{self.losses.number + 1}"
        self.store.set(f"{KEYS}/{where}/{name}", json.dumps(list(said)))
        self.store.set(f"{KEYS}/{where}", "")
        return self.update()

    def called(self, number):
        text = self.store.values.get(f"{KEYS}/members/{number}", b"").decode()
        return Generation.read(text) if text.startswith("{") else text

    def replaced(self, name, plan="a"):
        """A new process under this name, which waits to be taken in."""
        self.losses.add_new(name)
        self.living.add(name)
        self.store.set(f"{KEYS}/ready/{name}", "yes")
        return self.report(name, taken=-2, plan=plan, where="new")


def test_others_continue_once_all_have_left_their_groups():
    run = Run(3)
    assert run.lose("1") == ""
    assert run.report("0") == ""
    assert run.called(1) == ""  # rank 2 is still computing
    assert run.report("2", taken=8) == ""
    found = run.called(1)
    assert (found.number, found.members, found.fresh) == (1, ["0", "2"], [])
    assert [report.steps for report in found.reports.values()] == [7, 8]
    assert found.lost == ["rank 1 was the first to end, killed by SIGKILL, before step 1"]
    assert run.losses.replace == ["1"]
    assert [run.losses.rank_of(name) for name in ("0", "1", "2")] == [0, None, 1]


def test_new_process_joins_between_two_steps_and_comes_last():
    run = Run(3)
    run.lose("0")
    run.report("1")
    run.report("2")
    assert run.replaced("0.1") == ""
    assert f"{KEYS}/wish/1" in run.store.values
    assert run.called(2) == ""  # the members leave when they have agreed on a step
    run.report("1")
    run.report("2")
    found = run.called(2)
    assert (found.members, found.fresh, found.lost) == (["1", "2", "0.1"], ["0.1"], [])
    assert run.called(2).to_json() == run.store.values[f"{KEYS}/seat/0.1"].decode()
    assert run.update() == ""
    assert f"{KEYS}/wish/2" not in run.store.values


def test_new_process_of_another_plan_is_refused():
    run = Run(2)
    run.lose("1")
    run.report("0")
    run.replaced("1.1", plan="b")
    run.report("0")
    assert run.called(2).members == ["0"]
    assert "configuration, data or code" in run.store.values[f"{KEYS}/seat/1.1"].decode()
    assert run.losses.refused == ["1.1"]


def test_new_process_that_ends_before_joining_is_replaced():
    run = Run(2)
    run.lose("1")
    run.report("0")
    run.losses.replace = []
    run.losses.add_new("1.1")
    assert run.lose("1.1") == ""
    assert run.losses.replace == ["1.1"]
    assert run.update() == ""
    run.replaced("1.2")
    assert f"{KEYS}/wish/1" in run.store.values


def test_two_lost_at_once_and_one_more_while_they_are_replaced():
    run = Run(4)
    run.lose("1")
    run.lose("3")
    run.report("0")
    run.report("2")
    assert run.called(1).members == ["0", "2"]
    assert len(run.called(1).lost) == 2
    assert sorted(run.losses.replace) == ["1", "3"]
    run.losses.replace = []
    run.losses.add_new("1.1")
    assert run.lose("1.1") == ""  # before it took part
    assert run.lose("0") == ""
    run.report("2")
    assert run.called(2).members == ["2"]
    assert sorted(run.losses.replace) == ["0", "1.1"]


def test_member_leaving_in_a_regrouping_is_lost_in_the_next():
    run = Run(3)
    run.lose("1")
    run.report("0")
    run.report("2")
    run.lose("2")
    run.report("0")
    assert run.called(2).members == ["0"]


@pytest.mark.parametrize(("waited", "patience"), [(False, 65.0), (True, 3.0)])
def test_who_says_nothing_is_ended_before_the_others_go_on(waited, patience):
    run = Run(3)
    run.time = 100.0
    run.report("0", waited=waited)
    run.report("1")
    run.time = 100.0 + patience
    assert (run.update(), run.losses.silent) == ("", [])
    run.time += 0.1
    assert (run.update(), run.losses.silent) == ("", ["2"])
    assert run.called(1) == ""
    run.lose("2")
    assert run.called(1).members == ["0", "1"]


def test_too_few_ranks_or_too_many_losses_end_the_run():
    run = Run(3, least=2)
    assert run.lose("1") == ""
    run.report("0")
    run.report("2")
    assert run.lose("0") == "1 of 2 processes are left, but --min-ranks is 2"
    assert run.called(2) == "the launcher ends the run: 1 of 2 processes are left, but --min-ranks is 2"
    run = Run(4, most=2)
    for number, name in enumerate("12", 1):
        assert run.lose(name) == ""
        for other in run.losses.members:
            if other in run.living:
                run.report(other)
        assert run.called(number).lost
    run.time = 3599.0
    assert run.lose("3") == "that is loss 3 within an hour, but --max-losses is 2"


@pytest.mark.parametrize("code", [2, 3])
def test_bad_input_and_a_difference_are_no_losses(code):
    run = Run(3)
    assert run.lose("1", code, "no") == "-"
    assert run.losses.fatal.code == code
    assert run.losses.causes == []


def test_losses_of_more_than_an_hour_ago_are_forgotten():
    run = Run(3, most=1)
    run.lose("1")
    run.report("0")
    run.report("2")
    run.time = 3600.0
    assert run.lose("2") == ""


@pytest.mark.parametrize(
    ("origin", "step", "ends"),
    [("KeyError a.py:7", 4, True), ("KeyError a.py:7", 5, False), ("KeyError b.py:7", 4, False), ("", 4, False)],
)
def test_same_error_at_the_same_step_and_line_ends_the_run(origin, step, ends):
    run = Run(3)
    first = {"origin": "KeyError a.py:7", "place": RankProgress(4, "saving", 1.0)}
    assert run.lose("1", 1, "KeyError: 1", **first) == ""
    run.report("0")
    run.report("2")
    place = RankProgress(step, "loading or computing", 2.0)
    assert bool(run.lose("2", 1, "KeyError: 2", origin=origin, place=place)) == ends


def test_two_that_said_nothing_are_two_accidents():
    run = Run(3)
    assert run.lose("1", -9, "it said nothing") == ""
    run.report("0")
    run.report("2")
    assert run.lose("2", -9, "it said nothing") == ""
    assert [str(cause.rank) for cause in run.losses.causes] == ["1", "2"]


def test_loss_before_ready_or_with_split_states_ends_all():
    run = Run(2)
    del run.store.values[f"{KEYS}/ready/1"]
    assert run.lose("1") == "-"
    assert run.called(1) == "the launcher ends the run"
    run = Run(2)
    run.store.set(f"{KEYS}/ready/1", "--engine zero splits the states")
    assert run.lose("1") == "--engine zero splits the states"


def in_pairs(count=6, **settings):
    """A run whose states are split over two ranks."""
    run = Run(count, **settings)
    run.store.set(f"{KEYS}/replica", "2")
    return run


def test_replica_with_a_loss_leaves_whole_and_counts_once():
    run = in_pairs(most=1)
    assert run.lose("3") == ""
    assert run.losses.silent == ["2"]
    for name in "0145":
        run.report(name)
    assert run.called(1) == ""  # rank 2 still runs, and may hold the run's folder
    assert run.lose("2") == ""
    found = run.called(1)
    assert (found.members, sorted(run.losses.replace)) == (["0", "1", "4", "5"], ["2", "3"])
    assert found.lost == [
        "rank 3 was the first to end, killed by SIGKILL, before step 1; rank 2, with other parts of the same replica, "
        "left with it"
    ]
    assert run.losses.rank_of("4") == 2


def test_new_replica_joins_together_in_the_order_of_its_parts():
    run = in_pairs()
    run.lose("1")
    run.lose("0")
    for name in "2345":
        run.report(name)
    run.replaced("1.1")
    assert f"{KEYS}/wish/1" not in run.store.values  # half a replica is of no use
    for name in "2345":
        run.report(name)  # they lost contact for another reason
    assert run.called(2).members == ["2", "3", "4", "5"]
    run.replaced("0.1")
    assert f"{KEYS}/wish/2" in run.store.values
    for name in "2345":
        run.report(name)
    assert run.called(3).members == ["2", "3", "4", "5", "0.1", "1.1"]
    assert run.called(3).fresh == ["0.1", "1.1"]
    run.lose("1.1")  # of the same replica as before
    assert run.losses.silent == ["0.1"]


def test_run_ends_without_a_whole_replica_or_enough_ranks():
    run = in_pairs(4)
    run.lose("1")
    assert run.lose("2") == "no other replica of the states is complete"
    run = in_pairs(6, least=5)
    assert run.lose("1") == "4 of 6 processes are left, but --min-ranks is 5"


def test_live_processes_that_lose_each_other_repeatedly_end():
    run = Run(2, most=1)
    for number in range(1, 4):
        run.report("0")
        run.report("1")
        assert run.called(number).lost == []
    run.report("0")
    assert run.report("1") == "the processes keep losing contact though all are alive, and --max-losses is 1"


def test_restart_of_all_resets_everything_but_the_losses():
    run = Run(2)
    run.lose("1")
    run.losses.begin("1", ["0", "1"])
    assert (run.losses.number, run.losses.replace) == (0, [])
    run.report("0")
    run.report("1")
    assert run.called(1) == ""  # its keys are those of another start
    assert run.losses.causes


def test_a_world_of_64_goes_on_with_a_few_messages_a_member():
    """Threads as members: what each of them asks for does not grow with their number."""

    def messages(size):
        run, found = Run(size), {}
        run.store.asked = 0
        run.update()
        assert run.store.asked == 1  # nobody is lost, at each poll of the launcher
        run.store.asked = 0

        def member(name):
            own = Member(name, 0, KEYS, ("", 0), run.store)
            found[name] = own.regroup(LeaveReport(3, -1, "a", False, 60.0), wait=30.0)

        threads = [threading.Thread(target=member, args=(str(slot),)) for slot in range(size) if slot != 5]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 30.0
        while sum(key.startswith(f"{KEYS}/here/1/") for key in list(run.store.values)) < size - 1:
            assert time.monotonic() < end
        own = run.store.asked
        run.lose("5")
        for thread in threads:
            thread.join(30.0)
        wanted = [str(slot) for slot in range(size) if slot != 5]
        assert all(generation.members == wanted for generation in found.values())
        assert len(found) == size - 1
        return run.store.asked, own

    for size in (8, 64):
        whole, members = messages(size)
        assert members <= 3 * (size - 1)  # said once, for itself and for all, and asked once
        assert whole <= 6 * size + 10  # and read once; the launcher asks for each once or twice


def test_process_not_among_the_survivors_ends():
    store = Store()
    member = Member("2", 0, KEYS, ("", 0), store)
    report = LeaveReport(3, -1, "a", False, 60.0)
    store.set(f"{KEYS}/members/1", Generation(1, ["0", "1"], {}, [], []).to_json())
    with pytest.raises(PeerError, match="the others went on without this process"):
        member.regroup(report, 1.0)
    store.set(f"{KEYS}/members/1", "the launcher ends the run")
    with pytest.raises(PeerError, match="the launcher ends the run"):
        member.regroup(report, 1.0)
    with refuses(PeerError, "0.01 s"):
        Member("0", 1, KEYS, ("", 0), store).regroup(report, 0.01)


def test_messages_name_a_renumbered_rank_by_both_numbers(monkeypatch):
    store = Store()
    store.set(f"{KEYS}/members/1", Generation(1, ["1", "2.1", "0.2"], {}, [], []).to_json())
    Member("1", 0, KEYS, ("", 0), store).regroup(LeaveReport(3, -1, "a", False, 60.0), 1.0)
    assert [rank_label(rank) for rank in range(3)] == [
        "rank 0 (rank 1 at the start)",
        "rank 1 (rank 2 at the start)",
        "rank 2 (rank 0 at the start)",
    ]
    assert rank_label(0) in str(lost_peers(0))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    World.join("cpu")  # other ranks now
    assert rank_label(0) == "rank 0"
    assert str(ProcessFailure(0, 1, "no", at_start=1)).startswith("rank 0 (rank 1 at the start) failed first")
    assert str(ProcessFailure(1, 1, "no", at_start=1)).startswith("rank 1 failed first")
    assert str(ProcessFailure(1, -9, at_start=1, host="a")).startswith("rank 1 on a was the first to end")


def test_process_learns_its_membership_from_its_launcher():
    assert Member.of_this_process({}) is None
    assert Member.of_this_process({"RANK": "2"}) is None
    meeting = {"LOCKSTEP_MEETING": "127.0.0.1:99", "RANK": "2", "LOCKSTEP_ROUND": "3"}
    first = Member.of_this_process(meeting)
    assert (first.name, first.generation, first.is_new, first._keys) == ("2", 0, False, "lockstep/members/3")
    later = Member.of_this_process(meeting | {"LOCKSTEP_MEMBER": "2.1"})
    assert (later.name, later.is_new) == ("2.1", True)


def starting(count=3, **settings):
    """A run whose ranks have met, and have not begun a step."""
    run = Run(count, **settings)
    for name in run.living:
        run.store.set(f"{KEYS}/ready/{name}", STARTING)
    return run


@pytest.mark.parametrize(
    ("code", "more", "reason"),
    [
        (-9, {}, AGAIN),
        (0, {"origin": "exit"}, AGAIN),
        (1, {"origin": "ValueError task.py:7"}, "-"),
        (3, {"origin": "DifferenceError startup.py:84"}, "-"),
        (-15, {}, "-"),
    ],
)
def test_all_restart_before_the_steps_unless_the_program_failed(code, more, reason):
    run = starting()
    assert run.lose("1", code, at_start=1, **more) == reason
    assert run.losses.fatal.at_start == 1
    assert run.losses.causes == []


def test_same_end_before_the_steps_twice_ends_the_run():
    run = starting()
    assert run.lose("1", at_start=1) == AGAIN
    for rank, reason in ((2, AGAIN), (1, "-")):
        run.losses.begin("0", ["0", "1", "2"])
        run.ended, run.living = {}, {"0", "1", "2"}
        assert run.lose(str(rank), at_start=rank) == reason


def test_rank_that_only_lost_others_waits_for_the_cause():
    run = starting()
    assert run.lose("0", 1, "lost the others", follows=True, when=2.0) == ""
    assert run.lose("1", 1, "ValueError", origin="ValueError task.py:7", when=1.0) == "-"
    assert run.losses.fatal.rank == 1
