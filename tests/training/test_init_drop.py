"""Fine-tuning with another head: the body's weights from elsewhere, bit for bit, and the model's own for the head."""

import lightning
import pytest
import small_runs
import torch
from ranks import run
from refusals import names, refuses
from safetensors.torch import save_file
from torch import nn

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.export import export
from lockstep.errors import CheckpointError, ConfigError

pytest.importorskip("lightning")


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.head = nn.Linear(5, classes)

    def forward(self, rows):
        return self.head(self.body(rows))


class Classes(lockstep.Task):
    def __init__(self, classes=4):
        self.classes = classes

    def model(self):
        return Net(self.classes)

    def dataset(self, split):
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(self.classes, (32,), generator=generator)
        return torch.utils.data.TensorDataset(torch.randn(32, 6, generator=generator), labels)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Headless(Classes):
    def untrained(self):
        return ["head"]


def settings(folder, **changes):
    values = {"precision": "float32", "max_steps": 2, "eval_freq": 0, "ckpt_freq": 1, "report": False}
    return small_runs.config(folder, **values | changes)


def begin(folder, source, task=None, world=None, **changes):
    """Begin a run with other weights, at a rate of 0, and return the tensors of its model."""
    values = {"experiment_name": "new", "init_from": str(source), "lr": 0.0, "max_steps": 1}
    result = lockstep.train(settings(folder, **values | changes), task or Classes(3), world)
    return lockstep.load(result.folder, task or Classes(3), "last").state_dict()


def initial(seed=42, classes=3):
    torch.manual_seed(seed)
    return Net(classes).state_dict()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a run with four classes."""
    return lockstep.train(settings(tmp_path_factory.mktemp("base"), experiment_name="base"), Classes()).folder


def weights_of(base):
    return lockstep.load(base, Classes(), "last").state_dict()


def written(base, form, folder):
    """The base's weights in another format."""
    newest, state = checkpoint.newest(base, say=print), weights_of(base)
    if form == "hugging face":
        (folder / "hub").mkdir()
        save_file(state, folder / "hub" / "model.safetensors", {"format": "pt"})
        return folder / "hub"
    if form == "lightning":
        content = {"state_dict": {f"model.{name}": each for name, each in state.items()}}
        torch.save(content | {"pytorch-lightning_version": lightning.__version__}, folder / "last.ckpt")
        return folder / "last.ckpt"
    return base if form == "run" else export(newest, folder / "w.safetensors", "safetensors")


def check(tensors, base):
    """The weights of the body are the base's; the head's are those of the run's seed."""
    expected, drawn = weights_of(base), initial(settings("x").seed)
    body = [name for name in expected if name.startswith("body.") and ".1." not in name]
    assert len(body) == 2
    assert [name for name in body if not torch.equal(tensors[name], expected[name])] == []
    assert torch.equal(tensors["body.1.weight"], expected["body.1.weight"])
    assert [name for name in ("head.weight", "head.bias") if not torch.equal(tensors[name], drawn[name])] == []


@pytest.mark.parametrize("form", ["run", "file", "hugging face", "lightning"])
def test_the_head_is_new_and_the_body_is_loaded(base, form, tmp_path, capfd):
    source = written(base, form, tmp_path)
    with refuses(CheckpointError, source, "head.weight", "head.bias", "--init-drop 'head.*'"):
        begin(tmp_path, source)
    assert not (tmp_path / "new").exists()
    check(begin(tmp_path, source, init_drop="head.*"), base)
    assert names(capfd.readouterr().err, "--init-drop", "head.weight, head.bias")
    check(begin(tmp_path, source, Headless(3), experiment_name="again"), base)


def begin_on_ranks(world, folder, source, engine):
    begin(folder, source, Headless(3), world, engine=engine, max_steps=3, stop_at=1)
    begin(folder, source, Headless(3), world, engine=engine, max_steps=3, lr=0.0)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_ranks_begin_alike_and_resume(base, engine, tmp_path):
    run(begin_on_ranks, 2, tmp_path, base, engine)
    check(lockstep.load(tmp_path / "new", Headless(3), "last").state_dict(), base)


class Renamed(Classes):
    """The head has another name."""

    def model(self):
        model = super().model()
        model.top = model.head
        model.forward = lambda rows: model.top(model.body(rows))
        del model.head
        return model


def test_a_head_of_another_name_is_left_on_both_sides(base, tmp_path):
    with refuses(CheckpointError, "top.weight", "head.weight", "--init-drop 'top.*,head.*'"):
        begin(tmp_path, base, Renamed(3))
    tensors = begin(tmp_path, base, Renamed(3), init_drop="top, head")
    assert torch.equal(tensors["body.0.weight"], weights_of(base)["body.0.weight"])


def test_patterns_that_do_not_fit_are_refused_before_writing(base, tmp_path):
    with refuses(ConfigError, "--init-drop", "haed.*"):
        begin(tmp_path, base, init_drop="head.*,haed.*")
    with refuses(ConfigError, "init_drop", "init_from"):
        settings(tmp_path, init_drop="head.*")
    other = nn.Sequential(nn.Linear(3, 3)).state_dict()
    save_file(other, tmp_path / "other.safetensors")
    with refuses(CheckpointError, "body.0.weight") as caught:  # no flag makes a model of it
        begin(tmp_path, tmp_path / "other.safetensors")
    assert "--init-drop" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_adapters_train_a_new_head_whole(base, tmp_path):
    pytest.importorskip("peft")
    with refuses(ConfigError, "--init-drop", "head.weight", "--lora.modules-to-save"):
        begin(tmp_path, base, lora={"rank": 2, "targets": "body.0"}, init_drop="head.*")
    with refuses(CheckpointError, "head.weight", "--init-drop 'head.*'"):
        begin(tmp_path, base, lora={"rank": 2, "targets": "body.0"})
    tensors = begin(
        tmp_path, base, Headless(3), init_drop="head.*", lora={"rank": 2, "targets": "body.0"}, stop_at=1, max_steps=2
    )
    assert tensors["head.weight"].shape == (3, 5)
    again = begin(tmp_path, base, Headless(3), init_drop="head.*", lora={"rank": 2, "targets": "body.0"}, max_steps=2)
    assert torch.equal(again["head.weight"], tensors["head.weight"])
