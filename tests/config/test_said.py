"""Settings are named as the person writes them: as fields in Python, as flags on the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run
from torch import nn
from toys import Ragged

import lockstep
from lockstep import cli
from lockstep.config.cli import flat, parse
from lockstep.errors import SETTINGS, LockstepError, said
from lockstep.training.build import notify

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


class Normed(Ragged):
    def model(self):
        return nn.Sequential(super().model(), nn.BatchNorm1d(29).double())


@pytest.fixture
def by_fields(by_flags, monkeypatch):
    monkeypatch.setattr(SETTINGS, "flags", False)


# where, fields, the task, what is said in Python, what the command says
CASES = [
    (
        *("build", {"exact": True, "batchnorm": "local"}, Ragged),
        "exact cannot run with batchnorm local, which depends on the world size; use replay",
        "--exact cannot run with --batchnorm local, which depends on the world size; use replay",
    ),
    (
        *("build", {"batch_size": 64, "data.drop_last": True}, Ragged),
        "and data.drop_last leaves short ones out: give a batch_size below 64, or data.drop_last False",
        "and --data.drop-last leaves short ones out: give a --batch-size below 64, or --no-data.drop-last",
    ),
    (
        *("build", {"batchnorm": "sync"}, Normed),
        "batchnorm sync needs a GPU: torch's SyncBatchNorm has no CPU kernel; use batchnorm replay",
        "--batchnorm sync needs a GPU: torch's SyncBatchNorm has no CPU kernel; use --batchnorm replay",
    ),
    (
        *("engine", {"engine": "ddp", "engine_options.prefetch": 2}, Ragged),
        "engine_options.prefetch is not an option of engine ddp; drop it (its own: engine_options.find_unused",
        "--engine.prefetch is not an option of --engine ddp; drop it (its own: --engine.find-unused",
    ),
    (
        *("engine", {"engine": "ddp"}, Ragged),
        "engine ddp needs a launcher: torchrun --standalone --nproc-per-node 2 -m lockstep train",
        "--engine ddp needs a launcher: torchrun --standalone --nproc-per-node 2 -m lockstep train",
    ),
    (
        *("checkpoint", {"init_from": "nowhere"}, Ragged),
        "init_from nowhere: ",
        "--init-from nowhere: ",
    ),
    (
        *("guards", {}, Nan),
        "lower lr, check these samples, or skip such steps with guards.nonfinite skip",
        "lower --lr, check these samples, or skip such steps with --guards.nonfinite skip",
    ),
    (
        *("guards", {"guards.nonfinite": "skip", "guards.limit": 1}, Nan),
        "1 steps were skipped before (guards.limit): lower lr or clean the data",
        "1 steps were skipped before (--guards.limit): lower --lr or clean the data",
    ),
    (
        *("guards", {"guards.retries": 0, "data.workers": 1}, Broken),
        "repair it, or skip such samples: guards.bad_samples N",
        "repair it, or skip such samples: --guards.bad-samples N",
    ),
]
IDS = [f"{where}-{number}" for number, (where, *_) in enumerate(CASES)]


def config(fields):
    """Made in Python: the fields of sections as dicts."""
    found = {}
    for name, value in fields.items():
        section, _, key = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[key] = value
    return lockstep.Config(**found)


def argv(fields):
    words = []
    for name, value in fields.items():
        name = "--" + name.replace("engine_options.", "engine.").replace("_", "-")
        words += [name] if value is True else [name, str(value)]
    return words


@pytest.mark.parametrize(("where", "fields", "task", "python", "command"), CASES, ids=IDS)
def test_the_same_mistake_in_the_words_of_each(where, fields, task, python, command, by_fields, tmp_path, capsys):
    fields = {"save_dir": str(tmp_path), "device": "cpu", "batch_size": 8, "max_steps": 4} | fields
    fields.pop("max_steps" if "data.drop_last" in fields else "", None)
    with pytest.raises(LockstepError) as caught:
        lockstep.train(config(fields), task())
    assert python in str(caught.value)
    assert not SETTINGS.flags
    named = f"{HERE / 'test_said.py'}:{task.__name__}"
    with pytest.raises(SystemExit):
        cli.main(["train", "--task", named, "--experiment-name", "other", *argv(fields)])
    assert command in capsys.readouterr().err


WARMED = {"max_steps": 2, "batch_size": 8, "optim.warmup_steps": 50}
LINE = "warmup_steps 50 is longer than the plan of 2 steps, so the rate never reaches lr 0.001"


def test_a_warning_too_on_the_terminal_and_in_the_log(by_fields, tmp_path, capsys):
    common = {**WARMED, "save_dir": str(tmp_path), "device": "cpu"}
    lockstep.train(config(common), Ragged())
    shown = capsys.readouterr().err, (tmp_path / "default" / "logs" / "rank-00000.log").read_text()
    assert all(f"optim.{LINE}" in text and "--" not in text for text in shown)
    lockstep.train(parse(["--experiment-name", "b", *argv(common)]), Ragged())
    flags = f"--optim.{LINE}".replace("warmup_steps", "warmup-steps").replace(" lr", " --lr")
    shown = capsys.readouterr().err, (tmp_path / "b" / "logs" / "rank-00000.log").read_text()
    assert all(flags in text for text in shown)


def test_what_comes_before_the_log_is_open(by_fields, capsys):
    notify(lockstep.World())("to train on: another --experiment-name, with --init-from outputs/a")
    assert capsys.readouterr().err == "to train on: another experiment_name, with init_from outputs/a\n"


def test_an_engine_and_a_proof_in_python(by_fields):
    with pytest.raises(LockstepError, match=r"^engine is 'dpp': choose one of auto, single"):
        lockstep.engine("dpp", nn.Linear(1, 1), None, lockstep.World())
    with pytest.raises(LockstepError, match=r"^plant_at 9 must be below steps 8$"):
        lockstep.verify(Ragged(), plant_at=9)


def odd(world):
    assert not SETTINGS.flags  # as in the process that started this one
    lockstep.Run(lockstep.Config(batch_size=2, micro_batch_size=2, exact=True), Ragged(), world)()


def test_ranks_say_it_as_the_process_that_started_them(by_fields):
    with pytest.raises(AssertionError, match="exact .* 2 processes.* 1 processes, or lower micro_batch_size") as caught:
        run(odd, 2)
    assert "--exact" not in str(caught.value).replace("raise ConfigError", "").partition("Traceback")[0]


def test_every_field_has_its_word_and_nothing_else(by_fields):
    for name in flat(lockstep.Config()):
        (line,) = argv({name: True})
        assert said(f"give {line} 3, or ({line}): use {line}.") == f"give {name} 3, or ({name}): use {name}."
    assert said("--no-exact or --engine.meta-init") == "exact False or engine_options.meta_init"
    for line in (
        "lockstep launch --nproc-per-node 2 --max-restarts 1 -- train; `lockstep train --help-all` lists them",
        "lockstep export --format hf; lockstep checkpoint list --step 3; --task-of --lrr; pre--exact; a -- b",
        "nothing",
    ):
        assert said(line) == line
    SETTINGS.flags = True
    assert said("--exact") == "--exact"


SCRIPT = """import lockstep
from toys import Ragged
config = {}
try:
    lockstep.train(config, Ragged())
except lockstep.errors.LockstepError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("made", "line"),
    [
        ("lockstep.Config(engine='ddp', device='cpu')", "engine ddp needs a launcher"),
        ("lockstep.Config.from_args(['--engine', 'ddp', '--device', 'cpu'])", "--engine ddp needs a launcher"),
    ],
)
def test_a_script_speaks_of_flags_once_it_has_some(made, line, tmp_path):
    path = os.pathsep.join([*sys.path, str(HERE.parent)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(made)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(line), done.stdout + done.stderr
