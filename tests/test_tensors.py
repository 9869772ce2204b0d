"""Samples collated as torch's `default_collate` does it, bit for bit, and what it refuses."""

from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import worker

from lockstep.tensors import collate_samples

Pair = namedtuple("Pair", "x y")
ROW = torch.arange(6.0).reshape(2, 3)
SAMPLES = [
    [ROW, ROW + 1],
    [1, 2, -3],
    [True, False],
    [0.1, 1e300],
    [2, 2.5],
    [True, 3],
    ["a", "b"],
    [b"a", b"b"],
    [(ROW, 1, 0.5), (ROW * 2, 2, 1.5)],
    [{"x": ROW, "y": 1}, {"y": 2, "x": ROW, "z": 0}],
    [{"x": {"deep": (ROW, [1, 2])}}, {"x": {"deep": (ROW, [3, 4])}}],
    [Pair(ROW, 1), Pair(ROW, 2)],
    [OrderedDict(x=1), OrderedDict(x=2)],
    [np.arange(3), np.arange(3)],
    [np.float32(1), np.float32(2)],
    [torch.nn.Parameter(ROW), torch.nn.Parameter(ROW)],
    [[ROW, 1], [ROW, 2]],
    [(), ()],
    [torch.tensor(3), torch.tensor(4)],
]


def described(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.detach().numpy().tobytes(), value.requires_grad
    if isinstance(value, dict):
        return type(value), {name: described(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value), [described(each) for each in value]
    return value


@pytest.mark.parametrize("samples", SAMPLES, ids=lambda samples: type(samples[0]).__name__)
def test_a_batch_is_that_of_torch(samples):
    assert described(collate_samples(samples)) == described(default_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [(1, 2), (1,)],
        [{"x": 1}, {"y": 1}],
        [ROW, ROW[:1]],
        [1, "a"],
        [2**63, 0],
        [None, None],
        [ROW.to_sparse(), ROW.to_sparse()],
        [torch.nested.nested_tensor([ROW, ROW[:1]], layout=torch.jagged)] * 2,
    ],
    ids=range(8),
)
def test_what_torch_refuses_is_refused_alike(samples):
    with pytest.raises((KeyError, RuntimeError, TypeError, ValueError)) as wanted:
        default_collate(samples)
    with pytest.raises(type(wanted.value)) as caught:
        collate_samples(samples)
    assert str(caught.value) == str(wanted.value)


def test_a_loader_process_stacks_into_shared_memory(monkeypatch):
    monkeypatch.setattr(worker, "_worker_info", SimpleNamespace(id=0))
    assert collate_samples([(ROW, 1), (ROW, 2)])[0].is_shared()
