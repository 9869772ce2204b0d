"""Whether a loss is a sum or a mean is found before step 1: a run then is the plain full-batch loop, or is refused."""

import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep import checkpoint
from lockstep.config.schema import default_micro_batch_size
from lockstep.data.sampler import Sequential
from lockstep.errors import UsageError
from lockstep.training.inference import InferenceRequest, evaluate_run
from lockstep.verify.wrappers import TaskWrapper

WEIGHTS = torch.tensor([10.0, 1.0, 1.0, 0.1], dtype=torch.float64)
STEPS, RATE = 3, 0.1
SGD = {
    "name": "sgd",
    "schedule": "constant",
    "warmup_steps": 0,
    "clip": 0.0,
    "weight_decay": 0.0,
    "momentum": 0.0,
}


class Vectors(lockstep.Task):
    """Four classes of vectors. README's first example: nothing is declared, the loss is torch's own."""

    def model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        x = torch.randn(48 if split == "train" else 21, 8, generator=generator, dtype=torch.float64)
        return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())

    def order(self, samples, seed):
        return Sequential(samples)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])


class Summed(Vectors):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class Weighted(Vectors):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS)


class DeclaredWeighted(Weighted):
    reduction = "mean"


class WeightedCount(Weighted):
    """The right form: the items are the weights."""

    def count(self, batch):
        return float(WEIGHTS[batch[1]].sum())


class GradientPenalty(Vectors):
    """Takes a gradient of its own in `loss`, and so in evaluations."""

    def loss(self, model, batch):
        x = batch[0].clone().requires_grad_(True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + 0.5 * slope.pow(2).sum(1).mean()


class InBatchNegatives(Vectors):
    def loss(self, model, batch):
        x = batch[0]
        a, b = (F.normalize(model(part), dim=1) for part in (x, x + 0.3 * x.roll(1, 1)))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(x)))


class SummedNegatives(InBatchNegatives):
    reduction = "sum"

    def loss(self, model, batch):
        return super().loss(model, batch) * len(batch[0])


class Dice(Vectors):
    def loss(self, model, batch):
        p, t = model(batch[0]).softmax(1), F.one_hot(batch[1], 4).double()
        return 1 - (2 * (p * t).sum(0) / (p.sum(0) + t.sum(0))).mean()


class Correlation(Vectors):
    reduction = "mean"

    def loss(self, model, batch):
        return 1 - torch.corrcoef(torch.stack([model(batch[0])[:, 0], batch[0].sum(1)]))[0, 1]


class Variance(Vectors):
    def loss(self, model, batch):
        z = model(batch[0])
        shared = torch.cov(z.T)
        return F.relu(1 - z.std(0)).mean() + (shared - torch.diag(shared.diag())).pow(2).mean()


class PenaltyInTheSum(Summed):
    def loss(self, model, batch):
        return super().loss(model, batch) + 0.01 * sum(p.abs().sum() for p in model.parameters())


class PenaltyInTheMean(Vectors):
    def loss(self, model, batch):
        return super().loss(model, batch) + 0.01 * sum(p.abs().sum() for p in model.parameters())


class Tokens(Vectors):
    """A token mean, as libraries of language models return it, with the tokens as its items."""

    def model(self):
        return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))

    def dataset(self, split):
        tokens = torch.randint(0, 50, (48, 9), generator=torch.Generator().manual_seed(3))
        return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def count(self, batch):
        return batch[1].numel()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class SummedTokens(Tokens):
    def loss(self, model, batch):
        return super().loss(model, batch) * batch[1].numel()


class SampleMeanOfTokens(Tokens):
    """A mean over samples of token means, where samples differ in tokens and `count` counts these."""

    def count(self, batch):
        return int((batch[1] < 40).sum())

    def loss(self, model, batch):
        kept = batch[1] < 40
        each = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="none").view(kept.shape)
        return ((each * kept).sum(1) / kept.sum(1)).mean()


class MeanBesideSum(Summed):
    def evaluate(self, model, batch):
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]), {"acc": ((out.argmax(1) == batch[1]).sum(), len(batch[1]))}


class SumBesideMean(Vectors):
    def evaluate(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), {}


