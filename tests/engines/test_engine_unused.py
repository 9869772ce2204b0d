"""A parameter that is used at first, and in a later step by nobody."""

import pytest
import torch
from ranks import run
from support import build
from test_engine_behaviour import Plain, Three, numbers
from toys import train

from lockstep.distributed.world import World


def _told(world, name):
    """The lines of a run in which each rank uses the extra layer in one of its two micro-batches."""
    task, lines = Plain("always"), []
    made, batches = build(world, task, name, size=4, count=2, lines=lines)
    module, calls = next(m for m in made.model.modules() if isinstance(m, Three)), iter(range(1000))
    module.wanted = lambda x: bool(next(calls) % 2)
    train(world, made, batches, task)
    return [line for line in lines if "not used by every micro-batch" in line]


@pytest.mark.parametrize("name", ["ddp", "zero", "fsdp"])
def test_a_parameter_used_by_one_of_two_backwards_is_told(name):
    for lines in run(_told, 2, name):
        assert len(lines) == 1
        assert lines[0].startswith(
            f"--engine {name}: 2 parameters are not used by every micro-batch (extra.weight, extra"
        )


def left_out(world, name, settings):
    """The state after five steps; in the third no micro-batch uses the extra layer, in all others each does."""
    task = Plain("always")
    made, batches = build(world, task, name, size=4, count=5, **settings)
    module, calls = next(m for m in made.model.modules() if isinstance(m, Three)), iter(range(1000))
    each = 4 // world.size
    module.wanted = lambda x: next(calls) // each != 2
    train(world, made, batches, task)
    return numbers(made)


@pytest.mark.parametrize("settings", [{}, {"exact": True}])
def test_a_parameter_that_nobody_uses_in_a_later_step_is_left_alone_by_fsdp(settings):
    """Zeros instead of no gradient would let AdamW decay and move it, without a word."""
    wanted = alone_left_out(settings)
    found = run(left_out, 2, "fsdp", settings)[0]
    for name, value in wanted.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), rtol=1e-9, atol=1e-9, msg=name)


def alone_left_out(settings):
    threads = torch.get_num_threads()
    try:
        return left_out(World(), "single", settings)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
