"""Tensors that a loss would train and the model does not have are refused; what a loss makes for itself is not."""

import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn
from torch.nn import functional as F
from toys import Partial

import lockstep
from lockstep.errors import ConfigError
from lockstep.guards.loss_parameters import LossParameters


def rows():
    draw = torch.Generator().manual_seed(1)
    return {"x": torch.randn(4, 3, generator=draw, dtype=torch.float64), "y": torch.arange(4) % 2}


class Plain(Partial):
    """The base of all; each has one forward."""

    def model(self):
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def dataset(self, split):
        return [{name: value[index % 4] for name, value in rows().items()} for index in range(24)]

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])


class LearnedWeights(Plain):
    """The uncertainty of two losses, by which they are weighted."""

    def __init__(self):
        self.log_variances = nn.Parameter(torch.zeros(2))

    def loss(self, model, batch):
        out = model(batch["x"])
        losses = torch.stack([F.cross_entropy(out, batch["y"]), out.square().mean()])
        return ((-self.log_variances).exp() * losses + self.log_variances).sum()


class Centres(Plain):
    """A head that belongs to the loss, as that of ArcFace does."""

    def __init__(self):
        self.head = nn.Linear(2, 2, bias=False).double()

    def loss(self, model, batch):
        return F.cross_entropy(self.head(F.normalize(model(batch["x"]))), batch["y"])


class Listed(Plain):
    def __init__(self):
        self.scales = [torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)]

    def loss(self, model, batch):
        return super().loss(model, batch) * self.scales[1]


class Named(Plain):
    def __init__(self):
        self.scales = {"a": torch.ones((), requires_grad=True)}

    def loss(self, model, batch):
        return super().loss(model, batch) * self.scales["a"]


OUTSIDE = torch.ones(7, requires_grad=True)


class Outside(Plain):
    def loss(self, model, batch):
        return super().loss(model, batch) * OUTSIDE.mean()


REFUSED = {
    LearnedWeights: "task.log_variances",
    Centres: "task.head.weight",
    Listed: "task.scales[1]",
    Named: "task.scales['a']",
    Outside: "a tensor of shape [7]",
}


class Frozen(Centres):
    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)


class Detached(LearnedWeights):
    def loss(self, model, batch):
        return Plain.loss(self, model, batch) * self.log_variances.detach().exp().sum()


class Irm(Plain):
    """Invariant risk: the gradient with respect to a factor of 1 that the loss makes."""

    def loss(self, model, batch):
        scale = torch.ones((), requires_grad=True)
        loss = F.cross_entropy(model(batch["x"]) * scale, batch["y"])
        (slope,) = torch.autograd.grad(loss, scale, create_graph=True)
        return loss + slope.square()


class Adversarial(Plain):
    """The inputs are moved along their own gradient."""

    def loss(self, model, batch):
        x = batch["x"].clone().requires_grad_(True)
        loss = F.cross_entropy(model(x), batch["y"])
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss + F.cross_entropy(model(x + 0.1 * slope.sign()), batch["y"])


class AdversarialInPlace(Plain):
    """The same with the batch's own tensor, which outlives the loss."""

    def loss(self, model, batch):
        x = batch["x"].requires_grad_(True)
        loss = F.cross_entropy(model(x), batch["y"])
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum() + 0.0 * x.sum()


class Weights(Plain):
    """A term of the model's own weights beside its outputs."""

    def loss(self, model, batch):
        return super().loss(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


ACCEPTED = (Plain, Frozen, Detached, Irm, Adversarial, AdversarialInPlace, Weights)


def check(task):
    """Look at one loss as the passes of a step do."""
    model, batch = task.model(), rows()
    parameters = LossParameters(model, task)
    with parameters.forward():
        loss = task.loss(model, batch)
    parameters.look(loss, batch)
    loss.backward()
    del loss
    parameters.refuse()


@pytest.mark.parametrize("kind", [Centres, Plain])
def test_compiled_model_is_searched_and_not_compiled_twice(kind):
    task, compilations = kind(), []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Plain().model()
            self.compile(backend=backend)

        def forward(self, x):
            return self.body(x)

    task.model = Compiled
    if kind is Plain:
        check(task)
    else:
        with pytest.raises(ConfigError, match="task.head.weight"):
            check(task)
    assert len(compilations) == 1


@pytest.mark.parametrize("kind", REFUSED)
def test_what_only_the_loss_would_train_is_named(kind):
    with pytest.raises(ConfigError) as error:
        check(kind())
    text = str(error.value)
    assert f"uses {REFUSED[kind]}, which" in text
    assert "model()" in text
    assert "\n" not in text


@pytest.mark.parametrize("kind", ACCEPTED)
def test_what_a_loss_makes_or_the_model_has_is_accepted(kind):
    check(kind())


def test_many_are_shown_in_part():
    task = Centres()
    task.head = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))).double()
    with pytest.raises(ConfigError, match="and 3 more"):
        check(task)


def trained(world, folder, engine, kinds):
    """Lines that refuse a run, or "" of one that ended."""
    lines = []
    for kind in kinds:
        changes = {"experiment_name": kind.__name__, "engine": engine, "micro_batch_size": 0, "max_steps": 2}
        try:
            lockstep.train(config(folder, **changes), kind(), world)
            lines.append("")
        except ConfigError as error:
            lines.append(str(error))
    return lines


def test_a_run_on_one_device_refuses_and_accepts_the_same(tmp_path):
    kinds = [*REFUSED, *ACCEPTED]
    for kind, line in zip(kinds, trained(lockstep.World(), tmp_path, "single", kinds), strict=True):
        assert REFUSED[kind] in line if kind in REFUSED else not line


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_ranks_refuse_and_accept_the_same(tmp_path, engine):
    kinds = [LearnedWeights, Centres, Plain, Frozen]
    for found in run(trained, 2, tmp_path, engine, kinds):
        assert "task.log_variances" in found[0]
        assert "task.head.weight" in found[1]
        assert found[2:] == ["", ""]
