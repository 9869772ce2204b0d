"""--task images: the same bits on any number of ranks, data of each kind, and what is wrong with it in one line."""

import io
import json
import re
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictures_here import draw, write_images
from ranks import run
from refusals import names, refuses
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep import checkpoint
from lockstep.cli import dispatch
from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.data.loader import seed_everything
from lockstep.errors import ConfigError, DataError, LockstepError, ResumeError
from lockstep.logging.jsonl import read
from lockstep.models.vision import ResNet, ViT, patch_for
from lockstep.tasks.image_data import ImageError, open_image
from lockstep.tasks.image_samples import ImageSamples, ImageTransform
from lockstep.tasks.images import make

SMALL = {"batch_size": 32, "micro_batch_size": 8, "max_steps": 4, "log_freq": 2, "device": "cpu", "lr": 0.01}


def config(folder, **changes):
    return Config(**{"task": "images", "experiment_name": "r", "save_dir": str(folder), **SMALL, **changes})


def trained(world, folder, runs):
    """The fingerprints of the weights at the end of runs, one after the other."""
    found = []
    for name, changes in runs:
        result = lockstep.train(config(folder, experiment_name=name, exact=True, **changes), None, world)
        found.append(checkpoint.fingerprint(checkpoint.newest(result.folder, say=print)))
    return found


def recorded(folder, name):
    """Loss and metrics of the last evaluation that a run recorded."""
    record = [record for record in read(folder / name / "metrics.jsonl") if "evaluation/loss" in record][-1]
    return {key: record[f"evaluation/{key}"] for key in ("loss", "top1", "top5") if f"evaluation/{key}" in record}


def test_ranks_are_bitwise_with_augmentation_and_a_resume(tmp_path):
    small = {"dataset_name": str(write_images(tmp_path / "shapes")), "images": {"size": 8}, "max_steps": 3}
    vit = {**small, "model_name": "builtin:vit"}
    alone = [("one", small), ("part", {**small, "stop_at": 2}), ("vit", vit)]
    [one] = run(trained, 1, tmp_path, alone, timeout=250.0)
    both = [
        ("two", {**small, "data": {"workers": 1}, "eval_workers": 0}),
        ("part", small),
        ("vit2", {**vit, "engine": "fsdp"}),
    ]
    two = run(trained, 2, tmp_path, both, timeout=250.0)
    four = run(trained, 4, tmp_path, [("four", {**small, "engine": "zero"})], timeout=250.0)
    assert two[0] == two[1]
    assert two[0][:2] == [one[0], one[0]]
    assert two[0][2] == one[2]
    assert {found[0] for found in four} == {one[0]}
    shown = [recorded(tmp_path, name) for name in ("one", "two", "four")]
    assert shown[0].keys() == {"loss", "top1"}
    assert shown[0] == shown[1] == shown[2]


def whole_run(world, folder, name):
    """The fingerprint of the default run, but for --exact."""
    given = Config(task="images", experiment_name=name, save_dir=str(folder), device="cpu", exact=True)
    result = lockstep.train(given, None, world)
    return checkpoint.fingerprint(checkpoint.newest(result.folder, say=print))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_digits_reach_97_percent_by_default(tmp_path):
    [one] = run(whole_run, 1, tmp_path, "one", timeout=1500.0)
    assert run(whole_run, 2, tmp_path, "two", timeout=1500.0) == [one] * 2
    found = recorded(tmp_path, "one")
    assert found == recorded(tmp_path, "two")
    assert found["top1"] >= 0.97
    said = (tmp_path / "one" / "logs" / "rank-00000.log").read_text(encoding="utf-8")
    assert "is above" not in said  # no step is called a spike


