"""What ranks tell each other in their meeting point: who waits asks the others gently, and does not wait for ever."""

import time
from types import SimpleNamespace

from lockstep.guards import watchdog
from lockstep.guards.watchdog import Heartbeats, all_do, waited_for


class Store:
    """A meeting point in which the others say it after so many seconds; counts what it is asked."""

    def __init__(self, after, places=()):
        self.when, self.held = time.monotonic() + after, {f"k/at/{rank}": place for rank, place in enumerate(places)}
        self.asked = 0

    def set(self, key, value):
        self.held[key] = value

    def add(self, key, number):
        return number  # the first of two

    def multi_get(self, keys):
        self.asked += 1
        return [self.held[key].encode() for key in keys]

    def check(self, keys):
        return all(key in self.held or ("/at/" not in key and time.monotonic() >= self.when) for key in keys)


def test_waiting_rank_asks_now_and_then_where_others_are():
    store = Store(after=1.2, places=("7 step 8 a", "7 step 8 b"))
    assert all_do(Heartbeats(store, "k", 2), "stop", 7, lambda: 30.0)
    assert store.asked == 2  # for all ranks, after half a second and after one


def test_rank_gets_two_requests_of_a_second_to_have_moved_on(monkeypatch):
    clock = SimpleNamespace(now=50.0)

    def sleep(seconds):
        clock.now += seconds

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    store = Store(after=0.0, places=("7 step 8 a", "7 step 8 b"))
    assert waited_for(Heartbeats(store, "k", 2), 7) == []
    assert 52.0 < clock.now < 54.0  # the person waits for the line that names the rank
    asked, began = store.check, clock.now

    def check(keys):
        if clock.now > began + 2.0:
            store.held["k/at/1"] = "8 step 9 b"
        return asked(keys)

    store.check = check
    assert waited_for(Heartbeats(store, "k", 2), 7) == [1]


def test_passing_rank_is_seen_and_a_silent_one_after_patience():
    began = time.monotonic()
    assert not all_do(
        Heartbeats(Store(after=60.0, places=("7 step 8 a", "9 step 10 b")), "k", 2), "stop", 7, lambda: 30.0
    )
    assert not all_do(Heartbeats(Store(after=60.0), "k", 2), "stop", 7, lambda: 0.2)
    assert time.monotonic() - began < 15.0
