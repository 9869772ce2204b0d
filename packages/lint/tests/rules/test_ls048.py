"""LS048: an optimizer made before the model is sharded."""

import pytest
from rule_findings import count


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
