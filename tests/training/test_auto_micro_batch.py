"""`--micro-batch-size auto` where the default does not fit the device: asked once, by a new run, and kept."""

import pytest
import torch

from lockstep.config.schema import Config
from lockstep.distributed.world import World
from lockstep.training.start import build, defaults
from lockstep.training.start.defaults import find_largest_micro_batch, plan_micro_batch
from lockstep.training.start.resolve import CheckpointFacts, StartFacts, draft_of


def on_device(kind="cuda"):
    return World(device=torch.device(kind, 0) if kind == "cuda" else torch.device(kind))


def never(config, ranks, room):
    raise AssertionError("nobody is to be asked")


def test_the_largest_that_fits_is_taken_and_said():
    lines = []
    size = find_largest_micro_batch(Config(batch_size=64), on_device(), lines.append, lambda *given: 4)
    assert draft_of(Config(batch_size=64), StartFacts(max_micro_batch=size)).config.micro_batch_size == 4
    asking, answer = lines
    assert "lockstep plan" in asking
    assert "auto: 4" in answer


def test_where_the_default_fits_it_stays_open():
    lines = []
    assert find_largest_micro_batch(Config(batch_size=64), on_device(), lines.append, lambda *given: 0) == 0
    assert draft_of(Config(batch_size=64), StartFacts()).config.micro_batch_size == 0
    assert len(lines) == 1  # before it is asked: that may take a while


@pytest.mark.parametrize(("gib", "asked_of"), [(80, 0), (8, 1)])
def test_nobody_is_asked_when_a_bound_shows_the_default_fits(monkeypatch, gib, asked_of):
    lines, asked_for = [], []
    monkeypatch.setattr(defaults, "_device_memory", lambda device: float(gib << 30))
    monkeypatch.setattr(defaults, "plan_micro_batch", lambda *given: asked_for.append(given) or 0)
    config = Config(batch_size=64, precision="float32")
    assert find_largest_micro_batch(config, on_device(), lines.append) == 0
    assert (len(asked_for), len(lines)) == (asked_of, asked_of)


def test_a_resume_has_what_the_run_was_begun_with():
    before = CheckpointFacts(plan={"batch_size": 64, "micro_batch_size": 2})
    start = StartFacts(max_micro_batch=4, checkpoint=before)
    assert draft_of(Config(batch_size=64), start).config.micro_batch_size == 2
    assert draft_of(Config(batch_size=32), start).config.micro_batch_size == 0


def test_nobody_is_asked_on_a_cpu():
    assert find_largest_micro_batch(Config(), on_device("cpu"), print, never) == 0


@pytest.mark.parametrize(
    ("given", "task", "start"),
    [
        ({"micro_batch_size": 16}, None, StartFacts()),
        ({}, object(), StartFacts()),
        ({}, None, StartFacts(checkpoint=CheckpointFacts(plan={"batch_size": 32}))),
    ],
)
def test_nobody_is_asked_for_given_sizes_objects_or_resumes(monkeypatch, given, task, start):
    monkeypatch.setattr(build, "find_largest_micro_batch", never)
    found = build._add_device_memory(
        Config(batch_size=64, precision="float32", compile=False, **given), start, World(), task
    )
    assert found == start


def test_the_plan_is_asked_in_a_process_of_its_own():
    """The default, 16 of 128, does not fit 1.1 GiB of which CUDA takes one; a smaller divisor does."""
    config = Config(batch_size=128, precision="float32")
    assert plan_micro_batch(config, 1, 1.1 * 2**30) in (2, 4, 8)
    assert plan_micro_batch(config, 1, 8 * 2**30) == 0
