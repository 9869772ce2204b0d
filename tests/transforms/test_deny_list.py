"""Exact runs use no operation that torch refuses on a CUDA device where algorithms must be deterministic."""

import re
from fnmatch import fnmatchcase

import pytest
import torch
from small_runs import config
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.config import cli

# What torch.use_deterministic_algorithms says of itself -> the operations that raise, by name; * stands for any end.
REFUSED = {
    "torch.nn.AvgPool3d": ("avg_pool3d_backward",),
    "torch.nn.AdaptiveAvgPool2d": ("_adaptive_avg_pool2d_backward",),
    "torch.nn.AdaptiveAvgPool3d": ("_adaptive_avg_pool3d_backward",),
    "torch.nn.MaxPool3d": ("max_pool3d_with_indices_backward",),  # before torch 2.13
    "torch.nn.AdaptiveMaxPool2d": ("adaptive_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool2d": ("fractional_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool3d": ("fractional_max_pool3d_backward",),
    "torch.nn.MaxUnpool1d": ("max_unpool*",),
    "torch.nn.MaxUnpool2d": ("max_unpool*",),
    "torch.nn.MaxUnpool3d": ("max_unpool*",),
    "torch.nn.functional.interpolate": ("upsample_linear*", "upsample_bi*", "upsample_tri*", "_upsample_bi*"),
    "torch.nn.ReflectionPad1d": ("reflection_pad1d_backward",),
    "torch.nn.ReflectionPad2d": ("reflection_pad2d_backward",),
    "torch.nn.ReflectionPad3d": ("reflection_pad3d_backward",),
    "torch.nn.NLLLoss": ("nll_loss2d*",),  # that of one label a row has one thread block, and is not refused
    "torch.nn.CTCLoss": ("_ctc_loss_backward",),
    "torch.nn.EmbeddingBag": ("_embedding_bag*",),
    "torch.Tensor.put_": ("put",),
    "torch.histc": ("histc",),
    "torch.bincount": ("bincount",),
    "torch.kthvalue": ("kthvalue",),
    "torch.median": ("median", "nanmedian"),
    "torch.nn.functional.grid_sample": ("grid_sampler*",),
    "torch.cumsum": ("cumsum",),  # of floats
    "torch.Tensor.scatter_reduce": ("scatter_reduce",),
    "torch.Tensor.resize_": (),  # of quantised tensors, which nothing here has
}


def is_refused(function, results):
    name = function._schema.name.removeprefix("aten::").rstrip("_")
    if name == "cumsum":
        return results.is_floating_point() or results.is_complex()
    return any(fnmatchcase(name, known) for found in REFUSED.values() for known in found)


class Watch(TorchDispatchMode):
    """Sees each operation, those of backwards and of the optimizer too."""

    def __init__(self):
        super().__init__()
        self.seen, self.refused = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self.seen.add(function._schema.name)
        if is_refused(function, results):
            self.refused.add(function._schema.name)
        return results


def test_the_list_is_that_of_the_torch_that_is_here():
    said = torch.use_deterministic_algorithms.__doc__.split("will throw a")[2].split("In addition")[0]
    assert set(re.findall(r"\* :(?:class|func):`([\w.]+)`", said)) <= REFUSED.keys()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.cumsum(0),
        lambda x: x.median(),
        lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
        lambda x: F.adaptive_avg_pool2d(x[None], 2).sum().backward(),
        lambda x: F.nll_loss(x[None, :, None], torch.zeros(1, 1, 4, dtype=torch.int64)),
    ],
    ids=["cumsum", "median", "interpolate", "adaptive", "nll2d"],
)
def test_what_is_refused_is_found(operation):
    with Watch() as watch:
        operation(torch.ones(4, 4, requires_grad=True))
    assert watch.refused
    with Watch() as watch:
        torch.ones(4, 4, dtype=torch.int64).cumsum(0)
        F.cross_entropy(torch.ones(4, 4, requires_grad=True), torch.zeros(4, dtype=torch.int64)).backward()
    assert not watch.refused


class Normed(lockstep.Task):
    """BatchNorm, whose statistics are folded in by sums over micro-batches."""

    def model(self):
        layers = nn.Linear(4 * 36, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), *layers)

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0)
        images, labels = torch.randn(40, 1, 8, 8, generator=generator), torch.arange(40) % 3
        return torch.utils.data.TensorDataset(images, labels)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


BUILTIN = {
    "language": "--seq-len 32 --data.vocab-size 300 --model.loss-chunk 16 --model.dropout 0.1",
    "images": "--task images",
    "vit": "--task images --model-name builtin:vit",
    "regression": "--task regression",
}
"""With what an exact run may have beside: clipping, an average of the weights, audits, the guards' comparisons."""
BESIDE = "--exact --max-steps 2 --optim.ema 0.9 --guards.spike skip --guards.audit 0.5 --guards.desync-freq 1"


def watched(argv, task=None):
    with Watch() as watch:
        result = lockstep.train(cli.parse(argv.split()) if isinstance(argv, str) else argv, task)
    assert result.status == "finished"
    assert any("backward" in name or name == "aten::mm" for name in watch.seen)
    return watch.refused


@pytest.mark.parametrize("name", BUILTIN)
def test_exact_runs_of_the_built_in_tasks_have_none(name, tmp_path, no_network):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"a line of words, number {n}" for n in range(400)), encoding="utf-8")
    data = f" --dataset-name {text}" if name == "language" else ""
    assert watched(f"{BUILTIN[name]}{data} {BESIDE} --save-dir {tmp_path} --device cpu --batch-size 8") == set()


@pytest.mark.parametrize("optim", [{}, {"name": "muon"}, {"name": "sgd"}], ids=["adamw", "muon", "sgd"])
def test_batchnorm_and_every_optimizer_have_none(optim, tmp_path):
    given = config(tmp_path, exact=True, precision="float32", max_steps=3, optim=optim, micro_batch_size=4)
    assert watched(given, Normed()) == set()
