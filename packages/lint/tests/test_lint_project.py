"""What is followed between functions and files of a project."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

DIST = """
import torch.distributed as dist

def setup():
    dist.init_process_group("nccl")

def mean(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()

def is_main_process():
    return dist.get_rank() == 0

def finish():
    {end}
"""
MAIN = """
import torch
from parts.comm import finish, is_main_process, mean, setup

def main(loss):
    setup()
    if is_main_process():
        print(mean(loss))
    finish()

if __name__ == "__main__":
    main(torch.ones(()))
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "comm.py").write_text(DIST.format(end="dist.destroy_process_group()"))
    (tmp_path / "main.py").write_text(MAIN)
    return tmp_path


def rules(*paths):
    findings = check_paths([str(path) for path in paths], configure({}, None, None, hints=True))
    return [(finding.path.rsplit("/", 1)[-1], finding.rule, finding.line) for finding in findings]


def test_a_collective_behind_an_import(project):
    assert rules(project / "main.py") == [("main.py", "LS018", 8)]


def test_what_ends_in_another_file_is_there(project):
    assert rules(project / "main.py", project / "parts" / "comm.py") == [("main.py", "LS018", 8)]
    (project / "parts" / "comm.py").write_text(DIST.format(end="pass"))
    assert ("comm.py", "LS019", 5) in rules(project / "main.py", project / "parts" / "comm.py")


def test_names_passed_on_by_a_package(project):
    (project / "parts" / "__init__.py").write_text("from .comm import *\n")
    (project / "main.py").write_text(MAIN.replace("parts.comm", "parts"))
    assert rules(project / "main.py") == [("main.py", "LS018", 8)]


def test_files_that_import_each_other(project):
    (project / "a.py").write_text("import torch\nimport b\nfrom b import *\n")
    (project / "b.py").write_text("import torch\nimport a\nfrom a import *\nx = torch.load('cuda')\n")
    assert rules(project / "a.py", project / "b.py") == [("b.py", "LS015", 4)]


def test_an_argument_from_another_function(tmp_path):
    (tmp_path / "t.py").write_text(
        """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

def build(flag):
    net = Net()
    return net

class Trainer:
    def __init__(self, model, rank):
        self.model = DDP(model.to(rank), device_ids=[rank])

def main(rank):
    Trainer(build(True), rank)
"""
    )
    assert rules(tmp_path / "t.py") == [("t.py", "LS005", 17)]