def test_loss_is_plain_pytorchs_and_metrics_share_its_forward():
    task = make(Config(task="images", precision="float64", images={"label_smoothing": 0.1}), print)
    torch.manual_seed(0)
    model = task.model().double().eval()
    samples = [task.dataset("evaluation")[index] for index in range(40)]
    images, labels = batch = task.collate(samples)
    assert images.dtype is torch.float64
    assert images.shape == (40, 1, 8, 8)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    loss, metrics = task.evaluate(model, batch)
    assert len(calls) == 1
    logits = model(images).detach()
    expected = [F.cross_entropy(row[None], label[None]) for row, label in zip(logits, labels, strict=True)]
    assert float(loss.detach()) == pytest.approx(float(sum(expected)), rel=1e-12)
    smooth = -(0.9 * logits.log_softmax(1)[range(40), labels] + 0.01 * logits.log_softmax(1).sum(1)).sum()
    assert float(task.loss(model, batch).detach()) == pytest.approx(float(smooth), rel=1e-12)
    order = logits.argsort(1, descending=True)
    ranks = [row.tolist().index(int(label)) for row, label in zip(order, labels, strict=True)]
    assert int(metrics["top1"][0]) == sum(rank == 0 for rank in ranks)
    assert int(metrics["top5"][0]) == sum(rank < 5 for rank in ranks)


class Numbered:
    """Each pixel is its own number, so that a crop tells where it was taken."""

    labels = torch.tensor([3])

    def raw(self, index, *, channels, size):
        return torch.arange(1, 1 + size * (size + 2), dtype=torch.uint8).reshape(1, size, size + 2)


@given(st.integers(0, 2), st.booleans(), st.integers(0, 1000))
def test_crop_is_a_window_of_the_padded_image_by_the_seed(padding, flip, seed):
    how = ImageTransform(6, 1, (0.25,), (0.5,), padding, flip, torch.float64)
    samples = ImageSamples(Numbered(), how, (), augmented=True)
    assert samples.draws_random == bool(padding or flip)
    seed_everything(seed)
    image, label = samples[0]
    seed_everything(seed)
    assert torch.equal(samples[0][0], image)
    assert int(label) == 3
    back = ((image * 0.5 + 0.25) * 255).round().to(torch.uint8)
    whole = F.pad(Numbered().raw(0, channels=1, size=6), (padding,) * 4)
    windows = [whole[:, y : y + 6, x : x + 6] for y in range(2 * padding + 1) for x in range(2 * padding + 3)]
    if not samples.augmented:
        windows = [whole[:, :, 1:7]]
    found = [torch.equal(back, window) for window in windows]
    mirrored = [torch.equal(back, window.flip(-1)) for window in windows]
    assert sum(found) + sum(mirrored) == 1
    assert flip or not any(mirrored)


def test_a_mirrored_image_comes_in_half_of_the_draws():
    samples = ImageSamples(Numbered(), ImageTransform(6, 1, (0.0,), (1.0,), 0, True, torch.float32), (), augmented=True)
    seed_everything(0)
    images = [samples[0][0] for _ in range(200)]
    assert 60 < sum(bool(image[0, 0, 0] > image[0, 0, 1]) for image in images) < 140


def test_a_folder_of_class_folders(tmp_path):
    folder = write_images(tmp_path / "shapes")
    (folder / ".hidden").mkdir()
    (folder / "circle" / "notes.txt").write_text("not an image")
    base = {"task": "images", "dataset_name": str(folder), "images": {"size": 8}}
    with refuses(DataError, "circle/notes.txt", "1 of 25", "--data.skip"):
        make(Config(**base), print)
    said = []
    task = make(Config(**base, data={"skip": 0.04}), said.append)
    assert names(said[0], "circle/notes.txt")
    training, evaluation = task.dataset("train"), task.dataset("evaluation")
    assert task.classes == ("circle", "square")
    assert (len(training), len(evaluation)) == (19, 5)
    assert task.how.flip
    image, label = evaluation[0]
    assert image.shape == (3, 8, 8)
    name = task.data.evaluation.names[0]
    assert task.classes[int(label)] == name.split("/")[0]
    loaded = open_image(folder / name, channels=3, size=8)
    assert loaded.shape == (3, 8, 9)
    assert torch.equal(((image * 0.5 + 0.5) * 255).round().to(torch.uint8), loaded[:, :, :8])
    parts = tmp_path / "parts"
    write_images(parts / "train", 4)
    write_images(parts / "val", 2)
    task = make(Config(task="images", dataset_name=str(parts), images={"size": 8}), print)
    assert (len(task.dataset("train")), len(task.dataset("evaluation"))) == (8, 4)


