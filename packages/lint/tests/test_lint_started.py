"""Which programs and tests mean several processes, and what follows from it: the group that helpers start, unit tests,
tests of two parts, loggers and output that are turned off, handlers of exceptions.
"""

import textwrap

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

GROUP = "import torch.distributed as dist\n\ndef start():\n    dist.init_process_group('nccl')\n"
OPTIONS = (
    "from group import start\n\nclass Options:\n    def parse(self):\n        self.join()\n\n    def join(self):\n"
)
TRAIN = "import torch\nfrom options import Options\n\ndef main():\n"
TRAIN += "    args = Options().parse()\n    print('begin')\n\nmain()\n"
WORK = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def train(model):
    model = DDP(model)
    print('training')

def score(model):
    print('scoring')
"""
RUN = "import torch.distributed as dist\nfrom work import train\n\ndist.init_process_group('nccl')\ntrain(None)\n"
SCORE = "from work import score\n\nscore(None)\n"
SPAWNS = "import torch.multiprocessing as mp\nfrom run import check\n\ndef test_it():\n    mp.spawn(check, nprocs=2)\n"
MAIN = "import torch.distributed as dist\n\ndef check(rank):\n    main()\n\n"
MAIN += "def main():\n    dist.init_process_group('nccl')\n"
BOTH = "    print('begin')\n\ndef alone():\n    print('alone')\n\nif __name__ == '__main__':\n    alone()\n    main()\n"
LOGGED = "import logging\nimport torch.distributed as dist\n\nlogging.basicConfig(level=logging.INFO)\n"
LOGGED += (
    "logger = logging.getLogger(__name__)\n\ndef main():\n    dist.init_process_group('nccl')\n    logger.info('a')\n"
)
HUSH = (
    "import os\nimport sys\nimport torch.distributed as dist\n\ndef hush():\n    sys.stdout = open(os.devnull, 'w')\n\n"
)
HUSH += "def main(rank):\n    dist.init_process_group('nccl')\n    print('begin')\n"
HUGGING = (
    "import logging\nfrom transformers import Trainer, TrainingArguments\n\nlogging.basicConfig(level=logging.INFO)\n"
)
HUGGING += "logger = logging.getLogger(__name__)\n\ndef main(place):\n    args = TrainingArguments('out'{})\n"
HUGGING += "    logger.{}('begin')\n    Trainer(None, args).train()\n\nmain(0)\n"


def told(tmp_path, files, rule="LS028"):
    """The line numbers of a rule in the first of some files."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    found = check_paths([str(tmp_path / next(iter(files)))], configure({}, rule, ""))
    return [finding.line for finding in found]


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        ({"train.py": TRAIN, "options.py": OPTIONS + "        start()\n", "group.py": GROUP}, [6]),
        ({"train.py": TRAIN, "options.py": OPTIONS + "        pass\n", "group.py": GROUP}, []),
        ({"train.py": TRAIN, "options.py": "from hidden import Options\n", "group.py": GROUP}, []),
        # what another program of one process runs
        ({"work.py": WORK, "run.py": RUN, "score.py": SCORE}, [7]),
        ({"work.py": WORK, "run.py": RUN}, [7]),
        ({"work.py": WORK, "run.py": RUN + "score = train\n", "score.py": RUN + SCORE}, [7, 10]),
        # what unit tests spawn is no program of the file
        ({"run.py": MAIN + BOTH, "tests/test_run.py": SPAWNS + "\ntest_it()\n"}, [8, 11]),
        ({"run.py": MAIN + BOTH, "test_run.py": SPAWNS + "\ntest_it()\n"}, [8, 11]),
        ({"run.py": MAIN + BOTH, "launch.py": SPAWNS + "\ntest_it()\n"}, [8]),
    ],
)
def test_programs_of_several_processes(tmp_path, files, lines):
    assert told(tmp_path, files) == lines


@pytest.mark.parametrize(
    ("test", "number"),
    [
        ("args.distributed", 1),
        ("not args.distributed", 0),
        ("args.distributed or args.verbose", 1),
        ("not args.distributed or args.verbose", 1),
        ("not args.distributed and args.verbose", 0),
        ("not (args.distributed or args.verbose)", 0),
        ("not (args.distributed and args.verbose)", 1),
        ("not (args.distributed and args.world_size > 1)", 0),
        ("not cfg.MODEL.DIST_TRAIN", 0),
        ("cfg.MODEL.DIST_TRAIN", 1),
        ("args.single_gpu", 0),
        ("not args.single_gpu", 1),
        ("args.single_process", 0),
    ],
)
def test_tests_of_several_processes(tmp_path, test, number):
    start = "import torch.distributed as dist\n\ndef main(args, cfg):\n    dist.init_process_group('nccl')\n"
    inside = f"{start}    if {test}:\n        print('begin')\n"
    after = f"{start}    if not ({test}):\n        return\n    print('begin')\n"
    assert len(told(tmp_path, {"run.py": inside})) == len(told(tmp_path, {"run.py": after})) == number


