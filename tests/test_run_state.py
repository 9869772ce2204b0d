"""The state of a run in a checkpoint: what any lockstep wrote comes back, and what it cannot read is named."""

import json

import pytest
from golden import capture
from refusals import refuses

from lockstep.errors import CheckpointError
from lockstep.run_state import (
    AdapterState,
    BestEvaluation,
    Extension,
    LauncherState,
    PatienceCount,
    PlateauCount,
    Position,
    RunningSums,
    RunState,
    Selection,
    SharesState,
    SpikeState,
    TrainedSet,
)

FULL = RunState(
    place=Position(7, 1, 2, 0.5, 3, 42),
    running=RunningSums(1.5, 1, {"mine": [0.1] * 6}),
    selection=Selection(BestEvaluation(6, 0.5, "a", 0.9), 1, PatienceCount(None, 2), PlateauCount(1, 2, 3)),
    evaluation_due=True,
    plan={"steps": 9, "optim.name": "sgd"},
    origin=(3, 18),
    extended=Extension("2epochs", 3, 5, 0, 2),
    world_size=2,
    compile=False,
    reduction="sum",
    evaluation_graph=True,
    gpt={"heads": 2},
    lora=AdapterState("sha256:0", "", ["head"], 2, 4.0, 0.0, ["q"], False, "bfloat16"),
    trained=TrainedSet(["a"], ["a", "b"], {"b": 4}),
    not_finite_at_start=[],
    spike=SpikeState([1.0], 1, [(3, 2.5)], None, 0),
    shares=SharesState([1.0, 2.0], [4, 4]),
    steps_left_out=0,
    losses=1,
    restarts=2,
    job=LauncherState("j", 1),
    hooks={"own": [1, {"two": None}]},
    others={"of a newer lockstep": 1},
)


def test_all_parts_come_back():
    assert FULL.copy() == FULL
    assert FULL.to_json()["extended"]["from"] == 5
    assert FULL.to_json()["running_numbers"] == {"mine": [0.1] * 6}


@pytest.mark.parametrize("engine", capture.ENGINES)
def test_what_a_checkpoint_of_the_past_has_is_written_again(engine):
    paths = list((capture.HERE / "checkpoints" / engine).rglob("state.json"))
    assert paths
    for path in paths:
        found = json.loads(path.read_text())
        state = RunState.from_json(found)
        assert (state.to_json(), state.others) == (found, {})


def test_a_new_run_has_written_nothing_but_its_sums_and_no_best():
    assert RunState().to_json() == {"running_loss": 0.0, "running_missed": 0, "running_numbers": {}, "best": None}
    assert RunState.from_json({}) == RunState()
    assert RunState().global_step == 0


def test_best_of_an_earlier_version_has_the_loss_as_metric():
    best = RunState.from_json({"best": {"step": 3, "loss": 2.0}}).selection.best
    assert (best.metric, best.metric_value) == ("loss", 2.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("global_step", "7"),
        ("global_step", True),
        ("global_step", 10**400),
        ("plan", [1]),
        ("best", {"step": 3}),
        ("origin", [1]),
        ("trained", {"made": [], "now": [1], "since": {}}),
        ("running_numbers", {"mine": 1.0}),
        ("extended", {"asked": 1.5, "at": 1, "from": 1, "max_steps": 1, "num_epochs": 0}),
    ],
)
def test_another_type_is_refused_by_name_or_left_out_of_reports(key, value):
    with refuses(CheckpointError, "step-00000007/state.json", key):
        RunState.from_json({key: value}, "step-00000007/state.json")
    assert RunState.from_json({key: value, "world_size": 2}, lenient=True) == RunState(world_size=2)