def test_images_of_every_kind_are_read(tmp_path):
    for name in ("a.png", "a.jpg", "a.bmp", "a.gif", "a.webp", "a.tif", "a.ppm"):
        draw(1, 0).save(tmp_path / name)
        assert open_image(tmp_path / name, channels=3, size=6).shape == (3, 6, 7), name
    assert open_image((tmp_path / "a.png").read_bytes(), channels=1, size=24).shape == (1, 24, 28)
    deep = draw(1, 0).convert("L").convert("I;16").point(lambda value: value * 256)
    deep.save(tmp_path / "deep.png")
    plain = open_image(tmp_path / "a.png", channels=1, size=12)
    assert torch.equal(open_image(tmp_path / "deep.png", channels=1, size=12), plain)
    turned = draw(1, 0)
    exif = turned.getexif()
    exif[0x0112] = 6  # held upright
    turned.save(tmp_path / "turned.png", exif=exif)
    assert open_image(tmp_path / "turned.png", channels=3, size=12).shape == (3, 14, 12)
    draw(1, 0).convert("F").save(tmp_path / "f.tif")
    with pytest.raises(ImageError, match="mode F"):
        open_image(tmp_path / "f.tif", channels=1, size=8)


def test_folders_that_are_no_data_are_one_line(tmp_path):
    def refused(name, match):
        with pytest.raises(DataError, match=match) as caught:
            make(Config(task="images", dataset_name=str(tmp_path / name)), print)
        assert "\n" not in str(caught.value)

    refused("nowhere", "nowhere: no such folder; .*builtin:digits")
    (tmp_path / "empty").mkdir()
    refused("empty", "has neither folders nor images; put the images of each class into a folder")
    (tmp_path / "loose").mkdir()
    draw(0, 0).save(tmp_path / "loose" / "a.png")
    refused("loose", "loose has 1 image outside")
    write_images(tmp_path / "one", 2, ("cat",))
    refused("one", "one has one class, 'cat'")
    write_images(tmp_path / "none", 0)
    refused("none", "circle has no images")
    write_images(tmp_path / "other" / "train", 2)
    write_images(tmp_path / "other" / "test", 2, ("circle", "star"))
    refused("other", "test/ has the class 'star', .*train/")
    with pytest.raises(DataError, match="builtin:digit: unknown; the built-in images are builtin:digits"):
        make(Config(task="images", dataset_name="builtin:digit"), print)
    for name, line in (
        ("builtin:resnt", "did you mean builtin:resnet?"),
        ("resnet50", "timm:NAME"),
    ):
        with pytest.raises(ConfigError, match=line):
            make(Config(task="images", model_name=name), print)
    with pytest.raises(ConfigError, match="--images.size 17 "):
        make(Config(task="images", model_name="builtin:vit", images={"size": 17}), print)
    with pytest.raises(ConfigError, match="builtin:resnet has no pretrained weights"):
        make(Config(task="images", model={"pretrained": True}), print)


