"""lockstep.from_trainer: schedulers that a script makes itself, against the Trainer's own training in float64."""

import contextlib
import dataclasses

import pytest
import torch
from refusals import refuses
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import lockstep
from lockstep.errors import ConfigError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from hf_trainers import arguments  # noqa: E402

STEPS = 7


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)
        self.double()

    def forward(self, x, labels):
        found = self.head(self.body(x).tanh()).squeeze(-1)
        return {"loss": (found - labels).square().mean(), "logits": found}


def rows():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [{"x": row, "labels": row.sum()} for row in x]


def stacked(samples):
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def trainer(folder, make, kind=transformers.Trainer, **more):
    """A Trainer with two groups of unlike base rates, and what `make` makes of their optimizer for a scheduler."""
    model = Regression()
    groups = [{"params": model.body.parameters(), "lr": 0.03}, {"params": model.head.parameters()}]
    made = torch.optim.AdamW(groups, lr=0.01)
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 3, **more}
    args = transformers.TrainingArguments(**arguments(folder, **settings))
    return kind(model, args, stacked, rows(), rows()[:8], optimizers=(made, make and make(made)))


def trained(folder, make, stop_at=0, engine="auto", **more):
    """The losses of lockstep's steps, the weights after them, and (rate, betas) of each group in each step."""
    config, task = lockstep.from_trainer(trainer(folder, make, **more))
    changes = {"exact": True, "stop_at": stop_at, "engine": engine}
    with watched_groups() as seen, lockstep.Run(dataclasses.replace(config, **changes), task) as run:
        losses = [step.loss for step in run]
    return losses, {name: whole(tensor) for name, tensor in run.model.state_dict().items()}, seen


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


@contextlib.contextmanager
def watched_groups():
    """Context manager: a list that each step of an optimizer adds its groups' (rate, betas) to."""
    seen = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: seen.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
    )
    try:
        yield seen
    finally:
        handle.remove()


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, [0.1, 0.3], total_steps=STEPS)


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, 5, eta_min=0.002)


def in_steps(optimizer):
    return lr_scheduler.StepLR(optimizer, 2, 0.3)


def in_sequence(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 4)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.8)]
    )


def by_group(optimizer):
    return lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1 / (1 + step)])


@pytest.mark.parametrize(
    "make", [one_cycle, cosine, in_steps, in_sequence, chained, by_group], ids=lambda make: make.__name__
)
def test_a_scheduler_trains_as_under_the_trainer_and_a_resume_has_its_bits(tmp_path, make):
    theirs = trainer(tmp_path / "theirs", make)
    with watched_groups() as seen:
        theirs.train()
    losses, weights, groups = trained(tmp_path / "whole", make)
    logged = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    assert losses == pytest.approx(logged, rel=1e-6)
    for step, (ours, wanted) in enumerate(zip(groups, seen, strict=True)):
        for (rate, betas), (other, others) in zip(ours, wanted, strict=True):
            assert rate == pytest.approx(other, rel=1e-14), step
            assert betas == others, step
    for name, tensor in theirs.model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-12, atol=1e-14)
    begun, _, _ = trained(tmp_path / "parts", make, stop_at=4)
    rest, resumed, _ = trained(tmp_path / "parts", make)
    assert begun + rest == losses
    assert all(torch.equal(weights[name], tensor) for name, tensor in resumed.items())
