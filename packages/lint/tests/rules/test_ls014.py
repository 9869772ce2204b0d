"""LS014: wrapper's state saved."""

import pytest
from rule_findings import found

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


OBJECTS = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, local_rank, rank):
    dist.init_process_group("nccl")
    old = torch.load("old.pt", map_location="cpu", weights_only=True)
    old = {{k.replace("module.", ""): v for k, v in old.items()}}
    model.load_state_dict(old)
    model.to(local_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DDP(model, device_ids=[local_rank])
    wrapped(torch.ones(1)).sum().backward()
    optimizer.step()
    for name in os.listdir("."):
        print(name) if rank == 0 else None
    dist.barrier()
    if rank == 0:
        {save}
    dist.destroy_process_group()
"""


FILLER = "".join(f"            print({number})\n" for number in range(8))


ARMS = f"if rank < 1:\n            torch.save(wrapped.module.state_dict(), 'model.pt')\n        else:\n{FILLER}"
ARMS += "            torch.save(wrapped.state_dict(), 'model.pt')"


PLAIN = "plain = wrapped.module if hasattr(wrapped, 'module') else wrapped\n        "


@pytest.mark.parametrize(
    ("save", "told"),
    [
        # the wrapper itself
        ("torch.save(wrapped, 'model.pt')", True),
        ("state = {'net': wrapped, 'epoch': 1}\n        torch.save(state, 'model.pt')", True),
        ("torch.save({'net': wrapped}, 'model.pt')", True),
        ("torch.save(model, 'model.pt')", False),
        ("torch.save(wrapped.module, 'model.pt')", False),
        ("torch.save({'epoch': 1}, 'model.pt')", False),
        # a name for the plain model, which is not saved, and names that were taken off far above
        (PLAIN + "torch.save(wrapped.state_dict(), 'model.pt')", True),
        (PLAIN + "torch.save(plain.state_dict(), 'model.pt')", False),
        ("if not hasattr(wrapped, 'module'):\n            torch.save(wrapped.state_dict(), 'model.pt')", False),
        # both in one table, each for its purpose; and in two arms, however long they are
        ("torch.save({\n 'net': wrapped.state_dict(),\n 'best': wrapped.module.state_dict(),\n}, 'model.pt')", False),
        (ARMS, False),
        (ARMS.replace("wrapped.module", "model"), True),
    ],
)
def test_the_wrapper_itself_and_names_beside_it(save, told):
    assert found(OBJECTS.format(save=save), "LS014") is told


HOROVOD = """
import torch
import horovod.torch as hvd

def main(model, loader):
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    {save}
"""


@pytest.mark.parametrize(
    ("save", "told"),
    [
        ("torch.save(model.state_dict(), 'model.pt')", True),
        ("torch.save({'epoch': 1}, 'model.pt')", True),
        ("if len(loader): torch.save(model.state_dict(), 'model.pt')", True),
        ("if hvd.rank() == 0: torch.save(model.state_dict(), 'model.pt')", False),
        ("torch.save(model.state_dict(), f'model-{hvd.rank()}.pt')", False),
        ("print(model.state_dict())", False),
    ],
)
def test_horovods_processes_write_one_file(save, told):
    assert found(HOROVOD.format(save=save), "LS014") is told
