"""LS022: pinned memory, blocking copy."""

import ast

import pytest

from lockstep_lint.analysis.nodes import constant, element_of
from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text, code):
    return bool(check_text(text, configure({}, code, "")))


NUMBERED = """
import torch
from torch.utils.data import DataLoader

device = {device}

def train(model, data, optimizer):
    model.to({given})
    for x in DataLoader(data):
        optimizer.zero_grad()
        model(x.to({given})).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("device", "given", "found"),
    [
        ("0", "device", True),
        ("None", "0", True),
        ("torch.device('cuda')", "device", True),
        ("'cpu'", "device", False),
        ("torch.float64", "device", False),
        ("None", "torch.float64", False),
    ],
)
def test_a_device_by_its_number(device, given, found):
    assert told(NUMBERED.format(device=device, given=given), "LS022") is found


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
    assert told(WORKERS.format(**(usual | change)), "LS022") is found


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


SEARCH = """
import torch
from torch.utils.data import DataLoader

def search(model, optimizer, criterion, data, valid_data):
    loader = DataLoader(data, num_workers=2, pin_memory=True)
    valid_queue = DataLoader(valid_data, num_workers=2, pin_memory=True)
    valid_iter = iter(valid_queue)
    for x, y in loader:
        {inner}
        criterion(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)).backward()
        optimizer.step()
    {after}
"""


MOVE = "a, b = next(valid_iter); model(a.cuda(), b.cuda())"


CROPPED = "c = next(valid_iter)\n        c = data.crop(c)\n        model(c.cuda())"


@pytest.mark.parametrize(("inner", "after", "number"), [(MOVE, "pass", 1), ("pass", MOVE, 0), (CROPPED, "pass", 0)])
def test_held_out_batches_that_a_loop_trains(inner, after, number):
    assert len(check_text(SEARCH.format(inner=inner, after=after), configure({}, "LS022", ""))) == number


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
