"""BatchNorm over the samples of all ranks: equal to torch's own BatchNorm on one device with the whole batch."""

import contextlib
import copy
import dataclasses
import io
import json
import warnings

import pytest
import torch
from ranks import run
from torch import nn
from torch.nn import functional as F
from toys import taken, train

import lockstep
from lockstep.config.sections import Guards, Optim
from lockstep.data.batches import Batches, StepPlan
from lockstep.data.sampler import Shuffled
from lockstep.engines.registry import engine
from lockstep.errors import LockstepError
from lockstep.optim.schedule import factor
from lockstep.training.start.weights import load_model, select_checkpoint
from lockstep.transforms import checkpoint_blocks, compile_blocks, precision
from lockstep.transforms.batchnorm import Synchronised, empty_slot, resolve_batchnorm, synchronise

DOUBLE = {"rtol": 1e-12, "atol": 1e-12}


def fail(line):
    raise AssertionError(line)


def layer_of(kind, dtype, **settings):
    """A layer of five channels whose affine part is not the identity."""
    layer = kind(5, **settings).to(dtype)
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2.0, 5))
            layer.bias.copy_(torch.linspace(-1.0, 1.0, 5))
    return nn.Sequential(layer)


SHAPES = {nn.BatchNorm1d: (5,), nn.BatchNorm2d: (5, 3, 2), nn.BatchNorm3d: (5, 2, 3, 2)}


def inputs_of(kind, step, dtype, samples=11, mean=3.0):
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(samples, *SHAPES[kind], generator=generator, dtype=torch.float64)
    return (values * (1 + step) + mean).to(dtype), torch.randn(values.shape, generator=generator).to(dtype)


def cut_of(world, samples):
    """The first and past-the-last sample of this rank: ragged, the last rank has fewest."""
    size = -(-samples // world.size)
    return slice(world.rank * size, min((world.rank + 1) * size, samples))


def pass_through(model, inputs, gradients, own):
    """Output and gradients of one training forward, and the running statistics after it."""
    inputs = inputs[own].clone().requires_grad_()
    model.zero_grad()
    output = model(inputs)
    (output * gradients[own]).sum().backward()
    affine = [parameter.grad for parameter in model.parameters()]
    return output.detach(), inputs.grad, affine, model


def fold_in(model):
    """What the engine does at a step's end (engines/buffers.py), for one forward."""
    layer = model[0]
    if layer.mean is None:
        return
    runs, share = int(layer.runs), layer.share
    layer.num_batches_tracked += runs
    decay = (1.0 - runs / int(layer.num_batches_tracked)) if share is None else (1.0 - share) ** runs
    scale = 1.0 / int(layer.num_batches_tracked) if share is None else 1.0
    layer.running_mean.mul_(decay).add_(layer.mean, alpha=scale)
    layer.running_var.mul_(decay).add_(layer.var, alpha=scale)
    for record in (layer.mean, layer.var, layer.runs):
        record.zero_()


LAYERS = [
    (nn.BatchNorm1d, {}),
    (nn.BatchNorm2d, {"momentum": None}),
    (nn.BatchNorm2d, {"affine": False, "momentum": 0.3}),
    (nn.BatchNorm3d, {"track_running_stats": False}),
]


def compare_layers(world, layers, dtype, within, mean):
    for kind, settings in layers:
        plain = layer_of(kind, dtype, **settings)
        model = synchronise(copy.deepcopy(plain), fail)
        assert isinstance(model[0], Synchronised)
        assert isinstance(model[0], kind)
        assert list(model.state_dict()) == list(plain.state_dict())
        if model[0].running_mean is not None:
            model[0].bind()
        for step in range(3):
            inputs, gradients = inputs_of(kind, step, dtype, mean=mean)
            own = cut_of(world, len(inputs))
            output, of_inputs, affine, _ = pass_through(model, inputs, gradients, own)
            for gradient in affine:
                torch.distributed.all_reduce(gradient)
            wanted = pass_through(plain, inputs, gradients, slice(None))
            torch.testing.assert_close(output, wanted[0][own], **within)
            torch.testing.assert_close(of_inputs, wanted[1][own], **within)
            torch.testing.assert_close(affine, wanted[2], **within)
            fold_in(model)
            torch.testing.assert_close(model.state_dict(), plain.state_dict(), **within)
        evaluated = model.eval()(inputs[own])
        torch.testing.assert_close(evaluated, plain.eval()(inputs[own]), **within)
    return True


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_kind_of_layer_is_torchs_own_on_the_whole_batch(ranks):
    assert run(compare_layers, ranks, LAYERS, torch.float64, DOUBLE, 3.0) == [True] * ranks


def test_large_mean_is_as_exact_in_float32_as_in_torchs_own():
    within = {"rtol": 1e-3, "atol": 2e-3}  # float32 has steps of 5e-4 at 5e3
    assert run(compare_layers, 3, LAYERS[:1], torch.float32, within, 5e3) == [True] * 3


def compare_with_an_empty_slot(world, both_empty):
    """Rank 1 repeats samples of rank 0 that count nothing; then every rank does."""
    plain = layer_of(nn.BatchNorm1d, torch.float64)
    model = synchronise(copy.deepcopy(plain), fail)
    model[0].bind()
    inputs, gradients = inputs_of(nn.BatchNorm1d, 1, torch.float64)
    own = slice(0, 6) if world.rank == 0 else slice(2, 5)
    is_empty = both_empty or world.rank == 1
    with empty_slot(is_empty):
        output, of_inputs, affine, _ = pass_through(model, inputs, gradients * (not is_empty), own)
    for gradient in affine:
        torch.distributed.all_reduce(gradient)
    assert output.isfinite().all()
    if both_empty:
        assert int(model[0].runs) == 0
        assert not model[0].mean.any()
        assert not of_inputs.any()
        return True
    wanted = pass_through(plain, inputs, gradients, slice(0, 6))
    torch.testing.assert_close(affine, wanted[2], **DOUBLE)
    fold_in(model)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), **DOUBLE)
    if world.rank:
        assert not of_inputs.any()
    else:
        torch.testing.assert_close((output, of_inputs), wanted[:2], **DOUBLE)
    return True


