"""What a step is predicted to take without something, over traces written by hand."""

import pytest
from handmade_traces import Hand, on_cpu
from test_verdict import ranks, verdict

EVALUATED = {"log_freq": 0, "eval_freq": 1, "ckpt_freq": 0}


def evaluated(saved, **options):
    """Steps of 9.7 ms with an evaluation of 10 ms after each, and a save of `saved` us after the evaluation."""
    hand = on_cpu(data=200, after=10000 + saved, options=EVALUATED | options)
    for event in list(hand.events):
        if event["name"].startswith("lockstep:step"):
            end = event["ts"] + event["dur"]
            hand.mark("evaluate", end - saved - 10000, 10000)
            if saved:
                hand.mark("save", end - saved, saved)
    return hand


def test_save_of_the_best_evaluation_belongs_to_the_evaluation():
    """No save is due, so that without the evaluation there would be none."""
    plain, saved = verdict(evaluated(0)), verdict(evaluated(20000))
    assert plain.bottleneck == saved.bottleneck == "evaluation"
    assert "takes 10.0 ms each time" in plain.sentence
    assert "takes 30.0 ms each time" in saved.sentence
    assert saved.parts["checkpoint"] == pytest.approx(20.0)
    assert saved.gain == pytest.approx(39.7 / 9.7, rel=0.02)


def test_a_save_that_was_due_is_not_the_evaluations():
    found = verdict(evaluated(20000, ckpt_freq=1))
    assert found.bottleneck == "checkpoint"
    assert "takes 20.0 ms each time" in found.sentence
    seldom = verdict(evaluated(20000, ckpt_freq=5))  # that of every fifth step: the others are the evaluations'
    assert "an evaluation every 1 steps takes 26.0 ms each time" in seldom.sentence


def test_tracing_cost_in_steps_is_not_taken_from_an_evaluation():
    """By what one event takes alone it is: 1,000 of them, 0.5 us each."""
    hand = evaluated(0)
    for mark in [event for event in hand.events if event["name"] == "lockstep:evaluate"]:
        for k in range(1000):
            hand.op(mark["ts"] + 10 * k, 5)
    for costs in ({"event_us": 0.5}, {"event_us": 0.5, "tracing_ms": 1.0}):
        assert "takes 9.5 ms each time" in verdict(hand, **costs).sentence


def test_what_a_loader_process_hands_over_stays():
    """A step of 9.5 ms and 20 ms of loading; to fetch what was loaded takes 2 ms."""
    hand = on_cpu(data=20000)
    assert verdict(hand).gain == pytest.approx(29.5 / 9.5)
    assert verdict(hand, handed_ms=2.0).gain == pytest.approx(29.5 / 11.5)
    assert verdict(hand, handed_ms=0.5, slots=4).gain == pytest.approx(29.5 / 11.5)
    hand.about["options"]["data.workers"] = 1
    assert verdict(hand, handed_ms=2.0, slots=1).gain == verdict(hand, handed_ms=0.0).gain  # it is in the wait already


def test_who_sleeps_waits_for_no_core():
    """9 ms in the passes, 4 of which are a gap: asleep, by what the thread computed, or not."""
    busy = {"cpu": {"forward": 2.0, "backward": 4.0}, "queued": {"forward": 1.0, "backward": 2.0}}
    parts = verdict(on_cpu(data=200, gaps=2000, **busy)).parts
    assert parts["host"] == pytest.approx(4.0 * 2.0 / 3.0)
    slept = {"cpu": {"forward": 1.0, "backward": 1.0}, "queued": {"forward": 1.0, "backward": 2.0}}
    parts = verdict(on_cpu(data=200, gaps=2000, **slept)).parts
    assert parts["host"] == pytest.approx(4.0)
    assert parts["compute"] == pytest.approx(2.0)
    assert parts["queued"] == pytest.approx(3.0)


