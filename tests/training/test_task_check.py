"""A task is tried before step 1: each mistake is one line and nothing is written; healthy tasks raise no alarm."""

import math
import random
import re
import warnings

import numpy as np
import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score
from torchmetrics.regression import R2Score
from toys import Network, Ragged, Sentences

import lockstep
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError, LockstepError, UsageError
from lockstep.task import as_task
from lockstep.training.start.build import build


def first(folder, task, world=None, **changes):
    """One step of a run."""
    training = iter(lockstep.Run(config(folder, max_steps=1, **{"micro_batch_size": 4} | changes), task, world))
    return next(training).items


def refused(folder, task, kind=ConfigError, **changes):
    with pytest.raises(kind) as caught:
        first(folder, task, **changes)
    assert isinstance(caught.value, UsageError)
    assert "\n" not in str(caught.value)
    assert list(folder.iterdir()) == []
    return str(caught.value)


class Broken(Ragged):
    """`what` is what its methods do wrong."""

    reduction = "sum"

    def __init__(self, what, **settings):
        super().__init__(**settings)
        self.what = what

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        items = self.count(batch)
        made = {
            "mean": loss / items if items else loss,
            "mean over samples": loss / len(batch["input"]),
            "a float": loss.item(),
            "whole": (loss * 0).long(),
            "many": loss.expand(3),
            "nothing": None,
            "a dict": {"loss": loss},
            "raises": None,
        }
        if self.what == "raises":
            return batch["none"]
        return made.get(self.what, loss)

    def count(self, batch):
        made = {"negative": -1, "infinite": torch.tensor(math.inf), "not a number": math.nan, "text": "7"}
        return made.get(self.what, super().count(batch))

    def metrics(self, model, batch):
        made = {
            "no dict": [1, 2],
            "no pair": {"accuracy": 0.5},
            "three": {"accuracy": (1, 2, 3)},
            "vector": {"accuracy": (torch.ones(2), 2)},
            "taken": {"loss": (1, 2)},
        }
        return [][0] if self.what == "metrics raise" else made.get(self.what, super().metrics(model, batch))


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("mean", "reduction = 'sum', but its `loss` is a mean: the gradient of 4 samples .*reduction = 'mean'"),
        ("mean over samples", "`loss` is a mean over its samples, and `count` counts other items"),
        ("a float", "`loss` returned a float: it must return one number, a 0-dim float tensor"),
        ("whole", r"`loss` returned a int64 tensor of shape \[\]"),
        ("many", r"`loss` returned a float64 tensor of shape \[3\]"),
        ("nothing", "`loss` returned None"),
        ("a dict", "`loss` returned a dict: it must return one number, a 0-dim float tensor"),
        ("no dict", r"`metrics` must return a dict of name -> \(sum, count\), both numbers; it returned a list"),
        ("no pair", "'accuracy' is a float"),
        ("three", r"'accuracy' is \(a int, a int, a int\)"),
        ("vector", r"'accuracy' is \(a float32 tensor of shape \[2\], a int\)"),
        ("taken", "the name 'loss' "),
    ],
)
def test_a_mistake_in_a_task_is_one_line_before_step_1(tmp_path, what, line):
    assert re.search(line, refused(tmp_path, Broken(what)))


def test_a_loss_that_is_not_finite_is_refused_as_such(tmp_path):
    class NotFinite(Ragged):
        reduction = "auto"

        def loss(self, model, batch):
            return super().loss(model, batch) * float("nan")

    line = refused(tmp_path, NotFinite())
    assert "not finite" in line
    assert "reduction" not in line


@pytest.mark.parametrize("what", ["negative", "infinite", "not a number", "text"])
def test_a_count_that_is_no_positive_number_is_refused(tmp_path, what):
    assert "`count`" in refused(tmp_path, Broken(what), UsageError)


def test_method_that_raises_is_named_with_the_users_line(tmp_path):
    line = r"`loss` failed at the first micro-batch, before step 1: KeyError: 'none' \(test_task_check.py:\d+\)"
    assert re.search(line, refused(tmp_path, Broken("raises"), DataError))
    line = r"`metrics` failed at .*: IndexError: list index out of range \(test_task_check.py:\d+\)"
    assert re.search(line, refused(tmp_path, Broken("metrics raise"), DataError))


