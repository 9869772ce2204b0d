"""LS022 where options and batches go through other names; LS025 folders that ranks make behind a test."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

WORKERS = """
import torch
from torch.utils.data import DataLoader

def main(data, args, more):
    torch.cuda.init()
    options = {options}
    {after}
    return DataLoader(data, {given})
"""


def told(text, code):
    return bool(check_text(text, configure({}, code, "")))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"options": "{'batch_size': 8, 'num_workers': 4}"}, False),
        ({"options": "dict(num_workers=args.workers)"}, False),
        ({"options": "{'batch_size': 8, **more}"}, False),
        ({"options": "dict(more, batch_size=8)"}, False),
        ({"options": "{'batch_size': 8}", "after": "options.update(more)"}, False),
        ({"options": "{'batch_size': 8}", "after": "options['num_workers'] = 2"}, False),
        ({"options": "args.options"}, False),
        ({"options": "{'batch_size': 8}", "given": "**more"}, False),
    ],
)
def test_the_options_of_a_loader(change, found):
    usual = {"after": "pass", "given": "**options"}
    assert told(WORKERS.format(**(usual | change)), "LS022") is found


MOVED = """
import torch
from torch.utils.data import DataLoader

class Trainer:
    def __init__(self, data):
        self.train_loader = DataLoader(data, 8, num_workers=2, pin_memory=True)
        self.test_loader = DataLoader(data, 8, num_workers=2, pin_memory=True)

    def prepare(self, batch, extra):
        {prepare}
        return batch

    def train(self, model, optimizer):
        for batch in {loader}:
            batch = self.prepare(batch, model)
            model(batch).mean().backward()
            optimizer.step()

    def {evaluate}(self, model):
        for batch in self.test_loader:
            model(self.prepare(batch, model))
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"prepare": "batch = [x.cuda() for x in batch]"}, True),
        ({"prepare": "x, y = batch; x = x.cuda(); y = y.cuda()"}, True),
        ({"prepare": "x = batch['x']; x = x.to(self.device)"}, True),
        ({"prepare": "batch = batch.to(self.device, non_blocking=True)"}, False),
        ({"prepare": "extra = extra.cuda()"}, False),
        ({"prepare": "size = len(batch); size = size.to('cuda')"}, False),
        ({"loader": "self.test_loader"}, True),  # trains on it, whatever its name
        ({"loader": "range(3)"}, False),
    ],
)
def test_a_method_that_moves_the_batch(change, found):
    usual = {"prepare": "batch = batch.to(self.device)", "loader": "self.train_loader", "evaluate": "test"}
    assert told(MOVED.format(**(usual | change)), "LS022") is found


FOLDER = """
import os
from pathlib import Path
import torch.distributed as dist

def main(args, rank):
    dist.init_process_group("nccl")
    {lines}
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("if not os.path.exists(args.out): os.makedirs(args.out)", True),
        ("if not os.path.isdir(args.out): os.mkdir(args.out)", True),
        ("if not Path(args.out).exists(): Path(args.out).mkdir(parents=True)", True),
        ("if os.path.exists(args.out): return\n    os.makedirs(args.out)", True),
        ("if not os.path.exists(args.out): os.makedirs(args.out, exist_ok=True)", False),
        ("if rank == 0 and not os.path.exists(args.out): os.makedirs(args.out)", False),
        ("if rank == 0:\n        if not os.path.exists(args.out): os.makedirs(args.out)", False),
        ("try:\n        os.makedirs(args.out)\n    except FileExistsError:\n        pass", False),
        ("if not os.path.exists(f'out{rank}'): os.makedirs(f'out{rank}')", False),
    ],
)
def test_a_folder_that_ranks_look_for_at_once(lines, found):
    assert told(FOLDER.format(lines=lines), "LS025") is found


PLACES = """
import os
from pathlib import Path
import torch.distributed as dist
from torchvision.datasets import CIFAR10

