"""LS007, LS019, LS029: who starts the processes and ends the group, which device each takes, what is deprecated."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

START = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
"""


def lines(text, code):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


def device(*made, before="", main=""):
    """A script that makes a device of the rank."""
    body = "".join(f"    {line}\n" for line in made)
    start = "def main(model):\n    dist.init_process_group('nccl')\n    rank = dist.get_rank()\n"
    return f"{START}{before}\n{start}{body}    return DDP(model.to(device))\n{main}"


RUN = "def run(model, rank):\n    dist.init_process_group('nccl')\n    return DDP(model.to(rank), device_ids=[rank])\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (device("device = torch.device('cuda:{}'.format(rank))"), True),
        (device("device = torch.device('cuda:%d' % rank)"), True),
        (device("device = torch.device('cuda:' + str(rank))"), True),
        (device("device = torch.device('cuda:{}'.format(rank % torch.cuda.device_count()))"), False),
        (device("device = torch.device('cuda:%d' % int(os.environ['LOCAL_RANK']))"), False),
        (device("device = torch.device('cpu:{}'.format(rank))"), False),
        (START + RUN + "run(None, int(os.getenv('RANK', 0)))\nrun(None, torch.device('cuda'))\n", True),
        (START + RUN + "run(None, int(os.getenv('LOCAL_RANK', 0)))\nrun(None, torch.device('cuda'))\n", False),
        # a process that sees its own GPUs alone
        (device("device = torch.device('cuda:0')"), True),
        (device("os.environ['CUDA_VISIBLE_DEVICES'] = str(rank)", "device = torch.device('cuda:0')"), False),
        (
            device(
                "os.environ['CUDA_VISIBLE_DEVICES'] = ','.join(map(str, range(2, 4)))",
                "device = torch.device('cuda:0')",
            ),
            False,
        ),
        (device("os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'", "device = torch.device('cuda:0')"), True),
        # a launcher of a package that is not here
        (device("device = 'cuda'"), True),
        (device("device = 'cuda'", main="import unseen\nunseen.launch(main, 4)\n"), False),
        (device("device = 'cuda'", main="import unseen\nunseen.average(4)\n"), True),
    ],
)
def test_the_number_of_a_device(text, told):
    assert bool(lines(text, "LS007")) == told


FIRST = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
FLAG = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', type=int)\n"
ENV = "parser.parse_args().local_rank = int(__import__('os').environ.get('LOCAL_RANK', -1))\n"
APEX = "import torch\ntry:\n    import apex\nexcept ImportError:\n    pass\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (FIRST + FLAG, [5]),
        (FIRST + FLAG + ENV, [5]),
        ("import torch\nfrom transformers import Trainer\nTrainer()\n" + FLAG, [6]),
        ("import deepspeed\ndeepspeed.initialize()\n" + FLAG, []),
        (APEX + "apex.amp.scale_loss(1)\nmodel = apex.amp.initialize(2)\n", [6, 7]),
        (APEX + "apex.parallel.convert_syncbn_model(1)\n", [6]),
        (APEX + "from apex import amp\napex.amp.scale_loss(1)\napex.parallel.Reducer(2)\n", [7, 8]),
        (APEX + "norm = apex.normalization.FusedLayerNorm(3)\n", []),
        (APEX, []),
        ("import torch\nfrom apex import amp\nm = amp.initialize(1)\n", [3]),
    ],
)
def test_what_is_deprecated_is_told_where_it_is_used(text, told):
    assert lines(text, "LS029") == told