@pytest.mark.parametrize("both_empty", [False, True])
def test_an_empty_slot_counts_no_samples(both_empty):
    assert run(compare_with_an_empty_slot, 2, both_empty) == [True] * 2


def penalised(model, inputs, own):
    """The gradients of a penalty on the gradient with respect to the inputs."""
    inputs = inputs[own].clone().requires_grad_()
    (slope,) = torch.autograd.grad((model(inputs) ** 3).sum(), inputs, create_graph=True)
    (slope**2).sum().backward()
    return inputs.grad, [parameter.grad for parameter in model.parameters()]


def compare_penalties(world):
    plain = layer_of(nn.BatchNorm2d, torch.float64)
    model = synchronise(copy.deepcopy(plain), fail)
    inputs, _ = inputs_of(nn.BatchNorm2d, 0, torch.float64)
    own = cut_of(world, len(inputs))
    found, affine = penalised(model, inputs, own)
    for gradient in affine:
        torch.distributed.all_reduce(gradient)
    wanted, of_affine = penalised(plain, inputs, slice(None))
    torch.testing.assert_close(found, wanted[own], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(affine, of_affine, rtol=1e-10, atol=1e-10)
    return True


def test_a_gradient_of_gradients_is_that_of_the_whole_batch():
    assert run(compare_penalties, 2) == [True] * 2


def halves(world, dtype):
    plain = layer_of(nn.BatchNorm2d, torch.float32)
    model = synchronise(copy.deepcopy(plain), fail)
    model[0].bind()
    inputs, gradients = inputs_of(nn.BatchNorm2d, 0, dtype)
    own = cut_of(world, len(inputs))
    with torch.autocast("cpu", dtype):
        output, of_inputs, _, _ = pass_through(model, inputs, gradients, own)
    assert (output.dtype, of_inputs.dtype) == (dtype, dtype)
    wanted = pass_through(plain, inputs.float(), gradients.float(), slice(None))
    torch.testing.assert_close(
        (output, of_inputs), (wanted[0][own], wanted[1][own]), rtol=0.05, atol=0.05, check_dtype=False
    )
    fold_in(model)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-5)
    return True


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_in_half_precision_have_statistics_in_float32(dtype):
    assert run(halves, 2, dtype) == [True] * 2


# --- training


