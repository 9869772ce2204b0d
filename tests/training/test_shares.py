"""--shares: ranks that compute unequal numbers of a step's micro-batches train what equal ones do, bit for bit."""

import re

import pytest
import tasks_for_shares as tasks
import torch
from ranks import run
from small_runs import config
from torch import nn

import lockstep
from lockstep import checkpoint
from lockstep.errors import ConfigError, LockstepError


def settings(folder, name, **changes):
    sizes = {"batch_size": 8, "micro_batch_size": 1, "max_steps": 0, "num_epochs": 1, "experiment_name": name}
    return config(folder, **sizes | {"precision": "float32", "exact": True} | changes)


def each(world, folder, cases):
    """The fingerprint of what each case trains, of (task, name, changes)."""
    found = []
    for task, name, changes in cases:
        result = lockstep.train(settings(folder, name, **changes), getattr(tasks, task)(), world)
        found.append(checkpoint.fingerprint(checkpoint.newest(result.folder, say=print)))
    return found


@pytest.mark.parametrize("task", [pytest.param("Sentences", marks=pytest.mark.slow), "Normed"])
def test_the_same_bits_whatever_the_shares_also_after_a_resume(task, tmp_path):
    """30 samples: the last step is short, so that a rank has nothing in it."""
    [wanted] = run(each, 1, tmp_path, [(task, "one", {"engine": "single"})])
    cases = [
        (task, "ddp", {"engine": "ddp", "shares": "5,3"}),
        (task, "zero", {"engine": "zero", "shares": "1, 7", "data": {"workers": 1}}),
        (task, "on", {"engine": "ddp", "shares": "6,2", "stop_at": 2}),
    ]
    found = run(each, 2, tmp_path, cases)
    assert [each[:2] for each in found] == [wanted * 2] * 2
    again = [(task, "on", {"engine": "zero", "shares": "1,2,5"})]
    assert run(each, 3, tmp_path, again) == [wanted] * 3


def losses(world, folder, name, changes):
    found = []
    with lockstep.Run(
        settings(folder, name, exact=False, precision="float64", **changes), tasks.Holed(), world
    ) as made:
        found += [step.loss for step in made]
    return found


def test_without_exact_it_is_the_same_training_but_for_rounding(tmp_path):
    """Ragged, some micro-batches without a label, and a layer that some of them do not use."""
    wanted = losses(lockstep.World(), tmp_path, "one", {"engine": "single"})
    for name in ("ddp", "zero"):
        for found in run(losses, 2, tmp_path, name, {"engine": name, "shares": "2,6"}):
            assert found == pytest.approx(wanted, rel=1e-11)


def refused(world, folder, changes):
    try:
        lockstep.train(settings(folder, "no", **changes), tasks.Sentences(), world)
    except LockstepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"shares": "4,4,0"}, "shares is '4,4,0': it must be equal, auto, or"),
        ({"shares": "fast"}, "shares is 'fast': it must be equal, auto, or"),
        ({"shares": "4,2,2"}, "--shares 4,2,2 has 3 numbers for 2 processes"),
        ({"shares": "4,2"}, "--shares 4,2 adds up to 6 micro-batches, but a step has 8"),
        ({"shares": "5,3", "engine": "fsdp"}, "--shares 5,3 does not work with --engine fsdp"),
        (
            {"shares": "5,3", "engine_options": {"static_graph": True}, "exact": False, "engine": "ddp"},
            "--shares 5,3 does not work with --engine.static-graph",
        ),
    ],
)
def test_impossible_shares_are_one_line_before_writing(changes, line, tmp_path):
    if "must be" in line:  # here of the field, on the command line of the flag
        with pytest.raises(ConfigError, match=re.escape(line)):
            settings(tmp_path, "no", **changes)
        return
    for said in run(refused, 2, tmp_path, changes):
        assert line in said
    assert not (tmp_path / "no").exists()


def test_verify_has_them_where_they_fit(tmp_path):
    given = settings(tmp_path, "v", shares="5,3", device="cpu", timeout=60.0)
    asked = {"engines": ("ddp", "fsdp"), "world_sizes": (1, 2), "steps": 2, "resume_at": 1}
    table = lockstep.verify(tasks.Sentences(), given, **asked)
    assert [row.verdict for row in table.rows] == ["equal"] * len(table.rows), str(table)


def own_loop(world, shares):
    """The norm and the weight after one step of a loop of one's own: micro-batch m has the gradient m + 1."""
    model = nn.Linear(1, 1, bias=False)
    made = lockstep.engine(
        "ddp",
        model,
        lambda held: torch.optim.SGD(held.parameters(), lr=1.0),
        world,
        exact_micro_batches=3,
        shares=shares,
    )
    nn.init.zeros_(model.weight)
    mine = range(sum(shares[: world.rank]), sum(shares[: world.rank + 1]))
    for micro in mine:
        with made.accumulate(micro == mine[-1]):
            made.backward(made.model(torch.full((1, 1), micro + 1.0)).sum(), 1.0)
    return made.step().norm.item(), model.weight.item()


def test_a_loop_of_ones_own_has_them(tmp_path):
    assert run(own_loop, 2, (2, 1)) == run(own_loop, 2, (1, 2)) == [(6.0, -6.0)] * 2