def test_queue_outside_the_steps_parts_is_taken_from_there():
    found = verdict(evaluated(0), queued={"forward": 1.0}, usage={"queued": 6.0})
    assert found.parts["evaluation"] == pytest.approx(5.0)
    assert found.parts["queued"] == pytest.approx(6.0)
    assert found.parts["compute"] == pytest.approx(8.0)


def test_exchange_finds_no_core_during_a_backward_on_all_cores():
    """15 of 16 buckets of an exchange of 5 ms, 3 of which a core works at it, could lie beside the backward."""

    def gain(cores, hosts):
        options = {"engine_options.bucket_cap_mb": 1000.0, "engine_options.compression": "bf16"}
        about = {"usage": {"others": 3.0}, "cores": cores, "local_ranks": 2 // hosts, "options": options}
        found = verdict(*ranks(on_cpu, data=200, exchange=5000, engine_options=["bucket_cap_mb"], **about))
        return found.gain if "bucket" in found.what else 1.0

    whole, beside = 14.7, 5.0 * 15.0 / 16.0
    assert gain(cores=1, hosts=2) == pytest.approx(whole / (whole - beside * (1.0 - 0.6)))
    assert gain(cores=2, hosts=2) == pytest.approx(whole / (whole - beside))
    assert gain(cores=2, hosts=1) == 1.0  # they only take turns
    assert gain(cores=3, hosts=1) == pytest.approx(whole / (whole - beside * (1.0 - 0.5)))
    assert gain(cores=4, hosts=1) == pytest.approx(whole / (whole - beside))


def test_fewer_threads_are_faster_wherever_a_core_works():
    """Ranks of 10 and 12 ms, with 2 ms of exchange, half of which a core works at it."""
    fewer, parts = {"count": 1, "gain": 2.0}, {"data": 0, "update": 1000, "exchange": 2000}
    pair = ranks(on_cpu, forward=(3000, 5000), late=(2000, 0), usage={"others": 1.0 + 10.0}, **parts)
    found = verdict(*pair, threads=2, fewer_threads=fewer)
    assert found.bottleneck == "threads"
    assert found.gain == pytest.approx(14.0 / (14.0 - (12.0 + 1.0) / 2.0))


def in_turns(rank, slower):
    """Steps of 20 ms: one rank computes 8 ms longer, in the next step the other; rank 1 always `slower` us more."""
    hand = Hand(rank=rank, world=2)
    for step in range(hand.count):
        at, long = 20000.0 * step, (step + rank) % 2
        length = 10000 + 8000 * long + slower * rank
        last = max(18000 + slower * (step % 2 == 0), 10000 + slower)  # of both
        hand.mark("forward", at, length)
        hand.op(at, length)
        hand.mark("backward", at + length, last - length + 500)
        hand.gloo(at + length, last - length + 500)
        hand.mark(f"step {step + hand.about['steps'][0]}", at, 20000)
    return hand


@pytest.mark.parametrize("slower", [0, 1500])
def test_ranks_late_in_turns_are_found_where_one_is_slower_too(slower):
    found = verdict(in_turns(0, slower), in_turns(1, slower))
    assert found.bottleneck == "imbalance", found.sentence
    assert "a different rank is late in each step" in found.sentence
    waited = 4.0 - slower / 2000  # what is left of that where the slower one is waited for in every step
    assert found.gain == pytest.approx(20.0 / (20.0 - waited), rel=0.01)


def test_who_has_no_core_is_late_but_no_rank_of_long_samples():
    """The 8 ms by which one of the two is later in each step, it waited for a core."""
    pair = in_turns(0, 0), in_turns(1, 0)
    for rank, hand in enumerate(pair):
        hand.about["queued_by_step"] = [8.0 * ((step + rank) % 2) for step in range(hand.count)]
    found = verdict(*pair)
    assert found.parts["imbalance"] == pytest.approx(4.0)
    assert found.bottleneck != "imbalance", found.sentence
