"""A task under autocast is the plain loop `with torch.autocast(...): loss = task_loss(model(x), y)`, to the bit."""

import contextlib
import copy
import json
import pickle

import pytest
import torch
import whole_tasks
from ranks import run
from small_runs import config
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.task import as_task, has_own, in_context, user_task
from lockstep.training.inference import InferenceRequest, evaluate_run
from lockstep.transforms import precision
from lockstep.transforms.precision import task_in_precision, without_autocast

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
BATCH, STEPS, CLASSES = 16, 5, 7
RATE = 0.125  # a power of two, which rounds nothing


def net():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, CLASSES))


def data(count=BATCH * STEPS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 12, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def by_hand(model, x, y):
    """Operations on no list of autocast's, beside some that are."""
    out = model(x)
    picked = out.gather(1, y[:, None])[:, 0]
    return (out.exp().sum(1).log() - picked).float().mean()


def distances(model, x, y):
    return (model(x) - F.one_hot(y, CLASSES)).square().mean()


def products(model, x, y):
    out = model(x)
    return F.mse_loss(out @ out.T, torch.eye(len(x)))


def twice(model, x, y):
    first = model(x)
    return F.kl_div(first.log_softmax(1), model(x + 0.1).softmax(1), reduction="batchmean") + F.cross_entropy(first, y)


def distilled(model, x, y):
    """The teacher is the model itself, without a graph, and comes first."""
    with torch.no_grad():
        wanted = model(x).softmax(1)
    return F.kl_div(model(x + 0.1).log_softmax(1), wanted, reduction="batchmean")


LOSSES = {each.__name__: each for each in (cross_entropy, by_hand, distances, products, twice, distilled)}


class Own(lockstep.Task):
    """A task of `loss`, in the order of the data, without a schedule."""

    def __init__(self, loss=cross_entropy, own=torch.optim.SGD):
        self.function, self.own = loss, own

    def model(self):
        return net()

    def dataset(self, split):
        return TensorDataset(*data()) if split == "train" else TensorDataset(*data(40, seed=2))

    def order(self, samples, seed):
        return range(samples)

    def optimizer(self, model, config):
        return self.own(model.parameters(), lr=RATE)

    def schedule(self, step, steps):
        return 1.0

    def loss(self, model, batch):
        return self.function(model, *batch)


def settings(folder, name, **changes):
    once = {"batch_size": BATCH, "micro_batch_size": BATCH, "max_steps": STEPS, "optim": {"clip": 0.0}}
    return config(folder, **once | {"experiment_name": name, "eval_freq": 0, "exact": False} | changes)


def trained(folder, task, precision, world=None, **changes):
    with lockstep.Run(settings(folder, precision, precision=precision, **changes), task, world) as made:
        losses = [step.loss for step in made]
        weights = {name: value.detach().clone() for name, value in made.model.state_dict().items()}
    return losses, weights


def plain(loss, precision, own=torch.optim.SGD, cache=True):
    """The loop by hand."""
    model = net()
    optimizer, losses = own(model.parameters(), lr=RATE), []
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for x, y in zip(*(part.split(BATCH) for part in data()), strict=True):
        with torch.autocast("cpu", HALF[precision], cache_enabled=cache):
            value = loss(model, x, y)
        losses.append(value.item())
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses, model.state_dict()


def assert_same(found, wanted):
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], value) for name, value in wanted[1].items())


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"products"}))
def test_the_weights_are_those_of_the_plain_loop(name, precision, tmp_path):
    loss = LOSSES[name]
    assert_same(trained(tmp_path, Own(loss), precision), plain(loss, precision))


def test_a_loss_over_the_batch_and_another_optimizer(tmp_path):
    class Batchwise(Own):
        reduction = "micro-batch"

    task = Batchwise(products, torch.optim.AdamW)
    assert_same(trained(tmp_path, task, "bf16"), plain(products, "bf16", torch.optim.AdamW))


def test_a_sum_over_many_items_does_not_overflow_float16(tmp_path):
    """A float16 ends at 65,504; the sum is float32, as by hand."""

    def total(model, x, y):
        return F.cross_entropy(model(x), y, reduction="sum") * 4096

    class Sum(Own):
        reduction = "sum"

        def count(self, batch):
            return 4096 * len(batch[0])

    losses, weights = trained(tmp_path, Sum(total), "fp16")
    assert_same((losses, weights), plain(cross_entropy, "fp16"))


def test_a_teachers_forward_leaves_no_casts_without_a_graph(tmp_path):
    """Whatever torch keeps of a forward without a graph: all weights learn as without any cache."""
    found, wanted = trained(tmp_path, Own(distilled), "bf16"), plain(distilled, "bf16", cache=False)
    assert_same(found, wanted)
    assert all(not torch.equal(value, net().state_dict()[name]) for name, value in found[1].items())


