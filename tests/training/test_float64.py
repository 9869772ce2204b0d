"""A model in double precision is trained as it is, and loaded as its run wrote it."""

import pytest
import small_runs
import torch
from ranks import run
from refusals import names
from torch import nn

import lockstep


class Doubles(lockstep.Task):
    """Model and data in double precision, as in physics."""

    dtype = torch.float64

    def model(self):
        return nn.Linear(4, 1).to(self.dtype)

    def dataset(self, split):
        rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))

    def loss(self, model, batch):
        rows, wanted = (each.to(next(model.parameters()).dtype) for each in batch)
        return nn.functional.mse_loss(model(rows), wanted)

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def schedule(self, step, steps):
        return 1.0

    def order(self, samples, seed):
        return range(samples)


def settings(folder, **changes):
    values = {"batch_size": 16, "micro_batch_size": 0, "max_steps": 4, "eval_freq": 0, "report": False, "clip": 0.0}
    values["optim"] = {"clip": values.pop("clip")}
    return small_runs.config(folder, **{"precision": "auto", "ckpt_freq": 2} | values | changes)


def by_hand(seed):
    """The weights of a plain loop over four batches."""
    torch.manual_seed(seed)
    task = Doubles()
    model, rows = task.model(), task.dataset("train")
    optimizer = task.optimizer(model, None)
    for start in range(0, 64, 16):
        optimizer.zero_grad()
        task.loss(model, rows[start : start + 16]).backward()
        optimizer.step()
    return model.state_dict()


def train_and_resume(world, folder):
    for stop in (2, 0):
        lockstep.train(settings(folder, stop_at=stop), Doubles(), world)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_double_model_is_trained_as_it_is(tmp_path, ranks):
    run(train_and_resume, ranks, tmp_path)
    found = lockstep.load(tmp_path / "r", Doubles(), "last").state_dict()
    for name, wanted in by_hand(settings(tmp_path).seed).items():
        assert found[name].dtype is torch.float64
        torch.testing.assert_close(found[name], wanted, rtol=1e-14, atol=1e-14)


class Singles(Doubles):
    dtype = torch.float32


class Mixed(Doubles):
    """One float64 buffer in a float32 model."""

    def model(self):
        model = nn.Linear(4, 1)
        model.register_buffer("time", torch.tensor(1 / 3, dtype=torch.float64))
        model.register_buffer("table", torch.ones(3), persistent=False)
        return model


@pytest.mark.parametrize(
    ("task", "precision", "dtype"),
    [
        (Doubles, "float32", torch.float32),
        (Singles, "float64", torch.float64),
        (Singles, "bf16-true", torch.bfloat16),
        (Mixed, "auto", torch.float32),
        (Mixed, "float64", torch.float64),
    ],
)
def test_load_takes_what_any_precision_wrote(task, precision, dtype, tmp_path, capfd):
    result = lockstep.train(settings(tmp_path, precision=precision, max_steps=1), task())
    model = lockstep.load(result.folder, task(), "last")
    assert {each.dtype for each in (*model.parameters(), *model.buffers())} == {dtype}
    assert model(torch.ones(2, 4, dtype=dtype)).dtype is dtype
    narrowed = {Doubles: "weight", Mixed: "time"}.get(task) if dtype is torch.float32 else None
    err = capfd.readouterr().err
    assert not narrowed or names(err, narrowed, "float64", "--precision float64")
