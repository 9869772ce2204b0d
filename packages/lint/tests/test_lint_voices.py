"""LS028: loggers of a project, parameters that nobody fills, debug lines, hooks, launchers that nobody calls."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

START = "import logging\nimport torch.distributed as dist\nimport torch.multiprocessing as mp\n"
MAKER = """
def make(name, {param}):
    log = logging.getLogger(name)
    handler = logging.StreamHandler()
    if rank == 0:
        log.addHandler(handler)
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    return log
"""
GROUP = "def main(args):\n    dist.init_process_group('nccl')\n"
RUN = "\nif __name__ == '__main__':\n    main(parse())\n"


def told(folder, **files):
    """How often the rule is told in run.py, beside other files."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return len(check_paths([str(folder / "run.py")], configure({}, "LS028", "")))


@pytest.mark.parametrize(
    ("param", "call", "number"),
    [
        ("rank=0", "make('run', args.rank)", 0),
        ("rank=0", "make('run', rank=dist.get_rank())", 0),
        ("rank=0", "make(*args.log)", 0),
        ("rank=0", "make('run', **vars(args))", 0),
    ],
)
def test_a_rank_that_no_call_fills_is_the_same_on_all_ranks(tmp_path, param, call, number):
    helper = "import logging\n" + MAKER.format(param=param)
    run = f"{START}from helper import make\n\n{GROUP}    log = {call}\n    log.info('begin')\n{RUN}"
    assert told(tmp_path, run=run, helper=helper) == number


@pytest.mark.parametrize(
    ("setting", "number"),
    [
        ("logging.basicConfig(level='DEBUG')", 0),  # only names are read
        ("logging.basicConfig(level=logging.INFO)", 0),
        ("other.setLevel(logging.DEBUG)\nlogger.addHandler(logging.StreamHandler())", 0),
        ("logger.setLevel(logging.INFO)\nlogger.addHandler(logging.StreamHandler())", 0),
    ],
)
def test_debug_lines_are_told_where_they_are_written(tmp_path, setting, number):
    run = f"{START}logger = logging.getLogger(__name__)\n{setting}\n\n{GROUP}    logger.debug('begin')\n{RUN}"
    assert told(tmp_path, run=run) == number


LOGGER = """
import logging

class Logger:
    def __init__(self, name):
        self.out = logging.getLogger(name)
        self.out.addHandler(logging.StreamHandler())

    def info(self, text):
        self.out.info(text)
"""


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("accelerator.is_main_process and log.info('begin')", 0),
        ("if accelerator.is_local_main_process: log.info('begin')", 0),
        ("accelerator.print('begin')", 0),
    ],
)
def test_a_logger_of_the_project_under_accelerate(tmp_path, line, number):
    start = "from accelerate import Accelerator\nfrom helper import Logger\n\ndef main(args):\n"
    run = f"{start}    accelerator = Accelerator()\n    log = Logger('run')\n    {line}\n{RUN}"
    assert told(tmp_path, run=run, helper=LOGGER) == number


@pytest.mark.parametrize(
    ("head", "test", "number"),
    [
        ("class Save(TrainerCallback):\n    def on_save(self, args):", "True", 1),
        ("class Save(hooks.Hook):\n    def on_epoch_end(self, state):", "state.loud", 1),
        ("class Save(TrainerCallback):\n    def on_train_begin(self, args, **rest):", "args.loud", 1),
        ("class Save(TrainerCallback):\n    def on_save(self, state):", "state.is_world_process_zero", 0),
        ("class Save:\n    def on_save(self, args):", "True", 0),
        ("class Save(TrainerCallback):\n    def describe(self, args):", "True", 0),
    ],
)
def test_a_hook_is_run_by_what_drives_its_class(tmp_path, head, test, number):
    start = f"{START}import hooks\nfrom transformers import TrainerCallback\n\n"
    body = f"{head}\n        if {test}:\n            print('saved')\n\n{GROUP}    run(Save())\n{RUN}"
    names = body.replace("is_world_process_zero", "is_main_process")
    assert told(tmp_path, run=start + names) == number


@pytest.mark.parametrize(
    ("launch", "number"),
    [
        ("", 1),  # `spread` is never called, so a launcher starts this
        ("    other(args)\n", 1),
        ("    describe(spread)\n", 0),
        ("    spread(work, 4)\n", 0),
    ],
)
def test_a_launcher_that_nobody_calls_starts_nothing(tmp_path, launch, number):
    helper = (
        "import torch.multiprocessing as mp\n\ndef each(rank, fn):\n    fn(rank)\n\n"
        "def spread(fn, count):\n    mp.spawn(each, args=(fn,), nprocs=count)\n"
    )
    run = f"{START}from helper import *\n\n{GROUP}    print('begin')\n{launch}{RUN}"
    assert told(tmp_path, run=run, helper=helper) == number


@pytest.mark.parametrize(
    ("package", "test", "number"),
    [
        ("smdistributed.modelparallel.torch", "True", 1),
        ("smdistributed.modelparallel.torch", "smp.size() > 1", 1),
        ("horovod.torch", "args.loud", 1),
        ("smdistributed.modelparallel.torch", "smp.rank() == 0", 0),
        ("smdistributed.modelparallel.torch", "smp.local_rank() == 0", 0),
        ("somewhere.torch", "True", 0),
    ],
)
def test_model_parallelism_of_sagemaker_starts_several_processes(tmp_path, package, test, number):
    run = f"import {package} as smp\n\ndef main(args):\n    smp.init()\n    if {test}:\n        print('begin')\n{RUN}"
    assert told(tmp_path, run=run) == number
