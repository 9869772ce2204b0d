"""The verdict over traces written by hand: every planted bottleneck is named, healthy runs are not accused."""

import json

import pytest
from handmade_traces import OTHER, on_cpu, on_device
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.diagnose.profile.parts import PARTS
from lockstep.diagnose.profile.reading import understood
from lockstep.diagnose.profile.verdict import judge


def verdict(*hands, **about):
    for hand in hands:
        hand.about |= about
    return judge([understood(hand.json) for hand in hands])


def ranks(make, count=2, **each):
    """`count` ranks; a value that is a tuple is one for each."""
    return [
        make(rank=rank, world=count, **{k: v[rank] if isinstance(v, tuple) else v for k, v in each.items()})
        for rank in range(count)
    ]


def seldom(phase, **options):
    """A step in which 30 ms of something follow each step, which come every step."""
    hand = on_cpu(data=200, after=30000, options=options)
    for event in list(hand.events):
        if event["name"].startswith("lockstep:step"):
            hand.mark(phase, event["ts"] + event["dur"] - 30000, 30000)
    return hand


PLANTED = {
    "loading in the process": ("data", "--data.workers", lambda: [on_cpu(data=20000)]),
    "too few loaders": ("data", "--data.workers 4", lambda: [on_cpu(data=9000, options={"data.workers": 2})]),
    "one rank loads slowly": (
        "data",
        "--data.workers",
        lambda: ranks(on_cpu, data=(200, 20200), late=(20000, 0), exchange=100),
    ),
    "a slow rank": (
        "imbalance",
        "--shares auto",
        lambda: ranks(
            on_cpu, data=200, forward=(3000, 6000), backward=(6000, 12000), late=(9000, 0), exchange=100, slots=4
        ),
    ),
    "a slow rank under an engine without shares": (
        "imbalance",
        "look at rank 1",
        lambda: ranks(on_cpu, data=200, forward=(3000, 12000), late=(9000, 0), exchange=100, shares=False),
    ),
    "other samples on each rank": (
        "imbalance",
        "work",
        lambda: [lengths(0), lengths(1)],
    ),
    "an exchange after the backward": (
        "communication",
        "--engine.compression bf16",
        lambda: ranks(on_cpu, data=200, exchange=6000),
    ),
    "one bucket": (
        "communication",
        "--engine.bucket-cap-mb 25",
        lambda: ranks(on_cpu, data=200, exchange=5000, options={"engine_options.bucket_cap_mb": 1000.0}),
    ),
    "an exchange longer than the computing": (
        "communication",
        "--batch-size 256",
        lambda: ranks(on_cpu, data=200, exchange=20000),
    ),
    "Python in the forward": ("host", "less Python", lambda: [on_cpu(data=200, forward=20000, gaps=8000)]),
    "tiny operations": ("operations", "--compile", lambda: [on_cpu(data=200, gaps=1500, ops=1000)]),
    "micro-batches of one": (
        "micro-batches",
        "--micro-batch-size 8",
        lambda: [on_cpu(data=200, gaps=2000, ops=300, slots=8, micro_batch_size=1)],
    ),
    "an evaluation each step": ("evaluation", "--eval-freq 500", lambda: [seldom("evaluate", eval_freq=1)]),
    "a checkpoint each step": (
        "checkpoint",
        "--checkpoint.mode async",
        lambda: [seldom("save", ckpt_freq=1, **{"checkpoint.mode": "sync"})],
    ),
    "a record each step": ("records", "--log-freq 500", lambda: [seldom("record", log_freq=1)]),
    "positions that hold nothing": (
        "padding",
        "--data.packing documents",
        lambda: [
            on_cpu(data=200, padding={"positions": 1000, "empty": 800}, options={"data.packing": "padded"}),
        ],
    ),
    "an update tensor by tensor": ("update", "fused=True", lambda: [unfused()]),
    "forwards computed again": (
        "recomputation",
        "--activation-checkpointing none",
        lambda: [on_cpu(data=200, options={"activation_checkpointing": "full"})],
    ),
    "memory that comes and goes": (
        "memory",
        "MALLOC",
        lambda: [on_cpu(data=200, usage={"system": 40.0, "minor": 4000, "major": 0}, page_us=1.0)],
    ),
    "swapping": (
        "memory",
        "smaller --micro-batch-size",
        lambda: [on_cpu(data=200, usage={"system": 4.0, "minor": 9000, "major": 40})],
    ),
    "more threads than cores": (
        "threads",
        "OMP_NUM_THREADS=2",
        lambda: ranks(on_cpu, data=200, threads=4, fewer_threads={"count": 2, "gain": 1.5}),
    ),
    "CUDA: launches too slow": ("host", "--compile", lambda: [on_device(kernel=10, gap=30)]),
    "CUDA: an exchange that is waited for": (
        "communication",
        "--engine.compression bf16",
        lambda: ranks(on_device, kernel=400, exposed=9000),
    ),
    "CUDA: the host reads every step": ("synchronisation", ".item()", lambda: [on_device(kernel=400, wait=6000)]),
    "CUDA: a slow rank": (
        "imbalance",
        "--shares auto",
        lambda: ranks(on_device, kernel=(400, 800), exposed=(16020, 20), slots=4),
    ),
    "CUDA: waiting for data": ("data", "--data.workers", lambda: [on_device(kernel=400, data=30000)]),
    "CUDA: copies from pageable memory": ("data", "--data.workers", lambda: [on_device(kernel=400, copies=9000)]),
}

