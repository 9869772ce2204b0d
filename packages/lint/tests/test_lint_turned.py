"""LS028: flags that the other ranks turn off, ranks that helpers give back in parts, trackers, and what never runs."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


def lines(text, code="LS028"):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


FLAG = """
import torch.distributed as dist

class Trainer:
    def __init__(self, args):
        dist.init_process_group("nccl")
{body}
    def fit(self):
        if {test}:
            print("fit")

Trainer(1).fit()
"""


@pytest.mark.parametrize(
    ("body", "test", "told"),
    [
        ("self.v = True\nif args.dist:\n    if dist.get_rank() != 0:\n        self.v = False", "self.v", False),
        ("self.v = args.v\nif dist.get_rank() != 0:\n    self.v = False", "self.v", False),
        ("self.q = args.q\nif dist.get_rank() != 0:\n    self.q = True", "not self.q", False),
        ("self.q = args.q\nif dist.get_rank() != 0:\n    self.q = True", "self.q", True),
        ("self.v = True\nif args.dist:\n    if dist.get_rank() != 0:\n        self.v = False", "not self.v", True),
        ("if dist.get_rank() != 0:\n    self.v = False\nself.v = args.v", "self.v", True),
        ("self.v = True\nif args.quiet:\n    self.v = False", "self.v", True),
    ],
)
def test_a_flag_that_the_other_ranks_turn_off(body, test, told):
    indented = "\n".join(f"        {line}" for line in body.split("\n"))
    assert bool(lines(FLAG.format(body=indented, test=test))) is told


PARTS = """
import torch
import torch.distributed as dist

def set_up(args):
    if args.rank != -1:
        dist.init_process_group("nccl")
        {name} = {value}
    else:
        {name} = True
    return {given}

def main(args):
    {taken} = set_up(args)
    if {test}:
        print("begin")
"""


@pytest.mark.parametrize(
    ("value", "given", "taken", "test", "told"),
    [
        ("dist.get_rank() == 0", "first, 1", "default, count", "default", False),
        ("dist.get_rank() == 0", "{'first': first, 'count': 1}", "env", "env['first']", False),
        ("dist.get_rank() == 0", "dict(count=1)", "env", "env['master_process']", False),
        ("dist.get_rank() == 0", "(first, 1)", "env", "env[0]", False),
        ("dist.get_rank() == 0", "first, 1", "count, default", "default", True),
        ("args.fp16", "first, 1", "default, count", "default", True),
        (
            "dist.get_rank() == 0",
            "first, 1",
            "default, count = set_up(args)\n    default = args.fp16\n    other",
            "default",
            True,
        ),
        (
            "dist.get_rank() == 0",
            "{'first': first}",
            "env = set_up(args)\n    env['first'] = args.fp16\n    other",
            "env['first']",
            True,
        ),
        (
            "dist.get_rank() == 0",
            "{'count': 1}",
            "env = set_up(args)\n    env['first'] = args.rank == 0\n    other",
            "env['first']",
            False,
        ),
        ("args.fp16", "{'first': first, 'count': 1}", "env", "env['first']", True),
        ("dist.get_rank() == 0", "{'first': first, 'count': 1}", "env", "env['count']", True),
    ],
)
def test_a_helper_gives_back_who_is_first_among_other_things(value, given, taken, test, told):
    text = PARTS.format(name="first", value=value, given=given, taken=taken, test=test)
    assert bool(lines(text)) is told


ASKED = """
import torch.distributed as dist

class Trainer:
    def __init__(self):
        dist.init_process_group("nccl")
        self.rank = dist.get_rank()

    def due(self, step):
        {first}
        if step % 10 == 0:
            return True
        return False

    def fit(self):
        for step in range(100):
            if self.due(step):
                print(step)

Trainer().fit()
"""


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ("if self.rank != 0: return False", False),
        ("if step < 5: return False", True),
        ("if step < 5 and self.rank != 0: return True", True),
    ],
)
def test_a_method_that_turns_the_other_ranks_away_first(first, told):
    assert bool(lines(ASKED.format(first=first))) is told


TRACKED = """
import torch.distributed as dist
{imports}
def step(loss, {given}):
    {fed}

def main(args):
    dist.init_process_group("nccl")
    {made}
    step(1, {given})