MAIN = "def main():\n    dist.init_process_group('nccl')\n    {}\n\nif __name__ == '__main__':\n    main()\n"
PACKAGE = (
    "import torch.distributed as dist\n\ndef stop():\n    dist.destroy_process_group()\n\ndef mean(x):\n    return x\n"
)
CLASS = "import torch.distributed as dist\nclass Engine:\n    def __exit__(self, *a): dist.destroy_process_group()\n"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"run.py": START + "from kit import mean\n" + MAIN.format("mean(1)"), "kit.py": PACKAGE}, True),
        (
            {"run.py": START + "from kit import mean\n" + MAIN.format("pass"), "kit.py": CLASS + "def mean(x): pass\n"},
            True,
        ),
        ({"run.py": START + MAIN.format("pass"), "test_run.py": "import run\n" + PACKAGE + "stop()\n"}, True),
        ({"run.py": START + "from diffusers import DDPMScheduler\n" + MAIN.format("DDPMScheduler()")}, True),
        ({"run.py": START + "from unseen import distance\n" + MAIN.format("distance(1)")}, True),
        ({"run.py": START + "from unseen import setup_logger\n" + MAIN.format("setup_logger(1)")}, True),
        ({"run.py": START + "from unseen import DistributedLoader\n" + MAIN.format("DistributedLoader(1)")}, True),
        ({"run.py": START + "import unseen\n" + MAIN.format("unseen.DistributedEvalSampler(1)")}, True),
        ({"run.py": START + "import unseen\n" + MAIN.format("unseen.DistributedRun(1)")}, False),
        ({"run.py": START + "from unseen import setup_run\n" + MAIN.format("setup_run(1)")}, False),
        # its own lines start the group, so they are a program
        ({"run.py": START + "dist.init_process_group('nccl')\nwork()\n"}, True),
        ({"run.py": START + "def start():\n    dist.init_process_group('nccl')\n"}, False),
        ({"run.py": START + "from kit import stop\n" + MAIN.format("stop()"), "kit.py": PACKAGE}, False),
        ({"run.py": START + "import kit\n" + MAIN.format("kit.stop()"), "kit.py": PACKAGE}, False),
        ({"run.py": START + "from kit import Engine\n" + MAIN.format("Engine()"), "kit.py": CLASS}, False),
        (
            {"run.py": START + "import atexit\natexit.register(dist.destroy_process_group)\n" + MAIN.format("pass")},
            False,
        ),
        ({"run.py": START + "from unseen import cleanup\n" + MAIN.format("cleanup()")}, False),
        ({"run.py": START + "from unseen import stop_dist\n" + MAIN.format("stop_dist()")}, False),
        ({"run.py": START + "import unseen\n" + MAIN.format("unseen.dist2plane(1)")}, True),
        ({"run.py": START + "import unseen\n" + MAIN.format("unseen.is_distributed_run()")}, True),
    ],
)
def test_the_end_of_the_group_is_one_that_the_program_reaches(tmp_path, files, told):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = check_paths([str(tmp_path / "run.py")], configure({}, "LS019", ""))
    assert bool(found) == told


RANKS = (
    START
    + """
def elected():
    if not dist.is_initialized():
        return True
    return {}

def main(model):
    dist.init_process_group("nccl")
    rank, rest = dist.get_rank(), model.rest
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = DDP(model.cuda())
    if elected():
        {}
    dist.destroy_process_group()

main(None)
"""
)


@pytest.mark.parametrize(
    ("value", "line", "code", "told"),
    [
        ("dist.get_rank() == 0", "torch.save(model.module.state_dict(), 'x.pt')", "LS014", False),
        ("dist.get_rank() == 0 and WANTED", "torch.save(model.module.state_dict(), 'x.pt')", "LS014", False),
        ("WANTED", "torch.save(model.module.state_dict(), 'x.pt')", "LS014", True),
        ("dist.get_rank() == 0", "dist.barrier()", "LS018", True),
        ("not dist.get_rank()", "dist.all_reduce(rest)", "LS018", True),
        ("WANTED", "dist.barrier()", "LS018", False),
    ],
)
def test_a_function_of_the_project_that_tells_the_rank(value, line, code, told):
    assert bool(lines(RANKS.format(value, line), code)) == told


