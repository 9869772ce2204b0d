"""Samples collated as torch's `default_collate` does it, bit for bit, and what it refuses; tensors as bytes."""

from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import worker

from lockstep.tensors import as_bytes, collate_samples, from_bytes, host_bytes

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


ODD_LAYOUTS = {
    "one sample of a column": torch.randn(4, 3, dtype=torch.float64)[:1, 0],
    "one row of a transposed table": torch.randn(5, 4).t()[:1],
    "one element between others": torch.arange(6)[3:].as_strided((1, 1), (7, 5)),
    "transposed": torch.randn(3, 4).t(),
    "channels_last": torch.randn(1, 3, 1, 2).to(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "no element": torch.empty(3, 0, dtype=torch.bfloat16),
    "0-dim": torch.tensor(2.5),
    "conjugated": torch.randn(1, 2, dtype=torch.complex64).conj()[:, 1],
    "negated": torch.randn(3, dtype=torch.complex128).conj().imag,
    "bool": torch.tensor([[True, False]])[:, :1],
}


@pytest.mark.parametrize("tensor", ODD_LAYOUTS.values(), ids=ODD_LAYOUTS)
def test_a_tensor_of_any_layout_is_its_bytes_in_order(tensor):
    data = as_bytes(tensor)
    assert data.numpy().tobytes() == b"".join(
        torch.tensor([each], dtype=tensor.dtype).view(torch.uint8).numpy().tobytes()
        for each in tensor.reshape(-1).tolist()
    )
    shifted = torch.empty(1 + len(data), dtype=torch.uint8)[1:].copy_(data)  # aligned for no dtype
    again = from_bytes(shifted, tensor.dtype, tensor.shape)
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(as_bytes(again), data)


def test_the_bytes_of_a_contiguous_tensor_are_its_memory():
    tensor = torch.zeros(4, 3)[:1, :1]
    as_bytes(tensor)[3] = 64
    assert tensor.item() == 2.0


def test_a_tensor_whose_bytes_were_read_can_still_be_resized():
    """As torch.ao's fake quantization does with its buffers in a forward."""
    tensor = torch.ones(1)
    assert bytes(host_bytes(tensor)) == torch.ones(1).numpy().tobytes()
    assert tensor.resize_(1000).shape == (1000,)
