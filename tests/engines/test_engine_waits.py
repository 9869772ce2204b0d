"""In each engine, exact and plain: what a step would wait for on a device."""

import pytest
import torch
from fake_cuda import FakeCuda
from ranks import run
from support import build
from toys import Ragged

from lockstep.clock import HostClock
from lockstep.distributed.exchange import StepExchange
from lockstep.distributed.world import World
from lockstep.engines.exact import Exchange
from lockstep.loop import StepControl, seeder, steps
from lockstep.optim.optimizers import adamw

UPDATE = "engines/optimizer_step.py"
# What lies on the host whatever the device: what the ranks tell each other over gloo. And on a CPU the update asks the
# norm whether it is to be made; tests/training/test_host_waits.py has the device's own branch.
ON_THE_HOST = {
    *("distributed/exchange.py", "distributed/world.py"),
    *("engines/ddp.py", "engines/fsdp/apply.py", UPDATE),
}


def fused(held):
    return adamw(held, lr=0.01, fused=True)


def _waits(world, cases):
    """What the steps after the first two read that may lie on a device, in each case (engine, exact)."""
    Exchange.late, found = True, []
    for name, exact in cases:
        task = Ragged(dropout=0.1, dtype=torch.float32)
        made, batches = build(world, task, name, size=4, count=6, exact=exact, make=None if exact else fused)
        feed = batches.from_step(0)
        exchange, control = StepExchange(world, feed.items, None), StepControl(lambda step: 1.0, seed(), HostClock())
        kept = []
        with FakeCuda("everything") as cuda:
            for record in steps(made, task, feed, exchange, control):
                kept.append(record)  # unread
                if record.step == 1:
                    assert any(wait.file == UPDATE for wait in cuda.waits)  # the count counts
                    cuda.waits.clear()
        assert len(kept) == 6
        own = [
            wait for wait in cuda.waits if wait.file.partition("/")[0] in ("data", "distributed", "engines", "loop.py")
        ]
        found.append(sorted({wait for wait in own if wait.file not in ON_THE_HOST}))
    return found


def seed():
    return seeder(0, "micro", torch.device("cpu"))


def test_no_step_of_a_single_process_waits():
    threads = torch.get_num_threads()
    try:
        assert _waits(World(), [("single", False), ("single", True)]) == [[], []]
    finally:
        Exchange.late = None
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
def test_no_step_of_several_ranks_waits(exact):
    cases = [(name, exact) for name in ("ddp", "zero", "fsdp")]
    for found in run(_waits, 2, cases, timeout=120.0):
        assert dict(zip(cases, found, strict=True)) == {case: [] for case in cases}
