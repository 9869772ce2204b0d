"""`lockstep verify` of divided sequences and of stages: against one process, and replicas against each other."""

import divided_tasks as tasks
import pytest
from planting import first_differences, settings
from refusals import refuses

import lockstep
from lockstep.config.parallel_options import Parallel
from lockstep.errors import ConfigError
from lockstep.verify import FAULTS
from lockstep.verify.faults import fault
from lockstep.verify.request import VerifyRequest, combine

TASKS = {
    "context": tasks.Sequences(samples=60, dropout=0.1),
    "pipeline": tasks.TinyGPT(samples=60, dropout=0.1),
}

# fault -> what the place on rank 0 must name
PLACES = {
    "restarted-positions": "micro-batch 0, loss",
    "unsummed-keys": "tokens.weight",
    "local-draws": "micro-batch 0",
    "tied-ends": "tokens.weight",
}


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    found = {}
    for degree, task in TASKS.items():
        names = ["", *(name for name in PLACES if fault(name).divided == degree)]
        planted = first_differences(task, settings(), tmp_path_factory.mktemp(degree), names, **{degree: 2})
        found |= {(name or degree, engine): difference for (name, engine), difference in planted.items()}
    return found


def test_each_fault_of_these_has_a_place():
    assert [name for name in FAULTS if fault(name).divided in TASKS] == list(PLACES)


@pytest.mark.parametrize("name", PLACES)
def test_a_planted_fault_is_found(differences, name):
    difference = differences[name, "ddp"]
    assert difference is not None, "the fault went unnoticed"
    place = (difference.step, difference.stage, difference.rank, difference.where)
    assert place == (0, fault(name).stage, 0, PLACES[name]), difference


@pytest.mark.parametrize("degree", TASKS)
def test_healthy_runs_are_silent(differences, degree):
    assert differences[degree, "ddp"] is None


# With context a step of which the last replica has less.
@pytest.mark.parametrize(("degree", "batch_size"), [("context", 6), ("pipeline", 8)])
def test_replicas_have_the_bits_of_one(degree, batch_size):
    """Dropout, ragged labels and a resume."""
    table = lockstep.verify(
        TASKS[degree],
        settings(exact=True, precision="auto", batch_size=batch_size, micro_batch_size=2),
        engines=("ddp",),
        world_sizes=(4,),
        steps=2,
        resume_at=1,
        **{degree: (2,)},
    )
    assert [row.verdict for row in table.rows] == ["equal", "close", "equal"], str(table)
    _, one, several = table.rows
    assert 0.0 < one.apart < 1e-14
    assert one.text.startswith("equal to one process within rounding; the largest difference is")
    assert several.text == f"bitwise equal to {degree} 2 x 1 replica"


def test_every_combination_of_degrees_is_compared_where_it_works():
    request = VerifyRequest(settings(), engines=("ddp",), tensor=(1, 2), context=(1, 2)).resolve()
    labels = [parallel.label for parallel in request.divisions]
    assert labels == ["", "context 2", "tensor 2", "tensor 2 context 2"]
    for exact, degrees, able in (
        (False, {"pipeline": 2}, ["ddp"]),
        (False, {"context": 2}, ["ddp", "fsdp"]),
        (True, {"context": 2}, ["ddp"]),
    ):
        made = combine(("single", "ddp", "fsdp", "zero"), (2,), False, (Parallel(**degrees),), exact=exact)
        assert [one.engine for one in made] == ["single", *able]
    with refuses(ConfigError, "--engines fsdp", "--parallel.pipeline 2"):
        combine(("fsdp",), (2,), False, (Parallel(pipeline=2),))
    with refuses(ConfigError, "unsummed-keys", "--parallel.context 2"):
        lockstep.verify(TASKS["context"], settings(), engines=("ddp",), plant="unsummed-keys")
