"""The forms in which one pitfall comes, and code of the same form that is right: each is told or silent."""

import pytest
from rule_examples import examples

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

HEAD = """
import os
import shutil
import subprocess
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel as DDP
"""


def ranks(*lines, parameters="rank", before="", after=""):
    """A script of several processes with the given lines in its main function."""
    body = "".join(f"    {line}\n" for line in lines)
    start = "\nif __name__ == '__main__':\n    main(0)\n"
    return f"{before}\ndef main({parameters}):\n    dist.init_process_group('nccl')\n{body}{after}{start}"


ENDED = "    dist.destroy_process_group()\n"
WAIT = "def start(rank):\n    dist.init_process_group('nccl'{more})\n    {first}\n    {second}\n"
BEGIN = "\ndef main(rank):\n    {line}\n    torch.cuda.set_device(rank)\n" + ENDED
WRAPPED = "\ndef main(rank, given):\n    dist.init_process_group('nccl')\n    model = {made}\n    {line}\n" + ENDED
NET = (
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.head = nn.Linear(2, 2)\n"
)
PARSER = "import argparse\nparser = argparse.ArgumentParser()\n"
FSDP = "from torch.distributed.fsdp import FullyShardedDataParallel as {name}\n\ndef wrap(model):\n    return {call}\n"
ADAMW = "from {package} import AdamW\n\ndef make(model):\n    return AdamW({groups}, lr=1e-3{more})\n"
GATHERED = """
def make(model):
    given = list({first}) + list({second})
    return torch.optim.AdamW(given, lr=1e-3)
"""
LOSS = """
import numpy as np

class Loss(nn.Module):
    def forward(self, x):
        {line}
        return x.mean()

def train(model, loader, optimizer):
    criterion = Loss()
    for x in loader:
        optimizer.zero_grad()
        loss = criterion.forward(model(x.cuda()))
        loss.backward()
        optimizer.step()
"""
# By rule: a name, the script, and whether it is told.
FORMS = {
    "LS019": {
        "nothing": (ranks(), True),
        "an end of something else": (ranks("rank.destroy()"), True),
        "a helper that is not here and only measures": (ranks(before="from helpers import AverageMeter"), True),
        "an end": (ranks(after=ENDED), False),
        "an end in a helper": (ranks("end()", before="def end():\n    dist.destroy_process_group()\n"), False),
        "a helper that is not here and may end it": (ranks("finish()", before="from helpers import finish"), False),
        "an end in a finally": (
            ranks("try:\n        run()\n    finally:\n        dist.destroy_process_group()"),
            False,
        ),
    },
    "LS020": {
        "torch's AdamW decays by default": (
            ADAMW.format(package="torch.optim", groups="model.parameters()", more=""),
            True,
        ),
        "that of transformers, told to": (
            ADAMW.format(package="transformers", groups="model.parameters()", more=", weight_decay=0.1"),
            True,
        ),
        "groups that differ in their rate": (
            ADAMW.format(package="torch.optim", groups="[{'params': model.parameters(), 'lr': 1}]", more=""),
            True,
        ),
        "that of transformers does not": (
            ADAMW.format(package="transformers", groups="model.parameters()", more=""),
            False,
        ),
        "none": (
            ADAMW.format(package="torch.optim", groups="model.parameters()", more=", weight_decay=0"),
            False,
        ),
        "two models' parameters": (
            ADAMW.format(
                package="torch.optim", groups="list(model.a.parameters()) + list(model.b.parameters())", more=""
            ),
            True,
        ),
        "two models' parameters, unpacked": (
            ADAMW.format(package="torch.optim", groups="[*model.a.parameters(), *model.b.parameters()]", more=""),
            True,
        ),
        "two models' parameters under a name": (
            GATHERED.format(first="model.a.parameters()", second="model.b.parameters()"),
            True,
        ),
        "two models' parameters, one of them by kind": (
            GATHERED.format(first="model.a.parameters()", second="p for p in model.b.parameters() if p.ndim > 1"),
            False,
        ),
        "parameters and what is not known": (
            ADAMW.format(package="torch.optim", groups="list(model.a.parameters()) + model.rest()", more=""),
            False,
        ),
        "two models' parameters without a decay": (
            ADAMW.format(
                package="torch.optim",
                groups="[*model.a.parameters(), *model.b.parameters()]",
                more=", weight_decay=0",
            ),
            False,
        ),
        "groups with a decay of their own": (
            ADAMW.format(package="torch.optim", groups="[{'params': model.parameters(), 'weight_decay': 0}]", more=""),
            False,
        ),
    },
    "LS036": {
        "in the model's forward": (LOSS.format(line="self.seen.append(x.abs().max().item())"), True),
        "a list in the model's forward": (LOSS.format(line="parts = x.detach().cpu().tolist()"), True),
        "a loss that is an object": (LOSS.format(line="self.total += x.sum().cpu()"), True),
        "a number of the layer's own in its forward": (LOSS.format(line="x = x * self.scale"), False),
        "a tensor kept in the model's forward": (LOSS.format(line="self.seen.append(x.detach())"), False),
        "numpy's numbers in the model's forward": (LOSS.format(line="x = x * np.float32(2).item()"), False),
    },
    "LS024": {
        "waits in the helper": (
            WAIT.format(more="", first="dist.barrier()", second="pass") + BEGIN.format(line="start(rank)"),
            True,
        ),
        "sums in the helper": (
            WAIT.format(more="", first="x = torch.ones(1)", second="dist.all_reduce(x)")
            + BEGIN.format(line="start(rank)"),
            True,
        ),
        "counts in the helper": (
            WAIT.format(more="", first="pass", second="dist.broadcast_object_list([rank])")
            + BEGIN.format(line="start(rank)"),
            True,
        ),
        "the helper sets the device": (
            WAIT.format(more="", first="torch.cuda.set_device(rank)", second="dist.barrier()")
            + BEGIN.format(line="start(rank)"),
            False,
        ),
        "the group knows its device": (
            WAIT.format(more=", device_id=rank", first="dist.barrier()", second="pass")
            + BEGIN.format(line="start(rank)"),
            False,
        ),
        "the helper asks for the rank": (
            WAIT.format(more="", first="print(dist.get_rank())", second="pass") + BEGIN.format(line="start(rank)"),
            False,
        ),
        "the device comes first": (
            WAIT.format(more="", first="dist.barrier()", second="pass")
            + BEGIN.format(line="torch.cuda.set_device(rank)\n    start(rank)"),
            False,
        ),
    },
    "LS027": {
        "in a test": (NET + WRAPPED.format(made="DDP(Net())", line="if model.head: return"), True),
        "in a with": (NET + WRAPPED.format(made="DDP(Net())", line="with model.frozen(): pass"), True),
        "in a loop's header": (
            NET + WRAPPED.format(made="DataParallel(Net())", line="for x in model.head: pass"),
            True,
        ),
        "of what it wraps": (NET + WRAPPED.format(made="DDP(Net())", line="if model.module.head: return"), False),
        "its own": (NET + WRAPPED.format(made="DDP(Net())", line="if model.training: return"), False),
        "set on the wrapper": (
            NET + WRAPPED.format(made="DDP(Net())", line="model.head = 1; print(model.head)"),
            False,
        ),
        "of what may be none": (
            NET + WRAPPED.format(made="DDP(Net()) if given else Net()", line="if model.head: return"),
            True,
        ),
        "of what is none where it is read": (
            NET + WRAPPED.format(made="DDP(Net()) if given else Net()", line="if not given: print(model.head)"),
            False,
        ),
    },
    "LS025": {
        "a path": (ranks("path = Path('x')", "path.mkdir()", before="from pathlib import Path"), True),
        "a path that is joined": (
            ranks("(Path('x') / 'y').mkdir(parents=True)", before="from pathlib import Path"),
            True,
        ),
        "an archive": (ranks("zipfile.ZipFile('x').extractall('y')", before="import zipfile"), True),
        "another archive": (ranks("shutil.unpack_archive('x.tar', 'y')"), True),
        "a command": (ranks("os.system('mkdir -p x; wget http://x/y.zip')"), True),
        "a command in words": (ranks("subprocess.run(['git', 'clone', 'x'], check=True)"), True),
        "a path that may be there": (ranks("Path('x').mkdir(exist_ok=True)", before="from pathlib import Path"), False),
        "a folder of somebody's own kind": (ranks("rank.store.mkdir('x')"), False),
        "an archive that one rank unpacks": (
            ranks("if rank == 0:\n        shutil.unpack_archive('x.tar', 'y')"),
            False,
        ),
        "an archive behind a test": (
            ranks("if not os.path.exists('y'):\n        shutil.unpack_archive('x.tar', 'y')"),
            False,
        ),
        "another command": (ranks("os.system('nvidia-smi')", "subprocess.run(['echo', 'wget'], check=True)"), False),
        "a command of one rank": (ranks("if rank == 0:\n        os.system('wget http://x/y.zip')"), False),
    },
    "LS029": {
        "FSDP under a name of its own": (FSDP.format(name="Sharded", call="Sharded(model)"), True),
        "only its methods": (FSDP.format(name="FSDP", call="FSDP.state_dict_type(model, 1)"), True),
        "the old launcher's module": ("from torch.distributed.launch import main\n", True),
        "the variable is only set": (
            PARSER + "parser.add_argument('--local_rank')\nos.environ['LOCAL_RANK'] = parser.parse_args().local_rank\n",
            True,
        ),
        "FSDP2": (
            "from torch.distributed.fsdp import fully_shard\n\ndef wrap(model):\n    return fully_shard(model)\n",
            False,
        ),
        "an import alone": (FSDP.format(name="FSDP", call="isinstance(model, FSDP)"), False),
        "the new launcher's module": ("from torch.distributed.run import main\n", False),
        "the variable is read too": (
            PARSER + "parser.add_argument('--local_rank', default=os.environ.get('LOCAL_RANK', 0))\n",
            False,
        ),
    },
}
CASES = [(code, name) for code, forms in FORMS.items() for name in forms]


