"""What a name chooses at run time, and what stands in other programs or classes: LS008, LS034; LS025, LS014: what a
helper or an object of another file does on every rank; LS012: turns that are counted by hand.
"""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths


def lines(folder, files, code, name="run.py"):
    (folder / "pyproject.toml").write_text("")
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    return [finding.line for finding in check_paths([str(folder / name)], configure({}, code, ""))]


MODELS = """
import importlib

def create_model(options):
    name = "models." + options.model + "_model"
    return getattr(importlib.import_module(name), "Model")(options)
"""
MODEL = """
import torch
from torch import nn

class Model:
    def __init__(self, options):
        self.net = nn.Linear(2, 2)

    def backward_all(self):
        {backward}

    def improve(self):
        self.backward_all()
        self.optimizer.step()

    def show(self):
        return self.net(None)
"""
PLAY = """
import torch
from models import create_model

def main(options, loader):
    {before}
    model = create_model(options)
    for batch in loader:
        model.{call}()

if __name__ == "__main__":
    main(None, [])
"""


@pytest.mark.parametrize(
    ("before", "call", "backward", "expected"),
    [
        ("pass", "improve", "self.loss.backward()", [7]),
        ("pass", "improve", "pass", []),
        ("pass", "show", "self.loss.backward()", []),
        ("torch.manual_seed(1)", "improve", "self.loss.backward()", []),
    ],
)
def test_a_seed_for_a_model_whose_file_is_imported_by_its_name(tmp_path, before, call, backward, expected):
    files = {"models/__init__.py": MODELS, "models/plain_model.py": MODEL.format(backward=backward)}
    assert lines(tmp_path, files | {"run.py": PLAY.format(before=before, call=call)}, "LS008") == expected


AGENT = """
import torch

class Agent:
    def __init__(self, net):
        self.__start(20)

    def __start(self, number):
        torch.manual_seed(number)

def valid(net):
    return Agent(net)
"""
TRAIN = """
import torch
from torch import nn
from agent import valid, Agent

def main(loader):
    {before}
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    valid(model)
    {after}

if __name__ == "__main__":
    main([])
"""
OTHER = "from agent import Agent\nimport torch\n\nAgent(None)\n"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("pass", "model.forward_deterministic(None)", [8]),
        ("pass", "torch.use_deterministic_algorithms(True)", [8]),
        ("torch.use_deterministic_algorithms(True)", "pass", []),
        ("Agent(None)", "pass", []),
    ],
)
def test_a_seed_that_only_another_program_sets_before_the_model(tmp_path, before, after, expected):
    files = {"agent.py": AGENT, "test.py": OTHER, "run.py": TRAIN.format(before=before, after=after)}
    assert lines(tmp_path, files, "LS008") == expected


@pytest.mark.parametrize(("what", "expected"), [("random.seed(s)", [7]), ("torch.manual_seed(s)", []), ("go(s)", [])])
def test_a_helper_that_is_called_like_a_seed_is_one_by_what_it_does(tmp_path, what, expected):
    text = "import random\nimport torch\nfrom torch import nn\nfrom away import go\nset_up = 1\nset_seed(1)\n"
    text += "model = nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    text += "model(None).backward()\noptimizer.step()\n"
    text = text.replace("set_up = 1", "from tools import set_seed")
    tools = f"import random\nimport torch\nfrom away import go\n\ndef set_seed(s):\n    {what}\n"
    assert lines(tmp_path, {"run.py": text, "tools.py": tools}, "LS008") == expected


SETS = """
import numpy as np
import torch
from torch.utils.data import Dataset

class One(Dataset):
    def __getitem__(self, i):
        return np.random.rand()

class Two(Dataset):
    def __getitem__(self, i):
        return {second}

class Careful(Dataset):
    def __getitem__(self, i):
        np.random.seed(torch.utils.data.get_worker_info().id)
        return np.random.rand()

def start(number):
    {start}
"""
LOADS = """
from torch.utils.data import DataLoader
import sets

TABLE = {{"one": sets.One, "two": sets.Two}}

def main(kind, small):
    data = {made}
    if small:
        loader = DataLoader(data, num_workers=2)
        other = DataLoader(data, num_workers=2)
    else:
        loader = DataLoader(data, num_workers=2)
    return loader
"""


@pytest.mark.parametrize(
    ("made", "second", "start", "expected"),
    [
        ("TABLE[kind]()", "np.random.rand()", "pass", [10, 13]),
        ("TABLE[kind]()", "i", "pass", []),
        ("sets.One()", "i", "pass", [10, 13]),
        ("sets.Careful()", "i", "pass", []),
        ("sets.One()", "i", "np.random.seed(torch.utils.data.get_worker_info().id)", []),
    ],
)
def test_data_sets_of_a_table_and_loaders_of_two_arms(tmp_path, made, second, start, expected):
    files = {"sets.py": SETS.format(second=second, start=start), "run.py": LOADS.format(made=made)}
    assert lines(tmp_path, files, "LS034") == expected


