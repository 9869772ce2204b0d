"""How many files and connections a process needs, and what is said where it may not have them."""

import os
import resource

import pytest
from ranks import run
from refusals import refuses

from lockstep.distributed import descriptors, membership
from lockstep.distributed.descriptors import CONNECT_ON_DEMAND, connects_on_demand, descriptors_of, ensure_descriptors
from lockstep.errors import ConfigError


class Limits:
    """The limits of this process, as the system keeps them."""

    RLIMIT_NOFILE, RLIM_INFINITY = resource.RLIMIT_NOFILE, resource.RLIM_INFINITY

    def __init__(self, soft, hard, forbidden=False):
        self.now, self.forbidden = (soft, hard), forbidden

    def getrlimit(self, _):
        return self.now

    def setrlimit(self, _, limits):
        if self.forbidden:
            raise ValueError("not allowed to raise maximum limit")
        self.now = limits


@pytest.mark.parametrize(
    ("soft", "hard", "after"),
    [
        (1024, 20000, 20000),
        (1024, resource.RLIM_INFINITY, 1 << 16),
        (1024, 1 << 30, 1 << 16),
        (1 << 20, 1 << 20, 1 << 20),
    ],
)
def test_the_limit_is_raised_to_the_hard_one_but_not_to_millions(monkeypatch, soft, hard, after):
    limits = Limits(soft, hard)
    monkeypatch.setattr(descriptors, "resource", limits)
    ensure_descriptors(descriptors_of(1024, hosts_store=True), "rank 0 of 1024")
    assert limits.now == (after, hard)


def test_too_low_hard_limit_is_named_before_anything_fails(monkeypatch):
    monkeypatch.setattr(descriptors, "resource", Limits(256, 1024))
    ensure_descriptors(descriptors_of(252, hosts_store=False), "rank 3 of 252")
    with refuses(ConfigError, "rank 0 of 1024", descriptors_of(1024, hosts_store=True), 1024):
        ensure_descriptors(descriptors_of(1024, hosts_store=True), "rank 0 of 1024")
    monkeypatch.setattr(descriptors, "resource", Limits(256, 4096, forbidden=True))
    with refuses(ConfigError, "rank 3 of 252"):
        ensure_descriptors(descriptors_of(252, hosts_store=False), "rank 3 of 252")


def test_each_rank_asks_those_it_is_connected_to_first():
    class Group:
        def rank(self):
            return 5

        def size(self):
            return 1024

    peers = membership._peers(Group())
    assert sorted(peers) == list(range(1024))
    assert set(peers[:21]) >= {(5 + sign * 2**bit) % 1024 for bit in range(10) for sign in (1, -1)}


def on_demand_setting(world):
    return os.environ[CONNECT_ON_DEMAND]


def test_a_large_world_connects_on_demand():
    assert run(on_demand_setting, 2) == ["0", "0"]
    assert [connects_on_demand(ranks) for ranks in (2, 64, 65, 1024)] == [False, False, True, True]
    assert descriptors_of(64, hosts_store=False) > 4 * 64
