"""Several processes from a notebook's cell or a script: `lockstep.launch`."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from refusals import refuses

import lockstep
from lockstep.distributed import spawn
from lockstep.distributed.spawn import RankFailure
from lockstep.errors import ConfigError

CELL = """
import lockstep, torch
from torch import nn

class Line(lockstep.Task):
    def model(self):
        return nn.Linear(4, 1)

    def dataset(self, split):
        rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))

    def loss(self, model, batch):
        rows, wanted = batch
        return nn.functional.mse_loss(model(rows), wanted)

class Found:
    def __init__(self, loss):
        self.loss = loss

def train(folder):
    config = lockstep.Config(experiment_name="cell", save_dir=folder, max_steps=4, batch_size=16, report=False)
    lockstep.train(config, Line())
    return Found(lockstep.train(config, Line()).evaluation.loss)  # twice: a launcher's processes may
"""


@pytest.fixture
def cell(monkeypatch):
    """What a cell of a notebook defines: other processes cannot import it."""
    names = {"__name__": "__main__"}
    exec(CELL, names)
    monkeypatch.setattr(spawn, "is_importable_main", lambda: False)
    return names


def test_a_notebooks_cell_trains_on_two_ranks(cell, tmp_path, capsys):
    first, second = lockstep.launch(cell["train"], 2, (str(tmp_path),))
    assert type(first) is type(second) is cell["Found"]
    assert first.loss == second.loss
    text = capsys.readouterr().out
    assert text.count("step 4/4  evaluation loss") == 1
    assert "processes        2" in text
    assert "WORLD_SIZE" not in os.environ


def test_a_cells_task_is_verified(cell):
    table = lockstep.verify(cell["Line"](), lockstep.Config(batch_size=8), engines=("ddp",), world_sizes=(2,), steps=1)
    assert table.ok


def test_a_cell_without_cloudpickle_is_refused(cell, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with refuses(ConfigError, "cloudpickle", "notebook"):
        lockstep.launch(cell["train"], 2, ("",))


def fail(kind):
    print("a line of rank", os.environ["RANK"])
    if os.environ["RANK"] == "1":
        raise kind("too odd")
    return torch.ones(3)


def test_results_are_those_of_the_ranks(capsys):
    assert [float(sum(found)) for found in lockstep.launch(fail, 1, (ValueError,))] == [3.0]
    assert capsys.readouterr().out == "a line of rank 0\n"


@pytest.mark.parametrize(("kind", "code"), [(ValueError, 1), (ConfigError, 2)])
def test_a_failure_is_one_line_and_the_users_traceback(capsys, kind, code):
    with refuses(RankFailure, "rank 1 of 2", "too odd") as caught:
        lockstep.launch(fail, 2, (kind,))
    assert caught.value.exit_code == code
    out, err = capsys.readouterr()
    assert out == "a line of rank 0\n"
    assert err.count("Traceback") == (code == 1)
    assert "launch/local.py" not in err


def leave(code):
    raise SystemExit(code)


def test_an_exit_of_the_ranks_is_the_callers():
    with pytest.raises(SystemExit) as caught:
        lockstep.launch(leave, 2, (75,))
    assert caught.value.code == 75


def train_long(folder):
    names = {"__name__": "cell"}
    exec(CELL, names)
    config = lockstep.Config(experiment_name="long", save_dir=folder, max_steps=10**6, batch_size=16, report=False)
    for step in lockstep.Run(config, names["Line"]()):
        if step.global_step == 2:
            Path(folder, f"runs-{os.environ['RANK']}").touch()


def test_ctrl_c_saves_on_all_ranks(tmp_path):
    def press():
        while len(list(tmp_path.glob("runs-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    before = signal.getsignal(signal.SIGINT)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="saved after step"):
        lockstep.launch(train_long, 2, (str(tmp_path),))
    assert list(tmp_path.glob("long/checkpoints/step-*"))
    assert signal.getsignal(signal.SIGINT) is before


def test_what_launch_cannot_start_is_refused(monkeypatch):
    for processes in (0, "two", 1.5):
        with refuses(ConfigError, "processes", repr(processes)):
            lockstep.launch(fail, processes)
    with refuses(ConfigError, "lockstep.launch", "type int", "the function itself"):
        lockstep.launch(3)
    with refuses(ConfigError, "args", "(0.1,)"):
        lockstep.launch(fail, 2, 0.1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refuses(ConfigError, "lockstep.launch"):
        lockstep.launch(fail, 2)
