"""The rate finder: what it suggests trains well, it is the same on any ranks, and it leaves nothing behind."""

import math
import sys

import numpy as np
import pytest
import torch
from ranks import run
from small_runs import config, mark
from torch.nn import functional as F
from toys import Ragged

import lockstep
from lockstep.data.sampler import Shuffled
from lockstep.errors import ConfigError
from lockstep.training.tuning import STEPS, find_lr, rate_at, suggest_rate

PLAIN = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}


class Line(lockstep.Task):
    """A regression whose loss plain SGD must bring down."""

    reduction = "sum"

    def __init__(self, labels=1.0):
        self._labels = labels

    def model(self):
        return torch.nn.Linear(4, 1, bias=False).double()

    def dataset(self, split):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(64, 4, dtype=torch.float64, generator=generator)
        return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True) * self._labels + 0.1)

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


class Counting(Line):
    """A tensor of its own counts the forwards, which `--exact` refuses."""

    def __init__(self):
        super().__init__()
        self.counted = torch.zeros(1)

    def loss(self, model, batch):
        self.counted += 1
        return super().loss(model, batch)

    def state_dict(self):
        return {"counted": self.counted}


def settings(folder, **changes):
    return config(folder, **{"exact": True, "optim": PLAIN} | changes)


def found_on(world, folder):
    found = find_lr(settings(folder), Line(), world)
    return found.rates, found.losses, found.smoothed, found.lr


def test_the_rates_grow_by_the_same_factor():
    rates = [rate_at(step) for step in range(STEPS)]
    assert (rates[0], rates[-1]) == (1e-7, pytest.approx(10.0, rel=1e-12))
    assert np.diff(np.log(rates)) == pytest.approx(math.log(1e8) / (STEPS - 1))


def test_it_is_plain_training_with_these_rates_until_it_diverges(tmp_path):
    task = Line()
    found = find_lr(settings(tmp_path, exact=False), task)
    order = Shuffled(64, 0)
    data = task.dataset("train")
    inputs, labels = data.tensors
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step, (rate, loss) in enumerate(zip(found.rates, found.losses, strict=True)):
        picked = order.at(8 * step, 8 * step + 8)[1]
        value = F.mse_loss(model(inputs[picked]), labels[picked])
        assert value.item() == pytest.approx(loss, rel=1e-9)
        optimizer.zero_grad()
        value.backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    assert 60 < len(found.losses) < STEPS  # a rate of 10 has no chance
    assert sum(found.losses[-5:]) > sum(found.losses[:5]) > 10 * min(found.losses)


def test_what_it_suggests_trains_better_than_much_less_and_much_more(tmp_path):
    suggested = find_lr(settings(tmp_path), Line()).lr
    losses = {}
    for times in (0.01, 1.0, 100.0):
        each = settings(tmp_path / str(times), lr=suggested * times)
        losses[times] = lockstep.train(each, Line()).evaluation.loss
    assert losses[1.0] < 0.6 * losses[0.01]
    assert not losses[100.0] < 2 * losses[1.0]


def test_the_same_bits_on_two_ranks_and_nothing_is_left_of_it(tmp_path):
    alone = found_on(None, tmp_path)
    assert run(found_on, 2, tmp_path) == [alone] * 2
    assert not list(tmp_path.iterdir())
    task = Line()
    lockstep.train(settings(tmp_path / "plain"), Line())
    find_lr(settings(tmp_path / "after", max_steps=3, stop_at=2, eval_freq="1epoch"), task)
    lockstep.train(settings(tmp_path / "after"), task)
    assert mark(tmp_path / "after") == mark(tmp_path / "plain")
    assert find_lr(settings(tmp_path / "after"), Line()).losses == alone[1]  # what lies there has no say
    counting = Counting()
    find_lr(settings(tmp_path / "counting", exact=False), counting)
    assert counting.counted == 0


def test_a_loss_that_never_falls_gets_no_rate(tmp_path):
    found = find_lr(settings(tmp_path, guards={"nonfinite": "skip"}), Line(labels=math.nan))
    assert (len(found.losses), found.lr) == (1, None)
    assert str(found).endswith("so none is suggested: check the data, the labels and the loss")

    class Still(Ragged):
        def loss(self, model, batch):
            return super().loss(model, batch).detach() + 0.0 * sum(p.sum() for p in model.parameters())

    found = find_lr(settings(tmp_path), Still())
    assert found.lr is None
    assert "falls at no rate from 1e-07 to 1e+01" in str(found)


@pytest.mark.parametrize("seed", range(20))
def test_a_scattered_curve_is_read_by_its_shape(seed):
    """Flat, falling around the 60th step, then rising: the place is found whatever the scatter; noise has none."""
    random, steps = np.random.default_rng(seed), np.arange(STEPS)
    rates = [rate_at(step) for step in range(STEPS)]
    shape = 2.0 - 1.5 / (1 + np.exp(-(steps - 60) / 3)) + 4.0 / (1 + np.exp(-(steps - 92) / 2))
    lr = suggest_rate(rates, (shape + 0.1 * random.standard_normal(STEPS)).tolist())[1]
    assert rates[54] <= lr <= rates[66]
    lr = suggest_rate(rates, (shape + 0.5 * random.standard_normal(STEPS)).tolist())[1]
    assert rates[50] <= lr <= rates[75]  # three times less than the fall
    rising = 2.0 + 4.0 / (1 + np.exp(-(steps - 92) / 2))
    assert suggest_rate(rates, (rising + 0.001 * random.standard_normal(STEPS)).tolist())[1] is None
    assert suggest_rate(rates, [math.nan] * STEPS) == ([], None)


def test_a_rate_of_zero_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--lr is 0, .*above 0"):
        find_lr(settings(tmp_path, lr=0.0), Line())


def test_the_picture(tmp_path, monkeypatch):
    found = find_lr(settings(tmp_path), Line())
    found.save(tmp_path / "rates.svg")
    text = (tmp_path / "rates.svg").read_text()
    assert "<svg" in text
    with pytest.raises(ConfigError, match=r"rates.unknown: .*; name it .svg"):
        found.save(tmp_path / "rates.unknown")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"matplotlib: install the extra plot of torch-lockstep"):
        found.save(tmp_path / "rates.svg")
