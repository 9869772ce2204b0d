"""Evaluation: every sample once, the same numbers at every world size, modes put back."""

import gc
import math
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run
from refusals import refuses
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score
from toys import Holes, HolesMean, Ragged, parts

from lockstep.clock import make_clock
from lockstep.data.batches import Batches
from lockstep.data.sampler import Sequential
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError
from lockstep.guards.nonfinite import DeferredReader
from lockstep.records import StepRecord
from lockstep.training.evaluation import evaluate, evaluate_all, merge_states, one_step_plan, pop_state
from lockstep.training.step.recorder import Meter


def found(world, samples, micro):
    task = Ragged(samples=3 * samples - 3, dropout=0.5)
    dataset = task.dataset("evaluation")
    assert len(dataset) == samples
    made, _ = parts(world, task)
    made.model.train()
    next(iter(made.model.modules())).eval()  # a module that was left in eval mode stays so
    step_plan = one_step_plan(len(dataset), micro)
    batches = Batches(task, dataset, Sequential(len(dataset)), step_plan, world, seed=0)
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


class Shares(Ragged):
    """Several sums and counts in one forward, of numbers that are known."""

    def evaluate(self, model, batch):
        items = self.count(batch)
        found = {
            "half": (0.5 * items, items),
            "sevenths": (2.0, 7.0),
            "none": (3.0, 0.0),
            "third": (items, 3.0 * items),
        }
        return self.loss(model, batch), found


def shares(world):
    task = Shares(samples=30)
    made, _ = parts(world, task)
    dataset = task.dataset("evaluation")
    batches = Batches(task, dataset, Sequential(len(dataset)), one_step_plan(len(dataset), 3), world, seed=0)
    return evaluate(made, task, batches, world, step=0, seed=0).metrics


def test_each_metric_is_its_own_sum_over_its_own_count():
    for found in (shares(World()), *run(shares, 2)):
        assert found == pytest.approx({"half": 0.5, "sevenths": 2 / 7, "none": math.nan, "third": 1 / 3}, nan_ok=True)


def test_more_ranks_than_samples():
    alone = found(World(), 2, 1)
    assert run(found, 4, 2, 1) == [alone] * 4


BENCH = Path(__file__).parents[2] / "bench"
GROWTH = "import memory; from lockstep.distributed.world import World; print(*memory.evaluation(World(), 60))"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_evaluation_memory_does_not_grow_with_micro_batches():
    """Small tensors kept of each micro-batch would hold the heap apart: 2.4 MiB of logits each, never given back."""
    done = subprocess.run([sys.executable, "-c", GROWTH], cwd=BENCH, capture_output=True, text=True, check=True)
    grown, logits = map(float, done.stdout.split())
    assert grown < 10 * logits


def read(record):
    """The step as a reader gives it."""
    return DeferredReader(torch.device("cpu")).add(record, [])[0]


def test_what_is_kept_of_a_step_holds_no_tensor():
    exchange = SimpleNamespace(totals=lambda values, losses: values)
    meter = Meter(exchange, make_clock(torch.device("cpu")), torch.device("cpu"))
    held = []
    for step in range(5):
        losses = [torch.tensor(float(step)), torch.tensor(1.0)]
        held += [weakref.ref(loss) for loss in losses]
        meter.add(read(StepRecord(step, 2, losses, torch.tensor(3.0 + step), 1.0)))
        del losses
    gc.collect()
    assert not any(ref() is not None for ref in held)
    assert meter.flush()[0]["grad_norm"] == 7.0
    assert meter.running_loss == sum((step + 1) / 2 for step in range(5))
    assert math.isnan(meter.flush()[0]["grad_norm"])


def test_a_step_without_a_finite_loss_is_not_in_the_windows_mean():
    """Nor in that of the window after, which begins anew; a window of such steps alone has none."""
    exchange = SimpleNamespace(totals=lambda values, losses: values)
    meter = Meter(exchange, make_clock(torch.device("cpu")), torch.device("cpu"))
    for losses, mean in (([2.0, math.nan, 4.0, math.inf, 9.0], 5.0), ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0)):
        for step, loss in enumerate(losses):
            meter.add(read(StepRecord(step, 1, [torch.tensor(loss)], torch.tensor(1.0), 1.0)))
        assert meter.read(5)[0]["running_loss"] == mean
    meter.add(read(StepRecord(0, 0, [torch.tensor(0.0)], torch.tensor(1.0), 1.0)))
    assert meter.read(1)[0]["running_loss"] == 0.0  # of a step without items, as it was trained
    meter.add(read(StepRecord(0, 1, [torch.tensor(math.nan)], torch.tensor(1.0), 1.0)))
    assert math.isnan(meter.read(1)[0]["running_loss"])


class Once(Ragged):
    """Loss and metrics from one forward."""

    def evaluate(self, model, batch):
        logits = model(batch["input"])
        kept = batch["labels"] != -100
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
        return loss, {"accuracy": (((logits.argmax(-1) == batch["labels"]) & kept).sum(), kept.sum())}


class OnceMean(Once):
    reduction = "mean"

    def loss(self, model, batch):
        return super().loss(model, batch) / self.count(batch)

    def evaluate(self, model, batch):
        loss, metrics = super().evaluate(model, batch)
        return loss / self.count(batch), metrics


def measured(task, samples=11, micro=3, world=None):
    world = world or World()
    made, _ = parts(world, task)
    forwards = []
    made.model.register_forward_hook(lambda *_: forwards.append(1))
    dataset = task.dataset("evaluation")
    batches = Batches(task, dataset, Sequential(len(dataset)), one_step_plan(len(dataset), micro), world, seed=0)
    told = []
    record = evaluate(made, task, batches, world, step=7, seed=0, progress=lambda *both: told.append(both))
    return record, len(forwards), told


