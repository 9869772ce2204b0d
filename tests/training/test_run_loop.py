"""What a user holds, as users use it: the loop's body, the end of a run, and what they bring of their own."""

import dataclasses
import json
import math
import os
import signal
import time
import warnings
from functools import partial

import pytest
import torch
from ranks import RankError, run
from refusals import refuses
from small_runs import mark
from torch import nn
from toys import Ragged, taken

import lockstep
from lockstep import checkpoint
from lockstep.data.batches import Batches, StepPlan
from lockstep.data.sampler import Shuffled
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.logging.jsonl import read
from lockstep.training.step import recorder as bookkeeper


def config(folder, **changes):
    settings = {"experiment_name": "r", "batch_size": 8, "micro_batch_size": 2, "log_freq": 1, "ckpt_freq": 0}
    return lockstep.Config(**settings | {"save_dir": str(folder), "max_steps": 6, "lr": 0.01} | changes)


def task():
    return Ragged(dropout=0.1, dtype=torch.float32)


def records(folder, name="r"):
    return read(folder / name / "metrics.jsonl")


def read_all(world, folder, engine):
    """What each step says, and what the records say."""
    found = []
    for step in lockstep.Run(config(folder, engine=engine, eval_freq=3), task(), world):
        evaluated = step.evaluation and (step.evaluation.step, step.evaluation.loss, step.evaluation.metrics)
        found.append((step.global_step, step.epoch, step.loss, step.lr, step.norm, step.applied, evaluated))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_says_what_its_record_says(tmp_path, ranks):
    found = run(read_all, ranks, tmp_path, "auto")
    assert all(each == found[0] for each in found)
    logged = [record for record in records(tmp_path) if "lr" in record]
    evaluated = [record for record in records(tmp_path) if "evaluation/loss" in record]
    assert [row[0] for row in found[0]] == [1, 2, 3, 4, 5, 6]
    for row, record in zip(found[0], logged, strict=True):
        assert row[1] == pytest.approx(record["epoch"] + record["epoch_progress"])
        assert row[2] == pytest.approx(record["running_loss"], rel=1e-12)
        assert (row[3], row[4], row[5]) == (record["lr"], record["grad_norm"], True)
    told = [(row[6][0], row[6][1], row[6][2]["accuracy"]) for row in found[0] if row[6]]
    assert told == [(r["global_step"], r["evaluation/loss"], r["evaluation/accuracy"]) for r in evaluated]
    assert [step for step, *_ in told] == [3, 6]


def test_a_loss_that_was_not_read_in_time_is_refused(tmp_path):
    steps = iter(lockstep.Run(config(tmp_path), task()))
    first, _ = next(steps), next(steps)
    with pytest.raises(LockstepError, match=r"step 1 .*step\.loss"):
        print(first.loss)


def read_alone(world, folder):
    for step in lockstep.Run(config(folder), task(), world):
        if world.is_main:
            print(step.loss)


def test_loss_read_on_one_rank_alone_is_named_within_seconds(tmp_path):
    with pytest.raises(RankError):
        run(read_alone, 2, tmp_path)
    said = "".join(path.read_text() for path in (tmp_path / "r" / "logs").glob("*.log"))
    assert "rank 0: the loss was read after step 1, and not on rank 1: read it on every rank, and print it on" in said


def stopping(world, folder, who):
    session = lockstep.Run(config(folder, max_steps=60), task(), world)
    for step in session:
        if step.global_step == 3 and (who is None or world.rank == who):
            session.stop()
    return session.status, session.result.global_step, session.result.exit_code


def test_stop_saves_and_ends_after_the_step_on_any_ranks(tmp_path):
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        assert run(stopping, ranks, folder, None) == [("stopped", 3, 0)] * ranks
        assert checkpoint.list_steps(folder / "r") == [3]


def test_a_stop_that_one_rank_asks_for_is_agreed_on(tmp_path):
    first, second = run(stopping, 2, tmp_path, 1)
    assert first == second
    assert first[0] == "stopped"
    assert 3 < first[1] < 60
    assert checkpoint.list_steps(tmp_path / "r") == [first[1]]


