"""LS028: which processes speak, by flags of the rank, by who calls, by the launcher and by how logging is set up."""

import json

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

START = "import os\nimport torch.distributed as dist\n"
MAIN = "def main(args):\n    dist.init_process_group('nccl')\n{}\nif __name__ == '__main__':\n    main(parse())\n"


def lines(text, codes="LS028"):
    """The lines of a script at which a rule is told."""
    return [finding.line for finding in check_text(text, configure({}, codes, ""))]


def flagged(*sets, test="args.verbose"):
    """Two files: one sets a flag on an object by the given lines, the other prints under a test of it."""
    start = "import torch.distributed as dist\nfrom work import train\n\n"
    body = "".join(f"    {line}\n" for line in sets)
    main = f"def main(args):\n    dist.init_process_group('nccl')\n{body}    train(args)\n"
    script = start + main + "\nif __name__ == '__main__':\n    main(parse())\n"
    return {"run.py": script, "work.py": f"import torch\n\ndef train(args):\n    if {test}:\n        print('epoch')\n"}


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (flagged("args.verbose = True if int(os.environ['RANK']) == 0 else False"), False),
        (flagged("args.verbose = dist.get_rank() == 0"), False),
        (flagged("args.verbose = False", "if args.rank == 0:", "    args.verbose = True"), False),
        (flagged("args.verbose = False if args.rank else True"), False),
        (flagged("args.verbose = not args.rank"), False),
        (
            flagged("if args.distributed:", "    args.verbose = args.rank == 0", "else:", "    args.verbose = True"),
            False,
        ),
        (flagged("args.verbose = is_main_process()"), False),
        (flagged("args.verbose = True"), True),
        (flagged("args.verbose = args.level > 1"), True),
        (flagged("args.verbose = args.rank == 0", "args.verbose = args.loud"), True),
        (flagged("args.verbose = False", "if args.loud:", "    args.verbose = True"), True),
        (flagged("args.other = dist.get_rank() == 0"), True),
        (flagged("args.verbose = False if args.rank == 0 else True", test="not args.verbose"), False),
        (flagged("args.verbose = dist.get_rank() == 0", test="not args.verbose"), False),  # on all but rank 0
    ],
)
def test_a_flag_on_an_object_is_followed_to_where_it_is_set(tmp_path, files, told):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = check_paths([str(tmp_path / "work.py")], configure({}, "LS028", ""))
    assert [finding.line for finding in found] == ([5] if told else [])


CALLED = START + "\ndef alone(model):\n    print('training')\n\n" + MAIN


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("    if args.distributed:\n        work(args)\n    else:\n        alone(args)\n", False),
        ("    if not args.distributed:\n        alone(args)\n", False),
        ("    if dist.get_world_size() == 1:\n        alone(args)\n", False),
        ("    if args.local_rank == -1:\n        return alone(args)\n", False),
        ("    if args.distributed:\n        alone(args)\n    else:\n        work(args)\n", True),
        ("    if not args.distributed:\n        alone(args)\n    alone(args)\n", True),
        ("    alone(args)\n", True),
    ],
)
def test_a_function_that_only_one_process_calls_may_print(body, told):
    assert lines(CALLED.format(body)) == ([5] if told else [])


LEARNER = """
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

class Learner:
    def __init__(self, model):
        self.model = model
        self.is_main = {value}

    def train(self):
        if self.is_main:
            self.writer = SummaryWriter("runs")

def main(number, args):
    dist.init_process_group("nccl", rank=number)
    learner = Learner(args.model)
    {inside}
    learner.train()

main(0, parse())
"""


@pytest.mark.parametrize(
    ("value", "inside", "told"),
    [
        ("True", "learner.is_main = number == 0", False),
        ("True", "pass", True),
        ("model.first", "pass", False),
    ],
)
def test_a_flag_that_is_set_on_an_object_from_outside(value, inside, told):
    assert bool(lines(LEARNER.format(value=value, inside=inside))) is told