FOLDERS = """
import os

def ensure_dir(path{options}):
    if not os.path.exists(path):
        os.makedirs({made})
"""


@pytest.mark.parametrize(
    ("options", "made", "call", "expected"),
    [
        ("", "path", "ensure_dir(out)", [6]),
        ("", "path, exist_ok=True", "ensure_dir(out)", []),
        ("", "path", "ensure_dir(f'{out}/{rank}')", []),
        ("", "path", "rank == 0 and ensure_dir(out)", []),
        ("", "path", "dist.barrier() if rank else ensure_dir(out)", []),
        ("", "'cache'", "ensure_dir(out)", []),
    ],
)
def test_a_folder_that_a_helper_makes_on_every_rank(tmp_path, options, made, call, expected):
    run = "import torch.distributed as dist\nfrom folders import ensure_dir\n\ndef main(out, rank):\n"
    run += f"    dist.init_process_group('nccl')\n    {call}\n    return out\n"
    assert (
        lines(tmp_path, {"folders.py": FOLDERS.format(options=options, made=made), "run.py": run}, "LS025") == expected
    )


ENGINE = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class Engine:
    def __enter__(self):
        dist.init_process_group("nccl")
        return self

    def keep(self, model, path):
        torch.save(model.module.state_dict(), path)
"""


@pytest.mark.parametrize(("guard", "expected"), [("if True", [12]), ("if dist.get_rank() == 0", [])])
def test_an_object_that_a_with_statement_holds(tmp_path, guard, expected):
    run = "import torch.distributed as dist\nfrom engine import DDP, Engine\n\ndef main(model):\n"
    run += f"    with Engine() as engine:\n        model = DDP(model)\n        {guard}:\n"
    run += "            engine.keep(model, 'model.pt')\n"
    assert lines(tmp_path, {"engine.py": ENGINE, "run.py": run}, "LS014", "engine.py") == expected


COUNTED = """
import torch

def train(model, loader, optimizer, n):
    {whole}
    for epoch in range(3):
        {epoch}
        for x in loader:
            {before}
            loss = model(x).mean() / n
            loss.backward()
            if {test}:
                optimizer.step()
                optimizer.zero_grad()
            {after}
        {end}
"""


@pytest.mark.parametrize(
    ("whole", "epoch", "before", "test", "after", "end", "expected"),
    [
        ("pass", "k, total = 0, 0.0", "k += 1", "k % n == 0", "pass", "pass", ["never"]),
        ("pass", "k = 0", "pass", "(k + 1) % n == 0", "k += 1", "pass", ["never"]),
        ("pass", "k = 0", "pass", "k % n == 0", "k += 1", "pass", ["first"]),
        ("k = 0", "pass", "k += 1", "k % n == 0", "pass", "pass", []),
        ("pass", "k = 0", "k += 1", "k % n == 0", "pass", "optimizer.step()", []),
        ("pass", "k = 0", "k += 1", "k == n", "k = 0 if k == n else k", "pass", []),
        ("pass", "k = 0", "k += len(x)", "k % n == 0", "pass", "pass", []),
        ("pass", "k = 0", "k += 1", "k % n == 0 or k == len(loader)", "pass", "pass", []),
    ],
)
def test_micro_batches_that_are_counted_by_hand(tmp_path, whole, epoch, before, test, after, end, expected):
    text = COUNTED.format(whole=whole, epoch=epoch, before=before, test=test, after=after, end=end)
    (tmp_path / "run.py").write_text(text)
    found = check_paths([str(tmp_path / "run.py")], configure({}, "LS012", ""))
    assert [next(word for word in ("never", "first") if word in one.message) for one in found] == expected


OPTIONS = """
import os
import torch.distributed as dist

class Arguments:
    def __init__(self, rank=-1):
        self.local_rank = {rank}
        self.no_cuda = False

args = Arguments()
{after}
if args.local_rank == -1 or args.no_cuda:
    device = "cuda"
else:
    dist.init_process_group("nccl")
os.mkdir("out")
"""


@pytest.mark.parametrize(
    ("rank", "after", "expected"),
    [
        ("-1", "pass", []),
        ("0", "pass", [16]),
        ("rank", "pass", [16]),
        ("-1", "args.local_rank = int(os.environ['RANK'])", [16]),
        ("-1", "setattr(args, 'local_rank', 1)", [16]),
    ],
)
def test_a_rank_that_a_class_of_options_writes_out(tmp_path, rank, after, expected):
    assert lines(tmp_path, {"run.py": OPTIONS.format(rank=rank, after=after)}, "LS025") == expected
