"""--exact: the same bits in every engine, at every world size that can have them, and across resumes between them."""

import dataclasses
import warnings

import pytest
import tasks_for_verify as tasks
from ranks import run
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.config.schema import Config
from lockstep.config.sections import Optim
from lockstep.errors import ConfigError

ENGINES = ("ddp", "fsdp", "zero")
CLIPPED = Optim(warmup_steps=1, clip=0.5)


def config(**changes):
    given = {"batch_size": 8, "lr": 0.01, "device": "cpu", "timeout": 60.0, "exact": True, "optim": CLIPPED}
    return Config(**{**given, **changes})


@pytest.mark.parametrize(("precision", "worlds"), [("float32", (1, 3)), ("bf16", (2,))])
def test_bits_at_eight_micro_batches(precision, worlds):
    task = Ragged(samples=60, dropout=0.2)
    table = lockstep.verify(task, config(precision=precision), engines=ENGINES, world_sizes=worlds, steps=3)
    assert {row.verdict for row in table.rows} == {"equal"}, str(table)


class Blocked(Ragged):
    def blocks(self, model):
        return list(model.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["batchnorm", "activation checkpointing"])
def test_bits_with_what_replays_and_recomputes(case):
    task, changes = tasks.Images(), {"micro_batch_size": 2}  # the default would be all 8 at once
    if case != "batchnorm":
        task, changes = Blocked(samples=60, dropout=0.2), {"activation_checkpointing": "full"}
    table = lockstep.verify(task, config(**changes), engines=ENGINES, world_sizes=(2, 3, 4), steps=3)
    assert {row.verdict for row in table.rows} == {"equal"}, str(table)


def test_servable_world_depends_on_the_runs_micro_batch():
    """With BatchNorm it is another: 2 of 17 samples and not 17 of 2; of 6 samples at most 3 of 2."""
    asked = {"engines": ("ddp",), "steps": 2, "resume_at": 0}
    table = lockstep.verify(tasks.Images(), config(batch_size=34), world_sizes=(2,), **asked)
    assert {row.verdict for row in table.rows} == {"equal"}, str(table)
    assert "34 samples in 2 micro-batches" in table.title
    with pytest.raises(ConfigError, match="ddp x4 cannot run here: --exact .* 4 processes, but a step has"):
        lockstep.verify(tasks.Images(), config(batch_size=6), world_sizes=(4,), **asked)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(("size", "micro"), [(8, 1), (24, 2)], ids=["M=8", "M=12"])
def test_bits_at_up_to_four_ranks(precision, size, micro):
    task = Ragged(samples=100, dropout=0.2)
    settings = config(precision=precision, batch_size=size, micro_batch_size=micro)
    table = lockstep.verify(task, settings, engines=ENGINES, world_sizes=(1, 2, 3, 4), steps=4)
    assert {row.verdict for row in table.rows} == {"equal"}, str(table)


@pytest.mark.slow
def test_bits_at_every_number_of_ranks():
    """Of seven micro-batches: also where a rank has nothing to do, as with five and six."""
    settings = config(batch_size=7, micro_batch_size=1)
    table = lockstep.verify(
        Ragged(samples=31, dropout=0.2), settings, engines=ENGINES, world_sizes=(2, 3, 5, 6, 7), steps=5
    )
    assert {row.verdict for row in table.rows} == {"equal"}, str(table)


def _train(world, settings, task):
    # A block that ends in a Linear returns a view, which only matters to a model that changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    lockstep.train(settings, task, world)


def _fingerprint(folder, step):
    return checkpoint.fingerprint(checkpoint.path_of(folder, step))


@pytest.mark.parametrize(
    "chain",
    [
        [("single", 1), ("fsdp", 3), ("ddp", 2)],
        pytest.param([("zero", 2), ("single", 1), ("fsdp", 4), ("ddp", 3)], marks=pytest.mark.slow),
        pytest.param([("ddp", 5), ("zero", 3), ("fsdp", 2), ("single", 1)], marks=pytest.mark.slow),
    ],
)
def test_resume_between_engines_and_worlds_is_bitwise(chain, tmp_path):
    """Each stops in mid-epoch, and the next goes on."""
    task, steps = Ragged(samples=60, dropout=0.2), 2 * len(chain)
    settings = config(save_dir=str(tmp_path), max_steps=steps, eval_freq=0, ckpt_freq=0, experiment_name="whole")
    run(_train, 1, dataclasses.replace(settings, engine="ddp"), task)
    for place, (engine, size) in enumerate(chain):
        stop = 2 * (place + 1)
        run(_train, size, dataclasses.replace(settings, engine=engine, stop_at=stop, experiment_name="chain"), task)
    assert _fingerprint(tmp_path / "chain", steps) == _fingerprint(tmp_path / "whole", steps)
