"""Several runs compared: how far they are equal, what differs, and which has the lower loss."""

import random

import pytest
from folders import made, records, state
from small_runs import config
from toys import Ragged

import lockstep
from lockstep.cli import dispatch
from lockstep.report.facts import gather
from lockstep.report.page import compare


def gathered(*folders):
    return [gather(folder, digits=True) for folder in folders]


def test_equal_runs_are_the_same_to_the_last_step_bit_for_bit(tmp_path):
    for name, changes in (("a", {}), ("b", {"stop_at": 7}), ("b", {}), ("c", {"lr": 0.02})):
        lockstep.train(config(tmp_path, experiment_name=name, **changes), Ragged())
    found = compare(gathered(*(tmp_path / name for name in "abc")))
    equal, other = found.pairs
    assert equal.same == [
        "All records are equal up to step 12 (6 records: mean loss and gradient norm, to the last digit).",
        "The parameters are bitwise equal in the checkpoints of steps 9, 12.",  # b kept 7 instead of 6
    ]
    assert equal.test == "No paired test: the losses are equal."
    assert "from the first one" in other.same[0] or "differs" in other.same[0]
    assert "The parameters differ in the checkpoint of step" in other.same[1]
    assert "second half has only" in other.test
    assert found.settings == [("lr", ["0.01", "0.01", "0.02"])]
    assert dispatch(["report", *(str(tmp_path / name) for name in "abc"), "-o", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    assert "3 runs compared" in html
    assert "bitwise equal in the checkpoints" in html


def noisy(seed, shift):
    draw = random.Random(seed)
    common = random.Random(0)  # the samples' own difficulty, ten times as large
    return lambda step: 3.0 + common.gauss(0, 1.0) + draw.gauss(shift, 0.1)


def test_a_difference_that_the_eye_cannot_see_is_found(tmp_path):
    a = made(tmp_path / "a", records(1000, noisy(1, 0.0)), state_json=state())
    b = made(tmp_path / "b", records(1000, noisy(2, -0.03)), state_json=state())
    c = made(tmp_path / "c", records(1000, noisy(3, 0.0)), state_json=state())
    better, same = compare(gathered(a, b, c)).pairs
    assert "its loss is lower than that of a" in better.test
    assert better.found.low < -0.03 < better.found.high
    assert "Same samples in the same order from step 5,010 on" in better.test
    assert "no significant difference" in same.test
    assert better.same[0] == "Records differ from the first one; the record of step 10 differs."
    assert "parameters are not compared" in better.same[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state_json": state(seed=1)}, "another order (different seed)"),
        ({"state_json": "{}"}, "draw other samples or another order"),
        ({"config_toml": "log_freq = 5\n"}, "windows of different length"),
    ],
)
def test_runs_that_have_no_twins_are_not_tested(tmp_path, changes, reason):
    a = made(tmp_path / "a", records(100), state_json=state())
    b = made(tmp_path / "b", records(100, lambda step: 4.0), **{"state_json": state(), **changes})
    (pair,) = compare(gathered(a, b)).pairs
    assert reason in pair.test
    assert pair.found is None


def test_runs_that_part_at_a_step(tmp_path):
    a = made(tmp_path / "a", records(100), state_json=state())
    b = made(
        tmp_path / "b", records(60, lambda step: 3.0 + 5.0 / (step + 1) + (step > 310) * 1e-15), state_json=state()
    )
    (pair,) = compare(gathered(a, b)).pairs
    assert pair.same[0].startswith("Records are equal up to step 310 ")
    assert pair.same[0].endswith("the record of step 320 differs.")
    none = made(tmp_path / "none", [])
    assert compare(gathered(a, none)).pairs[0].same[0] == "The runs have no recorded step in common."
    assert "no record of its sample order" in compare(gathered(none, none)).pairs[0].test
