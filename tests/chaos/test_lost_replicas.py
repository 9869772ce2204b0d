"""A rank is lost under fsdp in hybrid sharding: its replica leaves, and the others go on from memory to the same bits.

Sums over other numbers of ranks round differently, so the bits are those of a run that is stopped after the same step
and resumed on the ranks that were left.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import warm

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import BEAT, Run, arguments, end, finish, start, until_step, workers

UPDATE = "lockstep.engines.optimizer_step:OptimizerStep.__call__"
NORM = "lockstep.engines.fsdp.engine:_sharded_norm"
BLOCK = "lockstep.models.gpt:Block.forward"
LOSS = "lockstep.tasks.language_model:CausalLM.loss"
MOVE = "lockstep.engines.optimizer_step:OptimizerStep._step"  # after the last exchange
PLACE = "lockstep.training.recovery.regroup:_restore"
FLAGS = ("--micro-batch-size", "1", "--batch-size", "8", "--optim.ema", "0.9", "--engine", "fsdp")
SHORT, LONG = ("--max-steps", "9", "--eval-freq", "5"), ("--max-steps", "300")
HYBRID = ("--engine.sharding", "hybrid", "--engine.shard-size", "2")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def begin(data, out, *flags, faults=(), processes=4, python=None, losses=8):
    command = [python or warm.python(), *arguments(data, out, *FLAGS, *flags, processes=processes, losses=losses)[1:]]
    return start([word for word in command if word != "--exact"], faults)


def lost(data, out, *flags, **more):
    """A run in hybrid sharding, to its end."""
    began = time.monotonic()
    return finish(begin(data, out, *HYBRID, *SHORT, *flags, **more), out, began)


def changes(run):
    """(ranks, step from which they went on), in order: also those that a new replica has joined."""
    lines = sorted(line for rank in range(6) for line in run.log(rank).splitlines())
    found = [re.search(r"INFO (\d+) ranks? continues? after step (\d+)", line) for line in lines]
    return [(int(each[1]), int(each[2])) for each in found if each]


def resumed(data, out, first, parts, last, *flags):
    """The same without a loss: stopped after each of these steps, and resumed on the ranks that went on."""
    stops, done = [step for _, step in parts] + [last], 0
    for processes, stop in zip([first, *(ranks for ranks, _ in parts)], stops, strict=True):
        if stop == done:
            continue
        done = stop
        sharding = HYBRID if processes > 2 else ()  # one replica is the whole world
        ends = ("--stop-at", str(stop), *sharding, *flags)
        run = finish(begin(data, out, *ends, processes=processes, losses=0), out, 0.0)
        assert run.code == 0, run.said
    return run.mark()[:3]


def survived(data, tmp_path, faults, *flags, processes=4, **more):
    """A run with these faults that came to its end, and to the bits of one that was resumed instead."""
    run = lost(data, tmp_path / "lost", *flags, faults=faults, processes=processes, **more)
    assert run.code == 0, run.said
    last = run.state["global_step"]
    whole = resumed(data, tmp_path / "resumed", processes, changes(run), last, *SHORT, *flags)
    assert run.mark()[:3] == whole, run.said
    return run


def test_replica_with_a_loss_leaves_and_a_new_one_joins(data, tmp_path):
    """The mate of rank 0, which leaves too, and with it the run's folder and records."""
    long = [{"rank": rank, "at": LOSS, "do": "sleep", "seconds": 0.02, "always": True} for rank in range(4)]
    slow = [*long, *({**each, "replaced": 1} for each in long[:2])]
    process = begin(data, tmp_path / "lost", *HYBRID, *LONG, faults=slow, python=sys.executable)
    log, deadline = tmp_path / "lost" / "default" / "logs" / "rank-00000.log", time.monotonic() + 60
    try:
        until_step(tmp_path / "lost", 5, process)
        before = workers(process)
        os.kill(before[1], signal.SIGKILL)
        while "4 ranks continue" not in log.read_text() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
        after = workers(process)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        end(process)
    assert process.returncode == 75, said
    run = Run(75, said, 0.0, tmp_path / "lost" / "default")
    assert re.search(r"rank 1 was the first to end, killed by SIGKILL, .*; rank 0, with other parts of the same", said)
    assert (after[2], after[3]) == (before[2], before[3])
    assert not {after[0], after[1]} & set(before.values())
    parts, taken = changes(run), int(re.search(r"saved after step (\d+) of", said)[1])
    assert [ranks for ranks, _ in parts] == [2, 4]
    assert run.mark()[:3] == resumed(data, tmp_path / "resumed", 4, parts, taken, *LONG)
    assert run.state["losses"] == 1


