"""LS018 and LS037: what waits in programs of Accelerate; LS014: files that helpers write and read."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


def lines(text, code):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


PREPARED = """
import accelerate
import torch
from accelerate import Accelerator

def main(data):
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(data)
    {lines}
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("if accelerator.is_main_process: accelerator.wait_for_everyone()", True),
        ("if accelerator.is_local_main_process: accelerator.gather(data)", True),
        ("if not accelerator.is_main_process: accelerate.utils.wait_for_everyone()", True),
        ("if accelerator.is_main_process: model, optimizer = accelerator.prepare(model, optimizer)", True),
        ("if accelerator.is_main_process: accelerate.utils.reduce(data)", True),
        ("if accelerator.is_main_process: accelerate.utils.save(data, 'data.pt')", False),
        ("if accelerator.is_main_process: loader = accelerator.prepare(loader)", False),
        ("if accelerator.is_main_process: optimizer = accelerator.prepare(optimizer)", False),
        ("if accelerator.is_main_process: data.gather(1)", False),
        ("if accelerator.is_main_process: accelerator.save(model, data)", False),
        ("accelerator.wait_for_everyone()", False),
        ("if accelerator.is_main_process: accelerator.print(1)", False),
        (
            "if accelerator.is_main_process: accelerator.wait_for_everyone()\n"
            "    else: accelerator.wait_for_everyone()",
            False,
        ),
    ],
)
def test_what_accelerate_waits_for_on_the_main_process_alone(code, told):
    assert bool(lines(PREPARED.format(lines=code), "LS018")) is told


def test_a_notebook_of_accelerate_is_one_process():
    text = PREPARED.format(lines="if accelerator.is_main_process: accelerator.wait_for_everyone()")
    assert not check_text(text, configure({}, "LS018", ""), "train.ipynb")


EPOCHS = """
import torch
from accelerate import Accelerator

def validate(model, loader):
    total = 0
    for x, y in loader:
        total += model(x).sum().item()
    return total

def main(model, optimizer, train_loader, val_loader, accelerator: Accelerator, rest):
    accelerator = Accelerator()
    model, optimizer, train_loader{held} = accelerator.prepare(model, optimizer, train_loader{held})
    best, bad, step = 0, 0, 0
    for epoch in range(9):
        for x, y in train_loader:
            loss = model(x).sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        score = {score}
        if score > best:
            best = score
        else:
            bad += 1
        if {test}:
            break
"""


@pytest.mark.parametrize(
    ("held", "score", "test", "told"),
    [
        (", val_loader", "validate(model, val_loader)", "bad > 3", True),
        ("", "validate(model, val_loader)", "bad > 3", False),
        (", val_loader", "accelerator.gather(validate(model, val_loader)).mean()", "bad > 3", False),
        (", val_loader", "rest", "bad > 3", False),
        (", val_loader", "loss.item()", "bad > 3", True),
        (", val_loader", "rest", "accelerator.is_main_process and bad > 3", True),
        (", val_loader", "rest", "step > len(train_loader) * 9", False),
    ],
)
def test_a_loop_that_accelerates_processes_leave_apart(held, score, test, told):
    assert bool(lines(EPOCHS.format(held=held, score=score, test=test), "LS037")) is told


COUNTED = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

def main(model, data, optimizer, criterion, device, args):
    loader = DataLoader(data, sampler=DistributedSampler(data))
    model = DDP(model, device_ids=[device])
    step, right = 0, 0
    for epoch in range(args.epochs):
        if step > len(loader) * args.epochs:
            break
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            {count}
"""


@pytest.mark.parametrize(
    ("count", "told"),
    [
        ("step += 1", False),
        ("step = step + args.world_size", False),
        ("step = epoch * len(loader) + i", False),
        ("step += loss.item()", True),
        ("if loss < 1: step += 1", True),
        ("step += len(x)", False),
        ("step += x.size(0)", False),
        ("step += x.shape[0]", False),
        ("step += x.size(1)", True),
        ("step, last = epoch * len(loader) + i, 0", False),
        ("step, last = loss.item(), 0", True),
    ],
)
def test_a_counter_of_turns_is_no_score(count, told):
    assert bool(lines(COUNTED.format(count=count), "LS037")) is told


HOROVOD = """
import horovod.torch as hvd
import torch

