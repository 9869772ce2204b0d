"""LS028: output on every rank."""

import pytest

from lockstep_lint.analysis.imports import folders_added
from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

START = "import logging\nimport sys\nimport torch.distributed as dist\nimport torch.multiprocessing as mp\n"


GROUP = "def main(args):\n    dist.init_process_group('nccl')\n"


def count_findings(text, rule="LS028"):
    """Count a rule's findings."""
    return len(check_text(START + text, configure({}, rule, "")))


@pytest.mark.parametrize(
    ("last", "number"), [("exit(0)", 1), ("sys.exit(0)", 1), ("exit(1)", 0), ("exit()", 0), ("sys.exit('no')", 0)]
)
def test_a_program_that_ends_well(last, number):
    assert count_findings(f"{GROUP}    if args:\n        print('done')\n        {last}\n") == number


@pytest.mark.parametrize(("leave", "number"), [("continue", 0), ("raise", 0), ("return", 0)])
def test_a_loop_that_an_exception_ends(leave, number):
    loop = "    for x in args:\n        try:\n            step(x)\n        except KeyError:\n            print('out')\n"
    assert count_findings(f"{GROUP}{loop}            {leave}\n") == number


@pytest.mark.parametrize(
    ("tests", "number"),
    [
        (("args.distributed", "args.gpu is None"), 1),
        (("args.distributed", "args.gpu is not None"), 1),
        (("not args.distributed", "args.gpu is None"), 0),
        (("args.loud", "args.nodist"), 0),
        (("args.loud", "args.launcher == 'none'"), 0),
        (("args.loud", "args.launcher != 'none'"), 1),
        (("args.loud", "args.launcher == 'slurm'"), 1),
        (("args.loud", "args.mode == 'none'"), 1),
        (("args.loud", "not args.no_ddp"), 1),
        (("args.loud", "not ('RANK' in os.environ and not args.nodist)"), 0),
        (("args.gpu is None", "args.loud"), 0),
        (("not args.distributed", "torch.cuda.device_count() > 1"), 0),
    ],
)
def test_no_device_where_there_are_several_processes(tests, number):
    outer, inner = tests
    assert count_findings(f"{GROUP}    if {outer}:\n        if {inner}:\n            print('wrapped')\n") == number


START_2 = "import os\nimport sys\nimport wandb\nimport torch.distributed as dist\n"


PRINTS = configure({}, "LS028", "")


GROUP_2 = "    dist.init_process_group('nccl')\n"


RUN = "\nmain(int(os.environ['RANK']), parse())\n"


def count_findings_2(body, before=""):
    """Count the rule's findings with these lines, indented, in the script's main function."""
    return len(check_text(f"{START_2}{before}\ndef main(rank, args):\n{GROUP_2}    {body}\n{RUN}", PRINTS))


@pytest.mark.parametrize(
    ("test", "number"),
    [
        ("not (args.distributed and rank != 0)", 0),
        ("rank == MAIN", 0),
        ("rank == BOUND", 1),
        ("str(rank) == '0'", 0),
        ("getattr(args, 'rank', 0) == 0", 0),
        ("getattr(args, 'step', 0) == 0", 1),
        ("(me := dist.get_rank()) == 0", 0),
        ("1 > rank", 0),
        ("2 > rank", 1),
        ("args.is_leader", 0),
        ("int(rank == 0)", 0),
    ],
)
def test_who_prints(test, number):
    assert count_findings_2(f"if {test}:\n        print('begin')", "MAIN = 0\nBOUND = 2\n") == number


def test_a_long_function_of_blank_lines_is_read_fast():
    text = "import sys\n\ndef add(path):\n" + "                \n" * 3000 + "x = 1\n"
    assert list(folders_added(f"{text}sys.path.append(path)\n")) == []


@pytest.mark.timeout(60)  # without the bounds it does not end
def test_names_that_stand_for_many_names_are_followed_within():
    names = "".join(f"a = b{i} + b{i + 1}\nb{i} = c + d\n" for i in range(300))
    assert list(folders_added("sys.path.append(a)\n" * 200 + names + "c = 1\n" * 3000)) == []


HEAD = """
import logging
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
"""


