"""Evaluation: every sample once, the same numbers at every world size, modes put back."""

import torch
from distributed import run
from toys import Ragged, parts

from lockstep.data.batches import Batches
from lockstep.data.order import Sequential
from lockstep.evaluate import evaluate, one_step
from lockstep.world import World


def found(world, samples, micro):
    task = Ragged(samples=3 * samples - 3, dropout=0.5)
    dataset = task.dataset("evaluation")
    assert len(dataset) == samples
    made, _ = parts(world, task)
    made.model.train()
    next(iter(made.model.modules())).eval()  # a module that was left in eval mode stays so
    cut = one_step(len(dataset), micro)
    batches = Batches(task, dataset, Sequential(len(dataset)), cut, world, seed=0)
    modes = [module.training for module in made.model.modules()]
    record = evaluate(made, task, batches, world, step=7, seed=0)
    assert [module.training for module in made.model.modules()] == modes
    assert all(p.grad is None for p in made.model.parameters())
    return record


def test_equal_bits_at_worlds_that_do_not_divide_the_set():
    alone = found(World(), 17, 4)
    for world_size in (1, 2, 3, 4):
        assert run(found, world_size, 17, 4) == [alone] * world_size


def test_it_is_the_mean_over_all_items_each_counted_once():
    record = found(World(), 11, 3)
    task = Ragged(samples=30)
    data = task.dataset("evaluation")
    torch.manual_seed(0)
    model = Ragged(dropout=0.5).model().eval()
    losses, items, right = 0.0, 0, 0
    with torch.no_grad():
        for sample in (data[i] for i in range(len(data))):
            batch = task.collate([sample])
            losses += task.loss(model, batch).item()
            items += task.count(batch)
            right += task.metrics(model, batch)["accuracy"][0].item()
    assert record.items == items
    assert abs(record.loss - losses / items) < 1e-12
    assert record.metrics == {"accuracy": right / items}


def test_more_ranks_than_samples():
    alone = found(World(), 2, 1)
    assert run(found, 4, 2, 1) == [alone] * 4
