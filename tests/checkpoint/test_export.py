"""`lockstep export`: other programs read the same numbers, and nothing is held twice."""

import dataclasses
import gc
import json
import warnings
import weakref
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from ranks import run
from torch import nn
from toys import Network, Ragged, parts, train

from lockstep import checkpoint, cli
from lockstep.checkpoint import export as exporting
from lockstep.checkpoint.export import export
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.gpt import GPT, PRESETS, GPTConfig

NANO = PRESETS["builtin:nano"]


def saved(folder, model, step=3, config="", optimizer=True, state=None):
    """A run's folder with one checkpoint of the model."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    if optimizer:
        for index, (name, p) in enumerate(model.named_parameters()):
            tensors[f"optimizer/{name}/exp_avg"] = torch.full_like(p, 0.25 + index)
            tensors[f"optimizer/{name}/exp_avg_sq"] = torch.full_like(p, 0.5 + index)
            tensors[f"optimizer/{name}/step"] = torch.tensor(float(step))
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(config)
    return checkpoint.save(folder, step, tensors, state or {}, World(), engine="single")


def network():
    torch.manual_seed(0)
    return nn.Sequential(Network(dtype=torch.float32), nn.BatchNorm1d(3))


def equal(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_safetensors_load_with_their_ties(tmp_path, capsys):
    model, other = network(), network()
    saved(tmp_path / "run", model)
    nn.init.zeros_(other[0].embedding.weight)
    out = tmp_path / "new" / "model.safetensors"
    assert cli.dispatch(["export", str(tmp_path / "run"), str(out)]) == 0
    assert capsys.readouterr().out == f"step-00000003 as safetensors: {out}\n"
    assert safetensors.torch.load_model(other, out) == (set(), [])
    assert equal(other.state_dict(), model.state_dict())
    assert other[0].head.weight is other[0].embedding.weight
    assert not any(name.startswith("optimizer") for name in safetensors.torch.load_file(out))


def test_every_tensor_of_a_file_lies_at_a_multiple_of_its_items(tmp_path):
    """Who maps such a file into memory reads it in place: of the export, and of a checkpoint."""
    model = nn.Module()
    model.register_buffer("a", torch.tensor([True, False, True]))
    model.register_buffer("b", torch.arange(5, dtype=torch.float16))
    model.c = nn.Parameter(torch.ones(3, dtype=torch.float64))
    saved(tmp_path / "run", model, optimizer=False)
    out = tmp_path / "out.safetensors"
    assert cli.dispatch(["export", str(tmp_path / "run"), str(out)]) == 0
    files = [out, *(tmp_path / "run").rglob("*.safetensors")]
    assert len(files) == 2
    for path in files:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert length % 8 == 0
        if path is out:
            widths = {"F64": 8, "F16": 2, "BOOL": 1}
            placed = [(entry["dtype"], entry["data_offsets"]) for name, entry in header.items() if name[0] != "_"]
            assert sorted(kind for kind, _ in placed) == sorted(widths)
            assert all(begin % widths[kind] == 0 for kind, (begin, _) in placed)


def test_torch_files_load_without_running_code(tmp_path):
    model = network()
    path = saved(tmp_path / "run", model)
    found = torch.load(export(path, tmp_path / "m.pt", "torch"), weights_only=True)
    assert equal(found, dict(model.state_dict()))
    assert found["0.head.weight"].data_ptr() == found["0.embedding.weight"].data_ptr()
    whole = sum(p.nbytes for p in model.parameters())
    assert (tmp_path / "m.pt").stat().st_size < 1.3 * whole + 20_000, "neither ties nor states are in it again"


class Waves(nn.Module):
    """A complex buffer, as rotary tables are, and a complex weight, as Fourier layers have it."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(1)
        self.register_buffer("turns", torch.polar(torch.ones(4, 3), torch.randn(4, 3)))
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=dtype))


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_complex_tensors_come_out_as_they_are(tmp_path, form):
    model = Waves(torch.complex64)
    out = export(saved(tmp_path / "run", model), tmp_path / "model", form)
    found = safetensors.torch.load_file(out) if form == "safetensors" else torch.load(out, weights_only=True)
    assert equal(found, dict(model.state_dict()))