def leaving(world, folder, alike, seconds=0.0):
    for step in lockstep.Run(config(folder), task(), world):
        if step.global_step == 2 and (alike or world.rank == 0):
            time.sleep(seconds * world.rank)
            break
    return True


def test_leaving_the_loop_saves_where_all_ranks_do(tmp_path):
    assert run(leaving, 2, tmp_path, True) == [True, True]
    assert checkpoint.list_steps(tmp_path / "r") == [2]
    assert run(taking, 2, tmp_path) == [([2, 3, 4, 5], 0)] * 2


def test_leaving_the_loop_waits_for_ranks_that_do_so_later(tmp_path):
    assert run(leaving, 2, tmp_path, True, 1.3) == [True, True]
    assert checkpoint.list_steps(tmp_path / "r") == [2]


def taking(world, folder):
    return taken(config(folder), task(), world)


def test_a_sweep_in_one_process_with_break(tmp_path):
    losses = {}
    for lr in (0.003, 0.01, 0.03):
        for step in lockstep.Run(config(tmp_path, experiment_name=f"lr-{lr}", lr=lr), task()):
            losses[lr] = step.loss
            if step.global_step == 4:
                break
        assert checkpoint.list_steps(tmp_path / f"lr-{lr}") == [4]
    assert len(set(losses.values())) == 3
    whole = [step.loss for step in lockstep.Run(config(tmp_path, experiment_name="whole"), task())]
    assert losses[0.01] == whole[3]


def test_ctrl_c_in_a_loop_saves_and_is_a_keyboard_interrupt(tmp_path, capsys):
    session, after = lockstep.Run(config(tmp_path), task()), []
    try:
        for step in session:
            if step.global_step == 2:
                signal.raise_signal(signal.SIGINT)
        after.append("the loop ended as if it were finished")
    except KeyboardInterrupt as stopped:
        after.append(str(stopped).partition(" after")[0])
    assert after == ["saved"]
    assert session.status == "interrupted"
    (saved,) = checkpoint.list_steps(tmp_path / "r")
    assert saved in (2, 3)
    assert f"interrupted: saved after step {saved} of 6;" in capsys.readouterr().out
    assert taken(config(tmp_path), task())[0] == list(range(saved, 6))


class Impatient(Ragged):
    armed = False  # not in the trial

    def loss(self, model, batch):
        if self.armed:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        return super().loss(model, batch)


def test_a_second_ctrl_c_is_recorded_as_one_and_not_as_a_failure(tmp_path):
    own = Impatient()
    with lockstep.Run(config(tmp_path), own) as run:
        own.armed = True
        with pytest.raises(KeyboardInterrupt):
            run()
    ended = json.loads((tmp_path / "r" / "ended.json").read_text())
    assert (ended["status"], ended["code"]) == ("interrupted", 130)


class Mistaken(Ragged):
    def metrics(self, model, batch):
        return {"accuracy": (model(batch["inputs"]), 1)}


def test_a_mistake_in_metrics_is_one_line_before_step_1(tmp_path):
    with pytest.raises(UsageError, match=r"the task's `metrics` failed at the first micro-batch.*KeyError: 'inputs'"):
        lockstep.train(config(tmp_path), Mistaken(dtype=torch.float32))
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_is_run_again_after_an_error_goes_on(tmp_path):
    errors = []  # a notebook keeps the last one, and with it the frames

    def cell(mistake):
        session = lockstep.Run(config(tmp_path), task())
        seen = []
        for step in session:
            seen.append(step.global_step)
            if step.global_step == 2 and mistake:
                raise ZeroDivisionError
        return seen

    try:
        cell(mistake=True)
    except ZeroDivisionError as error:
        errors.append(error)
    assert cell(mistake=False) == [3, 4, 5, 6]


