"""Runs whose updates the device decides, told a step late: the host's run, bit for bit. On a CPU, by its branches."""

import json
import math

import pytest
import torch
from ranks import run
from refusals import refuses
from small_runs import config, mark

import lockstep
from lockstep import checkpoint
from lockstep.engines.optimizer_step import OptimizerStep
from lockstep.errors import LockstepError
from lockstep.guards.nonfinite import DeferredReader
from lockstep.records import EvaluationRecord

FP16 = {"precision": "fp16", "fp16": {"initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 2}}


class Normed(lockstep.Task):
    """BatchNorm and dropout; sample 5 is NaN where `bad`."""

    def __init__(self, bad=False):
        self._bad = bad

    def model(self):
        layers = (torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
        return torch.nn.Sequential(*layers)

    def dataset(self, split):
        rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
        if self._bad and split == "train":
            rows[5] = math.nan
        return torch.utils.data.TensorDataset(rows)

    def loss(self, model, batch):
        return (model(batch[0]).float() - 1.0).square().sum()


def finished(world, folder, late, bad, settings):
    """What a run leaves: fingerprint of the last checkpoint, its state, and which steps its loop saw applied."""
    OptimizerStep.on_device = DeferredReader.lag = late or None
    wanted = {"micro_batch_size": 4, "optim": {"clip": 0.0}, "ckpt_freq": 4, **settings}
    try:
        seen = [[], []]
        for stop_at in (7, 0):  # and a resume
            with lockstep.Run(config(folder, stop_at=stop_at, **wanted), Normed(bad), world) as training:
                for step in training:
                    seen[0].append(step.applied)
                    seen[1].append(step.record.applied is None)
        assert isinstance(training.result.evaluation, EvaluationRecord)
        state = checkpoint.read_state(checkpoint.newest(folder / "r", say=print))
        assert any(seen[1]) is bool(late)
        lines = (folder / "r" / "metrics.jsonl").read_text().splitlines()
        skipped = [record.get("skipped_steps", 0) for record in map(json.loads, lines) if "running_loss" in record]
        return mark(folder), state.get("steps_left_out"), seen[0][-5:], skipped
    finally:
        OptimizerStep.on_device = DeferredReader.lag = None


KINDS = {
    "an overflow": (False, FP16),
    "a sample": (True, {"precision": "float32", "guards": {"nonfinite": "skip", "limit": 9}}),
    "a rollback": (True, {**FP16, "guards": {"nonfinite": "rollback", "limit": 9}}),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_it_is_the_run_of_the_host(tmp_path, kind):
    bad, settings = KINDS[kind]
    found = [finished(None, tmp_path / str(late), late, bad, settings) for late in (0, 1)]
    assert found[0][:3] == found[1][:3]
    assert found[1][3][-1] == found[0][3][-1], "both count them; the device's a step late"
    assert sum(found[0][3]) > 0
    assert (found[0][1] or 0) > 0 or not bad


def both(world, folder):
    bad, settings = KINDS["a rollback"]
    settings = {**settings, "engine": "zero", "optim": {"clip": 0.0, "ema": 0.9}}
    return [finished(world, folder / str(late), late, bad, settings) for late in (0, 1)]


def test_so_it_is_on_two_ranks_with_an_average(tmp_path):
    for host, device in run(both, 2, tmp_path):
        assert host[:3] == device[:3]


def test_a_run_that_overflows_for_ever_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(OptimizerStep, "on_device", True)
    monkeypatch.setattr(DeferredReader, "lag", 1)

    class Steep(Normed):
        reduction = "sum"

        def loss(self, model, batch):
            return super().loss(model, batch) * 1e-30 * (model[0].weight.sum() * 0.0 + 1e30).exp().clamp(max=1e38)

    how = {"precision": "fp16", "fp16": {"initial_scale_power": 1, "min_loss_scale": 1.0}}
    with refuses(LockstepError, "--precision fp16", "--fp16.min-loss-scale", "--lr"):
        lockstep.train(config(tmp_path, **how), Steep())