def test_complex_tensors_that_a_format_lacks_are_refused_by_name(tmp_path):
    wide = Waves(torch.complex128)
    path = saved(tmp_path / "run", wide)
    assert equal(torch.load(export(path, tmp_path / "m.pt", "torch"), weights_only=True), dict(wide.state_dict()))
    with pytest.raises(CheckpointError, match="complex128.*--format torch"):
        export(path, tmp_path / "model", "safetensors")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m.pt", "run"]


def _train_sharded(world, folder):
    warnings.simplefilter("ignore")  # torch's own, of its own calls
    made, batches = parts(world, Ragged(), name="fsdp", count=2)
    train(world, made, batches, Ragged())
    checkpoint.save(folder, 2, made.state_dict(), {}, world, engine="fsdp")
    return {n.removeprefix("model/"): t.full_tensor().tolist() for n, t in made.state_dict().items() if "model/" in n}


def test_slices_of_several_ranks_come_out_whole(tmp_path):
    wanted = {n: torch.tensor(v, dtype=torch.float64) for n, v in run(_train_sharded, 2, tmp_path)[0].items()}
    path = checkpoint.path_of(tmp_path, 2)
    assert equal(torch.load(export(path, tmp_path / "m.pt", "torch")), wanted)
    del wanted["head.weight"]  # a second name of the embedding
    found = safetensors.torch.load_file(export(path, tmp_path / "m.safetensors", "safetensors"))
    found.pop("head.weight", None)
    assert equal(found, wanted)


@pytest.mark.parametrize("form", ["safetensors", "hf", "torch"])
def test_no_format_holds_the_weights_twice(tmp_path, form, monkeypatch):
    """Counted are the bytes of tensors that are alive at one time while the files are written."""
    model = gpt()
    path = saved(tmp_path / "run", model, config='model_name = "builtin:nano"\n', state=said(model))
    whole = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    alive, peak = [0], [0]
    opened = exporting.open_tensors

    def counted(stored):
        def read(name):
            tensor = stored.read(name)
            alive[0] += tensor.nbytes
            peak[0] = max(peak[0], alive[0])
            weakref.finalize(tensor, lambda size=tensor.nbytes: alive.__setitem__(0, alive[0] - size))
            return tensor

        return type(stored)(stored.contents, read)

    class Opened:
        def __init__(self, path):
            self.context = opened(path)

        def __enter__(self):
            return counted(self.context.__enter__())

        def __exit__(self, *error):
            return self.context.__exit__(*error)

    monkeypatch.setattr(exporting, "open_tensors", Opened)
    gc.collect()
    export(path, tmp_path / "out", form)
    assert 0 < peak[0] <= (2 * largest if form in ("safetensors", "hf") else whole)


def said(model):
    """What a run keeps of its GPT beside the tensors."""
    return {"gpt": dataclasses.asdict(model.config)}


def gpt(**changed):
    torch.manual_seed(1)
    shape = {"layers": 2, "heads": 2, "width": 32, "vocab_size": 100, "context": 16, **changed}
    model = GPT(GPTConfig(**shape))
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)  # biases and norms too, so that a name mixed up is seen
    return model


@pytest.mark.parametrize("named", ['model_name = "builtin:nano"\n', ""])  # left out where the task is one's own
def test_the_built_in_gpt_is_a_gpt2_in_transformers(tmp_path, named):
    transformers = pytest.importorskip("transformers")
    model = gpt(dropout=0.1).eval()
    path = saved(tmp_path / "run", model, config=f"{named}[model]\ndropout = 0.1\n", state=said(model))
    out = export(path, tmp_path / "hf", "hf")
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert theirs.config.resid_pdrop == 0.1
    ids = torch.randint(100, (2, 16))
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, model(ids)), "bit for bit"


