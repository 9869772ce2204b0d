"""Flags, files and their bad values: each gets one line with the flag and the way out."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import Config, Data, Optim, default_micro_batch_size, flag
from lockstep.errors import ConfigError
from lockstep.options import flat, option_list, parse, read, to_toml

GOLDEN = Path(__file__).parent / "golden"


def test_the_list_of_options_is_known():
    """A new option is a decision: add it to tests/golden/options.txt, and to the documentation."""
    assert (GOLDEN / "options.txt").read_text().split() == option_list()


def test_defaults_are_below_the_file_and_the_file_below_flags(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("lr = 0.5\nbatch-size = 24\n[optim]\nweight-decay = 0.25\nclip = 3\n")
    config = parse(["--config", str(file), "--optim.clip", "2", "--exact", "--seed", "7"])
    assert (config.lr, config.batch_size, config.optim.weight_decay) == (0.5, 24, 0.25)
    assert (config.optim.clip, config.exact, config.seed, config.log_freq) == (2.0, True, 7, Config().log_freq)
    assert parse(["--config", str(file), "--no-exact"]).exact is False


@given(
    st.builds(
        Config,
        experiment_name=st.text(
            st.characters(categories=["L", "N", "Zs"], include_characters="-_'\"#="), min_size=1, max_size=60
        ).filter(lambda text: text.strip() and text.isprintable()),
        lr=st.floats(0, 1e6),
        seed=st.integers(0, 2**63 - 1),
        exact=st.booleans(),
        batch_size=st.integers(1, 10**6),
        optim=st.builds(Optim, eps=st.floats(0, 1), warmup_steps=st.integers(0, 10**12)),
    )
)
def test_the_file_written_is_the_config_read(config):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        assert read(path) == flat(config)
        assert parse(["--config", str(path)]) == config


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--lrr", "1"], "unknown flag --lrr: did you mean --lr?"),
        (["--weight-decay", "1"], "unknown flag --weight-decay: did you mean --optim.weight-decay?"),
        (["--expermint-name", "a"], "unknown flag --expermint-name: did you mean --experiment-name?"),
        (["--zzz=3"], "unknown flag --zzz; `lockstep train --help` lists them"),
        (["--lr", "fast"], "--lr: 'fast' is not a number"),
        (["--lr", "nan"], "--lr is nan: it must be a finite number, not negative"),
        (["--lr", "-1"], "--lr is -1.0: it must be a finite number, not negative"),
        (["--lr", "inf"], "--lr is inf"),
        (["--lr"], "--lr: expected one argument"),
        (["--batch-size", "1.5"], "--batch-size: '1.5' is not a whole number"),
        (["--batch-size", "0"], "--batch-size is 0: it must be at least 1"),
        (
            ["--batch-size", "30", "--micro-batch-size", "7"],
            "--batch-size 30 is not a multiple of --micro-batch-size 7: use --micro-batch-size 6",
        ),
        (["--engine", "warp"], "--engine is 'warp': choose one of"),
        (["--precision", "fp8"], "--precision is 'fp8': choose one of"),
        (["--timeout", "0"], "--timeout is 0.0: it must be a number of seconds"),
        (["--data.evaluation", "1"], "--data.evaluation is 1.0: it must be a share"),
        (["--experiment-name", "a/b"], "--experiment-name 'a/b' would lead out of --save-dir"),
        (["--experiment-name", "../../x"], "would lead out of --save-dir"),
        (["--experiment-name", ".."], "would lead out of --save-dir"),
        (["--experiment-name", "a\nb"], r"--experiment-name 'a\\nb' has characters that cannot be printed"),
        (["--experiment-name", "\x1b[31m"], "has characters that cannot be printed"),
        (["--experiment-name", "x" * 201], "has 201 characters, more than 200"),
        (["--experiment-name", " "], "is empty"),
        (["--config", "nowhere.toml"], "--config nowhere.toml: No such file or directory"),
        (["stray"], "unknown flag stray"),
    ],
)
def test_bad_flags(arguments, line):
    with pytest.raises(ConfigError, match=line if "\\" in line else re.escape(line)) as caught:
        parse(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lrr = 1", "unknown key 'lrr': did you mean lr?"),
        ("[optim]\nweight_decai = 1", "unknown key 'optim.weight_decai': did you mean optim.weight_decay?"),
        ("lr = 1\nlr = 2", "is not a TOML file: Cannot overwrite a value"),
        ('lr = "1e-3"', "--lr is '1e-3': it must be a number"),
        ("lr = true", "--lr is True: it must be a number"),
        ("exact = 1", "--exact is 1: it must be true or false"),
        ("batch_size = 2.0", "--batch-size is 2.0: it must be a whole number"),
        ("lr = nan", "--lr is nan"),
        ("a = [" * 5000, "is not a TOML file"),
        ("[optim.lr]\na = 1", "unknown key 'optim.lr'"),
        ("[nothing]\na = 1", "unknown key 'nothing'"),
        ("optim = 3", "unknown key 'optim'"),
    ],
)
def test_bad_files(tmp_path, text, line):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(line)) as caught:
        parse(["--config", str(path)])
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        parse(["--config", str(path)])


@given(st.integers(1, 5000))
def test_the_default_micro_batch_divides_and_is_an_eighth_at_most(batch_size):
    size = default_micro_batch_size(batch_size)
    assert batch_size % size == 0
    assert 1 <= size <= max(1, batch_size // 8)
    assert Config(batch_size=batch_size).micro_batches * size == batch_size


def test_a_config_cannot_be_changed_after_its_check():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lr = float("nan")
    with pytest.raises(ConfigError, match="--data.workers is -1"):
        Config(data=Data(workers=-1))


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert [name for name in option_list() if flag(name) not in shown] == []