def cut_file(path):
    """Cut an image in the middle; return what it was."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return whole


def test_corrupt_images_are_named_counted_and_bounded(tmp_path, capsys):
    folder = write_images(tmp_path / "shapes")
    task = make(Config(task="images", dataset_name=str(folder)), print)
    bad = [task.data.train.names[0], task.data.evaluation.names[0]]
    whole = cut_file(folder / bad[0])
    settings = {"dataset_name": str(folder), "images": {"size": 8}, "batch_size": 8, "guards": {"retries": 0}}
    with pytest.raises(LockstepError, match=f"sample 0 .*{bad[0]}.* cannot be loaded: ImageError: ") as caught:
        lockstep.train(config(tmp_path, **settings))
    assert "\n" not in str(caught.value)
    cut_file(folder / bad[1])
    settings["guards"] |= {"bad_samples": 2}
    result = lockstep.train(config(tmp_path, experiment_name="bounded", **settings))
    assert result.exit_code == 0
    log = (tmp_path / "bounded" / "logs" / "rank-00000.log").read_text()
    assert bad[0] in log
    assert re.search(r"using sample \d+ instead", log)
    settings["guards"] |= {"bad_samples": 0}
    (folder / bad[0]).write_bytes(whole)
    with pytest.raises(LockstepError, match=f"{bad[1]}.* cannot be loaded: ImageError: "):
        lockstep.train(config(tmp_path, experiment_name="evaluation", **settings))


def test_what_no_decoder_knows_is_left_out_at_the_start(tmp_path):
    folder = write_images(tmp_path / "shapes")
    base = {"task": "images", "dataset_name": str(folder), "images": {"size": 8}}
    (folder / "circle" / "000.png").write_bytes(b"")
    (folder / "square" / "001.png").write_text("a text")
    draw(0, 3).save(folder / "circle" / "icon.ico", "ICO")
    (folder / "circle" / "icon.ico").rename(folder / "circle" / "002.png")  # a format that only pillow knows
    with refuses(DataError, "2 of 24", "1 without content (circle/000.png)", "square/001.png", "--data.skip 0.09"):
        make(Config(**base), print)
    said = []
    task = make(Config(**base, data={"skip": 0.09}), said.append)
    assert names(said[0], "circle/000.png", "square/001.png")
    read = [*task.data.train.names, *task.data.evaluation.names]
    assert (len(read), "circle/002.png" in read) == (22, True)
    for path in (folder / "circle").iterdir():
        path.write_bytes(b"")
    with refuses(DataError, "circle", "no images that can be read"):
        make(Config(**base, data={"skip": 1}), print)


def test_classes_are_saved_and_a_resume_with_others_is_refused(tmp_path, capsys):
    folder = write_images(tmp_path / "shapes")
    settings = {"dataset_name": str(folder), "images": {"size": 8}, "batch_size": 8}
    lockstep.train(config(tmp_path, stop_at=2, **settings))
    sources = json.loads((tmp_path / "r" / "environment.json").read_text())["sources"]
    assert json.loads(sources["classes"]) == ["circle", "square"]
    (folder / "square").rename(folder / "triangle")
    with refuses(ResumeError, "training data", "--experiment-name"):
        lockstep.train(config(tmp_path, **settings))
    with pytest.raises(DataError, match="was trained on the classes circle, square, .* circle, tria"):
        dispatch(["evaluate", str(tmp_path / "r")])
    (folder / "triangle").rename(folder / "square")
    with pytest.raises(ResumeError, match=r"--images.size 8 \(now 12\)"):
        lockstep.train(config(tmp_path, **settings | {"images": {"size": 12}}))
    assert lockstep.train(config(tmp_path, **settings)).exit_code == 0
    capsys.readouterr()
    assert dispatch(["evaluate", str(tmp_path / "r"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"loss": shown["loss"], **shown["metrics"]} == recorded(tmp_path, "r")
    assert shown["metrics"].keys() == {"top1"}
    write_images(tmp_path / "more", 20)
    assert dispatch(["evaluate", str(tmp_path / "r"), "--data", str(tmp_path / "more")]) == 0
    assert "on 8 images" in capsys.readouterr().out
    write_images(tmp_path / "others", 2, ("circle", "star"))
    with pytest.raises(DataError, match="the data now has circle, star"):
        dispatch(["evaluate", str(tmp_path / "r"), "--data", str(tmp_path / "others")])
    with pytest.raises(ConfigError, match="trained ImageClassification, .*lockstep evaluate"):
        dispatch(["generate", str(tmp_path / "r"), "--prompt", "a"])
    out = tmp_path / "out.pt"
    assert dispatch(["export", str(tmp_path / "r"), str(out), "--format", "torch"]) == 0
    model = ResNet(3, 2)
    model.load_state_dict(torch.load(out, weights_only=True))
    with pytest.raises(LockstepError, match="neither the built-in GPT nor one from transformers"):
        dispatch(["export", str(tmp_path / "r"), str(tmp_path / "hf"), "--format", "hf"])


def test_images_in_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    import datasets

    def encoded(label, seed):
        held = io.BytesIO()
        draw(label, seed).save(held, "PNG")
        return {"bytes": held.getvalue(), "path": f"{seed}.png"}

    names = datasets.ClassLabel(names=["disc", "box"])
    features = datasets.Features({"picture": datasets.Image(), "label": names, "note": datasets.Value("string")})
    rows = {
        "picture": [encoded(n % 2, n) for n in range(10)],
        "label": [n % 2 for n in range(10)],
        "note": ["x"] * 10,
    }
    file = tmp_path / "shapes.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(file)
    chosen = {"task": "images", "dataset_name": str(file), "images": {"size": 12, "padding": 0, "flip": "false"}}
    task = make(Config(**chosen), print)
    assert task.classes == ("disc", "box")
    assert len(task.dataset("train")) + len(task.dataset("evaluation")) == 10
    assert task.dataset("train")[0][0].shape == (3, 12, 12)
    with pytest.raises(
        DataError, match="has no column 'kind'; its columns: picture, label, note; name one with --data.l"
    ):
        make(Config(**chosen, data={"label_column": "kind"}), print)
    with pytest.raises(DataError, match="the column 'note' has string, not Image"):
        make(Config(**chosen, data={"image_column": "note"}), print)
    with pytest.raises(DataError, match="the column 'note' has one class, 'x'"):
        make(Config(**chosen, data={"label_column": "note"}), print)
    with pytest.raises(DataError, match="no such file or folder of files; supported: json|no such folder"):
        make(Config(**chosen | {"dataset_name": str(tmp_path / "no.parquet")}), print)


def test_a_model_of_transformers_and_its_export(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    vit = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=3, num_labels=3, **sizes)
    torch.manual_seed(3)
    given = transformers.ViTForImageClassification(vit)
    given.save_pretrained(tmp_path / "vit")
    told = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(told))
    said = []
    settings = {"model_name": str(tmp_path / "vit"), "model": {"pretrained": True}, "batch_size": 16}
    task = make(config(tmp_path, **settings), said.append)
    assert task.how.mean == (0.1, 0.2, 0.3)
    assert (task.how.size, task.how.channels, task.defaults) == (8, 3, "fine-tuning")
    model = task.model()
    assert any("newly initialised for 10 classes: classifier.bias, classifier.weight" in line for line in said)
    kept = given.vit.state_dict()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.vit.state_dict().items())
    assert len(task.blocks(model)) == 2
    result = lockstep.train(config(tmp_path, max_steps=2, **settings))
    assert dispatch(["export", str(result.folder), str(tmp_path / "hf"), "--format", "hf"]) == 0
    back = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "hf").eval()
    assert back.config.id2label[3] == "3"
    ours = lockstep.load(result.folder, task, "last")
    images = task.collate([task.dataset("evaluation")[n] for n in range(4)])[0]
    with torch.no_grad():
        assert torch.equal(back(pixel_values=images).logits, ours(pixel_values=images).logits)


def test_a_model_of_timm_by_a_stand_in(tmp_path, monkeypatch):
    """The package cannot be had where this is tested: this shows what is asked of it, and no more."""
    asked = []

    class Cfg:
        def to_dict(self):
            return {"input_size": (3, 16, 16), "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}

    def create_model(name, *, pretrained, num_classes, drop_rate):
        asked.append((name, pretrained, num_classes, drop_rate))
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, num_classes))

    stand_in = types.ModuleType("timm")
    stand_in.create_model, stand_in.is_model = create_model, lambda name: name == "tiny"
    stand_in.list_models = lambda pattern: ["tiny"] if pattern == "*tin*" else []
    stand_in.get_pretrained_cfg = lambda name: Cfg()
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    task = make(config(tmp_path, model_name="timm:tiny", model={"dropout": 0.5}), print)
    assert (task.how.size, task.how.mean, task.how.std) == (16, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    loss = task.loss(task.model(), task.collate([task.dataset("train")[0]]))
    assert loss.isfinite()
    assert asked == [("tiny", False, 10, 0.5)]
    with pytest.raises(ConfigError, match="timm has no such model; it has tiny"):
        make(config(tmp_path, model_name="timm:tin"), print)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"needs the package timm: install the extra timm of torch-lockstep"):
        make(config(tmp_path, model_name="timm:tiny"), print)


@pytest.mark.parametrize("package", ["PIL", "sklearn"])
def test_a_missing_package_is_one_line(package, tmp_path, monkeypatch):
    folder = write_images(tmp_path / "shapes", 2)
    for name in (package, f"{package}.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    named = {} if package == "sklearn" else {"dataset_name": str(folder)}
    with pytest.raises(ConfigError, match="install the extra images of torch-lockstep"):
        make(config(tmp_path, **named), print)


def test_the_models_shapes():
    torch.manual_seed(0)
    models = (ResNet(3, 7), ResNet(1, 7, dropout=0.5), ViT(16, 4, 3, 7), ViT(16, 4, 1, 7, dropout=0.5))
    for model, channels in zip(models, (3, 1, 3, 1), strict=True):
        logits = model(torch.randn(4, channels, 16, 16))
        assert logits.shape == (4, 7)
        logits.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    assert [patch_for(size) for size in (8, 16, 32, 64, 96, 128, 224, 384)] == [2, 2, 4, 8, 12, 16, 16, 16]


def test_a_run_of_images_is_written_and_read_back(tmp_path):
    result = lockstep.train(config(tmp_path, max_steps=1))
    kept = cli.read_toml(result.folder / "config.toml")
    assert kept["images.padding"] == -1
    assert "seq_len" not in kept


class FakeMix:
    """What the task asks of torchvision's MixUp and CutMix: here shares are drawn by torch, with no other image."""

    def __init__(self, alpha, num_classes):
        self.alpha, self.classes = alpha, num_classes

    def __call__(self, images, labels):
        assert labels.dtype is torch.int64
        share = torch.distributions.Beta(self.alpha, self.alpha).sample()
        shares = F.one_hot(labels, self.classes).float()
        return share * images + (1 - share) * images.roll(1, 0), share * shares + (1 - share) * shares.roll(1, 0)


