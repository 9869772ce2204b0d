"""BatchNorm replay: running statistics with the same bits at every world size, and torch's own but for rounding."""

import math
import warnings

import pytest
import torch
from ranks import run
from refusals import names
from torch import nn
from torch.nn import functional as F
from toys import parts, train

import lockstep
from lockstep import checkpoint
from lockstep.distributed.world import World
from lockstep.engines.base import NOTHING, StepResult, at_rest
from lockstep.engines.buffers import with_buffers
from lockstep.engines.registry import undo_step
from lockstep.engines.request import EngineRequest
from lockstep.errors import ConfigError
from lockstep.tensors import local_of
from lockstep.transforms import Transforms, checkpoint_blocks, prepare, recorders, recording

CPU = torch.device("cpu")


class Residual(nn.Module):
    def __init__(self, width, momentum):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width, momentum=momentum)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(F.relu(self.norm(self.conv(x))))


class Siamese(nn.Module):
    """Runs a network twice, on two views of the inputs, and part of it a third time."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        other = 0.5 * x.flip(0) - 1.0
        return self.inner(x) - self.inner(other) + 0.0 * self.inner[1](self.inner[0](3.0 * other)).mean()


class Images(torch.utils.data.Dataset):
    draws_random = False

    def __init__(self, count):
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(count, 2, 6, generator=generator) * 3 + 1
        self.labels = torch.randint(3, (count,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Classify(lockstep.Task):
    """Three BatchNorm layers, one of them two-dimensional and without an affine part."""

    items_per_sample = 1

    def __init__(self, momentum=0.1, policy="none", convert=True, compiled=False, dtype=torch.float32, siamese=False):
        self.momentum, self.policy, self.convert, self.compiled = momentum, policy, convert, compiled
        self.dtype, self.siamese = dtype, siamese

    def model(self):
        blocks = [Residual(4, self.momentum), Residual(4, self.momentum)]
        stem = nn.Sequential(nn.BatchNorm2d(1, affine=False), nn.Flatten(1, 2), nn.Conv1d(2, 4, 1))
        model = nn.Sequential(nn.Unflatten(1, (1, 2)), stem, *blocks, nn.Flatten(), nn.Linear(24, 3)).to(self.dtype)
        model = Siamese(model) if self.siamese else model
        if self.convert:
            recording(model, fail)
        checkpoint_blocks(model, self.policy, blocks)
        if self.compiled:
            for block in blocks:
                block.compile(backend="aot_eager")
        return model

    def dataset(self, split):
        return Images(44)

    def collate(self, samples):
        inputs, labels = (torch.stack(column) for column in zip(*samples, strict=True))
        return inputs.to(self.dtype), labels

    def count(self, batch):
        return len(batch[1])

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def fail(line):
    raise AssertionError(line)


def statistics(made):
    """Bytes of the running statistics, as nested lists, and of everything as one mark."""
    state = {name: local_of(tensor).detach() for name, tensor in made.state_dict().items()}
    weights = {name.removeprefix("model/"): t for name, t in state.items() if name.startswith("model/")}
    kept = {n: t.tolist() for n, t in weights.items() if "running" in n or "tracked" in n}
    return kept, checkpoint.fingerprint_of(weights)


CASES = [
    {"momentum": 0.1},
    {"momentum": 0.1, "policy": "full"},
    {"momentum": None},
    {"momentum": None, "policy": "every:2"},
    {"momentum": 0.1, "policy": "selective"},
]


DOUBLE = {"dtype": torch.float64}


def close(found, wanted, most=1e-6):
    for name, values in wanted.items():
        one, other = (torch.tensor(each, dtype=torch.float64) for each in (found[name], values))
        torch.testing.assert_close(one, other, rtol=most, atol=most)


def fit_all(world, cases, settings):
    found = []
    for case in cases:
        made, batches = parts(world, Classify(**case), **settings)
        train(world, made, batches, Classify(**case))
        found.append(statistics(made))
    return found


SETTINGS = [{"size": 16, "micro": 2, "count": 4}, {"size": 12, "micro": 3, "total": 40}]


@pytest.mark.parametrize(
    ("settings", "cases"),
    [(SETTINGS[0], CASES), (SETTINGS[1], CASES[:1] * 2 + CASES[2:3] * 2 + CASES[:1])],
    ids=["M=8", "M=4, short end"],
)
def test_exact_has_the_same_bits_at_every_world_size(settings, cases):
    exact = {**settings, "exact": True}
    threads = torch.get_num_threads()
    try:
        alone = fit_all(World(), cases, exact)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert alone[0] == alone[1] == alone[4], "a recomputation counts nothing again and changes no bit"
    assert alone[2] == alone[3]
    assert alone[0][0] != alone[2][0], "the cumulative average is another"
    for world_size in (1, 2, 4):
        assert run(fit_all, world_size, cases, exact) == [alone] * world_size


def test_every_micro_batch_counts_once_also_with_empty_slots():
    """8 micro-batches on 3 ranks leave one slot empty, a short last step leaves more."""
    settings = {"size": 16, "micro": 2, "total": 42}  # 8 + 8 + 5 micro-batches
    alone = fit_all(World(), [DOUBLE], settings)[0][0]
    assert alone["1.0.num_batches_tracked"] == 21
    for found in run(fit_all, 3, [DOUBLE], settings):
        close(found[0][0], alone)


def test_it_is_needed():
    """torch's own running statistics on two ranks are those of rank 0's micro-batches alone."""
    case, settings = [{"convert": False}], {"size": 16, "micro": 2, "count": 4}
    alone = fit_all(World(), case, settings)[0][0]
    assert alone["1.0.num_batches_tracked"] == 32
    assert run(fit_all, 2, case, settings)[0][0][0]["1.0.num_batches_tracked"] < 32


@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_process_has_torchs_own_statistics_but_for_rounding(momentum):
    settings = {"size": 16, "micro": 2, "count": 4}
    case = {**DOUBLE, "momentum": momentum}
    found, wanted = fit_all(World(), [case, {**case, "convert": False}], settings)
    assert found[0].keys() == wanted[0].keys()
    close(found[0], wanted[0])


SIAMESE = {**DOUBLE, "siamese": True}


@pytest.mark.parametrize("momentum", [0.1, None])
def test_layer_run_several_times_counts_each_time_in_order(momentum):
    """As torch's own layers do, one micro-batch after the other on one process; a recomputation counts nothing."""
    settings = {"size": 16, "micro": 2, "total": 42}  # 21 micro-batches; 8 on 3 ranks leave an empty slot
    case = {**SIAMESE, "momentum": momentum}
    wanted = fit_all(World(), [{**case, "convert": False}], settings)[0][0]
    counts = [value for name, value in wanted.items() if "tracked" in name]
    assert counts == [3 * 21, 2 * 21, 2 * 21]
    cases = [case, {**case, "policy": "full"}]
    for found in [fit_all(World(), cases, settings), *run(fit_all, 3, cases, settings)]:
        for each, _ in found:
            assert [value for name, value in each.items() if "tracked" in name] == counts
            close(each, wanted, 1e-9)