class Network(nn.Module):
    """Convolutions and a vector, as in README's kind of network, and a part that runs twice in a forward."""

    def __init__(self, momentum):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 6, 2), nn.BatchNorm2d(6, affine=False), nn.ReLU(), nn.Flatten()),
        )
        self.twice = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.features(x)
        return self.last(self.twice(self.twice(x).tanh()) + x)


class Pictures(lockstep.Task):
    items_per_sample = 1
    reduction = "sum"

    def __init__(self, momentum=0.1, policy="none"):
        self.momentum, self.policy = momentum, policy

    def model(self):
        model = Network(self.momentum).double()
        return checkpoint_blocks(model, self.policy, [model.features, model.twice])

    def dataset(self, split):
        generator = torch.Generator().manual_seed(7)
        inputs = torch.randn(60, 1, 6, 6, generator=generator, dtype=torch.float64) * 3 + 2
        return torch.utils.data.TensorDataset(inputs, torch.randint(3, (60,), generator=generator))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


SIZE, TOTAL = 12, 41  # three whole steps, and one of five samples: with a short cut, and an empty slot
HORIZON = -(-TOTAL // SIZE)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained_by_hand(task, total=TOTAL):
    """The weights and buffers after a plain loop over whole batches."""
    torch.manual_seed(0)
    model, dataset = task.model(), task.dataset("train")
    optimizer, order = sgd(model), Shuffled(len(dataset), 0)
    for step in range(HORIZON):
        samples = order.at(step * SIZE, min((step + 1) * SIZE, total))[1].tolist()
        inputs, labels = (torch.stack(column) for column in zip(*(dataset[i] for i in samples), strict=True))
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * factor(step, HORIZON, 2, 0.1)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


def trained_together(world, name, settings):
    """The weights and buffers after the same steps, each cut into one micro-batch for each rank."""
    is_compiled = settings.pop("compiled", False)
    warnings.simplefilter("ignore" if is_compiled or name == "deepspeed" else "error")  # their own
    task = Pictures(**settings)
    torch.manual_seed(0)
    model = synchronise(task.model(), fail)
    if is_compiled:
        precision.HOW["backend"] = "aot_eager"
        compile_blocks(model, [model.features, model.twice])
    made = engine(name, model, sgd, world, clip=1.0)
    dataset = task.dataset("train")
    step_plan = StepPlan(SIZE, -(-SIZE // world.size), TOTAL)
    train(world, made, Batches(task, dataset, Shuffled(len(dataset), 0), step_plan, world, seed=0), task)
    state = {name.removeprefix("model/"): t for name, t in made.state_dict().items() if name.startswith("model/")}
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).tolist() for name, t in state.items()}


def compare(found, wanted, within=1e-10):
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        one = torch.tensor(found[name], dtype=values.dtype)
        torch.testing.assert_close(one, values, rtol=within, atol=within, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        ("ddp", 2, {}),
        ("ddp", 3, {"momentum": None}),
        ("ddp", 2, {"policy": "full"}),
        ("ddp", 2, {"policy": "selective"}),
        ("ddp", 2, {"compiled": True}),
        ("ddp", 2, {"compiled": True, "policy": "full"}),
        ("zero", 2, {}),
        ("zero", 3, {}),
        ("fsdp", 2, {}),
        ("ddp", 1, {}),
    ],
    ids=str,
)
def test_steps_of_several_ranks_match_a_plain_whole_batch_loop(name, ranks, settings):
    wanted = trained_by_hand(Pictures(momentum=settings.get("momentum", 0.1)))
    assert int(wanted["twice.1.num_batches_tracked"]) == 2 * HORIZON
    for found in run(trained_together, ranks, name, settings, timeout=120.0):
        compare(found, wanted)


class Configured(Pictures):
    def optimizer(self, model, config):
        return sgd(model)


