"""LS002: DDP before the model is on its device."""

import pytest
from rule_findings import found as found_of

WRAPPED = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def main(local_rank, fast):
    model = nn.Linear(2, 2)
    {moved}
    raw = model
    wanted = torch.compile(raw) if fast else raw
    {again}
    return DDP(wanted, device_ids=[local_rank])
"""


@pytest.mark.parametrize(
    ("moved", "again", "found"),
    [
        ("model.to(local_rank)", "pass", False),
        ("pass", "raw.cuda(local_rank)", False),
        ("model = model.to(local_rank)", "pass", False),
        ("pass", "pass", True),
        ("nn.Linear(2, 2).to(local_rank)", "pass", True),
        ("batch = fast.to(local_rank)", "pass", True),
    ],
)
def test_a_model_that_is_moved_by_another_name(moved, again, found):
    assert found_of(WRAPPED.format(moved=moved, again=again), "LS002") is found


PLACED = """
import timm
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModel

class Net(nn.Module):
    pass

def main(other, rank):
    {line}
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("return DDP(Net(), device_ids=[rank])", True),
        ("return DDP(Net(), device_ids=[rank]).to(rank)", True),
        ("return DDP(timm.create_model('x'), device_ids=[rank])", True),
        ("model = AutoModel.from_pretrained('x'); return DDP(model, device_ids=[rank])", True),
        ("return DDP(Net().to(rank), device_ids=[rank])", False),
        ("return DDP(AutoModel.from_pretrained('x').cuda(rank), device_ids=[rank])", False),
        ("model = AutoModel.from_pretrained('x', device_map={'': rank}); return DDP(model, device_ids=[rank])", False),
        ("return DDP(nn.SyncBatchNorm.convert_sync_batchnorm(other), device_ids=[rank])", False),
        ("net = nn.Sequential(other.backbone, other.head); return DDP(net, device_ids=[rank])", False),
        ("return DDP(Net())", False),
    ],
)
def test_a_model_that_is_made_where_it_is_wrapped(line, found):
    assert found_of(PLACED.format(line=line), "LS002") is found