ENDLESS = (
    START
    + """
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CIFAR10

def endless(loader):
    while True:
        for batch in {over}:
            yield batch

def main(model, optimizer):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = DDP(model.cuda())
    data = CIFAR10("data")
    loader = DataLoader(data, batch_size=8, {given})
    loader = endless(loader)
    for x, y in loader:
        optimizer.zero_grad()
        model(x.cuda()).mean().backward()
        optimizer.step()

main(None, None)
"""
)


@pytest.mark.parametrize(
    ("over", "given", "told"),
    [
        ("loader", "shuffle=True", True),
        ("loader", "num_workers=2", True),
        ("loader", "sampler=DistributedSampler(data)", False),
        ("range(9)", "shuffle=True", False),
    ],
)
def test_a_generator_passes_on_the_batches_of_its_loader(over, given, told):
    assert bool(lines(ENDLESS.format(over=over, given=given), "LS003")) == told


REPORT = """
import torch.distributed as dist

class Report:
    def mean(self, loss):
        if not dist.is_initialized():
            return loss
        dist.all_reduce(loss)
        return loss

    def show(self, loss, reduce=True):
        {line}

def main(rank, loss, reduce):
    dist.init_process_group("nccl")
    report = Report()
    if rank == 0:
        report.show(loss, reduce)
"""


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("self.mean(loss)", 1),
        ("total = self.mean(loss) if dist.is_initialized() else loss", 1),
        ("total = self.mean(loss) if reduce else loss", 0),
        ("total = reduce and self.mean(loss)", 0),
        ("if reduce: self.mean(loss)", 0),
    ],
)
def test_a_collective_that_an_option_leaves_out(line, number):
    found = check_text(REPORT.format(line=line), configure({}, "LS018", ""))
    assert len(found) == number


LAUNCHED = """
import {imports}
import torch

def train(config):
    print("in each process")

print("in the one that starts them")
{start}
"""


def printed(text, path="example.py"):
    return [finding.line for finding in check_text(text, configure({}, "LS028", ""), path)]


@pytest.mark.parametrize(
    ("imports", "start", "told"),
    [
        ("ray.train.torch", "ray.train.torch.TorchTrainer(train, scaling_config=4).fit()", True),
        ("ray.train.torch", "ray.train.torch.TorchTrainer(train_loop_per_worker=train).fit()", True),
        ("accelerate", "accelerate.notebook_launcher(train, (1,), num_processes=2)", True),
        ("accelerate", "accelerate.notebook_launcher(function=train, args=(1,))", True),
        ("accelerate", "accelerate.notebook_launcher(train, (1,), num_processes=1)", False),
        ("accelerate", "accelerate.notebook_launcher(train, (1,), 1)", False),
        (
            "ray.train.torch",
            "ray.train.torch.TorchTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=1)).fit()",
            False,
        ),
        (
            "ray.train.torch",
            "ray.train.torch.TorchTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2)).fit()",
            True,
        ),
        ("mine", "mine.TorchTrainer(train)", False),
        ("mine", "TorchTrainer(train)", False),
    ],
)
def test_functions_that_a_package_runs_in_several_processes(imports, start, told):
    assert printed(LAUNCHED.format(imports=imports, start=start)) == ([6] if told else [])


FABRIC = """
import lightning as L
import torch

def main(model, loader):
    fabric = L.Fabric({given})
    fabric.launch()
    print("starting")
    fabric.print("starting")
    if fabric.is_global_zero:
        print("alone")

main()
"""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", True),
        ("devices=2", True),
        ("devices='auto', precision='16-mixed'", True),
        ("devices=1", False),
        ("devices='1'", False),
        ("devices=1, num_nodes=4", True),
        ("accelerator='cpu'", False),
        ("'cuda', 'ddp', 2", True),
        ("'cuda', 'auto', 1", False),
    ],
)
def test_a_fabric_of_several_devices(given, told):
    assert printed(FABRIC.format(given=given)) == ([8] if told else [])
    assert not lines(FABRIC.format(given=given), "LS019")
    assert not lines(FABRIC.format(given=given), "LS031")
