"""The average of the weights beside an engine: its formula, whoever knows when whether a step was applied; its swap."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run
from support import alone, build, digest, each, whole
from torch import nn
from toys import Ragged, train

from lockstep import checkpoint
from lockstep.distributed.world import World
from lockstep.engines.base import StepResult
from lockstep.engines.ema import EMAEngine, use_average, without_average
from lockstep.errors import CheckpointError


class Model(nn.Module):
    """Two trained tensors, one of them complex, one that is frozen, and a buffer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(13.0).to(dtype) / 7)
        self.turned = nn.Parameter(torch.polar(torch.ones(3), torch.arange(3.0)))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))


class Moves:
    """An engine whose steps move the weights by a number; the norm is 1, and the host may not know what came of it."""

    def __init__(self, model, knows):
        self.model, self._knows = model, knows

    def step(self, factor=None, limit=math.inf, momentum=None, evaluate=None):
        with torch.no_grad():
            if limit > 1.0:
                for parameter in (self.model.weight, self.model.turned):
                    parameter.add_(factor)
        return StepResult(torch.tensor(1.0), limit > 1.0 if self._knows else None)

    def state_dict(self):
        return {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}

    def load_state_dict(self, state):
        self.model.load_state_dict({name.removeprefix("model/"): tensor for name, tensor in state.items()})


def around(knows=True, decay=0.9, dtype=torch.float32):
    model = Model(dtype)
    return EMAEngine(Moves(model, knows), model, decay)


MOVES = st.lists(st.tuples(st.floats(-3, 3, width=32), st.booleans()), max_size=30)


@given(moves=MOVES, decay=st.floats(0.0, 0.9999))
def test_it_is_the_formula_over_the_applied_steps_alone(moves, decay):
    """In float64 by hand; the same bits whether the host or the device knows that a step was applied."""
    found = []
    for knows in (True, False):
        made = around(knows, decay)
        names, updates = ("weight", "turned"), 0
        wanted = {name: getattr(made.model, name).detach().to(torch.complex128) for name in names}
        for move, applied in moves:
            made.step(move, limit=math.inf if applied else 1.0)
            if applied:
                share = 1 - min(decay, (1 + updates) / (10 + updates))
                updates += 1
                for name in names:
                    wanted[name] += share * (getattr(made.model, name).detach().to(torch.complex128) - wanted[name])
        state = made.state_dict()
        for name in names:
            average = state[f"average/{name}"].to(torch.complex128)
            torch.testing.assert_close(average, wanted[name], rtol=1e-5, atol=1e-5)
        assert (int(state["averaging/updates"]), state["average/weight"].dtype) == (updates, torch.float32)
        found.append({name: tensor.clone() for name, tensor in state.items()})
    assert found[0].keys() == found[1].keys()
    assert sorted(without_average(found[0])) == ["model/frozen", "model/seen", "model/turned", "model/weight"]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_two_change_places_and_have_their_bits_again(dtype):
    made = around(dtype=dtype)
    model = made.model
    for move in (0.3, -0.7, 0.1):
        made.step(move)
    before = copy.deepcopy(made.state_dict())
    for error in (None, KeyError):
        try:
            with use_average(made):
                assert torch.equal(model.weight, before["average/weight"].to(dtype))
                assert torch.equal(model.turned, before["average/turned"])
                assert not torch.equal(model.weight, before["model/weight"])
                if error:
                    raise error
        except KeyError:
            pass
        assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())
    with use_average(made.inner):
        assert torch.equal(model.weight, before["model/weight"])


def test_state_without_an_average_begins_one():
    made, other = around(), around()
    made.step(0.5)
    state = copy.deepcopy(made.state_dict())
    other.load_state_dict(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())
    other.load_state_dict(without_average(state))
    assert torch.equal(other.state_dict()["average/weight"], state["model/weight"])
    assert float(other.state_dict()["averaging/updates"]) == 0.0
    with pytest.raises(CheckpointError, match="the average .*: average/turned on one side only"):
        other.load_state_dict({name: tensor for name, tensor in state.items() if name != "average/turned"})


TASK = Ragged(dtype=torch.float32)
SETTINGS = {"exact": True, "ema": 0.9}


def _swapped(world, name):
    """(whether the model computes with the average within, and all is as before afterwards; the average's digest)."""
    made, batches = build(world, TASK, name, **SETTINGS)
    train(world, made, batches, TASK)
    before = {key: whole(tensor, world) for key, tensor in made.state_dict().items()}
    with use_average(made):
        inside = {key: whole(tensor, world) for key, tensor in made.state_dict().items() if key.startswith("model/")}
    moved = [key for key in before if key.startswith("average/") and not torch.equal(before[key], _model(before, key))]
    same = all(torch.equal(whole(tensor, world), before[key]) for key, tensor in made.state_dict().items())
    taken = all(torch.equal(_model(inside, key), before[key]) for key in before if key.startswith("average/"))
    return len(moved) > 3 and same and taken, digest(made, world)


def _model(state, name):
    return state[name.replace("average/", "model/")]


def test_every_engine_has_the_bits_of_one_process():
    wanted = alone(TASK, **SETTINGS)[2]
    for name in ("ddp", "zero", "fsdp"):
        assert run(_swapped, 2, name) == [(True, wanted)] * 2
    assert wanted != alone(TASK, **SETTINGS | {"ema": 0.3})[2]


def _go_on(world, folder, first, second):
    settings = SETTINGS | {"count": 6}
    if first:
        made, batches = build(world, TASK, first, **settings)
        train(world, made, batches, TASK, stop=3)
        checkpoint.save(folder, 3, made.state_dict(), {}, world, engine=first)
        return None
    made, batches = build(world, TASK, second, **settings)
    state = made.state_dict()
    checkpoint.load(checkpoint.path_of(folder, 3), state, world)
    made.load_state_dict(state)
    train(world, made, batches, TASK, start=3)
    return digest(made, world)


def test_checkpoint_keeps_the_average_across_engines_and_worlds(tmp_path):
    wanted = alone(TASK, **SETTINGS | {"count": 6})[2]
    run(_go_on, 2, tmp_path, "fsdp", "")
    assert _alone(tmp_path) == wanted
    assert run(_go_on, 4, tmp_path, "", "zero") == [wanted] * 4


def _alone(folder):
    threads = torch.get_num_threads()
    try:
        return _go_on(World(), folder, "", "single")
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def test_plain_sums_and_half_precision_have_an_average_too():
    cases = [(TASK, "fsdp", {"ema": 0.9, "precision": "fp16"}), (TASK, "zero", {"ema": 0.9, "precision": "bf16"})]
    first, second = run(each, 2, cases)
    assert first == second
    assert all(len(found) == 3 for found in first)
