"""A trial leaves no marks: what a loss keeps outside of tensors is as in a plain loop, to the bit."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.distributed.world import World
from lockstep.task import set_step
from lockstep.training.trial.trial_state import (
    describe_marks,
    differing_marks,
    marks_of,
    preserve_state,
    refusal_of_marks,
)

SIZE, STEPS = 16, 6


class InOrder:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def at(self, start, stop):
        return np.divmod(np.arange(start, stop), self.samples)


class Kept(lockstep.Task):
    """A classifier whose loss may keep something."""

    def order(self, samples, seed):
        return InOrder(samples)

    def optimizer(self, model, config):
        return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05, momentum=0.9)

    def build(self):
        return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return self.build().double()

    def dataset(self, split):
        if split != "train":
            return None
        draw = torch.Generator().manual_seed(3)
        rows = torch.randn(SIZE * STEPS, 6, generator=draw, dtype=torch.float64)
        return TensorDataset(rows, torch.randint(0, 5, (SIZE * STEPS,), generator=draw))


class Annealed(Kept):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + min(1.0, self.calls / 10) * (out**2).mean()


class Queue(Kept):
    def __init__(self):
        self.queue = torch.zeros(24, 5, dtype=torch.float64)

    def loss(self, model, batch):
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1]) + ((out[:, None] - self.queue) ** 2).mean()
        self.queue = torch.cat([self.queue[len(out) :], out.detach()])
        return loss


class Losses(Kept):
    """A list that grows, and a dict of running means."""

    def __init__(self):
        self.history, self.means = [], {}

    def loss(self, model, batch):
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.history.append(loss.detach())
        self.means["loss"] = 0.9 * self.means.get("loss", 0.0) + float(loss.detach())
        return loss * (1 + 0.1 * len(self.history)) / (1 + self.means["loss"])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.h = nn.Linear(12, 6), nn.Linear(6, 5), None

    def forward(self, x):
        h = self.h if self.h is not None and len(self.h) == len(x) else x.new_zeros(len(x), 6)
        self.h = torch.tanh(self.inner(torch.cat([x, h], 1)))
        self.h = self.h.detach() + 0 * self.h
        out = self.outer(self.h)
        self.h = self.h.detach()
        return out


class Hidden(Kept):
    def build(self):
        return Recurrent()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])


class Noisy(Kept):
    def __init__(self):
        self.torch, self.numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def loss(self, model, batch):
        noise = torch.randn(batch[0].shape, generator=self.torch, dtype=torch.float64)
        return F.cross_entropy(model(batch[0] + noise * self.numpy.random()), batch[1])


class Teacher(Kept):
    """A teacher that is made on the way, moved through `.data`."""

    teacher = None

    def loss(self, model, batch):
        if self.teacher is None:
            self.teacher = copy.deepcopy(model).requires_grad_(False)
        for mine, theirs in zip(self.teacher.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + ((out - self.teacher(batch[0])) ** 2).mean()


class Critic(Kept):
    """A critic with an optimizer, both made on the way, which the loss steps."""

    critic = None

    def loss(self, model, batch):
        out = model(batch[0])
        with torch.enable_grad():
            if self.critic is None:
                with torch.random.fork_rng():
                    torch.manual_seed(5)
                    self.critic = nn.Linear(5, 1).double()
                self.adam = torch.optim.Adam(self.critic.parameters(), lr=0.1)
                self.rates = torch.optim.lr_scheduler.StepLR(self.adam, 2)
            self.adam.zero_grad()
            ((self.critic(out.detach()) - 1) ** 2).mean().backward()
            self.adam.step()
            self.rates.step()
        return F.cross_entropy(out, batch[1]) + self.critic(out).mean()


class Spectral(Kept):
    def build(self):
        model = super().build()
        nn.utils.parametrizations.spectral_norm(model[0])
        return model

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])


def settings(folder, **changes):
    given = {"batch_size": SIZE, "micro_batch_size": SIZE, "max_steps": STEPS, "log_freq": 1, "lr": 0.05}
    return config(folder, **given | {"optim": {"schedule": "constant", "warmup_steps": 0, "clip": 0.0}} | changes)


def plain(kind, steps=STEPS):
    """The weights and the losses of a plain loop."""
    task = kind()
    model = task.model()
    optimizer, losses = task.optimizer(model, None), []
    rows, labels = task.dataset("train").tensors
    for step in range(steps):
        part = slice(step * SIZE, (step + 1) * SIZE)
        loss = task.loss(model, (rows[part], labels[part]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [each.detach() for each in model.parameters()], losses


def same(mine, theirs):
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("kind", [Annealed, Queue, Losses, Hidden, Noisy, Teacher, Critic, Spectral])
def test_one_process_trains_as_a_plain_loop(tmp_path, kind):
    task = kind()
    with lockstep.Run(settings(tmp_path), task) as training:
        losses = [step.loss for step in training]
    weights, theirs = plain(kind)
    assert losses == theirs
    assert same([each.detach() for each in training.model.parameters()], weights)


def test_a_task_of_another_class_is_restored_too(tmp_path):
    class Other:
        def __init__(self):
            self.task, self.calls = Annealed(), 0

        def model(self):
            return self.task.model()

        def dataset(self, split):
            return self.task.dataset(split)

        def order(self, samples, seed):
            return InOrder(samples)

        def loss(self, model, batch):
            self.calls += 1
            return F.cross_entropy(model(batch[0]), batch[1])

    task = Other()
    lockstep.train(settings(tmp_path), task)
    assert task.calls == STEPS


def test_a_loader_is_not_moved(tmp_path):
    """A generator that the task's own loader draws from goes on where it was."""

    class Replayed(Kept):
        def __init__(self):
            self.extra = DataLoader(torch.arange(8.0), 2, shuffle=True, generator=torch.Generator().manual_seed(1))
            self.orders = []

        def loss(self, model, batch):
            self.orders.append(next(iter(self.extra)).tolist())
            return F.cross_entropy(model(batch[0]), batch[1])

    task = Replayed()
    lockstep.train(settings(tmp_path), task)
    other = Replayed()
    plain_orders = [next(iter(other.extra)).tolist() for _ in range(STEPS)]
    assert task.orders == plain_orders