def test_a_run_is_a_context_with_a_model_before_its_first_step(tmp_path):
    assert not (tmp_path / "r").exists()
    with lockstep.Run(config(tmp_path), task()) as session:
        assert session.status == "running"
        before = next(session.model.parameters()).clone()
        average = torch.optim.swa_utils.AveragedModel(session.model)
        session.keep("average", average)
        for step in session:
            average.update_parameters(session.model)
            session.log({"average/steps": average.n_averaged, "half": step.global_step / 2})
    assert session.status == "finished"
    assert not torch.equal(before, next(session.model.parameters()))
    mine = [record for record in records(tmp_path) if "half" in record]
    assert [(r["global_step"], r["half"], r["average/steps"]) for r in mine] == [(k, k / 2, k) for k in range(1, 7)]
    with refuses(UsageError, "finished", "Run"):
        session.__enter__()


def test_unentered_run_is_stopped_and_an_ended_one_has_results(tmp_path):
    with lockstep.Run(config(tmp_path), task()) as session:
        pass
    assert (session.status, session.result.global_step) == ("stopped", 0)
    lockstep.train(config(tmp_path), task())
    learnt = lockstep.load(tmp_path / "r", task(), which="last").state_dict()
    with lockstep.Run(config(tmp_path), task()) as session:
        assert list(session) == []
    assert session.status == "finished"
    found = session.model.state_dict()
    assert found.keys() == learnt.keys()
    assert all(torch.equal(found[name], value) for name, value in learnt.items())


def averaged(world, folder, stop_at, engine="auto"):
    with lockstep.Run(config(folder, stop_at=stop_at, engine=engine), task(), world) as session:
        average = torch.optim.swa_utils.AveragedModel(session.model)
        session.keep("average", average)
        for _ in session:
            average.update_parameters(session.model)
    return [value.tolist() for value in average.state_dict().values()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_kept_goes_on_with_the_run(tmp_path, ranks):
    whole = run(averaged, ranks, tmp_path / "whole", 0)
    run(averaged, ranks, tmp_path / "cut", 3)
    assert run(averaged, ranks, tmp_path / "cut", 0) == whole


def test_what_cannot_be_kept_is_refused(tmp_path):
    session = lockstep.Run(config(tmp_path), task())
    with pytest.raises(UsageError, match="belongs between"):
        session.keep("a", nn.Linear(1, 1))
    with session:
        with refuses(UsageError, "run.keep", "a/b"):
            session.keep("a/b", nn.Linear(1, 1))
        with refuses(UsageError, "run.keep", "int", "load_state_dict"):
            session.keep("a", 3)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        with refuses(UsageError, "run.keep", "'state'"):
            session.keep("a", optimizer)


def cycled(world, folder, engine, exact, name):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    settings = config(folder, engine=engine, exact=exact, max_steps=10, experiment_name="exact" if exact else "plain")
    optim = lockstep.Optim(name=name, schedule="one-cycle", clip=0.0, weight_decay=0.0)
    session = lockstep.Run(dataclasses.replace(settings, optim=optim), Ragged(dtype=torch.float32), world)
    rates = [step.lr for step in session]
    return rates, [parameter.tolist() for parameter in session.model.parameters()] if engine != "fsdp" else None


def by_torchs_cycle(name, steps=10):
    """A plain loop over the same micro-batches with torch's scheduler, which cycles the momentum too."""
    own = Ragged(dtype=torch.float32)
    torch.manual_seed(0)
    model, data = own.model(), own.dataset("train")
    made = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": partial(torch.optim.AdamW, weight_decay=0.0)}[name]
    optimizer = made(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
    rates = []
    for step, micro in Batches(own, data, Shuffled(len(data), 0), StepPlan(8, 2, 8 * steps), World()).from_step(0):
        items = sum(batch.items for batch in micro)
        for batch in micro:
            (own.loss(model, batch.data) / items).backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 < steps:
            schedule.step()
    return rates, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_one_cycle_is_torchs_with_its_momentum_on_any_engine(tmp_path, name):
    rates, wanted = by_torchs_cycle(name)
    found = [cycled(None, tmp_path / "single", "single", False, name)]
    for engine in ("ddp", "zero", "fsdp"):
        found += [run(cycled, 2, tmp_path / engine, engine, exact, name)[0] for exact in (False, True)]
    for mine, weights in found:
        assert mine == pytest.approx(rates)
        for one, other in zip(weights or [], wanted, strict=weights is not None):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=2e-4, atol=1e-5)
    last = [record["running_loss"] for record in records(tmp_path / "single", "plain") if "lr" in record][-1]
    for engine in ("ddp", "zero", "fsdp"):
        for how in ("plain", "exact"):
            lines = [record["running_loss"] for record in records(tmp_path / engine, how) if "lr" in record]
            assert lines[-1] == pytest.approx(last, rel=1e-4)


class Seen(lockstep.Task):
    """A small network that keeps the last batch."""

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def dataset(self, split):
        rows = torch.arange(32.0).view(8, 4) / 32
        return torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True)) if split == "train" else None

    def loss(self, model, batch):
        self.batch = batch
        return nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_first_loss_is_that_of_a_script_with_the_same_seed(tmp_path, seed):
    own = Seen()
    settings = config(tmp_path, seed=seed, batch_size=4, micro_batch_size=4, max_steps=1, precision="float32")
    (found,) = [step.loss for step in lockstep.Run(settings, own)]
    torch.manual_seed(seed)
    model = own.model()
    assert found == nn.functional.mse_loss(model(own.batch[0]), own.batch[1]).item()


