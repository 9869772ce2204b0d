"""Several runs compared: how far they are equal, what differs, and their mean losses."""

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
    assert equal.losses.startswith("Mean loss from step 8 on (3 common records): ")
    assert equal.losses.endswith("; difference 0.")
    assert "from the first one" in other.same[0] or "differs" in other.same[0]
    assert "The parameters differ in the checkpoint of step" in other.same[1]
    assert not other.losses.endswith("; difference 0.")
    assert found.settings == [("lr", ["0.01", "0.01", "0.02"])]
    assert dispatch(["report", *(str(tmp_path / name) for name in "abc"), "-o", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    assert "3 runs compared" in html
    assert "bitwise equal in the checkpoints" in html


def test_mean_losses_of_the_second_half_are_compared(tmp_path):
    a = made(tmp_path / "a", records(100, lambda step: 9.0 if step <= 500 else 3.0), state_json=state())
    b = made(tmp_path / "b", records(100, lambda step: 2.5 + step % 20 / 20), state_json=state())
    c = made(tmp_path / "c", records(100, lambda step: float("nan") if step == 900 else 3.0), state_json=state())
    d = made(tmp_path / "d", records(60), state_json=state(seed=1))
    lower, broken, other = compare(gathered(a, b, c, d)).pairs
    assert lower.losses == "Mean loss from step 510 on (50 common records): 2.75, of a 3; difference -0.25."
    assert broken.losses.endswith("or a loss that is not finite.")
    assert "from step 310 on (30 common records)" in other.losses
    assert other.losses.endswith("The runs draw other samples or another order (different seed).")
    assert lower.same[0] == "Records differ from the first one; the record of step 10 differs."
    assert "parameters are not compared" in lower.same[1]


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
    assert "has no common record" in compare(gathered(a, none)).pairs[0].losses
