"""Each guard by itself: it sees what it is for, and keeps silent otherwise."""

import json
import math
import os
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_runs
import torch
from ranks import run
from torch import nn
from toys import Ragged

import lockstep
from lockstep.data.batches import MicroBatch
from lockstep.data.sampler import Shuffled
from lockstep.distributed.exchange import BusySeconds, StepExchange
from lockstep.distributed.world import World
from lockstep.engines.base import StepResult
from lockstep.engines.buffers import with_buffers
from lockstep.engines.registry import engine
from lockstep.engines.request import EngineRequest
from lockstep.errors import DataError, DifferenceError, LockstepError
from lockstep.guards import desync, startup
from lockstep.guards.desync import word_sum
from lockstep.guards.nonfinite import DeferredReader, ReadStep, Skips, origin
from lockstep.guards.samples import RetryingDataset
from lockstep.guards.spike import Spike
from lockstep.guards.startup import check_programs, check_weights
from lockstep.guards.straggler import Straggler
from lockstep.records import StepRecord
from lockstep.run_state import RunState


def test_a_spike_is_seen_and_noise_is_not():
    spike, draw = Spike(), random.Random(0)
    assert not any(spike.sees(step, draw.lognormvariate(0, 0.3)) for step in range(2000))
    assert spike.sees(2000, 40.0)
    assert spike.sees(2001, math.inf)
    assert not spike.sees(2002, 1.0)
    limit = spike.limit(2010)
    assert all(spike.sees(step, 100.0) for step in range(2010, 2510))  # a spike teaches nothing
    assert spike.limit(2510) == limit


@pytest.mark.parametrize("seed", range(20))
def test_rising_norms_are_no_spikes_and_one_among_them_is(seed):
    """As in `lockstep train --task images`: about 0.3 over the warm-up, then five times as much within 40 steps."""
    draw = random.Random(seed)
    levels = [0.3] * 30 + [0.3 * 5 ** (step / 40) for step in range(40)] + [1.5] * 130
    norms = [level * draw.lognormvariate(0, 0.2) for level in levels]
    spike = Spike()
    assert not any([spike.sees(step, norm) for step, norm in enumerate(norms)])  # noqa: C419 - each must be seen
    for at in (35, 45, 55, 65, 75, 100, 150):
        spike = Spike()
        found = [spike.sees(step, levels[at] * 6 if step == at else norm) for step, norm in enumerate(norms)]
        assert found.index(True) == at
        assert sum(found) == 1
    spike = Spike()  # what grows by a half in each step is no trend
    assert any(spike.sees(step, 0.3 * 1.5 ** max(0, step - 50)) for step in range(64))


def test_what_limits_a_step_is_known_two_steps_before_it():
    """So it is the same whether a norm is read at once or, as from a device, one step late."""
    norms = [1.0 + 0.01 * (step % 7) for step in range(100)]
    at_once, late, limits = Spike(), Spike(), []
    for step, norm in enumerate(norms):
        limits.append((at_once.limit(step), late.limit(step)))
        at_once.sees(step, norm)
        if step:
            late.sees(step - 1, norms[step - 1])
    assert all(one == other for one, other in limits)
    assert [one for one, _ in limits[:34]] == [math.inf] * 33 + [limits[33][0]]
    assert limits[33][0] == 3.0 * sorted(norms[:32])[16]
    assert at_once.sees(100, at_once.limit(100))
    assert not at_once.sees(101, at_once.limit(101) * (1 - 1e-9))


def test_norms_of_another_trained_set_are_relearned():
    """The norms rise tenfold with what is unfrozen, by step 50, and stay there."""
    norms = [(1.0 if step < 50 else 10.0) + 0.01 * (step % 7) for step in range(100)]
    at_once, late, limits = Spike(), Spike(), []
    for step, norm in enumerate(norms):
        if step == 50:
            at_once.forget(step)
            late.forget(step)
        limits.append((at_once.limit(step), late.limit(step)))
        assert not at_once.sees(step, norm)
        assert not step or not late.sees(step - 1, norms[step - 1])
        if step in (50, 60):  # as a checkpoint keeps it, which waits for every norm
            again = Spike()
            again.load(RunState(spike=at_once.state(0)).copy().spike)
            assert again.limit(step + 1) == at_once.limit(step + 1)
            at_once = again
    assert all(one == other for one, other in limits)
    assert [one == math.inf for one, _ in limits] == [step < 33 or 50 <= step < 83 for step in range(100)]
    late = Spike()
    assert not any(late.sees(step, 1.0) for step in range(49))
    late.forget(50)
    assert late.sees(49, 5.0)  # the step before, told late, has the limit that it was taken under


