"""LS001, LS010, LS029, LS032: what another library derives, flags by a test, classes handed on, a star's imports."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


def told(folder, rule, text, **files):
    """How often a rule is told in run.py, beside other files."""
    for name, other in {**files, "run": text}.items():
        (folder / f"{name}.py").write_text(other)
    return len(check_paths([str(folder / "run.py")], configure({}, rule, "")))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("from torch_geometric.nn import DataParallel\nmodel = DataParallel(model)\n", 1),
        ("import torch_geometric.nn as gnn\nmodel = gnn.DataParallel(model, device_ids=[0, 1])\n", 1),
        (
            "from torch_geometric.nn import DataParallel\nclass ListParallel(DataParallel):\n    pass\n"
            "def wrap(model):\n    return ListParallel(model)\n",
            1,
        ),
        ("from torch_geometric.loader import DataListLoader\nloader = DataListLoader(data)\n", 0),
        ("from mindspore.nn import DataParallel\nmodel = DataParallel(model)\n", 0),
        ("from torch_geometric.nn import GCNConv\nconv = GCNConv(8, 8)\n", 0),
    ],
)
def test_data_parallel_of_geometric(tmp_path, text, number):
    assert told(tmp_path, "LS001", f"import torch\n{text}") == number


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("True if 'swin' in args.arch else False", 1),
        ("True if args.stochastic_depth else None", 1),
        ("(True if args.parts > 1 else False)", 1),
        ("args.unused if args.arch else False", 0),
        ("False if args.arch == 'resnet' else args.unused", 0),
        ("args.frozen", 0),
    ],
)
def test_a_flag_that_a_test_sets(tmp_path, value, number):
    text = (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n\ndef wrap(model, args):\n"
        f"    return DDP(model, find_unused_parameters={value})\n"
    )
    assert told(tmp_path, "LS010", text) == number


FSDP = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision\n"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (
            f"{FSDP}from torch.distributed.fsdp.wrap import enable_wrap, wrap\n"
            "def make(model):\n    with enable_wrap(wrapper_cls=FSDP):\n        return wrap(model)\n",
            1,
        ),
        (f"{FSDP}from functools import partial\nshard = partial(FSDP, limit_all_gathers=True)\n", 1),
        (
            "from torch.distributed._fsdp import FullyShardedDataParallel\n"
            "def make(model):\n    return FullyShardedDataParallel(model)\n",
            1,
        ),
        (f"{FSDP}def wrapped(model):\n    return isinstance(model, FSDP)\n", 0),
        (f"{FSDP}from functools import partial\nhalf = partial(MixedPrecision, None)\n", 0),
        (
            "from functools import partial\nfrom mine import FullyShardedDataParallel as FSDP\n"
            "shard = partial(FSDP, limit=1)\n",
            0,
        ),
    ],
)
def test_fsdp_that_is_handed_on(tmp_path, text, number):
    assert told(tmp_path, "LS029", f"import torch\n{text}") == number


SAVES = """
import torch
import torch.distributed as dist
{imported}

def main(rank):
    dist.init_process_group("nccl")
    if rank == 0:
        torch.save({{"random": {read}}}, "state.pt")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("imported", "read", "data", "number"),
    [
        ("from data import *", "random.getstate()", "import random\n", 1),
        ("from data import *", "np.random.get_state()", "import numpy as np\n", 1),
        ("from data import *", "rng.get_rng_state()", "import torch.random as rng\n", 1),
        ("from data import *", "random.getstate()", "from mine import random\n", 0),
        ("from data import *", "random.getstate()", "import random\n__all__ = ['Data']\n", 0),
        ("from data import *\nrandom = make()", "random.getstate()", "import random\n", 0),
    ],
)
def test_what_a_star_import_brings(tmp_path, imported, read, data, number):
    assert told(tmp_path, "LS032", SAVES.format(imported=imported, read=read), data=data) == number


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("DataParallel(model)", True),
        ("DP(model)", True),
        ("DP(copy) if isinstance(model, DP) else model", True),
        ("0\n    if isinstance(model, DP):\n        model = DP(copy)", False),
        ("0\n    if isinstance():\n        model = DP(copy)", True),
        ("Own(model)", False),
        ("pl.Trainer(strategy='dp')", True),
        ("pl.Trainer.from_argparse_args(copy, strategy='dp')", True),
        ("pl.LightningDataModule.from_argparse_args(copy, strategy='dp')", False),
        ("pl.Trainer(strategy='ddp')", False),
    ],
)
def test_data_parallel_by_its_names(code, told):
    text = "import pytorch_lightning as pl\nfrom torch.nn import DataParallel as DP\n\nclass Own:\n    pass\n\n"
    text += f"def main(model, copy):\n    model = {code}\n"
    assert bool(check_text(text, configure({}, "LS001", ""))) is told
    own = "import torch\n\nclass DataParallel:\n    pass\n\ndef main(model):\n    return DataParallel(model)\n"
    assert not check_text(own, configure({}, "LS001", ""))
