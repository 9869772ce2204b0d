"""LS010: unused parameters."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


def count_findings(folder, rule, text, **files):
    """Count a rule's findings in run.py, next to other files."""
    for name, other in {**files, "run": text}.items():
        (folder / f"{name}.py").write_text(other)
    return len(check_paths([str(folder / "run.py")], configure({}, rule, "")))


@pytest.mark.parametrize(
    ("value", "number"),
    [
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
    assert count_findings(tmp_path, "LS010", text) == number


SCRIPT = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.{layer}(16, 2)
        self.stack = {stack}

    def forward(self, x):
        {line}
        return self.stack(x)

def wrap(local_rank):
    return DDP(Net().to(local_rank), device_ids=[local_rank])
"""


USUAL = {"layer": "TransformerEncoderLayer", "stack": "nn.TransformerEncoder(self.layer, 2)", "line": "pass"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"line": "x = self.layer(x)"}, False),
        ({"stack": "nn.Sequential(self.layer)"}, False),
        ({"stack": "nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2), 2, norm=self.layer)"}, False),
    ],
)
def test_a_layer_that_is_copied(change, expected):
    assert bool(check_text(SCRIPT.format(**USUAL | change), configure({}, "LS010", ""))) is expected