class MeanMetric(Vectors):
    def metrics(self, model, batch):
        return {"acc": ((model(batch[0]).argmax(1) == batch[1]).double().mean(), len(batch[1]))}


class DeclaredSumOfMean(Vectors):
    reduction = "sum"


class DeclaredMeanOfSum(Summed):
    reduction = "mean"


RIGHT = [Vectors, Summed, GradientPenalty, PenaltyInTheMean, Tokens, SummedTokens, WeightedCount]
REFUSED = [
    (Weighted, "count"),
    (DeclaredWeighted, "count"),
    (InBatchNegatives, "step_loss"),
    (SummedNegatives, "step_loss"),
    (Dice, "step_loss"),
    (Correlation, "micro-batch"),
    (Variance, "loss"),
    (PenaltyInTheSum, "penalty"),
    (SampleMeanOfTokens, "count"),
    (MeanBesideSum, "evaluate"),
    (SumBesideMean, "evaluate"),
    (MeanMetric, "acc"),
    (DeclaredSumOfMean, "mean"),
    (DeclaredMeanOfSum, "sum"),
]


def trained(world, folder, task, **changes):
    """The parameters after a few steps of a run; a step is cut as with --exact."""
    settings = {"max_steps": STEPS, "batch_size": 16, "lr": RATE, "optim": SGD, "report": False}
    settings["micro_batch_size"] = default_micro_batch_size(changes.get("batch_size", 16))
    made = lockstep.Run(config(folder, **settings | changes), task, world)
    made()
    return [p.detach().clone() for p in made.model.parameters()]


def plain(task, batch, weigh=1.0):
    """The same by one graph over each whole batch."""
    torch.manual_seed(0)
    model = task.model().double()
    data, optimizer = task.dataset("train"), torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        rows = task.collate([data[index % len(data)] for index in range(step * batch, (step + 1) * batch)])
        optimizer.zero_grad()
        (task.loss(model, rows) * weigh).backward()
        optimizer.step()
    return list(model.parameters())


