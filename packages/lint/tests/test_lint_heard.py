"""LS028: output that other files of a program write, by its trainers, its helpers and what it finds on `sys.path`."""

import pytest

from lockstep_lint.analysis.imports import folders_added
from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

TRAINER = """
import torch

class Worker:
    def __init__(self, model):
        self.model = model

    def epoch(self):
        print("an epoch")

class Other(Worker):
    def epoch(self):
        print("an epoch of another kind")
"""
CHOICE = """
import torch.distributed as dist
from workers import Other, Worker

def chosen(kind, model):
    {made}

def main(kind, model):
    dist.init_process_group("nccl")
    worker = chosen(kind, model)
    {run}
    dist.destroy_process_group()

if __name__ == "__main__":
    main("first", None)
"""
HELPER = """
import logging
import torch
logger = logging.getLogger(__name__)

def load(path, log):
    print("loading", path)
    log.info("loaded")
    logger.info("loaded")
"""
SCRIPT = """
import logging
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.logging import get_logger
from helper import load

log = get_logger(__name__)

def main(path):
    logging.basicConfig(level=logging.INFO)
    accelerator = Accelerator()
    {call}

if __name__ == "__main__":
    main("data")
"""


def told(folder, name, files):
    """The lines of a file, in a folder of such files, at which LS028 is told."""
    (folder / "setup.cfg").write_text("")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    found = check_paths([str(folder / name)], configure({}, "LS028", ""))
    return [finding.line for finding in found if not finding.path.endswith(".cfg")]


@pytest.mark.parametrize(
    ("made", "run", "lines"),
    [
        ("return Other(model) if kind else Worker(model)", "worker.epoch()", [9, 13]),
        ("return Other(model) if kind else Worker(model)", "print(worker)", []),  # nobody calls it
        ("return Worker(model)", "worker.epoch()", [9]),  # of the other kind there are none
        ("return Other(model) if kind else Worker(model)", "if dist.get_rank() == 0:\n        worker.epoch()", []),
    ],
)
def test_one_of_several_trainers_prints_where_it_is_made(tmp_path, made, run, lines):
    files = {"workers.py": TRAINER, "main.py": CHOICE.format(made=made, run=run)}
    assert told(tmp_path, "workers.py", files) == lines


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        ("if accelerator.is_main_process:\n        load(path, log)", []),
        ("with accelerator.main_process_first():\n        load(path, log)", []),
        ("print(load)", []),
    ],
)
def test_what_a_script_of_accelerate_calls_in_another_file(tmp_path, call, lines):
    assert told(tmp_path, "helper.py", {"helper.py": HELPER, "main.py": SCRIPT.format(call=call)}) == lines


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        ("with accelerator.main_process_first():\n        print(path)", [14]),  # each in its turn
        ("with accelerator.on_main_process():\n        print(path)", []),
        (
            "if accelerator.is_main_process:\n        with accelerator.main_process_first():\n            print(path)",
            [],
        ),
    ],
)
def test_a_turn_keeps_nobody_out(tmp_path, call, lines):
    assert told(tmp_path, "main.py", {"helper.py": HELPER, "main.py": SCRIPT.format(call=call)}) == lines


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ('sys.path.append("../parts")', [9]),
        ('sys.path.insert(0, os.path.join(HERE, "parts"))', [9]),
        ('sys.path.append("../elsewhere")', []),
        ("sys.path.append(HERE)", []),
        ('PARTS = os.path.join(HERE, "..", "parts")\nsys.path.insert(0, PARTS)', [9]),
        ('ROOT = "../parts"\nsys.path.insert(0, str(ROOT))', [9]),
        ('PARTS = "../elsewhere"\nsys.path.insert(0, PARTS)', []),
        ('def add(path):\n    if path not in sys.path:\n        sys.path.insert(0, path)\n\nadd("../parts")', [9]),
        ('def add(path):\n    sys.path.insert(0, path)\n\nPARTS = "../parts"\nadd(PARTS)', [9]),
        ('def add(path):\n    print(path)\n\nadd("../parts")\nsys.path.append(HERE)', []),
    ],
)
def test_a_folder_that_a_program_adds_to_the_path(tmp_path, line, lines):
    main = CHOICE.format(made="return Worker(model)", run="worker.epoch()")
    files = {"parts/workers.py": TRAINER, "run/main.py": f"import os, sys\n{line}\n{main}"}
    assert told(tmp_path, "parts/workers.py", files) == lines


