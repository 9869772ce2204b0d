"""lockstep.from_trainer: schedulers that a script makes itself, against the Trainer's own training in float64."""

import contextlib
import dataclasses
import functools
import os

import pytest
import torch
import torch.distributed as dist
from ranks import run as on_ranks
from refusals import refuses
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import lockstep
from lockstep.errors import ConfigError, ResumeError

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
        found = self.head(self.body(x).tanh()).sum(-1)
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
    if make in (plateau, greedy):
        settings = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1, **settings}
    args = transformers.TrainingArguments(**arguments(folder, **settings))
    return kind(model, args, stacked, rows(), rows()[:8], optimizers=(made, make and make(made)))


def trained(folder, make, stop_at=0, engine="auto", devices=1, **more):
    """The losses of lockstep's steps, the weights after them, and (rate, betas) of each group in each step."""
    config, task = lockstep.from_trainer(trainer(folder, make, **more), devices)
    changes = {"exact": True, "stop_at": stop_at, "engine": engine, "report": False}
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


def same_groups(ours, theirs):
    """Rates are a base rate times a factor here, so that they differ in the last bit; momenta do not."""
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert [rate for rate, _ in own] == pytest.approx([rate for rate, _ in other], rel=1e-14), step
        assert [betas for _, betas in own] == [betas for _, betas in other], step


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


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.2, min_lr=[0.005, 0.0])


def greedy(optimizer):
    return transformers.optimization.GreedyLR(optimizer, factor=0.5, patience=1, min_lr=0.001, max_lr=1.0)


@pytest.mark.parametrize(
    "make",
    [one_cycle, cosine, in_steps, in_sequence, chained, by_group, plateau, greedy],
    ids=lambda make: make.__name__,
)
def test_scheduler_trains_as_under_the_trainer_and_resumes(tmp_path, make):
    theirs = trainer(tmp_path / "theirs", make)
    with watched_groups() as seen:
        theirs.train()
    losses, weights, groups = trained(tmp_path / "whole", make)
    logged = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    assert losses == pytest.approx(logged, rel=1e-6)
    same_groups(groups, seen)
    for name, tensor in theirs.model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-12, atol=1e-14)
    begun, _, _ = trained(tmp_path / "parts", make, stop_at=4)
    rest, resumed, _ = trained(tmp_path / "parts", make)
    assert begun + rest == losses
    assert all(torch.equal(weights[name], tensor) for name, tensor in resumed.items())
    assert len(set(map(tuple, groups))) > 2  # it does change them


def test_resume_with_another_scheduler_is_refused(tmp_path):
    trained(tmp_path, one_cycle, stop_at=4)
    higher = functools.partial(lr_scheduler.OneCycleLR, max_lr=[0.1, 0.4], total_steps=STEPS)
    with refuses(ResumeError, "OneCycleLR", 0.3, 0.4):
        trained(tmp_path, higher)
    with refuses(ResumeError, "OneCycleLR", "StepLR"):
        trained(tmp_path, in_steps)


def split(world, folder):
    """Weights after one cycle under two engines, and after a plateau."""
    world.leave()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    kinds = [("zero", one_cycle), ("fsdp", one_cycle), ("ddp", plateau)]
    found = [trained(folder / f"{engine}-{make.__name__}", make, 0, engine, 2) for engine, make in kinds]
    dist.destroy_process_group()  # accelerate's
    return [{name: tensor.tolist() for name, tensor in weights.items()} for _, weights, _ in found]


def test_two_ranks_have_the_bits_of_one(tmp_path):
    alone = [trained(tmp_path / make.__name__, make, devices=2)[1] for make in (one_cycle, plateau)]
    cycled, stopped = ({name: tensor.tolist() for name, tensor in weights.items()} for weights in alone)
    for weights in on_ranks(split, 2, tmp_path / "two", timeout=180.0):
        assert weights == [cycled, cycled, stopped]


class OwnCycle(transformers.Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = lr_scheduler.OneCycleLR(optimizer or self.optimizer, [0.1, 0.3], num_training_steps)
        return self.lr_scheduler


def test_subclass_scheduler_cycles_the_momentum_of_each_group(tmp_path):
    _, given, groups = trained(tmp_path / "given", one_cycle)
    _, weights, own_groups = trained(tmp_path / "own", None, kind=OwnCycle)
    same_groups(own_groups, groups)
    for name, tensor in given.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-12, atol=1e-14)


def test_script_keeps_its_scheduler_and_callbacks_evaluations(tmp_path):
    heard = []

    class Listening(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, **more):
            heard.append(state.global_step)

    def listened(folder):
        made = trainer(folder, plateau)
        made.add_callback(Listening())
        return made

    _, weights, _ = trained(tmp_path / "alone", plateau)
    made = listened(tmp_path / "heard")
    optimizer, scheduler = made.optimizer, made.lr_scheduler
    for _ in range(2):
        config, task = lockstep.from_trainer(made)
    with lockstep.Run(dataclasses.replace(config, exact=True), task) as run:
        for _ in run:
            pass
    assert heard == list(range(1, STEPS + 1))
    assert scheduler.last_epoch == 0
    assert scheduler.optimizer is optimizer
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.01]
    assert all(torch.equal(weights[name], tensor) for name, tensor in run.model.state_dict().items())


def test_schedulers_that_cannot_be_served_are_refused(tmp_path):
    def stepped(optimizer):
        made = chained(optimizer)
        optimizer._opt_called = True
        made.step()
        return made

    def of_another(optimizer):
        return lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 3)

    def too_short(optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS - 2)

    class OwnPlateau(transformers.Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            return plateau(optimizer)

    for make, more, *said in (
        (stepped, {}, "ChainedScheduler", "(1 times)"),
        (of_another, {}, "StepLR", "another optimizer"),
        (lambda optimizer: object(), {}, "a object", "lr_scheduler_type"),
        (plateau, {"metric_for_best_model": None}, "ReduceLROnPlateau", "metric_for_best_model"),
    ):
        with refuses(ConfigError, *said):
            trained(tmp_path / "a", make, **more)
    with refuses(ConfigError, "`create_scheduler` of OwnPlateau", "ReduceLROnPlateau"):
        trained(tmp_path / "a", None, kind=OwnPlateau)
    with refuses(ConfigError, f"total steps is {STEPS - 2}", f"{STEPS} steps"):
        trained(tmp_path / "a", too_short)
    assert not list((tmp_path / "a").iterdir())