def main(args, rank):
    dist.init_process_group("nccl")
    {first}
    data = CIFAR10({place}, download=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("first", "place", "found"),
    [
        ("pass", "'data'", True),
        ("root = Path(args.data) / 'cifar'", "root", True),
        ("root = Path(args.data)", "root=root", True),
        ("root = Path(args.data) / str(rank)", "root", False),
        ("root = f'data{dist.get_rank()}'", "root=root", False),
        ("pass", "os.path.join('data', str(rank))", False),
        ("root = tempfile.mkdtemp()", "root", False),
        ("root = args.template", "root", True),
        ("root = f'data{os.getpid()}'", "root", False),
        ("root = tempfile.mkdtemp()", "root + '/cifar'", False),
        ("root = args.data", "os.path.join(root, 'cifar')", True),
        ("args = make(rank)", "os.path.join(args.data, 'cifar')", True),
        ("pass", "args.rootTemp", False),
        ("pass", "args.contemporary", True),
        ("pass", "args.ranker_dir", True),
        ("root = f'data{args.num_workers}'", "root", True),
        ("root = f'data{args.lora_rank}'", "root", True),
        ("root = f'data{args.worker_id}'", "root", False),
    ],
)
def test_a_download_into_a_place_of_its_own(first, place, found):
    assert told(PLACES.format(first=first, place=place), "LS025") is found


ON_CPU = """
import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

visible = "CUDA_VISIBLE_DEVICES"

def main(data, optimizer, rank):
    dist.init_process_group("gloo")
    device = {device}
    model = torchvision.models.resnet18().to(device)
    model = DDP(model)
    for x in DataLoader(data, 8, num_workers=2, pin_memory=True):
        x = x.to(device)
        model(x).mean().backward()
        optimizer.step()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("device", "found"),
    [
        ("torch.device('cpu')", False),
        ("'cpu'", False),
        ("torch.device('cuda', rank)", True),
        ("torch.device('cuda') if torch.cuda.is_available() else torch.device('cpu')", True),
        ("rank", True),
    ],
)
@pytest.mark.parametrize("code", ["LS005", "LS022"])
def test_a_device_that_is_the_cpu(code, device, found):
    assert told(ON_CPU.format(device=device), code) is found


IDLE = """
import torch
from torch.utils.data import DataLoader
{imports}

def main(model, data, optimizer, args):
    loader = DataLoader(data, 8, num_workers=2, pin_memory=True)
    helper = {helper}
    for x in loader:
        x = x.cuda()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("imports", "helper", "found"),
    [
        ("from accelerate import Accelerator", "None", True),  # an idle import says nothing
        ("from lightning import Trainer as Coach", "None", True),
        ("from trl import SFTTrainer", "data", True),
        ("from accelerate import Accelerator", "Accelerator()", False),
        ("from lightning import Trainer as Coach", "Coach()", False),
        ("import accelerate", "accelerate.Accelerator()", False),
    ],
)
def test_a_framework_that_is_imported_alone(imports, helper, found):
    assert told(IDLE.format(imports=imports, helper=helper), "LS022") is found


SCORED = """
import torch
from torch.utils.data import DataLoader

loader = DataLoader(data, 8, num_workers=2, pin_memory=True)

{decorated}
def look_over(model):
    for x in loader:
        model(x.to("cuda"))
"""


@pytest.mark.parametrize(
    ("decorated", "told"),
    [
        ("@torch.no_grad()", False),
    ],
)
def test_a_batch_that_is_moved_where_no_graph_is_kept_is_an_evaluations(decorated, told):
    found = check_text(SCORED.format(decorated=decorated), configure({}, "LS022", ""))
    assert bool(found) is told


TURNS = """
import contextlib
import os
import torch.distributed as dist
from torchvision.datasets import MNIST

@contextlib.contextmanager
def sequence(rank):
    {waits}
    yield

def data():
    return {gives}

def main(rank):
    dist.init_process_group("nccl")
    {lines}
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["if rank == 0:", "    data()", "dist.barrier()", "train = data()"], False),
        (["if rank == 0:", "    data()", "train = data()"], True),
        (["train = data()", "dist.barrier()"], True),
        (["if rank > 0:", "    dist.barrier()", "train = data()", "if rank == 0:", "    dist.barrier()"], False),
        (["if rank == 0:", "    MNIST('a', download=True)", "dist.barrier()", "MNIST('a', download=True)"], False),
        (["if rank == 0:", "    os.makedirs('a')", "dist.barrier()", "os.makedirs('b')"], True),
        (["with contextlib.suppress(FileExistsError):", "    os.makedirs('b')"], False),
        (["with contextlib.suppress(OSError):", "    data()"], True),
        (["with sequence(rank):", "    data()"], False),
        (["with open('a'):", "    data()"], True),
    ],
)
def test_one_rank_goes_first(lines, found):
    gives = 'MNIST("data", download=True)' if any("data()" in line for line in lines) else "None"
    text = TURNS.format(waits="if rank: dist.barrier()", gives=gives, lines="\n    ".join(lines))
    assert told(text, "LS025") is found
