"""LS043: data shuffled apart before it is divided."""

import pytest
from rule_findings import count

TEXT = """
import random
import torch.distributed as dist

def main(files):
    dist.init_process_group("nccl")
    {before}
    random.shuffle(files)
    mine = {part}
    dist.destroy_process_group()
    return mine
"""


@pytest.mark.parametrize(
    ("before", "part", "number"),
    [
        ("pass", "files[dist.get_rank()::dist.get_world_size()]", 1),
        ("random.seed(0)", "files[dist.get_rank()::dist.get_world_size()]", 0),
        ("pass", "files", 0),
    ],
)
def test_a_shuffle_before_the_ranks_parts(before, part, number):
    assert count(TEXT.format(before=before, part=part), "LS043") == number