def test_a_spikes_limit_is_the_larger_of_the_two_estimates():
    wide = [1.0 + 0.5 * (step % 5) for step in range(32)]  # median 2, median deviation 0.5
    spike = Spike()
    assert not any(spike.sees(step, norm) for step, norm in enumerate(wide))
    assert spike.limit(33) == pytest.approx(2.0 + 8.0 * 1.4826 * 0.5)
    assert spike.limit(33) > 3.0 * 2.0


def test_a_spikes_state_goes_on_with_the_same_bits():
    draw = random.Random(3)
    norms = [draw.lognormvariate(0, 0.3) for _ in range(150)]
    whole, again = Spike(), Spike()
    for step, norm in enumerate(norms[:75]):
        whole.sees(step, norm)
    again.load(RunState(spike=whole.state(0)).copy().spike)
    for step, norm in enumerate(norms[75:], 75):
        assert again.limit(step) == whole.limit(step)
        assert again.sees(step, norm) == whole.sees(step, norm)


def test_nothing_is_a_spike_before_enough_is_known():
    spike = Spike()
    assert not any(spike.sees(step, norm) for step, norm in enumerate((1e-9, 1e9, 1.0)))


def heard(slow, kind, ratio, draw):
    base = {"data": 0.004, "computing": 0.02, "writing": 0.0}
    return [
        BusySeconds(
            **{
                name: base[name] * draw.uniform(0.97, 1.05) * (ratio if (rank, name) == (slow, kind) else 1)
                for name in base
            }
        )
        for rank in range(4)
    ]


@pytest.mark.parametrize(("kind", "ratio", "word"), [("computing", 1.3, "computing"), ("data", 4.0, "loading data")])
def test_a_slow_rank_is_named_within_twenty_steps_and_once(kind, ratio, word):
    straggler, exchange, draw = Straggler(1.2), SimpleNamespace(count=2, busy_by_rank=[]), random.Random(1)
    lines = []
    for step in range(40):
        exchange.count, exchange.busy_by_rank = exchange.count + 1, heard(2, kind, ratio, draw)
        line = straggler.after(step, exchange)
        if line:
            lines.append((step, line))
    assert len(lines) == 1
    assert lines[0][0] <= 20
    assert lines[0][1].startswith("rank 2 is slow: ")
    assert f"of {word}, the others" in lines[0][1]


def test_even_ranks_raise_no_alarm():
    straggler, exchange, draw = Straggler(1.2), SimpleNamespace(count=2, busy_by_rank=[]), random.Random(2)
    for step in range(2000):
        exchange.count, exchange.busy_by_rank = exchange.count + 1, heard(None, None, 1, draw)
        assert not straggler.after(step, exchange)


def bits(world, victim):
    state = {"model/a": torch.arange(6.0), "model/b": torch.ones(3), "optimizer/a/step": torch.tensor(3.0)}
    desync.check(state, world, 10)
    if world.rank == victim:
        state["model/b"][1] += 1e-7
    try:
        desync.check(state, world, 20)
    except DifferenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("size", "victim", "line"),
    [(2, 1, "after step 20 rank 0 and rank 1 differ"), (3, 1, "after step 20 rank 1 differs from the other ranks")],
)
def test_a_flipped_bit_names_rank_and_tensor(size, victim, line):
    said = run(bits, size, victim)
    assert len(set(said)) == 1
    assert said[0].startswith(line)
    assert " in model/b; " in said[0]


def test_no_flip_no_alarm():
    assert run(bits, 2, None) == ["", ""]


def swapped(world):
    try:
        desync.check({"model/a": torch.tensor([1.0, 2.0] if world.rank else [2.0, 1.0])}, world, 1)
    except DifferenceError as error:
        return str(error)
    return ""


def test_the_fingerprint_sees_positions():
    assert "model/a" in run(swapped, 2)[0]
    one = word_sum(torch.tensor([1.0, 2.0, 3.0]))
    assert one != word_sum(torch.tensor([2.0, 1.0, 3.0]))


