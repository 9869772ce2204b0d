"""Numbers of one's own: what `loss` returns beside the loss, norms of the gradient by block, and `run.log`."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.guards.nonfinite import DeferredReader
from lockstep.logging import jsonl
from lockstep.records import exact_sum, exact_sums, mean_numbers, merge_sums

SAMPLES = 37  # with batches of 8 the fifth step is short
WEIGHTS = [1e-7, 3.0, 1e9]


class Rows(torch.utils.data.Dataset):
    """(input, target, whether the sample is counted by `right`)."""

    def __init__(self, count=SAMPLES):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randint(4, (count,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def of_rows(indices):
    """What the numbers are of each sample, knowing nothing of models: `size` of all, `kept` of every third."""
    data = Rows()
    size = data.x[indices].square().sum(1) * torch.tensor([WEIGHTS[int(i) % 3] for i in indices], dtype=torch.float64)
    return size, (indices % 3 == 0)


class Parts(lockstep.Task):
    """Returns `size` (reduced as the loss is), `kept` (with a count of its own) and `rows` (a plain number)."""

    def __init__(self, mean=False):
        self.reduction = "mean" if mean else "sum"
        self.mean = mean

    def model(self):
        return Net().double()

    def dataset(self, split):
        return Rows()

    def loss(self, model, batch):
        x, y, index = batch
        loss = F.cross_entropy(model(x), y, reduction=self.reduction)
        size, counted = of_rows(index)
        grown = size * model(x).sum().exp().clamp(1, 1)  # with a graph
        return loss, {
            "size": grown.mean() if self.mean else grown.sum(),
            "kept": (size[counted].sum(), counted.sum()),
            "rows": 1.0 if self.mean else float(len(index)),
        }


def trained(world, folder, mean, changes):
    settings = {"max_steps": 5, "log_freq": 2, "eval_freq": 0, "ckpt_freq": 0, "exact": True} | changes
    with lockstep.Run(config(folder, **settings), Parts(mean), world) as running:
        told = [(step.loss, step.numbers) for step in running]
    records = jsonl.read(folder / "r" / "metrics.jsonl") if world.is_main else []
    names = ("train/size", "train/kept", "train/rows")
    found = [[record[name] for name in names] for record in records if "running_loss" in record]
    evaluated = [record for record in records if "evaluation/loss" in record][-1] if records else {}
    return told, found, {name: evaluated.get(f"evaluation/{name}") for name in ("size", "kept", "rows")}


def samples_by_step(folder, **changes):
    """The samples of each step of such a run, as its loss is given them."""
    seen, by_step = [], []

    class Seen(Parts):
        def loss(self, model, batch):
            if torch.is_grad_enabled():
                seen.append(batch[2])
            return super().loss(model, batch)

    settings = {"experiment_name": "order", "ckpt_freq": 0, "checkpoint": {"mode": "none"}} | changes
    with lockstep.Run(config(folder, **settings), Seen()) as running:
        seen.clear()
        for _ in running:
            by_step.append(torch.cat(seen).unique())  # empty slots repeat some
            seen.clear()
    return by_step


def average(indices):
    size, counted = of_rows(indices)
    return [float(size.mean()), float(size[counted].mean()) if counted.any() else math.nan, 1.0]


@pytest.mark.parametrize("mean", [False, True])
def test_each_is_the_average_over_all_samples_of_its_window(tmp_path, mean):
    """Of a window, of a step and of an evaluation; the last step is short."""
    by_step = samples_by_step(tmp_path, num_epochs=1, max_steps=0)
    assert [len(indices) for indices in by_step] == [8, 8, 8, 8, 5]
    told, found, evaluated = trained(World(), tmp_path, mean, {"num_epochs": 1, "max_steps": 0})
    for window, numbers in enumerate(found):
        assert numbers == pytest.approx(average(torch.cat(by_step[2 * window : 2 * window + 2])), rel=1e-14)
    for indices, (_, numbers) in zip(by_step, told, strict=True):
        assert list(numbers.values()) == pytest.approx(average(indices), rel=1e-14)
    assert len(found) == 3  # the last window is the short step alone
    assert list(evaluated.values()) == pytest.approx(average(torch.arange(SAMPLES)), rel=1e-14)


@pytest.mark.parametrize("engine", ["ddp", "zero", "fsdp"])
def test_the_same_bits_at_every_world_size(tmp_path, engine):
    (tmp_path / "1").mkdir()
    alone = trained(World(), tmp_path / "1", False, {"num_epochs": 1, "max_steps": 0, "log_gradients": "layers"})
    for ranks in (2, 3) if engine == "ddp" else (2,):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        changes = {"num_epochs": 1, "max_steps": 0, "engine": engine, "log_gradients": "layers"}
        found = run(trained, ranks, folder, False, changes)
        for told, _, _ in found:
            assert [numbers for _, numbers in told] == [numbers for _, numbers in alone[0]]
            # Without --exact each rank adds up its own losses first: on some processors the last digit differs.
            assert [loss for loss, _ in told] == pytest.approx([loss for loss, _ in alone[0]], rel=1e-15, abs=0)
        assert found[0][1:] == alone[1:]
        assert gradients(folder) == gradients(tmp_path / "1")


def gradients(folder, name="r"):
    records = jsonl.read(folder / name / "metrics.jsonl")
    found = [{k: v for k, v in record.items() if k.startswith("gradients/")} for record in records]
    return [each for each in found if each]


def test_a_window_that_a_resume_cuts_counts_each_step_once(tmp_path):
    changes = {"max_steps": 8, "log_freq": 4, "ckpt_freq": 3}
    _, whole, _ = trained(World(), tmp_path / "whole", False, changes)
    trained(World(), tmp_path / "cut", False, changes | {"stop_at": 3})
    _, cut, _ = trained(World(), tmp_path / "cut", False, changes)
    assert cut == whole
    assert len(whole) == 2


def test_numbers_on_a_device_that_answers_late(tmp_path, monkeypatch):
    """They come with the losses, a step later, and are what they were when they were returned."""
    _, there, _ = trained(World(), tmp_path / "at once", False, {})
    monkeypatch.setattr(DeferredReader, "lag", 1)
    _, late, _ = trained(World(), tmp_path / "late", False, {})
    assert late == there


def test_not_finite_step_is_skipped_with_its_numbers(tmp_path):
    class Bad(Parts):
        calls = 0

        def loss(self, model, batch):
            loss, numbers = super().loss(model, batch)
            self.calls += 1
            bad = bool((batch[2] == 20).any()) and torch.is_grad_enabled()
            return (loss * math.nan, numbers | {"size": loss * math.nan}) if bad else (loss, numbers)

    settings = {"max_steps": 4, "log_freq": 4, "ckpt_freq": 0, "guards": {"nonfinite": "skip"}}
    kept = []
    with lockstep.Run(config(tmp_path, **settings), Bad()) as running:
        for step in running:
            kept += [] if math.isnan(step.loss) else [step.numbers["size"]]
    (record,) = [r for r in jsonl.read(tmp_path / "r" / "metrics.jsonl") if "train/size" in r]
    assert 0 < len(kept) < 4
    assert record["train/size"] == pytest.approx(sum(kept) / len(kept))


class Other(Parts):
    """Leaves a number out where a batch has sample 20; or on rank 1."""

    def __init__(self, where):
        super().__init__()
        self.where, self.rank = where, -1

    def loss(self, model, batch):
        loss, numbers = super().loss(model, batch)
        if torch.is_grad_enabled() and (bool((batch[2] == 20).any()) if self.where == "batch" else self.rank == 1):
            del numbers["kept"]
        return loss, numbers


def test_a_micro_batch_with_other_names_is_named(tmp_path):
    with pytest.raises(LockstepError, match="'kept'"):
        lockstep.train(config(tmp_path, max_steps=5), Other("batch"))


def differing(world, folder):
    task = Other("rank")
    task.rank = world.rank
    try:
        lockstep.train(config(folder, engine="ddp"), task, world)
    except LockstepError as error:
        return str(error)
    return ""


def test_ranks_with_other_names_end_in_the_first_step(tmp_path):
    for said in run(differing, 2, tmp_path):
        assert "'kept'" in said
        assert "rank 1, step 1" in said
    assert not jsonl.read(tmp_path / "r" / "metrics.jsonl")


class Returns(Parts):
    def __init__(self, beside):
        super().__init__()
        self.beside = beside

    def loss(self, model, batch):
        return super().loss(model, batch)[0], self.beside


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        ({"loss": 1.0}, "loss"),
        ({"global_step": 1.0}, "global_step"),
        ({"lr": 1.0}, "lr"),
        ({3: 1.0}, "3"),
        ({"a": "high"}, "a"),
        ({"a": None}, "a"),
        ({"a": torch.zeros(2)}, "a"),
        ({"a": (1.0, 2.0, 3.0)}, "a"),
        ({"a": (1.0, "b")}, "a"),
        ({"a": torch.zeros((), dtype=torch.complex64)}, "a"),
    ],
)
def test_what_is_no_number_is_refused_before_anything_is_written(tmp_path, beside, named):
    with pytest.raises(ConfigError, match=f"'?{named}'?"):
        lockstep.train(config(tmp_path), Returns(beside))
    assert not (tmp_path / "r").exists()


def test_a_tensor_that_is_written_later_is_taken_as_it_was(tmp_path, monkeypatch):
    class Counting(Parts):
        def __init__(self):
            super().__init__()
            self.calls = torch.zeros((), dtype=torch.int64)

        def loss(self, model, batch):
            if torch.is_grad_enabled():
                self.calls += 1
            return super().loss(model, batch)[0], {"calls": (self.calls, 1)}

    monkeypatch.setattr(DeferredReader, "lag", 1)
    task = Counting()
    lockstep.train(config(tmp_path, max_steps=2, log_freq=2), task)
    (record,) = [r for r in jsonl.read(tmp_path / "r" / "metrics.jsonl") if "train/calls" in r]
    last = int(task.calls)  # the trial before step 1 calls it too
    assert record["train/calls"] == sum(range(last - 7, last + 1)) / 8


def test_a_metric_of_the_same_name_takes_the_place_of_a_number(tmp_path):
    class Both(Parts):
        def metrics(self, model, batch):
            return {"size": (5.0 * len(batch[1]), len(batch[1]))}

    best = config(tmp_path, max_steps=1, best_metric="kept:max")
    assert lockstep.train(best, Both()).evaluation.metrics["size"] == 5.0


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_sums_are_exact_however_they_are_cut(parts):
    generator = np.random.default_rng(1)
    values = [float(v) for v in generator.standard_normal(300) * 10.0 ** generator.integers(-25, 25, 300)]
    cut = [list(zip(part, part, strict=True)) for part in np.array_split(values, parts)]
    merged = merge_sums([exact_sums(part) for part in cut])
    assert merged[0] == float(sum(map(Fraction, values)))
    assert mean_numbers({"a": merged, "b": [0.0] * 6})["a"] == 1.0
    assert math.isnan(mean_numbers({"b": [0.0] * 6})["b"])


def test_sums_of_what_is_not_finite():
    assert exact_sum([math.inf, 1.0])[0] == math.inf
    assert math.isnan(exact_sum([math.inf, -math.inf])[0])
    assert math.isnan(exact_sum([1e308, 1e308])[0])


class Whole(Parts):
    """A loss over the whole step, with its numbers: `size` and `kept` are those of Parts, `spread` is of the step."""

    def __init__(self, by_rows):
        super().__init__()
        if by_rows:
            self.step_loss_rows = lambda own, whole, first: self.part(own, whole)
        else:
            self.step_loss = lambda outputs: self.part(outputs, outputs)

    loss = lockstep.Task.loss

    def outputs(self, model, batch):
        x, y, index = batch
        return model(x), y, index

    def part(self, own, whole):
        logits, y, index = own
        size, counted = of_rows(index)
        share = len(y) / len(whole[1])
        center = whole[0].mean(0)
        beside = {"size": size.mean() * share, "kept": (size[counted].sum(), counted.sum()), "spread": share * 3.0}
        return (F.cross_entropy(logits, y) + (logits - center).square().mean()) * share, beside


def whole_step(world, folder, by_rows, changes):
    settings = {"max_steps": 0, "num_epochs": 1, "log_freq": 2, "ckpt_freq": 0, "exact": True} | changes
    with lockstep.Run(config(folder, **settings), Whole(by_rows), world) as running:
        told = [step.numbers for step in running]
    records = jsonl.read(folder / "r" / "metrics.jsonl") if world.is_main else []
    return told, [[record.get(f"train/{name}") for name in ("size", "kept", "spread")] for record in records], records


@pytest.mark.parametrize("by_rows", [False, True])
def test_numbers_beside_a_loss_over_the_whole_step(tmp_path, by_rows):
    by_step = samples_by_step(tmp_path, num_epochs=1, max_steps=0)
    told, found, records = whole_step(World(), tmp_path / "1", by_rows, {})
    for window in range(2):
        *known, spread = found[window]
        wanted = average(torch.cat(by_step[2 * window : 2 * window + 2]))
        assert known == pytest.approx(wanted[:2], rel=1e-14)
        assert spread == pytest.approx(3.0)
    for indices, numbers in zip(by_step, told, strict=True):
        assert [numbers["size"], numbers["kept"]] == pytest.approx(average(indices)[:2], rel=1e-14)
    evaluated = [record for record in records if "evaluation/loss" in record][-1]
    assert evaluated["evaluation/size"] == pytest.approx(average(torch.arange(SAMPLES))[0], rel=1e-14)
    for ranks, engine in ((2, "ddp"), (3, "fsdp")) if by_rows else ((2, "zero"),):
        folder = tmp_path / str(ranks)
        every = run(whole_step, ranks, folder, by_rows, {"engine": engine})
        assert [each[0] for each in every] == [told] * ranks
        assert every[0][1] == found


# --log-gradients


def norms_by_hand(folder, at):
    """Norms of the gradient of step `at`'s whole batch, by torch alone: name -> norm, for every parameter."""
    by_step, data, found = samples_by_step(folder, max_steps=5), Rows(), {}
    with lockstep.Run(config(folder, experiment_name="weights", **QUIET), Parts()) as running:
        for step in running:
            if step.global_step == at:
                model = Net().double()
                model.load_state_dict(running.model.state_dict())
                indices = by_step[at]
                F.cross_entropy(model(data.x[indices]), data.y[indices]).backward()
                found = {name: p.grad.norm() for name, p in model.named_parameters()}
                break
    return found


