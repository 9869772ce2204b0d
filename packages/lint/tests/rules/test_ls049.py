"""LS049: attention dropout that ignores the mode."""

import pytest
from rule_findings import count

TEXT = """
import torch.nn.functional as F
from torch import nn

class Attention(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = {rate}

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p={given})
"""


@pytest.mark.parametrize(
    ("rate", "given", "number"),
    [
        ("rate", "self.rate", 1),
        ("nn.Dropout(rate)", "self.rate.p", 1),
        ("rate", "0.1", 1),
        ("rate", "self.rate if self.training else 0.0", 0),
        ("rate", "0.0", 0),
    ],
)
def test_the_dropout_of_an_attention(rate, given, number):
    assert count(TEXT.format(rate=rate, given=given), "LS049") == number