def started(world, what):
    torch.manual_seed(world.rank if what == "weights" else 0)
    try:
        model = nn.Linear(3, 3)
        torch.manual_seed(world.rank if what == "reference" else 0)
        check_weights(world, {"model": model, "ref_model": nn.Linear(3, 3)})
        check_programs(world, object(), [1, 2, world.rank if what == "order" else 0])
    except LockstepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "line"),
    [("weights", " in model/bias"), ("reference", " in ref_model/bias"), ("order", "data order ("), ("nothing", "")],
)
def test_ranks_that_begin_differently_are_refused(what, line):
    said = run(started, 2, what)
    assert all(line in each for each in said)
    assert bool(said[0]) == (what != "nothing")


class Swapped(Ragged):
    """The second rank has two samples of the first micro-batch the other way round."""

    rank = 0

    def order(self, samples, seed):
        whole, places = Shuffled(samples, seed), [1, 0] if self.rank else [0, 1]

        class Order:
            def at(self, start, stop):
                epochs, found = whole.at(start, stop)
                if start == 0:
                    found[:2] = found[places]
                return epochs, found

        return Order()


def ordered(world, folder):
    task = Swapped()
    task.rank = world.rank
    try:
        lockstep.train(small_runs.config(folder, batch_size=2, micro_batch_size=2), task, world)
    except LockstepError as error:
        return str(error)
    return ""


def test_ranks_with_other_orders_are_refused_before_step_1(tmp_path):
    assert all("data order (" in said for said in run(ordered, 2, tmp_path))


class Trap(nn.Module):
    def forward(self, x):
        return x / (x - 3)


def read_step(micro, losses, norm=math.nan):
    return ReadStep(StepRecord(7, 4, [], None, 1.0), micro, norm, losses)


def test_the_first_module_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Identity(), Trap(), nn.Identity())
    micro = [MicroBatch(torch.tensor([1.0]), 0, 1, 1.0), MicroBatch(torch.tensor([3.0]), 1, 1, 1.0)]
    found = origin(
        read_step(micro, [0.5, math.inf]),
        model,
        lambda batch: model(batch.data).sum(),
        lambda step, index: None,
        lambda step, index: [10 * index, 10 * index + 1],
        World(),
    )
    assert found == "micro-batch 1 (samples 10, 11) on rank 0: the first output that is not finite is of module '1'"
    assert not any(module._forward_hooks for module in model.modules())


def test_a_loss_that_is_finite_the_second_time_says_so():
    model = nn.Identity()
    step = read_step([MicroBatch(torch.tensor([1.0]), 0, 1, 1.0)], [math.nan])
    found = origin(step, model, lambda b: model(b.data).sum(), lambda *_: None, lambda *_: [5], World())
    assert found.startswith("micro-batch 0 (samples 5) on rank 0: its loss was not finite, but is when recomputed")
    assert found.endswith("suspect the hardware")


def test_on_a_cpu_a_step_is_read_at_once():
    record = StepRecord(3, 4, [torch.tensor(2.0)], torch.tensor(1.5), 1.0)
    (step,) = DeferredReader(torch.device("cpu")).add(record, [])
    assert (step.norm, step.losses) == (1.5, [2.0])


@pytest.mark.parametrize("lag", [1, 2])
def test_a_reader_that_is_late_gives_the_step_before(monkeypatch, lag):
    monkeypatch.setattr(DeferredReader, "lag", lag)
    reader = DeferredReader(torch.device("cpu"))
    records = [StepRecord(k, 4, [torch.tensor(2.0 + k)], torch.tensor(1.5 * k), 1.0) for k in range(3)]
    found = [[(s.record.step, s.norm, s.losses, s.micro) for s in reader.add(r, [r.step])] for r in records]
    landed = [[(0, 0.0, [2.0], [0])], [(1, 1.5, [3.0], [1])]]
    assert found == [[] for _ in range(lag)] + landed[: 3 - lag]
    assert [(step.record.step, step.norm) for step in reader.rest()] == [(1, 1.5), (2, 3.0)][-lag:]
    assert list(reader.rest()) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(fused, bad):
    model = nn.Linear(3, 2)
    made = engine("single", model, lambda held: torch.optim.AdamW(held.parameters(), fused=fused), World(), clip=1.0)
    made.backward(model(torch.ones(1, 3)).sum())
    assert made.step(1.0).applied
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    made.backward(model(torch.ones(1, 3)).sum() * bad)
    assert not made.step(1.0).applied
    assert all(torch.equal(before[name], tensor) for name, tensor in made.state_dict().items())