def test_heads_that_no_tensor_tells_are_not_guessed(tmp_path):
    """A checkpoint from before they were kept: a preset's name says them only where its width fits."""
    path = saved(tmp_path / "run", gpt(), config='model_name = "builtin:nano"\n')
    with pytest.raises(CheckpointError, match="the number of heads of its GPT of width 32"):
        export(path, tmp_path / "hf", "hf")
    model = gpt(heads=NANO.heads, width=NANO.width)
    path = saved(tmp_path / "older", model, config='model_name = "builtin:nano"\n')
    config = json.loads((export(path, tmp_path / "hf", "hf") / "config.json").read_text())
    assert (config["n_head"], config["resid_pdrop"]) == (NANO.heads, 0.0)  # no dropout where none was asked for


def test_a_hub_model_keeps_its_names_and_gets_its_vocabulary(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    config.save_pretrained(tmp_path / "llama")
    config.vocab_size = 80  # the run had a tokenizer of its own
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    path = saved(tmp_path / "run", model, config=f"model_name = {json.dumps(str(tmp_path / 'llama'))}\n")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export(path, tmp_path / "hf", "hf")).eval()
    ids = torch.randint(80, (2, 7))
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, model(ids).logits)


@pytest.mark.parametrize("config", ["", 'model_name = "builtin:nano"\n'])
def test_a_model_that_transformers_does_not_know(tmp_path, config):
    path = saved(tmp_path / "run", network(), config=config)
    with pytest.raises(CheckpointError, match="--format hf: the run's model .* use --format safetensors"):
        export(path, tmp_path / "hf", "hf")
    assert [each.name for each in tmp_path.iterdir()] == ["run"], "nothing is left"


def test_what_is_there_is_not_written_over(tmp_path):
    path = saved(tmp_path / "run", network())
    for out in (tmp_path / "file", tmp_path / "folder"):
        (out.write_text if out.name == "file" else lambda text, out=out: out.mkdir())("mine")
        with pytest.raises(ConfigError, match="already exists"):
            export(path, out, "torch")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_full_disk_and_unwritable_path_are_one_line(tmp_path, form, monkeypatch):
    path = saved(tmp_path / "run", network())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="OUT .*file.out"):
        export(path, tmp_path / "file" / "out", form)
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(ConfigError, match="OUT .*10 B free"):
        export(path, tmp_path / "out", form)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "run"]


def test_steps_are_chosen_and_damage_is_found(tmp_path, capsys):
    model = network()
    saved(tmp_path / "run", model, step=3)
    nn.init.zeros_(model[0].embedding.weight)
    path = saved(tmp_path / "run", model, step=5)
    run_folder = str(tmp_path / "run")
    for step, zero in (("3", False), ("5", True), (None, True)):
        out = tmp_path / f"{step}.pt"
        flags = ["--step", step] if step else []
        assert cli.dispatch(["export", run_folder, str(out), "--format", "torch", *flags]) == 0
        assert (not torch.load(out)["0.embedding.weight"].any()) == zero
    with pytest.raises(CheckpointError, match=r"--step 4: .* has no checkpoint of that step; it has: 3, 5"):
        cli.dispatch(["export", run_folder, str(tmp_path / "o"), "--step", "4"])
    data = next(path.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match="is damaged"):
        export(path, tmp_path / "o", "safetensors")
    capsys.readouterr()
    assert cli.dispatch(["export", run_folder, str(tmp_path / "older.pt"), "--format", "torch"]) == 0
    assert "skipped checkpoint step-00000005" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "OUT", "--format", "onnx"], "invalid choice: 'onnx'"),
        (["RUN"], "required: OUT"),
        (["missing", "OUT"], "neither a run's folder nor a checkpoint"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, message):
    with pytest.raises((ConfigError, CheckpointError), match=message) as caught:
        cli.dispatch(["export", *arguments])
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_checkpoint(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        cli.dispatch(["export", str(tmp_path), str(tmp_path / "o")])
    checkpoint.save(tmp_path, 1, {"optimizer/a/step": torch.ones(())}, {}, World(), engine="single")
    with pytest.raises(CheckpointError, match="has no model to export"):
        cli.dispatch(["export", str(tmp_path), str(tmp_path / "o")])
