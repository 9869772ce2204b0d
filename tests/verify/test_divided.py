"""`lockstep verify --parallel.tensor`: divided models against one process, and replicas against each other."""

import divided_tasks as tasks
import pytest
from planting import first_differences, settings
from refusals import names, refuses

import lockstep
from lockstep.config.parallel_options import Parallel
from lockstep.errors import ConfigError
from lockstep.verify import FAULTS, verification
from lockstep.verify.faults import fault
from lockstep.verify.request import Combination, VerifyRequest, combine, with_one_replica

TASK = tasks.TinyGPT(samples=60, dropout=0.1)
SHORT = {"engines": ("ddp",), "steps": 2, "resume_at": 0}

# fault -> (first rank, what the place must name)
PLACES = {
    "per-rank-seed": (1, "micro-batch 0"),
    "unsummed-input": (1, "positions.weight"),
    "counted-twice": (0, "all gradients"),
    "items-of-all": (0, "items"),
    "plain-shard": (0, "micro-batch 0, output of blocks.0.attention.output"),
}


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    return first_differences(TASK, settings(), tmp_path_factory.mktemp("planted"), ["", *PLACES], tensor=2)


def test_each_fault_of_divided_models_has_a_place():
    assert [name for name in FAULTS if fault(name).divided == "tensor"] == list(PLACES)[1:]


@pytest.mark.parametrize("name", PLACES)
def test_a_planted_fault_is_found(differences, name):
    difference = differences[name, "ddp"]
    assert difference is not None, "the fault went unnoticed"
    assert (difference.step, difference.stage) == (0, fault(name).stage), difference
    assert (difference.rank, difference.where) == PLACES[name]


def test_a_healthy_divided_model_is_silent(differences):
    assert differences["", "ddp"] is None


def test_replicas_have_the_bits_of_one():
    """An own plan, dropout, ragged labels, a resume, and a step of which the last replica has less."""
    table = lockstep.verify(
        tasks.Planned(samples=60, dropout=0.1),
        settings(exact=True, precision="auto", batch_size=6, micro_batch_size=2),
        engines=("ddp", "fsdp"),
        world_sizes=(4,),
        tensor=(2,),
        steps=3,
    )
    # Under fsdp the ranks of two replicas have other parts than those of one.
    assert [row.verdict for row in table.rows] == ["equal", "close", "close", "equal", "equal"], str(table)
    _, one, _, several, _ = table.rows
    assert 0.0 < one.apart < 1e-14
    assert one.hidden < 1e-11
    assert one.text.startswith("equal to one process within rounding; the largest difference is")
    assert several.text == "bitwise equal to tensor 2 x 1 replica"


@pytest.mark.parametrize(
    ("name", "stage", "where"),
    [
        ("UndividedHeads", "forward", "micro-batch 0, output of attention.out"),
        ("Unsummed", "reduction", "embedding.weight"),
    ],
)
def test_a_wrong_plan_is_different_and_its_first_tensor_is_named(name, stage, where):
    task = getattr(tasks, name)(samples=60, dropout=0.1)
    table = lockstep.verify(task, settings(), world_sizes=(2,), tensor=(2,), **SHORT)
    difference = table.rows[-1].difference
    assert (difference.stage, difference.where) == (stage, where), str(table)


def test_ranks_of_a_replica_with_other_losses_fail():
    """Before step 1, as in a run, which ends with 3 too."""
    task = tasks.WithoutRows(samples=60, dropout=0.1)
    table = lockstep.verify(task, settings(), world_sizes=(2,), tensor=(2,), **SHORT)
    assert table.rows[-1].verdict == "failed", str(table)
    assert names(table.rows[-1].reason, "--parallel.tensor 2", "ranks 0 to 1", "rows")


def test_shapes_that_do_not_fit_are_no_request_that_cannot_run():
    """The loss works in one process, so its plan is wrong: a failure ends with 3, and not with 2."""
    task = tasks.WrongShapes(samples=60)
    table = lockstep.verify(task, settings(), world_sizes=(2,), tensor=(2,), **SHORT)
    assert table.rows[-1].verdict == "failed", str(table)
    assert "where the model is divided, the task's `loss` failed" in table.rows[-1].reason


def test_combinations_of_degrees_and_world_sizes():
    made = combine(("single", "ddp", "fsdp"), (2, 4), False, (Parallel(), Parallel(tensor=2)))
    assert [str(entry) for entry in made] == [
        *("single x1", "ddp x2", "fsdp x2", "ddp x2 tensor 2", "fsdp x2 tensor 2"),
        *("ddp x4", "fsdp x4", "ddp x4 tensor 2", "fsdp x4 tensor 2"),
    ]
    assert Combination("ddp", 4, parallel=Parallel(tensor=2)).key == "ddp-4-tensor-2"
    only = combine(("ddp",), (1, 4), False, (Parallel(tensor=2),))
    assert list(map(str, only)) == ["single x1", "ddp x4 tensor 2"]
    assert list(map(str, with_one_replica(only, 0))) == ["single x1", "ddp x2 tensor 2", "ddp x4 tensor 2"]
    with refuses(ConfigError, "--exact", "2 ranks", "without torchrun"):
        with_one_replica(only, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor": (2,), "world_sizes": (3,)}, ("3", "not a multiple")),
        ({"tensor": (1, 4)}, ("4", "none of", "1,2 is a multiple")),
        ({"tensor": (2,), "engines": ("zero",)}, ("zero", "does not work with", "ddp")),
        ({"tensor": (0,)}, ("parallel.tensor 0 must be at least 1",)),
        ({"plant": "plain-shard"}, ("plain-shard needs a divided model",)),
        ({"tensor": (2,), "config": settings(optim={"clip": 0.0}), "plant": "counted-twice"}, ("needs clipping",)),
    ],
)
def test_what_cannot_be_compared_is_refused_first(changes, words, monkeypatch):
    monkeypatch.setattr(verification, "start", lambda *_, **__: pytest.fail("processes were started"))
    with refuses(ConfigError, *words):
        lockstep.verify(TASK, **{"config": settings(), "engines": ("ddp",), **changes})


def test_degrees_are_those_of_the_request_else_of_the_config():
    made = VerifyRequest(settings(), tensor=(1, 2)).resolve()
    assert (made.tensor, made.config.parallel.tensor) == ((1, 2), 2)
    made = VerifyRequest(settings(parallel=Parallel(tensor=2))).resolve()
    assert made.tensor == (2,)
    assert VerifyRequest(settings(exact=True, precision="auto"), tensor=(2,)).resolve().precision == "float64"
    assert VerifyRequest(settings(exact=True, precision="auto")).resolve().precision == "float32"
