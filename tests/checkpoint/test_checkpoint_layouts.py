"""Every plan of a model on the ranks reads what any plan wrote: tensor parallelism, replicas, FSDP over it, packed."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

# Private: FSDP makes it, and it cuts each of several joined weights.
from torch.distributed.tensor.placement_types import _StridedShard

from lockstep import checkpoint
from lockstep.checkpoint.grid import MOST_PARTS, Grid, grid_of
from lockstep.checkpoint.layout import _cuts_of, block_of, boxes_of, parts_of, replicas_of, share_out
from lockstep.checkpoint.write import bytes_of
from lockstep.distributed.world import World
from lockstep.engines.fsdp.apply import correct_placements
from lockstep.errors import CheckpointError
from lockstep.tensors import local_of

PLANS = ["tensor 2 x 2 replicas", "tensor 2 x 2 on one mesh", "tensor 4", "fsdp 2 x tensor 2", "fsdp 2 x 2"]
PACKED = _StridedShard(0, split_factor=3)
# How tensor parallelism cuts each parameter; those that are missing stay plain.
CUTS = {
    "table.weight": Shard(0),
    "joined.weight": PACKED,
    "joined.bias": PACKED,
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
    "down.bias": Replicate(),
}


class Net(nn.Module):
    """Joined queries, keys and values; columns, rows, and a table of 7 rows that is tied."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(5)
        self.joined = nn.Linear(4, 24)
        self.up = nn.Linear(3, 10)
        self.down = nn.Linear(8, 5)
        self.head = nn.Linear(4, 7, bias=False)
        self.register_buffer("count", torch.arange(3))


