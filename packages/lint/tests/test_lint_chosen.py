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
        ("TABLE[kind]()", "np.random.rand()", "pass", []),  # told in their own file
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