FAULTS = [
    {"step": 0, "at": BEAT},
    {"step": 6, "at": LOSS, "call": 2},  # the second micro-batch: gradients are kept until the last one
    {"step": 6, "at": BLOCK, "call": 3},
    {"step": 6, "at": NORM},
    {"step": 6, "at": UPDATE},
    {"step": 8, "at": UPDATE},  # the last step
    {"step": 6, "at": "lockstep.distributed.exchange:StepExchange.send"},
    {"step": 4, "at": "lockstep.training.evaluation:evaluate"},
    {"step": 4, "at": "lockstep.checkpoint.write:write_file"},
]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=[fault["at"].rpartition(".")[2] for fault in FAULTS])
def test_replica_leaves_wherever_its_rank_is_lost(data, tmp_path, rank, fault):
    run = survived(data, tmp_path, [{**fault, "rank": rank, "do": "kill"}])
    mate = rank ^ 1
    assert f"rank {mate}, with other parts of the same replica, left with it; the others continue" in run.said
    assert run.state["losses"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("behind", "at"), [(2, UPDATE), (2, MOVE), (5, MOVE)])
def test_lagging_ranks_take_parts_from_the_same_shard(data, tmp_path, behind, at):
    """Of three replicas one is lost; in another, both ranks have not made the update, or one of them has not."""
    faults = [
        {"rank": behind, "step": 6, "at": at, "do": "raise", "error": "lockstep.errors:PeerError"},
        {"rank": 1, "step": 6, "at": UPDATE, "do": "kill"},
    ]
    run = survived(data, tmp_path, faults, "--batch-size", "12", processes=6)
    assert changes(run)[0] == (4, 7)


@pytest.mark.slow
def test_run_without_a_complete_step_returns_to_its_checkpoint(data, tmp_path):
    """Rank 3 has made the update, rank 2 has not, and nobody else has its part."""
    faults = [
        {"rank": 2, "step": 6, "at": MOVE, "do": "raise", "error": "lockstep.errors:PeerError"},
        {"rank": 1, "step": 6, "at": UPDATE, "do": "kill"},
    ]
    run = lost(data, tmp_path / "lost", faults=faults)
    assert run.code == 0, run.said
    assert "do not have all parts of the states of one step (6 and 7)" in run.said
    assert run.mark()[:3] == resumed(data, tmp_path / "resumed", 4, [(2, 5), *changes(run)], 9, *SHORT)


@pytest.mark.slow
def test_second_replica_is_lost_during_recovery_from_the_first(data, tmp_path):
    faults = [{"rank": 1, "step": 6, "at": BEAT, "do": "kill"}, {"rank": 5, "step": 5, "at": PLACE, "do": "kill"}]
    run = survived(data, tmp_path, faults, "--batch-size", "12", processes=6)
    assert changes(run)[0] == (2, 6)
    assert run.state["losses"] == 2


@pytest.mark.slow
def test_without_a_whole_replica_the_run_ends_and_says_so(data, tmp_path):
    faults = [{"rank": rank, "step": 6, "at": BEAT, "do": "kill"} for rank in (1, 2)]
    run = lost(data, tmp_path, faults=faults)
    assert run.code == 1, run.said
    assert "killed by SIGKILL" in run.last
    assert "no other replica of the states is complete" in run.last


@pytest.mark.slow
def test_fully_sharded_states_are_lost_with_a_rank(data, tmp_path):
    fault = {"rank": 1, "step": 6, "at": BEAT, "do": "kill"}
    run = finish(begin(data, tmp_path, *SHORT, faults=[fault], processes=2), tmp_path, time.monotonic())
    assert run.code == 1, run.said
    assert "--engine fsdp splits the states" in run.last
    assert "--engine.sharding hybrid" in run.last


@pytest.mark.slow
@pytest.mark.parametrize("more", [("--engine.accumulate", "shard"), ("--precision", "fp16"), ("--data.workers", "1")])
def test_options_that_leave_more_in_the_middle_of_a_step(data, tmp_path, more):
    survived(data, tmp_path, [{"rank": 1, "step": 6, "at": LOSS, "call": 2, "do": "kill"}], *more)


@pytest.mark.slow
def test_replicas_of_one_rank_each(data, tmp_path):
    whole = ("--engine.sharding", "none")
    fault = {"rank": 0, "step": 6, "at": LOSS, "call": 2, "do": "kill"}
    run = finish(begin(data, tmp_path, *SHORT, *whole, faults=[fault], processes=3), tmp_path, time.monotonic())
    assert run.code == 0, run.said
    assert changes(run)[0] == (2, 6)
