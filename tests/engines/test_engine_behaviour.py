"""What engines find out and say: unused parameters, tied weights, blocks, overflow, bytes."""

import pytest
import torch
from ranks import RankError, run
from small_runs import config
from support import alone, build, close, each, needs_filling, whole
from toys import Network, Ragged, train

import lockstep
from lockstep.config.engine_options import EngineOptions
from lockstep.distributed.spawn import start
from lockstep.distributed.world import World
from lockstep.engines.fsdp.apply import FILLS_UNUSED
from lockstep.engines.memory import describe, footprint


class Three(torch.nn.Module):
    """Three Linears, as FSDP is often shown with, and a fourth that some samples or none use."""

    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = torch.nn.Linear(8, 4), torch.nn.Linear(4, 16)
        self.layer3, self.extra = torch.nn.Linear(16, 4), torch.nn.Linear(4, 4)
        self.wanted = lambda x: False

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(x)).relu())
        return self.extra(x) if self.wanted(x) else x


class Plain(lockstep.Task):
    """The task of `Three`: `branch` is "never", "always" or "sometimes" (by the sample)."""

    def __init__(self, branch="never"):
        self.branch = branch

    def model(self):
        made = Three().double()
        made.wanted = {"never": lambda x: False, "always": lambda x: True, "sometimes": lambda x: bool(x.sum() > 0)}[
            self.branch
        ]
        return made

    def dataset(self, split):
        rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return torch.utils.data.TensorDataset(rows)

    def collate(self, samples):
        return torch.stack([sample[0] for sample in samples])

    def count(self, batch):
        return len(batch)

    def loss(self, model, batch):
        return model(batch).square().sum()


def weights(made):
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in made.state_dict().items()}


def numbers(made):
    """The state as lists, which travel between processes."""
    return {name: tensor.tolist() for name, tensor in weights(made).items()}


@pytest.mark.parametrize("branch", ["never", "sometimes", "always"])
def test_unused_parameters_are_handled_by_themselves(branch):
    task = Plain(branch)
    wanted = alone(task, size=8, micro=1, exact=False)
    settings = [(name, {"size": 8, "micro": micro}) for name in ("ddp", "zero", "fsdp") for micro in (1, 4)]
    settings.append(("fsdp", {"size": 8, "micro": 1, "find_unused_parameters": "true"}))
    found = run(each, 2, [(task, name, given) for name, given in settings])[0]
    other = alone(task, size=8, micro=4)
    for (name, given), result in zip(settings, found, strict=True):
        wanting = branch == "sometimes" or "find_unused_parameters" in given
        if name == "fsdp" and wanting and not FILLS_UNUSED:
            assert isinstance(result, str)
            assert "--engine fsdp" in result
            assert "torch 2.13" in result
            continue
        assert not isinstance(result, str), (name, result)
        close(result, wanted if given["micro"] == 1 else other, 1e-11)


class One(Plain):
    """A model of a single parameter: one of two ranks has no part of it; "ddp" has a buffer beside it."""

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 3, bias=False), Counts()).double()


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.count += 1
        return x


def _exchanged(world):
    """When fsdp's shards have gradients within two steps of four micro-batches, whether DDP sends buffers in forwards,
    and zero's moments after one step, two more askings and another step."""
    task = Plain("always")
    made, batches = build(world, task, "fsdp", size=8, micro=1, count=2)
    shards = []
    for _, micro in batches.from_step(0):
        for batch in micro:
            with made.accumulate(batch is micro[-1]):
                made.backward(task.loss(made.model, batch.data), batch.weight)
            shards.append({parameter.grad is not None for parameter in made.model.parameters()})
        made.step(1.0)
    ddp, _ = build(world, One(), "ddp")
    made, batches = build(world, One(), "zero", count=2)
    moments = []
    for stop in (1, 2):
        train(world, made, batches, One(), start=stop - 1, stop=stop)
        made.state_dict()
        moments.append(whole(made.state_dict()["optimizer/0.weight/exp_avg_sq"], world).tolist())
    return shards, ddp.model.will_sync_module_buffers(), moments


def test_gradients_are_exchanged_once_a_step_and_buffers_apart():
    made, batches = build(World(), One(), "single", count=2)
    moments = []
    for stop in (1, 2):
        train(World(), made, batches, One(), start=stop - 1, stop=stop)
        moments.append(whole(made.state_dict()["optimizer/0.weight/exp_avg_sq"], World()).tolist())
    for shards, sends, found in run(_exchanged, 2):
        assert shards == [{False}, {False}, {False}, {True}] * 2
        assert not sends
        torch.testing.assert_close(torch.tensor(found), torch.tensor(moments), rtol=1e-11, atol=0.0)


def _states(world, task, name, settings):
    made, batches = build(world, task, name, **settings)
    train(world, made, batches, task)
    return numbers(made)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_parameter_that_nobody_uses_is_not_decayed(name):
    """Zero gradients instead of none would let AdamW decay it, which a single process does not do."""
    mine = run(_states, 2, Plain(), name, {})[0]
    theirs = _states(World(), Plain(), "single", {})
    assert mine["model/extra.weight"] == theirs["model/extra.weight"]


def _lines(world, task, name):
    lines = []
    made, batches = build(world, task, name, lines=lines)
    train(world, made, batches, task)
    return lines


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=needs_filling)])
def test_one_line_says_that_parameters_are_unused(name):
    lines = run(_lines, 2, Plain("sometimes"), name)[0]
    assert [line for line in lines if "not used by every micro-batch" in line and "extra.weight" in line]
    assert not [line for line in run(_lines, 2, Plain("always"), name)[0] if "not used" in line]


