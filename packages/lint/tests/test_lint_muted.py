"""LS028: what is printed before a program turns `print` off on the other ranks, and programs that never do."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

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
        ({"last": "print('begin')"}, []),
        ({"after": "print('end')"}, []),
        ({"start": "if args.distributed:\n        init_distributed_mode(args)", "last": "print('on')"}, []),
        # the function that would replace it is called by nobody
        ({"call": "begin(setup_for_distributed)", "last": "print('on')"}, []),
        ({"replace": "setattr(__builtin__, 'print', print)", "last": "print('on')"}, []),
        # nothing in sight says how it is replaced
        ({"replace": "swap(__builtin__, print)", "first": "print('on')"}, []),
    ],
)
def test_what_is_printed_before_the_other_ranks_are_muted(tmp_path, change, lines):
    assert told(tmp_path, RUN, **change) == lines


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"last": "describe(args)"}, []),
        ({"first": "describe(args)", "last": "describe(args)"}, []),
        ({"after": "pass"}, []),  # called by nobody
    ],
)
def test_a_helper_that_prints_before_or_after(tmp_path, change, lines):
    assert told(tmp_path, RUN, "helper.py", **change) == lines


def test_a_helper_that_only_tries_itself_out(tmp_path):
    alone = "\n\nif __name__ == '__main__':\n    describe(1)\n"
    (tmp_path / "helper.py").write_text(HELPER.format(**USUAL) + alone)
    (tmp_path / "run.py").write_text(RUN.format(**USUAL))
    assert not check_paths([str(tmp_path / "helper.py")], configure({}, "LS028", ""))


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


@pytest.mark.parametrize(("change", "lines"), [({"last": "print('begin')"}, [])])
def test_a_worker_that_mutes_itself(tmp_path, change, lines):
    assert told(tmp_path, MUTES, **change) == lines


LENT = """
import os, sys, contextlib, subprocess, wandb
import torch.distributed as dist

def {head}:
    {hush}
        load(results)

def main(args, rank):
    print("begin")
    dist.init_process_group("nccl")
    {last}

if __name__ == "__main__":
    main(parse(), 0)
"""
BLOCK = "with open(os.devnull, 'w') as devnull, contextlib.redirect_stdout(devnull):"


@pytest.mark.parametrize(
    ("head", "hush", "last", "lines"),
    [
        ("update(results)", BLOCK, "pass", [10]),
        ("update(results)", "sys.stdout = open(os.devnull, 'w')\n    if results:", "pass", []),
        ("convert(results)", "subprocess.Popen(results, stdout=open(os.devnull, 'wb'))\n    if results:", "pass", [11]),
        ("update(results)", "sys.stdout = open(os.devnull, 'w')\n    if results:", "wandb.init()", [13]),
    ],
)
def test_output_of_one_block_that_is_sent_away(tmp_path, head, hush, last, lines):
    assert told(tmp_path, LENT.replace("{head}", head).replace("{hush}", hush), last=last) == lines


HIDDEN = """
import wandb
import torch.distributed as dist
import logging
from absent.helpers import init_distributed_mode, setup_logger
logging.basicConfig(level=logging.INFO)

def main(args):
    {first}
    {start}
    {last}
    dist.init_process_group("nccl")

if __name__ == "__main__":
    main(parse())
"""


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"last": "print('begin')"}, []),
        ({"last": "wandb.init(project='p')"}, [11]),
        ({"first": "logging.info('begin')"}, []),
        ({"start": "setup_logger(args)", "last": "print('begin')"}, [11]),
        ({"start": "setup_logger(args)", "last": "logging.info('begin')"}, []),
    ],
)
def test_a_helper_that_is_not_there_may_mute_what_comes_after(tmp_path, change, lines):
    assert told(tmp_path, HIDDEN, **change) == lines


PARTED = """
import torch.distributed as dist

def main(args):
    dist.init_process_group("nccl")

def {name}(args):
    print("closing")

if __name__ == "__main__":
    {block}
"""


@pytest.mark.parametrize(
    ("block", "number"),
    [
        ("try:\n        main(1)\n    finally:\n        close(1)", 1),
        ("try:\n        main(1)\n    except KeyError:\n        raise\n    else:\n        close(1)", 1),
        ("for each in runs:\n        main(each)\n    else:\n        close(1)", 1),
        ("if runs:\n        main(1)\n    else:\n        close(1)", 0),
    ],
)
def test_only_the_arms_of_a_test_keep_programs_apart(tmp_path, block, number):
    (tmp_path / "run.py").write_text(PARTED.format(name="close", block=block))
    assert len(check_paths([str(tmp_path / "run.py")], configure({}, "LS028", ""))) == number


PARTIAL = """
import functools
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, cfg):
    dist.init_process_group("nccl", rank=rank)
    print("in each")

def main(cfg):
    print("once")
    run = {run}
    for rank in range(4):
        mp.Process(target=run, args=(rank,)).start()

if __name__ == "__main__":
    main(parse())
"""


@pytest.mark.parametrize("run", ["functools.partial(work, cfg=cfg)", "work"])
def test_what_stands_before_the_processes_are_started_is_printed_once(tmp_path, run):
    text = PARTIAL.format(run=run)
    place = text.splitlines().index('    print("in each")') + 1
    (tmp_path / "run.py").write_text(text)
    found = check_paths([str(tmp_path / "run.py")], configure({}, "LS028", ""))
    assert [finding.line for finding in found] == [place]