HOROVOD = """
import horovod
import horovod.torch as hvd

def main(args):
    hvd.init()
    print("in each process")

if __name__ == "__main__":
    if args.count:
        print("before")
        {start}
    else:
        main(args)
"""


@pytest.mark.parametrize(
    ("start", "told"), [("horovod.run(main, args=(args,), np=args.count)", [7]), ("main(args)", [7, 11])]
)
def test_what_starts_processes_of_horovod_is_one_itself(start, told):
    assert lines(HOROVOD.format(start=start)) == told


LAUNCH = """
import torch.distributed as dist
import torch.multiprocessing as mp

def worker(rank, args):
    dist.init_process_group("nccl", rank=rank)
    print("in a worker")
    dist.destroy_process_group()

def {launch}

def other(rank):
    print("other")

if __name__ == "__main__":
    print("before")
    {start}
"""


@pytest.mark.parametrize(
    ("launch", "start", "told"),
    [
        ("launch(work, size):\n    print('starting')\n    mp.spawn(work, nprocs=size)", "launch(worker, 2)", [7]),
        ("launch(size, work):\n    print(size)\n    mp.spawn(fn=work, nprocs=size)", "launch(2, work=worker)", [7]),
        (
            "launch(work):\n    print('x')\n    for i in range(2):\n        mp.Process(target=work).start()",
            "launch(worker)",
            [7],
        ),
        ("launch(work, size):\n    print('starting')\n    work(0, size)", "launch(worker, 2)", [7, 11, 18]),
    ],
)
def test_what_a_launcher_is_handed_runs_in_the_processes(launch, start, told):
    assert lines(LAUNCH.format(launch=launch, start=start)) == told


LOGS = "import logging\n" + START + "{before}\n" + MAIN
BASIC = "    logging.basicConfig({})\n    logging.info('training')\n"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (BASIC.format("level=logging.INFO if args.rank == 0 else logging.ERROR"), False),
        ("    level = logging.INFO if args.rank == 0 else logging.ERROR\n" + BASIC.format("level=level"), False),
        ("    if args.rank == 0:\n        level = 10\n" + BASIC.format("level=level"), False),
        ("    logging.getLogger().setLevel(args.rank * 50)\n" + BASIC.format(""), False),
        ("    if args.rank:\n        logging.disable(50)\n" + BASIC.format(""), False),
    ],
)
def test_logging_that_the_rank_sets_up_is_silent(body, told):
    text = LOGS.format(body, before="")
    assert bool(lines(text)) is told


HYDRA = """
import logging
import hydra
import torch.distributed as dist
{imports}
{logger}

def save(path):
    log.info("saving")

{decorator}
def main(cfg):
    {first}
    dist.init_process_group("nccl")
    save(cfg.path)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"decorator": "@wrap(cfg=1)"}, False),
        ({"first": "logging.basicConfig(level=10 if cfg.rank == 0 else 50)"}, False),
        ({"imports": "from accelerate.logging import get_logger", "logger": "log = get_logger(__name__)"}, False),
        ({"imports": "import accelerate", "logger": "log = accelerate.logging.get_logger(__name__)"}, False),
    ],
)
def test_hydra_sets_up_logging_on_every_rank(change, told):
    usual = {
        "imports": "",
        "logger": "log = logging.getLogger(__name__)",
        "decorator": '@hydra.main(config_path=".")',
        "first": "pass",
    }
    assert bool(lines(HYDRA.format(**(usual | change)))) is told


ACCELERATE = """
import logging
from accelerate import Accelerator
{before}
def evaluate(model, accelerator):
    {line}

