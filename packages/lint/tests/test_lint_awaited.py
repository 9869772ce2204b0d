"""LS014: what stands between a file's being written by rank 0 and its being read by all, and names with the rank."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text):
    return [finding.line for finding in check_text(text, configure({}, "LS014", ""))]


SAVED = """
import torch
import torch.distributed as dist

{helper}

def main(model, path, args, value):
    dist.init_process_group("nccl")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), {path})
    {between}
    model.load_state_dict({read}({path}))
"""
READS = "def read(path):\n    {}\n    state = torch.load(path)\n    {}\n    return state"


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({}, 1),
        ({"between": "path = args.other"}, 0),
        ({"path": "args.out", "between": "args.out = args.other"}, 0),
        ({"path": "f'{value}.pt'", "between": "value = 3"}, 0),
        ({"between": "other = args.other"}, 1),
        ({"between": "dist.broadcast_object_list([value])"}, 0),
        ({"between": "dist.monitored_barrier()"}, 0),
        ({"between": "torch.cuda.synchronize()"}, 1),
        ({"helper": READS.format("pass", "pass"), "read": "read"}, 1),
        ({"helper": READS.format("dist.barrier()", "pass"), "read": "read"}, 0),
        ({"helper": READS.format("pass", "dist.barrier()"), "read": "read"}, 1),
    ],
)
def test_what_stands_between_a_save_and_a_load(change, number):
    usual = {"helper": "", "path": "path", "between": "pass", "read": "torch.load"}
    assert len(told(SAVED.format(**usual | change))) == number


HELPED = """
import torch
import torch.distributed as dist

def save(state, path):
    {before}
    if dist.get_rank() == 0:
        torch.save(state, path)
    {after}

def main(model, path):
    dist.init_process_group("nccl")
    save(model.state_dict(), path)
    model.load_state_dict(torch.load(path))
"""


@pytest.mark.parametrize(
    ("before", "after", "number"),
    [("pass", "pass", 1), ("pass", "dist.barrier()", 0), ("dist.barrier()", "pass", 1), ("pass", "print(1)", 1)],
)
def test_a_helper_that_saves_and_waits(before, after, number):
    assert len(told(HELPED.format(before=before, after=after))) == number


ARMS = """
import torch
import torch.distributed as dist

def main(model, path, resume):
    dist.init_process_group("nccl")
    if not resume:
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), path)
        {end}
    {arm}
        model.load_state_dict(torch.load(path))
"""


@pytest.mark.parametrize(
    ("end", "arm", "number"), [("pass", "else:", 0), ("return", "if path:", 0), ("pass", "if path:", 1)]
)
def test_a_save_and_a_load_on_two_ways(end, arm, number):
    assert len(told(ARMS.format(end=end, arm=arm))) == number


NAMED = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def save(state, folder, name="a.pt", note=""):
    path = os.path.join(folder, name)
    print(note)
    torch.save(state, path)

def main(model, path):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    out = f"{path}/{rank}"
    model = DDP(model)
    model(1).backward()
    save(model.module.state_dict(), {given})

main(1, 2)
"""


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ("path", 1),
        ("out", 0),
        ("os.path.join(path, str(rank))", 0),
        ("path, name=f'{rank}.pt'", 0),
        ("path, name=f'{model.lora_rank}.pt'", 1),
        ("path, name=model.reranker", 1),
        ("path, note=f'rank {rank} saves'", 1),
    ],
)
def test_a_helper_that_is_given_the_rank_for_its_path(given, number):
    assert len(told(NAMED.replace("{given}", given))) == number


@pytest.mark.parametrize(("imported", "number"), [("lightning_fabric", 1), ("elsewhere", 0)])
def test_each_process_of_fabric_has_the_whole_model(imported, number):
    text = f"import torch\nfrom {imported} import Fabric\n\ndef main(model, path):\n    fabric = Fabric(devices=2)\n"
    text += (
        "    fabric.launch()\n    model = fabric.setup(model)\n    torch.save(model.state_dict(), path)\n\nmain(1, 2)\n"
    )
    assert len(told(text)) == number