@pytest.mark.parametrize(("code", "name"), CASES, ids=[f"{code} {name}" for code, name in CASES])
def test_the_form(code, name):
    script, told = FORMS[code][name]
    assert {finding.rule for finding in check_text(HEAD + script, configure({}, code, ""))} == (
        {code} if told else set()
    )


def test_fsdp_is_told_where_it_wraps():
    script = FSDP.format(name="FSDP", call="FSDP(model)") + "\ndef whole(model):\n    FSDP.summon_full_params(model)\n"
    found = check_text(HEAD + script, configure({}, "LS029", ""))
    assert [(HEAD + script).split("\n")[finding.line - 1].strip() for finding in found] == [
        "return FSDP(model)",
        "FSDP.summon_full_params(model)",
    ]


@pytest.mark.parametrize(("ends", "called"), [(False, False), (True, False), (True, True)])
def test_an_end_in_a_file_that_is_imported(tmp_path, ends, called):
    """What another script that starts this one calls besides is no part of this one, nor is what it never calls."""
    (tmp_path / "pyproject.toml").write_text("")
    helper = "def size():\n    return 1\n" + ("def end():\n    dist.destroy_process_group()\n" if ends else "")
    (tmp_path / "helper.py").write_text(HEAD + helper)
    (tmp_path / "other.py").write_text("from absent import finish\nfrom train import main\nmain(), finish()\n")
    script = "import helper\n\ndef main():\n    dist.init_process_group('nccl')\n    helper.size()\n"
    script += "    helper.end()\n\n" if called else "\n"
    script += "if __name__ == '__main__':\n    main()\n"
    (tmp_path / "train.py").write_text(HEAD + script)
    found = check_paths([str(tmp_path / "train.py")], configure({}, "LS019", ""))
    assert [finding.rule for finding in found] == ["LS019"] * (not called)


@pytest.mark.parametrize("code", ["LS003", "LS009", "LS037"])
def test_a_wrapper_under_a_name_of_its_own(code):
    bad = next(text for text in examples(code, "bad") if "DistributedDataParallel as DDP" in text)
    renamed = bad.replace("DDP", "Replicated")
    assert {finding.rule for finding in check_text(renamed, configure({}, code, ""))} == {code}
    other = renamed.replace("import DistributedDataParallel as", "import Module as").replace("init_process_group", "x")
    assert check_text(other, configure({}, code, "")) == []
