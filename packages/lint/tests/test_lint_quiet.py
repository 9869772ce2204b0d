"""LS028: a run that only one rank has, handlers that give up, the rank under other names, loggers of Accelerate."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

START = "import os\nimport logging\nimport torch.distributed as dist\nimport wandb\n"
RUN = "\nif __name__ == '__main__':\n    main(parse())\n"


def told(folder, **files):
    """The lines at which the rule is told in run.py, beside other files."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return [finding.line for finding in check_paths([str(folder / "run.py")], configure({}, "LS028", ""))]


STARTS = {
    "rank 0": "if args.rank == 0:\n        wandb.init(project='x')",
    "rank 0, with an option": "if args.wandb and dist.get_rank() == 0:\n        wandb.init(project='x')",
    "every rank": "wandb.init(project='x')",
    "every rank that has none": "if wandb.run is None:\n        wandb.init(project='x')",
    "out of sight": "pass",
}


@pytest.mark.parametrize(
    ("start", "test", "number"),
    [
        ("rank 0", "wandb.run is not None", 0),
        ("rank 0", "wandb.run", 0),
        ("rank 0", "args.loud and wandb.run is not None", 0),
        ("rank 0, with an option", "wandb.run is not None", 0),
        ("out of sight", "wandb.run is not None", 0),
        ("rank 0", "args.loud", 1),
        ("rank 0", "wandb.run is None", 1),
        ("every rank", "wandb.run is not None", 2),
        ("every rank that has none", "wandb.run is not None", 2),
    ],
)
def test_a_run_that_only_the_main_rank_has(tmp_path, start, test, number):
    body = f"    {STARTS[start]}\n    if {test}:\n        wandb.log(score(args))\n"
    run = f"{START}\ndef main(args):\n    dist.init_process_group('nccl')\n{body}{RUN}"
    assert len(told(tmp_path, run=run)) == number


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("if args.rank == 0:\n        begin(args)", 0),
        ("begin(args)", 2),
    ],
)
def test_a_run_that_another_file_starts(tmp_path, call, number):
    helper = "import wandb\n\ndef begin(args):\n    wandb.init(project=args.name)\n"
    body = f"    {call}\n    if wandb.run is not None:\n        wandb.log(score(args))\n        print('logged')\n"
    run = f"{START}from helper import begin\n\ndef main(args):\n    dist.init_process_group('nccl')\n{body}{RUN}"
    assert len(told(tmp_path, run=run, helper=helper)) == number


@pytest.mark.parametrize(("start", "number"), [("if args.rank == 0:\n        wandb.init()", 0), ("wandb.init()", 2)])
def test_a_run_of_a_program_of_one_process_beside(tmp_path, start, number):
    helper = "import wandb\n\ndef note(scores):\n    if wandb.run is not None:\n        wandb.log(scores)\n"
    single = "import wandb\nfrom helper import note\n\nwandb.init()\nnote(train())\n"
    begin = f"{START}from helper import note\n\ndef main(args):\n    dist.init_process_group('nccl')\n    {start}\n"
    run = f"{begin}    if wandb.run is not None:\n        wandb.log(args.scores)\n    note(args.scores)\n{RUN}"
    assert len(told(tmp_path, run=run, helper=helper, single=single)) == number


@pytest.mark.parametrize(
    ("handler", "number"),
    [
        ("except KeyError:\n        if args.loud:\n            print('none')\n        raise", 0),
        ("except KeyError as error:\n        if args.loud:\n            print(error)", 0),
        ("except RuntimeError as error:\n        if 'memory' in str(error):\n            print('full')", 0),
        ("except RuntimeError:\n        if full():\n            print('full')\n        else:\n            raise", 0),
        ("except RuntimeError:\n        if full():\n            print('full')\n            return", 0),
    ],
)
def test_a_test_in_a_handler_of_exceptions(tmp_path, handler, number):
    body = f"    try:\n        step(args)\n    {handler}\n"
    run = f"{START}\ndef main(args):\n    dist.init_process_group('nccl')\n{body}{RUN}"
    assert len(told(tmp_path, run=run)) == number