class Padded(Ragged):
    """Rows of different length, padded to the longest of a batch; the padding is counted where `wrong`."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def collate(self, samples):
        batch = super().collate(samples)
        longest = int((batch["labels"] != -100).sum(1).max())
        return {name: rows[:, :longest] for name, rows in batch.items()}

    def count(self, batch):
        return batch["labels"].numel() if self.wrong else super().count(batch)


def test_a_count_of_the_padding_is_refused(tmp_path):
    assert re.search(r"`count` finds \d+ items .* and \d+ and \d+ in their two halves", refused(tmp_path, Padded(True)))
    assert first(tmp_path, Padded(False)) > 0


class DeclaredMean(Ragged):
    reduction = "mean"


def test_a_sum_that_is_called_a_mean_is_refused(tmp_path):
    assert "reduction = 'mean', but its `loss` is a sum" in refused(tmp_path, DeclaredMean())


def test_what_a_task_lacks_is_named():
    class Bare:
        model = dataset = print

    with pytest.raises(ConfigError, match=r"the task Bare has no method `loss`: loss\(model, batch\) returns the loss"):
        as_task(Bare())
    Bare.loss, Bare.reduction = print, "Mean"
    with pytest.raises(ConfigError, match="reduction is 'Mean'"):
        as_task(Bare())


@pytest.mark.parametrize("mask", ["no", 0, torch.ones(2)])
def test_an_attention_mask_is_yes_no_or_not_known(mask):
    class Masked(Ragged):
        attention_mask = mask

    with pytest.raises(ConfigError, match="attention_mask"):
        as_task(Masked())


class Both(Ragged):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def evaluate(self, model, batch):
        return self.result


@pytest.mark.parametrize(
    "result", [torch.tensor(1.0), (torch.tensor(1.0), [1]), (1.0, {}), (torch.tensor(1.0), {"a": 1})]
)
def test_evaluate_must_return_loss_and_metrics(tmp_path, result):
    assert re.search(
        r"`evaluate` must return \(loss, metrics\)|`loss` returned a float", refused(tmp_path, Both(result))
    )


# healthy tasks: silent


class Contrastive(Ragged):
    """Each row against all others of the micro-batch: no sum over the samples, which the task declares."""

    reduction = "micro-batch"

    def loss(self, model, batch):
        found = model(batch["input"]).mean(1)
        alike = found @ found.T + torch.eye(len(found)) * 3
        return F.cross_entropy(alike, torch.arange(len(found)), reduction="sum")

    def count(self, batch):
        return len(batch["input"])


class Pairs(Contrastive):
    def count(self, batch):
        return len(batch["input"]) * (len(batch["input"]) - 1)


class Zero(Ragged):
    reduction = "sum"

    def loss(self, model, batch):
        return super().loss(model, batch) * 0


class Infinite(Ragged):
    reduction = "sum"

    def loss(self, model, batch):
        return super().loss(model, batch) * (1.0 if model.training else math.inf)


class One(Ragged):
    """A loss of shape [1], a count that is a tensor, metrics of plain numbers."""

    def loss(self, model, batch):
        return super().loss(model, batch).reshape(1)

    def count(self, batch):
        return (batch["labels"] != -100).sum().float()

    def metrics(self, model, batch):
        count = len(batch["input"])
        return {"rows": (np.float32(count), count), "ok": (count == 0, torch.tensor([count]))}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = Network(), nn.BatchNorm1d(29).double()

    def forward(self, x):
        return self.norm(self.inner(x).flatten(0, 1)).view(*x.shape, 29)


class BatchNormed(Ragged):
    def model(self):
        return Normed()


class Noisy(Sentences):
    """What is masked is drawn when the micro-batch is put together, as in masked language modelling."""

    draws_random = True


class Drawing(Ragged):
    def dataset(self, split):
        return Noisy(40)

    def collate(self, samples):
        batch = super().collate(samples)
        batch["labels"][torch.rand(batch["labels"].shape) < 0.5] = -100
        return batch


class Whole(Ragged):
    """A collation that needs four samples."""

    reduction = "sum"

    def collate(self, samples):
        if len(samples) != 4:
            raise ValueError("four")
        return super().collate(samples)


class OtherEvaluation(Ragged):
    """The evaluation set has what the training set has not."""

    def dataset(self, split):
        rows = super().dataset(split)
        more = {"answer": torch.tensor(1)} if split == "evaluation" else {}
        return [{**rows[index], **more} for index in range(12)]

    def metrics(self, model, batch):
        return {"answers": (batch["answer"].sum(), len(batch["answer"]))}


class Explained(Ragged):
    """A metric that needs more samples than one micro-batch of the evaluation has, and one that needs both classes."""

    def __init__(self, average="macro"):
        super().__init__()
        self.r2, self.curve = R2Score(), BinaryAUROC()
        self.f1 = MulticlassF1Score(3, average=average)

    def metrics(self, model, batch):
        guessed, known = model(batch["input"])[:, 0, 0], batch["labels"][:, 0]
        self.r2.update(guessed, known.double())
        self.curve.update(guessed.sigmoid(), (known > 14).long())
        self.f1.update(known % 3, known % 3)
        return {"r2": self.r2, "auc": self.curve, "f1": self.f1}


@pytest.mark.filterwarnings("ignore:No .*samples in targets:UserWarning")
def test_metric_that_needs_more_than_one_micro_batch_is_healthy(tmp_path):
    task = Explained()
    run = lockstep.Run(config(tmp_path, max_steps=1, eval_freq=1, eval_micro_batch_size=1), task)
    evaluation = run().evaluation
    data = task.dataset("evaluation")
    with torch.no_grad():
        found = task.metrics(run.model.eval(), task.collate([data[index] for index in range(len(data))]))
    assert evaluation.metrics["r2"] == pytest.approx(float(found["r2"].compute()))
    assert evaluation.metrics["auc"] == pytest.approx(float(found["auc"].compute()))
    for each in found.values():
        each.reset()


def test_a_metric_that_is_no_single_number_is_still_refused(tmp_path):
    line = refused(tmp_path, Explained(average=None), eval_micro_batch_size=1)
    assert "metric 'f1' (MulticlassF1Score) does not give one number" in line


HEALTHY = [
    Ragged(),
    Ragged(dropout=0.5),
    Contrastive(),
    Pairs(),
    Zero(),
    Infinite(),
    One(),
    BatchNormed(),
    Drawing(),
    Whole(samples=33),
    OtherEvaluation(),
]


@pytest.mark.parametrize("task", HEALTHY, ids=lambda task: type(task).__name__)
def test_a_healthy_task_raises_no_alarm(tmp_path, task):
    assert first(tmp_path, task) > 0


class Detached(Ragged):
    def loss(self, model, batch):
        return super().loss(model, batch).detach()


def test_a_loss_without_a_graph_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="`loss` returned a tensor without a graph"):
        first(tmp_path, Detached())


# nothing is left behind


class Counting(Normed):
    """Counts its forwards in a buffer, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x):
        self.forwards += 1
        return super().forward(x)