def test_graphless_forward_clears_the_outer_contexts_casts(monkeypatch):
    cleared = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(torch.is_grad_enabled()))
    model = precision.autocast(net(), torch.bfloat16, "cpu")
    x, _ = data(4)
    model(x)
    with torch.no_grad():
        model(x)
    assert False in cleared


def on_two_ranks(world, folder, engine):
    losses, weights = trained(folder, Own(), "bf16", world, engine=engine, micro_batch_size=BATCH // 2)
    return losses, {name: value.tolist() for name, value in weights.items() if type(value) is torch.Tensor}


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_ranks_are_the_plain_loop_but_for_rounding(engine, tmp_path):
    losses, weights = plain(cross_entropy, "bf16")
    found = run(on_two_ranks, 2, tmp_path, engine)[0]
    assert found[0] == pytest.approx(losses, rel=1e-3)
    assert bool(found[1]) == (engine == "ddp")  # the weights of fsdp are in parts
    for name, value in found[1].items():
        torch.testing.assert_close(torch.tensor(value), weights[name], rtol=0, atol=2e-3)


CHANGES = {
    "checkpointing": {"activation_checkpointing": "full"},
    "copies": {"weight_copies": "step"},
    "compiled": {"compile": True, "compile_scope": "whole"},
    "blocks": {"compile": True, "compile_scope": "blocks"},
}


class Blocks(Own):
    def blocks(self, model):
        return [model[0], model[3]]


@pytest.mark.parametrize("name", CHANGES)
def test_techniques_within_the_same_context(name, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "HOW", {"backend": "aot_eager"})
    found = trained(tmp_path, Blocks(distilled), "bf16", **CHANGES[name])
    wanted = plain(distilled, "bf16")
    assert found[0] == pytest.approx(wanted[0], rel=1e-3)
    for key, value in wanted[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=0, atol=2e-3)


# losses over a whole step


class Pairs(whole_tasks.Contrastive):
    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=RATE)

    def schedule(self, step, steps):
        return 1.0


