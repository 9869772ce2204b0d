"""One process beside programs of several, what is asked before it is read, and sums that end with a step."""

import json

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

START = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
"""


def lines(text, code):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


def told(path, code):
    return bool(check_paths([str(path)], configure({}, code, "")))


@pytest.mark.parametrize(
    ("size", "found"), [("rank=0, world_size=1", False), ("world_size=2, rank=0", True), ("", True)]
)
def test_a_group_of_one_process_is_none(size, found):
    assert bool(lines(f"{START}dist.init_process_group('gloo', {size})\nprint('begin')\n", "LS028")) == found


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (["from group import start", "start()", "print('hello')"], False),
        (["import torch.distributed as dist", "dist.init_process_group('gloo')", "print('hello')"], True),
        (["from torch.nn.parallel import DistributedDataParallel", "DistributedDataParallel(1)", "print(1)"], False),
    ],
)
def test_a_notebook_is_one_process_unless_it_starts_others(tmp_path, cells, found):
    (tmp_path / "group.py").write_text(
        "import torch.distributed as dist\n\ndef start():\n    dist.init_process_group()\n"
    )
    source = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": cell} for cell in ["import torch", *cells]]
    book = tmp_path / "book.ipynb"
    book.write_text(json.dumps({"cells": source, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}))
    assert told(book, "LS028") == found


@pytest.mark.parametrize(("test", "found"), [("if args.alone", False), ("print(0)\n    if True", True)])
def test_a_file_that_may_be_run_by_itself_beside_one_that_starts_a_group(tmp_path, test, found):
    (tmp_path / "many.py").write_text(
        "import torch.distributed as dist\n\ndef many():\n    dist.init_process_group()\n"
    )
    (tmp_path / "one.py").write_text(
        "import torch\n\ndef one():\n    print('begin')\n\nif __name__ == '__main__':\n    one()\n"
    )
    arms = "        one()\n    else:\n        many()\n" if not found else "        one()\n        many()\n"
    head = "from many import many\nfrom one import one\n\ndef main(args):\n"
    (tmp_path / "run.py").write_text(f"{head}    {test}:\n{arms}\nif __name__ == '__main__':\n    main(None)\n")
    assert told(tmp_path / "one.py", "LS028") == found


WRAPPED = "def main(model, rank):\n    model = DDP(model.to(rank), device_ids=[rank])\n"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("part = model.head", True),
        ("part = model.module.head if isinstance(model, DDP) else model.head", False),
        ("part = model.head if hasattr(model, 'head') else None", False),
        ("return model.module.head if isinstance(model, DDP) else model.head", False),
        ("part = model.head if rank else None", True),
    ],
)
def test_attributes_that_are_asked_for_in_the_same_line(line, found):
    assert bool(lines(f"{START}{WRAPPED}    {line}\n", "LS027")) == found


@pytest.mark.parametrize(
    ("use", "found"),
    [
        ("", True),
        ("limit = int(os.environ.get('NCCL_TIMEOUT', '60'))", False),
        ("limit = int(os.environ['NCCL_TIMEOUT'])", False),
        ("limit = int(os.environ['OTHER'])", True),
    ],
)
def test_a_variable_that_the_program_reads_itself(use, found):
    assert bool(lines(f"{START}os.environ['NCCL_TIMEOUT'] = '60'\n{use}\n", "LS029")) == found


GROUPS = """
def train(model, loader, optimizer, criterion, n):
    total = 0
    for epoch in range(9):
        for step, (x, y) in enumerate(loader):
            {count}
            loss = criterion(model(x), y) / n
            loss.backward()
            total += loss{item}
            if {test} == 0:
                optimizer.step()
                optimizer.zero_grad()
                {reset}
"""


@pytest.mark.parametrize(
    ("count", "test", "found"),
    [
        ("pass", "(step + 1) % n", True),
        ("step += 1 + epoch * len(loader)", "step % n", False),
        ("step += 1", "step % n", True),
    ],
)
def test_groups_that_go_on_over_the_epochs_drop_nothing(count, test, found):
    text = START + GROUPS.format(count=count, test=test, item=".item()", reset="pass")
    assert bool(lines(text, "LS012")) == found


@pytest.mark.parametrize(("reset", "found"), [("total = 0", False), ("print(total)", True)])
def test_a_sum_that_begins_anew_with_each_step_keeps_no_graphs(reset, found):
    text = START + GROUPS.format(count="pass", test="(step + 1) % n", item="", reset=reset)
    assert bool(lines(text, "LS016")) == found


EVALUATES = """
def evaluate(model, attack, test_loader):
    for x, y in test_loader:
        with {context}:
            out = model(x)
        print(out.argmax(1) == y)

def main(model, loader, test_loader, criterion):
    for epoch in range(9):
        for x, y in loader:
            criterion(model(x), y).backward()
        evaluate(model, None, test_loader)

main(*make())
"""


@pytest.mark.parametrize(("context", "found"), [("torch.enable_grad()", False), ("torch.autocast('cuda')", True)])
def test_a_forward_that_asks_for_gradients_is_no_evaluation(context, found):
    assert bool(lines(START + EVALUATES.format(context=context), "LS017")) == found


SCRIPT = (
    START
    + """
import torchvision

def main(loader, optimizer):
    dist.init_process_group("nccl")
    model = torchvision.models.resnet18().cuda()
    model = DDP(model, device_ids=[int(os.environ["LOCAL_RANK"])], find_unused_parameters=True)
    model.eval()
    for x, y in loader:
        with torch.no_grad():
            score = model(x)
        {more}

if __name__ == "__main__":
    main(DataLoader([]), None)
"""
)


@pytest.mark.parametrize("code", ["LS005", "LS010"])
@pytest.mark.parametrize(
    ("more", "found"), [("pass", False), ("model.train()", True), ("score.sum().backward()", True)]
)
def test_a_script_that_only_evaluates(code, more, found):
    assert bool(lines(SCRIPT.format(more=more), code)) == found


COPY = """
import torch
from torch import nn

class Ema:
    def copy(self, module):
        {test}:
            copied = nn.DataParallel(type(module.module)())
        return copied
"""


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("if isinstance(module, nn.DataParallel)", False),
        ("if isinstance(module, (nn.DataParallel, DDP))", False),
        ("if not isinstance(module, nn.DataParallel)", True),
        ("if module.gpus > 1", True),
    ],
)
def test_a_copy_of_what_is_wrapped_is_wrapped_like_it(test, found):
    assert bool(lines(COPY.format(test=test), "LS001")) == found


STEP = """
from torch import nn

class Net(nn.Module):
    def train_batch(self, x, y, criterion, optimizer, step, every):
        loss = criterion(self(x), y) / every
        loss.backward()
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
RUN = """
from net import Net

def train(loader, criterion, optimizer, every):
    net = Net()
    {wrap}
    for i, (x, y) in enumerate(loader):
        net.train_batch(x, y, criterion, optimizer, i, every)

if __name__ == "__main__":
    train([], None, None, 2)
"""


@pytest.mark.parametrize(("wrap", "found"), [("pass", False), ("wrapped = DDP(net)", True)])
def test_a_step_that_scripts_of_one_process_run(tmp_path, wrap, found):
    (tmp_path / "net.py").write_text(STEP)
    (tmp_path / "run.py").write_text((START if found else "") + RUN.format(wrap=wrap))
    (tmp_path / "several.py").write_text(START + "from net import Net\n\nnet = DDP(Net())\n")
    assert told(tmp_path / "net.py", "LS009") == found
