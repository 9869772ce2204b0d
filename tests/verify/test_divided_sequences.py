"""`lockstep verify --parallel.context`: divided sequences against one process, and replicas against each other."""

import divided_tasks as tasks
import pytest
from planting import first_differences, settings
from refusals import refuses

import lockstep
from lockstep.errors import ConfigError
from lockstep.verify import FAULTS
from lockstep.verify.faults import fault

TASK = tasks.Sequences(samples=60, dropout=0.1)

# fault -> (first rank, what the place must name)
PLACES = {
    "restarted-positions": (0, "micro-batch 0, loss"),
    "unsummed-keys": (0, "tokens.weight"),
}


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    return first_differences(TASK, settings(), tmp_path_factory.mktemp("planted"), ["", *PLACES], context=2)


def test_each_fault_of_divided_sequences_has_a_place():
    assert [name for name in FAULTS if fault(name).divided == "context"] == list(PLACES)


@pytest.mark.parametrize("name", PLACES)
def test_a_planted_fault_is_found(differences, name):
    difference = differences[name, "ddp"]
    assert difference is not None, "the fault went unnoticed"
    assert (difference.step, difference.stage) == (0, fault(name).stage), difference
    assert (difference.rank, difference.where) == PLACES[name]


def test_healthy_divided_sequences_are_silent(differences):
    assert differences["", "ddp"] is None


def test_replicas_have_the_bits_of_one():
    """Dropout, ragged labels, a resume, and a step of which the last replica has less."""
    table = lockstep.verify(
        TASK,
        settings(exact=True, precision="auto", batch_size=6, micro_batch_size=2),
        engines=("ddp",),
        world_sizes=(4,),
        context=(2,),
        steps=2,
        resume_at=1,
    )
    assert [row.verdict for row in table.rows] == ["equal", "close", "equal"], str(table)
    _, one, several = table.rows
    assert 0.0 < one.apart < 1e-14
    assert one.text.startswith("equal to one process within rounding; the largest difference is")
    assert several.text == "bitwise equal to context 2 x 1 replica"


def test_degrees_are_compared_one_at_a_time():
    with refuses(ConfigError, "parallel.tensor 2", "parallel.context 2"):
        lockstep.verify(TASK, settings(), engines=("ddp",), tensor=(2,), context=(2,))
    with refuses(ConfigError, "unsummed-keys", "--parallel.context 2"):
        lockstep.verify(TASK, settings(), engines=("ddp",), plant="unsummed-keys")
