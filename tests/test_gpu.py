"""What only a CUDA device shows: make test-gpu. Skipped where there is none."""

import math

import pytest
import torch
from small_runs import config, mark
from toys import Ragged, parts, train

import lockstep
from lockstep.clock import make_clock
from lockstep.data.batches import Batches, Loading, StepPlan
from lockstep.data.sampler import Shuffled
from lockstep.distributed.exchange import StepExchange
from lockstep.distributed.world import World
from lockstep.logging.jsonl import read as records
from lockstep.loop import StepControl, seeder, steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # other versions of torch and its CUDA libraries have warnings of their own
]


def here():
    return World(device=torch.device("cuda", 0))


def finish(settings, task):
    return list(lockstep.Run(settings, task))


def test_a_gpu_trains_what_the_cpu_does():
    losses = []
    for world in (World(), here()):
        made, batches = parts(world, Ragged(), count=8)
        losses.append(train(world, made, batches, Ragged())[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_exact_repeats_its_bits_and_resumes_to_them(tmp_path):
    task = Ragged(dropout=0.2, dtype=torch.float32)
    exact = {"exact": True, "precision": "float32", "device": "cuda"}
    finish(config(tmp_path, experiment_name="one", **exact), task)
    finish(config(tmp_path, experiment_name="two", **exact), task)
    finish(config(tmp_path, stop_at=5, **exact), task)
    finish(config(tmp_path, **exact), task)
    assert mark(tmp_path, "one") == mark(tmp_path, "two") == mark(tmp_path)


def test_no_step_waits_for_the_device():
    """CUDA calls that wait are errors here. Records are kept unread, as between two logged steps."""
    world, task = here(), Ragged(dropout=0.1, dtype=torch.float32)
    made, _ = parts(world, task)
    data = task.dataset("train")
    order, step_plan = Shuffled(len(data), 0), StepPlan(8, 2, 160)
    for workers in (0, 1):
        batches = Batches(task, data, order, step_plan, world, seed=0, loading=Loading(workers))
        feed = batches.from_step(0)
        plan = StepControl(lambda step: 1.0, seeder(0, "micro", world.device), make_clock(world.device))
        kept = []
        try:
            for record in steps(made, task, feed, StepExchange(world, feed.items, None), plan):
                kept.append(record)
                if record.step == 2:  # allocations and first calls are done
                    torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(math.isfinite(float(loss)) for record in kept for loss in record.losses)
        laps = plan.clock.read()
        assert set(laps) == {"data", "forward", "backward", "update"}
        assert all(0 <= spent < 1000 for spent in laps.values())


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"precision": "bf16-true"}, {"precision": "float32"}])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_precision_trains_and_remembers_memory(tmp_path, settings, compiled):
    finish(config(tmp_path, device="cuda", compile=compiled, **settings), Ragged(dtype=torch.float32))
    found = [record for record in records(tmp_path / "r" / "metrics.jsonl") if "lr" in record]
    assert found[-1]["running_loss"] < found[0]["running_loss"]
    assert found[-1]["memory"] > 0
    assert found[-1]["time/total"] > 0


def test_fused_adamw_is_what_a_gpu_gets():
    made, _ = parts(here(), Ragged(dtype=torch.float32))
    assert made._update.optimizer.param_groups[0]["fused"] is True
