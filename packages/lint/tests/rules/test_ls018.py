"""LS018: collective on some ranks only."""

import pytest
from rule_findings import lines as lines_of

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

REPORT = """
import torch.distributed as dist

class Report:
    def mean(self, loss):
        if not dist.is_initialized():
            return loss
        dist.all_reduce(loss)
        return loss

    def show(self, loss, reduce=True):
        {line}

def main(rank, loss, reduce):
    dist.init_process_group("nccl")
    report = Report()
    if rank == 0:
        report.show(loss, reduce)
"""


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("self.mean(loss)", 1),
        ("total = self.mean(loss) if dist.is_initialized() else loss", 1),
        ("total = self.mean(loss) if reduce else loss", 0),
        ("total = reduce and self.mean(loss)", 0),
        ("if reduce: self.mean(loss)", 0),
    ],
)
def test_a_collective_that_an_option_leaves_out(line, number):
    found = check_text(REPORT.format(line=line), configure({}, "LS018", ""))
    assert len(found) == number


CHOSEN = """
import torch.distributed as dist
import trainers

class Base:
    def report(self, loss):
        dist.all_reduce(loss)

@TRAINERS.register()
class Small(Base):
    def size(self):
        return 1

@TRAINERS.register("large")
class Large(Base):
{body}

TABLE = {{"small": Small, "large": Large}}

def main(name, loss):
    dist.init_process_group("nccl")
    trainer = {made}
    if dist.get_rank() == 0:
        trainer.report(loss)
    dist.destroy_process_group()
"""


WAYS = ["TABLE[name]()", "TABLE.get(name)()", "{'a': Small, 'b': Large}[name]()", "TRAINERS.build(name)", "Large()"]


@pytest.mark.parametrize("made", WAYS)
def test_a_method_that_a_candidate_has_of_its_own_is_not(made):
    assert chosen(made, "    def report(self, loss):\n        print(float(loss))") == []


def test_a_table_with_an_entry_out_of_sight_is_not_followed():
    assert chosen("{'a': Small, 'b': trainers.Other}[name]()", "    pass") == []


def chosen(made, body):
    text = CHOSEN.format(made=made, body=body)
    return [finding.rule for finding in check_text(text, configure({}, "LS018", ""))]


HEAD = """
import functools
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy
"""


def told(text, code):
    return bool(check_text(HEAD + text, configure({}, code, "")))


SHARDED = """
def sample(net, text):
    with torch.no_grad():
        return net(text)

def show(net):
    return str(net)

def main(model, rank, x):
    {wrap}
    for _ in range(3):
        {line}
"""


@pytest.mark.parametrize(
    ("wrap", "line", "found"),
    [
        ("model = FSDP(model)", "if rank == 0: model(x)", True),
        ("model = FSDP(model)", "if rank == 0: print(sample(model, 'a'))", True),
        ("model = torch.compile(FSDP(model))", "if rank == 0: sample(net=model, text='a')", True),
        ("fully_shard(model)", "if rank == 0: model(x)", True),
        ("model = FSDP(model)", "model(x)", False),
        ("model = FSDP(model)", "y = sample(model, 'a')\n        if rank == 0: print(y)", False),
        ("model = FSDP(model)", "if rank == 0: model(x)\n        else: model(-x)", False),
        ("model = FSDP(model)", "if rank == 0: print(show(model))", False),
        ("model = DDP(model)", "if rank == 0: model(x)", False),
        ("model = FSDP(model) if rank else model", "if rank == 0: model(x)", False),
    ],
)
def test_a_sharded_model_that_one_rank_runs(wrap, line, found):
    assert told(SHARDED.format(wrap=wrap, line=line), "LS018") is found


ENGINE = """
import deepspeed
import torch

def main(model, rank, options):
    {name}, _, _, _ = deepspeed.initialize(model=model, args=options)
"""


@pytest.mark.parametrize("name", ["model_engine"])
@pytest.mark.parametrize(("test", "told"), [("rank == 0", True), ("options.save", False)])
def test_an_engine_of_deepspeed_saves_on_every_rank(name, test, told):
    text = f"{ENGINE.format(name=name)}    if {test}:\n        {name}.save_checkpoint('out')\n"
    assert bool(lines_of(text, "LS018")) == told


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
    assert bool(lines_of(PREPARED.format(lines=code), "LS018")) is told


def test_a_notebook_of_accelerate_is_one_process():
    text = PREPARED.format(lines="if accelerator.is_main_process: accelerator.wait_for_everyone()")
    assert not check_text(text, configure({}, "LS018", ""), "train.ipynb")


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
    assert bool(lines_of(FABRIC.format(line=line), "LS018")) is told


SOUND = """
import torch.distributed as dist


def convert(path, c):
    rank = dist.get_rank()
    if rank == 0:
        if c is None:
            dist.barrier()
            return
        print(path, c)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    convert("x", None)
    dist.destroy_process_group()
"""


def test_an_early_exit_with_its_own_barrier():
    assert check_text(SOUND, configure({}, "LS018", "")) == []