@pytest.mark.parametrize(
    ("rest", "number"),
    [
        ("    if rank != 0:\n        hush()\n", 0),
        ("    rank != 0 and hush()\n", 0),
        ("    if rank:\n        sys.stdout = open(os.devnull, 'w')\n", 0),
        ("", 0),
    ],
)
def test_output_that_is_turned_off(tmp_path, rest, number):
    assert len(told(tmp_path, {"run.py": HUSH + rest})) == number


@pytest.mark.parametrize(
    ("attempt", "number"),
    [
        ("except KeyError as error:\n        print('none', error)", 0),
        ("except KeyError:\n        print('none')\n        raise", 0),
        ("except KeyError:\n        print('none')\n        return", 0),
    ],
)
def test_handlers_of_exceptions(tmp_path, attempt, number):
    start = "import torch.distributed as dist\n\ndef main(args):\n    dist.init_process_group('nccl')\n"
    text = f"{start}    try:\n        args['x']\n    {attempt}\n"
    assert len(told(tmp_path, {"run.py": text})) == number


@pytest.mark.parametrize(
    ("given", "name", "number"),
    [
        (", deepspeed=None", "info", 0),
        (", local_rank=-1", "info", 0),
        ("", "info", 0),
    ],
)
def test_trainers_that_are_told_their_place(tmp_path, given, name, number):
    assert len(told(tmp_path, {"run.py": HUGGING.format(given, name)})) == number


@pytest.mark.parametrize(
    ("caller", "number"),
    [
        ("if place.is_main:\n        setup()", 0),
        ("pass", 0),
    ],
)
def test_logging_that_other_scripts_set_up(tmp_path, caller, number):
    logs = "import logging\n\nlogger = logging.getLogger()\n\ndef setup():\n"
    logs += "    logger.addHandler(logging.StreamHandler())\n    logger.setLevel(logging.INFO)\n"
    run = "import torch.distributed as dist\nfrom logs import logger, setup\n\ndef main(place):\n"
    run += f"    dist.init_process_group('nccl')\n    {caller}\n    logger.info('begin')\n\nmain(None)\n"
    other = "from logs import setup\n\nsetup()\n"
    assert len(told(tmp_path, {"run.py": run, "logs.py": logs, "convert.py": other})) == number


@pytest.mark.parametrize(
    ("before", "after", "number"),
    [
        ("if rank != 0:\n        dist.barrier()", "if rank == 0:\n        dist.barrier()", 0),
        ("pass", "if rank != 0:\n        dist.barrier()", 1),
        ("pass", "pass", 1),
    ],
)
def test_barriers_before_a_folder(tmp_path, before, after, number):
    text = "import os\nimport torch.distributed as dist\n\ndef main(rank, out):\n    dist.init_process_group('nccl')\n"
    text += f"    {before}\n    if not os.path.exists(out):\n        os.makedirs(out)\n    {after}\n"
    assert len(told(tmp_path, {"run.py": text}, "LS025")) == number


@pytest.mark.parametrize(
    ("leave", "number"),
    [
        ("if rank == 0 and bad:\n            return -1", 1),
        ("if rank == 0 and bad:\n            break", 1),
        ("if bad:\n            return -1", 0),
        ("if rank == 0:\n            print('x')", 0),
    ],
)
def test_a_rank_that_returns_out_of_the_training(tmp_path, leave, number):
    text = "from torch.nn.parallel import DistributedDataParallel as DDP\n\n"
    text += "def main(rank, model, loader, optimizer, bad):\n    model = DDP(model)\n"
    text += "    for x in loader:\n        model(x).backward()\n        optimizer.step()\n"
    assert len(told(tmp_path, {"run.py": f"{text}        {leave}\n"}, "LS037")) == number


@pytest.mark.parametrize(
    ("held", "number"),
    [("FileLock('data.lock')", 0), ("locks.held('data')", 1), ("self.block", 1), ("portalocker.Lock('data')", 0)],
)
def test_a_download_that_one_process_after_the_other_makes(tmp_path, held, number):
    text = "import torch.distributed as dist\nfrom torchvision.datasets import MNIST\n\n"
    text += f"def main(self, rank):\n    dist.init_process_group('nccl')\n    with {held}:\n"
    text += "        return MNIST('data', download=True)\n"
    assert len(told(tmp_path, {"run.py": text}, "LS025")) == number
