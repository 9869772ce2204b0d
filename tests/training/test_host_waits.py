"""A whole run on a CUDA device that is not there: what its host waits for, with guards, records and audits."""

import contextlib

import pytest
import torch
from fake_cuda import DEVICE, FakeCuda
from small_runs import config
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.distributed.world import World
from lockstep.logging.jsonl import read

WATCHED = range(4, 10)  # steps, counted from 1


@pytest.fixture(autouse=True)
def unsaved(monkeypatch):
    """Saves wait in a thread of their own, which is not what is watched here."""
    monkeypatch.setattr(checkpoint.Saver, "begin", lambda *given, final: None)


def watched(folder, task=None, **changes):
    """What the watched steps waited for, what they asked of streams and events, and the run's records."""
    given = {"max_steps": 12, "ckpt_freq": 0, "precision": "float32", "compile": False, "guards": {"spike": "skip"}}
    with FakeCuda(fast=False) as cuda:
        task = task or Ragged(dropout=0.1, dtype=torch.float32)
        for step in lockstep.Run(config(folder, **given | changes), task, World(device=DEVICE)):
            if step.global_step == WATCHED[0] - 1:
                cuda.waits.clear()
                cuda.log.clear()
            if step.global_step == WATCHED[-1]:
                waits, log = list(cuda.waits), list(cuda.log)
    return waits, log, read(folder / "r" / "metrics.jsonl")


@pytest.mark.parametrize("log_freq", [1, 4, 100])
@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
def test_no_step_waits_whether_it_is_recorded_or_not(tmp_path, log_freq, exact):
    waits, log, found = watched(tmp_path, log_freq=log_freq, exact=exact)
    if exact:  # an unfused update asks the norm whether it is to be made
        waits = [wait for wait in waits if wait.file != "engines/optimizer_step.py"]
    assert waits == []
    # One event a step, that of the step before, is waited for: it keeps the host from running ahead.
    assert sum(line.startswith("wait for event") for line in log) == len(WATCHED)
    recorded = [record["global_step"] for record in found if "running_loss" in record]
    assert recorded == [*range(log_freq, 12, log_freq), 12]  # the last step has a record in any case


def test_the_records_are_those_of_a_cpu(tmp_path):
    def own(found):
        names = ("global_step", "running_loss", "grad_norm", "lr", "evaluation/loss")
        return [[record.get(name) for name in names] for record in found]

    given = {"log_freq": 3, "max_steps": 12, "ckpt_freq": 0, "precision": "float32", "exact": True}
    list(lockstep.Run(config(tmp_path / "cpu", **given), Ragged(dropout=0.1, dtype=torch.float32)))
    found = watched(tmp_path / "cuda", log_freq=3, exact=True)[2]
    assert own(found) == own(read(tmp_path / "cpu" / "r" / "metrics.jsonl"))


def test_values_read_in_the_body_are_awaited_once(tmp_path):
    given = {"max_steps": 4, "ckpt_freq": 0, "precision": "float32", "compile": False, "exact": True}
    task, found = Ragged(dropout=0.1, dtype=torch.float32), {}
    for name, world in (("cpu", World()), ("cuda", World(device=DEVICE))):
        with FakeCuda(fast=False) if name == "cuda" else contextlib.nullcontext(FakeCuda()) as cuda:
            found[name] = []
            for step in lockstep.Run(config(tmp_path / name, **given), task, world):
                cuda.waits.clear()
                found[name].append((step.loss, step.norm, step.applied, step.lr))
                waits = [(wait.what, wait.function) for wait in cuda.waits]
    assert found["cuda"] == found["cpu"]
    assert waits == [("tolist", "floats"), ("_local_scalar_dense", "norm")]


class Telling(Ragged):
    """Returns numbers of all kinds beside its loss."""

    def loss(self, model, batch):
        loss, kept = super().loss(model, batch), batch["labels"] != -100
        return loss, {"twice": 2 * loss, "kept": (kept.sum(), kept.numel()), "one": 1.0}


def test_numbers_of_ones_own_and_norms_by_layer_wait_for_nothing(tmp_path):
    given = {"log_freq": 2, "log_gradients": "layers", "exact": True, "guards": {"spike": "off"}}
    task = Telling(dropout=0.1, dtype=torch.float32)
    waits, _, found = watched(tmp_path / "cuda", task, **given)
    assert [wait for wait in waits if wait.file != "engines/optimizer_step.py"] == []  # as without them
    plain = {"max_steps": 12, "ckpt_freq": 0, "precision": "float32", "compile": False} | given
    list(lockstep.Run(config(tmp_path / "cpu", **plain), task))

    def own(records):
        return [{k: v for k, v in r.items() if k.startswith(("train/", "gradients/"))} for r in records]

    assert own(found) == own(read(tmp_path / "cpu" / "r" / "metrics.jsonl"))
    assert len(own(found)[0]) == 6  # three numbers; two blocks and the embedding, which the head shares


class Planted(Ragged):
    """Each waits once in a micro-batch."""

    def loss(self, model, batch):
        kept = batch["labels"] != -100
        assert kept.any()
        assert float(kept.sum()) > 0
        assert batch["labels"][kept].numel()
        assert kept.nonzero().tolist()
        torch.tensor([1.0], device=kept.device)
        return super().loss(model, batch) + kept.sum().cpu().to(kept.device) * 0


def test_what_a_task_waits_for_is_found_with_its_line(tmp_path):
    waits = watched(tmp_path, Planted(dtype=torch.float32))[0]
    assert {(wait.file, wait.function) for wait in waits} == {("training/test_host_waits.py", "loss")}
    lines = [(wait.line.removeprefix("assert "), wait.what) for wait in waits]
    assert len(lines) == 8 * 4 * len(WATCHED)
    assert dict.fromkeys(lines).keys() == {
        ("kept.any()", "_local_scalar_dense"),
        ("float(kept.sum()) > 0", "_local_scalar_dense"),
        ('batch["labels"][kept].numel()', "index"),
        ("kept.nonzero().tolist()", "nonzero"),
        ("kept.nonzero().tolist()", "tolist"),
        ("torch.tensor([1.0], device=kept.device)", "a tensor made of numbers"),
        ("return super().loss(model, batch) + kept.sum().cpu().to(kept.device) * 0", "a copy to the host"),
        (
            "return super().loss(model, batch) + kept.sum().cpu().to(kept.device) * 0",
            "a copy from memory that is not pinned",
        ),
    }
