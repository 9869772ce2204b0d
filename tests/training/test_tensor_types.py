"""Tensors of any layout, dtype and class that a user makes train as in plain PyTorch, or are refused."""

import numpy as np
import pytest
import torch
import torchmetrics
from ranks import run
from refusals import refuses
from small_runs import config
from torch import nn

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.export import export
from lockstep.engines.registry import engine as make_engine
from lockstep.errors import ConfigError, LockstepError

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Marked(torch.Tensor):
    """A subclass of a user."""


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=dtype)


ODD = {
    "transposed": lambda: draw(3, 4).t(),
    "one_row": lambda: draw(5, 4).t()[:1],
    "every_third": lambda: draw(10)[::3],
    "channels_last": lambda: draw(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "expanded": lambda: draw(3, 1).expand(3, 4),
    "scalar": draw,
    "empty": lambda: draw(0, 3),
    "flags": lambda: torch.tensor([True, False]),
    "uint16": lambda: torch.arange(3).to(torch.uint16),
    "float8": lambda: draw(4).to(torch.float8_e4m3fn),
    "complex64": lambda: draw(3, dtype=torch.complex64),
    "conjugated": lambda: draw(3, dtype=torch.complex128).conj(),
    "negated": lambda: draw(3, dtype=torch.complex128).conj().imag,
    "leaf": lambda: draw(3).requires_grad_(),
    "marked": lambda: draw(3).as_subclass(Marked),
}
OTHERS = {
    "sparse": lambda: torch.eye(3, dtype=torch.float64).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([draw(2), draw(3)], layout=torch.jagged),
}
WRITTEN = ("transposed", "one_row", "scalar", "flags", "uint16", "float8", "complex64", "conjugated")


class Net(nn.Module):
    """A Linear, a 0-dim, an empty and a transposed parameter; each training forward writes odd buffers."""

    def __init__(self, engine="single"):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.none = nn.Parameter(draw(0, 3))
        turned = draw(2, 3).t()
        self.turned = nn.Parameter(turned.contiguous() if engine == "fsdp" else turned)  # which refuses the other
        for name, make in ODD.items():
            self.register_buffer(name, make())
        self.register_buffer("sparse", OTHERS["sparse"](), persistent=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for name in WRITTEN:
                    buffer = getattr(self, name)
                    wide = torch.complex128 if buffer.is_complex() else torch.float64
                    buffer.copy_(buffer.to(wide) * -1 if name == "float8" else buffer.to(wide) + 1)
        return torch.sparse.mm(self.sparse, self.inner(x).t()).t() @ self.turned * self.scale + self.none.sum()


class Sum(torchmetrics.Metric):
    """A sum, and a list of odd tensors."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("odd", [], dist_reduce_fx="cat")

    def update(self, value):
        self.total = self.total + value
        self.odd += [make() for make in ODD.values()]

    def compute(self):
        return self.total


class Momentum(torch.optim.SGD):
    """SGD whose states hold odd tensors too."""

    def step(self, closure=None):
        loss = super().step(closure)
        for state in self.state.values():
            state.update({name: make().detach() for name, make in ODD.items() if name not in state})
        return loss


class Odd(lockstep.Task):
    def __init__(self, engine="single"):
        self.engine = engine
        self.kept = {name: make() for name, make in {**ODD, **OTHERS}.items()}
        self.own = {name: make().detach() for name, make in ODD.items() if name != "expanded"}

    def model(self):
        return Net(self.engine)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(ROWS)

    def collate(self, samples):
        rows = torch.stack([sample[0] for sample in samples])
        return {"x": rows.t().contiguous().t(), **{name: make() for name, make in {**ODD, **OTHERS}.items()}, "n": 1}

    def count(self, batch):
        return np.int64(len(batch["x"]))

    def loss(self, model, batch):
        return model(batch["x"]).square().sum() / len(batch["x"])

    def metrics(self, model, batch):
        value, count = model(batch["x"]).square().sum(), len(batch["x"])
        metric = Sum()
        metric.update(value)
        return {
            "metric": metric,
            "numpy": (np.float64(value.item()), np.int64(count)),
            "array": (np.array([value.item()]), np.array(count)),
            "expanded": (value.expand(1), torch.tensor(count).to(torch.uint16).expand(1, 1)),
            "negated": (-torch.complex(value, value).conj().imag, count),
            "marked": (value.as_subclass(Marked), torch.tensor(count, requires_grad=False)),
        }

    def optimizer(self, model, config):
        return Momentum(model.parameters(), lr=0.05, momentum=0.9)

    def schedule(self, step, steps):
        return 1.0

    def state_dict(self):
        return self.own


def plain(steps):
    task, model = Odd(), Net()
    optimizer = task.optimizer(model, None)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(model, {"x": ROWS}).backward()
        optimizer.step()
    return model


def stopped(world, settings):
    lockstep.train(settings, Odd(settings.engine), world)


def finished(world, settings):
    return lockstep.train(settings, Odd(settings.engine), world).evaluation


@pytest.mark.parametrize("engine", ["ddp", "zero", "fsdp"])
def test_odd_tensors_train_stop_and_resume_as_in_plain_pytorch(tmp_path, engine):
    settings = {"batch_size": 8, "micro_batch_size": 0, "max_steps": 4, "ckpt_freq": 2, "eval_freq": 2}
    settings |= {"optim": {"clip": 0.0}, "engine": engine}
    run(stopped, 2, config(tmp_path, **settings, stop_at=2))
    evaluation = run(finished, 2, config(tmp_path, **settings))[0]
    wanted = plain(4)
    value = float(wanted.eval()(ROWS).detach().square().sum())
    assert evaluation.metrics == pytest.approx(
        {"metric": value} | {name: value / 8 for name in evaluation.metrics if name != "metric"}
    )
    assert len(evaluation.metrics) == 6
    found = lockstep.load(tmp_path / "r", Odd(), "last")
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(dict(found.named_parameters())[name], parameter, rtol=1e-12, atol=1e-12)
    for name, buffer in wanted.named_buffers():
        wide = torch.complex128 if buffer.is_complex() else torch.float64  # --precision float64 widens some
        values = (each.detach().to_dense().to(wide) for each in (getattr(found, name), buffer))
        torch.testing.assert_close(*values, rtol=1e-6, atol=0, msg=name)
    export(checkpoint.newest(tmp_path / "r", say=print), tmp_path / "out", "torch")


class Refused(Odd):
    """One odd value at one place that cannot work."""

    def __init__(self, place, make):
        super().__init__()
        self.place, self.make = place, make

    def model(self):
        made = nn.Linear(6, 2, dtype=torch.float64)
        made.register_buffer("odd", self.make() if self.place == "buffer" else None)
        if self.place == "parameter":
            made.odd = nn.Parameter(self.make())
        return made

    def loss(self, model, batch):
        value = super().loss(model, batch)
        return self.make(value) if self.place == "loss" else value

    def metrics(self, model, batch):
        return {"odd": (self.make(), 1)} if self.place == "metric" else {}

    def state_dict(self):
        return {"odd": self.make()} if self.place == "own" else {}


@pytest.mark.parametrize(
    ("place", "make", "named"),
    [
        *(("buffer", make, "'odd'") for make in OTHERS.values()),
        ("buffer", lambda: draw(3, 4).float().to_mkldnn(), "'odd'"),
        ("own", OTHERS["sparse"], "'task/odd'"),
        ("own", OTHERS["nested"], "'task/odd'"),
        *(("metric", make, "'odd'") for make in (OTHERS["sparse"], OTHERS["nested"], lambda: draw(3), lambda: draw(0))),
        *(("metric", make, "'odd'") for make in (lambda: np.complex128(1j), lambda: 1j, lambda: "a")),
        ("parameter", lambda: draw(3, 1).expand(3, 4), "'odd'"),
        ("parameter", lambda: draw(3, dtype=torch.complex128).conj(), "'odd'"),
        ("loss", lambda value: value.reshape(1).to_sparse(), "`loss`"),
        ("loss", lambda value: value.to(torch.complex128), "`loss`"),
        ("loss", lambda value: value.to(torch.float8_e4m3fn), "`loss`"),
        ("loss", lambda value: np.float64(value.item()), "`loss`"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_is_written(tmp_path, place, make, named):
    with pytest.raises(LockstepError) as caught:
        lockstep.train(config(tmp_path, batch_size=8, micro_batch_size=0, max_steps=2), Refused(place, make))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "r").exists()


class Shared(nn.Module):
    """Two names for the same memory."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        values = self.layer.weight.data
        if kind == "buffer":
            self.register_buffer("row", values[0])
        elif kind == "list":
            self.kept = [self.layer.weight]
        elif kind == "gaps":
            self.other = nn.Parameter(draw(9, dtype=torch.float32)[::3])
        else:
            self.other = nn.Parameter({"parameter": values.view(9), "scalar": values[1, 1]}[kind])


def share(world):
    def make(name, kind):
        make_engine(name, Shared(kind), lambda model: torch.optim.SGD(model.parameters(), 0.1), world)

    for name, kind, *named in (
        *(("fsdp", kind, "layer.weight", "other") for kind in ("parameter", "scalar")),
        *(("fsdp", "buffer", "layer.weight", "row"), ("fsdp", "list", "kept", "layer.weight")),
        *(("zero", kind, "layer.weight", "other") for kind in ("parameter", "scalar")),
        ("zero", "gaps", "other"),
    ):
        with refuses(ConfigError, f"--engine {name}", *named):
            make(name, kind)
    for kind in ("buffer", "list"):
        make("zero", kind)
    for kind in ("parameter", "scalar", "buffer", "list", "gaps"):
        make("ddp", kind)


def test_memory_that_an_engine_cannot_share_is_refused_by_name():
    run(share, 2)