hvd.init()
start = 1
if hvd.rank() == 0:
    start = torch.load("last.pt")["epoch"]
{tell}
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

def train(epoch, loader=()):
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

for epoch in range(start, 10):
    train(epoch)
"""


@pytest.mark.parametrize(
    ("tell", "told"),
    [
        ("hvd.broadcast_parameters(torch.load('last.pt'), root_rank=0)", True),
        ("start = hvd.broadcast_object(start, root_rank=0)", False),
    ],
)
def test_turns_of_horovods_processes_that_the_first_alone_has_read(tell, told):
    assert bool(lines(HOROVOD.format(tell=tell), "LS037")) is told


HELPERS = """
import os
import torch
import torch.distributed as dist

def save_on_master(*args):
    if dist.get_rank() == 0:
        torch.save(*args)

def save(state, path):
    torch.save(state, path)

def keep(state, path):
    if dist.get_rank() == 0:
        torch.save(state, path)

def load_weights(net, path):
    if os.path.isfile(path):
        net.load_state_dict(torch.load(path, weights_only=True))

def compare(net):
    dist.all_reduce(net.weight)
"""
USES = """
import os
import torch
import torch.distributed as dist
import helpers

def main(net, args):
    dist.init_process_group("nccl")
    {write}
    {between}
    {read}
"""
PATH = 'os.path.join(args.out, "last.pt")'


@pytest.mark.parametrize(
    ("write", "between", "read", "told"),
    [
        (f"helpers.keep(net, {PATH})", "pass", f"net = torch.load({PATH})", True),
        (f"path = {PATH}; helpers.keep(net, path)", "pass", f"net = torch.load({PATH})", True),
        (f"path = {PATH}; helpers.keep(net, path)", "pass", "net = torch.load(path)", True),
        (f"path = {PATH}\n    helpers.keep(net, path)", "path = args.out", "net = torch.load(path)", False),
        (
            f"path = {PATH}\n    helpers.keep(net, path)",
            "if args.new: path = args.out",
            "net = torch.load(path)",
            False,
        ),
        (f"helpers.keep(net, {PATH})", "args = other(args)", f"net = torch.load({PATH})", False),
        (f"if dist.get_rank() == 0: helpers.save(net, {PATH})", "pass", f"helpers.load_weights(net, {PATH})", True),
        (f"helpers.keep(net, {PATH})", "dist.barrier()", f"helpers.load_weights(net, {PATH})", False),
        (f"helpers.keep(net, {PATH})", "helpers.compare(net)", f"helpers.load_weights(net, {PATH})", False),
        (f"helpers.keep(net, {PATH})", "pass", "helpers.load_weights(net, args.pretrained)", False),
        (f"helpers.keep(net, {PATH})", "pass", f"if args.rank == 0: helpers.load_weights(net, {PATH})", False),
        (f"helpers.load_weights(net, {PATH})", "pass", f"helpers.keep(net, {PATH})", False),
    ],
)
def test_a_file_that_helpers_write_and_read(tmp_path, write, between, read, told):
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "train.py").write_text(USES.format(write=write, between=between, read=read))
    found = check_paths([str(tmp_path / "train.py")], configure({}, "LS014", ""))
    assert any("may read" in finding.message for finding in found) is told


NAMED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def save(state, tag):
    torch.save(state, f"model.{{tag}}.pt")

def main(net, table, rank):
    dist.init_process_group("nccl")
    net = DDP(net)
    {call}
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("call", "told"),
    [("save(net.module, 'last')", True), ("save(net.module, f'rank_{rank}')", False)],
)
def test_the_rank_in_the_name_that_a_caller_gives(call, told):
    assert bool(lines(NAMED.format(call=call), "LS014")) is told


TABLE = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class Agent:
    def __init__(self, nets):
        self.nets = nets
        self.nets["one"] = DDP(self.nets["one"])

    def save(self, rank):
        if rank == 0:
            torch.save({"net": self.nets[KEY].state_dict()}, "agent.pt")
"""