QUIET = {"max_steps": 5, "ckpt_freq": 0, "checkpoint": {"mode": "none"}, "log_freq": 2, "optim": {"clip": 1e-3}}


def blockwise(found):
    blocks = {}
    for name, norm in found.items():
        block = ".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0]
        blocks.setdefault(block, []).append(norm)
    return {f"gradients/{name}": float(torch.stack(each).norm()) for name, each in blocks.items()}


def logging(world, folder, changes):
    with lockstep.Run(config(folder, **QUIET | changes), Parts(), world) as running:
        for _ in running:
            pass


@pytest.mark.parametrize("engine", ["single", "ddp", "zero", "fsdp"])
def test_norms_by_layer_are_those_of_one_backward(tmp_path, engine):
    by_hand = blockwise(norms_by_hand(tmp_path, 3))
    changes = {"engine": engine, "log_gradients": "layers"}
    if engine == "single":
        logging(World(), tmp_path, changes)
    else:
        run(logging, 2, tmp_path, changes)
    assert len(gradients(tmp_path)) == 2
    assert gradients(tmp_path)[1] == pytest.approx(by_hand, rel=1e-10)
    assert set(by_hand) == {"gradients/embed", "gradients/blocks.0", "gradients/blocks.1", "gradients/head"}


def test_norms_by_group_are_of_the_optimizers_groups(tmp_path):
    class Grouped(Parts):
        def optimizer(self, model, config):
            head = {"params": list(model.head.parameters()), "lr": 0.01}
            rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
            return torch.optim.SGD([head, {"params": rest, "name": "rest"}], lr=0.01)

    lockstep.train(config(tmp_path, **QUIET, log_gradients="layers", experiment_name="a"), Grouped())
    lockstep.train(config(tmp_path, **QUIET, log_gradients="groups", experiment_name="b"), Grouped())
    for layers, groups in zip(gradients(tmp_path, "a"), gradients(tmp_path, "b"), strict=True):
        head = layers.pop("gradients/head")
        rest = math.hypot(*layers.values())
        assert groups == pytest.approx({"gradients/0": head, "gradients/rest": rest})


