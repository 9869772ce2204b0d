"""LS010: a layer that another one takes copies of gets no gradient itself."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

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
    ("change", "told"),
    [
        ({}, True),
        ({"stack": "nn.TransformerEncoder(encoder_layer=self.layer, num_layers=2)"}, True),
        ({"layer": "TransformerDecoderLayer", "stack": "nn.TransformerDecoder(self.layer, 2)"}, True),
        ({"line": "x = self.layer(x)"}, False),
        ({"stack": "nn.Sequential(self.layer)"}, False),
        ({"stack": "nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2), 2, norm=self.layer)"}, False),
    ],
)
def test_a_layer_that_is_copied(change, told):
    assert bool(check_text(SCRIPT.format(**USUAL | change), configure({}, "LS010", ""))) is told
