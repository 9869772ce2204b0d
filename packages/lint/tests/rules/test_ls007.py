"""LS007: fixed device."""

import pytest
from rule_findings import found as found_of
from rule_findings import lines

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import argparse
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def setup():
    dist.init_process_group("nccl")

def alone(model, loader, optimizer):
    device = torch.device("cuda:0")
    model.to(device)
    print("alone")
    for i, x in enumerate(loader):
        (model(x.to(device)) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

{more}

def together(model):
    {first}
    return DDP(model)

def main(args, model):
    {start}
    if args.mode == "one":
        {one}
    elif args.mode == "many":
        together(model)
    {end}

if __name__ == "__main__":
    main(argparse.ArgumentParser().parse_args(), torch.nn.Linear(2, 2))
    dist.destroy_process_group()
"""


RIGHT = {
    "start": "pass",
    "one": "alone(model, [], None)",
    "first": "dist.init_process_group('nccl')",
    "end": "pass",
    "more": "",
}


@pytest.mark.parametrize("code", ["LS007", "LS009", "LS028"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, False),
        ({"one": "outer(model)", "more": "def outer(model):\n    alone(model, [], None)"}, False),
        ({"first": "setup()"}, False),
        ({"start": "setup()", "first": "pass"}, True),
        ({"end": "alone(together(model), [], None)"}, True),
        ({"one": "together(model)\n        alone(model, [], None)"}, True),
        ({"start": "if args.mode != 'one':\n        setup()"}, True),
    ],
)
def test_what_never_starts_a_group(code, change, told):
    found = check_text(SCRIPT.format(**RIGHT | change), configure({}, code, ""))
    assert bool(found) is told


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
    assert found_of(STARTED.format(rank=rank, device=device), "LS007") is found


START = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
"""


def device(*made, before="", main=""):
    """Return a script that makes a device from the rank."""
    body = "".join(f"    {line}\n" for line in made)
    start = "def main(model):\n    dist.init_process_group('nccl')\n    rank = dist.get_rank()\n"
    return f"{START}{before}\n{start}{body}    return DDP(model.to(device))\n{main}"


RUN = "def run(model, rank):\n    dist.init_process_group('nccl')\n    return DDP(model.to(rank), device_ids=[rank])\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (device("device = torch.device('cuda:{}'.format(rank % torch.cuda.device_count()))"), False),
        (device("device = torch.device('cuda:%d' % int(os.environ['LOCAL_RANK']))"), False),
        (device("device = torch.device('cpu:{}'.format(rank))"), False),
        (START + RUN + "run(None, int(os.getenv('LOCAL_RANK', 0)))\nrun(None, torch.device('cuda'))\n", False),
        (device("device = torch.device('cuda:0')"), True),
        (device("os.environ['CUDA_VISIBLE_DEVICES'] = str(rank)", "device = torch.device('cuda:0')"), False),
        (
            device(
                "os.environ['CUDA_VISIBLE_DEVICES'] = ','.join(map(str, range(2, 4)))",
                "device = torch.device('cuda:0')",
            ),
            False,
        ),
        (device("os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'", "device = torch.device('cuda:0')"), True),
        (device("device = 'cuda'", main="import unseen\nunseen.launch(main, 4)\n"), False),
    ],
)
def test_the_number_of_a_device(text, told):
    assert bool(lines(text, "LS007")) == told


SCRIPT_2 = """
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


def lines_2(top="pass", helper="pass", tensor="x", inside="pass", model="model", given="None"):
    text = SCRIPT_2.format(top=top, helper=helper, tensor=tensor, inside=inside, model=model, given=given)
    rows = text.splitlines()
    return [rows[finding.line - 1].strip() for finding in check_text(text, configure({}, "LS007", ""))]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ({"inside": "name = f'cuda:{rank % 8}'", "model": "model.to(name)"}, None),
        ({"inside": "name = torch.device('cuda', rank % 8)", "model": "model.to(name)"}, None),
        ({"top": PLAIN, "inside": "torch.cuda.set_device(rank % 8)", "model": "model.to(device)"}, None),
        ({"inside": "name = 'cuda:0' if dist.get_world_size() == 1 else 'cuda'", "model": "model.to(name)"}, None),
        ({"inside": "name = 'cpu'", "model": "model.to(name)"}, None),
        ({"inside": PLAIN, "tensor": "x.to(device)", "given": "'cpu'"}, None),
        ({"helper": "weights = weights.to(out.device)"}, None),
        ({"inside": "net = load_backbone('b', device='cuda:0')"}, "net = load_backbone('b', device='cuda:0')"),
        ({"inside": "net = load_backbone('b', device='cpu')"}, None),
        ({"inside": "if rank == 0: print(torch.zeros(2, device='cuda:0'))"}, None),
        ({"inside": "gpu = rank", "helper": "pass", "given": "gpu", "tensor": "x"}, None),
        ({"inside": "gpu = rank; scale = torch.ones(1); scale = scale.to(gpu)"}, "gpu = rank"),
        ({"inside": "gpu = int(os.environ['LOCAL_RANK']); scale = torch.ones(1).to(gpu)"}, None),
    ],
)
def test_a_device_that_all_ranks_share(script, told):
    found = lines_2(**script)
    assert len(found) == (told is not None)
    assert all(row.startswith(told) for row in found)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ({"inside": "gpu = 0\n    if rank:\n        gpu = rank % 8\n    torch.cuda.set_device(gpu)"}, None),
        ({"inside": "gpu = rank % 8\n    torch.cuda.set_device(gpu)"}, None),
        ({"inside": "# torch.cuda.set_device(rank)", "model": "model.cuda()"}, "model = DDP(model.cuda())"),
        ({"top": "os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'", "model": "model.cuda()"}, "model = DDP(model.cuda())"),
        ({"top": "os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['GPU']", "model": "model.cuda()"}, None),
        ({"inside": "model = torch.nn.Linear(2, 2).cuda()"}, "model = torch.nn.Linear(2, 2).cuda()"),
        ({"inside": "limit = torch.nn.Linear(2, 2).cuda()"}, None),
        ({"inside": "place = f'cuda:{rank % 8}'\n    load_backbone(place)"}, None),
        ({"inside": "stage = rank\n    place = f'cuda:{stage}'\n    load_backbone(place)"}, None),
    ],
)
def test_numbers_under_names_and_words_that_choose_nothing(script, told):
    assert lines_2(**script) == ([told] if told else [])


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("device = 'cuda:0' if rank == 0 else 'cuda:1'", False),
        ("if rank == 0: device = 'cuda:0'\n    else: device = 'cuda:1'", False),
    ],
)
def test_a_device_of_several_that_are_written_out(place, told):
    assert bool(lines_2(inside=f"{place}\n    model = model.to(device)")) is told


SOUND = """
import torch
import torch.distributed as dist

def precompile(model, world_size):
    dist.init_process_group("fake", rank=0, world_size=world_size)
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    return torch.compile(model.to(device))

if __name__ == "__main__":
    precompile(torch.nn.Linear(2, 2), 8)
"""


def test_a_fake_group_of_one_process():
    assert check_text(SOUND, configure({}, "LS007", "")) == []
