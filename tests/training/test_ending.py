"""The command that a finished run suggests, and that it works."""

import os
import runpy
import shlex
import sys
from types import SimpleNamespace

import pytest
from toys import Ragged

import lockstep
from lockstep import cli
from lockstep.training.step.ending import file_and_class, next_command

TASK = """
import torch
from torch import nn

import lockstep


class Line(lockstep.Task):
    def model(self):
        return nn.Linear(2, 1)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])


if __name__ == "__main__":
    lockstep.train(lockstep.Config.from_args(max_steps=2, batch_size=4, experiment_name="the line"), Line())
"""


def built(task, name="", own_task=True, evaluation=True):
    return SimpleNamespace(
        setup=SimpleNamespace(folder=SimpleNamespace(path="outputs/r"), own_task=own_task),
        config=lockstep.Config(task=name, experiment_name="r"),
        task=task,
        evaluation=evaluation,
    )


class WithArgument(Ragged):
    def __init__(self, width):
        super().__init__()
        self.width = width


def test_each_kind_of_task_has_its_command():
    here = os.path.relpath(__file__)
    ragged = file_and_class(Ragged())
    assert ragged.endswith("toys.py:Ragged")
    assert next_command(built(Ragged())) == f"lockstep evaluate outputs/r --task {ragged}"
    assert next_command(built(Ragged(), evaluation=False)) == "lockstep export outputs/r r.safetensors"
    assert next_command(built(WithArgument(2))) == "lockstep export outputs/r r.safetensors"
    assert next_command(built(Ragged(), f"{here}:WithArgument")) == "lockstep evaluate outputs/r"
    assert next_command(built(None, "images", own_task=False)) == "lockstep evaluate outputs/r"
    assert next_command(built(None, own_task=False)) == "lockstep generate outputs/r --prompt The"


def test_a_local_class_is_in_no_file():
    class Local(Ragged):
        pass

    assert not file_and_class(Local())


def test_the_command_that_a_script_prints_evaluates_its_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.py").write_text(TASK)
    monkeypatch.setattr(sys, "argv", ["line.py"])
    runpy.run_path("line.py", run_name="__main__")
    printed = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(printed.partition("next: ")[2])
    assert words == ["lockstep", "evaluate", "outputs/the line", "--task", "line.py:Line"]
    with pytest.raises(SystemExit) as ended:
        cli.main(words[1:])
    assert not ended.value.code
    assert "after step 2" in capsys.readouterr().out
