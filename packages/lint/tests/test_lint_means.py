"""LS026: several values that are summed over the ranks in one tensor, and means that a helper scales by the ranks."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

def scaled(tensors):
    gpus = dist.get_world_size()
    for tensor in tensors:
        dist.all_reduce(tensor)
    for tensor in tensors:
        {scale}
    return tensors

def validate(model, val_data, world_size, device):
    val_loader = DataLoader(val_data, sampler=DistributedSampler(val_data, shuffle=False))
    total, right, count = 0.0, 0, 0
    for x, y in val_loader:
        loss = model(x, y)
        {batch}
        total += loss.item()
        right += (x == y).sum().item()
        count += len(x)
    sums = torch.tensor([total, right, count], device=device)
    dist.all_reduce(sums)
    {after}
    return total
"""


@pytest.mark.parametrize(
    ("scale", "batch", "after", "expected"),
    [
        ("pass", "pass", "total, right = sums[:2].tolist(); total /= world_size", True),
        ("pass", "pass", "total = sums[0].item(); total = total / dist.get_world_size()", True),
        ("pass", "pass", "total, right, count = sums.tolist(); total /= count", False),
        ("pass", "pass", "other = count / world_size", False),
        ("tensor.mul_(1.0 / gpus)", "loss, x = scaled([loss, x])", "pass", True),
        ("tensor.mul_(2)", "loss, x = scaled([loss, x])", "pass", False),
    ],
)
def test_means_over_the_ranks(scale, batch, after, expected):
    text = SCRIPT.format(scale=scale, batch=batch, after=after)
    assert bool(check_text(text, configure({}, "LS026", ""))) is expected
