"""Every fault that people make is found: at the right step, with the right cause, on the right rank."""

from types import SimpleNamespace

import pytest
from planting import AT, RESUME, STEPS, first_differences, settings
from toys import Ragged

from lockstep.data.sampler import Shuffled
from lockstep.engines.base import StepResult
from lockstep.errors import ConfigError
from lockstep.verify import FAULTS
from lockstep.verify.faults import _MappedOrder, _ScaledEngine, fault
from lockstep.verify.request import STAGES

# fault -> (step, first rank, what the place must name)
PLACES = {
    "per-rank-seed": (0, 1, "micro-batch 4"),
    "per-rank-weights": (0, 1, "embedding.weight"),
    "overlapping-data": (0, 1, "micro-batch 4, batch['input']"),
    "dropped-sample": (RESUME, 0, "micro-batch 0, batch['input']"),
    "unsent-gradient": (AT, 0, "embedding.weight"),
    "local-batchnorm": (0, 0, "running_mean"),
    "rank-average": (0, 0, "micro-batch 0, loss / items"),
    "other-rate": (AT, 1, "learning rate"),
    "rank-dropout": (0, 0, "micro-batch 0"),
    "extra-step": (AT, 1, "update"),
    "bit-flip": (AT, 1, "embedding.weight"),
    "clip-before-unscale": (0, 0, "all gradients"),
    "padded-evaluation": (STEPS, 0, "items"),
    "swapped-state": (RESUME, 1, "optimizer/embedding.weight/exp_avg"),
}
TASK = Ragged(samples=60, dropout=0.1)
# Of models that each rank has in full; `test_divided.py` has the others.
WHOLE = [name for name in FAULTS if not fault(name).divided]


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    return first_differences(TASK, settings(), tmp_path_factory.mktemp("planted"), ["", *WHOLE])


def test_every_fault_has_a_place():
    assert set(PLACES) == set(WHOLE)
    assert (len(WHOLE), len(FAULTS)) == (14, 22)
    assert all(fault(name).name == name for name in FAULTS)


@pytest.mark.parametrize("name", PLACES)
def test_it_is_found(differences, name):
    difference = differences[name, "ddp"]
    step, rank, place = PLACES[name]
    assert difference is not None, "the fault went unnoticed"
    assert (difference.step, difference.stage, difference.rank) == (step, fault(name).stage, rank), difference
    assert difference.where == place
    assert difference.stage in STAGES


def test_a_healthy_run_is_silent(differences):
    assert differences["", "ddp"] is None
    assert differences["", "single"] is None


def test_what_the_bound_of_a_coarse_dtype_would_hide_is_found(tmp_path):
    """An average by rank is 8 % of a gradient off, a missing micro-batch 11 %; the bound is cut at 25 %."""
    names = ["", "unsent-gradient", "rank-average"]
    differences = first_differences(TASK, settings(precision="bf16-true"), tmp_path, names)
    for name, step in (("unsent-gradient", AT), ("rank-average", 0)):
        difference = differences[name, "ddp"]
        assert (difference.step, difference.stage) == (step, fault(name).stage), (name, difference)
    assert differences["", "ddp"] is None


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["float64", "exact"])
def test_it_is_found_in_sharded_engines(tmp_path, exact):
    config = settings(exact=exact, precision="float32" if exact else "float64")
    names = [name for name in WHOLE if not (exact and name == "local-batchnorm")]  # which --exact refuses by itself
    differences = first_differences(TASK, config, tmp_path, ["", *names], engines=("ddp", "fsdp", "zero"))
    for (name, engine), difference in differences.items():
        if not name:
            assert difference is None, (engine, difference)
            continue
        assert (difference.step, difference.stage) == (PLACES[name][0], fault(name).stage), (engine, difference)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float64", "float32", "bf16", "bf16-true", "exact"])
def test_twenty_healthy_runs_are_silent(tmp_path, precision):
    """In every precision: five seeds at two and at three processes (exact: four), by three engines in turns."""
    exact = precision == "exact"
    for seed in range(5):
        config = settings(seed=seed, exact=exact, precision="float32" if exact else precision)
        for size in (2, 4 if exact else 3):
            folder = tmp_path / f"{seed}-{size}"
            folder.mkdir()
            task = Ragged(samples=60, dropout=0.1)
            assert set(first_differences(task, config, folder, [""], ("ddp", "zero"), size).values()) == {None}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("clip-before-unscale", {}, "--optim.clip"),
        ("dropped-sample", {}, "--resume-at"),
        ("swapped-state", {}, "--resume-at"),
    ],
)
def test_a_fault_that_cannot_show_is_refused(name, changes, words):
    from lockstep.config.schema import Config
    from lockstep.config.sections import Optim

    with pytest.raises(ConfigError, match=words):
        fault(name).check(Config(optim=Optim(clip=0.0)), 8, 0)


def test_a_scaled_loss_is_not_scaled_again():
    with pytest.raises(ConfigError, match="--precision fp16"):
        fault("clip-before-unscale").check(settings(precision="fp16"), 8, 0)


def test_a_fault_that_exact_refuses_by_itself_is_not_planted():
    with pytest.raises(ConfigError, match="--exact refuses"):
        fault("local-batchnorm").check(settings(exact=True, precision="float32"), 8, 0)


def test_a_stream_that_begins_late_has_as_many_samples():
    order = Shuffled(20, 0)
    epochs, samples = _MappedOrder(order, lambda place: place + 3).at(5, 19)
    wanted = order.at(8, 22)
    assert epochs.tolist() == wanted[0].tolist()
    assert samples.tolist() == wanted[1].tolist()


def test_a_loss_that_is_scaled_has_its_weight_and_its_norm():
    told = []
    inner = SimpleNamespace(
        model=None,
        backward=lambda loss, weight: told.append((loss, weight)),
        step=lambda *given: told.append(given) or StepResult(24.0, True),
    )
    made = _ScaledEngine(inner, 8.0, lambda: told.append("reset"))
    made.backward(3.0, 0.5)
    assert made.step(0.1, 7.0, 0.9) == StepResult(3.0, True)
    assert told == [(3.0, 4.0), "reset", (0.1, 7.0, 0.9, None)]


def test_an_unknown_fault_is_refused():
    with pytest.raises(ConfigError, match="choose one of per-rank-seed"):
        fault("nothing")
