"""LS048: an optimizer made before the model is sharded."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def count(text, code):
    """Count the findings of a rule in a script."""
    return len(check_text(text, configure({}, code, "")))


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ("optimizer = SGD(model.parameters(), lr=0.1)\n    fully_shard(model)", 1),
        ("optimizer = SGD(model.parameters(), lr=0.1)\n    model = FullyShardedDataParallel(model)", 1),
        ("fully_shard(model)\n    optimizer = SGD(model.parameters(), lr=0.1)", 0),
        ("optimizer = SGD(model.parameters(), lr=0.1)\n    fully_shard(teacher)", 0),
    ],
)
def test_the_order_of_optimizer_and_shards(lines, number):
    text = "from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard\nfrom torch.optim import SGD\n"
    text += f"\ndef build(model, teacher):\n    {lines}\n    return model, optimizer\n"
    assert count(text, "LS048") == number
