"""What each micro-batch costs, as a task tells it: of the samples that are really in it."""

import pytest
from toys import Partial

from lockstep.data.batches import Batches, MicroBatchCosts, Origin, StepPlan
from lockstep.data.sampler import Sequential, Shuffled
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError


class Numbered(Partial):
    def collate(self, samples):
        return samples

    def count(self, batch):
        return len(batch)

    def work(self, dataset, samples):
        assert len(dataset) == 29
        return 1 + sum(samples)


@pytest.mark.parametrize("plan", [StepPlan(8, 2, 70), StepPlan(5, 1, 29), StepPlan(6, 3, 53, Origin(4, 11))])
def test_it_is_that_of_the_samples_which_are_loaded(plan):
    order, task = Shuffled(29, 3), Numbered()
    works = MicroBatchCosts(task, range(29), order, plan)
    loaded = dict(Batches(task, range(29), order, plan, World()).from_step(plan.origin.step))
    for step in (*reversed(loaded), *loaded):  # in any order
        found = works(step)
        assert len(found) == plan.micro_batches
        assert list(found) == [1.0 + sum(batch.data) for batch in loaded[step]]  # empty slots repeat the last one


def test_any_step_of_a_long_run_is_found_at_once():
    works = MicroBatchCosts(Numbered(), range(29), Sequential(29), StepPlan(1000, 500, 10**15))
    for step in (10**11, 0, 5 * 10**10, *range(600)):
        assert len(works(step)) == 2
    assert len(works._cache) <= 300


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_what_is_no_work_is_named(value):
    class Bad(Numbered):
        def work(self, dataset, samples):
            return value

    with pytest.raises(DataError, match=r"`work`.*\[4, 5\] of step 2"):
        MicroBatchCosts(Bad(), range(29), Sequential(29), StepPlan(4, 2, 8))(1)


def test_an_error_of_the_tasks_own_is_as_it_is():
    class Own(Numbered):
        def work(self, dataset, samples):
            raise ConfigError("no lengths")

    with pytest.raises(ConfigError, match="no lengths"):
        MicroBatchCosts(Own(), range(29), Sequential(29), StepPlan(4, 2, 8))(0)
