import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run
from states import differing, full, gathered, sharded, zeros
from torch.distributed.tensor import Replicate, Shard

from lockstep import checkpoint
from lockstep.checkpoint.check import StoredTensor, covers_once
from lockstep.checkpoint.format import CODES, PAIRS
from lockstep.checkpoint.grid import Grid, grid_of
from lockstep.checkpoint.layout import SliceEntry, TensorBox, block_of
from lockstep.checkpoint.read import _fill
from lockstep.checkpoint.write import bytes_of
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, LockstepError, PeerError

STATE = {"epoch": 1, "global_step": 500, "running_loss": 2.5, "name": "é", "list": [1, {"a": None}]}


def write(world, folder, *hows):
    for step, how in enumerate(hows):
        checkpoint.save(folder, step, sharded(full(), world, how), STATE, world, engine=how)


def read(world, folder, hows):
    """Loads every step, each into another layout; the names that differ."""
    wrong = []
    for step in range(len(hows)):
        how = hows[(step + world.size) % len(hows)]
        tensors = sharded(zeros(full()), world, how)
        checkpoint.load(checkpoint.path_of(folder, step), tensors, world)
        wrong += [(step, how, name) for name in differing(gathered(tensors), full())]
    return wrong


def files_of(path):
    return sorted(file.name for file in path.iterdir())


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_every_world_reads_what_any_world_wrote(tmp_path, writers):
    hows = ["plain", "columns", "hybrid"]  # hybrid on one rank is rows
    run(write, writers, tmp_path, *hows)
    for readers in (1, 2, 4):
        assert run(read, readers, tmp_path, hows) == [[]] * readers
    prints = {checkpoint.fingerprint(checkpoint.path_of(tmp_path, step)) for step in range(3)}
    model = {name.removeprefix("model/"): each for name, each in full().items() if name.startswith("model/")}
    assert prints == {checkpoint.fingerprint_of(model)}
    for step in range(3):
        path = checkpoint.path_of(tmp_path, step)
        assert checkpoint.verify(path) == []
        assert checkpoint.read_state(path) == STATE


def test_replicated_tensors_are_shared_out_and_ties_saved_once(tmp_path):
    run(write, 2, tmp_path, "plain")
    path = checkpoint.path_of(tmp_path, 0)
    index = json.loads((path / "index.json").read_text())
    names = [entry["name"] for entry in index["tensors"]]
    assert len(names) == len(set(names)) == len(full()) - 1
    assert index["aliases"] == {"model/head.weight": "model/embed.weight"}
    sizes = [(path / f"rank-0000{rank}.safetensors").stat().st_size for rank in range(2)]
    assert max(sizes) < 1.5 * min(sizes)


def few_rows(world, folder):
    """Three rows on four ranks: one rank holds none, and has no file."""
    state = sharded({"model/a": torch.arange(6.0).reshape(3, 2)}, world, "rows")
    checkpoint.save(folder, 1, state, {}, world, engine="fsdp")


def test_a_rank_without_a_row_writes_no_file(tmp_path):
    run(few_rows, 4, tmp_path)
    path = checkpoint.path_of(tmp_path, 1)
    assert [name for name in files_of(path) if "00003" in name] == []
    wanted = {"model/a": torch.zeros(3, 2)}
    checkpoint.load(path, wanted, None)
    assert torch.equal(wanted["model/a"], torch.arange(6.0).reshape(3, 2))


