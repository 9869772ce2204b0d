import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from ranks import run
from states import full, sharded

from lockstep import checkpoint
from lockstep.checkpoint.format import Manifest, dump
from lockstep.checkpoint.layout import read_header
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, PeerError

NAMES = ["manifest.json", "index.json", "rank-00000.safetensors", "state.json"]


def save(folder, step, tensors=None):
    return checkpoint.save(folder, step, tensors or full(), {"epoch": step}, World(), engine="single")


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"), 2)


@pytest.fixture
def path(master, tmp_path):
    """A copy of a whole checkpoint, after an older one."""
    save(tmp_path, 1, {"model/a": torch.ones(2)})
    return shutil.copytree(master, checkpoint.path_of(tmp_path, 2))


def refused(path, name):
    """Whether verify, newest, fingerprint and load all see it and name the file."""
    said = []
    older = checkpoint.newest(path.parent.parent, say=said.append)
    assert older == checkpoint.path_of(path.parent.parent, 1)
    assert len(said) == 1
    assert name in said[0]
    assert "\n" not in said[0]
    assert any(name in problem for problem in checkpoint.verify(path))
    wanted = {key: torch.zeros_like(each) for key, each in full().items()}
    for call in (lambda: checkpoint.load(path, wanted, None), lambda: checkpoint.fingerprint(path)):
        with pytest.raises(CheckpointError) as found:
            call()
        assert name in str(found.value)
    assert not any(each.any() for each in wanted.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_byte_is_found_and_the_file_named(path, name):
    draw = random.Random(name)
    data = (path / name).read_bytes()
    for number in range(60):
        at = number if number < 10 else draw.randrange(len(data))
        (path / name).write_bytes(data[:at] + bytes([data[at] ^ draw.randrange(1, 256)]) + data[at + 1 :])
        problems = checkpoint.verify(path)
        assert problems, f"byte {at}"
        assert all(name in problem for problem in problems)
        if number % 10 == 0:
            refused(path, name)


def tiny(world, folder):
    """A checkpoint of a few bytes of data, of which each rank writes a model's and an optimizer's."""
    names = ("model/a", "optimizer/a/exp_avg")
    tensors = {name: torch.arange(2.0 * world.size).reshape(-1, 1) + 1 for name in names}
    return checkpoint.save(folder, 1, sharded(tensors, world, "rows"), {"n": 1}, world, engine="fsdp")


def flips(world, path):
    """Inverts a bit of each byte of each file, one at a time; the places where a load or the search believed it."""
    files = {file: file.read_bytes() for file in sorted(path.iterdir())}
    # The manifest is the same to every rank: two bytes of three are left to the test with one.
    step = {file: 3 if file.name == "manifest.json" else 1 for file in files}
    places = [(file, at) for file, data in files.items() for at in range(0, len(data), step[file])]
    believed = []
    world.barrier()
    for number, (file, at) in enumerate(places):
        if world.is_main:  # a load ends when every rank has read, so nobody reads any more
            places[number - 1][0].write_bytes(files[places[number - 1][0]])
            data = bytearray(files[file])
            data[at] ^= 1 << at % 8
            file.write_bytes(data)
        world.barrier()
        wanted = {name: torch.zeros(2 * world.size, 1) for name in ("model/a", "optimizer/a/exp_avg")}
        try:
            checkpoint.load(path, wanted, world)
            believed.append((file.name, at, "load"))
        except (CheckpointError, PeerError) as error:
            if file.name not in str(error) or any(each.any() for each in wanted.values()):
                believed.append((file.name, at, str(error)))
        if number % 20 == 0:
            said = []
            found = checkpoint.find_newest(path.parent.parent, world, said.append)
            if found or (world.is_main and file.name not in said[0]):
                believed.append((file.name, at, f"find: {said}"))
    return len(places), believed


def test_each_flipped_byte_is_found_by_a_load_of_two_ranks(tmp_path):
    """Each rank checks a part of the files: what one finds, none of them may believe."""
    path, _ = run(tiny, 2, tmp_path)
    found = run(flips, 2, path)
    assert [believed for _, believed in found] == [[], []]
    assert found[0][0] > 700


def only(world, path, wanted):
    """Which error a load of this rank's part of the state ends with."""
    with pytest.raises((CheckpointError, PeerError), match=r"rank-0000\d\.safetensors is damaged") as found:
        checkpoint.load(path, wanted, world)
    assert not any(each.any() for each in wanted.values())
    return str(found.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flip_in_the_optimizers_state_is_found_by_every_load(tmp_path, rank):
    """Also where the weights alone are wanted (--init-from), and by one process as by two."""
    path, _ = run(tiny, 2, tmp_path)
    file = path / f"rank-0000{rank}.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    offsets = json.loads(data[8:start])["optimizer/a/exp_avg"]["data_offsets"]
    data[start + offsets[0]] ^= 1  # the last bit of a mantissa
    file.write_bytes(data)
    both = {name: torch.zeros(4, 1) for name in ("model/a", "optimizer/a/exp_avg")}
    for wanted in (both, {"model/a": torch.zeros(4, 1)}):
        for size in (1, 2):
            assert all(file.name in each for each in run(only, size, path, wanted))
        assert file.name in only(None, path, wanted)
    assert file.name in checkpoint.verify(path)[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_found(path, name):
    data = (path / name).read_bytes()
    for length in [0, 1, 8, len(data) - 1, *random.Random(name).sample(range(len(data)), 10)]:
        (path / name).write_bytes(data[:length])
        assert any(name in problem for problem in checkpoint.verify(path)), length
    (path / name).write_bytes(data + b"\0")
    refused(path, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_found(path, name):
    (path / name).unlink()
    refused(path, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_checkpoint_is_found(path, name, tmp_path):
    other = save(tmp_path / "other", 3, {key: each + 1 for key, each in full().items() if each.dtype.is_floating_point})
    shutil.copy(other / name, path / name)
    refused(path, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_link_is_refused_even_to_the_same_bytes(path, name, tmp_path):
    shutil.move(path / name, tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    assert any(f"{name} is not a regular file" in problem for problem in checkpoint.verify(path))


def test_a_fifo_or_an_extra_file_is_found(path):
    (path / "rank-00001\x1b[31m.json").write_text("{}")
    assert checkpoint.verify(path) == [r"step-00000002/rank-00001\x1b[31m.json does not belong there"]
    (path / "state.json").unlink()
    os.mkfifo(path / "state.json")
    assert "step-00000002/state.json is not a regular file" in checkpoint.verify(path)


@pytest.mark.parametrize("name", [".nfs000000000002f1b900000003", ".fuse_hidden0000a1b200000001"])
def test_leftover_of_an_open_file_on_nfs_is_no_damage(path, name):
    (path / name).write_bytes(b"removed while it was open")
    assert checkpoint.verify(path) == []
    assert checkpoint.newest(path.parent.parent, say=pytest.fail) == path
    (path / name).rename(path / name[1:])
    assert "does not belong there" in checkpoint.verify(path)[0]


def forge(path, change=None, **files):
    """Rewrites files and the manifest as an attacker would: with checksums that hold."""
    for name, data in files.items():
        (path / name.replace("__", "-").replace("_", ".")).write_bytes(data)
    listed = {
        file.name: {"size": file.stat().st_size, "xxh3_64": xxhash.xxh3_64_hexdigest(file.read_bytes())}
        for file in sorted(path.iterdir())
        if file.name != "manifest.json"
    }
    old = "index.json" not in listed
    manifest = Manifest(4, 2, "ddp", 0, listed, format=1) if old else Manifest(2, 1, "single", 0, listed)
    if change:
        change(listed)
    (path / "manifest.json").write_bytes(manifest.dump())


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("../secret", {"size": 1, "xxh3_64": "0" * 16}),
        ("/etc/passwd", {"size": 1, "xxh3_64": "0" * 16}),
        ("rank-00000.json/../../x", {"size": 1, "xxh3_64": "0" * 16}),
        ("rank-00009.safetensors\n", {"size": 1, "xxh3_64": "0" * 16}),
        ("rank-00009.safetensors", {"size": -1, "xxh3_64": "0" * 16}),
        ("rank-00009.safetensors", {"size": 1 << 70, "xxh3_64": "0" * 16}),
        ("rank-00009.safetensors", {"size": True, "xxh3_64": "0" * 16}),
        ("rank-00009.safetensors", {"size": 1, "xxh3_64": "0" * 15 + "\x1b"}),
        ("rank-00009.safetensors", {"size": 1}),
        ("rank-00009.safetensors", []),
    ],
)
def test_a_hostile_manifest_is_refused(path, name, entry):
    forge(path, lambda listed: listed.update({name: entry}))
    (problem,) = checkpoint.verify(path)
    assert "manifest.json is damaged" in problem
    assert problem.isprintable()
    with pytest.raises(CheckpointError, match="manifest"):
        checkpoint.load(path, {"model/a": torch.zeros(1)}, None)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a": 1, "a": 2}', b"", b"\xff\xfe", b"1" * 5000, b"[1]"])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "index.json"])
def test_hostile_json_is_one_line(path, name, text):
    if name == "manifest.json":
        (path / name).write_bytes(text)
    else:
        forge(path, **{name.replace("-", "__").replace(".", "_"): text})
    (problem,) = checkpoint.verify(path)
    assert name in problem
    assert problem.isprintable()


def test_a_newer_format_says_to_update(path):
    fields = json.loads((path / "manifest.json").read_bytes()) | {"format": 3, "new": True}
    (path / "manifest.json").write_bytes(dump(fields))
    assert "update lockstep" in checkpoint.verify(path)[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cuts": [[[10**12, 1]], [[5, 1]]]}, "does not match"),
        ({"cuts": [[[-7, 1]], [[5, 1]]]}, "lists of runs"),
        ({"cuts": [[[7.0, 1]], [[5, 1]]]}, "lists of runs"),
        ({"cuts": [[[True, 1]], [[5, 1]]]}, "lists of runs"),
        ({"cuts": [[[7, 1]]]}, "does not match"),
        ({"cuts": [[[7, 1]], [[5]]]}, "lists of runs"),
        ({"cuts": [[[7, 1]], []]}, "no slice"),
        ({"cuts": [[[1, 10**15]], [[5, 1]]]}, "more than there are files"),
        ({"cuts": [[[7, 0]], [[5, 1]]]}, "no slice"),
        ({"cuts": {}}, "lists of runs"),
        ({"cuts": [[[7, 1]]] * 65}, "dimensions"),
        ({"files": [[0, 2, 0]]}, "more than there are files"),
        ({"files": [[0, 10**15, 1]]}, "more than there are files"),
        ({"files": []}, "one file for each"),
        ({"files": [[1, 1, 0]]}, "not in the manifest"),
        ({"files": [[-1, 1, 0]]}, "lists of runs"),
        ({"dtype": "float64"}, "does not match"),
        ({"dtype": "os:system"}, "unknown dtype"),
        ({"dtype": ["float32"]}, "another type"),
        ({"name": "model/other\x1b[2J"}, "alias"),
        ({"name": "model/turned"}, "twice"),
        ({"more": 1}, "fields"),
    ],
)
def test_a_hostile_index_is_refused(path, change, reason):
    index = json.loads((path / "index.json").read_bytes())
    entry = next(each for each in index["tensors"] if each["name"] == "model/embed.weight")
    entry.update(change)
    forge(path, index_json=dump(index))
    (problem,) = checkpoint.verify(path)
    assert reason in problem
    assert problem.isprintable()
    with pytest.raises(CheckpointError):
        checkpoint.load(path, {"model/a": torch.zeros(1)}, None)


def test_a_tensor_that_the_index_lacks_is_found(path):
    index = json.loads((path / "index.json").read_bytes())
    forge(path, index_json=dump(index | {"tensors": index["tensors"][1:]}))
    assert "does not match rank-00000.safetensors" in checkpoint.verify(path)[0]


@pytest.fixture
def old(tmp_path):
    """A checkpoint of format 1, which has an index of each rank."""
    golden = Path(__file__).resolve().parents[1] / "golden/checkpoints/ddp/checkpoints/step-00000004"
    return shutil.copytree(golden, checkpoint.path_of(tmp_path, 4))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": [10**12]}, "cover"),
        ({"shape": [-7]}, "out of range"),
        ({"shape": [8, 1]}, "differ in length"),
        ({"local": [10**12], "shape": [10**12]}, "does not match"),
        ({"offsets": [1]}, "exceeds the tensor"),
        ({"dtype": "float64"}, "does not match"),
        ({"dtype": "os:system"}, "unknown dtype"),
        ({"file": "../../rank-00000.safetensors"}, "not in the manifest"),
        ({"key": "nothing"}, "does not match"),
        ({"more": 1}, "fields"),
    ],
)
def test_a_hostile_index_of_format_1_is_refused(old, change, reason):
    index = json.loads((old / "rank-00000.json").read_bytes())
    entry = next(each for each in index["tensors"] if len(each["shape"]) == 1)
    entry.update(change)
    forge(old, rank__00000_json=dump(index))
    (problem,) = checkpoint.verify(old)
    assert reason in problem
    assert problem.isprintable()
    with pytest.raises(CheckpointError):
        checkpoint.load(old, {"model/a": torch.zeros(1)}, None)


def test_slices_of_format_1_twice_missing_or_unlisted_are_found(old):
    assert checkpoint.verify(old) == []
    index = json.loads((old / "rank-00000.json").read_bytes())
    whole = index["tensors"]
    forge(old, rank__00000_json=dump(index | {"tensors": [*whole, whole[0]]}))
    assert "exactly once" in checkpoint.verify(old)[0]
    forge(old, rank__00000_json=dump(index | {"tensors": whole[1:]}))
    assert "no index has" in checkpoint.verify(old)[0]


def header(text, data=b""):
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "data",
    [
        (1 << 60).to_bytes(8, "little") + b"{}",
        b"\0",
        header(b"[]"),
        header(b"{"),
        header(b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}', b"1234"),
        header(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}'),
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', b"12345678"),
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"12345678"),
        header(b'{"a":{"dtype":"XX","shape":[1],"data_offsets":[0,4]}}', b"1234"),
        header(b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', b"1234"),
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}}', b"1234"),
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}}', b"1234"),
        header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
    ],
)
def test_a_hostile_data_file_is_refused(path, data):
    forge(path, rank__00000_safetensors=data)
    (problem,) = checkpoint.verify(path)
    assert problem.startswith("step-00000002/rank-00000.safetensors is ")  # before an index is held against it
    assert problem.isprintable()


def test_the_tensors_of_a_data_file_may_stand_in_any_order(tmp_path):
    entry = '"{}":{{"dtype":"F32","shape":[{}],"data_offsets":[{},{}]}}'
    text = "{" + ",".join((entry.format("b", 1, 8, 12), entry.format("a", 2, 0, 8))) + "}"
    (tmp_path / "file").write_bytes(header(text.encode(), bytes(12)))
    assert read_header(tmp_path / "file") == {"b": ("F32", (1,)), "a": ("F32", (2,))}


@pytest.mark.parametrize("change", [{"format": 3}, {"tensors": 5}, {"aliases": []}, {"aliases": {"a": 1}}, {"more": 1}])
def test_what_is_no_index_is_refused(path, change):
    index = json.loads((path / "index.json").read_bytes())
    forge(path, index_json=dump(index | change))
    (problem,) = checkpoint.verify(path)
    assert problem.startswith("step-00000002/index.json is damaged: it")


def test_another_steps_checkpoint_under_this_name_is_found(path):
    shutil.rmtree(path)
    shutil.copytree(checkpoint.path_of(path.parent.parent, 1), path)
    assert checkpoint.verify(path) == ["step-00000002/manifest.json belongs to step 1"]