def steps_told(world):
    return measured(Ragged(samples=30), world=world)[2]


def test_each_rank_says_how_far_it_is_of_its_own_share():
    """Four micro-batches on two ranks and on three: two each, of which one may be empty."""
    for ranks in (2, 3):
        assert run(steps_told, ranks) == [[(1, 2), (2, 2)]] * ranks


def test_how_far_it_is_counts_over_all_sets():
    task, told = Ragged(samples=30), []
    made, _ = parts(World(), task)
    sets = {
        name: Batches(task, data, Sequential(len(data)), one_step_plan(len(data), 3), World(), seed=0)
        for name, data in (("near", task.dataset("evaluation")), ("far", Ragged(samples=12).dataset("evaluation")))
    }
    evaluate_all(made, task, sets, World(), step=7, seed=0, progress=lambda *both: told.append(both))
    assert told == [(done, 6) for done in range(1, 7)]  # eleven samples and five, three at a time


def test_one_forward_gives_loss_and_metrics_where_the_task_can():
    twice, forwards, told = measured(Ragged(samples=30))
    once, fewer, _ = measured(Once(samples=30))
    assert once == twice
    assert (forwards, fewer) == (8, 4)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_micro_batch_without_items_counts_nothing_in_a_mean():
    whole, mean = measured(Holes(samples=30), micro=1)[0], measured(HolesMean(samples=30), micro=1)[0]
    assert mean.loss == pytest.approx(whole.loss, rel=1e-12)
    assert (mean.items, mean.metrics) == (whole.items, whole.metrics)
    whole, mean = measured(Once(samples=30))[0], measured(OnceMean(samples=30))[0]
    assert mean.loss == pytest.approx(whole.loss, rel=1e-12)


def test_metrics_that_change_their_names_are_refused_in_one_line():
    class Changing(Ragged):
        def metrics(self, model, batch):
            return {f"of {len(batch['labels'])}": (1, 1)}

    with refuses(LockstepError, "of 2", "of 3"):
        measured(Changing(samples=30))


class Scored(Ragged):
    """An F1 score and an area under the curve, whose values are no sums over counts."""

    def __init__(self):
        super().__init__(samples=60, dtype=torch.float32)
        self.f1 = MulticlassF1Score(29, average="macro", ignore_index=-100)
        self.curve = BinaryAUROC()

    def evaluate(self, model, batch):
        logits, labels = model(batch["input"]), batch["labels"]
        kept = labels != -100
        self.f1.update(logits.flatten(0, 1), labels.flatten())
        self.curve.update(logits[kept][:, 0].sigmoid(), (labels[kept] < 10).int())
        right = (logits.argmax(-1) == labels) & kept
        return self.loss(model, batch), {"auc": self.curve, "accuracy": (right.sum(), kept.sum()), "f1": self.f1}


def scored(world):
    task = Scored()
    made, _ = parts(world, task, name="auto")
    data = task.dataset("evaluation")
    batches = Batches(task, data, Sequential(len(data)), one_step_plan(len(data), 2), world)
    return evaluate(made, task, batches, world, step=0, seed=0).metrics


def test_stateful_metric_is_of_the_whole_set_on_any_ranks():
    task, found = Scored(), scored(World())
    model, data = parts(World(), task)[0].model.eval(), task.dataset("evaluation")
    with torch.no_grad():
        task.evaluate(model, task.collate([data[index] for index in range(len(data))]))
    assert list(found) == ["auc", "accuracy", "f1"]
    assert found["f1"] == pytest.approx(float(task.f1.compute()), rel=1e-6)
    assert found["auc"] == pytest.approx(float(task.curve.compute()), rel=1e-6)
    for ranks in (2, 3):
        assert run(scored, ranks) == [pytest.approx(found, rel=1e-6)] * ranks


class InOrder(Metric):
    """Each value counts by its place among all."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")

    def update(self, values):
        self.seen.append(values)

    def compute(self):
        values = torch.cat(self.seen) if isinstance(self.seen, list) else self.seen
        return (values * torch.arange(1.0, len(values) + 1)).sum()


class Placed(Ragged):
    def __init__(self):
        super().__init__(samples=30)
        self.placed = InOrder()

    def evaluate(self, model, batch):
        self.placed.update(batch["input"][:, 0])  # of one sample it is a column with an odd stride
        return self.loss(model, batch), {"placed": self.placed}


class Apart(World):
    """A rank that notes what it tells the others, and hears what `heard` is."""

    def gather(self, value):
        self.heard = getattr(self, "heard", None) or [value]
        return self.heard


def test_ordered_results_merge_in_sample_order_on_any_ranks():
    task = Placed()
    made, data = parts(World(), task)[0], task.dataset("evaluation")
    ranks = [Apart(rank=rank, size=2) for rank in range(2)]

    def placed(world):
        batches = Batches(task, data, Sequential(len(data)), one_step_plan(len(data), 5), world, seed=0)
        return evaluate(made, task, batches, world, step=0, seed=0).metrics["placed"]

    told = [part for world in ranks if placed(world) for part in world.heard]
    for world in ranks:
        world.heard = told
    wanted = sum((place + 1) * int(data[place]["input"][0]) for place in range(len(data)))
    assert [placed(world) for world in (World(), *ranks)] == [wanted] * 3


def test_a_metric_that_is_no_single_number_is_refused():
    metric = MulticlassF1Score(3, average=None)
    metric.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
    with pytest.raises(ConfigError, match=r"metric 'f1' \(MulticlassF1Score\) does not give one number .* choose"):
        merge_states("f1", metric, [pop_state(metric)])
