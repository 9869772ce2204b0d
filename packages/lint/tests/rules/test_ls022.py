"""LS022: pinned memory, blocking copy."""

import ast

import pytest
from rule_findings import found as found_of

from lockstep_lint.analysis.nodes import constant, element_of
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
    assert found_of(WORKERS.format(**(usual | change)), "LS022") is found


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
        ({"move": "images = Variable(images).cuda()"}, True),
        ({"move": "images = Variable(images)\n        images = images.cuda()"}, True),
        ({"move": "images = data.crop(images)\n        images = images.cuda()"}, False),
        ({"move": "for image in data.crop(images): image.cuda()"}, False),
        ({"move": "images = images.to(torch.int32)"}, False),
        ({"move": "images = images.to(torch.uint8)"}, False),
        ({"move": "images = images.to(torch.bfloat16)"}, False),
        ({"move": "images = Variable(images.cuda(non_blocking=True))"}, False),
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
    ("line", "told"),
    [
        ("options['num_workers'] = 4; loader = DataLoader(data, **options)", False),
        ("options.update(rest); loader = DataLoader(data, **options)", False),
        ("options.update({'num_workers': 4}); loader = DataLoader(data, **options)", False),
        ("options[rest] = 4; loader = DataLoader(data, **options)", False),
        ("more = {'num_workers': 4}; loader = DataLoader(data, **options, **more)", False),
        ("batch = next(iter(DataLoader(data)))", False),
        ("loader = iter(DataLoader(data))", True),
    ],
)
@pytest.mark.parametrize("options", ["{'batch_size': 8, 'num_workers': 0}", "dict(shuffle=True, num_workers=0)"])
def test_no_workers_in_options_that_are_written_out(options, line, told):
    text = "import torch\nfrom torch.utils.data import DataLoader\n\ndef main(data, rest):\n"
    text += f"    torch.cuda.init()\n    options = {options}\n    {line}\n"
    assert bool(check_text(text, configure({}, "LS022", ""))) is told


@pytest.mark.parametrize(
    ("value", "path", "found"),
    [
        ("(1, 2)", (1,), [2]),
        ("(1, (2, 3))", (1, 0), [2]),
        ("(*xs, 2)", (1,), []),
        ("(1, *xs)", (0,), [1]),
        ("(1, 2)", (2,), []),
        ("xs", (0,), []),
    ],
)
def test_what_stands_at_a_place_of_a_tuple(value, path, found):
    node = ast.parse(value, mode="eval").body
    assert [constant(each) for each in element_of(node, path)] == found
