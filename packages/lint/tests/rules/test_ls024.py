"""LS024: CUDA before the device is set."""

import pytest
from rule_findings import lines

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

GROUPED = """
import os
import torch.distributed as dist

def main(args, train):
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if args.distributed:
        dist.init_process_group("nccl")
    {other}
    {asked}
    train(args)
    if args.distributed:
        dist.destroy_process_group()
"""


ALONE = "else:\n        print('one process')"


@pytest.mark.parametrize(
    ("other", "asked", "number"),
    [
        (ALONE, "args.rank = dist.get_rank() if args.distributed else 0", 0),
        (ALONE, "if args.distributed and dist.get_rank() == 0: print(args)", 0),
        (ALONE, "if args.distributed: dist.barrier()", 0),
        ("pass", "args.rank = dist.get_rank()", 0),
        ("else:\n        raise SystemExit", "args.rank = dist.get_rank()", 0),
        ("else:\n        args.start()", "args.rank = dist.get_rank()", 0),
    ],
)
def test_a_question_to_a_group_that_may_not_be_there(other, asked, number):
    assert len(lines(GROUPED.format(other=other, asked=asked), "LS024")) == number


SOUND = """
import torch.distributed as dist

def size():
    if dist.is_initialized():
        return dist.get_world_size()
    return 1

def start(backend, world_size):
    if dist.is_initialized():
        print(dist.get_world_size())
    dist.init_process_group(backend)

if __name__ == "__main__":
    start("nccl", size())
"""


def test_a_library_that_asks_for_the_group():
    assert check_text(SOUND, configure({}, "LS024", "")) == []