def run_to(world, folder, leave_at=None):
    """The steps of one start of a run, in which each rank has a part of each step."""
    config = lockstep.Config(
        save_dir=folder,
        batch_size=SIZE,
        micro_batch_size=-(-SIZE // world.size),
        batchnorm="sync",
        max_steps=HORIZON,
        engine="ddp" if world.size > 1 else "single",
        precision="float64",
        device="cpu",
        resume_anyway=True,  # with the micro-batch of another number of ranks
        optim=Optim(clip=1.0, warmup_steps=2),
    )
    return taken(config, Configured(), world, leave_at)[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_run_resumes_on_another_world_as_a_plain_loop(ranks, tmp_path):
    assert run(run_to, 2, str(tmp_path), 2) == [[0, 1]] * 2
    assert run(run_to, ranks, str(tmp_path)) == [[2, 3]] * ranks
    model = Configured().model()
    load_model(select_checkpoint(tmp_path / "default", "last"), model)
    compare({name: tensor.tolist() for name, tensor in model.state_dict().items()}, trained_by_hand(Configured(), 48))


class Cracked(Configured):
    """One sample of the second step, on the second of two ranks, is NaN."""

    def dataset(self, split):
        dataset = super().dataset(split)
        dataset.tensors[0][SPOILT] = torch.nan
        return dataset


SPOILT = int(Shuffled(60, 0).at(2 * SIZE - 2, 2 * SIZE - 1)[1][0])


def stop_at_nan(world, folder):
    config = lockstep.Config(
        save_dir=folder, batch_size=SIZE, micro_batch_size=SIZE // 2, batchnorm="sync", max_steps=3, device="cpu"
    )
    config = dataclasses.replace(config, precision="float64", engine="ddp")
    with pytest.raises(LockstepError) as caught:
        taken(config, Cracked(), world)
    return str(caught.value)


def test_bad_sample_is_named_on_its_own_rank(tmp_path):
    for message in run(stop_at_nan, 2, str(tmp_path)):
        assert "micro-batch 1 (" in message
        assert str(SPOILT) in message
        assert "hardware" not in message


def start(world, folder, fields):
    """The kinds of the layers, what the plan records, and the lines, of a run that leaves BatchNorm open."""
    config = lockstep.Config(save_dir=folder, max_steps=1, device="cpu", precision="float64", **fields)
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        run = lockstep.Run(config, Configured(), world)
        for _ in run:
            names = {type(layer).__name__ for layer in run.model.modules() if isinstance(layer, nn.BatchNorm1d)}
    recorded = json.loads((run.result.folder / "state.json").read_text())["plan"]["batchnorm"]
    return names, recorded, stderr.getvalue()


@pytest.mark.parametrize(
    ("fields", "ranks", "kind", "line"),
    [
        ({"batch_size": 2}, 2, "_Synchronised1d", ""),
        ({"batch_size": 2}, 1, "BatchNorm1d", ""),
        ({"batch_size": 4, "micro_batch_size": 2}, 2, "_Recording1d", ""),
        ({"batch_size": 64, "exact": True}, 2, "_Recording1d", ""),
    ],
)
def test_auto_is_resolved_anew_at_each_start_by_ranks_and_cut(fields, ranks, kind, line, tmp_path):
    for names, recorded, shown in run(start, ranks, str(tmp_path), fields):
        assert (names, recorded) == ({kind}, "auto")
        assert line in shown or not shown


@pytest.mark.parametrize(
    ("fields", "ranks", "cut", "kind", "reason"),
    [
        ({}, 2, {"fixed_cut": True}, "replay", ""),
        ({}, 1, {}, "local", ""),
        ({"activation_checkpointing": "full"}, 1, {}, "replay", ""),
        ({"exact": True}, 1, {}, "replay", ""),
        ({}, 2, {}, "sync", ""),
        ({"activation_checkpointing": "full", "compile": True}, 2, {}, "sync", ""),
        ({"micro_batch_size": 3}, 2, {}, "replay", "4 micro-batches for 2 ranks"),
        ({"guards": Guards(audit=0.5)}, 2, {}, "replay", "--guards.audit"),
        ({"shares": "1,1"}, 2, {}, "replay", "--shares 1,1"),
        ({"parallel": {"tensor": 2}}, 2, {}, "replay", "--parallel.tensor 2"),
        ({"batchnorm": "sync", "micro_batch_size": 3}, 2, {}, "sync", ""),
        ({"exact": True}, 2, {"has_batchnorm": False}, "replay", ""),
    ],
)
def test_auto_is_sync_with_one_micro_batch_for_each_rank(fields, ranks, cut, kind, reason):
    config = lockstep.Config(**{"batch_size": 12, "micro_batch_size": 6} | fields)
    found = resolve_batchnorm(config, ranks, **cut)
    assert found.kind == kind
    assert reason in found.reason
    assert bool(reason) == bool(found.reason)
