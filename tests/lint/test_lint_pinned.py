"""LS022: where a script says that it pins memory, and how it moves its batches."""

import pytest

from lockstep.lint.config import configure
from lockstep.lint.runner import check_text

SCRIPT = """
import torch
from torch.autograd import Variable
from torch.utils.data import DataLoader
from tqdm import tqdm

{above}

def loaders(data, {parameter}):
    return DataLoader(data, num_workers=2, {option})

def train(model, data, optimizer, cfg, rank, device):
    train_loader = loaders(data)
    {named}
    for images, targets in {over}:
        {move}
        optimizer.zero_grad()
        model(images, targets).backward()
        optimizer.step()
"""
USUAL = {
    "above": "",
    "parameter": "cfg=None",
    "option": "pin_memory=True",
    "named": "pass",
    "over": "train_loader",
    "move": "images = images.cuda()",
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"parameter": "pin_memory=True", "option": "pin_memory=pin_memory"}, True),
        ({"parameter": "*, pin_memory=True", "option": "pin_memory=pin_memory"}, True),
        ({"parameter": "pin_memory=False", "option": "pin_memory=pin_memory"}, False),
        ({"above": "_C.DATA.PIN_MEMORY = True", "option": "pin_memory=cfg.DATA.PIN_MEMORY"}, True),
        ({"above": "_C.DATA.PIN_MEMORY = False", "option": "pin_memory=cfg.DATA.PIN_MEMORY"}, False),
        ({"option": "pin_memory=cfg.get('pin_memory', True)"}, True),
        ({"option": "pin_memory=cfg.get('pin_memory', False)"}, False),
        ({"option": "pin_memory=torch.cuda.is_available()"}, True),
        ({"option": "pin_memory=device.type == 'cuda'"}, True),
        ({"option": "pin_memory=device.type == 'mps'"}, False),
        ({"above": "kwargs = EasyDict(pin_memory=True)", "option": "**kwargs"}, True),
        ({"above": "# pin_memory = True", "option": ""}, False),
    ],
)
def test_where_memory_is_pinned(change, told):
    assert bool(check_text(SCRIPT.format(**USUAL | change), configure({}, "LS022", ""))) is told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"move": "images = Variable(images).cuda()"}, True),
        ({"move": "images = images.to(torch.int32)"}, False),
        ({"move": "images = images.to(torch.uint8)"}, False),
        ({"move": "images = images.to(torch.bfloat16)"}, False),
        ({"move": "images = Variable(images.cuda(non_blocking=True))"}, False),
        ({"move": "images = tree_map(lambda x: x.to(device), images)"}, True),
        ({"move": "images = tree_map(lambda x: x.to(device, non_blocking=True), images)"}, False),
        ({"move": "model = tree_map(lambda x: x.to(device), model)"}, False),
        ({"over": "tqdm(train_loader) if rank == 0 else train_loader"}, True),
        ({"over": "bar", "named": "bar = tqdm(train_loader) if rank == 0 else train_loader"}, True),
        ({"over": "bar", "named": "bar = tqdm(cfg.pairs) if rank == 0 else cfg.pairs"}, False),
    ],
)
def test_how_batches_are_moved(change, told):
    assert bool(check_text(SCRIPT.format(**USUAL | change), configure({}, "LS022", ""))) is told


@pytest.mark.parametrize(
    ("named", "given", "told"),
    [
        ("workers = 0", "workers", True),
        ("workers = 0 if rank else 0", "workers", True),
        ("workers = 0 if rank else 4", "workers", False),
        ("workers = cfg.workers", "workers", False),
    ],
)
def test_no_workers_by_a_name(named, given, told):
    lines = ["torch.cuda.init()", named, f"return DataLoader(data, num_workers={given})"]
    text = "import torch\nfrom torch.utils.data import DataLoader\n\ndef main(data, cfg, rank):\n"
    found = check_text(text + "".join(f"    {line}\n" for line in lines), configure({}, "LS022", ""))
    assert bool(found) is told
