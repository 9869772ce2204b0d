"""Weights of other libraries: read bit for bit, by rules, and without running a pickle."""

import dataclasses
import json
import os

import lightning
import pytest
import small_runs
import torch
from huggingface_hub import save_torch_state_dict
from ranks import run
from refusals import names, refuses
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from toys import Ragged

import lockstep
from lockstep.checkpoint.command import import_weights
from lockstep.checkpoint.export import export
from lockstep.checkpoint.foreign import fill, is_foreign, match_names, open_foreign
from lockstep.checkpoint.read import open_tensors
from lockstep.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # of the tests' own saves


class Mixed(nn.Module):
    """float32, bf16, tied weights, buffers of other dtypes, a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Linear(4, 5, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Mixed()


def state():
    return {name: tensor.clone() for name, tensor in Mixed().state_dict().items()}


def by_dcp(path):
    everything = {"model": state(), "optimizer": {"state": {"exp_avg": torch.ones(3)}}, "step": 7}
    dcp.save(everything, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path, "model."


def by_lightning(path):
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False)
    trainer.strategy.connect(Module())
    path = path.with_suffix(".ckpt")
    trainer.save_checkpoint(path)
    return path, "model."


def by_shards(path):
    path.mkdir()
    save_torch_state_dict(Mixed().state_dict(), path, max_shard_size=100)
    assert len(list(path.glob("*.safetensors"))) > 1
    return path, ""


def by_torch(path):
    path = path.with_suffix(".pt")
    torch.save({f"module._orig_mod.{name}": each for name, each in state().items()}, path)
    return path, "module."


def by_safetensors(path):
    path = path.with_suffix(".safetensors")
    save_model(Mixed(), str(path))  # one name of each tied tensor, the other in the header
    return path, ""


WRITERS = [by_dcp, by_lightning, by_shards, by_torch, by_safetensors]


def differing(found, wanted):
    assert found.keys() == wanted.keys()
    return [
        name
        for name, each in wanted.items()
        if found[name].dtype != each.dtype or not torch.equal(found[name].reshape(-1), each.reshape(-1))
    ]


def read(path):
    with open_foreign(path) as weights:
        plain = {name: weights.read(name) for name in weights.tensors}
        return plain | {alias: plain[name] for alias, name in weights.aliases.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's, of a Trainer that trains nothing
@pytest.mark.parametrize("write", WRITERS)
def test_each_format_is_imported_and_exported_bit_for_bit(tmp_path, write, capsys):
    path, prefix = write(tmp_path / "source")
    assert is_foreign(path)
    kept = import_weights(path, tmp_path / "run", prefix if prefix == "model." else None, [])
    names(capsys.readouterr().out, tmp_path / "run", *([f"'{prefix}'"] if prefix else []))
    assert not is_foreign(tmp_path / "run")
    with open_tensors(kept) as tensors:
        assert not differing({name.removeprefix("model/"): tensors.read(name) for name in tensors.contents}, state())
    for form, out in (("dcp", "d"), ("torch", "t.pt"), ("safetensors", "s.safetensors")):
        assert not differing(read(export(kept, tmp_path / out, form)), state())


@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors"])
def test_a_run_begins_at_the_weights_of_another_format(tmp_path, form, capfd):
    first = lockstep.train(small_runs.config(tmp_path, max_steps=2), Ragged())
    kept = first.folder / "checkpoints" / "step-00000002"
    out = export(kept, tmp_path / {"dcp": "d", "torch": "w.pt", "safetensors": "w.safetensors"}[form], form)
    weights = {f"model.{name}": each for name, each in read(out).items()}
    if form == "torch":
        out = tmp_path / "wrapped.ckpt"
        torch.save({"state_dict": weights, "epoch": 3}, out)
    capfd.readouterr()
    settings = small_runs.config(tmp_path, experiment_name="new", init_from=str(out), lr=0.0, max_steps=1)
    lockstep.train(settings, Ragged())
    assert small_runs.mark(tmp_path, "new")[0] == small_runs.mark(tmp_path)[0]
    assert names(capfd.readouterr().err, out)


class Rows(lockstep.Task):
    """Tensors that two ranks cut unevenly, a scalar and a buffer."""

    def model(self):
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
        model.register_buffer("count", torch.tensor(3.0))
        return model

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(16, 7, generator=torch.Generator().manual_seed(1)))

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


def fill_shards(world, folder, sources):
    """Fill a sharded model from each of `sources`, and train on from one; how much of each a rank read."""
    mesh = init_device_mesh("cpu", (world.size,))
    shares = []
    for source in sources.values():
        state = Rows().model().state_dict()
        whole = {name: torch.full_like(each, -1.0) for name, each in state.items()}
        cut = {n: distribute_tensor(each, mesh, [Shard(0) if each.dim() else Replicate()]) for n, each in whole.items()}
        count = 0
        with open_foreign(source) as weights:

            def part(name, box, weights=weights):
                nonlocal count
                read = weights.read_part(name, box)
                count += read.numel()
                return read

            counted = dataclasses.replace(weights, read_part=part)
            fill(counted, match_names(counted, state, {}), cut)
            for name, each in cut.items():
                assert torch.equal(each.full_tensor(), weights.read(name)), (source, name)
        shares.append(count / 53)
    options = {"experiment_name": "new", "engine": "fsdp", "precision": "float32", "eval_freq": 0}
    lockstep.train(small_runs.config(folder, init_from=str(source), lr=0.0, max_steps=1, **options), Rows(), world)
    return shares


def test_sharded_model_loads_its_part_of_every_weight_format(tmp_path):
    first = lockstep.train(small_runs.config(tmp_path, max_steps=2, precision="float32", eval_freq=0), Rows())
    kept = first.folder / "checkpoints" / "step-00000002"
    sources = {"torch": tmp_path / "w.pt", "safetensors": tmp_path / "hub", "dcp": tmp_path / "d"}
    export(kept, sources["dcp"], "dcp")
    export(kept, sources["torch"], "torch")
    sources["safetensors"].mkdir()
    export(kept, sources["safetensors"] / "model.safetensors", "safetensors")
    shares = run(fill_shards, 2, tmp_path, sources)
    assert small_runs.mark(tmp_path, "new")[0] == small_runs.mark(tmp_path)[0]
    for own in shares:
        assert all(0.3 < share < 0.7 for share in own), shares


def test_names_follow_rules_and_what_does_not_fit_is_named(tmp_path):
    model, path = Mixed(), tmp_path / "w.safetensors"
    ties = {"head.weight": "embed.weight"}

    def match(changes, prefix="", without=()):
        tensors = {f"{prefix}{name}": each for name, each in state().items() if name not in without}
        save_file(tensors | changes, path)
        with open_foreign(path) as weights:
            return match_names(weights, model.state_dict(), ties)

    found = match({"loss.weight": torch.ones(2)}, "module.model.", ["head.weight"])
    assert (found.prefix, found.unused) == ("module.model.", ["loss.weight"])
    assert found.source["head.weight"] == "module.model.embed.weight"
    with refuses(CheckpointError, path, "norm.bias", "mask"):
        match({}, without=["norm.bias", "mask"])
    with refuses(CheckpointError, "block.bias", "[6]", "[5]"):
        match({"block.bias": torch.ones(6, dtype=torch.bfloat16)})
    with refuses(CheckpointError, "block.bias", "float32", "bfloat16"):  # would lose digits
        match({"block.bias": torch.ones(5)})
    with refuses(CheckpointError, "block.7.weight", "--init-drop"):  # a part of the model that the model lacks
        match({"block.7.weight": torch.ones(1)})
    with refuses(CheckpointError, "''", "'model.'", "--prefix"):
        match({f"model.{name}": each for name, each in state().items()})
    assert match({}, "app.net.").prefix == "app.net."
    with refuses(CheckpointError, "'app.'", "'net.'", "--prefix"):
        match({f"net.{name}": each.clone() for name, each in state().items()}, "app.")
    with refuses(CheckpointError, "embed.weight", "head.weight"):
        match({"head.weight": torch.ones(7, 4)})
    with refuses(CheckpointError, "embed.weight"):  # names that differ by wrappers alone
        match({"_orig_mod.embed.weight": torch.ones(7, 4)})
    wide = match({"norm.bias": torch.ones(5, dtype=torch.float16)})
    assert wide.widened == ["norm.bias"]


@pytest.mark.parametrize(
    "content",
    [
        lambda model: {"model": model, "optimizer": {"state": {0: {"step": torch.ones(1)}}}, "loss": torch.ones(1)},
        lambda model: {"net": model, "epoch": 3},
        lambda model: {"state_dict": model, "ema": model, "seeds": {0: torch.ones(1)}},
    ],
)
def test_a_state_dict_is_found_among_what_a_script_saves(tmp_path, content):
    torch.save(content(state()), tmp_path / "a.pt")
    with open_foreign(tmp_path / "a.pt") as weights:
        assert weights.tensors.keys() == state().keys()


def test_a_folder_with_torch_files_of_hugging_face(tmp_path):
    tensors, names = state(), sorted(state())
    files = {name: f"pytorch_model-{index % 2}.bin" for index, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert is_foreign(tmp_path)
    with open_foreign(tmp_path) as weights:
        assert [name for name in names if not torch.equal(weights.read(name), tensors[name])] == []
    (tmp_path / file).unlink()
    with refuses(CheckpointError, file), open_foreign(tmp_path):
        pass


def test_import_takes_a_prefix_and_leaves_names_out(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({f"net.{name}": each for name, each in state().items()} | {"loss": torch.ones(1)}, path)
    kept = import_weights(path, tmp_path / "run", "net.", ["*.bias", "mask"])
    with open_tensors(kept) as tensors:
        wanted = {f"model/{name}" for name in state() if not name.endswith("bias") and name != "mask"}
        assert tensors.contents.keys() == wanted
    for given, named in ((("other.", []), "--prefix"), ((None, ["x*"]), "--drop")):
        with refuses(CheckpointError, named):
            import_weights(path, tmp_path / "no", *given)
    with refuses(ConfigError, tmp_path / "run"):
        import_weights(path, tmp_path / "run", None, [])
    assert not (tmp_path / "no").exists()


class Planted:
    """An object whose pickle makes a folder when it is run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_no_pickle_is_run(tmp_path):
    planted = Planted(str(tmp_path / "ran"))
    torch.save({"state_dict": state(), "hyper_parameters": planted}, tmp_path / "a.ckpt")
    by_dcp(tmp_path / "d")
    torch.save(planted, tmp_path / "whole.pt")
    import pickle

    metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    metadata.planner_data = planted
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    for name in ("a.ckpt", "d", "whole.pt"):
        with refuses(CheckpointError, tmp_path / name), open_foreign(tmp_path / name):
            pass
    assert not (tmp_path / "ran").exists()


