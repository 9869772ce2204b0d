"""--shares auto: shares that change while a run goes on, with the bits of one process; measured, told and kept."""

import re

import pytest
import tasks_for_shares as tasks
from ranks import run
from shaken import shaken
from test_shares import settings

import lockstep
from lockstep import checkpoint
from lockstep.distributed import balance
from lockstep.errors import LockstepError
from lockstep.logging.jsonl import read

AUTO = {"engine": "ddp", "shares": "auto", "log_freq": 1, "ckpt_freq": 4}


def each(world, folder, cases):
    """Of each case (task, name, changes): what it trained, and the shares of its records."""
    found = []
    for number, (task, name, changes) in enumerate(cases):
        shaken(number)
        result = lockstep.train(settings(folder, name, **changes), getattr(tasks, task)(), world)
        records = [record for record in read(result.folder / "metrics.jsonl") if "shares" in record]
        trained = checkpoint.fingerprint(checkpoint.newest(result.folder, say=print))
        found.append((trained, [record["shares"] for record in records]))
    return found


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("Normed", {"data": {"workers": 2, "prefetch": 1}}),
        ("Lengthy", {"engine": "zero"}),
        ("Broken", {"guards": {"nonfinite": "rollback"}}),
        ("Lengthy", {"guards": {"audit": 0.05, "straggler": 0.0}}),  # which plans far ahead
    ],
)
def test_the_same_bits_whatever_the_shares_did_meanwhile(task, changes, tmp_path):
    """BatchNorm and loader processes; runs cut by lengths; steps that rollbacks leave out. The last step is short."""
    changes = AUTO | {"num_epochs": 2} | changes
    [[(wanted, _)]] = run(each, 1, tmp_path, [(task, "one", changes | {"engine": "single"})])
    found = run(each, 2, tmp_path, [(task, "two", changes)])
    assert found[0] == found[1]
    [(trained, shares)] = found[0]
    assert trained == wanted
    assert len(set(shares)) > 2, shares


def test_a_resume_on_other_ranks_goes_on_with_the_same_bits(tmp_path):
    changes = AUTO | {"num_epochs": 2}
    [[(wanted, _)]] = run(each, 1, tmp_path, [("Normed", "one", changes | {"engine": "single"})])
    run(each, 2, tmp_path, [("Normed", "on", changes | {"stop_at": 3})])
    [(trained, shares)] = run(each, 3, tmp_path, [("Normed", "on", changes | {"engine": "zero"})])[0]
    assert trained == wanted
    assert len({each for each in shares if each.count(",") == 2}) > 1


def slowed(world, folder, changes):
    """A run whose rank 1 needs many times as long: what is in its records, its state and its log."""
    balance._REPORTS, balance._STEPS = 2, 2
    task = tasks.Slow(world.rank)
    result = lockstep.train(settings(folder, "slow", **AUTO | {"exact": False} | changes), task, world)
    records = [record["shares"] for record in read(result.folder / "metrics.jsonl") if "shares" in record]
    state = checkpoint.read_state(checkpoint.newest(result.folder, say=print))
    log = "".join(path.read_text() for path in sorted((result.folder / "logs").glob("*-0*")))
    return records, state["shares"]["costs"], log


def test_a_slow_rank_gets_less_which_is_said_recorded_and_kept(tmp_path):
    found = run(slowed, 2, tmp_path, {"num_epochs": 12, "stop_at": 24})
    for shares, costs, log in found:
        assert shares[0] == "4,4"
        assert re.fullmatch("[567],[123]", shares[-1])
        assert costs[1] > 1.5 * costs[0]  # the machine may be busy
        assert re.search(r"shares [567],[123] after step \d+: rank 1 takes [\d.]+ times as long per micro-batch", log)
    again = run(slowed, 2, tmp_path, {"num_epochs": 12, "stop_at": 26})
    for shares, _, log in again:
        assert shares[24] == shares[-1] == found[0][0][-1]  # from its first step on
        assert "unequal devices: rank 0: " in log
        assert "speed 0." in log


def test_as_many_ranks_as_micro_batches_leave_nothing_to_choose(tmp_path):
    changes = {"engine": "ddp", "shares": "auto", "micro_batch_size": 4}
    [[(wanted, _)]] = run(each, 1, tmp_path, [("Sentences", "one", changes | {"engine": "single"})])
    assert run(each, 2, tmp_path, [("Sentences", "two", changes)]) == [[(wanted, [])]] * 2


def refused(world, folder, task, changes):
    try:
        lockstep.train(settings(folder, "no", shares="auto", **changes), getattr(tasks, task)(), world)
    except LockstepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("task", "changes", "line"),
    [
        (
            "Sentences",
            {"engine": "fsdp"},
            "--shares auto does not work with --engine fsdp",
        ),
        (
            "Sentences",
            {"engine": "ddp", "engine_options": {"static_graph": True}, "exact": False},
            "--shares auto does not work with --engine.static-graph",
        ),
        (
            "Weightless",
            {"engine": "ddp"},
            "the task's `work` returned 0.0 for the samples [0] of step 1",
        ),
        (
            "Unknown",
            {"engine": "ddp"},
            "the task's `work` failed at step 1, samples [0]: KeyError: 'length' (tasks_for_",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(task, changes, line, tmp_path):
    for said in run(refused, 2, tmp_path, task, changes):
        assert line in said
        assert "\n" not in said
    assert not (tmp_path / "no").exists()


def disagreeing(world, folder):
    try:
        lockstep.train(settings(folder, "two", **AUTO, num_epochs=2), tasks.Own(world.rank), world)
    except LockstepError as error:
        return str(error)
    return ""


def test_ranks_with_unequal_work_are_told_before_training(tmp_path):
    for said in run(disagreeing, 2, tmp_path):
        assert said.startswith("--shares auto: the ranks disagree on the shares of the coming steps; the task's `work`")


def test_verify_has_it_where_it_fits(tmp_path):
    given = settings(tmp_path, "v", shares="auto", device="cpu", timeout=60.0)
    asked = {"engines": ("ddp", "fsdp"), "world_sizes": (2,), "steps": 2, "resume_at": 1}
    table = lockstep.verify(tasks.Lengthy(), given, **asked)
    assert [row.verdict for row in table.rows] == ["equal"] * len(table.rows), str(table)