def assert_equal(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("batch", [15, 16])
@pytest.mark.parametrize("kind", RIGHT)
def test_a_sum_and_a_mean_train_as_the_plain_loop(tmp_path, kind, batch):
    task = kind()
    assert_equal(trained(None, tmp_path, task, batch_size=batch, eval_freq=2), plain(kind(), batch))
    assert task.reduction == ("total" if kind in (Summed, SummedTokens) else "mean")


@pytest.mark.parametrize("batch", [15, 16])
@pytest.mark.parametrize(("kind", "named"), REFUSED)
def test_what_is_neither_is_refused_before_step_1(tmp_path, kind, named, batch):
    with pytest.raises(UsageError, match=named) as caught:
        trained(None, tmp_path, kind(), batch_size=batch)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def on_two(world, folder):
    """Each healthy task's parameters on both ranks, exact and not; and who refuses the others."""
    found = {}
    for kind in (Vectors, Tokens, GradientPenalty):
        for exact in (True, False):
            name = f"{kind.__name__}-{exact}"
            task = kind()
            parameters = trained(world, folder / name, task, batch_size=15, exact=exact, eval_freq=2)
            found[name] = [[p.tolist() for p in parameters], task.reduction]
    for kind in (Weighted, InBatchNegatives):
        with pytest.raises(UsageError):
            trained(world, folder / kind.__name__, kind())
    return found


def test_ranks_find_the_same_and_train_as_the_plain_loop(tmp_path):
    first, second = run(on_two, 2, tmp_path)
    assert first == second
    for kind in (Vectors, Tokens, GradientPenalty):
        wanted = plain(kind(), 15)
        for exact in (True, False):
            parameters, reduction = first[f"{kind.__name__}-{exact}"]
            assert reduction == "mean"
            assert_equal([torch.tensor(p, dtype=torch.float64) for p in parameters], wanted)
    assert not (tmp_path / "Weighted" / "r").exists()


def test_one_micro_batch_a_step_needs_no_reduction(tmp_path):
    for kind in (Weighted, InBatchNegatives, Dice):
        task = kind()
        folder = tmp_path / kind.__name__
        assert_equal(trained(None, folder, task, micro_batch_size=16), plain(kind(), 16))
        assert task.reduction == "whole"
        # The next run of the same object, in another cut, looks for itself.
        with pytest.raises(UsageError):
            trained(None, folder / "again", task)


class DeclaredMicroBatch(InBatchNegatives):
    reduction = "micro-batch"


def test_non_additive_loss_takes_the_whole_batch_by_default(tmp_path, capsys):
    whole = trained(None, tmp_path / "whole", DeclaredMicroBatch(), micro_batch_size=0)
    assert_equal(whole, plain(InBatchNegatives(), 16))
    trained(None, tmp_path / "parts", DeclaredMicroBatch(), micro_batch_size=4)  # not checked
    assert "micro-batch" in capsys.readouterr().err


def test_a_resume_knows_what_was_found(tmp_path, monkeypatch):
    straight = trained(None, tmp_path / "straight", GradientPenalty(), eval_freq=1)
    trained(None, tmp_path / "parts", GradientPenalty(), stop_at=2)
    state = checkpoint.read_state(checkpoint.newest(tmp_path / "parts" / "r", say=print))
    assert (state["reduction"], state["evaluation_graph"]) == ("mean", True)
    monkeypatch.setattr("lockstep.training.start.build.check_task", None)  # it is not tried again
    assert_equal(trained(None, tmp_path / "parts", GradientPenalty(), eval_freq=1), straight)


def test_evaluation_of_a_loss_with_gradients_is_of_the_whole_set(tmp_path):
    run_ = lockstep.Run(config(tmp_path, max_steps=1, eval_freq=1), GradientPenalty())
    found = run_().evaluation.loss
    task = GradientPenalty()
    data = task.dataset("evaluation")
    wanted = task.loss(run_.model.eval(), task.collate([data[index] for index in range(len(data))]))
    assert found == pytest.approx(wanted.item())
    again = evaluate_run(InferenceRequest(str(tmp_path / "r"), task=f"{__file__}:GradientPenalty"))
    assert again.loss == pytest.approx(found)


class Noise(Vectors):
    """Draws in `loss` in eval mode too, as a variational autoencoder does."""

    def __init__(self, summed, share=0.05):
        self.summed, self.share = summed, share

    def loss(self, model, batch):
        out = model(batch[0] + self.share * torch.randn_like(batch[0]))
        return F.cross_entropy(out, batch[1], reduction="sum" if self.summed else "mean")


class Shuffled(Vectors):
    """A permutation of the batch, which cannot be cut."""

    def loss(self, model, batch):
        order = torch.randperm(len(batch[0]))
        return F.cross_entropy(model(0.7 * batch[0] + 0.3 * batch[0][order]), batch[1])


class DeclaredShuffled(Shuffled):
    reduction = "mean"


def test_a_loss_that_draws_is_compared_exactly(tmp_path):
    for summed in (True, False):
        task = Noise(summed)
        trained(None, tmp_path / str(summed), task)
        assert task.reduction == ("total" if summed else "mean")
    with pytest.raises(UsageError, match=r"randperm cannot be cut.*declare reduction = 'sum' or 'mean'"):
        trained(None, tmp_path / "shuffled", Shuffled())
    trained(None, tmp_path / "declared", DeclaredShuffled())


class NoisyBatches(Vectors):
    """An augmentation in the collate: the halves are rows of the collated whole."""

    def __init__(self, weighted=False):
        self.weighted = weighted

    def collate(self, samples):
        x, y = super().collate(samples)
        return x + 0.3 * torch.randn_like(x), y

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS if self.weighted else None)


class NoisySamples(Vectors):
    """A data set that draws anew at each access, from a generator of its own."""

    def dataset(self, split):
        data, generator = super().dataset(split), torch.Generator().manual_seed(3)

        class Drawn(torch.utils.data.Dataset):
            def __len__(self):
                return len(data)

            def __getitem__(self, index):
                x, y = data[index]
                return x + 0.3 * torch.randn(8, generator=generator, dtype=torch.float64), y

        return Drawn()