def _changing(world, name, options):
    task = Plain("always")
    made, batches = build(world, task, name, count=4, **options)
    module = next(m for m in made.model.modules() if isinstance(m, Three))
    steps = iter(range(1000))
    module.wanted = lambda x: next(steps) < 6
    train(world, made, batches, task)


def test_branch_that_changes_later_is_named_with_the_flag():
    with pytest.raises(
        RankError, match=r"LockstepError.* extra\.weight, extra\.bias.*--engine\.find-unused-parameters"
    ):
        run(_changing, 2, "ddp", {"find_unused_parameters": "false"})
    run(_changing, 2, "ddp", {"find_unused_parameters": "true"})


def test_three_linears_are_one_unit_and_blocks_are_cut():
    lines = run(_lines, 2, Plain(), "fsdp")[0]
    assert lines[0] == "--engine fsdp, sharding full over [2] ranks: the model as one unit"
    lines = run(_lines, 2, Ragged(), "fsdp")[0]
    assert lines[0] == "--engine fsdp, sharding full over [2] ranks: 2 repeated layers (Sequential) and the rest"


def _tied(world, name):
    task = Ragged()
    made, batches = build(world, task, name, blocks=name == "fsdp", meta_init=name == "fsdp")
    train(world, made, batches, task)
    state = made.state_dict()
    names = [key for key in state if key.startswith(("optimizer/embedding", "optimizer/head"))]
    same = torch.equal(weights(made)["model/embedding.weight"], weights(made)["model/head.weight"])
    return same, sorted(names)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_tied_weights_stay_tied(name):
    same, names = run(_tied, 2, name)[1]
    assert same
    assert names == [f"optimizer/embedding.weight/{key}" for key in ("exp_avg", "exp_avg_sq", "step")]


def _overflow(world, name):
    """Six steps; in the third, one micro-batch, which one rank alone has, overflows."""
    task = Ragged(dtype=torch.float32)
    made, batches = build(world, task, name, count=6, precision="fp16")
    applied, changed, scales = [], [], []
    before = [p.detach().clone() for p in made.model.parameters()]
    for step, group in batches.from_step(0):
        for batch in group:
            with made.accumulate(batch is group[-1]):
                loss = task.loss(made.model, batch.data) / 50
                made.backward(loss * float("inf") if (step, batch.index) == (2, 1) else loss)
        applied.append(made.step(1.0).applied)
        scales.append(float(made.state_dict()["scaler/scale"]))
        after = [p.detach().clone() for p in made.model.parameters()]
        changed.append(any(not torch.equal(*pair) for pair in zip(before, after, strict=True)))
        before = after
    assert changed == applied
    return applied, scales


@pytest.mark.parametrize("name", ["ddp", "zero", "fsdp"])
def test_an_overflow_on_one_rank_is_skipped_by_all(name):
    found = run(_overflow, 2, name)
    assert found[0] == found[1]
    applied, scales = found[0]
    assert applied[2] is False
    assert applied[3:] == [True, True, True]
    assert scales[2] == scales[1] / 2


class Wide(Ragged):
    """Wide enough that no one parameter decides how evenly whole ones can be shared out."""

    def model(self):
        return Network(width=64, dtype=torch.float32)


def _held(world, name, options):
    task = Wide()
    made, batches = build(world, task, name, **options)
    train(world, made, batches, task)
    return tuple(footprint(made))


def test_bytes_are_split():
    whole, gradients, states = _held(World(), "single", {})
    assert gradients == whole
    assert states == pytest.approx(2 * whole, rel=0.01)
    assert run(_held, 2, "ddp", {}) == [(whole, gradients, states)] * 2
    for mine in run(_held, 2, "fsdp", {}):
        assert mine[0] == pytest.approx(whole / 2, rel=0.05)
        assert mine[1] == pytest.approx(gradients / 2, rel=0.05)
        assert mine[2] == pytest.approx(states / 2, rel=0.05)
    zero = run(_held, 2, "zero", {})
    assert sum(held[2] for held in zero) == states
    assert max(held[2] for held in zero) <= 1.05 * states * 0.5
    assert [held[:2] for held in zero] == [(whole, gradients)] * 2


def test_the_line_on_bytes():
    line = describe("zero", [[2048, 1024, 100], [2048, 1024, 3 * 2**20]])
    assert line == "engine zero holds per rank: parameters 2 KiB, gradients 1 KiB, optimizer states 100 B to 3 MiB"


def test_engines_serve_a_loop_of_ones_own():
    import lockstep

    model = torch.nn.Linear(4, 2)
    made = lockstep.engine("single", model, torch.optim.SGD(model.parameters(), lr=0.1), World(), clip=1.0)
    for number in range(3):
        with made.accumulate(last=number == 2):
            made.backward(made.model(torch.ones(1, 4)).square().sum() / 3)
    norm, applied = made.step(factor=1.0)
    assert applied
    assert norm > 0
    assert all(p.grad is None for p in model.parameters())


def test_meta_init_has_the_values_of_one_process():
    task = Ragged(dtype=torch.float32)
    for found in run(_initial, 2, task, "fsdp", {"meta_init": True}):
        assert found == _initial(World(), task, "single", {})


def _initial(world, task, name, options):
    made, _ = build(world, task, name, **options)
    return numbers(made)


def _searching(world, say, folder):
    world.leave()
    options = EngineOptions(find_unused_parameters="true")
    lockstep.Run(config(folder, device="cpu", engine="ddp", max_steps=3, engine_options=options), Plain("always"))()


def test_torchs_advice_against_the_search_is_hidden(tmp_path):
    start(_searching, 2, (str(tmp_path / "runs"),), folder=tmp_path)
    for rank in range(2):
        assert "find_unused_parameters" not in (tmp_path / f"rank-2-{rank}.log").read_text()