@pytest.mark.parametrize(("key", "told"), [('"one"', True), ('"two"', False), ("rank", True)])
def test_a_wrapper_under_one_key_of_a_table(key, told):
    assert bool(lines(TABLE.replace("KEY", key), "LS014")) is told


@pytest.mark.parametrize(
    ("nets", "key", "told"),
    [
        ('{"one": DDP(net), "two": other}', '"one"', True),
        ('{"one": DDP(net), "two": other}', '"two"', False),
        ('{"one": DDP(net), "two": other}', "rank", True),
        ('{**DDP(net), "two": other}', '"one"', True),
        ('{kind: DDP(net), "two": other}', '"one"', True),
        ("[DDP(net), other]", "0", True),
        ("[DDP(net), other]", "1", False),
        ("[DDP(net), other]", "-1", True),
        ("[*others, DDP(net)]", "0", True),
    ],
)
def test_a_wrapper_at_one_place_of_a_table_that_is_written_out(nets, key, told):
    text = TABLE.replace("self, nets):", "self, net, other, others, kind):").replace(
        "self.nets = nets", f"self.nets = {nets}"
    )
    text = text.replace('        self.nets["one"] = DDP(self.nets["one"])\n', "")
    assert bool(lines(text.replace("KEY", key), "LS014")) is told


SHARED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class Agent:
    def __init__(self, net):
        self.net = net

    def wrap(self):
        self.net = DDP(self.net)

    def save(self, path):
        torch.save(self.net.module, path)
"""
SCRIPT = """
import torch
from agent import Agent

if __name__ == "__main__":
    agent = Agent(torch.nn.Linear(2, 2))
    {lines}
"""


@pytest.mark.parametrize(
    ("lines_of_many", "told"),
    [
        ("dist.init_process_group('nccl'); agent.wrap()\n    if dist.get_rank() == 0: agent.save('net.pt')", False),
        ("dist.init_process_group('nccl'); agent.wrap()\n    agent.save('net.pt')", True),
    ],
)
def test_a_script_of_one_process_beside_one_of_several(tmp_path, lines_of_many, told):
    (tmp_path / "setup.cfg").write_text("")
    (tmp_path / "agent.py").write_text(SHARED)
    (tmp_path / "alone.py").write_text(SCRIPT.format(lines="agent.save('net.pt')"))
    many = SCRIPT.format(lines=lines_of_many)
    (tmp_path / "many.py").write_text(
        many.replace("import torch\n", "import torch\nimport torch.distributed as dist\n")
    )
    assert bool(check_paths([str(tmp_path / "agent.py")], configure({}, "LS014", ""))) is told


FABRIC = """
import lightning as L
import torch

def main(model):
    fabric = L.Fabric()
    fabric.launch()
    {line}
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("if fabric.is_global_zero: fabric.save('net.pt', {'net': model})", True),
        ("if fabric.global_rank == 0: fabric.barrier()", True),
        ("fabric.save('net.pt', {'net': model})", False),
        ("if fabric.is_global_zero: fabric.log('a', 1)", False),
        ("if fabric.is_global_zero: model.save('net.pt')", False),
    ],
)
def test_what_all_processes_of_a_fabric_do_together(line, told):
    assert bool(lines(FABRIC.format(line=line), "LS018")) is told


MAPPED = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

def reduce_all(value):
    torch.distributed.all_reduce(value)
    return value

def plain(value):
    return value

def test(model, data, device):
    model = DDP(model, device_ids=[device])
    val_loader = DataLoader(data, sampler=DistributedSampler(data))
    right = torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in val_loader:
            right += (model(x).argmax(1) == y).sum()
    (right,) = map({how}, [right])
    return right.item() / len(data)
"""


@pytest.mark.parametrize(("how", "told"), [("reduce_all if data else plain", False), ("plain", True)])
def test_a_function_that_brings_scores_together_by_map(how, told):
    assert bool(lines(MAPPED.format(how=how), "LS026")) is told
