"""LS027: attribute of the wrapper."""

import pytest
from rule_findings import lines

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

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


COMPILED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = 4

def main(args, rank):
    model = {made}
    if args.compile:
        model = torch.compile(model{more})
    print(model.{name})
"""


@pytest.mark.parametrize(
    ("made", "more", "name", "found"),
    [
        ("DDP(Net().to(rank), device_ids=[rank])", "", "size", True),
        ("DDP(torch.compile(Net()))", "", "size", True),
        ("DDP(Net())", ", mode='max-autotune'", "size", True),
        ("DDP(Net())", "", "module.size", False),
        ("DDP(Net())", "", "training", False),
        ("Net()", "", "size", False),
        ("DDP(Net()) if rank else Net()", "", "module", False),
    ],
)
def test_a_compiled_wrapper_is_one_still(made, more, name, found):
    assert told(COMPILED.format(made=made, more=more, name=name), "LS027") is found


INNER = """
import torch
from torch.nn.parallel import DistributedDataParallel

def main(large, device, build_large, build_small):
    if large:
        model = build_large.model
    else:
        model = build_small.model
    {before}
    def step(x):
        return model.features(x)
    {after}
    return step
"""


WRAP = "model = DistributedDataParallel(model)"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("pass", WRAP, False),
        (WRAP, "model = model.module", False),
        (f"if device:\n        {WRAP}", "pass", False),
    ],
)
def test_a_name_of_the_function_around(before, after, told):
    text = INNER.format(before=before, after=after)
    assert bool(check_text(text, configure({}, "LS027", ""))) is told


START = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
"""


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
