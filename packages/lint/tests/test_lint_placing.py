"""LS007: where the device of every rank is made, helpers that move to it, arguments that name it."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from libraries import load_backbone

{top}

def penalty(out):
    weights = torch.ones(3)
    {helper}
    return (weights * out).sum()

def evaluate(model, loader, device):
    for x in loader:
        model({tensor})

def main(model, loader):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    {inside}
    model = DDP({model})
    for x in loader:
        penalty(model(x)).backward()
    evaluate(model, loader, {given})

main(None, [])
"""
PLAIN = 'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")'


def lines(top="pass", helper="pass", tensor="x", inside="pass", model="model", given="None"):
    text = SCRIPT.format(top=top, helper=helper, tensor=tensor, inside=inside, model=model, given=given)
    rows = text.splitlines()
    return [rows[finding.line - 1].strip() for finding in check_text(text, configure({}, "LS007", ""))]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        # where the device is made, once
        ({"top": PLAIN, "model": "model.to(device)", "tensor": "x.to(device)", "given": "device"}, PLAIN),
        ({"inside": PLAIN, "model": "model.to(device)"}, PLAIN),
        ({"inside": PLAIN, "tensor": "x.to(device)", "given": "device"}, PLAIN),
        ({"inside": "name = 'cuda:0'", "model": "model.to(name)"}, "name = 'cuda:0'"),
        ({"top": "name = 'cuda:1'", "model": "model.to(name)"}, "name = 'cuda:1'"),
        ({"inside": "name = f'cuda:{dist.get_rank()}'", "model": "model.to(name)"}, "name = f'cuda:{dist.get_rank()}'"),
        ({"inside": "name = torch.device('cuda', 0)", "model": "model.to(name)"}, "name = torch.device('cuda', 0)"),
        # something chooses the rank's own
        ({"inside": "name = f'cuda:{rank % 8}'", "model": "model.to(name)"}, None),
        ({"inside": "name = torch.device('cuda', rank % 8)", "model": "model.to(name)"}, None),
        ({"top": PLAIN, "inside": "torch.cuda.set_device(rank % 8)", "model": "model.to(device)"}, None),
        ({"inside": "name = 'cuda:0' if dist.get_world_size() == 1 else 'cuda'", "model": "model.to(name)"}, None),
        ({"inside": "name = 'cpu'", "model": "model.to(name)"}, None),
        ({"inside": PLAIN, "tensor": "x.to(device)", "given": "'cpu'"}, None),
        # a helper of the step
        ({"helper": "weights = weights.cuda()"}, "weights = weights.cuda()"),
        ({"helper": "weights = weights.to('cuda')"}, "weights = weights.to('cuda')"),
        ({"helper": "weights = weights.to(out.device)"}, None),
        # an argument of any call
        ({"inside": "net = load_backbone('b', device='cuda:0')"}, "net = load_backbone('b', device='cuda:0')"),
        ({"inside": "net = load_backbone('b', device='cpu')"}, None),
        ({"inside": "if rank == 0: print(torch.zeros(2, device='cuda:0'))"}, None),
        # the rank among all processes, under another name
        ({"inside": "gpu = rank", "helper": "pass", "given": "gpu", "tensor": "x"}, None),
        ({"inside": "gpu = rank; scale = torch.ones(1); scale = scale.to(gpu)"}, "gpu = rank"),
        ({"inside": "gpu = int(os.environ['LOCAL_RANK']); scale = torch.ones(1).to(gpu)"}, None),
    ],
)
def test_a_device_that_all_ranks_share(script, told):
    found = lines(**script)
    assert len(found) == (told is not None)
    assert all(row.startswith(told) for row in found)


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        ("torch.cuda.set_device(rank)", ["torch.cuda.set_device(rank)"]),  # what follows from it is not told again
        ("pass", ["x = x.to(rank)", "model = DDP(model.to(rank), device_ids=[rank])"]),
        ("rank = int(os.environ['LOCAL_RANK'])", []),
    ],
)
def test_the_global_rank_is_told_where_the_device_is_set(setup, told):
    text = f"""
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def evaluate(model, loader, rank):
    for x in loader:
        x = x.to(rank)
        model(x)

def main(model, loader):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    {setup}
    model = DDP(model.to(rank), device_ids=[rank])
    evaluate(model, loader, rank)

main(None, [])
"""
    rows = text.splitlines()
    assert [rows[f.line - 1].strip() for f in check_text(text, configure({}, "LS007", ""))] == told


FIRST = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class Trainer:
    def __init__(self, model, {given}):
        dist.init_process_group("nccl")
        {lines}
        self.model = DDP(model)
        {last}
