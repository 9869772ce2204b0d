"""Settings are named as the user writes them: as fields in Python, as flags on the command line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm
from ranks import run
from refusals import names, refuses
from torch import nn
from toys import Ragged

import lockstep
from lockstep import cli
from lockstep.config.cli import flatten, parse
from lockstep.errors import SETTINGS, CheckpointError, ConfigError, DataError, LockstepError, name_settings
from lockstep.training.state.parts import notify

HERE = Path(__file__).parent


class Nan(Ragged):
    def loss(self, model, batch):
        return super().loss(model, batch) * (float("nan") if model.training else 1.0)


class Broken(Ragged):
    def dataset(self, split):
        return Unreadable() if split == "train" else None


class Unreadable(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        raise OSError("no such image")


@pytest.fixture
def by_fields(by_flags, monkeypatch):
    monkeypatch.setattr(SETTINGS, "flags", False)


# fields, the task, the error, and the settings that it names, as in Python
CASES = {
    "exact": ({"exact": True, "batchnorm": "local"}, Ragged, ConfigError, ["exact", "batchnorm local"]),
    "short": (
        *({"batch_size": 64, "data.drop_last": True}, Ragged, DataError),
        ["data.drop_last", "batch_size", "data.drop_last False"],
    ),
    "batchnorm": (
        *({"batchnorm": "sync", "guards.audit": 1}, Ragged, ConfigError),
        ["guards.audit", "batchnorm sync", "batchnorm replay"],
    ),
    "engine option": (
        *({"engine": "ddp", "engine_options.prefetch": 2}, Ragged, ConfigError),
        ["engine_options.prefetch", "engine ddp", "engine_options.find_unused_parameters"],
    ),
    "launcher": ({"engine": "ddp"}, Ragged, ConfigError, ["engine ddp"]),
    "checkpoint": ({"init_from": "."}, Ragged, CheckpointError, ["init_from ."]),
    "nan": ({}, Nan, LockstepError, ["lr", "guards.nonfinite skip"]),
    "nan, skipped": (
        *({"guards.nonfinite": "skip", "guards.limit": 1}, Nan, LockstepError),
        ["guards.limit", "lr"],
    ),
    "sample": ({"guards.retries": 0, "data.workers": 1}, Broken, LockstepError, ["guards.bad_samples N"]),
}


def config(fields):
    """A Config made in Python, of dotted names."""
    top = {}
    for name, value in fields.items():
        section, _, key = name.rpartition(".")
        (top.setdefault(section, {}) if section else top)[key] = value
    return lockstep.Config(**top)


def flag(name):
    return "--" + name.replace("engine_options.", "engine.").replace("_", "-")


def argv(fields):
    words = []
    for name, value in fields.items():
        words += [flag(name)] if value is True else [flag(name), str(value)]
    return words


def as_flag(setting):
    """`lr` -> `--lr`, `batchnorm sync` -> `--batchnorm sync`, `exact False` -> `--no-exact`."""
    name, _, value = setting.partition(" ")
    return flag(name).replace("--", "--no-") if value == "False" else f"{flag(name)} {value}".rstrip()


@pytest.mark.parametrize(("fields", "task", "kind", "settings"), CASES.values(), ids=CASES)
def test_error_names_fields_in_python_and_flags_in_the_command(
    fields, task, kind, settings, by_fields, tmp_path, capsys
):
    fields = {"save_dir": str(tmp_path), "device": "cpu", "batch_size": 8, "max_steps": 4} | fields
    fields.pop("max_steps" if "data.drop_last" in fields else "", None)
    with refuses(kind, *settings) as caught:
        lockstep.train(config(fields), task())
    flags = [as_flag(setting) for setting in settings]
    assert not any(re.search(rf"{each.split()[0]}(?![\w-])", str(caught.value)) for each in flags)
    assert not SETTINGS.flags
    name = f"{HERE / 'test_setting_names.py'}:{task.__name__}"
    with pytest.raises(SystemExit):
        cli.main(["train", "--task", name, "--experiment-name", "other", *argv(fields)])
    assert names(capsys.readouterr().err, *flags)


def test_a_warning_names_them_too_on_the_terminal_and_in_the_log(by_fields, tmp_path, capsys):
    common = {"max_steps": 2, "batch_size": 8, "optim.warmup_steps": 50, "save_dir": str(tmp_path), "device": "cpu"}
    lockstep.train(config(common), Ragged())
    shown = capsys.readouterr().err, (tmp_path / "default" / "logs" / "rank-00000.log").read_text()
    assert all(names(text, "optim.warmup_steps 50", "lr 0.001") and "--" not in text for text in shown)
    lockstep.train(parse(["--experiment-name", "b", *argv(common)]), Ragged())
    shown = capsys.readouterr().err, (tmp_path / "b" / "logs" / "rank-00000.log").read_text()
    assert all(names(text, "--optim.warmup-steps 50", "--lr 0.001") for text in shown)


def test_a_line_before_the_log_is_open_names_them_too(by_fields, capsys):
    notify(lockstep.World())("to train on: another --experiment-name, with --init-from outputs/a")
    assert capsys.readouterr().err == "to train on: another experiment_name, with init_from outputs/a\n"


def test_an_engine_and_a_proof_in_python_name_arguments(by_fields):
    with refuses(LockstepError, "engine", "dpp", "single") as caught:
        lockstep.engine("dpp", nn.Linear(1, 1), None, lockstep.World())
    assert "--" not in str(caught.value)
    with refuses(LockstepError, "plant_at 9", "steps 8") as caught:
        lockstep.verify(Ragged(), plant_at=9)
    assert "--" not in str(caught.value)


def odd(world):
    assert not SETTINGS.flags  # as in the process that started this one
    lockstep.Run(lockstep.Config(batch_size=2, micro_batch_size=2, exact=True), Ragged(), world)()


def test_ranks_name_settings_as_the_process_that_started_them(by_fields):
    with refuses(AssertionError, "exact", "2 processes", "1 processes", "micro_batch_size") as caught:
        run(odd, 2)
    assert "--exact" not in str(caught.value).replace("raise ConfigError", "").partition("Traceback")[0]


def test_every_flag_of_a_setting_becomes_its_field(by_fields):
    for name in flatten(lockstep.Config()):
        each = flag(name)
        assert name_settings(f"give {each} 3, or ({each}): use {each}.") == f"give {name} 3, or ({name}): use {name}."
    assert name_settings("--no-exact or --engine.meta-init") == "exact False or engine_options.meta_init"
    for line in (
        "lockstep launch --nproc-per-node 2 --max-restarts 1 -- train; `lockstep train --help-all` lists them",
        "lockstep export --format hf; lockstep checkpoint list --step 3; --task-of --lrr; pre--exact; a -- b",
        "nothing",
    ):
        assert name_settings(line) == line
    SETTINGS.flags = True
    assert name_settings("--exact") == "--exact"


SCRIPT = """import lockstep
from toys import Ragged
config = {}
try:
    lockstep.train(config, Ragged())
except lockstep.errors.LockstepError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("made", "setting"),
    [
        ("lockstep.Config(engine='ddp', device='cpu')", "engine ddp"),
        ("lockstep.Config.from_args(['--engine', 'ddp', '--device', 'cpu'])", "--engine ddp"),
    ],
)
def test_a_script_with_flags_gets_flags_in_its_errors(made, setting, tmp_path):
    path = os.pathsep.join([*sys.path, str(HERE.parent)])
    done = subprocess.run(
        [warm.python(), "-c", SCRIPT.format(made)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(f"{setting} "), done.stdout + done.stderr