@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_not_finite_loss_moves_nothing_with_a_finite_gradient(weight, bad):
    model = nn.Linear(3, 2)
    made = engine("single", model, lambda held: torch.optim.SGD(held.parameters(), lr=0.1), World())
    before = model.weight.detach().clone()
    made.backward(model(torch.ones(1, 3)).sum() + bad, weight)
    assert not made.step(1.0).applied
    made.backward(model(torch.ones(1, 3)).sum(), weight)
    assert made.step(1.0).applied
    assert torch.allclose(model.weight, before - 0.1 * weight)


@pytest.mark.parametrize("known", [True, False], ids=["the host knows", "the device alone knows"])
def test_buffers_are_put_back_where_a_step_is_not_applied(known):
    class Late:  # answers as a device's fused optimizer does
        def __init__(self, inner):
            self.model, self.inner = inner.model, inner

        def accumulate(self, last, counts=True):
            return self.inner.accumulate(last)

        def backward(self, loss, weight=1.0):
            self.inner.backward(loss, weight)

        def step(self, factor=None, limit=math.inf, momentum=None, evaluate=None):
            norm, applied = self.inner.step(factor, limit, momentum)
            return StepResult(norm, applied if known else None)

    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    model.register_buffer("table", torch.arange(3))
    plain = engine("single", model, lambda held: torch.optim.SGD(held.parameters(), lr=0.1), World())
    made = with_buffers(Late(plain.inner.inner), model, World(), EngineRequest())
    good = []
    for inputs, limit in (
        ([1.0, 3.0], math.inf),
        ([math.nan] * 2, math.inf),
        ([9.0, 5.0], 1e-9),
        ([2.0, 4.0], math.inf),
    ):
        with made.accumulate(True):
            made.backward(model(torch.tensor([inputs, [0.5, 0.25]])).sum())
        made.step(1.0, limit)
        good.append((model[0].running_mean.tolist(), int(model[0].num_batches_tracked)))
    assert good[0] == good[1] == good[2]
    assert good[3][1] == 2
    assert good[3][0] == pytest.approx([0.9 * 0.1 * 0.75 + 0.1 * 1.25, 0.9 * 0.1 * 1.625 + 0.1 * 2.125])


def test_a_norm_that_is_not_below_the_limit_moves_nothing():
    model = nn.Linear(3, 2)
    made = engine("single", model, lambda held: torch.optim.SGD(held.parameters(), lr=0.1, momentum=0.9), World())
    norm = math.sqrt(8.0)  # the gradient of each of the 6 weights and 2 biases is 1
    before = model.weight.detach().clone()
    for limit, moved in ((-math.inf, False), (1.0, False), (float(torch.tensor(norm)), False), (2.83, True)):
        made.backward(model(torch.ones(1, 3)).sum())
        result = made.step(1.0, limit)
        assert (float(result.norm), result.applied) == (pytest.approx(norm), moved)
        assert all(p.grad is None for p in model.parameters())
    assert torch.allclose(model.weight, before - 0.1)  # as if it were the first step: the momentum is its gradient


PLAN = {"seed": 0, "lr": 0.1}


def test_steps_are_left_out_up_to_a_limit(tmp_path):
    skips = Skips(tmp_path / "skips.json", 2, World(), PLAN)
    skips.add(3, "bad")
    skips.add(5, "bad")
    skips.add(5, "bad")
    with pytest.raises(LockstepError, match="bad; 2 steps were skipped before .--guards.limit"):
        skips.add(9, "bad")
    assert Skips(tmp_path / "skips.json", 2, World(), PLAN).steps == [3, 5]
    assert Skips(tmp_path / "skips.json", 2, World(), PLAN | {"seed": 1}).steps == []  # other steps by these numbers
    text = (tmp_path / "skips.json").read_text()
    assert '"skipped": [4, 6]' in text
    (tmp_path / "skips.json").write_text(text.replace('"skipped": [4, 6]', '"steps": [3, 5]'))  # an older file
    assert Skips(tmp_path / "skips.json", 2, World(), PLAN).steps == [3, 5]
    (tmp_path / "skips.json").write_text("[3")
    assert Skips(tmp_path / "skips.json", 2, World(), PLAN).steps == []


def listed(world, folder):
    own = Path(folder) / str(world.rank)  # a file system that shows each rank something else
    skips = Skips(own / "skips.json", 3, world, PLAN)
    found = list(skips.steps)
    try:
        skips.add(9, "bad")
    except LockstepError as error:
        return found, type(error).__name__
    return found, skips.steps