"""


@pytest.mark.parametrize(
    ("imports", "given", "fed", "made", "found"),
    [
        (
            "",
            "wandb",
            "if wandb: wandb.log({'a': loss})",
            "wandb = None\n    if dist.get_rank() == 0:\n        import wandb",
            0,
        ),
        ("", "other", "other.log({'a': loss})", "other = None", 0),
        (
            "import wandb",
            "run",
            "run.log({'a': loss})",
            "run = wandb.init(mode='disabled' if dist.get_rank() else 'online')",
            0,
        ),
        ("import wandb", "run", "run.log({'a': loss})", "run = wandb.init(group='a', name=str(args.rank))", 1),
        ("import wandb", "run", "run.log({'a': loss})", "run = wandb.init() if args.rank == 0 else None", 0),
    ],
)
def test_a_tracker_that_comes_as_an_argument_or_as_a_run(imports, given, fed, made, found):
    assert len(lines(TRACKED.format(imports=imports, given=given, fed=fed, made=made))) == found


@pytest.mark.parametrize(
    ("test", "does", "number"),
    [
        ("dist.get_rank() == 0", "import wandb", 0),
        ("args.log", "pass", 0),  # it stays None
    ],
)
def test_a_tracker_that_one_rank_imports(test, does, number):
    text = "import torch.distributed as dist\n\ndef main(args):\n    dist.init_process_group('nccl')\n"
    text += (
        f"    wandb = None\n    if {test}:\n        {does}\n    if wandb is not None:\n        wandb.log({{'a': 1}})\n"
    )
    assert len(lines(text)) == number


@pytest.mark.parametrize(
    ("test", "found"),
    [("False", [7]), ("0", [7]), ("True", [5]), ("count > 2", [5, 7])],
)
def test_what_never_runs_is_told_nothing_of(test, found):
    start = "import torch.distributed as dist\ndist.init_process_group('nccl')\ncount = dist.get_world_size()\n"
    assert lines(f"{start}if {test}:\n    print(1)\nelse:\n    print(2)\n") == found


@pytest.mark.parametrize(
    ("test", "idle", "line"),
    [
        ("False", "torch.manual_seed(0)", 4),
        ("0", "torch.manual_seed(0)", 4),
        ("False", "model = torch.nn.Linear(3, 3)", 4),
        ("args.seed", "torch.manual_seed(0)", None),
        ("True", "torch.manual_seed(0)", None),
    ],
)
def test_what_never_runs_mends_nothing(test, idle, line):
    text = f"import torch\nif {test}:\n    {idle}\nmodel = torch.nn.Linear(2, 2)\n"
    text += "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nfor x in loader:\n    optimizer.zero_grad()\n"
    text += "    model(x).sum().backward()\n    optimizer.step()\n"
    assert [f.line for f in check_text(text, configure({}, "LS008", ""))] == ([line] if line else [])


STARTS = """
import torch.distributed as dist

def set_up(rank):
    {start}

def work(rank, count):
    set_up(rank)
    print("begin")
"""


@pytest.mark.parametrize(("start", "told"), [("dist.init_process_group('nccl', rank=rank)", True), ("pass", False)])
def test_a_function_that_starts_the_group_is_where_a_process_begins(start, told):
    text = f"{STARTS.format(start=start)}\ndef other(rank):\n    dist.init_process_group('nccl')\n"
    assert bool(lines(text)) is told


FABRIC = """
import torch
import lightning as L

def main(model):
    fabric = L.Fabric({given})
    fabric.launch()
    {line}

main(1)
"""


@pytest.mark.parametrize(
    ("given", "line", "told"),
    [
        ("", "print(1)", True),
        ("devices=4", "print(1)", True),
        ("devices=1", "print(1)", False),
        ("devices=[1]", "print(1)", False),
        ("devices=[0, 1]", "print(1)", True),
        ("devices=1, num_nodes=1", "print(1)", False),
        ("devices=1, num_nodes=2", "print(1)", True),
        ("", "fabric.print(1)", False),
        ("", "if fabric.is_global_zero: print(1)", False),
    ],
)
def test_every_process_of_a_fabric_speaks(given, line, told):
    assert bool(lines(FABRIC.format(given=given, line=line))) is told


BASE = """
class Base:
    def fit(self, loader):
        {call}

    def step(self, loader):
        raise NotImplementedError
"""
DERIVED = """
import torch
from base import Base

class Trainer(Base):
    def step(self, loader):
        print(len(loader))
"""
OF_CLASSES = """
import torch.distributed as dist
from trainer import Trainer

dist.init_process_group("nccl")
Trainer().fit([])
"""


@pytest.mark.parametrize(
    ("call", "told"), [("self.step(loader)", True), ("if self.rank == 0: self.step(loader)", False), ("pass", False)]
)
def test_a_method_that_a_parent_class_calls(tmp_path, call, told):
    (tmp_path / "setup.cfg").write_text("")
    (tmp_path / "base.py").write_text(f"import torch.distributed as dist\n{BASE.format(call=call)}")
    (tmp_path / "trainer.py").write_text(DERIVED)
    (tmp_path / "train.py").write_text(OF_CLASSES)
    found = check_paths([str(tmp_path / "trainer.py")], configure({}, "LS028", ""))
    assert bool(found) is told


ENGINE = """
import deepspeed
import torch

def work(config, net):
    engine, *_ = deepspeed.initialize(model=net)
    print("begin")

def start(config, net):
    work(config, net)
"""


@pytest.mark.parametrize(("wrapped", "told"), [(ENGINE, True), (ENGINE.replace("deepspeed", "other"), False)])
def test_a_script_that_leaves_deepspeed_to_another_file(tmp_path, wrapped, told):
    (tmp_path / "setup.cfg").write_text("")
    (tmp_path / "engine.py").write_text(wrapped)
    (tmp_path / "train.py").write_text(
        "import torch\nfrom engine import start\n\nif __name__ == '__main__':\n    start({}, torch.nn.Linear(2, 2))\n"
    )
    assert bool(check_paths([str(tmp_path / "engine.py")], configure({}, "LS028", ""))) is told