def shard_a_model(world, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1))
    wanted = {f"model/{name}": each.clone() for name, each in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    state = {f"model/{name}": each for name, each in model.state_dict().items()}
    path = checkpoint.save(folder, 1, state, {}, world, engine="fsdp")
    with torch.no_grad():
        for each in state.values():
            each.zero_()
    checkpoint.load(path, state, world)
    return differing(gathered(state), wanted), checkpoint.fingerprint(path)


def test_fsdp_shards_hold_the_plain_models_tensors(tmp_path):
    found = [run(shard_a_model, size, tmp_path / str(size)) for size in (1, 3)]
    assert {str(each) for results in found for each in results} == {str(([], found[0][0][1]))}


def other_names(world, folder):
    tensors = {"model/a": torch.zeros(2)} if world.rank else {"model/b": torch.zeros(2)}
    with pytest.raises(LockstepError, match="set of tensors"):
        checkpoint.save(folder, 1, tensors, {}, world, engine="ddp")


def one_rank_reads_another_shape(world, path):
    wanted = {"model/a": torch.zeros(2 + world.rank)}
    with pytest.raises(
        PeerError if world.rank == 0 else CheckpointError, match=r"model/a .float32 \[2\], not"
    ) as found:
        checkpoint.load(path, wanted, world)
    assert found.value.exit_code == 2
    assert wanted["model/a"].sum() == 0


def test_ranks_that_disagree_all_raise(tmp_path):
    run(other_names, 2, tmp_path)
    path = checkpoint.save(tmp_path, 3, {"model/a": torch.ones(2)}, {}, World(), engine="single")
    run(one_rank_reads_another_shape, 2, path)


def test_parameters_are_filled_in_place(tmp_path):
    layer = torch.nn.Linear(3, 2)
    wanted = {f"model/{name}": value for name, value in layer.named_parameters()}
    path = checkpoint.save(
        tmp_path, 1, {name: torch.ones_like(each) for name, each in wanted.items()}, {}, World(), engine="s"
    )
    checkpoint.load(path, wanted, None)
    assert layer.weight.sum() == 6
    assert layer.weight.requires_grad


def test_mismatches_name_up_to_three_tensors_and_fill_nothing(tmp_path):
    tensors = {f"model/{letter}": torch.ones(2) for letter in "abcde"} | {"optimizer/a/step": torch.tensor(1.0)}
    path = checkpoint.save(tmp_path, 1, tensors, {}, World(), engine="single")
    weights = {name: torch.zeros(2) for name in tensors if name.startswith("model/")}
    checkpoint.load(path, weights, None)  # weights alone are a whole group
    assert all(each.sum() == 2 for each in weights.values())
    untouched = torch.zeros(2)
    with pytest.raises(CheckpointError, match="also has model/b, model/c, model/d and 1 more"):
        checkpoint.load(path, {"model/a": untouched}, None)
    with pytest.raises(CheckpointError, match="has no model/z"):
        checkpoint.load(path, {**weights, "model/z": untouched}, None)
    with pytest.raises(CheckpointError, match=r"differs in model/a \(float32 \[2\], not float64 \[2\]\)"):
        checkpoint.load(path, {**weights, "model/a": torch.zeros(2, dtype=torch.float64)}, None)
    assert untouched.sum() == 0


def test_only_a_parameters_whole_optimizer_state_may_be_absent(tmp_path):
    """That of a parameter which had no gradient; not a part of it, and not everybody's."""
    a = {"optimizer/a/step": torch.tensor(1.0), "optimizer/a/moment": torch.ones(2)}
    b = {"optimizer/b/step": torch.tensor(1.0), "optimizer/b/moment": torch.ones(2)}
    path = checkpoint.save(tmp_path, 1, a, {}, World(), engine="single")
    wanted = {name: torch.zeros_like(tensor) for name, tensor in (a | b).items()}
    checkpoint.load(path, wanted, None)
    assert wanted.keys() == a.keys()
    assert wanted["optimizer/a/moment"].sum() == 2
    with pytest.raises(CheckpointError, match="has no optimizer/a/second"):
        checkpoint.load(path, a | b | {"optimizer/a/second": torch.ones(2)}, None)
    nobody = checkpoint.save(tmp_path, 2, {"model/a": torch.ones(2)}, {}, World(), engine="single")
    with pytest.raises(CheckpointError, match="has no optimizer/b/moment"):
        checkpoint.load(nobody, {"model/a": torch.ones(2)} | b, None)


def test_complete_checkpoint_stays_and_damaged_one_is_replaced(tmp_path):
    path = checkpoint.save(tmp_path, 7, {"model/a": torch.ones(4)}, {"n": 1}, World(), engine="single")
    before = {file.name: (file.stat().st_ino, file.read_bytes()) for file in path.iterdir()}
    again = checkpoint.save(tmp_path, 7, {"model/a": torch.zeros(4)}, {"n": 2}, World(), engine="single")
    assert again == path
    assert {file.name: (file.stat().st_ino, file.read_bytes()) for file in path.iterdir()} == before
    (path / "state.json").unlink()
    checkpoint.save(tmp_path, 7, {"model/a": torch.zeros(4)}, {"n": 2}, World(), engine="single")
    assert checkpoint.read_state(path) == {"n": 2}
    assert files_of(path.parent) == ["step-00000007"]


def test_every_dtype_of_the_format_keeps_its_bits(tmp_path):
    bits = torch.randint(0, 256, (6, 16), dtype=torch.uint8)
    tensors = {f"extra/{name}": bits.view(getattr(torch, name)) for name in (*CODES, *PAIRS) if name != "bool"}
    path = checkpoint.save(tmp_path, 1, tensors, {}, World(), engine="single", exempt=tensors)
    wanted = {name: torch.zeros_like(each) for name, each in tensors.items()}
    checkpoint.load(path, wanted, None)
    for name in wanted:
        assert torch.equal(wanted[name].view(torch.uint8), bits), name


def test_tensors_begin_at_a_multiple_of_eight_bytes(tmp_path):
    """So that whoever maps the file may read every dtype in place, whatever the names are."""
    for step in range(1, 9):
        tensors = {"model/" + "a" * step: torch.zeros(3, dtype=torch.float64)}
        checkpoint.save(tmp_path, step, tensors, {}, World(), engine="single")
        (file,) = checkpoint.path_of(tmp_path, step).glob("*.safetensors")
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


def test_lazy_views_of_the_same_memory_keep_their_own_values(tmp_path):
    """`conj()` and the imaginary part of it are flags on the same bytes: neither the bytes nor a tie with them."""
    for dtype in (torch.complex64, torch.complex128):
        values = torch.randn(4, 3, dtype=dtype)
        tensors = {
            "model/a": values,
            "model/conjugate": values.conj(),
            "model/negative": torch._neg_view(values.real.contiguous()),
            "model/imaginary": values.conj().imag,
        }
        path = checkpoint.save(tmp_path, dtype.itemsize, tensors, {}, World(), engine="single")
        saver = checkpoint.Saver(World())
        saver.begin(
            tensors, lambda share, world: checkpoint.write_share(tmp_path, 99, share, {}, world, engine="single")
        )
        saver.settle(last=True)
        plain = {name: tensor.resolve_conj().resolve_neg() for name, tensor in tensors.items()}
        for each in (path, checkpoint.path_of(tmp_path, 99)):
            wanted = {name: torch.zeros(4, 3, dtype=tensor.dtype) for name, tensor in tensors.items()}
            checkpoint.load(each, wanted, None)
            assert differing(wanted, plain) == []
        checkpoint.path_of(tmp_path, 99).rename(tmp_path / f"done-{dtype.itemsize}")


@pytest.mark.parametrize(
    ("tensors", "state", "reason"),
    [
        ({"model/a": torch.zeros(2, dtype=torch.bits8)}, {}, "has no bits8"),
        ({"model/a": torch.zeros(2, device="meta")}, {}, "no dense values"),
        ({"__metadata__": torch.zeros(2)}, {}, "name"),
        ({"": torch.zeros(2)}, {}, "name"),
        ({"model/a": torch.zeros(2)}, {"x": torch.zeros(1)}, "plain numbers"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_writing(tmp_path, tensors, state, reason):
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.save(tmp_path, 1, tensors, state, World(), engine="single")
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "checkpoints"])
    assert checkpoint.list_steps(tmp_path) == []


@st.composite
def cut_boxes(draw):
    """A shape, a grid of slices that tile it, and a box inside it."""
    shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=3))
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    blocks = [TensorBox((), ())]
    for edge in edges:
        steps = list(pairwise(edge))
        blocks = [TensorBox((*b.offsets, low), (*b.shape, high - low)) for b in blocks for low, high in steps]
    low = [draw(st.integers(0, size - 1)) for size in shape]
    box = TensorBox(tuple(low), tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, low, strict=True)))
    return tuple(shape), blocks, box


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cut_boxes(), st.randoms(use_true_random=False))
def test_any_box_is_filled_from_any_slices(cut, random):
    shape, blocks, box = cut
    values = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)

    def part(block):
        return tuple(slice(at, at + count) for at, count in zip(block.offsets, block.shape, strict=True))

    entries = [SliceEntry("a", "float32", shape, b.offsets, b.shape, str(i), "a") for i, b in enumerate(blocks)]
    random.shuffle(entries)
    target = torch.zeros(box.shape)
    _fill(target, box, StoredTensor("float32", shape, entries), lambda entry, cut: values[part(entry.block)][cut])
    assert torch.equal(target, values[part(box)])
    assert covers_once(blocks, shape)
    assert not covers_once(blocks[1:], shape)
    assert not covers_once([*blocks, blocks[0]], shape)


