"""What DeepSpeed keeps between steps: optimizer states begin as torch's do, and no gradient outlives its step."""

import importlib.util
import warnings

import pytest
import torch
from ranks import run
from torch.distributed.tensor import DTensor
from toys import Ragged, parts, train

from lockstep.config.engine_options import EngineOptions
from lockstep.distributed.world import World
from lockstep.engines.registry import engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra deepspeed is not installed"),
]
TASK = Ragged(dtype=torch.float32)


def close(found, wanted):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def _other_optimizer(world, kind, settings, stage):
    """Losses, where the optimizer is another than AdamW."""
    warnings.simplefilter("ignore")
    _, batches = parts(world, TASK, name="auto")
    torch.manual_seed(0)
    options = EngineOptions(zero_stage=stage) if stage else None
    name = "deepspeed" if stage else "single"
    made = engine(
        name, TASK.model(), lambda m: getattr(torch.optim, kind)(m.parameters(), **settings), world, options=options
    )
    return train(world, made, batches, TASK)[0]


@pytest.mark.parametrize(("kind", "settings"), [("NAdam", {}), ("Adagrad", {"initial_accumulator_value": 0.1})])
def test_states_begin_as_the_optimizers_own(kind, settings):
    """Not as zeros, which would make other steps of some optimizers."""
    wanted = _other_optimizer(World(), kind, settings, 0)
    for stage in (1, 3):
        close(run(_other_optimizer, 2, kind, settings, stage)[0], wanted)


def _kept_bytes(world, stage):
    """Bytes of the state that lie on this rank, of a model whose large tensors are every other one."""
    warnings.simplefilter("ignore")
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))  # weight, bias, weight, bias, ...
    options = EngineOptions(zero_stage=stage)
    made = engine("deepspeed", model, lambda m: torch.optim.AdamW(m.parameters()), world, options=options)
    made.backward(made.model(torch.ones(2, 32)).sum(), 1.0)
    made.step(1.0)
    state = made.state_dict()
    held = {name: tensor.to_local() for name, tensor in state.items() if isinstance(tensor, DTensor)}
    return sum(tensor.nbytes for name, tensor in held.items() if tensor.numel() == state[name].numel())


@pytest.mark.parametrize("stage", [2, 3])
def test_the_ranks_keep_about_as_much_of_the_state(stage):
    held = run(_kept_bytes, 2, stage)
    assert max(held) < 1.1 * min(held)
    assert sum(held) >= 3 * 4 * (32 * 32 + 32) * 4


class Branching(torch.nn.Module):
    """Two layers; the second is left out where `both` is False."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, both):
        x = self.first(x)
        return x + self.second(x) if both else x


def _norms(world, stage, offload):
    """The gradient's norm of four steps of four micro-batches: in the third, one leaves the layer out, in the last all.

    One that is left out by all has zeros under DeepSpeed, which the norm does not tell from none.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    name = "deepspeed" if world.size > 1 else "single"
    options = EngineOptions(zero_stage=stage, cpu_offload=offload) if world.size > 1 else None
    made = engine(name, Branching(), lambda m: torch.optim.SGD(m.parameters(), lr=0.01), world, options=options)
    generator, norms = torch.Generator().manual_seed(1), []
    each = 4 // world.size
    for step in range(4):
        rows = torch.randn(4, 3, 4, generator=generator)[world.rank * each :][:each]
        for place, x in enumerate(rows):
            with made.accumulate(place == each - 1):
                both = step < 2 or (step == 2 and place % 2 == 1)
                made.backward(made.model(x, both).square().sum(), 0.1)
        norms.append(float(made.step(1.0).norm))
    return norms


@pytest.mark.parametrize(("stage", "offload"), [(1, True), (2, False), (2, True), (3, False), (3, True)])
def test_unused_parameter_has_no_gradient_of_an_earlier_step(stage, offload):
    close(run(_norms, 2, stage, offload)[0], _norms(World(), 0, False))


def _taken_over(world, stage):
    """The state after a step of another engine in which the second layer had no gradient is taken, and gone on with."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    before = engine("single", Branching(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.1), World())
    batch = torch.arange(8.0).view(2, 4)
    before.backward(before.model(batch, False).square().sum(), 1.0)
    before.step(1.0)
    state = {name: tensor.detach().clone() for name, tensor in before.state_dict().items()}
    assert not any(name.startswith("optimizer/second") for name in state)
    options = EngineOptions(zero_stage=stage)
    after = engine(
        "deepspeed", Branching(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.1), world, options=options
    )
    after.load_state_dict(dict(state))
    found = after.state_dict()
    for name in ("first.weight", "second.weight"):
        kept = found[f"optimizer/{name}/exp_avg"]
        if kept.to_local().numel() == kept.numel():  # on its owner
            wanted = state.get(f"optimizer/{name}/exp_avg", torch.zeros(4, 4))
            assert torch.equal(kept.to_local(), wanted)
    for made in (before, after):
        made.backward(made.model(batch, True).square().sum(), 1 / (world.size if made is after else 1))
        made.step(1.0)
    kept = after.state_dict()["model/first.weight"]
    return kept.to_local().tolist() if kept.to_local().ndim else None, before.model.first.weight.tolist()


@pytest.mark.parametrize("stage", [1, 3])
def test_another_engines_state_may_lack_an_unused_parameter(stage):
    results = run(_taken_over, 2, stage)
    held = next(found for found, _ in results if found)
    close(held, results[0][1])


def _buffers(world):
    """The running mean in the state after a step, and the one of an engine that took it over."""
    warnings.simplefilter("ignore")
    made = []
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        made.append(
            engine(
                "deepspeed",
                model,
                lambda m: torch.optim.AdamW(m.parameters()),
                world,
                options=EngineOptions(zero_stage=2),
            )
        )
    before, after = made
    before.backward(before.model(torch.arange(8.0).reshape(2, 4)).sum(), 1.0)
    before.step(1.0)
    after.load_state_dict(before.state_dict())
    return [each.state_dict()["model/1.running_mean"].tolist() for each in made]


def test_the_state_has_the_buffers_too():
    for before, after in run(_buffers, 2):
        assert before == after
        assert any(before)