class Watched(Ragged):
    """Counts its losses in a tensor of its own state."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.losses = torch.zeros(())

    def model(self):
        self.made = Counting()
        return self.made

    def loss(self, model, batch):
        self.losses += 1
        return super().loss(model, batch)

    def state_dict(self):
        return {"losses": self.losses}


def test_nothing_is_left_behind(tmp_path):
    task = Watched(dropout=0.5)
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    parts = build(config(tmp_path, micro_batch_size=4), task, World())
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert task.made.forwards == task.losses == 0
    assert all(p.grad is None for p in task.made.parameters())
    assert all(module.training for module in parts.engine.model.modules())
    wanted = dict(Counting().named_buffers())
    assert all(torch.equal(buffer, wanted[name]) for name, buffer in task.made.named_buffers())
    random.seed(1)
    assert after[2] == random.getstate()
    np.random.seed(1)
    assert after[1] == np.random.get_state()[1].tolist()


def stepped(world, folder, what, engine):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    task = Broken(what)
    training = lockstep.Run(config(folder, micro_batch_size=4, max_steps=3, engine=engine), task, world)
    return [step.items for step in training]


def told_and_stepped(world, folder):
    """Each engine's steps, after a run that all ranks refuse."""
    found = []
    for engine in ("ddp", "fsdp", "zero"):
        with pytest.raises(LockstepError, match="`loss` is a mean"):
            stepped(world, folder / f"{engine}-mean", "mean", engine)
        found.append(stepped(world, folder / engine, "", engine))
    return found