class Now(Ragged):
    """A schedule of its own in some steps, and what --optim.schedule says in the others."""

    def schedule(self, step, steps):
        return 0.5 if 3 <= step < 6 else None


def half_own(world, folder, engine, stop_at=0):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    optim = lockstep.Optim(name="adamw", schedule="one-cycle", clip=0.0, weight_decay=0.0)
    settings = config(folder, engine=engine, exact=True, max_steps=10, stop_at=stop_at, precision="float64")
    session = lockstep.Run(dataclasses.replace(settings, optim=optim), Now(), world)
    session()
    return mark(folder)


def test_momentum_cycles_in_the_remaining_steps_of_the_cycle(tmp_path):
    whole = half_own(None, tmp_path / "whole", "single")
    own, steps = Now(), 10
    torch.manual_seed(0)
    model, data = own.model(), own.dataset("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.0)
    cycle = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(cycle, 0.01, total_steps=steps)
    for step, micro in Batches(own, data, Shuffled(len(data), 0), StepPlan(8, 2, 8 * steps), World()).from_step(0):
        for batch in micro:
            (own.loss(model, batch.data) / sum(batch.items for batch in micro)).backward()
        (group,), (said,) = optimizer.param_groups, cycle.param_groups
        mine = 3 <= step < 6
        group["lr"] = 0.005 if mine else said["lr"]
        group["betas"] = (0.9 if mine else said["momentum"], 0.999)
        optimizer.step()
        optimizer.zero_grad()
        cycle.step()
        if step + 1 < steps:
            schedule.step()
    found = lockstep.load(tmp_path / "whole" / "r", Now(), which="last")
    for one, other in zip(found.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    for stop in (4, 8):
        half_own(None, tmp_path / f"{stop}", "single", stop)
        assert half_own(None, tmp_path / f"{stop}", "single") == whole, "a resume has the momentum of the step alone"
    assert run(half_own, 2, tmp_path / "zero", "zero") == [whole] * 2


class Own(Ragged):
    """SGD with momentum over two groups, and a schedule of its own."""

    def optimizer(self, model, config):
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        rest = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        return torch.optim.SGD([{"params": matrices, "lr": 0.5}, {"params": rest, "lr": 0.05}], momentum=0.9)

    def schedule(self, step, steps):
        return 1 - step / steps


def owned(world, folder, engine, exact=False):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    session = lockstep.Run(config(folder, engine=engine, exact=exact, log_freq=2), Own(dtype=torch.float32), world)
    rates = [step.lr for step in session]
    return rates, [parameter.tolist() for parameter in session.model.parameters()] if engine != "fsdp" else None


def by_hand(steps=6):
    """The same by hand: the very numbers of a plain loop over the same micro-batches."""
    own = Own(dtype=torch.float32)
    torch.manual_seed(0)
    model, data = own.model(), own.dataset("train")
    optimizer = own.optimizer(model, None)
    batches = Batches(own, data, Shuffled(len(data), 0), StepPlan(8, 2, 48), World())
    for step, micro in batches.from_step(0):
        if step == steps:
            break
        items = sum(batch.items for batch in micro)
        for batch in micro:
            (own.loss(model, batch.data) / items).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, base in zip(optimizer.param_groups, (0.5, 0.05), strict=True):
            group["lr"] = base * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.tolist() for parameter in model.parameters()]


def test_an_own_optimizer_and_schedule_are_a_plain_loops(tmp_path):
    rates, weights = owned(None, tmp_path, "single")
    assert rates == pytest.approx([0.5 * (1 - step / 6) for step in range(6)])
    for mine, wanted in zip(weights, by_hand(), strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    assert [r["lr"] for r in records(tmp_path) if "lr" in r] == pytest.approx([0.5 * 5 / 6, 0.25, 0.5 / 6])


@pytest.mark.parametrize("engine", ["ddp", "zero", "fsdp"])
def test_an_own_optimizer_goes_with_every_engine(tmp_path, engine):
    rates, weights = run(owned, 2, tmp_path / "two", engine)[0]
    alone, wanted = owned(None, tmp_path / "one", "single")
    assert rates == alone
    for mine, other in zip(weights or [], wanted, strict=weights is not None):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=1e-4, atol=1e-5)
    assert [r["running_loss"] for r in records(tmp_path / "two") if "lr" in r] == pytest.approx(
        [r["running_loss"] for r in records(tmp_path / "one") if "lr" in r], rel=1e-5
    )


@pytest.mark.parametrize(
    ("method", "value", "cause"),
    [
        ("optimizer", lambda self, model, config: 3, ("int", "torch.optim.Optimizer")),
        ("optimizer", lambda self, model, config: torch.optim.SGD(nn.Linear(2, 2).parameters()), (2, "`model`")),
        ("optimizer", lambda self, model, config: 1 / 0, ("ZeroDivisionError",)),
        ("schedule", lambda self, step, steps: math.nan, ("nan", "schedule(0, 6)")),
        ("schedule", lambda self, step, steps: 1 / step, ("step 1 of 6", "ZeroDivisionError")),
        ("schedule", lambda self, step, steps: "no", ("'no'", "schedule(0, 6)")),
    ],
)
def test_mistake_in_optimizer_or_schedule_is_refused_early(tmp_path, method, value, cause):
    wrong = type("Wrong", (Ragged,), {method: value})(dtype=torch.float32)
    with refuses(UsageError, f"`{method}`", *cause) as caught:
        lockstep.train(config(tmp_path), wrong)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_file_comes_back_as_a_model(tmp_path):
    session = lockstep.Run(config(tmp_path, eval_freq=2, checkpoint=lockstep.Checkpoint(keep=5), ckpt_freq=2), task())
    result = session()
    model = lockstep.load(tmp_path / "r", task(), which="last")
    assert not model.training
    for mine, other in zip(model.parameters(), session.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    best = lockstep.load(tmp_path / "r", task(), which="best")
    assert result.best.path == str(checkpoint.path_of(tmp_path / "r", result.best.step))
    third = lockstep.load(tmp_path / "r", task(), which=4)
    assert not all(map(torch.equal, third.parameters(), model.parameters()))
    assert all(map(torch.equal, best.parameters(), lockstep.load(result.best.path, task()).parameters()))
    with pytest.raises(ConfigError, match="which is 'newest'"):
        lockstep.load(tmp_path / "r", task(), which="newest")


def killed_before_the_evaluation(world, folder):
    bookkeeper.evaluate_all = lambda *_, **__: os._exit(9)
    lockstep.train(config(folder, checkpoint=lockstep.Checkpoint(mode="sync")), task(), world)


def test_evaluation_prevented_by_a_kill_is_made_by_the_next(tmp_path):
    torch.set_num_threads(1)  # as the process below has
    whole = lockstep.train(config(tmp_path, experiment_name="whole"), task())
    with pytest.raises(RankError):
        run(killed_before_the_evaluation, 1, tmp_path)
    assert checkpoint.list_steps(tmp_path / "r") == [6]  # the save comes before the evaluation
    again = lockstep.train(config(tmp_path), task())
    assert (again.status, again.evaluation, again.best.loss) == ("finished", whole.evaluation, whole.best.loss)
    assert lockstep.train(config(tmp_path), task()).evaluation == whole.evaluation  # from the records
    assert len([record for record in records(tmp_path) if "evaluation/loss" in record]) == 1  # not made once more


class Images(torch.utils.data.Dataset):
    """Bright or dark pictures, shifted at random; 37 of them, so that the last step is short."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.labels = torch.randint(2, (count,), generator=generator)
        self.pictures = torch.randn(count, 1, 8, 8, generator=generator) + self.labels.view(-1, 1, 1, 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pictures[index].roll(int(torch.randint(3, ())), dims=-1), self.labels[index]


class Convolutional(lockstep.Task):
    """As a user writes it: a network with BatchNorm, an augmentation, SGD with momentum, and OneCycle's shape."""

    def model(self):
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)),
        )

    def dataset(self, split):
        return Images(37 if split == "train" else 20)

    def loss(self, model, batch):
        pictures, labels = batch
        return nn.functional.cross_entropy(model(pictures), labels, reduction="sum")

    def metrics(self, model, batch):
        pictures, labels = batch
        return {"accuracy": ((model(pictures).argmax(1) == labels).sum(), len(labels))}

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def schedule(self, step, steps):
        half = steps / 2
        return max(0.05, step / half if step < half else 2 - step / half)


