"""A checkpoint has what the body of its step wrote: a stop and resume at any step gives the undisturbed run's bits."""

import signal
import types

import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep import checkpoint
from lockstep.config.schema import Optim
from lockstep.distributed.world import World
from lockstep.hooks import Hooks

GROUPS, STEPS = 3, 6


class Domains(lockstep.Task):
    """Weights of domains, moved once a step by their losses (group DRO)."""

    reduction = "sum"

    def __init__(self):
        self.weights = torch.full((GROUPS,), 1 / GROUPS, dtype=torch.float64)

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return nn.Linear(8, 4).double()

    def dataset(self, split):
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        samples = torch.utils.data.TensorDataset(rows, rows.argmax(1) % 4, torch.arange(16) % GROUPS)
        return samples if split == "train" or self.evaluates else None

    evaluates = False

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(self, model, batch):
        rows, labels, groups = batch
        losses = F.cross_entropy(model(rows), labels, reduction="none")
        means = {f"g{k}": (losses[groups == k].sum().detach(), int((groups == k).sum())) for k in range(GROUPS)}
        return (losses * self.weights[groups] * GROUPS).sum(), means

    def move(self, numbers):
        moved = self.weights * torch.exp(0.5 * torch.tensor([float(numbers[f"g{k}"]) for k in range(GROUPS)]).double())
        self.weights = moved / moved.sum()  # another tensor, as one writes it


def plainly():
    task = Domains()
    model, batch = task.model(), task.dataset("train").tensors
    optimizer = task.optimizer(model, None)
    for _ in range(STEPS):
        loss, means = task.loss(model, batch)
        optimizer.zero_grad()
        (loss / 16).backward()
        optimizer.step()
        task.move({name: total / count for name, (total, count) in means.items()})
    return model.weight.tolist(), task.weights.tolist()


def trained(world, folder, stops=(0,), signalled=0, **changes):
    """Weights of model and domains after starts that end at these steps, and after SIGTERM in a body."""
    for stop in stops:
        task = Domains()
        task.evaluates = bool(changes.get("eval_freq"))
        settings = {
            "batch_size": 16,
            "micro_batch_size": 4,
            "max_steps": STEPS,
            "ckpt_freq": 0,
            "exact": True,
        } | changes
        settings |= changes | {"optim": Optim(clip=0.0, schedule="constant", warmup_steps=0)}
        with lockstep.Run(config(folder, **settings, stop_at=stop), task, world) as running:
            for step in running:
                if step.global_step == signalled:
                    signal.raise_signal(signal.SIGTERM)
                task.move(step.numbers)
        signalled = 0
    return running.model.weight.tolist(), task.weights.tolist()


def test_a_resume_at_any_step_is_the_undisturbed_run(tmp_path):
    whole = trained(World(), tmp_path / "whole")
    for found, wanted in zip(whole, plainly(), strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-12, atol=1e-12)
    assert trained(World(), tmp_path / "stops", (1, 2, 3, 4, 5, 0)) == whole
    assert trained(World(), tmp_path / "evaluated", (2, 4, 0), eval_freq=2, ckpt_freq=2) == whole
    for step in (1, 3):
        assert trained(World(), tmp_path / f"term{step}", (0, 0), signalled=step) == whole
    for found in run(trained, 2, tmp_path / "two", (3, 0)):
        assert found == whole


def test_a_checkpoint_of_the_middle_has_what_its_body_wrote(tmp_path):
    weights = {}
    task = Domains()
    optim = Optim(clip=0.0, schedule="constant", warmup_steps=0)
    with lockstep.Run(config(tmp_path, batch_size=16, max_steps=STEPS, ckpt_freq=2, optim=optim), task) as running:
        for step in running:
            task.move(step.numbers)
            weights[step.global_step] = task.weights.tolist()
    for done in (2, 4, 6):
        stored = {"task/weights": torch.zeros(GROUPS, dtype=torch.float64)}
        checkpoint.load(checkpoint.path_of(tmp_path / "r", done), stored, World())
        assert stored["task/weights"].tolist() == weights[done]


class Forgetful(Domains):
    """The same in a plain attribute, and a hidden state that `loss` writes."""

    state_dict, load_state_dict = lockstep.Task.state_dict, lockstep.Task.load_state_dict

    def loss(self, model, batch):
        self.weights = 0.9 * self.weights + 0.1 * self.weights.flip(0) + 0.01
        return super().loss(model, batch)


class Kept(Forgetful):
    """Checkpoints have both under other names."""

    def __init__(self):
        super().__init__()
        self.memory = types.SimpleNamespace(rows=torch.zeros(2, dtype=torch.float64))

    def state_dict(self):
        return {"moving": self.weights, "queue": self.memory.rows}

    def load_state_dict(self, state):
        self.weights, self.memory.rows = state["moving"], state["queue"]

    def loss(self, model, batch):
        self.memory.rows.add_(1)
        return super().loss(model, batch)


@pytest.mark.parametrize("stop", [3, 0])
def test_what_no_checkpoint_has_is_named(tmp_path, capsys, stop):
    optim = Optim(clip=0.0)
    for end in dict.fromkeys([stop, 0]):
        made = config(tmp_path, batch_size=16, micro_batch_size=0, max_steps=STEPS, optim=optim, stop_at=end)
        lockstep.train(made, Forgetful())
        said = capsys.readouterr().err
        assert said.count("task.weights") == 1
        assert "state_dict" in said
    settings = {"batch_size": 16, "micro_batch_size": 0, "optim": optim, "max_steps": 2}
    for kind in (Domains, Kept):
        lockstep.train(config(tmp_path, experiment_name=kind.__name__, **settings), kind())
        assert "state_dict" not in capsys.readouterr().err


class Moving(Hooks):
    """A teacher follows once a step."""

    def __init__(self, task):
        self.task = task

    def after_update(self):
        with torch.no_grad():
            self.task.teacher.lerp_(self.task.built.weight, 0.1)


class Taught(Domains):
    """The teacher and the centre of a step are in `step_loss` and `after_update`, as docs/state.md shows them."""

    def __init__(self):
        super().__init__()
        self.hooks, self.teacher = Moving(self), torch.zeros(4, 8, dtype=torch.float64)

    def state_dict(self):
        return {"teacher": self.teacher}

    load_state_dict = lockstep.Task.load_state_dict

    def model(self):
        self.built = super().model()
        return self.built

    loss = lockstep.Task.loss

    def outputs(self, model, batch):
        return model(batch[0]), batch[0] @ self.teacher.T

    def step_loss(self, outputs):
        mine, taught = outputs
        return (mine - taught).square().mean() + mine.square().mean()


def taught(world, folder, stops, **changes):
    for stop in stops:
        settings = {"batch_size": 16, "max_steps": STEPS, "optim": Optim(clip=0.0), **changes}
        task = Taught()
        running = lockstep.Run(config(folder, **settings, stop_at=stop), task, world)
        running()
    return running.model.weight.tolist(), task.teacher.tolist()


def test_a_teacher_that_a_hook_moves_goes_on_with_the_run(tmp_path):
    whole = taught(World(), tmp_path / "whole", (0,), exact=True)
    assert taught(World(), tmp_path / "cut", (2, 3, 0), exact=True) == whole