@pytest.mark.parametrize(
    ("file", "lines"), [("sys.stderr", []), ("sys.stdout", [7]), ("log", []), ("open(path, 'a')", [])]
)
def test_what_is_printed_to_the_terminal_by_name(tmp_path, file, lines):
    body = "import sys\nimport torch.distributed as dist\n\ndef main(log, path):\n    dist.init_process_group()\n\n"
    text = body + f"    print('ready', file={file})\n    dist.destroy_process_group()\n"
    assert told(tmp_path, "main.py", {"main.py": text}) == lines


@pytest.mark.parametrize(("name", "lines"), [("setup_for_distributed_mode", [9])])
def test_words_of_a_program_that_replaces_print(tmp_path, name, lines):
    text = (
        f"import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel\n\ndef {name}(model):"
    )
    text += "\n    return DistributedDataParallel(model)\n\ndef main(model):\n    dist.init_process_group()\n"
    text += f"    print({name}(model))\n    dist.destroy_process_group()\n"
    assert told(tmp_path, "main.py", {"main.py": text}) == lines


@pytest.mark.parametrize(("last", "lines"), [("", []), ("    whole(1)\n", [4, 7])])
def test_what_only_an_idle_function_calls_is_idle(tmp_path, last, lines):
    text = (
        "import torch.distributed as dist\n\ndef part(x):\n    print(x)\n\ndef whole(x):\n    print(x)\n    part(x)\n\n"
    )
    text += f"def main():\n    dist.init_process_group()\n{last}    dist.destroy_process_group()\n"
    assert told(tmp_path, "main.py", {"main.py": text}) == lines


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        ("CRITICAL", []),
    ],
)
def test_a_level_that_a_file_sets_itself(tmp_path, level, lines):
    text = "import logging, torch\nfrom other import start\nlogger = logging.getLogger()\n"
    text += f"logger.setLevel(logging.{level})\n\ndef main():\n    logger.info('ready')\n    start()\n"
    other = "import logging\nimport torch.distributed as dist\nlogging.basicConfig(level=10)\n"
    other += "def start():\n    dist.init_process_group()\n"
    assert told(tmp_path, "main.py", {"main.py": text, "other.py": other}) == lines


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("print_args", [7]),
        ("disable_print", []),
    ],
)
def test_a_function_that_is_not_here_may_turn_print_off_by_its_name(tmp_path, name, lines):
    text = f"import torch.distributed as dist\nfrom far.away import {name}\n\ndef main(args):\n"
    text += f"    dist.init_process_group()\n    {name}(args)\n    print('ready')\n    dist.destroy_process_group()\n"
    assert told(tmp_path, "main.py", {"main.py": text}) == lines


def test_a_long_function_of_blank_lines_is_read_fast():
    text = "import sys\n\ndef add(path):\n" + "                \n" * 3000 + "x = 1\n"
    assert list(folders_added(f"{text}sys.path.append(path)\n")) == []


@pytest.mark.timeout(60)  # without the bounds it does not end
def test_names_that_stand_for_many_names_are_followed_within_bounds():
    names = "".join(f"a = b{i} + b{i + 1}\nb{i} = c + d\n" for i in range(300))
    assert list(folders_added("sys.path.append(a)\n" * 200 + names + "c = 1\n" * 3000)) == []
