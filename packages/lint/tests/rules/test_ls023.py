"""LS023: mixed precision."""

import pytest
from rule_findings import found as found_of

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

TYPED = """
import torch

def train(model, loader, optimizer, args):
    {choice}
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = model(x)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ("dtype = {'fp16': torch.float16, 'bf16': torch.bfloat16}[args.type]", False),
        ("dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16", False),
        ("dtype = torch.bfloat16 if args.new else (\n        torch.float16 if args.gpu else torch.float32)", False),
        ("dtype = torch.bfloat16", False),
        ("dtype = args.dtype", False),
    ],
)
def test_a_type_by_a_flag(choice, found):
    assert found_of(TYPED.format(choice=choice), "LS023") is found


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


def told_2(text, code):
    return bool(check_text(HEAD + text, configure({}, code, "")))


HALF = """
def main(model, loader, args):
    policy = {policy}
    model = FSDP(model, mixed_precision=policy)
    {scaler}
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"policy": "MixedPrecision(torch.half, buffer_dtype=torch.half)"}, True),
        ({"policy": "MixedPrecisionPolicy(param_dtype=torch.float16)"}, True),
        ({"policy": "MixedPrecision(param_dtype=torch.bfloat16)"}, False),
        ({"policy": "MixedPrecision(reduce_dtype=torch.float16)"}, False),
        ({"policy": "MixedPrecision(param_dtype=torch.bfloat16 if args.bf else torch.float16)"}, False),
        ({"scaler": "scaler = ShardedGradScaler()"}, False),
    ],
)
def test_fsdp_in_half_precision(change, found):
    usual = {"policy": "MixedPrecision(param_dtype=torch.float16)", "scaler": "pass"}
    assert told_2(HALF.format(**(usual | change)), "LS023") is found


UNDER = """
def main(model, loader, optimizer, kind):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast({given}):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("'cuda'", True),
        ("device_type='cuda'", True),
        ("device_type='cpu'", False),
        ("device_type=kind", False),
        ("device_type='cuda', dtype=torch.bfloat16", False),
    ],
)
def test_an_autocast_that_is_half_by_default(given, found):
    assert told_2(UNDER.format(given=given), "LS023") is found