def planned(plan):
    """The state of a model and its AdamW after a step, placed as the plan says; elementwise, so equal in all."""
    torch.manual_seed(3)
    net = Net()
    if plan.startswith("tensor 4"):
        mesh = init_device_mesh("cpu", (4,))
    elif plan != "whole":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if "tensor" in plan:
        for name, cut in CUTS.items():
            module = net.get_submodule(name.partition(".")[0])
            cuts = [cut]
            on = mesh
            if plan.endswith("on one mesh"):
                cuts = [Replicate(), cut]
            elif mesh.ndim == 2:
                on = mesh["tp"]
            part = distribute_tensor(net.get_parameter(name).detach(), on, cuts, src_data_rank=None)
            module.register_parameter(name.partition(".")[2], nn.Parameter(part))
    net.head.weight = net.table.weight
    if plan.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=mesh["dp"] if "tensor" in plan else mesh)
        correct_placements(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    for parameter in net.parameters():
        parameter.grad = (parameter * 0.5 + 0.1).detach()
    optimizer.step()
    state = {f"model/{name}": tensor for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        state |= {f"optimizer/{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return state


def load_all(folder, plan, world):
    """The checkpoints and tensors whose bytes are others than the plan's own, after a load into zeros."""
    wanted = planned(plan)
    kept = {name: bytes(bytes_of(local_of(tensor))) for name, tensor in wanted.items()}
    wrong = []
    for step in range(len(PLANS) + 1):
        with torch.no_grad():
            for tensor in wanted.values():
                tensor.zero_()
        checkpoint.load(checkpoint.path_of(folder, step), wanted, world)
        for name, tensor in wanted.items():
            if bytes(bytes_of(local_of(tensor))) != kept[name]:
                wrong.append((plan, step, name))
    return wrong


def each_plan(world, folder):
    for step, plan in enumerate(PLANS, 1):
        checkpoint.save(folder, step, planned(plan), {}, world, engine="ddp")
    places = {name: tensor.placements for name, tensor in planned("fsdp 2 x tensor 2").items() if is_sharded(tensor)}
    return [fault for plan in PLANS for fault in load_all(folder, plan, world)], places


def is_sharded(tensor):
    return isinstance(tensor, DTensor)


def test_each_plan_reads_what_any_plan_wrote(tmp_path):
    checkpoint.save(tmp_path, 0, planned("whole"), {}, World(), engine="single")
    for wrong, places in run(each_plan, 4, tmp_path):
        assert wrong == []
        # FSDP over what is cut already: twice, packed, in two dimensions, and not at all.
        assert places["model/up.weight"] == (_StridedShard(0, split_factor=2), Shard(0))
        assert places["model/joined.weight"] == (_StridedShard(0, split_factor=2), PACKED)
        assert places["optimizer/down.weight/exp_avg"] == (Shard(0), Shard(1))
        assert places["model/norm.weight"] == (Shard(0),)
    assert load_all(tmp_path, "whole", None) == []
    paths = [checkpoint.path_of(tmp_path, step) for step in range(len(PLANS) + 1)]
    assert [checkpoint.verify(path) for path in paths] == [[]] * len(paths)
    assert len({checkpoint.fingerprint(path, prefix) for path in paths for prefix in ("model/", "optimizer/")}) == 2
    # Of two replicas the first writes the shards, and what all have is divided among the four ranks.
    index = json.loads((paths[1] / "index.json").read_text())
    files = {entry["name"]: entry["files"] for entry in index["tensors"]}
    assert files["model/up.weight"] == [[0, 2, 1]]
    assert files["model/joined.weight"] == [[0, 2, 1]] * 3
    assert len({str(files[name]) for name in files if "norm" in name or "down.bias" in name}) == 4
    assert index["aliases"] == {"model/table.weight": "model/head.weight"}


@st.composite
def plans(draw):
    """A shape, a cut by tensor parallelism, one by FSDP over it, and a mesh (replicas, dp, tp)."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    packed = st.builds(lambda dim, weights: _StridedShard(dim, split_factor=weights), dims, st.integers(1, 4))
    tensor = draw(st.one_of(st.just(Replicate()), st.builds(Shard, dims), packed))
    data = draw(st.one_of(st.just(Replicate()), st.builds(Shard, dims)))
    return shape, tensor, data, draw(st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4)))


def chunk(tensor, placement, ranks, at):
    """The piece of a tensor that torch's placement gives to a rank."""
    if isinstance(placement, Replicate):
        return tensor
    return placement._split_tensor(tensor, ranks, with_padding=False)[0][at]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(plans())
def test_boxes_of_all_ranks_cover_a_tensor_once_in_each_replica(case):
    shape, tensor, data, sizes = case
    full = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    placement = data
    # As torch's FSDP names its cut of what tensor parallelism has cut.
    if not isinstance(data, Replicate) and getattr(tensor, "dim", None) == data.dim and sizes[2] > 1:
        placement = _StridedShard(data.dim, split_factor=sizes[2])
    placements = (Replicate(), placement, tensor)
    mesh = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    grid = grid_of(shape, mesh, *_cuts_of(placements, sizes))
    fields = json.loads(json.dumps(grid.to_json()))
    assert Grid.from_json(fields["cuts"], fields["files"], mesh.numel(), fields.get("parts", 1)) == grid
    seen = torch.zeros(shape, dtype=torch.int64)
    for at in ((replica, i, j) for replica in range(sizes[0]) for i in range(sizes[1]) for j in range(sizes[2])):
        local = chunk(chunk(full, tensor, sizes[2], at[2]), data, sizes[1], at[1])
        own = SimpleNamespace(shape=sizes, get_coordinate=lambda at=at: at)
        part = SimpleNamespace(shape=shape, numel=full.numel, placements=placements, device_mesh=own)
        part.to_local = lambda local=local: local
        pieces = parts_of(part)
        boxes = []
        for box, values in pieces:
            place = tuple(slice(begin, begin + count) for begin, count in zip(box.offsets, box.shape, strict=True))
            assert torch.equal(values, full[place])
            seen[place] += 1
            boxes.append((box.offsets, box.shape))
        assert sum(values.numel() for _, values in pieces) == local.numel()
        copies = [k for k, placed in zip(at, placements, strict=True) if isinstance(placed, Replicate)]
        if not any(copies) and local.numel():
            assert [each[1:] for each in grid.slices() if each[0] == mesh[at]] == boxes
            assert [grid.part_of(offsets) for offsets, _ in boxes] == list(range(len(boxes)))
    copies = [ranks for ranks, placed in zip(sizes, placements, strict=True) if isinstance(placed, Replicate)]
    assert (seen == torch.Size(copies).numel()).all()


def test_replicas_of_a_slice_begin_with_the_first():
    ranks = torch.arange(8).reshape(2, 2, 2)
    whole = SimpleNamespace(mesh=ranks)
    whole._get_root_mesh = lambda: whole
    for own, replicas in (
        (ranks, [ranks.tolist()]),
        (ranks[1, :, 1], [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (ranks[1], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        # Two dimensions that were joined to one.
        (ranks[:, 1].reshape(-1), [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ):
        mesh = SimpleNamespace(mesh=own, _get_root_mesh=lambda: whole)
        assert replicas_of(mesh, World()).tolist() == replicas


def packed(size, weights, local=None):
    """A vector of joined weights on two ranks, of which the first is this process."""
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)
    placement = _StridedShard(0, split_factor=weights)
    own = chunk(torch.arange(float(size)), placement, 2, 0) if local is None else local
    return DTensor.from_local(own, mesh, [placement], run_check=False, shape=torch.Size([size]), stride=(1,))


def test_parts_of_a_packed_tensor_are_pieces_of_their_own():
    pieces = share_out({"model/a": packed(8, 2), "model/b": torch.zeros(1)}, World()).pieces
    assert [(piece.key, piece.offsets, piece.local.tolist()) for piece in pieces[:2]] == [
        ("model/a", (0,), [0.0, 1.0]),
        ("model/a[1]", (4,), [4.0, 5.0]),
    ]
    copies, _ = checkpoint.Saver(World())._copy(share_out({"model/a": packed(8, 2)}, World()))
    assert [(piece.key, piece.local.tolist()) for piece in copies.pieces] == [
        ("model/a", [0.0, 1.0]),
        ("model/a[1]", [4.0, 5.0]),
    ]
    assert len(boxes_of(packed(8, 2))) == 2
    assert block_of(packed(6, 1)).shape == (3,)


def test_what_packed_tensors_cannot_do_is_refused_by_name():
    with pytest.raises(CheckpointError, match="2 parts on a rank, and one is needed here; redistribute it"):
        block_of(packed(8, 2))
    with pytest.raises(CheckpointError, match=r"part 1 of 'model/a' is stored as 'model/a\[1\]', which is another"):
        share_out({"model/a": packed(8, 2), "model/a[1]": torch.zeros(1)}, World())
    with pytest.raises(CheckpointError, match="'model/a' has 257 parts on a rank, and a checkpoint stores 256; join"):
        share_out({"model/a": packed(1028, 257)}, World())
    with pytest.raises(CheckpointError, match=r"model/a: the shard on this rank has the shape \[3\], and .* \[4\]"):
        share_out({"model/a": packed(8, 2, torch.zeros(3))}, World())


def test_a_part_that_is_not_finite_is_named_by_its_tensor(tmp_path):
    """Also where it is not the last of the parts."""
    for step in range(4):
        values = torch.zeros(4)
        values[step] = torch.nan
        with pytest.raises(CheckpointError, match="^model/a is not finite"):
            checkpoint.save(tmp_path, step, {"model/a": packed(8, 2, values)}, {}, World(), engine="ddp")
    checkpoint.save(tmp_path, 5, {"model/a": packed(8, 2, values)}, {}, World(), engine="ddp", exempt=["model/a"])


@pytest.mark.parametrize(
    ("files", "parts", "reason"),
    [
        ([[0, 2, 1]] * 3, 3, None),
        ([[0, 2, 1]] * 3, 2, "more than there are files"),
        ([[0, 1, 0], [1, 1, 0], [0, 1, 0], [0, 1, 0], [0, 1, 0], [1, 1, 0]], 3, "one file for each"),
        ([[0, 2, 1]] * 3, 0, "from 1 to 256"),
        ([[0, 2, 1]] * 3, MOST_PARTS + 1, "from 1 to 256"),
        ([[0, 2, 1]] * 3, True, "from 1 to 256"),
        ([[0, 2, 1]] * 3, "3", "from 1 to 256"),
        ([[0, 2, 1]] * 3, [3], "from 1 to 256"),
    ],
)
def test_parts_of_an_index_are_not_trusted(files, parts, reason):
    grid = Grid.from_json([[[4, 6]]], files, 2, parts)
    if reason:
        assert reason in grid
    else:
        assert grid.files == (0, 1) * 3
