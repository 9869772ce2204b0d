"""LS025, LS026, LS028, LS037: fetched unasked, gathered and averaged, logging set up at import, a loop one leaves."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

GROUP = "import os\nimport torch\nimport torch.distributed as dist\nimport logging\n"
MAIN = "\ndef main(rank):\n    dist.init_process_group('nccl')\n"
RUN = "\nif __name__ == '__main__':\n    main(int(os.environ['RANK']))\n"


def told(folder, rule, **files):
    """How often a rule is told in run.py, beside other files."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return len(check_paths([str(folder / "run.py")], configure({}, rule, "")))


@pytest.mark.parametrize(
    ("made", "body", "number"),
    [
        ("from torchtext.datasets import AG_NEWS", "    data = AG_NEWS(root='data', split='train')", 1),
        ("from torch_geometric.datasets import Planetoid", "    data = Planetoid('data', 'Cora')", 1),
        ("import dgl.data", "    data = dgl.data.CoraGraphDataset()", 1),
        ("from torchvision.datasets import MNIST", "    data = MNIST('data')", 0),
        ("from torch_geometric.datasets import Planetoid", "    rank == 0 and print()\n    data = Planetoid", 0),
        (
            "from torch_geometric.datasets import Planetoid",
            "    if rank == 0:\n        Planetoid('data', 'Cora')\n    dist.barrier()\n    if rank != 0:\n"
            "        Planetoid('data', 'Cora')",
            0,
        ),
    ],
)
def test_data_sets_that_fetch_unasked(tmp_path, made, body, number):
    assert told(tmp_path, "LS025", run=f"{GROUP}{made}\n{MAIN}{body}\n{RUN}") == number


LOADER = "from torch.utils.data import DataLoader, DistributedSampler\n"
VALIDATE = """
def validate(model, val_loader):
    losses = [model(x) for x in val_loader]
    val_loss = torch.stack(losses).mean()
    return {call}

def make(val_data):
    return DataLoader(val_data, sampler=DistributedSampler(val_data, shuffle=False), num_workers=2)
"""


@pytest.mark.parametrize(
    ("steps", "number"),
    [
        ("    every = torch.stack(parts, dim=0)\n    return every.mean(0)", 1),
        ("    return torch.stack(parts).mean()", 1),
        ("    every = torch.stack(parts)\n    mean = every.mean()\n    return mean", 1),
        ("    concat = torch.stack(parts, dim=0)\n    return concat.mean(0)", 1),
        ("    chain = torch.stack(parts)\n    return torch.mean(chain)", 1),
        ("    return torch.cat(parts).mean()", 0),
        ("    return np.concatenate(parts).mean()", 0),
        ("    every = torch.stack(parts)\n    return every.sum(0)", 0),
        ("    every = torch.cat(parts)\n    return every", 0),
        ("    every = torch.stack(parts)\n    return every.max()", 0),
    ],
)
def test_a_mean_that_another_function_makes_of_what_it_gathered(tmp_path, steps, number):
    helper = (
        "def over_ranks(value):\n    parts = [value.clone() for _ in range(dist.get_world_size())]\n"
        f"    dist.all_gather(parts, value)\n{steps}\n"
    )
    run = GROUP + LOADER + VALIDATE.format(call="over_ranks(val_loss)") + helper + MAIN + RUN
    assert told(tmp_path, "LS026", run=run) == number


@pytest.mark.parametrize(
    ("test", "handed", "number"),
    [
        ("if self.enable:", "enable=rank == 0", 0),
        ("if self.enable:", "rank == 0", 0),
        ("if self.loud:", "enable=rank == 0", 0),
    ],
)
def test_a_logger_of_the_project_may_be_quiet_by_an_option(tmp_path, test, handed, number):
    helper = (
        "class Say:\n    def __init__(self, enable=True):\n        self.enable = self.loud = enable\n\n"
        f"    def show(self, *words):\n        {test}\n            print(*words)\n"
    )
    body = f"    say = Say({handed})\n    say.show('begin')\n"
    assert told(tmp_path, "LS028", run=f"{GROUP}from helper import Say\n{MAIN}{body}{RUN}", helper=helper) == number


@pytest.mark.parametrize(
    ("setting", "number"),
    [
        ("if int(os.environ['RANK']) == 0:\n    logging.basicConfig(level=logging.INFO)", 0),
        ("logging.basicConfig()\nif int(os.environ['RANK']) > 0:\n    logging.getLogger().setLevel('ERROR')", 0),
    ],
)
def test_logging_set_up_where_a_spawned_file_is_imported(tmp_path, setting, number):
    run = (
        f"{GROUP}import torch.multiprocessing as mp\nlogger = logging.getLogger()\n{setting}\n{MAIN}"
        "    logger.info('begin')\n\nif __name__ == '__main__':\n    mp.spawn(main, nprocs=2)\n"
    )
    assert told(tmp_path, "LS028", run=run) == number


@pytest.mark.parametrize(("word", "number"), [("print('begin')", 0)])
def test_a_replaced_print_says_nothing_about_logging(tmp_path, word, number):
    quiet = "import builtins\n\ndef setup_for_distributed(main):\n    builtins.print = print if main else len\n"
    body = f"    setup_for_distributed(rank == 0)\n    {word}\n"
    run = f"{GROUP}{quiet}logging.basicConfig(level=logging.INFO)\n{MAIN}{body}{RUN}"
    assert told(tmp_path, "LS028", run=run) == number


