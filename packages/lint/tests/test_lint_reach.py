"""Pitfalls behind a helper, a method or an unusual form, each with the same code done right beside it."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

HEAD = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""
GROUP = """
def main(model, rank):
    dist.init_process_group("nccl")
"""
STEP = """
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
# What is told apart: the rule, the code with its pitfall, the piece that makes the difference and what is right there.
PAIRS = {
    "a tensor to the current GPU, which nobody chose": (
        "LS007",
        GROUP + "    for x in []:\n        model(x.cuda().to(rank))\n    dist.destroy_process_group()\n",
        "x.cuda().to(rank)",
        "x.to(rank)",
    ),
    "the global rank in an f-string beside the CPU": (
        "LS007",
        GROUP
        + "    number = int(os.environ['RANK'])\n"
        + "    device = torch.device(f'cuda:{number}' if torch.cuda.is_available() else 'cpu')\n"
        + "    dist.destroy_process_group()\n",
        "'RANK'",
        "'LOCAL_RANK'",
    ),
    "the global rank less one": (
        "LS007",
        GROUP
        + "    torch.cuda.set_device(f'cuda:{int(os.environ[\"RANK\"]) - 1}')\n"
        + "    dist.destroy_process_group()\n",
        '"RANK"',
        '"LOCAL_RANK"',
    ),
    "a sum of the loss over a length": (
        "LS016",
        "def train(model, loader, optimizer):\n    total = 0\n    for x in loader:"
        + STEP
        + "        total += loss / len(loader)\n    return total\n",
        "+= loss /",
        "+= loss.item() /",
    ),
    "a schedule of the project's own before the optimizer": (
        "LS013",
        "from torch.optim.lr_scheduler import LambdaLR\n\nclass Warm(LambdaLR):\n    pass\n\n"
        "def train(model, loader, optimizer):\n    scheduler = Warm(optimizer, len)\n    for x in loader:\n"
        "        optimizer.zero_grad()\n        model(x).mean().backward()\n"
        "        scheduler.step()\n        optimizer.step()\n",
        "scheduler.step()\n        optimizer.step()",
        "optimizer.step()\n        scheduler.step()",
    ),
    "a helper of this file waits before the device is set": (
        "LS024",
        "def start():\n    dist.init_process_group('nccl')\n    dist.barrier()\n\n"
        "def main(local_rank):\n    start()\n    torch.cuda.set_device(local_rank)\n    dist.destroy_process_group()\n",
        "    start()\n    torch.cuda.set_device(local_rank)\n",
        "    torch.cuda.set_device(local_rank)\n    start()\n",
    ),
    "all but the main rank download": (
        "LS025",
        "from torchvision.datasets import CIFAR10\n"
        "def main(rank):\n    dist.init_process_group('nccl')\n    if rank == 0:\n        dist.barrier()\n"
        "        dist.destroy_process_group()\n        return\n"
        "    data = CIFAR10('data', download=True)\n    dist.destroy_process_group()\n",
        "download=True",
        "download=False",
    ),
    "every process of Accelerate downloads": (
        "LS025",
        "from accelerate import Accelerator\nfrom torchvision.datasets import CIFAR10\n"
        "def main():\n    accelerator = Accelerator()\n    data = CIFAR10('data', download=True)\n    return data\n",
        "    data = CIFAR10('data', download=True)",
        "    with accelerator.main_process_first():\n        data = CIFAR10('data', download=True)",
    ),
    "every process of Accelerate makes a folder": (
        "LS025",
        "import os\nfrom accelerate import Accelerator\n"
        "def main(out):\n    accelerator = Accelerator()\n    if not os.path.exists(out):\n        os.makedirs(out)\n",
        "    if not os.path.exists(out):",
        "    if accelerator.is_main_process:",
    ),
    "every process of Accelerate makes a folder that may be there": (
        "LS025",
        "import os\nfrom accelerate import Accelerator\n"
        "def main(out):\n    accelerator = Accelerator()\n    os.makedirs(out)\n",
        "os.makedirs(out)",
        "os.makedirs(out, exist_ok=True)",
    ),
    "every process of Accelerate makes a folder of its own": (
        "LS025",
        "import os\nfrom accelerate import Accelerator\n"
        "def main(out):\n    accelerator = Accelerator()\n    os.makedirs(out)\n",
        "os.makedirs(out)",
        "os.makedirs(f'{out}{accelerator.process_index}')",
    ),
    "the last batch prints on every rank": (
        "LS028",
        GROUP
        + "    for i in range(9):\n        if rank == 0 and i % 5 == 0 or i == len([1]):\n            print(i)\n"
        + "    dist.destroy_process_group()\n",
        "i % 5 == 0 or i == len([1])",
        "(i % 5 == 0 or i == len([1]))",
    ),
    "one rank, if not the first": (
        "LS028",
        GROUP + "    if rank >= 2:\n        print('hello')\n    dist.destroy_process_group()\n",
        "rank >= 2",
        "rank == dist.get_world_size() - 1",
    ),
    "a parameter that is a test of the rank": (
        "LS028",
        "def train(verbose):\n    if verbose:\n        print('hello')\n"
        + GROUP
        + "    train(verbose=rank >= 0)\n    dist.destroy_process_group()\n",
        "rank >= 0",
        "rank == 0",
    ),
    "a sync beside every step of the optimizer": (
        "LS036",
        "def train(model, loader, optimizer, losses, every):\n    for i, x in enumerate(loader):\n"
        "        loss = model(x.cuda()).mean()\n        loss.backward()\n        if (i + 1) % 4 == 0:\n"
        "            losses.update(loss.item())\n            optimizer.step()\n            optimizer.zero_grad()\n",
        "losses.update(loss.item())",
        "losses.update(loss.detach())",
    ),
    "a sampler for a loader that is taken up anew": (
        "LS004",
        "def main(model, data, optimizer):\n    dist.init_process_group('nccl')\n"
        "    model = DDP(model)\n    sampler = DistributedSampler(data)\n"
        "    loader = DataLoader(data, sampler=sampler, num_workers=2)\n    source, epoch = iter(loader), 0\n"
        "    for _ in range(99):\n        try:\n            x = next(source)\n        except StopIteration:\n"
        "            epoch += 1\n            source = iter(loader)\n            x = next(source)"
        + STEP
        + "    dist.destroy_process_group()\n",
        "epoch += 1\n",
        "epoch += 1\n            sampler.set_epoch(epoch)\n",
    ),
    "an evaluation in the main function": (
        "LS026",
        GROUP
        + "    val_data = list(range(9))\n    val_sampler = DistributedSampler(val_data, shuffle=False)\n"
        + "    val_loader = DataLoader(val_data, sampler=val_sampler, num_workers=2)\n    right = 0\n"
        + "    for x in val_loader:\n        right += model(x).sum()\n"
        + "    if rank == 0:\n        print(right)\n    dist.destroy_process_group()\n",
        "    if rank == 0:\n        print",
        "    dist.all_reduce(right)\n    if rank == 0:\n        print",
    ),
    "a share of the mean before the sum over ranks": (
        "LS026",
        "def main(rank):\n    dist.init_process_group('nccl')\n    val_sampler = DistributedSampler([1])\n"
        "    dist.destroy_process_group()\n    return val_sampler\n\n"
        "def evaluate(total, count):\n    score = total / count\n"
        "    dist.all_reduce(score.div_(dist.get_world_size()))\n    return score\n",
        "score.div_(dist.get_world_size())",
        "score",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_pitfall_is_told_and_what_is_right_is_not(name):
    code, script, wrong, right = PAIRS[name]
    assert script.count(wrong) == 1
    config = configure({}, code, "")
    assert {finding.rule for finding in check_text(HEAD + script, config)} == {code}
    assert check_text(HEAD + script.replace(wrong, right), config) == []


SEEDED = """
def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

def main(data):
    model = nn.Linear(2, 2)
    train(model, DataLoader(data, num_workers=2), torch.optim.SGD(model.parameters(), lr=0.1))

if __name__ == "__main__":
    main([])
"""
SEEDS = {
    "nothing": ("", True),
    "a data set's own order": (
        "import random\n\nclass Data:\n    def __init__(self):\n        random.seed(1)\n"
        "    def __getitem__(self, i):\n        return i\n",
        True,
    ),
    "a helper in this file": ("def fix():\n    torch.manual_seed(1)\n\nfix()\n", False),
}


@pytest.mark.parametrize("name", SEEDS)
def test_what_seeds_a_program(name):
    text, told = SEEDS[name]
    found = check_text(HEAD + text + SEEDED, configure({}, "LS008", ""))
    assert [finding.rule for finding in found] == ["LS008"] * told


def project(folder, **files):
    """Writes the files of a project; the paths, by name."""
    (folder / "pyproject.toml").write_text("")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(HEAD + text)
    return {name: str(folder / f"{name}.py") for name in files}


@pytest.mark.parametrize("called", [False, True])
def test_a_helper_that_seeds_counts_where_it_is_called(tmp_path, called):
    helper = "def set_seed():\n    torch.manual_seed(1)\n\ndef other():\n    pass\n"
    script = "from helper import other, set_seed\n" + ("set_seed()\n" if called else "other()\n") + SEEDED
    found = check_paths([project(tmp_path, helper=helper, script=script)["script"]], configure({}, "LS008", ""))
    assert bool(found) is not called


# What the script that runs the trainer says, and which of the two files is told.


@pytest.mark.parametrize("guarded", [False, True])
def test_a_helper_of_another_file_that_saves(tmp_path, guarded):
    helper = "def save_model(model, path):\n    torch.save(model.state_dict(), path)\n"
    call = (
        "    if rank == 0:\n        save_model(model.module, 'x.pt')\n"
        if guarded
        else "    save_model(model.module, 'x.pt')\n"
    )
    script = "from helper import save_model\n" + GROUP + "    model = DDP(model)\n" + call
    found = check_paths([project(tmp_path, helper=helper, script=script)["script"]], configure({}, "LS014", ""))
    assert [finding.rule for finding in found] == ["LS014"] * (not guarded)


@pytest.mark.parametrize("epoch", [False, True])
def test_a_helper_of_another_file_that_makes_the_sampler(tmp_path, epoch):
    helper = "def data_sampler(data, several):\n    if several:\n        return DistributedSampler(data)\n"
    script = (
        "from helper import data_sampler\n\ndef main(model, data, optimizer):\n    dist.init_process_group('nccl')\n"
        "    sampler = data_sampler(data, True)\n    model = DDP(model)\n"
        "    loader = DataLoader(data, sampler=sampler, num_workers=2)\n    for epoch in range(9):\n"
        + ("        sampler.set_epoch(epoch)\n" if epoch else "")
        + "        for x in loader:\n            optimizer.zero_grad()\n            model(x).mean().backward()\n"
        "            optimizer.step()\n"
    )
    found = check_paths([project(tmp_path, helper=helper, script=script)["script"]], configure({}, "LS004", ""))
    assert [finding.rule for finding in found] == ["LS004"] * (not epoch)


@pytest.mark.parametrize("changed", [False, True])
def test_a_device_that_is_handed_to_every_process(changed):
    script = (
        "import torch.multiprocessing as mp\n\ndef worker(gpu, args, model):\n"
        "    dist.init_process_group('nccl', rank=gpu, world_size=2)\n"
        + ("    args.device = torch.device('cuda', gpu)\n" if changed else "")
        + "    model.to(args.device)\n    dist.destroy_process_group()\n\n"
        "def main(args, model):\n    args.device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')\n"
        "    mp.spawn(worker, args=(args, model), nprocs=2)\n"
    )
    found = check_text(HEAD + script, configure({}, "LS007", ""))
    assert [finding.rule for finding in found] == ["LS007"] * (not changed)


def test_a_model_that_is_bound_anew_is_still_the_parameter():
    script = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

class Trainer:
    def __init__(self, model, device):
        self.model = self.wrap(model, device)

    def wrap(self, model, device):
        model = model.to(device)
        model = DDP(model, device_ids=[device])
        return model

def main(device):
    dist.init_process_group("nccl")
    Trainer(Net(), device)
    dist.destroy_process_group()
"""
    assert [finding.rule for finding in check_text(HEAD + script, configure({}, "LS005", ""))] == ["LS005"]
    assert check_text(HEAD + script.replace("BatchNorm2d(3)", "LayerNorm(3)"), configure({}, "LS005", "")) == []
