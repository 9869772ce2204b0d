"""`lockstep verify --parallel.pipeline`: a model in stages against one process, and replicas against each other."""

import divided_tasks as tasks
import pytest
from planting import first_differences, settings

import lockstep
from lockstep.verify import FAULTS
from lockstep.verify.faults import fault

TASK = tasks.TinyGPT(samples=60, dropout=0.1)

# fault -> (first rank, what the place must name)
PLACES = {
    "local-draws": (0, "micro-batch 0"),
    "tied-ends": (0, "tokens.weight"),
}


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    return first_differences(TASK, settings(), tmp_path_factory.mktemp("planted"), ["", *PLACES], pipeline=2)


def test_each_fault_of_stages_has_a_place():
    assert [name for name in FAULTS if fault(name).divided == "pipeline"] == list(PLACES)


@pytest.mark.parametrize("name", PLACES)
def test_a_planted_fault_is_found(differences, name):
    difference = differences[name, "ddp"]
    assert difference is not None, "the fault went unnoticed"
    assert (difference.step, difference.stage) == (0, fault(name).stage), difference
    assert (difference.rank, difference.where) == PLACES[name]


def test_healthy_stages_are_silent(differences):
    assert differences["", "ddp"] is None


def test_replicas_have_the_bits_of_one():
    """Dropout, ragged labels, and a resume."""
    table = lockstep.verify(
        TASK,
        settings(exact=True, precision="auto", batch_size=8, micro_batch_size=2),
        engines=("ddp",),
        world_sizes=(4,),
        pipeline=(2,),
        steps=2,
        resume_at=1,
    )
    assert [row.verdict for row in table.rows] == ["equal", "close", "equal"], str(table)
    _, one, several = table.rows
    assert 0.0 < one.apart < 1e-14
    assert several.text == "bitwise equal to pipeline 2 x 1 replica"