@pytest.mark.parametrize(
    ("call", "test", "number"),
    [
        ("train(place=args.local_rank)", "place == 0", 0),
        ("train(args.local_rank)", "not place", 0),
        ("train(int(os.environ['LOCAL_RANK']))", "place == 0", 0),
        ("where = args.local_rank\n    train(where)", "place == 0", 0),
        ("train(args.local_rank)\n    train(args.place)", "place == 0", 1),
        ("train(args.place)", "place == 0", 1),
        ("train(*args.all)", "place == 0", 1),
        ("train()", "place == 0", 1),
        ("train(args.local_rank)", "place is not None", 1),
    ],
)
def test_a_parameter_that_is_filled_with_the_rank(tmp_path, call, test, number):
    train = f"def train(place=0):\n    if {test}:\n        print('begin')\n"
    run = f"{START}\n{train}\ndef main(args):\n    dist.init_process_group('nccl')\n    {call}\n{RUN}"
    assert len(told(tmp_path, run=run)) == number


@pytest.mark.parametrize(
    ("maker", "number"),
    [
        ("from accelerate.logging import get_logger\nlogger = get_logger(__name__)", 0),
    ],
)
@pytest.mark.parametrize("line", ["'batch a GPU: %d', batch_per_gpu", "f'rank {args.local_rank}'"])
def test_a_logger_of_accelerate_names_a_rank(tmp_path, maker, number, line):
    start = f"from accelerate import Accelerator\n{maker}\n\ndef main(args):\n    accelerator = Accelerator()\n"
    run = f"import logging\n{start}    logger.info({line})\n{RUN}"
    assert len(told(tmp_path, run=run)) == number


@pytest.mark.parametrize(
    ("test", "number"),
    [
        ("args.lora_rank > 0", 1),
        ("args.batch_per_gpu > 0", 1),
        ("args.gpu > 0", 0),
        ("args.local_rank > 0", 0),
        ("args.node_rank > 0", 0),
    ],
)
def test_the_rank_of_a_matrix_is_no_process(tmp_path, test, number):
    body = f"    dist.init_process_group('nccl')\n    if {test}:\n        print('begin')\n"
    run = f"{START}\ndef main(args):\n{body}{RUN}"
    assert len(told(tmp_path, run=run)) == number


@pytest.mark.parametrize(
    ("test", "number"),
    [
        ("args.device == 'cuda:0'", 0),
        ("args.device == torch.device('cuda:0')", 0),
        ("str(args.device) == 'cuda:0'", 0),
        ("args.device.index == 0", 0),
        ("torch.cuda.current_device() == 0", 0),
        ("args.device != 'cuda:0'", 0),  # on all but one
        ("args.device == 'cuda'", 1),
        ("args.device != 'cpu'", 1),
        ("args.index == 0", 1),
    ],
)
def test_the_first_gpu_is_the_main_ranks(tmp_path, test, number):
    body = f"    dist.init_process_group('nccl')\n    if {test}:\n        print('begin')\n"
    run = f"{START}import torch\n\ndef main(args):\n{body}{RUN}"
    assert len(told(tmp_path, run=run)) == number


PRINTER = """
import torch.distributed as dist

def print_once(text):
    if dist.is_initialized():
        if {test}:
            print(text)
    else:
        print(text)
"""


@pytest.mark.parametrize(
    ("test", "number"),
    [
        ("dist.get_rank() == 0", 0),
    ],
)
def test_a_printer_of_another_file_that_asks_for_several_processes(tmp_path, test, number):
    body = "    dist.init_process_group('nccl')\n    print_once('x')\n"
    run = f"{START}from helper import *\n\ndef main(args):\n{body}{RUN}"
    assert len(told(tmp_path, run=run, helper=PRINTER.format(test=test))) == number