def test_damaged_and_unknown_files_are_named(tmp_path):
    shards, _ = by_shards(tmp_path / "shards")
    index = shards / "model.safetensors.index.json"
    one = min(shards.glob("*.safetensors"))
    content = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": content["weight_map"] | {"gone": one.name}}))
    cases = [(shards, "gone")]
    (tmp_path / "b.pt").write_bytes(b"abc, and not torch")
    (tmp_path / "c.safetensors").write_bytes(b"\0" * 20)
    (tmp_path / "d.txt").write_text("x")
    torch.save([1, 2], tmp_path / "e.pt")
    torch.save({"model": {"a": torch.ones(1)}, "state_dict": {"a": torch.ones(1)}}, tmp_path / "f.pt")
    (tmp_path / "g.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    cases += [(tmp_path / name, name) for name in ("b.pt", "c.safetensors", "d.txt", "e.pt", "f.pt", "g.safetensors")]
    for path, named in cases:
        with refuses(CheckpointError, named), open_foreign(path):
            pass
    index.write_text(json.dumps({"weight_map": {"a": "../c.safetensors"}}))
    with refuses(CheckpointError, "../c.safetensors"), open_foreign(shards):
        pass
    folder, _ = by_dcp(tmp_path / "dcp")
    data = next(folder.glob("*.distcp"))
    data.unlink()
    with refuses(CheckpointError, data.name), open_foreign(folder):
        pass
    (folder / ".metadata").write_bytes(b"\x80\x04.")
    with refuses(CheckpointError, ".metadata"), open_foreign(folder):
        pass