def fit_after_what_is_dropped(world, case, settings):
    """As `fit_all`, after a step that is left out and a trial (a forward that no backward follows)."""
    task = Classify(**case)
    made, batches = parts(world, task, **settings)
    _, micro = next(iter(batches.from_step(0)))
    for batch in micro:
        with made.accumulate(batch is micro[-1]):
            loss = task.loss(made.model, batch.data)
            made.backward(loss, batch.weight / settings["size"])
    made.step(1.0, -math.inf)
    with made.accumulate(False):
        task.loss(made.model, micro[0].data)
    undo_step(made)
    at_rest(made.model)
    train(world, made, batches, task)
    return statistics(made)


def every_way(world, case, settings):
    warnings.simplefilter("ignore")  # DeepSpeed's own
    cases = [{**case, "policy": policy} for policy in ("none", "full", "selective")]
    return [fit_after_what_is_dropped(world, case, settings) for case in cases]


@pytest.mark.parametrize("engine", ["single", "ddp", "zero", "fsdp", "deepspeed"])
def test_every_engine_counts_runs_but_no_trial_or_skipped_step(engine):
    case, most, settings = SIAMESE, 1e-9, {"size": 16, "micro": 2, "count": 3}
    if engine == "deepspeed":  # in float32, where a bias before a layer has rounding for its gradient
        pytest.importorskip("deepspeed")
        case, most, settings["lr"] = {"siamese": True}, 1e-5, 1e-6
    wanted = fit_all(World(), [{**case, "convert": False}], settings)[0][0]
    for found in run(every_way, 1 if engine == "single" else 2, case, settings | {"name": engine}):
        for each, _ in found:
            assert [value for name, value in each.items() if "tracked" in name] == [3 * 24, 2 * 24, 2 * 24]
            close(each, wanted, most)


def test_exact_runs_of_a_reused_layer_are_bitwise_on_any_world():
    exact = {"size": 16, "micro": 2, "count": 3, "exact": True}
    cases = [{"siamese": True}, {"siamese": True, "policy": "full"}, {"siamese": True, "momentum": None}]
    threads = torch.get_num_threads()
    try:
        alone = fit_all(World(), cases, exact)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert alone[0] == alone[1] != alone[2]
    assert run(fit_all, 2, cases, exact) == [alone] * 2


def test_evaluation_uses_them_and_restoring_goes_on_from_them():
    settings = {"size": 16, "micro": 2, "count": 4}
    made, batches = parts(World(), Classify(), **settings)
    train(World(), made, batches, Classify(), stop=2)
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    train(World(), made, batches, Classify(), start=2)
    again, batches = parts(World(), Classify(), **settings)
    again.load_state_dict(state)
    inputs = torch.randn(4, 2, 6)
    before = again.model.eval()(inputs)
    assert torch.equal(before, again.model(inputs)), "an evaluation records nothing"
    again.model.train()
    train(World(), again, batches, Classify(), start=2)
    assert statistics(again) == statistics(made)
    assert not torch.equal(again.model.eval()(inputs), before)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_blocks_record_too_and_are_compiled_once():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = {"size": 16, "micro": 2, "count": 3}
    cases = [DOUBLE, {**DOUBLE, "compiled": True}, SIAMESE, {**SIAMESE, "compiled": True, "policy": "full"}]
    eager, compiled, twice, compiled_twice = fit_all(World(), cases, settings)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3  # one a class, one for another shape, recomputed
    close(compiled[0], eager[0])
    close(compiled_twice[0], twice[0])


