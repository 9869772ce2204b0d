"""The fingerprint of a tensor on a device: every bit and place counts, in bounded memory."""

import pytest
import torch
import xxhash
from ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.distributed.world import World
from lockstep.errors import DifferenceError
from lockstep.guards import desync
from lockstep.guards import desync as digests
from lockstep.guards.desync import word_sum

DTYPES = [
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def plainly(tensor):
    """The sum of each word times an odd number of its place, in Python's own numbers."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    words = tensor.contiguous().reshape(-1).view(kind).tolist()
    return sum(word * (place * 0x9E3779B97F4A7C15 | 1) for place, word in enumerate(words)) % (1 << 64)


def values(dtype, count):
    drawn = torch.randn(count, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 50
    return torch.view_as_complex(drawn).to(dtype) if dtype.is_complex else drawn[:, 0].to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 24])
def test_a_fingerprint_is_the_same_in_chunks_of_any_size(dtype, chunk, monkeypatch):
    monkeypatch.setattr(digests, "_CHUNK", chunk)
    for count in (0, 1, 7, 64, 65):
        tensor = values(dtype, count)
        assert int(word_sum(tensor)) % (1 << 64) == plainly(tensor)


def test_each_bit_counts_also_of_equal_numbers():
    zeros = torch.zeros(5)
    assert word_sum(zeros) != word_sum(-zeros)
    tensor = values(torch.float32, 5)
    seen = {int(word_sum(tensor))}
    for place in range(5):
        for bit in range(32):
            other = tensor.clone()
            other.view(torch.int32)[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
            seen.add(int(word_sum(other)))
    assert len(seen) == 1 + 5 * 32
    nan = torch.full((3,), torch.nan)
    assert desync.fingerprints({"a": nan}) == desync.fingerprints({"a": nan.clone()})


class Largest(TorchDispatchMode):
    """The most bytes that lay in tensors made within it, at one time, and how large the largest was."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        before = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in before:
            self.largest = max(self.largest, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_fingerprint_takes_no_more_memory_than_a_chunks_places(dtype, monkeypatch):
    monkeypatch.setattr(digests, "_CHUNK", 1 << 10)
    tensor = values(dtype, 1 << 16)
    with Largest() as memory:
        word_sum(tensor)
    assert 0 < memory.largest <= 8 << 10


def told(kinds, *odd):
    """What is said where two ranks differ in these tensors."""
    names = ("model/body.weight", "model/codes", "model/head.weight", "optimizer/head.weight/exp_avg", "task/queue")
    ranks = [{name: [[0], f"{rank}" if name in odd else "same"] for name in names} for rank in range(2)]
    return desync._describe(ranks, 7, kinds)


def test_difference_is_named_by_kind_and_memory_blamed_last():
    unfrozen = {"model/body.weight": "body.weight, trained since step 4"}
    codes = {"model/codes": "the buffer codes, which the forward writes"}
    queue = {"task/queue": "task/queue, which `loss` writes"}
    weights = ("model/body.weight", "model/head.weight")
    for kinds, odd, named, memory in (
        ({}, weights, "model/body.weight", True),
        (unfrozen, weights, "body.weight, trained since step 4", True),
        (unfrozen, weights[:1], "body.weight, trained since step 4", False),
        (unfrozen | codes | queue, (*weights, "model/codes"), codes["model/codes"], False),
        (unfrozen | codes | queue, (*weights, "model/codes", "task/queue"), queue["task/queue"], False),
        ({}, (*weights, "task/queue"), "task/queue, which", False),
        ({}, ("optimizer/head.weight/exp_avg",), "the optimizer state exp_avg of head.weight", True),
    ):
        said = told(kinds, *odd)
        assert named in said, (odd, said)
        assert ("memory" in said) == memory, (odd, said)


@pytest.mark.parametrize("size", [8, 1024])
def test_what_a_rank_sends_is_bounded_and_the_odd_one_is_found(monkeypatch, size):
    sent = {}

    def gather(world, value):
        """Return the messages of all ranks: this one's, but for the odd rank."""
        sent[world.rank] = value
        if isinstance(value, dict):  # the fingerprints, after a difference
            odd = {name: [part, "0" * 16] for name, (part, _) in value.items()}
            return [odd if rank == 5 else value for rank in range(size)]
        return [odd_value if rank == 5 else value for rank in range(size)]

    monkeypatch.setattr(World, "gather", gather)
    state = {f"model/{k}": torch.full((4,), float(k)) for k in range(20)}
    world = World(rank=3, size=size, control=object())
    key = desync._holders_of(state["model/0"], world, {}).key
    odd_value = [[key, size, "0" * 16]]
    with pytest.raises(DifferenceError, match="rank 5 differs from the other ranks in model/0"):
        desync.check(state, world, 7)
    del sent[3]
    odd_value = [[key, size, xxhash.xxh3_64_hexdigest(b"x")]]
    monkeypatch.setattr(World, "gather", lambda world, value: sent.setdefault(world.rank, value) and [value] * size)
    desync.check(state, world, 7)
    assert len(repr(sent[3])) < 80
    assert len(repr(desync._holders_of(torch.zeros(1), world, {}))) < 80
    own = sent[3][0]
    assert desync._differing([sent[3]] * size) == set()
    assert desync._differing([sent[3]] * (size - 1) + [[]]) == {own[0]}  # one sent nothing
    assert desync._differing([sent[3]] * (size - 1) + [odd_value]) == {own[0]}


def replicas(world):
    """Return the check's error for each tensor in which one rank of two replicas of two has another bit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    packed = _StridedShard(0, split_factor=3)
    values = torch.arange(24.0).reshape(12, 2)
    cuts = {
        "slice": (mesh["tp"], [Shard(0)]),
        "packed": (mesh["tp"], [packed]),
        "copy": (mesh["tp"], [Replicate()]),
        "mesh": (mesh, [Replicate(), Shard(1)]),
        "sharded": (mesh["dp"], [Shard(0)]),
        "alone": (mesh, [Shard(0), Shard(1)]),
    }
    state = {f"model/{name}": distribute_tensor(values, *cut, src_data_rank=None) for name, cut in cuts.items()}
    state["model/plain"] = values.clone()
    read, found = [], []
    kept = desync.fingerprints
    desync.fingerprints = lambda tensors: read.append(sorted(tensors)) or kept(tensors)
    desync.check(state, world, 1)
    for odd, name in enumerate(state):
        tensor = state[name]
        local = tensor if name.endswith("plain") else tensor.to_local()
        if world.rank == odd % world.size:
            local.view(torch.int32)[-1, -1] ^= 1
        try:
            desync.check(state, world, 2)
            found.append("")
        except DifferenceError as error:
            found.append(str(error).partition(";")[0])
        if world.rank == odd % world.size:
            local.view(torch.int32)[-1, -1] ^= 1
    return found, read[0]


def test_a_bit_of_one_replica_is_found_wherever_its_copies_are():
    for found, read in run(replicas, 4):
        assert found == [
            "after step 2 rank 0 and rank 2 differ (no majority) in model/slice",
            "after step 2 rank 1 and rank 3 differ (no majority) in model/packed",
            "after step 2 rank 2 differs from the other ranks in model/copy",
            "after step 2 rank 1 and rank 3 differ (no majority) in model/mesh",
            "after step 2 rank 0 and rank 1 differ (no majority) in model/sharded",
            # No other rank has this part.
            "",
            "after step 2 rank 2 differs from the other ranks in model/plain",
        ]
        assert "model/alone" not in read
