"""Which ranks run a statement: tests of the rank under other names, and programs that others start."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

HEAD = """
import logging
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
"""
PRINTS = configure({}, "LS028", "")


def found(text, config=PRINTS):
    return [finding.rule for finding in check_text(HEAD + text, config)]


def script(lines, parameters="rank"):
    """A script of several processes with the given lines in it."""
    body = "".join(f"    {line}\n" for line in lines)
    return f'def main({parameters}):\n    dist.init_process_group("nccl")\n{body}    dist.destroy_process_group()\n'


# Lines that end in an open block; the print in it is told or not.
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
    "the first of the GPUs": ["if given.gpu == given.gpus[0]:"],
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


def test_a_parameter_that_only_rank_0_fills_later_is_no_test_of_the_rank():
    lines = ["if path is not None:", "    print('hello')", "if rank == 0:", "    path = 'x'"]
    assert found(script(lines, "rank, path")) == ["LS028"]


@pytest.mark.parametrize(("name", "rules"), [("number", []), ("size", ["LS028"])])
def test_the_number_of_a_spawned_process(name, rules):
    text = f"""
def work(number, size):
    dist.init_process_group("nccl", rank=number, world_size=size)
    if {name} == 0:
        print("hello")
    dist.destroy_process_group()

def main():
    mp.spawn(work, args=(2,), nprocs=2)
"""
    assert found(text) == rules


ASKED = """
def once(function):
    def inner(*values):
        {decorates}
            return function(*values)
    return inner

def place():
    {gives}

def first():
    {tells}

@once
def show():
    print("hello")

def main():
    dist.init_process_group("nccl")
    show()
    if place() == 0:
        print("hello")
    if first():
        print("hello")
    dist.destroy_process_group()
"""
TOLD = {
    "decorates": "if dist.get_rank() == 0:",
    "gives": "return dist.get_rank() if dist.is_initialized() else 0",
    "tells": "if dist.is_initialized() and dist.get_rank() > 0: return False\n    return True",
}


@pytest.mark.parametrize(
    ("other", "number"),
    [
        ({}, 0),
        ({"gives": "if dist.is_initialized():\n        return dist.get_rank()\n    return 0"}, 0),
        ({"decorates": "for _ in range(2):"}, 1),
        ({"gives": "return dist.get_world_size() if dist.is_initialized() else 0"}, 1),
        ({"tells": "if dist.is_initialized() and dist.get_world_size() > 8: return False\n    return True"}, 1),
        ({"tells": "return True"}, 1),
    ],
)
def test_functions_that_tell_the_rank(other, number):
    assert len(found(ASKED.format(**{**TOLD, **other}))) == number


CONFIG = """
from types import SimpleNamespace

def options():
    conf = SimpleNamespace()
    conf.place = {place}
    return conf

def fit(conf):
    dist.init_process_group("nccl")
    if conf.place == 0:
        print("hello")
    show({given})
    dist.destroy_process_group()

def show(number):
    if number == 0:
        print("hello")

fit(options())
"""


@pytest.mark.parametrize(
    ("place", "given", "number"),
    [
        ("int(os.environ['LOCAL_RANK'])", "dist.get_rank()", 0),
        ("int(os.environ['LOCAL_RANK'])", "len(conf)", 1),
        ("int(os.environ['SIZE'])", "dist.get_rank()", 1),
    ],
)
def test_a_rank_that_is_handed_on_under_another_name(place, given, number):
    assert len(found(CONFIG.format(place=place, given=given))) == number


METHOD = """
class Trainer:
    def fit(self):
        print("hello")

def work(rank, kind):
    dist.init_process_group("nccl", rank=rank)
    trainer = kind.make()
    trainer.{called}()
    dist.destroy_process_group()

def main():
    mp.spawn(work, args=(Trainer,), nprocs=2)