PLANTED |= {
    "forwards computed again by the model itself": (
        "recomputation",
        "less checkpointing of activations in the model",
        lambda: [with_nodes(again=3000)],
    ),
    "CUDA: forwards computed again": (
        "recomputation",
        "less checkpointing of activations in the model",
        lambda: [on_device_again()],
    ),
    "nodes of a backward without operations": ("operations", "--compile", lambda: [with_nodes(empty=400)]),
    "other processes have the cores": (
        "cores",
        "a machine of its own",
        lambda: [on_cpu(data=200, queued={"forward": 1.0, "backward": 3.0})],
    ),
    "gradients made anew": (
        "memory",
        "MALLOC",
        lambda: [on_cpu(data=200, usage={"system": 3.0, "minor": 2000, "major": 0}, page_us=1.2)],
    ),
}

HEALTHY = {
    "backwards that compute no forward": lambda: [with_nodes()],
    "system time that is not of new pages": lambda: [on_cpu(usage={"system": 4.0, "minor": 150}, page_us=1.2)],
    "own exchanges on the cores": lambda: ranks(
        on_cpu, data=200, hidden=3000, usage={"others": 3.0, "queued": 1.5}, queued={"backward": 1.5}, cores=2
    ),
    "more threads than cores, which do no harm": lambda: ranks(
        on_cpu, data=200, threads=4, fewer_threads={"count": 2, "gain": 0.9}
    ),
    "room for no more activations": lambda: [
        on_cpu(data=200, memory_free=1e8, options={"activation_checkpointing": "full"})
    ],
    "one process": lambda: [on_cpu(data=200)],
    "two processes, the exchange hidden": lambda: ranks(on_cpu, data=200, hidden=3000, exchange=100),
    "few evaluations": lambda: [seldom_once("evaluate", eval_freq=1000)],
    "a last save and evaluation": lambda: [seldom_once("save", ckpt_freq=0)],
    "CUDA": lambda: [on_device(kernel=400)],
    "CUDA, NCCL hidden": lambda: ranks(on_device, kernel=400, hidden=3000),
    "some padding": lambda: [on_cpu(data=200, padding={"positions": 1000, "empty": 50})],
}


def lengths(rank):
    """Each rank is late in every other step: in one step its samples are long, in the next the other's."""
    hand, at = on_cpu(rank=rank, world=2, data=200), 0.0
    hand.events = []
    for step in range(hand.count):
        long = (step + rank) % 2
        length, begin = 4000 + 8000 * long, at
        hand.mark("data", at, 200)
        hand.mark("forward", at + 200, length)
        hand.op(at + 200, length)
        hand.mark("backward", at + 200 + length, 8000 * (1 - long) + 100)
        hand.gloo(at + 200 + length, 8000 * (1 - long) + 100)
        hand.mark("update", at + 12300, 300)
        hand.op(at + 12300, 300, "aten::_fused_adamw_")
        at += 12600
        hand.mark(f"step {step}", begin, at - begin)
    return hand


def with_nodes(again=0, empty=0):
    """Steps of 12 ms whose backward is one node, or has so many that are empty."""
    hand = on_cpu(data=200, forward=3000, backward=0)
    hand.events = []
    for step in range(hand.count):
        at = 12000.0 * step
        hand.mark("data", at, 200)
        hand.mark("forward", at + 200, 3000)
        hand.op(at + 200, 3000)
        hand.mark("backward", at + 3200, 8300)
        for k in range(empty):
            hand.add("cpu_op", "autograd::engine::evaluate_function: Add", at + 3200 + 20 * k, 2)
        hand.node(at + 3200 + 20 * empty, 8300 - 20 * empty, again)
        hand.mark("update", at + 11500, 500)
        hand.op(at + 11500, 500, "aten::_fused_adamw_")
        hand.mark(f"step {step}", at, 12000)
    return hand


