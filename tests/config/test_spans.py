"""Lengths in epochs and as a share of the plan: read from flags, Python and files, and turned into steps once."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from refusals import refuses
from small_runs import config
from toys import Network, Ragged, taken

from lockstep.config.cli import parse, read_toml, to_toml
from lockstep.config.fields import in_steps, is_span
from lockstep.config.schema import SPANS, Config
from lockstep.errors import ConfigError
from lockstep.logging.jsonl import read as records
from lockstep.training.start.resolve import Facts, resolve


@pytest.mark.parametrize(
    ("value", "steps"),
    [(7, 7), ("5%", 10), ("0.1%", 1), ("100%", 200), ("0%", 0), ("1epoch", 50), ("2 epochs", 100), (".5epochs", 25)],
)
def test_what_a_length_is_in_steps(value, steps):
    assert in_steps(value, steps=200, samples=400, batch_size=8) == steps


@given(st.floats(0, 100), st.integers(1, 10**6))
def test_share_is_the_nearest_number_of_steps(share, steps):
    text = f"{share:.6f}%"
    found, exact = in_steps(text, steps=steps, samples=1, batch_size=1), float(text[:-1]) / 100 * steps
    assert (found == 0) == (float(text[:-1]) == 0)
    assert abs(found - exact) <= 0.5 + 1e-9 or found == 1


def test_they_may_be_said_wherever_a_number_of_steps_may(tmp_path):
    assert {"eval_freq", "ckpt_freq", "log_freq", "extend_to", "optim.warmup_steps", "optim.period"} == SPANS
    flags = ["--eval-freq", "1epoch", "--optim.warmup-steps", "5%", "--ckpt-freq", "1e2", "--max-steps", "40"]
    given = parse(flags)
    assert given == Config(eval_freq="1epoch", optim={"warmup_steps": "5%"}, ckpt_freq=100, max_steps=40)
    (tmp_path / "c.toml").write_text(to_toml(given))
    assert parse(["--config", str(tmp_path / "c.toml")]) == given
    assert read_toml(tmp_path / "c.toml")["eval_freq"] == "1epoch"
    known = resolve(given, Facts.of(Ragged(), Network(), samples=96)).config
    assert (known.eval_freq, known.optim.warmup_steps, known.ckpt_freq) == (6, 2, 100)


LENGTHS = st.one_of(
    st.integers(1, 100).map(lambda share: f"{share}%"), st.integers(1, 40).map(lambda tenths: f"{tenths / 10}epochs")
)


@given(st.integers(20, 500), LENGTHS, LENGTHS)
@hypothesis_settings(max_examples=25, deadline=None)
def test_length_in_any_unit_is_the_same_schedule_and_resumes(steps, warmup, every):
    """What a run writes into its config.toml, by which it goes on, is in steps already."""
    task, model = Ragged(), Network()

    def known(warmup, every):
        said = Config(max_steps=steps, eval_freq=every, optim={"warmup_steps": warmup, "schedule": "linear"})
        return resolve(said, Facts.of(task, model, samples=96)).config

    said = known(warmup, every)
    numbers = [in_steps(text, steps=steps, samples=96, batch_size=said.batch_size) for text in (warmup, every)]
    assert [said.optim.warmup_steps, said.eval_freq] == numbers
    assert known(*numbers) == said
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(said), encoding="utf-8")
        assert resolve(parse(["--config", str(path)]), Facts.of(task, model, samples=96)).config == said


@pytest.mark.parametrize("text", ["5 %%", "epoch", "-5%", "1epochs2", "five", "1e2%", "nan%"])
def test_what_is_no_length_is_refused(text):
    assert not is_span(text)
    with refuses(ConfigError, "--eval-freq", "5%", "2epochs"):
        parse([f"--eval-freq={text}"])
    with refuses(ConfigError, "eval_freq", "5%", "2epochs"):
        Config(eval_freq=text)
    with refuses(ConfigError, "batch_size is '5%'") as caught:
        Config(batch_size="5%")
    assert "2epochs" not in str(caught.value)


def evaluated_steps(folder):
    return [record["global_step"] for record in records(folder / "r" / "metrics.jsonl") if "evaluation/loss" in record]


@pytest.mark.parametrize(("frequency", "steps"), [("1epoch", [5, 10, 15]), ("auto", [10, 15])])
def test_evaluation_after_each_epoch_also_where_the_run_stopped(tmp_path, frequency, steps):
    """40 samples in steps of 8: five steps an epoch."""
    settings = {"max_steps": 0, "num_epochs": 3, "eval_freq": frequency, "ckpt_freq": "20%"}
    taken(config(tmp_path, **settings), Ragged(), leave_at=7)
    taken(config(tmp_path, **settings), Ragged())
    assert evaluated_steps(tmp_path) == steps
    assert f"eval_freq = {steps[0]}\n" in (tmp_path / "r" / "config.toml").read_text()
    # An extension counts steps, and the user epochs.
    taken(config(tmp_path, **settings, extend_to=22), Ragged())
    assert evaluated_steps(tmp_path) == [*steps, 20, 22]


@pytest.mark.parametrize(
    ("evaluated", "steps"),
    [((), 13), ((200,), 13), ((201,), 19), ((150, 170), 25), ((601,), 0)],
)
def test_evaluations_never_have_more_samples_than_training(evaluated, steps):
    """100 samples in steps of 16, six epochs: an epoch is 6.25 steps, and two have more than ten."""
    facts = dataclasses.replace(Facts.of(Ragged(), Network(), samples=100), evaluation=evaluated)
    assert resolve(Config(num_epochs=6), facts).config.eval_freq == steps
    # Ten micro-batches of each set.
    few = Config(num_epochs=6, limit_eval_batches=10, eval_micro_batch_size=2)
    assert resolve(few, facts).config.eval_freq == 13
    assert resolve(Config(num_epochs=6, max_steps=20), facts).config.eval_freq == 0
    assert resolve(Config(num_epochs=1), facts).config.eval_freq == 0
    stream = dataclasses.replace(facts, samples=0, epoch=0, is_stream=True)
    assert resolve(Config(max_steps=20), stream).config.eval_freq == 0
    # A group of this order has four samples.
    grouped = dataclasses.replace(facts, epoch=25, grouped=True)
    assert resolve(Config(num_epochs=6, batch_size=4), grouped).config.eval_freq == steps
    larger = dataclasses.replace(facts, samples=10_000, epoch=10_000)
    assert resolve(Config(num_epochs=6), larger).config.eval_freq == 625


def test_patience_needs_evaluations_before_the_end():
    facts = Facts.of(Ragged(), Network(), samples=100)
    assert resolve(Config(num_epochs=3, patience=1), facts).config.eval_freq == 13
    for settings in ({"num_epochs": 1}, {"max_steps": 20}):
        with refuses(ConfigError, "patience", "eval_freq"):
            resolve(Config(patience=1, **settings), facts)
