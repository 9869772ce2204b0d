"""What a script chooses at run time: a model of a table, a scheduler or a type by a flag, a rank by its launcher."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


def told(text, code):
    return bool(check_text(text, configure({}, code, "")))


TABLE = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = {small}

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

def large(**options):
    return Large()

MODELS = {{"small": Small, "large": {large}}}

def get_model(name, **options):
    return MODELS[name](**options)

def main(args, local_rank):
    {line}
    return DDP(model.to(local_rank), device_ids=[local_rank])
"""


@pytest.mark.parametrize(
    ("line", "small", "large", "found"),
    [
        ("model = get_model(args.name)", "nn.BatchNorm2d(4)", "Large", True),
        ("model = MODELS[args.name]()", "nn.BatchNorm2d(4)", "large", True),
        ("model = {'small': Small, 'large': Large}[args.name]()", "nn.BatchNorm2d(4)", "Large", True),
        ("kind = Small if args.small else Large\n    model = kind()", "nn.BatchNorm2d(4)", "Large", True),
        ("model = get_model(args.name)", "nn.LayerNorm(4)", "Large", False),
        ("model = MODELS[args.name]()", "nn.BatchNorm2d(4)", "args.other", False),
        ("model = {'small': Small}[args.name]()", "nn.LayerNorm(4)", "Large", False),
    ],
)
def test_a_model_of_a_table(line, small, large, found):
    assert told(TABLE.format(line=line, small=small, large=large), "LS005") is found


OWN = "import torch\nfrom torch.nn{more} import {base}\n\nclass {name}({base}):\n    pass\n\nmodel = {call}\n"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (("", "DataParallel", "DataParallelModel", "DataParallelModel(torch.nn.Linear(2, 2)).cuda()"), True),
        ((".parallel", "DataParallel", "MyParallel", "MyParallel(torch.nn.Linear(2, 2))"), True),
        (("", "DataParallel", "OwnDataParallel", "OwnDataParallel(module=torch.nn.Linear(2, 2))"), True),
        (("", "DataParallel", "DataParallelModel", "torch.nn.Linear(2, 2)"), False),
        (("", "Module", "DataParallelModel", "DataParallelModel()"), False),
        ((".parallel", "DistributedDataParallel", "MyParallel", "MyParallel(torch.nn.Linear(2, 2))"), False),
    ],
)
def test_a_class_of_ones_own_that_derives_from_data_parallel(given, found):
    text = OWN.format(**dict(zip(("more", "base", "name", "call"), given, strict=True)))
    assert told(text, "LS001") is found


STARTED = """
import os
import torch
import torch.distributed as dist

def main(rank):
    dist.init_process_group("nccl", rank=rank)
    torch.cuda.set_device({device})

main({rank})
"""


@pytest.mark.parametrize(
    ("rank", "device", "found"),
    [
        ("int(os.environ['SLURM_PROCID'])", "rank", True),
        ("int(os.getenv('OMPI_COMM_WORLD_RANK'))", "rank", True),
        ("int(os.environ.get('PMI_RANK', 0))", "rank", True),
        ("int(os.environ['SLURM_LOCALID'])", "rank", False),
        ("int(os.environ['SLURM_PROCID'])", "rank % torch.cuda.device_count()", False),
        ("int(os.getenv('OMPI_COMM_WORLD_LOCAL_RANK'))", "rank", False),
    ],
)
def test_the_rank_of_another_launcher(rank, device, found):
    assert told(STARTED.format(rank=rank, device=device), "LS007") is found


SCHEDULED = """
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

def make(optimizer, kind, steps, epochs):
    if kind == "onecycle":
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    return CosineAnnealingLR(optimizer, T_max=epochs)

def train(model, loader, optimizer, kind, epochs):
    scheduler = make(optimizer, kind, len(loader), epochs)
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        if {test}:
            scheduler.step()
"""


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("kind == 'onecycle'", True),
        ("kind == 'OneCycleLR'", True),
        ("epoch > 0", True),
        ("kind == 'cosine'", False),
        ("kind in ['cosine', 'cosine_warm']", False),
        ("kind == 'cosine' and epoch > 2", False),
    ],
)
def test_a_scheduler_by_a_flag(test, found):
    assert told(SCHEDULED.format(test=test), "LS013") is found


