"""Optimizers whose states do not begin as zeros: asking for the state before the first step changes nothing."""

import pytest
import torch
from ranks import run
from support import build
from toys import Ragged

import lockstep
from lockstep.distributed.world import World
from lockstep.engines.registry import check_optimizer
from lockstep.errors import ConfigError

TASK = Ragged()
KINDS = {
    "NAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "SGD": {"momentum": 0.9},
}


def _norms(world, name, ask=True):
    """{optimizer: the gradients' norms}, at a constant rate; with `ask` the state is asked for at first."""
    found = {}
    for kind, settings in KINDS.items():
        if (name, kind) == ("fsdp", "Rprop"):
            continue
        made, batches = build(
            world, TASK, name, make=lambda m, k=kind, s=settings: getattr(torch.optim, k)(m.parameters(), lr=0.01, **s)
        )
        if ask:
            made.state_dict()
        found[kind] = []
        for _, group in batches.from_step(0):
            for batch in group:
                with made.accumulate(batch is group[-1]):
                    made.backward(TASK.loss(made.model, batch.data), batch.weight / 50)
            found[kind].append(float(made.step(1.0).norm))
    return found


@pytest.mark.slow
def test_reading_the_state_before_step_1_changes_nothing():
    wanted = _norms(World(), "single", ask=False)
    for found in (_norms(World(), "single"), *(run(_norms, 2, name)[0] for name in ("ddp", "zero", "fsdp"))):
        for kind, norms in found.items():
            assert norms == pytest.approx(wanted[kind], rel=1e-10), kind


class Numbers(torch.optim.SGD):
    """Keeps plain numbers beside its tensors."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state |= {"calls": state.get("calls", 0) + 1, "sum": state.get("sum", 0.0) + 0.25, "ready": True}


def test_numbers_in_an_optimizers_state_keep_their_type():
    made = []
    for steps in (3, 0):
        model = torch.nn.Linear(2, 1)
        optimizer = Numbers(model.parameters(), lr=0.1, momentum=0.9)
        made.append((lockstep.engine("single", model, optimizer, World()), model, optimizer))
        for _ in range(steps):
            made[-1][0].backward(model(torch.ones(1, 2)).sum())
            made[-1][0].step(1.0)
    (first, _, _), (second, model, optimizer) = made
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    assert (state["optimizer/bias/calls"].item(), state["optimizer/bias/sum"].dtype) == (3.0, torch.float64)
    second.load_state_dict(state)
    for parameter in model.parameters():
        kept = {key: value for key, value in optimizer.state[parameter].items() if not isinstance(value, torch.Tensor)}
        assert {key: (type(value), value) for key, value in kept.items()} == {
            "calls": (int, 3),
            "sum": (float, 0.75),
            "ready": (bool, True),
        }
    assert all(torch.equal(tensor, state[name]) for name, tensor in second.state_dict().items())


def _with_an_empty_group(world, name):
    def make(model):
        return torch.optim.SGD([{"params": list(model.parameters())}, {"params": []}], lr=0.01)

    made, batches = build(world, TASK, name, make=make)
    _, group = next(iter(batches.from_step(0)))
    for batch in group:
        with made.accumulate(batch is group[-1]):
            made.backward(TASK.loss(made.model, batch.data), batch.weight / 50)
    return float(made.step(1.0).norm)


@pytest.mark.parametrize("name", ["ddp", "zero", "fsdp"])
def test_a_group_may_be_empty(name):
    wanted = _with_an_empty_group(World(), "single")
    assert run(_with_an_empty_group, 2, name) == pytest.approx([wanted] * 2, rel=1e-10)


def test_deepspeed_refuses_dampening():
    damped = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ConfigError, match="--engine deepspeed .*the dampening of SGD; use dampening=0"):
        check_optimizer("deepspeed", damped, exact=False)


def test_one_fused_group_is_refused_under_exact_fsdp():
    pairs = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    groups = [{"params": [pairs[0]], "fused": True}, {"params": [pairs[1]]}]
    for mixed in (torch.optim.AdamW(groups, lr=0.1), torch.optim.AdamW(groups[::-1], lr=0.1)):
        with pytest.raises(ConfigError, match="--exact with --engine fsdp: the fused AdamW rounds"):
            check_optimizer("fsdp", mixed, exact=True)
        check_optimizer("fsdp", mixed, exact=False)
        check_optimizer("ddp", mixed, exact=True)


@pytest.mark.parametrize(
    ("kind", "settings", "wanted"),
    [
        ("Adagrad", {"initial_accumulator_value": 0.3}, {"sum": 0.3, "step": 0}),
        ("ASGD", {}, {"mu": 1.0, "eta": 0.0625, "ax": 0, "step": 0}),
        ("NAdam", {}, {"mu_product": 1.0, "exp_avg": 0, "exp_avg_sq": 0, "step": 0}),
        ("Rprop", {}, {"step_size": 0.0625, "prev": 0, "step": 0}),
        ("SGD", {"momentum": 0.9}, {"momentum_buffer": 0}),
        ("AdamW", {"amsgrad": True}, {"exp_avg": 0, "exp_avg_sq": 0, "max_exp_avg_sq": 0, "step": 0}),
    ],
)
def test_state_before_step_1_is_the_optimizers_initial_one(kind, settings, wanted):
    """And to have asked for it changes nothing of what is trained."""
    weights = []
    for ask in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).double()
        before = model.weight.detach().clone()
        made = lockstep.engine(
            "single", model, getattr(torch.optim, kind)(model.parameters(), lr=0.0625, **settings), World()
        )
        if ask:
            state = {name: t for name, t in made.state_dict().items() if name.startswith("optimizer/weight/")}
            assert {name.rpartition("/")[2]: set(t.flatten().tolist()) for name, t in state.items()} == {
                key: {value} for key, value in wanted.items()
            }
            assert torch.equal(model.weight, before)
            assert model.weight.grad is None
        for step in range(3):
            made.backward(made.model(torch.tensor([[1.0, -2.0, 0.5 + step]], dtype=torch.float64)).square().sum())
            made.step(1.0)
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def test_dampening_goes_with_every_other_engine():
    damped = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9, dampening=0.5)
    for name in ("single", "ddp", "zero", "fsdp"):
        check_optimizer(name, damped, exact=False)