def test_random_data_are_cut_by_rows(tmp_path):
    for task in (NoisyBatches(), NoisySamples()):
        trained(None, tmp_path / type(task).__name__, task)
        assert task.reduction == "mean"
    with pytest.raises(UsageError, match="count"):
        trained(None, tmp_path / "weighted", NoisyBatches(weighted=True))


class Router(Vectors):
    """A mean, and beside it a little that is of the whole micro-batch."""

    def loss(self, model, batch):
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.05 * out.softmax(1).mean(0).pow(2).sum()


def test_a_small_part_of_the_whole_is_refused(tmp_path):
    with pytest.raises(UsageError, match="step_loss"):
        trained(None, tmp_path, Router(), batch_size=32)


class Fixed(Vectors):
    """A dataset of so many samples, and a loss that is always 0 where `zero`."""

    def __init__(self, samples, zero=False):
        self.samples, self.zero = samples, zero

    def dataset(self, split):
        data = super().dataset("train")
        return torch.utils.data.Subset(data, range(self.samples)) if split == "train" else None

    def loss(self, model, batch):
        return super().loss(model, batch) * (not self.zero)


def test_what_cannot_be_told_asks_for_the_reduction(tmp_path):
    with pytest.raises(UsageError, match=r"cannot be halved.*reduction"):
        trained(None, tmp_path / "one", Fixed(1), batch_size=2, micro_batch_size=1)
    with pytest.raises(UsageError, match=r"gradient is zero.*reduction"):
        trained(None, tmp_path / "zero", Fixed(16, zero=True))
    assert not (tmp_path / "zero").exists()


class NeedsMany(Vectors):
    """A loss that fails on fewer than six samples: shown by places as large as the micro-batch."""

    def loss(self, model, batch):
        assert len(batch[0]) >= 6
        return super().loss(model, batch)


def test_a_loss_that_needs_many_samples_is_tried_with_them(tmp_path):
    task = NeedsMany()
    trained(None, tmp_path / "many", task, batch_size=24, micro_batch_size=12)
    assert task.reduction == "mean"
    with pytest.raises(UsageError, match=r"AssertionError.*reduction"):
        trained(None, tmp_path / "few", NeedsMany(), batch_size=16, micro_batch_size=8)


class Gathered(Vectors):
    """A collective in `loss`, where it trains, as contrastive losses have it."""

    def loss(self, model, batch):
        out = model(batch[0])
        if model.training:
            with torch.no_grad():
                torch.distributed.all_reduce(out.sum())
        return F.cross_entropy(out, batch[1])


def collective_in_loss(world, folder):
    with pytest.raises(UsageError, match="step_loss"):
        trained(world, folder / "exact", Gathered(), exact=True)
    with pytest.raises(UsageError, match="step_loss"):
        trained(world, folder / "verified", TaskWrapper(Gathered()), engine="ddp")
    return [trained(world, folder / "ddp", Gathered(), engine="ddp")[0].sum().item()]


def test_collective_in_the_loss_is_refused_under_exact(tmp_path):
    first, second = run(collective_in_loss, 2, tmp_path)
    assert first == second


class Lazy(Vectors):
    def model(self):
        return nn.Sequential(nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(4))


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_a_lazy_module_is_one_line(tmp_path, engine):
    with pytest.raises(UsageError, match="0.weight"):
        trained(None, tmp_path, Lazy(), engine=engine)
    assert list(tmp_path.iterdir()) == []


class Valueless(Vectors):
    def model(self):
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(8, 4))


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_a_parameter_without_values_is_one_line(tmp_path, engine):
    with pytest.raises(UsageError, match=r"'0.weight'.*to_empty"):
        trained(None, tmp_path, Valueless(), engine=engine)
    assert list(tmp_path.iterdir()) == []


class Beyond(Vectors):
    def order(self, samples, seed):
        class Far(Sequential):
            def at(self, start, stop):
                epochs, places = super().at(start, stop)
                return epochs, places - 1

        return Far(samples)


def test_an_order_beyond_the_dataset_is_refused(tmp_path):
    with pytest.raises(UsageError, match="order"):
        trained(None, tmp_path, Beyond())
    assert list(tmp_path.iterdir()) == []
