"""A generator's digest says whether its state is another one, however little of it moved."""

import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from lockstep.trace.record.journal import quiet
from lockstep.trace.record.states import PassRecorder, state_digests


@pytest.fixture(autouse=True)
def _generators():
    kept = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    numpy.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


@pytest.mark.parametrize(
    ("name", "draw", "seed"),
    [
        ("torch", lambda: torch.rand(1), torch.manual_seed),
        ("python", random.random, random.seed),
        ("python", lambda: random.gauss(0, 1), random.seed),  # every other number is one that lies ready
        ("numpy", numpy.random.random, numpy.random.seed),
        ("numpy", numpy.random.standard_normal, numpy.random.seed),  # so too
        ("numpy", lambda: numpy.random.shuffle([1, 2, 3]), numpy.random.seed),
    ],
)
def test_each_draw_is_another_digest_of_that_generator_alone(name, draw, seed):
    seed(7)
    first = state_digests()
    assert {"torch", "python", "numpy"} <= first.keys()
    seen = [first[name]]
    for _ in range(4):
        assert state_digests()[name] == seen[-1]
        draw()
        after = state_digests()
        assert {key: value for key, value in after.items() if key != name} == {
            key: value for key, value in first.items() if key != name
        }
        seen.append(after[name])
    assert len(set(seen)) == 5
    seed(7)
    assert state_digests() == first


def test_a_models_own_generator_is_named():
    own = torch.Generator().manual_seed(3)
    before = state_digests([("noise", own)])["noise"]
    torch.rand(1, generator=own)
    assert state_digests([("noise", own)])["noise"] != before


class Sink(torch.autograd.Function):
    """Hands on what reaches its outputs, and that nothing does, as DDP's."""

    @staticmethod
    def forward(ctx, *values):
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


@pytest.mark.parametrize("used", ["output", "source", "both"])
def test_a_backward_is_followed_to_an_output_that_was_converted(used):
    """Accelerate converts outputs to float32; the Trainer's loss is made before that, and DDP says so with None."""
    lengths = []

    class Followed(PassRecorder):
        def record_gradient(self, record, gradient):
            lengths.append(gradient.float().norm().item())

    source = torch.ones(4, 3, requires_grad=True).bfloat16()
    output = source.float()
    Followed(None, None)._follow({}, output)
    loss, output = Sink.apply(source.float().sum(), output)
    (loss * (used != "output") + output.sum() * 2 if used != "source" else loss).backward()
    assert lengths == pytest.approx([12**0.5 * (1 if used == "source" else 2)])


class Owner:
    """An object with a journal, whose method is reached again while it records."""

    def __init__(self):
        self.failed, self.reached = [], 0
        self.journal = SimpleNamespace(on=True, busy=False, fail=self.failed.append)

    @quiet
    def look(self):
        self.reached += 1
        self.look()
        raise ValueError


def test_recorders_own_work_is_unrecorded_and_errors_end_only_it():
    owner = Owner()
    owner.look()
    assert owner.reached == 1
    assert [type(error) for error in owner.failed] == [ValueError]
    owner.look()
    assert owner.reached == 2  # it is no longer busy
    owner.journal.on = False
    owner.look()
    assert owner.reached == 2
