"""The proof of a loss is repeated later in a run, and sees before step 1 what large weights change."""

from dataclasses import replace

import pytest
import torch
from ranks import RankError, run
from small_runs import config
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import lockstep
from lockstep import checkpoint
from lockstep.distributed.world import World
from lockstep.errors import LockstepError, UsageError


class Classes(lockstep.Task):
    """A mean over vectors of four classes."""

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double()

    def dataset(self, split):
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(48, 6, generator=draw, dtype=torch.float64)
        return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)) if split == "train" else None

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])


class Coupled(Classes):
    """A mean until the fourth step, whose samples depend on each other from then on."""

    first = 3

    def loss(self, model, batch):
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + (out.mean(0).square().sum() if self.step >= self.first else 0.0)


class Freezing(Coupled):
    """A mean until the third step."""

    first = 2


class Hinge(Classes):
    """A mean over the samples with a loss: with small weights over all of them."""

    def model(self):
        model = super().model()
        with torch.no_grad():
            model[2].weight.mul_(0.5)
        return model

    def loss(self, model, batch):
        each = F.relu(1.0 - model(batch[0]).gather(1, batch[1][:, None])[:, 0])
        return each[each > 0].mean() if bool((each > 0).any()) else each.sum()


def settings(folder, first):
    return config(folder, batch_size=8, micro_batch_size=4, max_steps=6, guards={"loss_check": first}, report=False)


def test_changed_loss_ends_the_run_with_the_step_before_saved(tmp_path):
    with pytest.raises(LockstepError, match=r"step 5: .*no longer a mean.*step 4 is saved"):
        lockstep.train(settings(tmp_path, 5), Coupled())
    assert checkpoint.list_steps(tmp_path / "r")[-1] == 4


def test_zero_turns_the_check_off(tmp_path):
    lockstep.train(settings(tmp_path, 0), Coupled())
    assert checkpoint.list_steps(tmp_path / "r")[-1] == 6


def test_a_check_leaves_the_bits_of_the_run(tmp_path):
    weights = []
    for first in (0, 2):
        with lockstep.Run(settings(tmp_path / str(first), first), Classes()) as made:
            for _ in made:
                pass
            weights.append([p.detach().clone() for p in made.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_mean_over_hard_samples_is_refused_before_any_is_easy(tmp_path):
    with pytest.raises(UsageError, match="neither a sum nor a mean"):
        lockstep.train(settings(tmp_path, 0), Hinge())


class Failing(torch.autograd.Function):
    """An operation without a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no gradient")


class Fragile(Classes):
    """A mean whose backward fails at the halves of the later check, which have other sizes than the run's."""

    def loss(self, model, batch):
        out = model(batch[0])
        return super().loss(lambda x: out if len(x) == 4 or self.step < 2 else Failing.apply(out), batch)


def trained(world, folder, kind, first, engine="fsdp"):
    """The weights of a run that freezes a layer after two steps; the later check begins at the step `first`."""
    made_config = replace(settings(folder, first), engine=engine)
    with lockstep.Run(made_config, kind(), world) as made:
        for step in made:
            made.model[0].requires_grad_(step.global_step < 2)
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in made.model.parameters()]
        return [each.tolist() for each in weights]


@pytest.mark.parametrize("kind", [Classes, Fragile])
def test_fsdp_check_leaves_the_run_whether_it_passes_or_fails(kind, tmp_path):
    wanted = trained(World(), tmp_path / "one", kind, 0, "single")
    for found in run(trained, 2, tmp_path / "two", kind, 3):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-12)


def test_fsdp_check_after_a_trained_set_change_weighs_the_loss(tmp_path):
    with pytest.raises(RankError, match=r"step 3: .*no longer a mean"):
        run(trained, 2, tmp_path, Freezing, 3)