"""
FIXED = 'self.device = torch.device("cuda:0")'
USED = "print(self.device)"


@pytest.mark.parametrize(
    ("body", "last", "told"),
    [
        ([FIXED], USED, True),
        ([FIXED, "if mine is not None:", "    self.device = mine"], USED, False),
        ([FIXED, "if mine is None:", "    self.device = torch.device('cpu')"], USED, True),
        (["if mine is None:", f"    {FIXED}", "else:", "    self.device = mine"], USED, True),
        ([FIXED], "print(self.model)", False),
    ],
)
def test_a_device_that_is_only_a_names_first_value(body, last, told):
    text = FIRST.format(given="mine", lines="\n        ".join(body), last=last)
    assert bool(check_text(text, configure({}, "LS007", ""))) is told


HANDED = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from somewhere import Config

def train(model, config):
    model = DDP(model, device_ids=[config.place])
    model(torch.ones(1)).sum().backward()

config = Config()
config.place = {first}
{second}
dist.init_process_group("nccl")
train(config.build(), config)
"""


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("int(os.environ['RANK'])", "", True),
        ("int(os.environ['LOCAL_RANK'])", "", False),
        ("int(os.environ['RANK'])", "config.place = int(os.environ['LOCAL_RANK'])", False),
    ],
)
def test_a_device_by_the_rank_of_an_object_that_is_handed_on(first, second, told):
    text = HANDED.format(first=first, second=second)
    assert bool(check_text(text, configure({}, "LS007", ""))) is told


@pytest.mark.parametrize(
    ("script", "told"),
    [
        # a number that is written out, under a name
        ({"inside": "gpu = 0\n    torch.cuda.set_device(gpu)"}, "torch.cuda.set_device(gpu)"),
        (
            {"inside": "gpu = 1\n    name = torch.device('cuda', gpu)", "model": "model.to(name)"},
            "name = torch.device('cuda', gpu)",
        ),
        (
            {"inside": "gpu = 1\n    name = torch.device(f'cuda:{gpu}')", "model": "model.to(name)"},
            "name = torch.device(f'cuda:{gpu}')",
        ),
        ({"inside": "gpu = 0", "model": "model, device_ids=[gpu]"}, "model = DDP(model, device_ids=[gpu])"),
        ({"inside": "gpu = 0\n    if rank:\n        gpu = rank % 8\n    torch.cuda.set_device(gpu)"}, None),
        ({"inside": "gpu = rank % 8\n    torch.cuda.set_device(gpu)"}, None),
        # what sets no process's own device
        ({"inside": "# torch.cuda.set_device(rank)", "model": "model.cuda()"}, "model = DDP(model.cuda())"),
        ({"top": "os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'", "model": "model.cuda()"}, "model = DDP(model.cuda())"),
        ({"top": "os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['GPU']", "model": "model.cuda()"}, None),
        # a model that is made where it is moved
        ({"inside": "model = torch.nn.Linear(2, 2).cuda()"}, "model = torch.nn.Linear(2, 2).cuda()"),
        ({"inside": "limit = torch.nn.Linear(2, 2).cuda()"}, None),
        # the rank among all processes in a device that is handed on
        ({"inside": "place = f'cuda:{rank}'\n    load_backbone(place)"}, "place = f'cuda:{rank}'"),
        ({"inside": "place = f'cuda:{rank % 8}'\n    load_backbone(place)"}, None),
        ({"inside": "stage = rank\n    place = f'cuda:{stage}'\n    load_backbone(place)"}, None),
    ],
)
def test_numbers_under_names_and_words_that_choose_nothing(script, told):
    assert lines(**script) == ([told] if told else [])


SPAWNED = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def setup(gpu, size):
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", rank=gpu, world_size=size)

def work(gpu, size):
    setup(gpu, size)

if torch.cuda.device_count() > 1:
    mp.spawn(work, args=(2,), nprocs=2)
else:
    work(0, 1)
"""


def test_silent_about_a_number_that_each_process_gets_another_of():
    assert not check_text(SPAWNED, configure({}, "LS007", ""))


ARGUED = """
import torch
from transformers import {names}

{before}

def main(model, loader):
    {first}
    if int(os.environ["LOCAL_RANK"]) == 0:
        print("starts")
    device = torch.device("cuda")
    model.to(device)
    {last}
    for x in loader:
        model(x.to(device)).backward()

main(None, [])
"""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, True),
        ({"last": "args = TrainingArguments('out')"}, True),  # too late
        ({"first": "args = make_arguments('out')"}, True),
        ({"names": "PretrainedConfig", "first": "args = PretrainedConfig()"}, True),
        # which sets the device of its process
        ({"first": "args = TrainingArguments('out')"}, False),
        ({"before": "class Args(TrainingArguments):\n    depth: int = 1\n", "first": "args = Args('out')"}, False),
        ({"before": "def parse():\n    return TrainingArguments('out')\n", "first": "args = parse()"}, False),
        (
            {
                "names": "HfArgumentParser, TrainingArguments",
                "first": "args, = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()",
            },
            False,
        ),
        ({"before": "from trl import SFTConfig\n", "first": "args = SFTConfig('out')"}, False),
    ],
)
def test_a_trainers_arguments_choose_the_device(options, told):
    slots = {"names": "TrainingArguments", "before": "import os", "first": "pass", "last": "pass"} | options
    text = ARGUED.format(**slots).replace("import torch\n", "import os\nimport torch\n", 1)
    assert bool(check_text(text, configure({}, "LS007", ""))) is told


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("device = 'cuda:0' if rank == 0 else 'cuda:1'", False),
        ("device = 'cuda:1' if torch.cuda.is_available() else 'cpu'", True),
        ("device = 'cuda:1' if rank == 0 else 'cuda:1'", True),
        ("if rank == 0: device = 'cuda:0'\n    else: device = 'cuda:1'", False),
    ],
)
def test_a_device_of_several_that_are_written_out(place, told):
    assert bool(lines(inside=f"{place}\n    model = model.to(device)")) is told
