"""LS020: weight decay on biases and norms."""

import pytest
from rule_findings import count


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("torch.optim.AdamW(model.parameters())", 1),
        ("torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])", 1),
        ("torch.optim.AdamW([p for p in model.parameters() if p.ndim > 1])", 0),
        ("torch.optim.AdamW(model.parameters(), weight_decay=0.0)", 0),
        ("torch.optim.SGD(model.parameters(), lr=0.1)", 0),
        ("torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)", 1),
    ],
)
def test_parameters_that_decay_alike(call, number):
    assert count(f"import torch\n\ndef make(model):\n    return {call}\n", "LS020") == number
