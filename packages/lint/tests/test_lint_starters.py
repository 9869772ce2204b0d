"""LS028: launchers of other programs, ranks under a condition, the first device, the number of the main rank."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def lines(text):
    """The lines of a script at which the rule is told."""
    return [finding.line for finding in check_text(text, configure({}, "LS028", ""))]


LAUNCHER = """\
import os, subprocess, sys, torch

def main(count):
    places = int(os.environ.get("WORLD_SIZE", count))
    for place in range(places):
        env = dict(os.environ)
        {give}
        {start}
    print("started")

if __name__ == "__main__":
    main(2)
"""
POPEN = "subprocess.Popen([sys.executable, 'train.py'], env=env)"


@pytest.mark.parametrize(
    ("give", "start", "told"),
    [
        ("env['LOCAL_RANK'] = str(place)", POPEN, []),
        ("env.update({'LOCAL_RANK': str(place)})", POPEN, []),
        ("env['OMP_NUM_THREADS'] = '1'", POPEN, [9]),
        ("env['LOCAL_RANK'] = str(place)", "train(env)", [9]),
    ],
)
def test_a_launcher_of_other_programs(give, start, told):
    assert lines(LAUNCHER.format(give=give, start=start)) == told


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("int(os.environ.get('LOCAL_RANK', -1)) == 0", [7]),
        ("dist.is_available() and dist.is_initialized() and int(os.environ.get('LOCAL_RANK', -1)) == 0", []),
        ("(dist.is_initialized()\n        and os.environ['LOCAL_RANK'] == '0')", []),
        ("dist.is_initialized() or int(os.environ['LOCAL_RANK']) == 0", [7]),
    ],
)
def test_a_place_that_is_asked_for_where_there_is_a_group(test, told):
    start = "import os, torch\nimport torch.distributed as dist\n\n"
    assert (
        lines(f"{start}def first():\n    return {test}\n\nprint(torch.load('model.pt') if first() else None)\n") == told
    )


CLASS = """\
import os
import torch.distributed as dist

class Work:
    def __init__(self):
        dist.init_process_group("nccl")
        self.device = {device}

    def run(self):
        if self.device {test}:
            print("run")

Work().run()
"""


@pytest.mark.parametrize(
    ("device", "test", "told"),
    [
        ("f'cuda:{os.environ[\"LOCAL_RANK\"]}'", "== 'cuda:0'", []),
        ("give()", "== 'cuda:0'", []),
        ("give()", "!= 'cuda:0'", []),
        ("f'cuda:{os.environ[\"LOCAL_RANK\"]}'", "== 'cuda'", [11]),
        ("'cuda:0' if torch.cuda.is_available() else 'cpu'", "== 'cuda:0'", [11]),
        ("torch.device('cuda:0')", "!= 'cuda:0'", [11]),
    ],
)
def test_the_first_device_is_that_of_the_main_rank(device, test, told):
    assert lines(CLASS.format(device=device, test=test)) == told


NAMED = """\
import torch.distributed as dist

{above}

def main(args, rank, world_size):
    dist.init_process_group("nccl")
    {test}
        {body}
    {line}

if __name__ == "__main__":
    main(parse(), place(), count())
"""
RETURN = {"body": "return", "line": "print('begin')"}
PRINT = {"body": "print('begin')", "line": "pass"}


@pytest.mark.parametrize(
    ("test", "rest", "told"),
    [
        ("if rank == ROOT:", {"above": "ROOT = 0", **PRINT}, []),
        ("if rank != ROOT:", {"above": "ROOT = 0", **RETURN}, []),
        ("if rank == args.master_rank:", PRINT, []),
        ("if str(rank) == '0':", PRINT, []),
        ("if rank:", RETURN, []),
        ("if args.local_rank:", RETURN, []),
        ("if rank == OTHER:", {"above": "OTHER = 'a'", **PRINT}, [8]),
        ("if rank != args.limit:", PRINT, [8]),
        ("if args.lora_rank:", RETURN, [9]),
        ("if rank is None:", RETURN, [9]),
        ("if rank is not None:", PRINT, [8]),
        ("if args.gpu:", RETURN, [9]),
        ("if args.enable_fsdp:", PRINT, [8]),
        ("if not args.enable_fsdp:", PRINT, []),
        ("if not (args.enable_fsdp or args.enable_ddp):", PRINT, []),
        ("if not args.enable_logging:", PRINT, [8]),
        ("for _ in range(2):", {"body": "[print(x) for x in args.names if rank == 0]", "line": "pass"}, []),
        ("for _ in range(2):", {"body": "[print(x) for x in args.names if x]", "line": "pass"}, [8]),
    ],
)
def test_more_ways_to_ask_for_the_main_rank(test, rest, told):
    assert lines(NAMED.format(test=test, **{"above": "", **rest})) == told