def on_device_again():
    """The backward's thread launches five kernels of a forward before those of its own."""
    hand = on_device(kernel=400)
    for mark in [event for event in hand.events if event["name"] == "lockstep:backward"]:
        begin = mark["ts"]
        hand.add("cpu_op", "autograd::engine::evaluate_function: X", begin, 3000, tid=OTHER, **{"Fwd thread id": 1})
        hand.add("cpu_op", "aten::addmm", begin, 1900, tid=OTHER, **{"Sequence number": 5, "Fwd thread id": 0})
    return hand


def unfused():
    hand = on_cpu(data=200, update=6000, fused_ns=0.5)
    for event in hand.events:
        event["name"] = event["name"].replace("_fused_adamw_", "addcdiv_")
    return hand


def seldom_once(phase, **options):
    hand = on_cpu(data=200, options=options)
    hand.mark(phase, hand.events[-1]["ts"] + hand.events[-1]["dur"], 90000)
    hand.events[-2]["dur"] += 90000  # of the last step
    return hand


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bottleneck_is_named(name):
    bottleneck, what, made = PLANTED[name]
    found = verdict(*made())
    assert found.bottleneck == bottleneck, found.sentence
    assert what in found.what
    assert what in found.sentence
    assert found.gain > 1.1
    assert "\n" not in found.sentence


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_not_accused(name):
    found = verdict(*HEALTHY[name]())
    assert (found.bottleneck, found.gain) == ("compute", 1.0), found.sentence


def test_what_a_rank_waits_for_a_late_one_is_no_communication():
    found = verdict(*ranks(on_cpu, data=200, forward=(3000, 12000), late=(9000, 0), exchange=500))
    assert found.parts["imbalance"] == pytest.approx(4.5)
    assert found.parts["exposed_communication"] == pytest.approx(0.5)
    assert found.by_rank[0]["imbalance"] == pytest.approx(9.0)
    assert found.by_rank[1]["imbalance"] == 0


def test_what_a_device_computes_again_is_what_was_asked_for_then():
    found = verdict(on_device_again())
    assert "2.0 ms a step" in found.sentence  # five kernels of 400 us


def test_ranks_of_another_host_have_a_clock_of_their_own():
    here, there = ranks(on_cpu, data=200, forward=(3000, 12000), late=(9000, 0), exchange=500)
    there.about["host"] = "b"
    wanted = verdict(here, there).parts
    for event in there.events:
        event["ts"] += 7e6
    assert verdict(here, there).parts == pytest.approx(wanted)


@pytest.mark.parametrize("name", PLANTED)
def test_the_parts_sum_to_the_step(name):
    found = verdict(*PLANTED[name][2]())
    assert found.parts.keys() == set(PARTS)
    assert sum(found.parts.values()) - found.parts["hidden_communication"] == pytest.approx(found.step_ms)
    assert min(found.parts.values()) >= 0


def test_exchange_by_the_same_cores_is_not_hidden_by_buckets():
    """On a CPU the threads of gloo take the cores that the backward has."""

    def found(**about):
        options = {"engine_options.bucket_cap_mb": 1000.0}
        return verdict(*ranks(on_cpu, data=200, exchange=5000, options=options, **about))

    spent = {"data": 0.2, "forward": 3.0, "backward": 6.0, "update": 0.5}
    assert found(cpu=spent, usage={"others": 0.1}).what == "--engine.bucket-cap-mb 25"
    busy = found(cpu=spent, usage={"others": 5.0}, cores=2)
    assert "bucket" not in busy.what
    assert "compression" not in busy.what
    assert found(cpu=spent, usage={"others": 5.0}, cores=8).what == "--engine.bucket-cap-mb 25"


def test_waiting_for_a_core_is_no_part_of_computing():
    plain = verdict(on_cpu(data=200, gaps=1000)).parts
    found = verdict(on_cpu(data=200, gaps=1000, queued={"forward": 1.0, "backward": 2.0}, usage={"queued": 3.0})).parts
    assert found["queued"] == pytest.approx(3.0)
    assert found["compute"] == pytest.approx(plain["compute"] - 3.0 * 7.0 / 9.0)
    assert found["host"] == pytest.approx(plain["host"] - 3.0 * 2.0 / 9.0)
    assert found["update"] == plain["update"]


def test_what_tracing_takes_is_no_gain():
    """3,000 operations a step, each of which takes a microsecond to be written."""
    hand = on_cpu(data=200, ops=1500, gaps=1500)
    slow, fast = verdict(hand, event_us=0.0), verdict(hand, event_us=1.0)
    assert slow.bottleneck == fast.bottleneck == "operations"
    assert fast.gain < slow.gain