def test_bytes_of_a_strided_tensor_are_its_elements_in_order():
    for tensor in (torch.arange(6, dtype=torch.int16)[::2], torch.arange(6, dtype=torch.int16).view(3, 2).t()):
        assert bytes(bytes_of(tensor)) == np.array(tensor.tolist(), dtype="<i2").tobytes()


@st.composite
def shardings(draw):
    """A mesh of up to 1024 ranks, a shape, and which dimension of the mesh cuts which of the tensor."""
    sizes = draw(st.sampled_from([(1,), (4,), (1024,), (2, 3), (32, 32), (2, 2, 3), (8, 128)]))
    shape = tuple(draw(st.lists(st.integers(1, 1100 if len(sizes) == 1 else 70), min_size=1, max_size=3)))
    axes = draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    return sizes, shape, {axis: draw(st.integers(0, len(shape) - 1)) for axis in sorted(axes)}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(shardings(), st.randoms(use_true_random=False))
def test_grid_on_rank_0_has_what_each_of_a_thousand_ranks_writes(case, random):
    sizes, shape, shards = case
    mesh = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    grid = grid_of(shape, mesh, shards)
    by_file = {file: (offsets, local) for file, offsets, local in grid.slices()}
    assert grid.shape == shape
    assert covers_once([TensorBox(*each) for each in by_file.values()], shape)
    for rank in random.sample(range(mesh.numel()), min(mesh.numel(), 40)):
        at = [int(each) for each in (mesh == rank).nonzero()[0]]
        kinds = [Shard(shards[axis]) if axis in shards else Replicate() for axis in range(len(sizes))]
        own = SimpleNamespace(shape=sizes, get_coordinate=lambda at=at: at)
        tensor = SimpleNamespace(shape=shape, dim=lambda: len(shape), placements=kinds, device_mesh=own)
        block = block_of(tensor)
        is_writer = not any(at[axis] for axis in range(len(sizes)) if axis not in shards) and all(block.shape)
        assert ((block.offsets, block.shape) == by_file.get(rank)) == is_writer
        low = [random.randrange(size) for size in shape]
        extent = [random.randint(1, size - begin) for size, begin in zip(shape, low, strict=True)]
        overlapping = {
            each
            for each in grid.slices()
            if all(a < b + n and b < a + m for a, m, b, n in zip(low, extent, each[1], each[2], strict=True))
        }
        assert set(grid.within(low, extent)) == overlapping
    fields = json.loads(json.dumps(grid.to_json()))
    assert Grid.from_json(fields["cuts"], fields["files"], len(grid.files)) == grid
    if len(shards) == 1:
        assert len(json.dumps(fields)) < 200  # whatever the number of ranks
