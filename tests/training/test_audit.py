"""--guards.audit: a rank that computes wrongly is named, a healthy run is silent and trains what it trains without."""

import contextlib
import re

import pytest
import tasks_for_audit as tasks
from ranks import run
from refusals import refuses
from small_runs import config

import lockstep
from lockstep import checkpoint
from lockstep.errors import ConfigError, LockstepError
from lockstep.guards.audit import Recomputer
from lockstep.logging.jsonl import read


def settings(folder, name, share, **changes):
    given = {"batch_size": 8, "micro_batch_size": 2, "max_steps": 0, "num_epochs": 1, "experiment_name": name}
    return config(folder, **given | {"precision": "float32", "guards": {"audit": share, "straggler": 0.0}} | changes)


def one(world, folder, task, name, share, **changes):
    """What a case came to: the fingerprint of what it trained, or its error; what the log warns of; and how many
    micro-batches this rank computed again."""
    again, times = Recomputer.bits, []
    try:
        Recomputer.bits = lambda self, *given: times.append(0) or again(self, *given)
        result = lockstep.train(settings(folder, name, share, **changes), getattr(tasks, task)(), world)
        found = checkpoint.fingerprint(checkpoint.newest(result.folder, say=print))
    except LockstepError as error:
        found = str(error)
    finally:
        Recomputer.bits = again
    logs = (folder / name / "logs").glob("*") if world.is_main else ()
    lines = [line for log in logs for line in log.read_text().splitlines() if "guards.audit: " in line]
    return found, lines, len(times)


def each(world, folder, cases):
    """`one` of each case (task, name, share, changes)."""
    return [one(world, folder, *case[:3], **case[3]) for case in cases]