def test_norms_of_a_scaled_loss_are_unscaled(tmp_path):
    class Single(Parts):
        def model(self):
            return Net()

        def loss(self, model, batch):
            return F.cross_entropy(model(batch[0].float()), batch[1], reduction="sum")

    for precision in ("float32", "fp16"):
        changes = {"log_gradients": "layers", "precision": precision, "experiment_name": precision}
        lockstep.train(config(tmp_path, **QUIET | changes), Single())
    plain, scaled = gradients(tmp_path, "float32")[0], gradients(tmp_path, "fp16")[0]
    assert scaled == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize("engine", ["deepspeed", "data-parallel"])
def test_engines_without_norms_by_block_are_refused_by_name(tmp_path, engine):
    with pytest.raises(ConfigError, match=f"--log-gradients layers .*{engine}"):
        lockstep.engine(
            engine,
            Net(),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            World(),
            gradients=lockstep.engines.gradient_norms.GradientNorms("layers", 1),
        )


# run.log


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"global_step": 3}, "global_step"),
        ({"own": 1.0, "loss": 1.0}, "loss"),
        ({"lr": 1.0}, "lr"),
        ({"running_loss": 1.0}, "running_loss"),
        ({"evaluation/loss": 1.0}, "evaluation/loss"),
        ({"train/size": 1.0}, "train/size"),
        ({"own": "high"}, "own"),
        ({"own": None}, "own"),
        ({"own": torch.zeros(2)}, "own"),
        ({"own": np.zeros(3)}, "own"),
        ({4: 1.0}, "4"),
    ],
)
def test_run_log_refuses_what_is_the_records_own_or_no_number(tmp_path, values, named):
    refused = False
    with lockstep.Run(config(tmp_path, max_steps=2, ckpt_freq=0), Parts()) as running:
        for _ in running:
            if not refused:
                with pytest.raises(UsageError, match=named):
                    running.log(values)
                refused = True
    text = (tmp_path / "r" / "metrics.jsonl").read_text()
    assert [json.loads(line).get("own") for line in text.splitlines()] == [None] * len(text.splitlines())


def test_run_log_takes_every_kind_of_number(tmp_path):
    given = {"a": 1, "b": 2.5, "d": np.float32(0.5), "e": np.int64(4), "f": math.nan, "g": np.array([6.0])}
    given["c"] = torch.tensor(3.5, requires_grad=True)
    with lockstep.Run(config(tmp_path, max_steps=1), Parts()) as running:
        for _ in running:
            running.log(given | {"train/own": 7.0})
    (record,) = [r for r in jsonl.read(tmp_path / "r" / "metrics.jsonl") if "train/own" in r]
    assert [record[name] for name in "abcdeg"] == [1, 2.5, 3.5, 0.5, 4, 6]
    assert math.isnan(record["f"])