def test_every_rank_is_told_and_a_healthy_run_goes_on(tmp_path):
    assert run(told_and_stepped, 2, tmp_path) == [[stepped(None, tmp_path / "alone", "", "single")] * 3] * 2
    assert not list(tmp_path.glob("*-mean"))


def test_a_step_too_short_for_all_ranks_to_halve_is_served(tmp_path):
    """Five samples in a step of eight: rank 1 has one of them, so no rank runs halves."""
    assert run(short, 2, tmp_path) == [5, 5]


def short(world, folder):
    task = Ragged(samples=5)
    config_ = config(folder, micro_batch_size=4, max_steps=0, engine="ddp")
    return next(iter(lockstep.Run(config_, task, world))).items and 5


class Damaged(Ragged):
    """Whose sample 3 cannot be read: it is in no rank's first micro-batch, but in the halves."""

    def dataset(self, split):
        class Rows(Sentences):
            def __getitem__(self, index):
                if index == 3:
                    raise OSError("the disk is gone")
                return super().__getitem__(index)

        return Rows(40)

    def order(self, size, epoch):
        return range(size)


def damaged(world, folder):
    with pytest.raises(LockstepError) as caught:
        first(folder, Damaged(), world, batch_size=2, micro_batch_size=1, guards={"retries": 0})
    return type(caught.value), str(caught.value)


def test_unloadable_trial_sample_is_named_on_all_ranks(tmp_path):
    """Not taken for a collation that refuses half a micro-batch."""
    for kind, told in run(damaged, 2, tmp_path):
        assert issubclass(kind, DataError)
        assert "sample 3 cannot be loaded: OSError: the disk is gone" in told


class Given(Ragged):
    """Whose batches, count or dataset are what a test says."""

    reduction = "sum"

    def __init__(self, value=0.0, items=None, loader=False):
        super().__init__()
        self.value, self.items, self.loader = value, items, loader

    def dataset(self, split):
        data = super().dataset(split)
        return torch.utils.data.DataLoader(data, batch_size=4) if self.loader else data

    def collate(self, samples):
        return {**super().collate(samples), "extra": {"noise": torch.full((len(samples),), self.value)}}

    def count(self, batch):
        return super().count(batch) if self.items is None else self.items

    def loss(self, model, batch):
        return super().loss(model, batch) + 0 * batch["extra"]["noise"].sum()


def test_nan_in_the_first_batch_is_named(tmp_path):
    told = refused(tmp_path, Given(math.nan), DataError)
    assert "NaN in batch['extra']['noise'] (4 of 4 values), and its loss is nan" in told
    first(tmp_path, Given(0.0))


def test_nan_that_the_guards_are_to_leave_out_is_no_error(tmp_path):
    first(tmp_path, Given(math.nan), guards={"nonfinite": "skip"})


def test_a_count_of_nothing_anywhere_is_refused(tmp_path):
    assert "no micro-batch of steps 1 to 1 has an item" in refused(tmp_path, Given(items=0), DataError)


def test_a_loader_is_no_dataset(tmp_path):
    told = refused(tmp_path, Given(loader=True), DataError)
    assert "dataset('train') returned a DataLoader; return its dataset, loader.dataset" in told


class Large(Ragged):
    """Its loss needs more memory than there is, from the first forward on."""

    def loss(self, model, batch):
        torch.empty(10**15, dtype=torch.uint8)
        return super().loss(model, batch)


def test_out_of_memory_in_the_first_forward_names_what_is_held(tmp_path):
    with pytest.raises(LockstepError, match="--micro-batch-size") as caught:
        first(tmp_path, Large())
    assert "not built yet" not in str(caught.value)
