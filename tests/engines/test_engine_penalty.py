"""A penalty counts once a step, whatever the number of micro-batches and ranks."""

import warnings

import pytest
import torch
from ranks import run
from support import digest
from torch import nn
from toys import Network, Ragged

import lockstep
from lockstep.distributed.world import World
from lockstep.engines.registry import check_penalty
from lockstep.errors import ConfigError, DataError

PENALTIES = {
    "l1": lambda model: 0.1 * sum(p.abs().sum() for p in model.parameters()),
    "norm": lambda model: sum((p.square().sum() + 1e-6).sqrt() for p in model.parameters()),
}


def _fit(world, name, kind, exact, **settings):
    """(the penalty and the norm of each step, digest of the state, parameters)"""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    torch.manual_seed(0)
    model = Network()
    made = lockstep.engine(
        name,
        model,
        lambda held: torch.optim.SGD(held.parameters(), lr=0.1, momentum=0.9),
        world,
        clip=0.5,
        exact_micro_batches=4 if exact else 0,
        penalty=PENALTIES[kind],
        **settings,
    )
    rows = torch.randint(29, (4, 3, 12), generator=torch.Generator().manual_seed(1))
    mine = range(4)[world.rank * 4 // world.size : (world.rank + 1) * 4 // world.size]
    found = []
    for _ in range(3):
        for place in mine:
            with made.accumulate(place == mine[-1]):
                made.backward(made.model(rows[place]).square().mean(), 0.25)
        result = made.step(1.0)
        found.append([float(result.penalty), float(result.norm)])
    state = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return found, digest(made, world), {n: p.detach().tolist() for n, p in state.items()}


def _oracle(kind):
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = torch.randint(29, (4, 3, 12), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        penalty = PENALTIES[kind](model)
        (model(rows.flatten(0, 1)).square().mean() + penalty).backward()
        found.append([penalty.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))])
        optimizer.step()
    return found, {name: p.tolist() for name, p in model.named_parameters()}


def _each(world, cases):
    return [_fit(world, *case) for case in cases]


def _close(found, wanted):
    for mine, other in zip(found[0], wanted[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-11)
    for name, value in wanted[1].items():
        torch.testing.assert_close(
            torch.tensor(found[2][name], dtype=torch.float64),
            torch.tensor(value, dtype=torch.float64),
            rtol=1e-11,
            atol=1e-13,
        )


@pytest.mark.parametrize("kind", PENALTIES)
def test_the_penalty_of_every_engine_is_plain_torchs(kind):
    wanted = _oracle(kind)
    one = _fit(World(), "single", kind, True)
    _close(one, wanted)
    cases = [(name, kind, exact) for name in ("ddp", "zero", "fsdp") for exact in (False, True)]
    cases.remove(("fsdp", kind, True))
    for case, found in zip(cases, run(_each, 2, cases)[0], strict=True):
        _close(found, wanted)
        if case[2]:
            assert found[1] == one[1], case


def test_the_loss_scale_of_float16_is_taken_out():
    wanted = _fit(World(), "single", "l1", False)
    found = _fit(World(), "single", "l1", False, loss_scaling=True)
    _close(found, (wanted[0], wanted[2]))


@pytest.mark.parametrize(
    ("penalty", "said"),
    [
        (lambda model: model.weight.abs(), r"shape \[1, 2\]"),
        (lambda model: model.weight.detach().sum(), "graph"),
        (lambda model: model.weight.sum() / 0, "inf"),
        (lambda model: model.missing, r"AttributeError.*\(test_engine_penalty\.py:\d+\)"),
    ],
)
def test_what_is_no_penalty_is_one_line(penalty, said):
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    made = lockstep.engine("single", model, torch.optim.SGD(model.parameters(), lr=0.1), World(), penalty=penalty)
    made.backward(made.model(torch.ones(3, 2)).sum())
    with pytest.raises(DataError, match=rf"`penalty`.*{said}") as caught:
        made.step(1.0)
    assert "\n" not in str(caught.value)


def test_penalty_that_is_none_in_some_steps_is_added_in_others():
    model, calls = nn.Linear(2, 1, dtype=torch.float64), []
    plain = nn.Linear(2, 1, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    optimizer, x = torch.optim.SGD(plain.parameters(), lr=0.1), torch.ones(3, 2, dtype=torch.float64)

    def penalty(model):
        calls.append(1)
        return model.weight.abs().sum() if len(calls) == 2 else None

    made = lockstep.engine("single", model, torch.optim.SGD(model.parameters(), lr=0.1), World(), penalty=penalty)
    for step in range(3):
        made.backward(made.model(x).sum())
        assert (made.step(1.0).penalty is None) is (step != 1)
        (plain(x).sum() + (plain.weight.abs().sum() if step == 1 else 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-9, atol=1e-9)


def test_a_penalty_that_becomes_infinite_leaves_the_step_out():
    model = nn.Linear(2, 1)
    calls = []

    def penalty(model):
        calls.append(1)
        return model.weight.sum() * (1.0 if len(calls) < 2 else float("inf"))

    made = lockstep.engine("single", model, torch.optim.SGD(model.parameters(), lr=0.1), World(), penalty=penalty)
    applied = []
    for _ in range(2):
        made.backward(made.model(torch.ones(3, 2)).sum())
        applied.append(made.step(1.0).applied)
    assert applied == [True, False]


def test_engines_that_have_no_penalty_refuse_it():
    for name, exact, own in (("deepspeed", False, False), ("fsdp", True, False), ("single", False, True)):
        with pytest.raises(ConfigError, match="`penalty`"):
            check_penalty(name, exact=exact, own_steps=own)
    for name, exact in (("fsdp", False), ("zero", True), ("ddp", True), ("single", True)):
        check_penalty(name, exact=exact, own_steps=False)
    assert Ragged().penalty(nn.Linear(2, 1)) is None