def test_what_rank_0_reads_of_the_steps_is_told_to_all(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        Skips(tmp_path / str(rank) / "skips.json", 3, World(), PLAN).add(4 + rank, "bad")
    assert run(listed, 2, str(tmp_path)) == [([4], [4, 9])] * 2
    shutil.rmtree(tmp_path / "0")  # rank 0 cannot write
    assert run(listed, 2, str(tmp_path)) == [([], "CheckpointError"), ([], "PeerError")]


def test_the_list_of_steps_is_not_written_through_a_link(tmp_path):
    (tmp_path / "skips.json").symlink_to(tmp_path / "target")
    Skips(tmp_path / "skips.json", 2, World(), PLAN).add(3, "bad")
    assert not (tmp_path / "target").exists()
    assert json.loads((tmp_path / "skips.json").read_text())["skipped"] == [4]
    with pytest.raises(LockstepError, match="skips.json.*check the free space"):
        Skips(tmp_path / "none" / "skips.json", 2, World(), PLAN).add(3, "bad")


class Broken:
    path = "images/train"

    def __init__(self, bad, times):
        self.bad, self.left = bad, times

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index in self.bad and self.left:
            self.left -= 1
            raise OSError(5, "Input/output error", f"{index}.png")
        return index


def test_a_bad_sample_is_tried_again_then_named():
    dataset = RetryingDataset(Broken({4}, 2), retries=2, skips=0, rank=3)
    assert [dataset[index] for index in range(6)] == list(range(6))
    assert dataset.counts.tolist() == [2, 0]
    dataset = RetryingDataset(Broken({4}, 99), retries=1, skips=0, rank=3)
    with pytest.raises(DataError, match=r"rank 3: sample 4 \(4.png\) cannot be loaded: OSError.*--guards.bad-samples"):
        dataset[4]


def test_bad_samples_are_left_out_up_to_a_number():
    dataset = RetryingDataset(Broken({3, 4, 5}, 999), retries=0, skips=2, rank=0)
    assert dataset[4] == 0  # 5 is bad too: the one after takes the place
    assert [dataset[4], dataset[5]] == [0, 0]  # in another epoch they do not count again
    with pytest.raises(DataError, match="sample 3 .*; 2 were skipped before"):
        dataset[3]
    assert dataset.counts.tolist() == [0, 2]
    with pytest.raises(DataError, match="5 were skipped before"):  # all are bad
        RetryingDataset(Broken(set(range(6)), 999), retries=0, skips=99, rank=0)[4]


def test_a_guarded_dataset_is_otherwise_the_same():
    class Many(Broken):
        draws_random = False

        def __getitems__(self, indices):
            return [index * 10 for index in indices]

    dataset = RetryingDataset(Many(set(), 0), retries=0, skips=0, rank=0)
    assert dataset.__getitems__([1, 2]) == [10, 20]
    assert dataset.draws_random is False
    assert not hasattr(RetryingDataset(Broken(set(), 0), retries=0, skips=0, rank=0), "__getitems__")
    assert (len(dataset), dataset[3]) == (6, 3)
    with pytest.raises(AttributeError):
        dataset.path  # what nobody in here asks a dataset for is not passed on


def uneven(world):
    exchange = StepExchange(world, lambda step: 1, None, last=20 if world.rank else 3)
    try:
        for step in range(3):
            exchange.global_items(step)
    except LockstepError as error:
        return str(error)
    return ""


def test_uneven_work_is_an_error_with_the_counts():
    said = run(uneven, 2)
    assert all("rank 0 has 3, rank 1 has 20 steps" in each for each in said)


def broken(world):
    def ahead(step):
        if world.rank and step:  # before it has sent anything of the exchange for step 1
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    exchange = StepExchange(world, ahead, None)
    exchange.global_items(0)
    exchange.send(0)
    for _ in range(500):
        if exchange.has_failed():
            raise AssertionError("rank 0 saw it")
        time.sleep(0.02)


def test_another_thread_sees_that_an_exchange_failed():
    with pytest.raises(AssertionError) as caught:
        run(broken, 2, timeout=20.0)
    assert caught.value.rank == 1
    assert "rank 0 saw it" in str(caught.value)


def test_the_codes_mark_does_not_depend_on_the_order_of_a_folder(monkeypatch):
    root = Path(startup.__file__).parents[1]
    before, rglob = startup._digest(root), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda *given: sorted(rglob(*given), reverse=True))
    assert startup._digest(root) == before
