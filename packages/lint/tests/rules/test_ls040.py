"""LS040: layer-wise learning rates that rise."""

import pytest
from rule_findings import count


@pytest.mark.parametrize(
    ("layers", "power", "number"),
    [
        ("model.layers", "i", 1),
        ("model.layers", "count - 1 - i", 0),
        ("reversed(model.layers)", "i", 0),
        ("model.layers[::-1]", "i", 0),
        ("model.heads", "i", 0),
    ],
)
def test_the_exponent_of_a_layers_rate(layers, power, number):
    text = "import torch\n\ndef groups(model, count, decay=0.9):\n    found = []\n"
    text += f"    for i, layer in enumerate({layers}):\n"
    text += f"        found.append({{'params': layer.parameters(), 'lr': 0.1 * decay ** ({power})}})\n"
    assert count(text + "    return torch.optim.SGD(found)\n", "LS040") == number


def test_an_exponent_that_counts_parameters():
    text = "import torch\n\ndef groups(model, lr, decay=0.9):\n    n = len(list(model.children()))\n    found = []\n"
    text += "    for i, (name, p) in enumerate(model.named_parameters()):\n"
    text += "        found.append({'params': [p], 'lr': lr * decay ** (n - i)})\n    return found\n"
    assert count(text, "LS040") == 1
