"""What is the same on all ranks: flags that are always True, ends without an error, loggers by any name; and what
starts processes: methods that are spawned, Spark.
"""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

START = "import logging\nimport sys\nimport torch.distributed as dist\nimport torch.multiprocessing as mp\n"
GROUP = "def main(args):\n    dist.init_process_group('nccl')\n"


def told(text, rule="LS028"):
    """How often a rule is told."""
    return len(check_text(START + text, configure({}, rule, "")))


@pytest.mark.parametrize(
    ("flag", "number"),
    [
        ("master_process = True", 1),
        ("is_main = True\n    master_process = True", 1),
        ("master_process = dist.get_rank() == 0", 0),
        ("master_process = True\n    if args.ddp:\n        master_process = args.rank == 0", 0),
        ("master_process = False\n    if args.rank == 0:\n        master_process = True", 0),
        ("if args.rank == 0:\n        master_process = True", 0),
        ("master_process, seed = True, 1", 0),  # not followed
        ("pass", 0),
    ],
)
def test_a_flag_that_is_always_true_tells_no_rank(flag, number):
    assert told(f"{GROUP}    {flag}\n    if master_process:\n        print('begin')\n") == number


@pytest.mark.parametrize(
    ("last", "number"), [("exit(0)", 1), ("sys.exit(0)", 1), ("exit(1)", 0), ("exit()", 0), ("sys.exit('no')", 0)]
)
def test_a_program_that_ends_well(last, number):
    assert told(f"{GROUP}    if args:\n        print('done')\n        {last}\n") == number


@pytest.mark.parametrize(
    ("block", "number"),
    [
        ("print('no data')\n        exit()", 0),
        ("scores = evaluate()\n        print(scores)\n        exit(2)", 0),
        ("print('waiting')\n        debugpy.wait_for_attach()", 0),
        ("print('waiting')\n        debugpy.attach()", 1),
    ],
)
def test_a_program_that_ends_after_its_work(block, number):
    assert told(f"{GROUP}    if args:\n        {block}\n") == number


@pytest.mark.parametrize(("leave", "number"), [("continue", 0), ("raise", 0), ("return", 0)])
def test_a_loop_that_an_exception_ends(leave, number):
    loop = "    for x in args:\n        try:\n            step(x)\n        except KeyError:\n            print('out')\n"
    assert told(f"{GROUP}{loop}            {leave}\n") == number


@pytest.mark.parametrize(
    ("tests", "number"),
    [
        (("args.distributed", "args.gpu is None"), 1),
        (("args.distributed", "args.gpu is not None"), 1),
        (("not args.distributed", "args.gpu is None"), 0),
        (("args.loud", "args.nodist"), 0),
        (("args.loud", "args.launcher == 'none'"), 0),
        (("args.loud", "args.launcher != 'none'"), 1),
        (("args.loud", "args.launcher == 'slurm'"), 1),
        (("args.loud", "args.mode == 'none'"), 1),
        (("args.loud", "not args.no_ddp"), 1),
        (("args.loud", "not ('RANK' in os.environ and not args.nodist)"), 0),
        (("args.gpu is None", "args.loud"), 0),
        (("not args.distributed", "torch.cuda.device_count() > 1"), 0),
    ],
)
def test_no_device_where_there_are_several_processes(tests, number):
    outer, inner = tests
    assert told(f"{GROUP}    if {outer}:\n        if {inner}:\n            print('wrapped')\n") == number


@pytest.mark.parametrize(
    ("made", "line", "number"),
    [
        ("base_logger = Logger()", "base_logger.info('begin')", 0),
        ("catalog = args.catalog", "catalog.info('begin')", 0),
        ("base_logger = logging.getLogger('base')", "base_logger.add('begin')", 0),
    ],
)
def test_loggers_by_any_name(made, line, number):
    setting = "logging.basicConfig(level=logging.INFO)\n\n"
    assert told(f"{setting}{GROUP}    {made}\n    {line}\n") == number


METHODS = """
class Run:
    def work(self, number, args):
        dist.init_process_group("nccl")
        {line}

    def start(self):
        print("starting")
        {start}

if __name__ == "__main__":
    print("before")
    Run().start()
"""


@pytest.mark.parametrize(
    ("start", "line", "number"),
    [
        ("mp.spawn(self.work, args=(1,), nprocs=2)", "print('at work')", 1),
        ("mp.spawn(self.work, args=(1,), nprocs=2)", "if number == 0:\n            print('at work')", 0),
        ("mp.spawn(fn=self.work, nprocs=2)", "print('at work')", 1),
        ("self.work(0, 1)", "print('at work')", 3),
    ],
)
def test_a_method_that_is_spawned(start, line, number):
    assert told(METHODS.format(start=start, line=line)) == number


SPARK = """
from pyspark.ml.torch.distributor import TorchDistributor

def train(path):
    dist.init_process_group("nccl")
    print("at work")

print("before")
{start}
"""


@pytest.mark.parametrize(
    ("start", "number"),
    [
        ("TorchDistributor(num_processes=4, local_mode=True).run(train, 'data')", 1),
        ("spread = TorchDistributor(num_processes=4)\nspread.run(train, path='data')", 1),
        ("train('data')", 2),
    ],
)
def test_a_function_that_spark_spreads(start, number):
    assert told(SPARK.format(start=start)) == number