def found(text, config=PRINTS):
    return [finding.rule for finding in check_text(HEAD + text, config)]


def script(lines, parameters="rank"):
    """Return a script of several processes with the given lines in it."""
    body = "".join(f"    {line}\n" for line in lines)
    return f'def main({parameters}):\n    dist.init_process_group("nccl")\n{body}    dist.destroy_process_group()\n'


# Lines that end in an open block; the print in it is expected or not.
KEPT = {
    "an object that rank 0 alone has": ["bar = object() if rank == 0 else None", "if bar is not None:"],
    "the same, by its truth": ["bar = object() if rank == 0 else None", "if bar:"],
    "None first": ["bar = None", "if rank == 0:", "    bar = open('x')", "if bar is not None:"],
    "the rank under another name": ["me = dist.get_rank()", "if me == 0:"],
    "the rank from the environment": ["me = int(os.environ['RANK'])", "if not me:"],
    "in one word": ["localrank = int(os.environ['LOCAL_RANK'])", "if localrank == 0:"],
    "a device that is the rank": ["device = rank", "if device == 0:"],
    "the same, among the machine's": ["device = rank % torch.cuda.device_count()", "if device == 0:"],
    "sides changed": ["if 1 > rank:"],
    "no option, or rank 0": ["if not (given.distributed and rank > 0):"],
    "the others left by the truth of their rank": ["if dist.get_rank():", "    return", "if True:"],
    "the rank as a word": ["if str(rank) == '0':"],
    "the rank that is to save": ["if rank == given.save_rank:"],
    "the rank or 0": ["me = 0", "if given:", "    me = dist.get_rank()", "if me == 0:"],
    "the others left": ["if rank > 0:", "    return", "if True:"],
    "a flag of rank 0 that an option decides too, beside the rank": [
        "sent = False",
        "if rank == 0 and given:",
        "    sent = True",
        "if rank == 0 and not sent:",
    ],
}


SHARED = {
    "an object that every rank has": ["bar = object() if rank >= 0 else None", "if bar is not None:"],
    "an object of programs with an option": ["bar = object() if given else None", "if bar:"],
    "None until every rank opens it": ["bar = None", "if rank >= 0:", "    bar = open('x')", "if bar is not None:"],
    "another rank that is handed on": ["if rank == given.other:"],
    "0, whatever the rank is": ["me = 0", "if me == 0:"],
    "a rank that may not be given": [
        "local_rank = given.local_rank",
        "if not local_rank and given:",
        "    pass",
        "if True:",
    ],
    "sides changed, for all": ["if 0 <= rank:"],
    "no ranks at all left": ["if rank < 0:", "    raise ValueError(rank)", "if True:"],
    "not both an option and a rank": ["if not (given.verbose and rank > 0):"],
    "a flag that an option decides too": [
        "sent = False",
        "if rank == 0 and given:",
        "    sent = True",
        "if not sent:",
    ],
    "a number that is no rank": ["me = dist.get_world_size()", "if me == 0:"],
    "an object that may come from elsewhere": ["bar = given or None", "if bar is not None:"],
}


@pytest.mark.parametrize("name", KEPT)
def test_tests_that_keep_other_ranks_out(name):
    assert found(script([*KEPT[name], "    print('hello')"], "rank, given=None")) == []


@pytest.mark.parametrize("name", SHARED)
def test_tests_that_do_not(name):
    assert found(script([*SHARED[name], "    print('hello')"], "rank, given")) == ["LS028"]


def test_a_model_that_is_handed_to_deepspeed():
    text = "import {0}\n\ndef main(model):\n    engine, *_ = {0}.initialize(model=model)\n    print('hello')\n"
    assert found(text.format("deepspeed")) == ["LS028"]
    assert found(text.format("colors")) == []


def lines(text, code="LS028"):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


@pytest.mark.parametrize(
    ("test", "found"),
    [("False", [7]), ("0", [7]), ("True", [5]), ("count > 2", [5, 7])],
)
def test_what_never_runs_is_told_nothing(test, found):
    start = "import torch.distributed as dist\ndist.init_process_group('nccl')\ncount = dist.get_world_size()\n"
    assert lines(f"{start}if {test}:\n    print(1)\nelse:\n    print(2)\n") == found
