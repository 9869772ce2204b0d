"""LS028: the process that starts the others by Ray, submitit, a launcher of functions or a command is one."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

START = """import subprocess
import sys
import torch.distributed as dist
{imports}

def work(args):
    dist.init_process_group('nccl')
    print('at work')

"""


def told(folder, **files):
    """The lines, without spaces, at which the rule is told in run.py, beside other files."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    text = files["run"].split("\n")
    found = check_paths([str(folder / "run.py")], configure({}, "LS028", ""))
    return [text[finding.line - 1].strip() for finding in found]


WORK = "print('at work')"
TORCHRUN = "subprocess.run(['torchrun', '--nproc_per_node', '4', __file__])"
LAUNCHES = {
    "Ray Train": ("from ray.train.torch import TorchTrainer", "TorchTrainer(work).fit()"),
    "Ray Train by a keyword": (
        "import ray.train.torch",
        "ray.train.torch.TorchTrainer(train_loop_per_worker=work).fit()",
    ),
    "Ray Tune": (
        "from ray.tune.integration.horovod import DistributedTrainableCreator",
        "tune.run(DistributedTrainableCreator(work))",
    ),
    "Ray": ("import ray", "ray.init()"),
    "Accelerate": ("from accelerate import notebook_launcher", "notebook_launcher(work, (args,), 4)"),
    "torch": ("from torch.distributed.launcher.api import elastic_launch", "elastic_launch(args.all, work)(args)"),
    "detectron2": ("from detectron2.engine import launch", "launch(work, 4, args=(args,))"),
    "Horovod on Ray": ("from horovod.ray import RayExecutor", "RayExecutor(args.all, num_workers=4).run(work)"),
    "Horovod on Spark": ("import horovod.spark", "horovod.spark.run(work, num_proc=4)"),
    "submitit": ("import submitit", "submitit.AutoExecutor(folder='x').submit(work, args)"),
    "torchrun": ("", TORCHRUN),
    "torchrun by a name": (
        "",
        "line = [sys.executable, '-m', 'torch.distributed.run', __file__]\n    subprocess.Popen(line)",
    ),
    "a line for the shell": ("import os", "os.system('accelerate launch train.py')"),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_process_that_starts_the_others(tmp_path, name):
    imports, launch = LAUNCHES[name]
    body = f"def main(args):\n    print('begin')\n    {launch}\n    print('end')\n\nmain(parse())\n"
    assert told(tmp_path, run=START.format(imports=imports) + body) == [WORK]


@pytest.mark.parametrize(
    "launch",
    [
        "subprocess.run(['git', 'status'])",
        "subprocess.run(args.command)",
        "launch(work, 4, args=(args,))",
        "args.fit()",
    ],
)
def test_other_calls_start_no_others(tmp_path, launch):
    body = f"def main(args):\n    print('begin')\n    {launch}\n    work(args)\n\nmain(parse())\n"
    assert told(tmp_path, run=START.format(imports="") + body) == [WORK, "print('begin')"]


REMOTE = """
import ray
import torch.distributed as dist

{mark}class Worker:
    def train(self):
        dist.init_process_group('nccl')

def main():
    worker = Worker.remote()
    print('begin')

main()
"""


@pytest.mark.parametrize(
    ("mark", "number"),
    [("@ray.remote\n", 0), ("@ray.remote(num_gpus=1)\n", 0), ("", 1)],
)
def test_who_makes_an_actor_of_ray_is_no_worker(tmp_path, mark, number):
    assert len(told(tmp_path, run=REMOTE.format(mark=mark))) == number


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("    if args.launch:\n        print('begin')\n        {}\n    else:\n        work(args)\n", []),
        ("    if args.launch:\n        {}\n    else:\n        print('rank')\n        work(args)\n", ["print('rank')"]),
        ("    print('both')\n    if args.launch:\n        {}\n        return\n    work(args)\n", ["print('both')"]),
        ("    if args.launch:\n        {}\n        return\n    print('rank')\n    work(args)\n", ["print('rank')"]),
        ("    if args.loud:\n        print('begin')\n    {}\n", []),
    ],
)
def test_where_one_branch_starts_the_others(tmp_path, body, lines):
    run = f"{START.format(imports='')}def main(args):\n{body.format(TORCHRUN)}\nmain(parse())\n"
    assert told(tmp_path, run=run) == [WORK, *lines]


@pytest.mark.parametrize(
    ("extra", "number"),
    [("", 0), ("def evaluate(args):\n    dist.barrier()\n    describe(args)\n\n", 1)],
)
def test_a_function_that_only_the_starting_process_calls(tmp_path, extra, number):
    helper = "def describe(args):\n    print('options', args)\n\n"
    body = f"{helper}{extra}def main(args):\n    describe(args)\n    {TORCHRUN}\n\nmain(parse())\n"
    found = told(tmp_path, run=START.format(imports="") + body)
    assert found == [WORK, "print('options', args)"][: number + 1]


LAUNCHER = """
import torch.distributed as dist
import torch.multiprocessing as mp

def launch(work, count, args):
    mp.spawn(each, nprocs=count, args=({handed}, args))

def each(rank, work, args):
    dist.init_process_group('nccl', rank=rank)
    work(*args)

def main(args):
    print('at work')

if __name__ == '__main__':
    print('begin')
    launch(main, 4, parse())
"""


@pytest.mark.parametrize(("handed", "lines"), [("work", [WORK]), ("count", [])])
def test_a_function_that_a_launcher_hands_to_what_it_starts(tmp_path, handed, lines):
    assert told(tmp_path, run=LAUNCHER.format(handed=handed)) == lines
