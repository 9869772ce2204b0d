"""Complex parameters and buffers train as plain PyTorch trains them, on any number of ranks, or are refused by name."""

import pytest
import torch
from ranks import run
from support import alone, build, digest, fit, whole
from toys import train

import lockstep
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.optim.optimizers import adamw
from lockstep.optim.schedule import factor
from lockstep.transforms import prepare

CPU = torch.device("cpu")


class Fourier(torch.nn.Module):
    """A spectral layer between two Linears, over a sequence that a table of unit complex numbers has turned."""

    def __init__(self, trained):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
        weight = torch.randn(5, dtype=torch.complex64)
        if trained:
            self.weight = torch.nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)
        self.register_buffer("rotary", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)

    def forward(self, x):
        x = self.first(x)
        turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * self.rotary).flatten(-2)
        return self.last(torch.fft.irfft(torch.fft.rfft(turned) * self.weight, n=8))


class Waves(lockstep.Task):
    """The task: squares of what `Fourier` makes of eight numbers a sample."""

    def __init__(self, precision="float64", trained=True):
        self.precision, self.trained = precision, trained

    def model(self):
        made = Fourier(self.trained)
        return prepare(made, precision=self.precision, compile_model=False, device=CPU)

    def dataset(self, split):
        rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=getattr(torch, self.precision))
        return torch.utils.data.TensorDataset(rows)

    def collate(self, samples):
        return torch.stack([sample[0] for sample in samples])

    def count(self, batch):
        return len(batch)

    def loss(self, model, batch):
        return model(batch).square().sum()


def plainly(precision, steps=4, size=8):
    """(norms, weights) of plain PyTorch over the same samples."""
    torch.manual_seed(0)
    model, task = Fourier(True), Waves(precision)
    if precision == "float64":
        for part in model.modules():
            for name, p in part.named_parameters(recurse=False):
                setattr(part, name, torch.nn.Parameter(p.to(torch.complex128 if p.is_complex() else torch.float64)))
        model.rotary = model.rotary.to(torch.complex128)
    optimizer = adamw(model, lr=0.01, fused=False)
    torch.manual_seed(0)
    _, batches = build(World(), task, "single", size=size, micro=size, count=steps)
    norms = []
    for number, (_, micro) in zip(range(steps), batches.from_step(0), strict=False):
        (model(micro[0].data).square().sum() / size).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * factor(number, steps, 2, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def trained(world, task, name, settings):
    """(norms, model's state as lists, digest of the whole state)."""
    made, batches = build(world, task, name, **settings)
    _, norms = train(world, made, batches, task)
    state = {
        name: whole(tensor, world).tolist() for name, tensor in made.state_dict().items() if name.startswith("model/")
    }
    return norms, state, digest(made, world)


def told(world, task, name, settings):
    try:
        return trained(world, task, name, settings)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_a_complex_parameter_and_table_train_as_in_plain_pytorch(precision, tolerance):
    norms, weights = plainly(precision)
    task = Waves(precision)
    here = trained(World(), task, "single", {"size": 8, "micro": 4})
    ddp, exact = run(cases, 2, task, [("ddp", {"micro": 4}), ("ddp", {"micro": 1, "exact": True})])[0]
    for found in (here, ddp, exact):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(norms), rtol=tolerance, atol=tolerance)
        assert found[1].keys() == {f"model/{name}" for name in weights}
        for name, weight in weights.items():
            values = torch.tensor(found[1][f"model/{name}"], dtype=weight.dtype)
            torch.testing.assert_close(values, weight, rtol=tolerance, atol=tolerance, msg=name)
    moved = weights["weight"] - plainly(precision, steps=0)[1]["weight"]
    assert moved.imag[1:4].abs().max() > 1e-2  # the first and last frequency of a real signal have none


def cases(world, task, settings):
    return [told(world, task, name, given) for name, given in settings]


def test_complex_gradients_are_exchanged_whole_in_half_precision():
    norms, weights = plainly("float32")
    for half in ("bf16", "fp16"):
        found = run(cases, 2, Waves("float32"), [("ddp", {"micro": 4, "compression": half})])[0][0]
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(norms), rtol=0.02, atol=0.02)
        values = torch.tensor(found[1]["model/weight"])
        torch.testing.assert_close(values, weights["weight"], rtol=0.01, atol=0.01)


def fitted(world, task, settings):
    return fit(world, task, "ddp", **settings)


@pytest.mark.parametrize("micro", [1, 2])  # 12 micro-batches: three are added in order first
def test_exact_sums_of_complex_gradients_have_the_same_bits(micro):
    settings = {"size": 12, "micro": micro, "exact": True}
    wanted = alone(Waves("float32"), **settings)
    assert run(fitted, 2, Waves("float32"), settings)[0] == wanted


def test_engines_that_cannot_train_complex_parameters_say_so():
    fsdp, zero = run(cases, 2, Waves("float32"), [("fsdp", {}), ("zero", {})])[0]
    assert fsdp.startswith("--engine fsdp cannot train the complex parameter weight: ")
    assert zero.startswith("--engine zero: the parameters are complex64 and float32, and it splits those of one dtype")


def test_a_complex_buffer_trains_under_every_engine():
    task = Waves("float64", trained=False)
    wanted = trained(World(), task, "single", {"micro": 4})[0]
    for found in run(cases, 2, task, [(name, {"micro": 4}) for name in ("ddp", "zero", "fsdp")])[0]:
        assert not isinstance(found, str), found
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted), rtol=1e-12, atol=1e-12)


def test_a_checkpointed_state_of_complex_parameters_goes_on():
    settings = {"micro": 4}
    made, batches = build(World(), Waves(), "single", **settings)
    train(World(), made, batches, Waves(), stop=2)
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    train(World(), made, batches, Waves(), start=2)
    other, batches = build(World(), Waves(), "single", **settings)
    other.state_dict()
    other.load_state_dict(state)
    train(World(), other, batches, Waves(), start=2)
    assert digest(other, World()) == digest(made, World())


def test_the_fused_kernel_is_left_where_a_parameter_is_complex():
    model = Fourier(True)
    assert not any(group["fused"] for group in adamw(model, lr=0.1).param_groups)
    assert all(group["fused"] for group in adamw(Fourier(False), lr=0.1).param_groups)