"""


@pytest.mark.parametrize(("called", "rules"), [("fit", ["LS028"]), ("other", [])])
def test_a_method_that_spawned_processes_call_by_its_name(called, rules):
    assert found(METHOD.format(called=called)) == rules


STARTED = {
    "a place from the environment": ("place = int(os.environ.get('LOCAL_RANK', 0))", True),
    "a number of processes from the environment": ("size = os.environ['WORLD_SIZE']", True),
    "getenv": ("place = os.getenv('LOCAL_RANK')", True),
    "what is only set": ("os.environ['WORLD_SIZE'] = '1'", False),
    "another variable": ("place = os.environ.get('HOME')", False),
    "a comment": ("pass  # os.environ['LOCAL_RANK']", False),
}


@pytest.mark.parametrize("name", STARTED)
def test_a_program_that_its_launcher_starts_several_times(name):
    line, several = STARTED[name]
    text = f"def main(args):\n    {line}\n    print('hello')\n    Trainer(args).train()\n"
    assert found("from transformers import Trainer\n\n" + text) == ["LS028"] * several


def test_a_model_that_is_handed_to_deepspeed():
    text = "import {0}\n\ndef main(model):\n    engine, *_ = {0}.initialize(model=model)\n    print('hello')\n"
    assert found(text.format("deepspeed")) == ["LS028"]
    assert found(text.format("colors")) == []


LOGGED = """
logger = logging.getLogger()

def setup(rank):
    {setup}

def main(rank):
    dist.init_process_group("nccl")
    setup(rank)
    logger.info("hello")
    dist.destroy_process_group()
"""
SETUPS = {
    "a level by the rank": ("logging.basicConfig(format='%(message)s', level=20 if rank == 0 else 40)", False),
    "a handler on one rank": ("if rank == 0: logger.addHandler(logging.StreamHandler())", False),
    "a handler that goes by the rank": (
        "logger.addHandler(logging.StreamHandler()); logger.disabled = rank > 0",
        False,
    ),
    "nothing": ("pass", False),
}


@pytest.mark.parametrize("name", SETUPS)
def test_logging_that_is_set_up_alike_on_every_rank(name):
    setup, told = SETUPS[name]
    assert found(LOGGED.format(setup=setup)) == ["LS028"] * told


WAYS = {
    "pprint": ("from pprint import pprint", "pprint(score)", True),
    "above a bar": ("from tqdm import tqdm", "tqdm.write('hello')", True),
    "a model of peft": ("", "score.print_trainable_parameters()", True),
    "into a file": ("from pprint import pprint", "pprint(score, stream=score.file)", False),
    "a function of the same name": ("def pprint(score):\n    return score", "pprint(score)", False),
    "a bar": ("from tqdm import tqdm", "tqdm([1])", False),
}


@pytest.mark.parametrize("name", WAYS)
def test_other_ways_to_print(name):
    first, line, told = WAYS[name]
    assert found(f"{first}\n\n" + script([line], "score")) == ["LS028"] * told
    assert found(f"{first}\n\n" + script(["if score.rank == 0:", f"    {line}"], "score")) == []


def test_a_script_in_a_project_where_another_one_prints(tmp_path):
    (tmp_path / "pyproject.toml").write_text("")
    for name, start in (("one", "place = os.environ['LOCAL_RANK']"), ("two", "place = 0")):
        (tmp_path / f"{name}.py").write_text(f"{HEAD}\ndef main():\n    {start}\n    print(place)\n\nmain()\n")
    paths = [str(tmp_path / f"{name}.py") for name in ("one", "two")]
    assert [finding.path for finding in check_paths(paths, PRINTS)] == [paths[0]]


SHOWN = "class Progress:\n    def {name}(self, i):\n        {line}\n"
SHOW = {
    "a display on one rank": ("display", "print(i)", "if rank == 0: bar.display(3)", False),
    "a display that asks for the rank": ("display", "if dist.get_rank() == 0: print(i)", "bar.display(3)", False),
    "a display that prints nothing": ("display", "self.i = i", "bar.display(3)", False),
    "what does something else": ("update", "print(i)", "bar.update(3)", False),
}


@pytest.mark.parametrize("name", SHOW)
def test_a_helper_of_another_file_that_only_prints(tmp_path, name):
    method, line, call, told = SHOW[name]
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "helper.py").write_text(HEAD + SHOWN.format(name=method, line=line))
    text = "from helper import Progress\n\n" + script(["bar = Progress()", call])
    (tmp_path / "train.py").write_text(HEAD + text)
    found = check_paths([str(tmp_path / "train.py")], PRINTS)
    assert [finding.rule for finding in found] == ["LS028"] * told
