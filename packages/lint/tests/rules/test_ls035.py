"""LS035: explicit attention."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

TEXT = """
import torch
from torch import nn

class Attention(nn.Module):
    def forward(self, q, k, v, maps):
        weights = torch.softmax(q @ k.transpose(-2, -1), dim=-1)
        {line}
        out = self.drop(weights) @ v
        {end}
"""


@pytest.mark.parametrize(
    ("line", "end", "number"),
    [
        ("pass", "return out", 1),
        ("maps[0] = weights", "return out", 0),
        ("maps[0] = weights.detach().cpu()", "return out", 0),
        ("self.maps = weights", "return out", 0),
        ("self.maps.append(weights.data[0])", "return out", 0),
        ("copy = weights.mean(1)", "self.log(copy)\n        return out", 0),
        ("self.save(attention=weights)", "return out", 0),
        ("pass", "return {'out': out, 'weights': weights}", 0),
        ("pass", "return Output(out, weights=weights)", 0),
        ("pass", "return [out, weights[0]]", 0),
        ("weights[maps] = 0", "return out", 1),
        ("maps[0] = q", "return out", 1),
        ("pass", "self.maps.append(out.view(1, -1))\n        return out", 1),
        ("pass", "return {'out': torch.matmul(weights, v)}", 1),
        ("pass", "if maps:\n            weights = None\n        return out, weights", 0),
        ("pass", "if maps:\n            return weights\n        weights = weights @ v\n        return weights", 0),
        ("copy = None\n        more = weights.clone()\n        copy = more", "return out, copy", 0),
    ],
)
def test_weights_that_are_kept(line, end, number):
    assert len(check_text(TEXT.format(line=line, end=end), configure({}, "LS035", ""))) == number
