"""LS014: the many ways in which a wrapper's state gets into a file."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

START = """
import copy, os, pickle, threading
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
"""
MAIN = """
def main(build, strategy):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    net = build()
    ddp = DDP(net, device_ids=[int(os.environ["LOCAL_RANK"])])
    if rank == 0:
        {}

main(None, "ddp")
"""
CLASS = """
class Work:
    def __init__(self, model, rank):
        self.model = {wrapped}
        self.best, self.rank = None, rank

    def state(self):
        return {{"model": self.model.state_dict(), "epoch": 1}}

    def fit(self):
        self.best = self.model.state_dict()

    def finish(self):
        if self.rank == 0:
            {last}
"""
ACCELERATE = """
import torch
from accelerate import Accelerator

class Work:
    def __init__(self, model, accelerator):
        self.model, self.accelerator = model, accelerator

    def end(self, path):
        if self.accelerator.is_main_process:
            {last}

def main(build, path):
    accelerator = Accelerator()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    {prepare}
    for x in range(3):
        accelerator.backward(model(x).mean())
        optimizer.step()
    Work(model, accelerator).end(path)

main(None, "x")
"""


def told(text):
    """Whether LS014 is told in a script."""
    return bool(check_text(text, configure({}, "LS014", "")))


def main(*lines, before=""):
    """A script whose first rank runs some lines."""
    return START + before + MAIN.format("\n        ".join(lines))


def work(wrapped="DDP(model, device_ids=[rank])", last="pass"):
    return START + CLASS.format(wrapped=wrapped, last=last)


SNAPSHOT = "def snapshot(state, path):\n    torch.save(state, path)\n"
TELL = "def snapshot(state, path):\n    print(path, len(state))\n"
GIVEN = "def parts(model):\n    state = model.state_dict()\n    return {'net': state, 'epoch': 1}\n"
MINE = "class MyParallel(DDP):\n    pass\n"
OTHER = "class MyParallel(nn.Module):\n    pass\n"


@pytest.mark.parametrize(
    "text",
    [
        main("snapshot(ddp.state_dict(), 'x.pt')", before=SNAPSHOT),
        main("snapshot(state={'net': ddp.state_dict()}, path='x.pt')", before=SNAPSHOT),
        main("torch.save(parts(ddp), 'x.pt')", before=GIVEN),
        main("found = parts(ddp)", "found['lr'] = 1", "torch.save(found, 'x.pt')", before=GIVEN),
        main("state = ddp.state_dict()", "whole = {'net': state}", "torch.save(whole, 'x.pt')"),
        main("whole = {}", "whole['net'] = ddp.state_dict()", "torch.save(whole, 'x.pt')"),
        main("whole = {}", "whole.update({'net': ddp.state_dict()})", "torch.save(whole, 'x.pt')"),
        main("on_cpu = {}", "for k, v in ddp.state_dict().items(): on_cpu[k] = v.cpu()", "torch.save(on_cpu, 'x.pt')"),
        main("with open('x', 'wb') as f: pickle.dump(ddp.state_dict(), f)"),
        main("threading.Thread(target=torch.save, args=(ddp.state_dict(), 'x.pt')).start()"),
        main("torch.save(ddp.cpu().state_dict(), 'x.pt')"),
        main("torch.save(copy.deepcopy(ddp).state_dict(), 'x.pt')"),
        main("nets = {'a': DDP(net)}", "torch.save(nets['a'].state_dict(), 'x.pt')"),
        main("nets = {'a': DDP(net)}", "for k, n in nets.items(): torch.save(n.state_dict(), k)"),
        main("nets = [DDP(net)]", "torch.save([n.state_dict() for n in nets], 'x.pt')"),
        main("nets = {}", "nets['a'] = DDP(net)", "torch.save({k: n.state_dict() for k, n in nets.items()}, 'x.pt')"),
        main("mine = MyParallel(net)", "torch.save(mine.state_dict(), 'x.pt')", before=MINE),
        work(last="torch.save(self.state(), 'x.pt')"),
        work(last="torch.save(self.best, 'x.pt')"),
        work(wrapped="model", last="torch.save(self.best, 'x.pt')")
        + "work = Work(1, 2)\nwork.model = DDP(work.model)\n",
        ACCELERATE.format(last="pass", prepare="plain = accelerator.unwrap_model(model); plain.save_pretrained(path)"),
    ],
)
def test_told_however_the_state_gets_into_a_file(text):
    assert told(text)


@pytest.mark.parametrize(
    "text",
    [
        main("snapshot(ddp.module.state_dict(), 'x.pt')", before=SNAPSHOT),
        main("snapshot(ddp.state_dict(), 'x.pt')", before=TELL),
        main("torch.save(parts(ddp.module), 'x.pt')", before=GIVEN),
        main("print(parts(ddp))", before=GIVEN),
        main("state = ddp.state_dict()", "count = len(state)", "torch.save(count, 'x.pt')"),
        main("whole = {}", "whole['net'] = net.state_dict()", "torch.save(whole, 'x.pt')"),
        main("on_cpu = {}", "for k, v in ddp.state_dict().items(): on_cpu[k[7:]] = v", "torch.save(on_cpu, 'x.pt')"),
        main("net.load_state_dict(copy.deepcopy(ddp.module.state_dict()))", "torch.save(net.state_dict(), 'x.pt')"),
        main("nets = {'a': net, 'b': DDP(net)}", "torch.save(nets['a'].state_dict(), 'x.pt')"),
        main("nets = [net]", "torch.save([n.state_dict() for n in nets], 'x.pt')"),
        main("mine = MyParallel(net)", "torch.save(mine.state_dict(), 'x.pt')", before=OTHER),
        work(wrapped="FSDP(model)", last="torch.save(self.best, 'x.pt')"),
        work(wrapped="model", last="torch.save(self.state(), 'x.pt')"),
        work(last="print(len(self.best))"),
        ACCELERATE.format(
            last="torch.save(self.accelerator.unwrap_model(self.model).state_dict(), path)",
            prepare="model, optimizer = accelerator.prepare(model, optimizer)",
        ),
        ACCELERATE.format(
            last="torch.save(self.model.state_dict(), path)", prepare="optimizer = accelerator.prepare(optimizer)"
        ),
        ACCELERATE.format(
            last="self.accelerator.unwrap_model(self.model).save_pretrained(path)",
            prepare="model = accelerator.prepare(model)",
        ),
    ],
)
def test_silent_where_the_state_is_plain_or_stays_in_memory(text):
    assert not told(text)