def convolved(world, folder, workers):
    settings = {"num_epochs": 4, "max_steps": 0, "batch_size": 16, "micro_batch_size": 4, "exact": True}
    settings |= {"data": {"workers": workers}, "eval_workers": 0, "engine": "auto"}
    session = lockstep.Run(config(folder, **settings), Convolutional(), world)
    found = [(step.loss, step.norm, step.lr) for step in session]
    state = [value.tolist() for value in session.model.state_dict().values()]
    return found, state, session.result.evaluation


def test_own_batchnorm_network_with_loaders_sgd_and_schedule(tmp_path):
    [alone] = run(convolved, 1, tmp_path / "alone", 0)
    assert len(alone[0]) == 10  # 4 x 37 samples: nine steps of 16, and one of 4
    assert [rate for *_, rate in alone[0]] == pytest.approx([0.1 * max(0.05, 1 - abs(1 - k / 5)) for k in range(10)])
    assert alone[2].metrics["accuracy"] > 0.8
    assert run(convolved, 2, tmp_path / "two", 2) == [alone, alone]  # the same bits, loader processes and all


def test_a_stop_in_the_last_step_is_the_plans_end(tmp_path):
    session = lockstep.Run(config(tmp_path), task())
    for step in session:
        if step.global_step == 6:
            session.stop()
    assert (session.status, session.result.exit_code) == ("finished", 0)


def test_error_in_the_body_is_saved_and_the_summary_shown_once(tmp_path, capsys):
    session = lockstep.Run(config(tmp_path), task())

    def body():
        with session:
            for step in session:
                print(1 / (step.global_step - 3))

    with pytest.raises(ZeroDivisionError):
        body()
    assert checkpoint.list_steps(tmp_path / "r") == [3]
    shown = capsys.readouterr().out
    assert shown.count("stopped: saved after step 3 of 6;") == 1
    assert session.status == "stopped"


class Half(Own):
    """Its own schedule for the first steps, and what the flags say for the rest."""

    def schedule(self, step, steps):
        return 0.25 if step < 3 else None


def test_a_schedule_that_says_nothing_leaves_it_to_the_flags(tmp_path):
    settings = config(tmp_path, optim={"schedule": "constant", "warmup_steps": 0})
    rates = [step.lr for step in lockstep.Run(settings, Half(dtype=torch.float32))]
    assert rates == pytest.approx([0.125] * 3 + [0.5] * 3)
