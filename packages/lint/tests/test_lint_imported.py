"""LS028: what spawned processes import anew, Trainers that are asked for the place, other trackers and prints, loggers
that are handed on with the rank, a name that its own test decides about.
"""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


def lines(text, codes="LS028"):
    """The lines at which rules are told in a text."""
    return [finding.line for finding in check_text(text, configure({}, codes, ""))]


SPAWNED = """
import {package} as mp
import torch.distributed as dist
{loud}
def worker(rank):
    dist.init_process_group("nccl", rank=rank)

if __name__ == "__main__":
    print("starting")
    {start}
"""


@pytest.mark.parametrize(
    ("package", "loud", "start", "told"),
    [
        ("torch.multiprocessing", "print('loading')", "mp.spawn(worker, nprocs=2)", [4]),
        ("torch.multiprocessing", "if True:\n    print('loading')", "mp.spawn(worker, nprocs=2)", [5]),
        ("torch.multiprocessing", "if __name__ == '__main__':\n    print('loading')", "mp.spawn(worker, nprocs=2)", []),
        ("torch.multiprocessing", "def show():\n    print('loading')\n", "mp.spawn(worker, nprocs=2)", []),
        ("multiprocess", "print('loading')", "mp.spawn(worker, nprocs=2)", []),
        ("torch.multiprocessing", "print('loading')", "mp.Process(target=worker, args=(0,)).start()", []),
    ],
)
def test_what_each_spawned_process_imports_anew(package, loud, start, told):
    assert lines(SPAWNED.format(package=package, loud=loud, start=start)) == told


def test_a_file_that_the_spawned_script_imports(tmp_path):
    helper = "import torch\nprint('loading')\nif __name__ == '__main__':\n    print('alone')\n"
    (tmp_path / "helper.py").write_text(helper)
    script = SPAWNED.format(package="torch.multiprocessing", loud="import helper", start="mp.spawn(worker, nprocs=2)")
    (tmp_path / "run.py").write_text(script)
    found = check_paths([str(tmp_path / "helper.py")], configure({}, "LS028", ""))
    assert [finding.line for finding in found] == [2]


TRAINER = """
from transformers import HfArgumentParser, Trainer, TrainingArguments

def main():
    args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    print("starting")
    if {test}:
        print("on the main rank")
    {make}

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("test", "make", "told"),
    [
        ("args.local_rank in (-1, 0)", "Trainer(net(), args).train()", [6]),
        ("args.local_rank != -1", "Trainer(net(), args).train()", []),  # as the examples of transformers log it
        ("args.do_train", "Trainer(net(), args).train()", []),
        ("args.local_rank in (-1, 0)", "train(net(), args)", []),  # a loop of its own, in one process
    ],
)
def test_a_trainer_that_is_asked_for_the_place_of_its_process(test, make, told):
    assert lines(TRAINER.format(test=test, make=make)) == told


@pytest.mark.parametrize(
    ("head", "call", "told"),
    [
        ("import neptune", "neptune.init_run(project=name)", [5]),
        ("from clearml import Task", "Task.init(project_name=name)", [5]),
        ("from mine import Task", "Task.init(project_name=name)", []),
        ("from torchinfo import summary", "summary(name)", [5]),
        ("from rich import print", "print(name)", [5]),
        ("from helpers.comm import print", "print(name)", []),
    ],
)
def test_other_trackers_and_other_prints(head, call, told):
    text = (
        f"import torch.distributed as dist\n{head}\ndef main(name):\n    dist.init_process_group('nccl')\n    {call}\n"
    )
    assert lines(text + "main('x')\n") == told


LOGGER = """
import logging
import torch.distributed as dist

def keep(logger, main):
    for name in ("info", "warning"):
        setattr(logger, name, silent(getattr(logger, name), main))

def make():
    logger = logging.getLogger("x")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
    {keep}
    return logger

def main(rank):
    dist.init_process_group("nccl")
    logger = make()
    logger.info("starting")
    logger.info(f"[rank {{rank}}] starting")

main(0)
"""


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        ("keep(logger, dist.get_rank() == 0)", []),
    ],
)
def test_a_logger_that_is_handed_on_with_the_rank(keep, told):
    assert lines(LOGGER.format(keep=keep)) == told


def test_a_name_that_its_own_test_decides_about():
    """Which ran in a circle, so that the file was not checked at all."""
    text = """
import torch.distributed as dist

def main(rank, losses):
    dist.init_process_group("nccl")
    if rank == 0:
        total = None
    for loss in losses:
        print(loss)
        if rank == 0:
            if total is None:
                total = loss
            else:
                total = total + loss
        if total is not None:
            dist.broadcast(loss, 0)
    dist.destroy_process_group()
"""
    found = check_text(text, configure({}, "ALL", ""))
    assert "LS000" not in {finding.rule for finding in found}
    assert [finding.line for finding in found if finding.rule == "LS028"] == [9]


@pytest.mark.parametrize(("other", "lines"), [("show = quiet", [4]), ("pass", [4]), ("raise", [4])])
def test_of_an_import_and_another_name_in_its_place_the_import_comes_first(tmp_path, other, lines):
    (tmp_path / "setup.cfg").write_text("")
    (tmp_path / "fast.py").write_text("import torch\n\ndef show():\n    print('x')\n")
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\ndef quiet():\n    pass\ntry:\n    from fast import show\n"
        f"except ImportError:\n    {other}\ndist.init_process_group('nccl')\nshow()\n"
    )
    found = check_paths([str(tmp_path / "fast.py")], configure({}, "LS028", ""))
    assert [finding.line for finding in found] == lines
