"""What Python's collections of garbage visit in the loop, and that they visit it again after the run."""

import gc
import weakref

import pytest
from small_runs import config
from toys import Ragged

import lockstep
from lockstep.training import trainer

MANY = 100_000


class Cyclic:
    """What a collection alone can free."""

    def __init__(self):
        self.itself = self


class Keeping(Ragged):
    """As much around a model as a compiler leaves there."""

    def model(self):
        model = super().model()
        model.cycle, model.ballast = Cyclic(), [[number] for number in range(MANY)]
        return model


def visited():
    """The objects that a full collection looks at."""
    gc.collect()
    return len(gc.get_objects(generation=2))


@pytest.fixture(autouse=True)
def unchanged(imported_is_frozen, monkeypatch):
    """Collections as this process had them, and the package's own limit of objects."""
    monkeypatch.setattr(trainer, "_MIN_OBJECTS", 50_000)
    gc.collect()
    gc.freeze()
    yield
    gc.enable()
    gc.collect()
    gc.freeze()


def leaves(run):
    for step in run:
        if step.global_step == 2:
            break


def fails(run):
    def loop():
        for step in run:
            if step.global_step == 2:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        loop()


def ends(run):
    for _ in run:
        pass


@pytest.mark.parametrize("way", [ends, leaves, fails])
def test_lasting_objects_are_frozen_in_the_loop_and_freed_after(tmp_path, way):
    found = []

    def steps(run):
        for step in run:
            found.append(visited())
            yield step

    run = lockstep.Run(config(tmp_path, max_steps=4), Keeping())
    with run:
        cycle = weakref.ref(run.model.cycle)
        assert visited() > MANY
        way(steps(run))
    assert all(number < MANY / 4 for number in found), found
    assert gc.get_freeze_count() < MANY / 4
    del run
    gc.collect()
    assert cycle() is None


def test_a_caller_that_turned_collections_off_has_them_off(tmp_path):
    gc.disable()
    before = gc.get_freeze_count()
    for _ in lockstep.Run(config(tmp_path, max_steps=3), Keeping()):
        assert gc.get_freeze_count() <= before
        assert not gc.isenabled()


def test_a_caller_that_froze_what_is_there_keeps_it_frozen(tmp_path):
    task = Ragged()
    gc.collect()
    gc.freeze()
    before = gc.get_freeze_count()
    for _ in lockstep.Run(config(tmp_path, max_steps=3), task):
        pass
    assert gc.get_freeze_count() > before / 2
