"""LS028: what is printed before a program turns `print` off on the other ranks, and programs that never do."""

import pytest

from lockstep.lint.config import configure
from lockstep.lint.runner import check_paths

HELPER = """
import builtins as __builtin__
import torch.distributed as dist

def setup_for_distributed(is_master):
    builtin_print = __builtin__.print

    def print(*args, force=False):
        if is_master or force:
            builtin_print(*args)

    {replace}

def init_distributed_mode(args):
    dist.init_process_group("nccl")
    {call}

def describe(args):
    print(args)
"""
RUN = """
import torch.distributed as dist
from helper import init_distributed_mode, describe

def main(args):
    {first}
    {start}
    {last}

def other(args):
    print("other")

if __name__ == "__main__":
    {before}
    main(parse())
    {after}
"""
USUAL = {
    "replace": "__builtin__.print = print",
    "call": "setup_for_distributed(args.rank == 0)",
    "start": "init_distributed_mode(args)",
    "first": "pass",
    "last": "pass",
    "before": "pass",
    "after": "pass",
}


def told(folder, text, name="run.py", **change):
    """The lines of one of two files at which the rule is told."""
    values = {**USUAL, **change}
    (folder / "helper.py").write_text(HELPER.format(**values))
    (folder / "run.py").write_text(text.format(**values))
    return [finding.line for finding in check_paths([str(folder / name)], configure({}, "LS028", ""))]


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"first": "print('begin')"}, [6]),
        ({"last": "print('begin')"}, []),
        ({"before": "print('begin')"}, [14]),
        ({"after": "print('end')"}, []),
        ({"start": "if args.distributed:\n        init_distributed_mode(args)", "last": "print('on')"}, []),
        # the function that would replace it is called by nobody
        ({"call": "pass", "last": "print('on')"}, [8]),
        ({"call": "begin(setup_for_distributed)", "last": "print('on')"}, []),
        ({"replace": "setattr(__builtin__, 'print', print)", "last": "print('on')"}, []),
        ({"replace": "setattr(__builtin__, 'print', print)", "first": "print('on')"}, [6]),
        # nothing in sight says how it is replaced
        ({"replace": "swap(__builtin__, print)", "first": "print('on')"}, []),
    ],
)
def test_what_is_printed_before_the_other_ranks_are_muted(tmp_path, change, lines):
    assert told(tmp_path, RUN, **change) == lines


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"first": "describe(args)"}, [19]),
        ({"last": "describe(args)"}, []),
        ({"first": "describe(args)", "last": "describe(args)"}, []),
        ({}, []),  # called by nobody
    ],
)
def test_a_helper_that_prints_before_or_after(tmp_path, change, lines):
    assert told(tmp_path, RUN, "helper.py", **change) == lines


MUTES = """
import builtins
import torch.distributed as dist
import torch.multiprocessing as mp

def worker(gpu, args):
    {first}
    if args.multiprocessing_distributed and gpu != 0:
        def print_pass(*args):
            pass
        builtins.print = print_pass
    {last}
    dist.init_process_group("nccl")

if __name__ == "__main__":
    print("launching")
    mp.spawn(worker, nprocs=8, args=(parse(),))
"""


@pytest.mark.parametrize(("change", "lines"), [({"first": "print('begin')"}, [7]), ({"last": "print('begin')"}, [])])
def test_a_worker_that_mutes_itself(tmp_path, change, lines):
    assert told(tmp_path, MUTES, **change) == lines
