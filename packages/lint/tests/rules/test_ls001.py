"""LS001: nn.DataParallel."""

import pytest
from rule_findings import found as found_of

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


def count_findings(folder, rule, text, **files):
    """Count a rule's findings in run.py, next to other files."""
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
    assert count_findings(tmp_path, "LS001", f"import torch\n{text}") == number


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("DataParallel(model)", True),
        ("DP(model)", True),
        ("DP(copy) if isinstance(model, DP) else model", True),
        ("0\n    if isinstance():\n        model = DP(copy)", True),
        ("Own(model)", False),
        ("pl.Trainer(strategy='dp')", True),
        ("pl.Trainer.from_argparse_args(copy, strategy='dp')", True),
        ("pl.LightningDataModule.from_argparse_args(copy, strategy='dp')", False),
        ("pl.Trainer(strategy='ddp')", False),
    ],
)
def test_data_parallel_by_its_names(code, expected):
    text = "import pytorch_lightning as pl\nfrom torch.nn import DataParallel as DP\n\nclass Own:\n    pass\n\n"
    text += f"def main(model, copy):\n    model = {code}\n"
    assert bool(check_text(text, configure({}, "LS001", ""))) is expected
    own = "import torch\n\nclass DataParallel:\n    pass\n\ndef main(model):\n    return DataParallel(model)\n"
    assert not check_text(own, configure({}, "LS001", ""))


OWN = "import torch\nfrom torch.nn{more} import {base}\n\nclass {name}({base}):\n    pass\n\nmodel = {call}\n"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (("", "DataParallel", "DataParallelModel", "DataParallelModel(torch.nn.Linear(2, 2)).cuda()"), True),
        ((".parallel", "DataParallel", "MyParallel", "MyParallel(torch.nn.Linear(2, 2))"), True),
        (("", "DataParallel", "OwnDataParallel", "OwnDataParallel(module=torch.nn.Linear(2, 2))"), True),
        (("", "DataParallel", "DataParallelModel", "torch.nn.Linear(2, 2)"), False),
        (("", "Module", "DataParallelModel", "DataParallelModel()"), False),
        ((".parallel", "DistributedDataParallel", "MyParallel", "MyParallel(torch.nn.Linear(2, 2))"), False),
    ],
)
def test_a_class_of_ones_own_that_derives_from_data_parallel(given, found):
    text = OWN.format(**dict(zip(("more", "base", "name", "call"), given, strict=True)))
    assert found_of(text, "LS001") is found


HEAD = """
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""


def count_findings_3(text, rule):
    """Count a rule's findings."""
    return len(check_text(HEAD + text, configure({}, rule, "")))


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("from torch.nn import DataParallel as DP\nDP(model)", 1),
        ("import torch.nn.parallel.data_parallel as parallel\nparallel(model, (x,))", 1),
        ("from torch.nn.parallel import data_parallel as run\nrun(model, x)", 1),
        ("wrap = nn.DataParallel\nwrap(model)", 1),
        ("from torch.nn.parallel import DistributedDataParallel as DataParallel\nDataParallel(model)", 0),
        ("from mine import DataParallel as DP\nDP(model)", 0),
        ("import pytorch_lightning as pl\npl.Trainer(gpus=2, accelerator='dp')", 1),
        ("import pytorch_lightning as pl\npl.Trainer.from_argparse_args(args, accelerator='dp')", 1),
        ("from lightning.pytorch import Trainer\nTrainer(strategy='dp' if gpus > 1 else None)", 1),
        ("import pytorch_lightning as pl\nhow = 'dp'\npl.Trainer(strategy=how)", 1),
        ("import pytorch_lightning as pl\npl.Trainer(strategy=pl.strategies.DataParallelStrategy())", 1),
        ("import pytorch_lightning as pl\npl.Trainer(gpus=2, accelerator='ddp')", 0),
        ("from mine import Trainer\nTrainer(strategy='dp')", 0),
    ],
)
def test_data_parallel_by_other_names(line, number):
    assert count_findings_3(line + "\n", "LS001") == number
