"""--exact where numbers come late, as from a device: which parameters were used is known without waiting for it."""

import pytest
import torch
from fake_cuda import FakeCuda
from ranks import run
from support import build, digest
from test_engine_behaviour import Plain, Three
from toys import train

from lockstep.distributed.world import World
from lockstep.engines.exact import Exchange

STEPS, MICRO = 5, 4
# Which of a step's four micro-batches use the extra layer, by (step, micro-batch). Of two ranks each has two of them.
PATTERNS = {
    "always": lambda step, micro: True,
    "never": lambda step, micro: False,
    "on one rank": lambda step, micro: micro >= 2,
    "missing on one rank": lambda step, micro: step != 2 or micro >= 2,
    "missing on all": lambda step, micro: step != 2,
    "not in the first": lambda step, micro: step > 0,
    "here and there": lambda step, micro: (step + micro) % 3 == 0,
}


def _trained(world, late):
    """By pattern: a digest of all states, and how often this rank would have waited in the sums."""
    Exchange.late, found = late, {}
    for name, pattern in PATTERNS.items():
        made, batches = build(world, Plain("always"), "auto", size=MICRO, count=STEPS, exact=True)
        module = next(m for m in made.model.modules() if isinstance(m, Three))
        each, calls = batches.slots, iter(range(1000))

        def wanted(x, each=each, calls=calls, pattern=pattern):
            step, place = divmod(next(calls), each)
            return pattern(step, min(world.rank * each + place, MICRO - 1))

        module.wanted = wanted
        with FakeCuda(made.model.parameters()) as cuda:
            train(world, made, batches, Plain("always"))
        waits = [wait.what for wait in cuda.waits if wait.file == "engines/exact.py"]
        found[name] = digest(made, world), waits
    return found


@pytest.fixture(scope="module")
def alone():
    threads = torch.get_num_threads()
    try:
        return {name: state for name, (state, _) in _trained(World(), None).items()}
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        Exchange.late = None


def test_what_is_read_at_once_waits_in_each_step(alone):
    """As on a CPU, where it costs nothing: the count sees it."""
    for found in run(_trained, 2, None):
        assert {name: state for name, (state, _) in found.items()} == alone
        assert {name: waits for name, (_, waits) in found.items()} == dict.fromkeys(PATTERNS, ["tolist"] * STEPS)


def test_late_usage_is_bitwise_and_awaited_when_first_missing(alone):
    first, second = run(_trained, 2, True)
    for found in (first, second):
        assert {name: state for name, (state, _) in found.items()} == alone
    one, nothing = ["tolist"], {name: [] for name in PATTERNS}
    missing = {"missing on one rank": one, "missing on all": one, "here and there": one * 2}  # steps 1 and 4
    assert {name: waits for name, (_, waits) in first.items()} == nothing | missing
    missing = {"missing on all": one, "here and there": one}  # step 2
    assert {name: waits for name, (_, waits) in second.items()} == nothing | missing


def test_a_rank_without_micro_batches_has_the_same_bits(alone):
    for found in run(_trained, 3, True):
        assert {name: state for name, (state, _) in found.items()} == alone
        assert found["always"][1] == []  # the third rank uses none, from the first step on