HEALTHY = {
    "plain": ("Sentences", {"exact": True}),
    "ddp": ("Sentences", {}),
    "zero": ("Sentences", {"engine": "zero", "data": {"workers": 1}}),
    "shares": ("Sentences", {"shares": "3,1", "exact": True}),
    "half": ("Odd", {"precision": "fp16", "exact": True, "optim": {"ema": 0.9}}),
    "norm": ("Normed", {"exact": True}),
    "local": ("Normed", {"batchnorm": "local", "precision": "bf16"}),
    "moved": ("Moved", {}),
    "means": ("Means", {"exact": True, "precision": "float64"}),
    "again": ("Sentences", {"activation_checkpointing": "selective"}),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """What each healthy case comes to on two ranks, of every micro-batch twice, and what it trains without audits."""
    folder = tmp_path_factory.mktemp("healthy")
    cases = [
        (task, f"{name}-{share}", share, changes) for name, (task, changes) in HEALTHY.items() for share in (1.0, 0.0)
    ]
    ranks = run(each, 2, folder, cases, timeout=200.0)
    times = [sum(rank[case][2] for rank in ranks) for case in range(len(cases))]
    assert times[1::2] == [0] * len(HEALTHY)
    return {name: (*ranks[0][2 * k][:2], ranks[0][2 * k + 1][0], times[2 * k]) for k, name in enumerate(HEALTHY)}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_run_is_silent_and_trains_as_without_audits(name, healthy):
    found, lines, wanted, times = healthy[name]
    assert found.startswith("sha256:"), found
    assert lines == []
    assert found == wanted
    # In the first step each rank's first, then all of 4, 4 and 3; where forwards move buffers, each rank's first; where
    # means are trained, those that have items.
    assert times == {"moved": 2 + 2 + 2 + 2, "means": 11}.get(name, 2 + 4 + 4 + 3)


def test_task_that_moves_its_tensors_is_audited_and_restored(tmp_path):
    [found] = run(each, 1, tmp_path, [("Counting", f"own-{share}", share, {}) for share in (1.0, 0.0)])
    assert found[0][:2] == found[1][:2]
    assert found[0][0].startswith("sha256:")
    assert [times for _, _, times in found] == [4, 0]


def broken(world, folder, cases):
    """Each case's error, and the steps that were taken; (rank, how often it is wrong, share, steps, changes)."""
    said = []
    for number, (rank, every, share, steps, changes) in enumerate(cases):
        wrong = tasks.Wrong(every) if rank == world.rank else contextlib.nullcontext()
        given, taken = settings(folder, f"broken-{number}", share, max_steps=steps, **changes), 0
        try:
            with lockstep.Run(given, tasks.Sentences(1600), world) as made, wrong:
                for _ in made:
                    taken += 1
            said.append(("", taken))
        except LockstepError as error:
            said.append((str(error), taken))
    return said


SELDOM, ALWAYS = 50, 1


def test_rank_that_is_sometimes_wrong_is_named_among_two(tmp_path):
    cases = [(rank, SELDOM, 0.02, 200, changes) for rank, changes in ((0, {}), (1, {"exact": True}))]
    found = run(broken, 2, tmp_path, [*cases, (1, ALWAYS, 0.02, 20, {"engine": "zero"})])
    assert found[0] == found[1]
    for (line, taken), rank in zip(found[0], (0, 1), strict=False):
        assert re.match(
            rf"step {taken + 1}: rank {rank} \(\S+, cpu\) computes wrongly: micro-batch \d of rank [01], ", line
        )
        assert "from its own recomputation there; the step was not applied; the newest checkpoint is" in line
        assert "\n" not in line
        assert 0 < taken < 200
        held = re.search(r"matching audit there was in step (\d+)$", line.partition("; take")[0])
        assert held, line
        assert int(held[1]) <= taken
    line, taken = found[0][2]
    assert taken == 0
    assert re.match(r"step 1: one of rank 0 \(\S+, cpu\), rank 1 \(\S+, cpu\) computes wrongly: micro-batch", line)
    assert "only a third rank could decide" in line
    for number, (_, taken) in enumerate(found[0]):
        steps = checkpoint.list_steps(tmp_path / f"broken-{number}")
        assert max(steps, default=0) <= taken


def test_of_three_ranks_two_say_which_is_always_wrong(tmp_path):
    cases = [(1, ALWAYS, 0.02, 20, {}), (2, SELDOM, 0.02, 200, {"exact": True})]
    found = run(broken, 3, tmp_path, cases)
    assert found[0] == found[1] == found[2]
    (always, first), (seldom, later) = found[0]
    assert re.match(r"step 1: rank 1 \(\S+, cpu\) computes wrongly: micro-batch \d of rank \d, recomputed by", always)
    assert "from most other ranks; the step was not applied; there is no checkpoint" in always
    assert re.search(r"differs there \((the loss and )?the gradients of \S+ and \d+ more parameters\) ", always)
    assert re.match(rf"step {later + 1}: rank 2 \(\S+, cpu\) computes wrongly: ", seldom)
    assert first == 0 < later < 200


def test_what_is_no_fault_of_a_device_is_said_as_what_it_is(tmp_path):
    changing = ("Changing", "changing", 1.0, {})
    apart = ("Counting", "apart", 1.0, {"guards": {"audit": 1.0, "desync_freq": 0}, "stop_at": 2, "log_freq": 1})
    cases = [("Unsteady", "unsteady", 0.02, {}), changing, ("Reentrant", "reentrant", 0.02, {}), apart]
    (unsteady, *_), (found, lines, _), (reentrant, *_), (_, other, _) = run(each, 2, tmp_path, cases)[0]
    assert "differs in nearly every recomputation and on most ranks (the loss and the gradients of" in unsteady
    assert "rather than a device" in unsteady
    assert found.startswith("sha256:")
    assert len(lines) == 1
    assert "of step 1 was not compared: loading its data again gives other values" in lines[0]
    assert "use_reentrant=False" in reentrant
    assert other == []  # what the loss writes of the task's is rank 0's on both after each step


def test_a_process_alone_compares_with_itself(tmp_path):
    [[(line, taken)]] = run(broken, 1, tmp_path, [(0, SELDOM, 0.02, 200, {"log_freq": 1, "engine": "single"})])
    assert "computed twice, differs there" in line
    assert "recomputation there: a faulty device, or a nondeterministic model; the step" in line
    records = list(read(tmp_path / "broken-0" / "metrics.jsonl"))
    audited = [record["global_step"] for record in records if "time/audit" in record]
    assert audited[0] == 1
    assert 1 < len(audited) < 0.2 * taken


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"guards": {"audit": 1.5}}, "guards.audit is 1.5: it must be a share from 0 (none) to 1"),
        ({"guards": {"audit": -0.1}}, "guards.audit is -0.1: it must be a share from 0 (none) to 1"),
        ({"guards": {"audit": "much"}}, "guards.audit is 'much': it must be a number"),
    ],
)
def test_a_share_that_cannot_be_is_one_line(changes, line, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(line)):
        settings(tmp_path, "no", 0.0, **changes)


@pytest.mark.parametrize(
    ("changes", "conflict"),
    [
        ({"engine": "fsdp"}, "--engine fsdp"),
        ({"batchnorm": "sync"}, "--batchnorm sync"),
        ({"compile": True}, "TORCHINDUCTOR_MAX_AUTOTUNE=1"),
    ],
)
def test_unsupported_combinations_are_one_line_before_writing(changes, conflict, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    with refuses(ConfigError, "--guards.audit", conflict):
        lockstep.train(settings(tmp_path, "no", 0.02, **changes), tasks.Sentences(), lockstep.World())
    assert not (tmp_path / "no").exists()