# --- task.step


class ByStep(Kept):
    """KL annealing by the run's own step; the loss is a mean."""

    def loss(self, model, batch):
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + min(1.0, self.step / 4) * (out**2).mean()


class ByStepElsewhere:
    """The same in an object of no class of lockstep's."""

    def __init__(self):
        self.task = ByStep()
        self.model, self.dataset, self.order = self.task.model, self.task.dataset, self.task.order
        self.optimizer = self.task.optimizer

    def loss(self, model, batch):
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + min(1.0, self.step / 4) * (out**2).mean()

    def model(self):
        raise NotImplementedError

    def dataset(self, split):
        raise NotImplementedError


def by_step(steps=STEPS):
    task = ByStep()
    model = task.model()
    optimizer = task.optimizer(model, None)
    rows, labels = task.dataset("train").tensors
    for step in range(steps):
        part = slice(step * SIZE, (step + 1) * SIZE)
        out = model(rows[part])
        loss = F.cross_entropy(out, labels[part]) + min(1.0, step / 4) * (out**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def weights_of(world, folder, kind, changes):
    with lockstep.Run(settings(folder, **changes), kind(), world) as training:
        for _ in training:
            pass
        return [each.tolist() for each in training.model.parameters()]


@pytest.mark.parametrize("kind", [ByStep, ByStepElsewhere])
def test_a_warm_up_by_the_step_is_that_of_a_plain_loop(tmp_path, kind):
    task = kind()
    for name in ("a", "b"):  # an object that is trained twice begins again
        with lockstep.Run(settings(tmp_path, experiment_name=name), task) as training:
            for step in training:
                assert task.step == step.global_step - 1
        assert same([each.detach() for each in training.model.parameters()], by_step())


@pytest.mark.parametrize("changes", [{"micro_batch_size": 4}, {"micro_batch_size": 8, "exact": True}])
def test_a_warm_up_by_the_step_on_two_ranks_and_after_a_resume(tmp_path, changes):
    expected = by_step()
    for part in run(weights_of, 2, tmp_path / "whole", ByStep, changes):
        for mine, theirs in zip(part, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-14)
    run(weights_of, 2, tmp_path / "parts", ByStep, {**changes, "stop_at": 3, "ckpt_freq": 3})
    for part in run(weights_of, 1, tmp_path / "parts", ByStep, changes):
        for mine, theirs in zip(part, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-14)


def test_a_tasks_own_step_stays():
    class Method(Kept):
        def step(self):
            return "mine"

        loss = Annealed.loss

    class Attribute(Kept):
        def __init__(self):
            self.step = 0.5

    for task in (Method(), Attribute()):
        before = task.step
        set_step(task, 3)
        assert task.step == before
    assert Kept.step == ByStep().step == 0


# --- what a loss leaves behind


class Remembering(Kept):
    """What is remembered, beside what is not."""

    def __init__(self):
        self.calls, self.queue, self.means = 0, torch.zeros(4, 5, dtype=torch.float64), {"loss": 0.0}
        self.noise, self.table, self.last, self.best = torch.Generator().manual_seed(0), None, None, 0.0

    def build(self):
        model = nn.Sequential(Recurrent(), nn.BatchNorm1d(5), nn.Dropout(0.1))
        model[0].register_buffer("mean", torch.zeros(5))
        return model

    def loss(self, model, batch):
        out = model(batch[0])
        model[0].mean = 0.9 * model[0].mean + 0.1 * out.detach().mean(0)
        self.calls += 1
        self.queue[self.calls % 4] = out.detach()[0]
        self.means["loss"] = 0.9 * self.means["loss"] + float(out.detach().mean())
        torch.rand((), generator=self.noise)
        if self.table is None:
            self.table = torch.arange(5)
        self.last = batch[1]
        return F.cross_entropy(out, batch[1])


REMEMBERED = ["model.0.h", "model.0.mean", "task.calls", "task.means", "task.noise", "task.queue"]


@contextlib.contextmanager
def other_weights(model):
    before = [each.detach().clone() for each in model.parameters()]
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.01)
        yield
        for each, value in zip(model.parameters(), before, strict=True):
            each.copy_(value)


