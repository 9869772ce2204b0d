"""What a refusal of a resume names: each setting as it is typed, and the way out that suits it."""

from pathlib import Path

import pytest
from refusals import refuses

from lockstep.config import cli
from lockstep.errors import ResumeError
from lockstep.training.start.resume import check_plan

PLAN = {
    "batch_size": 8,
    "steps": 20,
    "samples": 80,
    "dataset_samples": 80,
    "data": "",
    "task": "T",
    "model": "m",
    "lr": 0.1,
}
PLAN |= {
    "optim.warmup_steps": 1,
    "optim.nesterov": False,
    "optim.name": "adamw",
    "model_name": "",
    "micro_batch_size": 1,
}


def refusal(change, flags):
    asked = cli.parse(flags.split())
    with pytest.raises(ResumeError) as refused:
        check_plan(Path("runs/r"), PLAN, PLAN | change, asked, asked)
    return refused.value.args[0]  # with flags, whatever this process read before


@pytest.mark.parametrize(
    ("change", "flags", "named", "unnamed"),
    [
        ({"steps": 40}, "--max-steps 40", ["--max-steps 40", "--extend-to 40"], ["--stop-at"]),
        ({"steps": 40, "optim.warmup_steps": 2}, "--num-epochs 4", ["--extend-to 4epochs"], ["warmup"]),
        (
            {"steps": 40, "optim.warmup_steps": 2},
            "--max-steps 40 --optim.warmup-steps 2",
            ["--optim.warmup-steps 1"],
            [],
        ),
        ({"steps": 10}, "--max-steps 10", ["--max-steps 10", "--stop-at 10"], ["--extend-to"]),
        (
            {"batch_size": 4, "steps": 40, "micro_batch_size": 2},
            "--batch-size 4 --num-epochs 2",
            ["--batch-size 8 (now 4)"],
            ["--extend-to", "steps", "--micro-batch-size"],
        ),
        ({"lr": 0.2}, "--lr 0.2", ["--lr 0.1 (now 0.2)", "give --lr 0.1;"], ["--extend-to"]),
        ({"lr": 0.2}, "", ["--lr 0.1 (now 0.2)"], []),
        ({"lr": 0.2, "optim.name": "muon"}, "--optim.name muon", ["--optim.name adamw (now muon)"], ["--lr"]),
        (
            {"optim.nesterov": True, "optim.name": "sgd"},
            "--optim.name sgd --optim.nesterov",
            ["give --no-optim.nesterov --optim.name adamw;"],
            [],
        ),
        ({"samples": 64, "steps": 16}, "--limit-train-batches 8", ["--limit-train-batches 8"], ["16"]),
        ({"dataset_samples": 81, "samples": 81, "steps": 21}, "--num-epochs 2", ["80 samples", "81"], ["--extend-to"]),
        ({"model_name": "x", "model": "n"}, "--model-name x", ['--model-name ""'], ["tensors"]),
        ({"model": "n"}, "", ["tensors"], []),
        ({"task": "U"}, "", ["T (now U)"], ["--task T"]),
    ],
)
def test_refused_resume_names_each_setting_and_its_way_out(change, flags, named, unnamed):
    line = refusal(change, flags)
    assert "runs/r" in line
    assert "\n" not in line
    for word in [*named, "--experiment-name", "--resume-anyway"]:
        assert word in line
    assert not [word for word in unnamed if word in line]


def test_smaller_micro_batch_of_an_additive_loss_needs_no_flag():
    before, flags = PLAN | {"micro_batch_size": 4}, ["--micro-batch-size", "2"]
    asked = cli.parse(flags)
    (line,) = check_plan(Path("runs/r"), before, before | {"micro_batch_size": 2}, asked, asked, is_additive=True)
    assert "--micro-batch-size 2 in place of 4" in line
    for size, more, additive in ((2, [], False), (2, ["--exact"], True), (8, [], True)):
        asked = cli.parse([*flags, *more])
        with refuses(ResumeError, "--micro-batch-size 4"):
            check_plan(Path("runs/r"), before, before | {"micro_batch_size": size}, asked, asked, is_additive=additive)
    with refuses(ResumeError, "--lr 0.1"):
        check_plan(Path("r"), before, before | {"micro_batch_size": 2, "lr": 0.2}, asked, asked, is_additive=True)