class Recorder:
    """An engine that does nothing, for what the replay does by itself."""

    def __init__(self, model):
        self.model = model
        self.state = self.restore = None

    def accumulate(self, last, counts=True):
        return NOTHING

    def backward(self, loss, weight=1.0):
        pass

    def step(self, factor=None, limit=math.inf, momentum=None, evaluate=None):
        return StepResult(torch.zeros(()), limit > 0.0)


def alone_with(model):
    return with_buffers(Recorder(model), model, World(), EngineRequest())


def test_unused_or_frozen_layers_keep_their_statistics():
    model = recording(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)), fail)
    made = alone_with(model)
    model[1].eval()
    made.accumulate(True)
    made.backward(model[1](model[0](torch.randn(5, 3))))  # the third is not run
    made.step()
    assert [int(layer.num_batches_tracked) for layer in model] == [1, 0, 0]
    assert torch.equal(model[1].running_var, torch.ones(3))
    assert torch.equal(model[2].running_mean, torch.zeros(3))


def test_each_layer_counts_its_micro_batches_and_keeps_precision():
    model = recording(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2).double()), fail)
    made, generator = alone_with(model), torch.Generator().manual_seed(4)
    narrow = [torch.randn(5, 3, generator=generator) for _ in range(3)]
    wide = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    for number, inputs in enumerate(narrow):
        made.accumulate(number == 2)
        if number == 1:
            model[1](wide)
        made.backward(model[0](inputs))
    made.step()
    assert [int(layer.num_batches_tracked) for layer in model] == [3, 1]
    mean = torch.zeros(3)
    for inputs in narrow:
        mean = mean.lerp(inputs.mean(0), 0.1)
    torch.testing.assert_close(model[0].running_mean, mean)
    torch.testing.assert_close(model[1].running_mean, 0.1 * wide.mean(0), rtol=1e-14, atol=1e-16)
    torch.testing.assert_close(model[1].running_var, 0.9 + 0.1 * wide.var(0), rtol=1e-14, atol=1e-16)


def test_layer_with_zero_momentum_keeps_its_statistics():
    model = recording(nn.Sequential(nn.BatchNorm1d(3, momentum=0.0), nn.BatchNorm1d(3)), fail)
    made = alone_with(model)
    made.accumulate(True)
    made.backward(model(torch.randn(5, 3) + 4.0))
    made.step()
    assert (model[0].running_mean.tolist(), model[0].running_var.tolist()) == ([0.0] * 3, [1.0] * 3)
    assert [int(layer.num_batches_tracked) for layer in model] == [1, 1]
    assert not torch.equal(model[1].running_var, torch.ones(3))


def test_a_nan_of_one_step_is_not_in_the_next():
    model = recording(nn.Sequential(nn.BatchNorm1d(3)), fail)
    made = alone_with(model)
    for inputs in (torch.full((5, 3), torch.nan), torch.ones(5, 3)):
        made.accumulate(True)
        made.backward(model(inputs))
        made.step(1.0, -math.inf if inputs.isnan().any() else math.inf)
        model(torch.full((5, 3), torch.nan))  # as the search for a bad batch does, outside of a step
    assert model[0].running_mean.tolist() == pytest.approx([0.1] * 3)
    assert int(model[0].num_batches_tracked) == 1


def test_a_model_without_batchnorm_costs_nothing():
    model = nn.Linear(3, 3)
    engine = Recorder(model)
    assert with_buffers(engine, recording(model, fail), World(), EngineRequest()) is engine
    untracked = recording(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), fail)
    assert recorders(untracked) == []


def test_names_classes_and_hooks_stay():
    model = Classify(convert=False).model()
    before = list(model.state_dict())
    assert list(recording(model, fail).state_dict()) == before
    assert all(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in recorders(model))


def test_a_derived_class_is_left_and_named():
    class Own(nn.BatchNorm1d):
        pass

    said = []
    recording(nn.Sequential(nn.BatchNorm1d(3), Own(3)), said.append)
    assert len(said) == 1
    assert names(said[0], "--batchnorm replay", "1 layers")
    assert "1 (Own)" in said[0]


def test_local_does_not_go_with_recomputation():
    task = Classify(convert=False)
    model = task.model()
    chosen = Transforms(batchnorm="local", activation_checkpointing="full")
    with pytest.raises(ConfigError, match="would count each micro-batch twice"):
        prepare(model, precision="float32", compile_model=False, device=CPU, chosen=chosen, blocks=[model[2]])