def marks_on(task, start=0, others=False):
    model = task.model().train()
    rows, labels = (each[start : start + SIZE] for each in task.dataset("train").tensors)

    def call():
        torch.manual_seed(0)
        task.loss(model, (rows, labels))

    with preserve_state(model, task, torch.device("cpu"), training=True):
        return marks_of(model, task, call, (lambda: other_weights(model)) if others else None)


def test_what_a_loss_remembers_is_named_unlike_what_it_notes():
    task = Remembering()
    found = marks_on(task)
    assert sorted(found) == REMEMBERED
    assert (task.calls, task.table) == (0, None)  # the trial itself left none
    assert marks_on(Teacher()) == {}  # a copy of the model does not move before the model does
    assert {"task.teacher.0.weight", "task.teacher.2.bias"} <= set(marks_on(Teacher(), others=True))
    assert sorted(marks_on(Remembering(), others=True)) == REMEMBERED
    assert "task.critic.weight" in marks_on(Critic())
    assert marks_on(ByStep()) == {}


def differing(world, kind):
    return differing_marks(world.gather(marks_on(kind(), world.rank * SIZE)))


def test_the_values_of_the_ranks_are_compared():
    alike = ["task.calls", "task.noise"]
    assert run(differing, 2, Remembering) == [[name for name in REMEMBERED if name not in alike]] * 2
    assert run(differing, 2, Annealed) == [[], []]
    assert differing(World(), Remembering) == []


def test_messages_name_the_attributes_and_the_way_out():
    line = describe_marks(["task.queue", "model.h"], 8, 2)
    assert line.startswith("`loss` changes model.h and task.queue and runs 8 times a step, on each rank with samples")
    assert "on each rank" not in describe_marks(["task.queue"], 8, 1)
    for error in (refusal_of_marks([f"task.a{n}" for n in range(6)], exact=True), refusal_of_marks(["a"], exact=False)):
        assert "\n" not in str(error)
        assert all(word in str(error) for word in ("`step_loss`", "`after_update`", "`sample_state`", "`task.step`"))
    assert "--exact does not work with task.a0, task.a1, task.a2, task.a3 and 2 more" in str(
        refusal_of_marks([f"task.a{n}" for n in range(6)], exact=True)
    )


class Centred(Kept):
    """DINO's centre, moved in `step_loss`, which every rank computes alike."""

    def __init__(self):
        self.centre = torch.zeros(5, dtype=torch.float64)

    def state_dict(self):
        return {"centre": self.centre}

    def outputs(self, model, batch):
        return model(batch[0]), F.one_hot(batch[1], 5)

    def step_loss(self, outputs):
        out, labels = outputs
        loss = -((out - self.centre).log_softmax(1) * labels).sum(1).mean()
        if torch.is_grad_enabled():
            self.centre.mul_(0.8).add_(out.detach().mean(0), alpha=0.2)
        return loss


def test_step_loss_writes_are_allowed_with_exact_as_in_a_loop(tmp_path):
    task = Centred()
    model = task.model()
    optimizer = task.optimizer(model, None)
    rows, labels = task.dataset("train").tensors
    for step in range(STEPS):
        part = slice(step * SIZE, (step + 1) * SIZE)
        loss = task.step_loss(task.outputs(model, (rows[part], labels[part])))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = [each.detach() for each in model.parameters()]
    changes = {"micro_batch_size": 4, "exact": True}
    one, two = (run(weights_of, ranks, tmp_path / str(ranks), Centred, changes) for ranks in (1, 2))
    assert one[0] == two[0] == two[1]
    for mine, theirs in zip(one[0], expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-14)
