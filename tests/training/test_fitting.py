"""`--micro-batch-size auto` where the default does not fit the device: asked once, by a new run, and kept."""

import pytest
import torch

from lockstep.config.schema import Config
from lockstep.distributed.world import World
from lockstep.training import defaults
from lockstep.training.defaults import asked, fitted


def on_device(kind="cuda"):
    return World(device=torch.device(kind, 0) if kind == "cuda" else torch.device(kind))


def never(config, ranks, room):
    raise AssertionError("nobody is to be asked")


def test_the_largest_that_fits_is_taken_and_said():
    lines = []
    config = fitted(Config(batch_size=64), {}, on_device(), False, lines.append, lambda *given: 4)
    assert config.micro_batch_size == 4
    asking, answer = lines
    assert "lockstep plan" in asking
    assert "auto: 4" in answer


def test_where_the_default_fits_it_stays_open():
    config = Config(batch_size=64)
    lines = []
    assert fitted(config, {}, on_device(), False, lines.append, lambda *given: 0) == config
    assert len(lines) == 1  # before it is asked: that may take a while


@pytest.mark.parametrize(("gib", "asked_of"), [(80, 0), (8, 1)])
def test_where_a_bound_shows_that_the_default_fits_nobody_is_asked(monkeypatch, gib, asked_of):
    lines, asked_for = [], []
    monkeypatch.setattr(defaults, "_memory", lambda device: float(gib << 30))
    monkeypatch.setattr(defaults, "asked", lambda *given: asked_for.append(given) or 0)
    config = Config(batch_size=64, precision="float32")
    assert fitted(config, {}, on_device(), False, lines.append) == config
    assert (len(asked_for), len(lines)) == (asked_of, asked_of)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_resume_has_what_the_run_was_begun_with(kind):
    state = {"plan": {"batch_size": 64, "micro_batch_size": 2}}
    assert fitted(Config(batch_size=64), state, on_device(kind), False, print, never).micro_batch_size == 2
    assert fitted(Config(batch_size=32), state, on_device(kind), False, print, never).micro_batch_size == 0


def test_nobody_is_asked_on_a_cpu_for_a_given_size_or_for_an_object():
    given = Config(batch_size=64, micro_batch_size=16)
    assert fitted(given, {}, on_device(), False, print, never) == given
    for world, own in ((on_device("cpu"), False), (on_device(), True)):
        assert fitted(Config(), {}, world, own, print, never) == Config()


def test_the_plan_is_asked_in_a_process_of_its_own():
    """The default, 16 of 128, does not fit 1.1 GiB of which CUDA takes one; a smaller divisor does."""
    config = Config(batch_size=128, precision="float32")
    assert asked(config, 1, 1.1 * 2**30) in (2, 4, 8)
    assert asked(config, 1, 8 * 2**30) == 0