def with_torchvision(patch):
    v2 = types.ModuleType("torchvision.transforms.v2")
    v2.RandAugment = lambda magnitude: lambda image: (image + torch.randint(magnitude, ())).to(image.dtype)
    v2.MixUp = v2.CutMix = FakeMix
    v2.RandomChoice = lambda chosen: lambda *batch: chosen[int(torch.randint(len(chosen), ()))](*batch)
    transforms = types.ModuleType("torchvision.transforms")
    transforms.v2 = v2
    for name, module in {"torchvision": types.ModuleType("torchvision"), transforms.__name__: transforms}.items():
        patch.setitem(sys.modules, name, module)


MIXED = {"randaugment": 9, "mixup": 0.2, "cutmix": 1.0}


def mixed_run(world, folder, name):
    with pytest.MonkeyPatch.context() as patch:
        with_torchvision(patch)
        return trained(world, folder, [(name, {"images": MIXED, "max_steps": 2})])[0]


def test_mixed_images_are_the_same_on_one_rank_and_two(tmp_path):
    [one] = run(mixed_run, 1, tmp_path, "one", timeout=250.0)
    assert run(mixed_run, 2, tmp_path, "two", timeout=250.0) == [one] * 2


def test_mixed_labels_give_both_losses_in_training_only(monkeypatch):
    with_torchvision(monkeypatch)
    task = make(Config(task="images", precision="float64", images={"mixup": 0.3}), print)
    training, evaluation = task.dataset("train"), task.dataset("evaluation")
    assert (training.draws_random, evaluation.draws_random) == (True, False)
    torch.manual_seed(0)
    model = task.model().double().eval()
    _, plain = task.collate([evaluation[index] for index in range(4)])
    assert plain.dtype is torch.int64
    images, labels = task.collate([training[index] for index in range(4)])
    assert torch.allclose(labels.sum(1), torch.ones(4, dtype=torch.float64))
    assert (labels.count_nonzero(1) > 1).any()
    expected = -(labels * model(images).log_softmax(1)).sum()
    parts = [task.loss(model, (images[at : at + 2], labels[at : at + 2])) for at in (0, 2)]
    assert float(sum(parts).detach()) == pytest.approx(float(expected.detach()), rel=1e-12)  # it adds up


def test_without_torchvision_it_is_one_line(tmp_path, monkeypatch):
    for module in ("torchvision", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, module, None)
    for name, value in MIXED.items():
        with pytest.raises(ConfigError, match=rf"--images\.{name} needs .*the extra torchvision of torch-lockstep"):
            make(config(tmp_path, images={name: value}), print)
    with refuses(ConfigError, "images.randaugment", 31):
        config(tmp_path, images={"randaugment": 31})