TYPED = """
import torch

def train(model, loader, optimizer, args):
    {choice}
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = model(x)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ("dtype = torch.float16 if args.half else torch.float32", True),
        ("if args.type == 'fp16':\n        dtype = torch.float16\n    else:\n        dtype = torch.bfloat16", True),
        ("dtype = {'fp16': torch.float16, 'bf16': torch.bfloat16}[args.type]", False),
        ("dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16", False),
        ("dtype = torch.bfloat16 if args.new else (\n        torch.float16 if args.gpu else torch.float32)", False),
        ("dtype = torch.bfloat16", False),
        ("dtype = args.dtype", False),
    ],
)
def test_a_type_by_a_flag(choice, found):
    assert told(TYPED.format(choice=choice), "LS023") is found


DATA = """
import numpy as np
from torch.utils.data import Dataset

def jitter(x):
    return x + np.random.randn()

class Points(Dataset):
    def __init__(self, mode="train"):
        self.mode = mode

    def __getitem__(self, i):
        if self.mode == "train":
            return jitter(i)
        return i
"""
LOADED = """
import torch
from torch.utils.data import DataLoader
from points import Points

options = {options}
loader = DataLoader({data}, {workers})
"""
USUAL = {"options": "{}", "data": "Points()", "workers": "num_workers=4"}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"data": "Points(mode='train')"}, True),
        ({"data": "dataset=Points('train')"}, True),
        ({"options": "{'num_workers': 8}", "workers": "**options"}, True),
        ({"data": "Points('val')"}, False),
        ({"options": "{'num_workers': 0}", "workers": "**options"}, False),
        ({"options": "{'batch_size': 4}", "workers": "**options"}, False),
        ({"workers": "num_workers=0"}, False),
        ({"workers": "num_workers=4, worker_init_fn=print"}, False),
    ],
)
def test_a_dataset_of_another_file(tmp_path, change, found):
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "points.py").write_text(DATA)
    (tmp_path / "train.py").write_text(LOADED.format(**USUAL | change))
    findings = check_paths([str(tmp_path / "train.py")], configure({}, "LS034", ""))
    assert [f.rule for f in findings] == ["LS034"] * found


WRAPPED = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def main(local_rank, fast):
    model = nn.Linear(2, 2)
    {moved}
    raw = model
    wanted = torch.compile(raw) if fast else raw
    {again}
    return DDP(wanted, device_ids=[local_rank])
"""


@pytest.mark.parametrize(
    ("moved", "again", "found"),
    [
        ("model.to(local_rank)", "pass", False),
        ("pass", "raw.cuda(local_rank)", False),
        ("model = model.to(local_rank)", "pass", False),
        ("pass", "pass", True),
        ("nn.Linear(2, 2).to(local_rank)", "pass", True),
        ("batch = fast.to(local_rank)", "pass", True),
    ],
)
def test_a_model_that_is_moved_by_another_name(moved, again, found):
    assert told(WRAPPED.format(moved=moved, again=again), "LS002") is found


PLACED = """
import timm
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModel

class Net(nn.Module):
    pass

def main(other, rank):
    {line}
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("return DDP(Net(), device_ids=[rank])", True),
        ("return DDP(Net(), device_ids=[rank]).to(rank)", True),
        ("return DDP(timm.create_model('x'), device_ids=[rank])", True),
        ("model = AutoModel.from_pretrained('x'); return DDP(model, device_ids=[rank])", True),
        ("return DDP(Net().to(rank), device_ids=[rank])", False),
        ("return DDP(AutoModel.from_pretrained('x').cuda(rank), device_ids=[rank])", False),
        ("model = AutoModel.from_pretrained('x', device_map={'': rank}); return DDP(model, device_ids=[rank])", False),
        ("return DDP(nn.SyncBatchNorm.convert_sync_batchnorm(other), device_ids=[rank])", False),
        ("net = nn.Sequential(other.backbone, other.head); return DDP(net, device_ids=[rank])", False),
        ("return DDP(Net())", False),
    ],
)
def test_a_model_that_is_made_where_it_is_wrapped(line, found):
    assert told(PLACED.format(line=line), "LS002") is found
