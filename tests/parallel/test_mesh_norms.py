"""The norm of gradients of which some are cut over one mesh dimension, some over two, and some are whole."""

import pytest
import torch
from ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lockstep.engines.mesh_norms import MeshNorm
from lockstep.engines.optimizer_step import norms_of, total_norm
from lockstep.errors import LockstepError
from lockstep.tensors import local_of

PLACEMENTS = (
    None,
    [Replicate(), Shard(0)],
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Shard(1), Shard(0)],
    [Replicate(), _StridedShard(0, split_factor=2)],
)


def gradients_on(mesh):
    """Whole gradients, and the parts of this rank."""
    draw = torch.Generator().manual_seed(1)
    wholes = [torch.randn(8, 4, dtype=torch.float64, generator=draw) for _ in PLACEMENTS]
    cuts = []
    for whole, placements in zip(wholes, PLACEMENTS, strict=True):
        if placements is None:
            cuts.append(whole)
            continue
        parts = DTensor.from_local(whole, mesh, [Replicate(), Replicate()], run_check=False)
        cuts.append(parts.redistribute(mesh, placements))
    return wholes, cuts


def compare(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wholes, cuts = gradients_on(mesh)
    results = []
    for exact in (False, True):
        norm = MeshNorm(exact=exact)
        torch.testing.assert_close(norm(cuts), total_norm(wholes), rtol=1e-14, atol=0)
        torch.testing.assert_close(norm.each(cuts), norms_of(wholes), rtol=1e-14, atol=0)
        assert norm.each([]) == []
        assert norm([]) == 0.0
        results.append(float(norm(cuts)))
    assert local_of(cuts[-1]).shape == (4, 4)
    partial = DTensor.from_local(wholes[0], mesh, [Replicate(), Partial()], run_check=False)
    with pytest.raises(LockstepError, match="has not been summed over the ranks of its model"):
        MeshNorm()([partial])
    return results


def test_each_gradient_counts_once():
    results = run(compare, 4)
    assert all(each == results[0] for each in results)


def without_ranks():
    gradients = [torch.full((3,), 2.0), torch.zeros(2, dtype=torch.bfloat16)]
    return float(MeshNorm(exact=True)(gradients)), float(MeshNorm()(gradients))


def test_whole_gradients_need_no_exchange():
    assert without_ranks() == (pytest.approx(12**0.5), pytest.approx(12**0.5))