@pytest.mark.parametrize(
    ("leave", "number"),
    [
        ("if loss < 0.1 and rank == 0:", 1),
        ("if rank == 0:", 1),
        ("if epoch > 3:", 0),
        ("if epoch > 3 and config:", 0),
    ],
)
def test_a_loop_of_deepspeed_is_left_by_one_rank(tmp_path, leave, number):
    run = (
        "import deepspeed\nimport torch\n\ndef main(model, config, loader, rank):\n"
        "    engine, _, _, _ = deepspeed.initialize(model=model, config=config)\n"
        "    for epoch, x in enumerate(loader):\n        loss = engine(x)\n        engine.backward(loss)\n"
        f"        engine.step()\n        {leave}\n            break\n"
    )
    assert told(tmp_path, "LS037", run=run) == number


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("        print('starting')\n        dist.init_process_group('nccl')", 1),
        ("        dist.init_process_group('nccl')\n        print('started')", 1),
        ("        dist.init_process_group('nccl')\n        rank == 0 and print('started')", 0),
        ("        print('alone')\n        return\n    dist.barrier()", 0),
    ],
)
def test_the_test_before_a_group_is_made_is_no_single_process(tmp_path, body, number):
    begin = "\ndef begin(rank):\n    dist.init_process_group('nccl')\n" if "init" not in body else ""
    run = f"{GROUP}{begin}\ndef main(rank):\n    if not dist.is_initialized():\n{body}\n{RUN}"
    assert told(tmp_path, "LS028", run=run) == number


OWN_PART = """
def validate(model, val_loader):
    right, count = 0, 0
    for x, y in val_loader:
        right += (model(x).argmax(1) == y).sum()
        count += len(x)
    accuracy = right / count
    dist.all_reduce(accuracy, op=dist.ReduceOp.AVG)
    return accuracy

def make(shards, rank, world_size):
    return {made}
"""


@pytest.mark.parametrize(
    ("made", "number"),
    [
        ("wds.WebDataset(shards).slice(rank, None, world_size)", 1),
        ("wds.WebLoader(shards).slice(dist.get_rank(), 1000, dist.get_world_size())", 1),
        ("wds.WebDataset(shards).batched(8).slice(rank, None, world_size).decode()", 1),
        ("wds.WebDataset(shards).slice(1000)", 0),
        ("wds.WebDataset(shards).slice(0, None, world_size)", 0),
        ("wds.WebDataset(shards).slice(rank, None, 1)", 0),
    ],
)
def test_a_slice_of_webdataset_is_a_ranks_own_part(tmp_path, made, number):
    run = f"{GROUP}import webdataset as wds\n{OWN_PART.format(made=made)}{MAIN}{RUN}"
    assert told(tmp_path, "LS026", run=run) == number


@pytest.mark.parametrize(
    ("imported", "mark", "number"),
    [
        ("from torch.distributed.elastic.multiprocessing.errors import record", "@record", 1),
        ("from torch.distributed.elastic.multiprocessing import errors", "@errors.record", 1),
        ("import torch.distributed.elastic.multiprocessing.errors as e", "@e.record", 1),
        ("from contextlib import contextmanager", "@contextmanager", 0),
        ("from helper import recorded", "@recorded", 0),
        ("from helper import recorder", "@recorder.keep", 0),
    ],
)
def test_what_the_elastic_launcher_records_runs_on_every_rank(tmp_path, imported, mark, number):
    run = f"{imported}\n\n\n{mark}\ndef main():\n    print('begin')\n\n\nif __name__ == '__main__':\n    main()\n"
    assert told(tmp_path, "LS028", run=run) == number


@pytest.mark.parametrize(
    ("setting", "first", "number"),
    [
        ("if rank == 0:\n        add_handler()", "", 0),
        ("rank == 0 and add_handler()", "", 0),
        (
            "add_handler()",
            "rank = int(os.environ['RANK'])\nlogging.basicConfig(level='INFO' if rank < 1 else 'ERROR')",
            0,
        ),
    ],
)
def test_a_handler_that_the_main_rank_adds_makes_no_other_quiet(tmp_path, setting, first, number):
    helper = "\ndef add_handler():\n    logging.getLogger().addHandler(logging.StreamHandler())\n"
    run = f"{GROUP}{first}\n{helper}{MAIN}    {setting}\n    logging.info('begin')\n{RUN}"
    assert told(tmp_path, "LS028", run=run) == number


@pytest.mark.parametrize(
    ("test", "number"),
    [
        ("if primary:", 0),
        ("if primary and epoch:", 0),
        ("if self.primary:", 0),
        ("if not primary:", 0),
        ("if primary_key:", 1),
        ("if epoch:", 1),
        ("if primaries:", 1),
    ],
)
def test_a_main_rank_may_be_called_primary(tmp_path, test, number):
    body = f"\ndef fit(self, primary, primary_key, primaries, epoch):\n    {test}\n        print('begin')\n"
    assert told(tmp_path, "LS028", run=f"{GROUP}{body}{MAIN}    fit(*given)\n{RUN}") == number


BACKENDS = """
import torch.distributed as dist

class Nccl:
    def __init__(self):
        dist.init_process_group("nccl")

    def is_master_process(self):
        return dist.get_rank() == 0

TABLE = {"nccl": Nccl}

def make(name):
    return TABLE[name]()
"""


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        ("if backend.is_master_process():\n        print('only here')", 1),
        ("share = len(data) // backend.get_world_size()", 1),
        ("backend.is_local_main_process() and print('only here')", 1),
        ("if backend.is_ready():\n        backend.go()", 0),
        ("share = len(data) // backend.get_size()", 0),
        ("backend.is_main_thread()", 0),
    ],
)
def test_who_asks_an_unknown_object_for_its_place_is_one_of_several(tmp_path, asked, number):
    train = f"\ndef train(backend, data):\n    {asked}\n    print('begin')\n"
    run = f"import torch\nfrom helper import make\n{train}\ntrain(make('nccl'), [])\n"
    assert told(tmp_path, "LS028", run=run, helper=BACKENDS) == number
