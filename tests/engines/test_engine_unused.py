"""A parameter that is used at first, and in a later step by nobody."""

import pytest
import torch
from ranks import run
from support import build
from test_engine_behaviour import Plain, Three, numbers
from toys import train

from lockstep.distributed.world import World
from lockstep.engines.fsdp.apply import FILLS_UNUSED


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


def left_out(world, name, who, settings):
    """The weights after five steps. `who` uses the extra layer in the third; each micro-batch does in the others."""
    task = Plain("always")
    made, batches = build(world, task, name, size=4, count=5, **settings)
    module, calls = next(m for m in made.model.modules() if isinstance(m, Three)), iter(range(1000))
    each = 4 // (world.size * settings.get("micro", 1))
    module.wanted = lambda x: next(calls) // each != 2 or (who == "some" and bool(x.sum() > 0))
    train(world, made, batches, task)
    return {name: value for name, value in numbers(made).items() if name.startswith("model/")}


@pytest.mark.parametrize("settings", [{}, {"exact": True}])
@pytest.mark.parametrize("who", ["nobody", "some"])
def test_layer_used_by_some_micro_batches_trains_as_on_one_rank(who, settings):
    """Zeros instead of no gradient would let AdamW decay and move it, without a word."""
    wanted = {micro: alone_left_out(who, {"micro": micro, **settings}) for micro in (1, 2)}
    cases = [(name, micro) for name in ("ddp", "zero") for micro in (1, 2)]
    if FILLS_UNUSED or who == "nobody":
        cases.append(("fsdp", 1))
    found = run(each_left_out, 2, [(name, who, {"micro": micro, **settings}) for name, micro in cases])[0]
    for (_, micro), state in zip(cases, found, strict=True):
        for name, value in wanted[micro].items():
            torch.testing.assert_close(torch.tensor(state[name]), torch.tensor(value), rtol=1e-9, atol=1e-9, msg=name)


def each_left_out(world, cases):
    return [left_out(world, *case) for case in cases]


def alone_left_out(who, settings):
    threads = torch.get_num_threads()
    try:
        return left_out(World(), "single", who, settings)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