def test_extra_thread_time_says_what_an_event_takes():
    hand = on_cpu(data=200, ops=1500, gaps=1500)
    least, known = verdict(hand, event_us=0.2), verdict(hand, tracing_ms=3.0)
    assert known.gain < least.gain
    assert verdict(hand, tracing_ms=0.5).gain == least.gain  # an event takes as much as one that was timed alone
    assert verdict(hand, tracing_ms=9.5).gain == verdict(hand, tracing_ms=90.0).gain  # and no more than events can
    assert verdict(hand, tracing_ms=None).gain == least.gain


def test_what_a_wait_leaves_cold_is_gained_with_the_wait():
    hand = on_cpu(data=30000, forward=1000, backward=2000)
    plain, cold = verdict(hand), verdict(hand, idle_ms=30.0, cold_ms=1.0)
    assert plain.bottleneck == cold.bottleneck == "data"
    before, after = 33.5 / plain.gain, 33.5 / cold.gain
    assert before - after == pytest.approx((33.5 - before) / 30.0)
    assert 33.5 / verdict(hand, idle_ms=30.0, cold_ms=100.0).gain == pytest.approx(before / 3.0)  # not all is cold
    busy = on_cpu(data=200, ops=1500, gaps=1500)
    assert verdict(busy, idle_ms=5.0, cold_ms=1.0).gain == verdict(busy).gain


def test_what_makes_another_training_comes_last():
    """The exchange is half of a step: with a larger batch more would be gained than by an end of the imbalance."""
    apart = ranks(on_cpu, data=200, forward=(3000, 5500), late=(2500, 0), exchange=5000, engine_options=[])
    assert verdict(*apart).bottleneck == "imbalance"
    assert "--batch-size" in verdict(*ranks(on_cpu, data=200, exchange=5000, engine_options=[])).what


TIMES = st.integers(0, 9000)


@settings(max_examples=40, deadline=None)
@given(TIMES, TIMES, TIMES, TIMES, st.integers(1, 9000))
def test_the_parts_are_what_was_planted(data, late, exchange, gaps, update):
    hands = ranks(on_cpu, data=data, forward=(9001, 9001 + late), late=(late, 0), exchange=exchange, update=update)
    found = verdict(*hands).parts
    assert found["data"] == pytest.approx(data / 1e3)
    assert found["update"] == pytest.approx(update / 1e3)
    if exchange > 1 and late > 1:
        assert found["imbalance"] == pytest.approx(late / 2e3)
        assert found["exposed_communication"] == pytest.approx(exchange / 1e3)
    assert verdict(on_cpu(data=data, forward=9001, backward=9001, gaps=gaps)).parts["host"] == pytest.approx(gaps / 500)


def test_a_kernel_counts_for_the_part_that_asked_for_it():
    """A device runs behind: kernels of the update are computed while the host is in the next step's data."""
    hand = on_device(kernel=400)
    for event in hand.events:
        if "FusedAdam" in event["name"]:
            event["ts"] += 60
    assert verdict(hand).parts["update"] == pytest.approx(0.3)


def test_what_explains_the_numbers_is_said_beside_them():
    def notes(**about):
        return " ".join(verdict(on_cpu(data=200, **about)).notes)

    assert notes(cpu={"forward": 2.9, "backward": 6.0}, untraced_ms=9.5) == ""
    assert "had a core for 50%" in notes(cpu={"forward": 1.5, "backward": 3.0})
    assert "tracing itself makes steps longer: 5 ms" in notes(untraced_ms=5.0)
    exchanging = verdict(*ranks(on_cpu, data=200, exchange=6000)).notes
    assert "1.5:1; below 10:1" in exchanging[0]
    assert "38% of a step; above 30 %" in exchanging[1]
    assert verdict(*ranks(on_cpu, data=200, exchange=100, hidden=700)).notes == ["computing to exchange is 11.3:1"]


def test_the_file_holds_what_others_read(tmp_path):
    found = verdict(*PLANTED["one bucket"][2]())
    found.write(tmp_path)
    held = json.loads((tmp_path / "verdict.json").read_text())
    names = {"steps", "world_size", "step_ms", "parts", "padding", "bottleneck", "sentence", "next"}
    assert names <= held.keys()
    assert held["steps"] == [11, 20]
    assert held["world_size"] == 2
    assert held["next"] == {"what": "--engine.bucket-cap-mb 25", "gain": pytest.approx(found.gain, abs=1e-3)}
    assert "computing" in str(found)