def main():
    accelerator = Accelerator()
    verbose = accelerator.is_main_process
    evaluate(accelerator.prepare(1), accelerator)
    {last}

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"line": "print(model)"}, [6]),
        ({"last": "print('done')"}, [12]),
        ({"line": "accelerator.print(model)"}, []),
        ({"last": "if accelerator.is_main_process:\n        print('done')"}, []),
        ({"last": "if verbose:\n        print('done')"}, []),
        ({"last": "if not accelerator.is_local_main_process:\n        return\n    print('done')"}, []),
        ({"line": "logging.info('scored')"}, []),  # nothing sets up logging, so nothing is shown
    ],
)
def test_every_process_of_accelerate_speaks(change, told):
    assert lines(ACCELERATE.format(**({"before": "", "line": "pass", "last": "pass"} | change))) == told


def test_a_notebook_is_one_process_of_accelerate(tmp_path):
    text = ACCELERATE.format(before="", line="print(model)", last="pass")
    path = tmp_path / "train.ipynb"
    cells = [{"cell_type": "code", "source": text}]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    assert not check_paths([str(path)], configure({}, "LS028", ""))
    (tmp_path / "train.py").write_text(text)
    assert check_paths([str(tmp_path / "train.py")], configure({}, "LS028", ""))


GURU = """
import sys
import torch.distributed as dist
from loguru import logger

def main(rank):
    dist.init_process_group("nccl")
    {setup}
    logger.{level}("training")
    dist.destroy_process_group()

if __name__ == "__main__":
    main(0)
"""


@pytest.mark.parametrize(
    ("setup", "level", "told"),
    [
        ("logger.add(sys.stderr, level='INFO')", "debug", False),
        ("logger.remove()", "info", False),
        ("logger.add(sys.stderr, level='INFO' if rank == 0 else 'ERROR')", "info", False),
        ("if rank != 0: logger.remove()", "info", False),
        ("logger.add(sys.stderr, filter=lambda record: rank == 0)", "info", False),
    ],
)
def test_loguru_that_is_set_up_alike_writes_on_every_rank(setup, level, told):
    assert bool(lines(GURU.format(setup=setup, level=level))) is told


STAR = "from {module} import {name}\n" + START + MAIN.format("    {line}\n    print('training')\n")


@pytest.mark.parametrize(
    ("module", "name", "line", "told"),
    [
        ("absent.helpers", "*", "pass", True),  # what is called print is the built-in one, most likely
        ("absent.helpers", "work", "work(args)", True),
        ("absent.helpers", "*", "init_distributed_mode(args)", False),  # which may make the others quiet
        ("absent.helpers", "disable_print", "disable_print()", False),
        ("absent.helpers", "print", "pass", False),
    ],
)
def test_a_star_import_of_a_file_that_is_not_there(module, name, line, told):
    assert bool(lines(STAR.format(module=module, name=name, line=line))) is told


DEBUG = LOGS.replace("{before}", "log = logging.getLogger()").replace(
    "{}", "    logging.basicConfig(level={level})\n    {log}.debug('step')"
)


@pytest.mark.parametrize(
    ("level", "log", "told"),
    [
        ("logging.INFO", "log", False),
        ("args.level", "log", False),
        ("logging.DEBUG", "engine", False),
    ],
)
def test_debug_lines_that_are_shown(level, log, told):
    assert bool(lines(DEBUG.format(level=level, log=log))) is told


ENVIRONMENT = """
import os
import logging
import torch.distributed as dist

def start(args):
    if {test}:
        args.rank = int(os.environ["RANK"])
    else:
        {line}
        return
    dist.init_process_group("nccl")

def main(args):
    logging.basicConfig(level=20)
    start(args)
    dist.destroy_process_group()

main(None)
"""


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ('"RANK" in os.environ and "WORLD_SIZE" in os.environ', False),
        ('"SLURM_PROCID" in os.environ', False),
    ],
)
def test_what_only_one_process_does_by_its_environment(test, told):
    assert bool(lines(ENVIRONMENT.format(test=test, line='logging.info("no launcher")'))) is told
    assert bool(lines(ENVIRONMENT.format(test=test, line='print("no launcher")'))) is told
