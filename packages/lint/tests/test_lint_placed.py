"""LS028, LS018: what transformers' training arguments say of the processes, and DeepSpeed's engine that saves."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

TRAINER = """
import logging
import sys
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

logger = logging.getLogger(__name__)
"""


def lines(text, code):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("deepspeed='ds_config.json'", True),
        ("deepspeed=options.deepspeed", True),
        ("local_rank=options.local_rank", True),
        ("deepspeed=None", False),
        ("deepspeed=''", False),
        ("local_rank=-1", False),
        ("report_to='none'", False),
    ],
)
def test_a_trainer_that_is_given_a_file_for_deepspeed_runs_in_several_processes(given, told):
    text = f"{TRAINER}args = TrainingArguments('out', {given})\nprint(args)\nTrainer(args=args).train()\n"
    assert bool(lines(text, "LS028")) == told


STARTED = "def main(options):\n    args = TrainingArguments('out', deepspeed=options.deepspeed)\n"


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("state.is_world_process_zero", False),
        ("trainer.is_world_process_zero()", False),
        ("state.is_local_process_zero", False),
        ("args.should_log", False),
        ("trainer.args.should_save", False),
        ("args.should_evaluate", True),
        ("should_save", True),
    ],
)
def test_the_names_that_transformers_has_for_the_main_process(test, told):
    text = f"{TRAINER}{STARTED}    if {test}:\n        print('begin')\n"
    assert bool(lines(text.replace("options)", "options, state, trainer, should_save)", 1), "LS028")) == told


BASIC = "logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(sys.stdout)])"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (f"{BASIC}; level = args.get_process_log_level(); logger.setLevel(level)", False),
        (f"{BASIC}; logger.setLevel(logging.INFO if args.should_log else logging.WARN)", False),
    ],
)
def test_a_level_that_the_training_arguments_give(setting, told):
    assert bool(lines(f"{TRAINER}{STARTED}    {setting}\n    logger.info('begin')\n", "LS028")) == told


ENGINE = """
import deepspeed
import torch

def main(model, rank, options):
    {name}, _, _, _ = deepspeed.initialize(model=model, args=options)
"""


@pytest.mark.parametrize("name", ["model_engine", "model"])
@pytest.mark.parametrize(("test", "told"), [("rank == 0", True), ("options.save", False)])
def test_an_engine_of_deepspeed_saves_on_every_rank(name, test, told):
    text = f"{ENGINE.format(name=name)}    if {test}:\n        {name}.save_checkpoint('out')\n"
    assert bool(lines(text, "LS018")) == told


@pytest.mark.parametrize(("other", "told"), [("rank == 0", True), ("True", False)])
def test_a_flag_that_may_hold_wherever_deepspeed_runs(other, told):
    flag = f"    main = rank == 0\n    if not options.ddp:\n        main = {other}\n"
    text = f"{ENGINE.format(name='engine')}{flag}    if main:\n        engine.save_checkpoint('out')\n"
    assert bool(lines(text, "LS018")) == told


BACKEND = """
import torch
from backends import distribute, is_root, using_deepspeed

def main(model):
    wrapped = distribute(model)

    def save(path):
        if {test}:
            wrapped.save_checkpoint(path)
        if is_root():
            torch.save(model.state_dict(), path)

    if is_root():
        save("last.pt")
"""


@pytest.mark.parametrize(("test", "told"), [("using_deepspeed", True), ("using_other", False)])
def test_a_backend_that_may_be_deepspeed_saves_on_every_rank(test, told):
    assert bool(lines(BACKEND.format(test=test), "LS018")) == told


def test_a_login_is_no_run_of_a_tracker():
    text = "import wandb\nimport torch.distributed as dist\n\ndef main():\n    dist.init_process_group('nccl')\n"
    assert lines(text + "    wandb.login()\n", "LS028") == []
    assert lines(text + "    wandb.init()\n", "LS028") == [6]


METERS = """
from collections import defaultdict
import torch
import torch.distributed as dist

def is_dist_avail_and_initialized():
    return dist.is_available() and dist.is_initialized()

class Value:
    def synchronize(self):
        if not is_dist_avail_and_initialized():
            return
        total = torch.tensor([1.0])
        {inner}

class Logger:
    def __init__(self):
        self.meters = defaultdict(Value)

    def synchronize(self):
        {loop}
            meter.synchronize()

def evaluate(model, loader):
    logger = Logger()
    logger.synchronize()

def main(model, loader):
    if dist.get_rank() == 0:
        evaluate(model, loader)
"""


@pytest.mark.parametrize(
    ("loop", "inner", "told"),
    [
        ("for meter in self.meters.values():", "dist.all_reduce(total)", True),
        ("for name, meter in self.meters.items():", "dist.all_reduce(total)", True),
        ("for meter in self.meters.values():", "print(total)", False),
        ("for meter in self.meters.keys():", "dist.all_reduce(total)", False),
    ],
)
def test_a_collective_of_the_items_of_a_table(loop, inner, told):
    assert bool(lines(METERS.format(loop=loop, inner=inner), "LS018")) is told
