"""A signal ends a run after the present step, with a save and no evaluation, which the next start makes up for."""

import os
import signal

import pytest
import torch
from toys import Ragged, taken

from lockstep.config.schema import Config
from lockstep.guards.nonfinite import DeferredReader
from lockstep.logging.jsonl import read


class Signalled(Ragged):
    """Sends its own process a signal in the second step."""

    number = 0

    def loss(self, model, batch):
        if model.training and torch.is_grad_enabled():
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 5 and self.number:  # of four micro-batches a step
                os.kill(os.getpid(), self.number)
        return super().loss(model, batch)


def trained(folder, task, **more):
    """(steps, exit code) of one start."""
    config = Config(
        save_dir=str(folder),
        batch_size=8,
        micro_batch_size=2,
        max_steps=4,
        eval_freq=2,
        log_freq=1,
        device="cpu",
        **more,
    )
    return taken(config, task)


def evaluations(folder):
    records = [record for record in read(folder / "default" / "metrics.jsonl") if "evaluation/loss" in record]
    return [(record["global_step"], record["evaluation/loss"]) for record in records]


@pytest.mark.parametrize(("number", "lag"), [(signal.SIGUSR1, 0), (signal.SIGUSR2, 0), (signal.SIGTERM, 1)])
def test_signal_ends_the_run_after_the_step_before_evaluation(tmp_path, monkeypatch, number, lag):
    monkeypatch.setattr(DeferredReader, "lag", lag)
    task = Signalled(dtype=torch.float32)
    assert trained(tmp_path / "whole", task) == ([0, 1, 2, 3], 0)
    task = Signalled(dtype=torch.float32)
    task.number = number
    assert trained(tmp_path / "cut", task) == ([0, 1], 75)
    assert evaluations(tmp_path / "cut") == []
    assert [record["global_step"] for record in read(tmp_path / "cut" / "default" / "metrics.jsonl")] == [1, 2]
    assert trained(tmp_path / "cut", task) == ([2, 3], 0)
    assert evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole")
    assert [step for step, _ in evaluations(tmp_path / "cut")] == [2, 4]
