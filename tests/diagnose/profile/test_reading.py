"""Traces that are damaged, foreign or missing are said so in a line; what another thread exchanges is left out."""

import gzip
import json

import pytest
from handmade_traces import OTHER, on_cpu, on_device

from lockstep.diagnose.profile.reading import (
    ProfileTrace,
    ProfileTraceError,
    own_times,
    read,
    read_all,
    top,
    understood,
)
from lockstep.diagnose.profile.verdict import judge


def test_all_ranks_are_read(tmp_path):
    for rank in (1, 0):
        on_cpu(rank=rank, world=2).write(tmp_path)
    assert [trace.rank for trace in read_all(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "damaged"),
        (lambda path: path.write_bytes(b"no gzip at all"), "damaged"),
        (lambda path: path.write_bytes(gzip.compress(b"{ no json")), "damaged"),
        (lambda path: path.write_bytes(gzip.compress(b"[" * 10**5)), "damaged"),
        (lambda path: path.write_bytes(gzip.compress(b'{"traceEvents": []}')), "not a trace of lockstep"),
        (lambda path: path.write_bytes(gzip.compress(b"[1]")), "not a trace of lockstep"),
        (lambda path: edit(path, lambda held: held["traceEvents"].clear()), "no step of lockstep"),
        (lambda path: edit(path, lambda held: held["lockstep"].pop("device")), "damaged"),
        (lambda path: edit(path, lambda held: held["traceEvents"][0].update(ts="soon")), "damaged"),
        (lambda path: edit(path, lambda held: held["lockstep"].update(rank=7)), "another profile"),
        (lambda path: edit(path, lambda held: held["lockstep"].update(steps=[1, 2])), "another profile"),
        (lambda path: path.unlink(), "of 2 ranks, the trace of 1 is missing"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, damage, word):
    on_cpu(rank=0, world=2).write(tmp_path)
    damage(on_cpu(rank=1, world=2).write(tmp_path))
    with pytest.raises(ProfileTraceError) as raised:
        read_all(tmp_path)
    assert word in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


def edit(path, change):
    held = json.loads(gzip.decompress(path.read_bytes()))
    change(held)
    path.write_bytes(gzip.compress(json.dumps(held).encode()))


def test_a_folder_without_traces(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ProfileTraceError, match="give a folder such as"):
            read_all(folder)
    with pytest.raises(ProfileTraceError, match="damaged"):
        read(tmp_path / "rank-0.json.gz")


def test_what_another_thread_exchanges_is_left_out():
    hand = on_cpu(rank=0, world=2, exchange=500)
    whole = understood(hand.json).exchanges
    hand.add("cpu_op", "c10d::allreduce_", 4000, 10, tid=OTHER)  # a save's, in the middle of the first backward
    hand.gloo(4020, 300, tid=9)
    assert understood(hand.json).exchanges == whole


def test_a_trace_travels_as_plain_numbers():
    for hand in (on_cpu(rank=0, world=2, exchange=500), on_device(exposed=300, wait=50, copies=20)):
        packed = understood(hand.json).packed
        sent = json.loads(json.dumps(packed))
        assert ProfileTrace.unpack(sent).packed == packed
        assert judge([ProfileTrace.unpack(sent)]) == judge([understood(hand.json)])


def test_operations_are_counted_by_their_own_time():
    """An operation's time is without those that it calls; one of another thread, or outside the steps, is none."""
    nested = [
        ("linear", 0.0, 10.0),
        ("addmm", 1.0, 8.0),
        ("copy", 2.0, 3.0),
        ("copy", 5.0, 6.0),
        ("linear", 10.0, 12.0),
    ]
    assert own_times(reversed(nested)) == {"linear": [2, 5.0], "addmm": [1, 5.0], "copy": [2, 2.0]}
    hand = on_cpu(forward=3000)
    begin = next(event["ts"] for event in hand.events if event["name"].startswith("lockstep:step"))
    found = understood(hand.json).operations
    hand.add("cpu_op", "aten::rare", begin + 1, 2)
    hand.add("cpu_op", "aten::elsewhere", begin + 1, 2, tid=OTHER)
    hand.add("cpu_op", "aten::before", begin - 100, 2)
    assert understood(hand.json).operations == found | {"aten::rare": [1, 2.0]}


def test_table_of_operations_has_time_share_and_calls_of_a_step():
    ranks = [{"a": [4, 8000.0], "b": [2, 1000.0]}, {"a": [4, 4000.0], "c": [2, 500.0]}]
    found = top(ranks, steps=2, step_ms=6.0)
    assert found == [("a", 3.0, 0.5, 2.0), ("b", 0.25, 0.25 / 6, 0.5), ("c", 0.125, 0.125 / 6, 0.5)]
    assert found[0].as_json() == {"name": "a", "ms": 3.0, "share": 0.5, "calls": 2.0}
    assert [str(found[0]).split()[place] for place in (0, 1, 3, 4)] == ["a", "3.000", "50%", "2"]
    assert len(top([{str(number): [1, 1.0 + number] for number in range(99)}], 1, 1.0)) == 10
    kernels = understood(on_device(forward=3000).json).operations
    assert sum(spent for _, spent in kernels.values()) > 3000
