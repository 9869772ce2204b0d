"""LS044: local rank as rank."""

import pytest
from rule_findings import count

LOCAL = """
import os
import torch.distributed as dist

def main(args):
    {address}
    dist.init_process_group("nccl", rank=args.local_rank{more})
"""


@pytest.mark.parametrize(
    ("address", "more", "number"),
    [
        ("pass", "", 1),
        ('os.environ["MASTER_ADDR"] = "localhost"', "", 0),
        ('os.environ["MASTER_ADDR"] = "node1"', "", 1),
        ('if "MASTER_ADDR" not in os.environ: os.environ["MASTER_ADDR"] = "localhost"', "", 1),
        ("pass", ', init_method="tcp://127.0.0.1:23456"', 0),
        ("pass", ', init_method="env://"', 1),
    ],
)
def test_ranks_that_meet_on_one_machine(address, more, number):
    assert count(LOCAL.format(address=address, more=more), "LS044") == number
