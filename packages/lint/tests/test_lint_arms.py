"""Programs that choose, by a test, between functions that start the process group and functions that do not."""

import pytest

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
