"""LS028: loggers that are made quiet, set up twice or in a helper, with a file for each rank or a filter."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


def lines(text, code="LS028"):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


LOGGED = """
import logging
import torch.distributed as dist
logging.basicConfig(level=logging.INFO)
logger = logging.getLogger(__name__)

def main(model):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    {quiet}
    logger.info("begin")

main(1)
"""


@pytest.mark.parametrize(
    ("quiet", "told"),
    [
        ("if rank != 0: logger.disabled = True", False),
        ("logger.disabled = rank != 0", False),
        ("if rank != 0: logging.disable(logging.CRITICAL)", False),
        ("logging.disable(logging.CRITICAL) if rank else None", False),
        ("if rank != 0: logger.propagate = False", False),
        ("if rank != 0: logger.handlers.clear()", False),
        ("if rank != 0: logger.info = print", False),
        ("if rank != 0: logger.level = 50", False),
        ("if rank != 0: logging.root.handlers = []", False),
        ("voice = logging.getLogger(); voice.disabled = rank != 0", False),
        ("voice = logging.getLogger()\n    if rank != 0: voice.handlers = []", False),
    ],
)
def test_a_logger_that_is_made_quiet_on_the_other_ranks(quiet, told):
    assert bool(lines(LOGGED.format(quiet=quiet))) is told


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("LOGGER", False),
    ],
)
def test_a_logger_of_another_file_is_one_for_all_that_import_it(tmp_path, other, told):
    (tmp_path / "setup.cfg").write_text("")
    (tmp_path / "log.py").write_text(
        "import logging\nlogging.basicConfig(level=20)\n"
        "LOGGER = logging.getLogger('a')\nOTHER = logging.getLogger('b')\n"
    )
    (tmp_path / "data.py").write_text("import torch\nfrom log import LOGGER\n\ndef load():\n    LOGGER.info('load')\n")
    (tmp_path / "train.py").write_text(
        f"import torch.distributed as dist\nfrom log import {other}\nfrom data import load\n"
        "dist.init_process_group('nccl')\nif dist.get_rank() != 0:\n"
        f"    {other}.disabled = True\nload()\n"
    )
    found = check_paths([str(tmp_path / "data.py")], configure({}, "LS028", ""))
    assert bool(found) is told


TWICE = """
import logging
import torch.distributed as dist
{first}
logger = logging.getLogger(__name__)

def main(args):
    dist.init_process_group("nccl")
    logging.basicConfig(level=logging.INFO if args.local_rank in (-1, 0) else logging.WARN{more})
    logger.info("begin")
"""


@pytest.mark.parametrize(
    ("first", "more", "told"),
    [
        ("logging.basicConfig(level=logging.INFO)", ", force=True", False),
        ("logging.basicConfig(level=logging.WARN)", "", False),
        ("", "", False),
    ],
)
def test_only_the_first_set_up_of_logging_counts(first, more, told):
    assert bool(lines(TWICE.format(first=first, more=more))) is told


HELPER = """
import logging

def setup_logger(folder, rank{extra}):
    logging.basicConfig(filename=f"{{folder}}/log_{{rank}}.txt")
    logger = logging.getLogger()
    logger.setLevel({level})
    {console}
    return logger
"""
PATHS = """
import os.path as osp
import sys

def add_path(path):
    if path not in sys.path:
        sys.path.insert(0, path)

lib_path = osp.join(osp.dirname(__file__), "..", "{folder}")
add_path(lib_path)
"""
TOOL = """
import _init_paths
import torch.distributed as dist
from helpers.log import setup_logger

def main(args):
    dist.init_process_group("nccl")
    logger = setup_logger("out", args.rank{given})
    logger.info("begin")
"""
CONSOLE = "logger.addHandler(logging.StreamHandler())"


@pytest.mark.parametrize(
    ("folder", "extra", "level", "console", "given", "told"),
    [
        ("none", "", "20", CONSOLE, "", False),
        ("lib", "", "20", "pass", "", False),
        ("lib", ", level", "level", CONSOLE, ", 20 if args.rank == 0 else 40", False),
        ("lib", "", "20 if rank == 0 else 40", CONSOLE, "", False),
    ],
)
def test_a_file_for_each_rank_keeps_none_from_the_screen(tmp_path, folder, extra, level, console, given, told):
    for name in ("lib/helpers", "tools"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "setup.cfg").write_text("")
    (tmp_path / "lib" / "helpers" / "__init__.py").write_text("")
    (tmp_path / "lib" / "helpers" / "log.py").write_text(HELPER.format(extra=extra, level=level, console=console))
    (tmp_path / "tools" / "_init_paths.py").write_text(PATHS.format(folder=folder))
    (tmp_path / "tools" / "train.py").write_text(TOOL.format(given=given))
    found = check_paths([str(tmp_path / "tools" / "train.py")], configure({}, "LS028", ""))
    assert bool(found) is told


PROJECT = """
import logging
import sys

class RankFilter(logging.Filter):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def filter(self, record):
        return self.number == 0

class Log(logging.Logger):
    def __init__(self, number=0):
        super().__init__("log", 20)
        handler = logging.StreamHandler(sys.stdout)
        {keep}
        self.addHandler(handler)
"""


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        ("handler.addFilter(RankFilter(number))", False),
    ],
)
def test_a_logger_of_the_projects_own_with_a_filter(tmp_path, keep, told):
    (tmp_path / "log.py").write_text(PROJECT.format(keep=keep))
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\nfrom log import Log\n"
        "dist.init_process_group('nccl')\nlog = Log(number=dist.get_rank())\nlog.info('begin')\n"
    )
    assert bool(check_paths([str(tmp_path / "train.py")], configure({}, "LS028", ""))) is told


HANDLED = """
import logging
import torch.distributed as dist
logging.basicConfig(level=logging.INFO)
logger = logging.getLogger(__name__)

def main(rank):
    dist.init_process_group("nccl")
    handler = logging.{handler}
    if rank == 0:
        handler.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    logger.info("begin")

main(1)
"""


@pytest.mark.parametrize(("handler", "told"), [("StreamHandler()", False)])
def test_the_level_of_a_file_says_nothing_of_the_screen(handler, told):
    assert bool(lines(HANDLED.format(handler=handler))) is told