@pytest.mark.parametrize("precision", HALF)
def test_a_loss_over_a_whole_step_is_the_plain_loops(precision, tmp_path):
    task = Pairs(dtype=torch.float32)
    size = {"batch_size": whole_tasks.BATCH, "micro_batch_size": whole_tasks.BATCH, "max_steps": 3}
    losses, weights = trained(tmp_path, task, precision, **size)
    model = task.model()
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=RATE), 2.0**16 if precision == "fp16" else 1.0
    samples, wanted = task.dataset("train"), []
    for step in range(3):
        rows = [samples[step * whole_tasks.BATCH + row] for row in range(whole_tasks.BATCH)]
        batch = [torch.stack(part) for part in zip(*rows, strict=True)]
        with torch.autocast("cpu", HALF[precision]):
            loss = task.step_loss(tuple(part.float() for part in task.outputs(model, batch)))
        wanted.append(loss.item())
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(wanted, rel=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


# what runs where


class Watched(Own):
    """Notes which methods run under autocast; its numbers and its metric come in half precision."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def note(self, name):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.seen.setdefault(name, set()).add(dtype)

    def loss(self, model, batch):
        self.note("loss")
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]), {"peak": (out.max().bfloat16(), 1)}

    def metrics(self, model, batch):
        self.note("metrics")
        out = model(batch[0])
        return {"mean": (out.sum().to(out.dtype), out.numel())}

    def penalty(self, model):
        self.note("penalty")
        return sum(p.square().sum() for p in model.parameters()) * 0.5


def test_an_evaluation_is_that_of_the_plain_loop(tmp_path):
    task = Watched()
    with lockstep.Run(settings(tmp_path, "r", precision="bf16", eval_freq=STEPS), task) as made:
        for _ in made:
            pass
        record, model = made.result.evaluation, net()
        model.load_state_dict(made.model.state_dict())
    assert task.seen.keys() == {"loss", "metrics", "penalty"}
    assert all(kinds - {None} == {torch.bfloat16} for kinds in task.seen.values())
    sums = [0.0, 0.0]
    for x, y in zip(*(part.split(BATCH) for part in data(40, seed=2)), strict=True):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            sums[0] += F.cross_entropy(model(x), y).item() * len(x)
            sums[1] += model(x).sum().item()
    assert record.loss == pytest.approx(sums[0] / 40, rel=1e-7)
    assert record.metrics["mean"] == pytest.approx(sums[1] / (40 * CLASSES), rel=1e-7)
    loaded = evaluate_run(InferenceRequest(str(tmp_path / "r"), task=f"{__file__}:Watched"))
    assert (loaded.loss, loaded.metrics) == (record.loss, record.metrics)


def test_the_penalty_is_a_term_of_the_loss(tmp_path):
    def penalised(model, x, y):
        return F.cross_entropy(model(x), y) + sum((p @ p.T).square().sum() for p in model.parameters() if p.ndim == 2)

    class Penalised(Own):
        def penalty(self, model):
            return sum((p @ p.T).square().sum() for p in model.parameters() if p.ndim == 2)

    small = {"max_steps": 1}
    _, weights = trained(tmp_path, Penalised(), "bf16", **small)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = (part[:BATCH] for part in data())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # which would add the two gradients in bfloat16
        loss = penalised(model, x, y)
    loss.backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-6)


def test_half_precision_loss_is_one_line_and_counts_as_float32(tmp_path, capsys):
    def rough(model, x, y):
        return distances(model, x.to(model[0].weight.dtype), y).bfloat16()

    class Rough(Own):
        def loss(self, model, batch):
            loss = rough(model, *batch)
            return loss, {"twice": 2 * loss}

    for name in ("bf16", "float32", "bf16-true"):
        task = Rough()
        with lockstep.Run(settings(tmp_path, name, precision=name), task) as made:
            for step in made:
                assert step.loss == torch.tensor(step.loss).bfloat16().item()
        said = capsys.readouterr().err.count("loss came in bfloat16")
        assert said == (name != "bf16-true"), name


# no trace on the object


def test_second_run_in_another_precision_leaves_no_trace(tmp_path):
    task = Watched()
    before = set(vars(task))
    trained(tmp_path, task, "bf16")
    kinds, task.seen = task.seen, {}
    trained(tmp_path, task, "float32")
    assert torch.bfloat16 in kinds["loss"]
    assert all(seen == {None} for seen in task.seen.values())
    marks = {"_reduction_before", "_takes_gradients", "reduction", "_current_step"}  # of the trial and the loop
    assert set(vars(task)) - before <= marks
    assert type(task) is Watched
    assert not any(name in vars(task) for name in ("loss", "penalty", "evaluate"))


def test_it_passes_for_the_task():
    class Foreign:
        """Not a Task."""

        def model(self):
            return net()

        def dataset(self, split):
            return TensorDataset(*data())

        def loss(self, model, batch):
            return torch.is_autocast_enabled("cpu")

    for own in (Own(), Foreign()):
        task = as_task(own)
        half = task_in_precision(task, "bf16", "cpu", print)
        assert isinstance(half, lockstep.Task)
        assert isinstance(half, type(task))
        assert user_task(half) is own
        assert {name for name in vars(lockstep.Task) if callable(getattr(task, name)) and has_own(task, name)} == {
            name for name in vars(lockstep.Task) if callable(getattr(half, name)) and has_own(half, name)
        }
        half.mark = 3
        assert task.mark == 3
        del half.mark
        assert not hasattr(half, "mark")
        assert vars(half) is vars(task)
        assert type(copy.copy(half)) is type(task)
    assert half.loss(None, None) is True
    assert task.loss(None, None) is False
    assert as_task(task_in_precision(Own(), "bf16", "cpu", print)).__class__ is Own
    again = in_context(half, contextlib.nullcontext, print)
    assert again.loss(None, None) is False  # of the last precision alone


def test_it_is_pickled_as_the_task_itself():
    restored = pickle.loads(pickle.dumps(task_in_precision(Own(), "bf16", "cpu", print)))
    assert type(restored) is Own


def test_the_trial_turns_all_of_it_off():
    model = precision.autocast(net(), torch.bfloat16, "cpu")
    task = task_in_precision(Own(lambda model, x, y: model(x) @ torch.ones(CLASSES)), "bf16", "cpu", print)
    x, y = data(4)
    assert (model(x).dtype, task.outputs is not None) == (torch.bfloat16, True)
    with without_autocast():
        assert model(x).dtype is torch.float32
        assert torch.equal(task.loss(model, (x, y)), net()(x) @ torch.ones(CLASSES))
    assert model(x).dtype is torch.bfloat16
    assert not torch.equal(task.loss(model, (x, y)), net()(x) @ torch.ones(CLASSES))


def test_loader_processes_and_records_work_as_before(tmp_path):
    """Tasks go to loader processes by pickle."""
    with lockstep.Run(settings(tmp_path, "r", precision="bf16", data={"workers": 1}), Own()) as made:
        losses = [step.loss for step in made]
    assert losses == plain(cross_entropy, "bf16")[0]
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert rows
