"""What a script leaves to others: models of a library, a helper that clips, a class that moves the batches."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text, code):
    return bool(check_text(text, configure({}, code, "")))


WRAPPED = """
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from efficientnet_pytorch import EfficientNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def main(local_rank):
    model = {made}.to(local_rank)
    return DDP(model, device_ids=[local_rank])
"""


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("smp.Unet(encoder_name='resnet34', classes=1)", True),
        ("smp.DeepLabV3Plus('mit_b0')", True),
        ("EfficientNet.from_pretrained('efficientnet-b0')", True),
        ("torchvision.models.segmentation.deeplabv3_resnet50()", True),
        ("torchvision.models.video.r3d_18()", True),
        ("timm.create_model('seresnext50_32x4d')", True),
        ("timm.create_model('tf_efficientnet_b4', pretrained=True)", True),
        ("smp.Unet('mit_b0', decoder_use_batchnorm=False)", False),
        ("smp.losses.DiceLoss('binary')", False),
        ("timm.create_model('resnetv2_50x1_bit')", False),
        ("timm.create_model('resnet50_gn')", False),
        ("timm.create_model('convnext_tiny')", False),
        ("torchvision.models.resnet50(norm_layer=lambda n: nn.GroupNorm(32, n))", False),
        ("torchvision.models.vit_b_16()", False),
    ],
)
def test_models_of_libraries_that_hold_batch_norm(made, found):
    assert told(WRAPPED.format(made=made), "LS005") is found


CLIPPED = """
import torch

def clip_gradient(parameters, value):
    parameters = [p for p in parameters if p.grad is not None]
    torch.nn.utils.{clip}(parameters, value)

def unscale(scaler, optimizer):
    scaler.unscale_(optimizer)

def step(model, optimizer, scaler, loss):
    optimizer.zero_grad()
    {backward}
    {before}
    {call}
    {after}
    {step}
"""
SCALED = {
    "clip": "clip_grad_norm_",
    "backward": "scaler.scale(loss).backward()",
    "before": "pass",
    "call": "clip_gradient(model.parameters(), 1.0)",
    "after": "pass",
    "step": "scaler.step(optimizer)",
}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"after": "scaler.unscale_(optimizer)"}, True),
        ({"clip": "clip_grad_value_"}, True),
        (
            {"call": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "after": "scaler.unscale_(optimizer)"},
            True,
        ),
        ({"call": "pass", "step": "optimizer.step()\n    clip_gradient(model.parameters(), 1.0)"}, True),
        ({"before": "scaler.unscale_(optimizer)"}, False),
        ({"before": "unscale(scaler, optimizer)"}, False),
        ({"backward": "loss.backward()", "step": "optimizer.step()"}, False),
        ({"clip": "get_total_norm"}, False),
    ],
)
def test_a_helper_that_clips(change, found):
    assert told(CLIPPED.format(**SCALED | change), "LS011") is found


MOVED = """
import torch
from torch.utils.data import DataLoader

device = torch.device("cuda")

def prepare(x, y):
    return x.view(-1, 3, 32, 32).to(device{more}), y

def to_device(data, device):
    if isinstance(data, (list, tuple)):
        return [to_device(x, device) for x in data]
    return data.to(device{more})

class Prepared:
    def __init__(self, dl, func=None):
        self.dl = dl
        self.func = func

    def __iter__(self):
        for b in self.dl:
            {line}

class Kept:
    def __init__(self, dl, func):
        self.dl, self.func = dl, func

def main(data, model):
    train_loader = DataLoader(data, num_workers=2, pin_memory={pin})
    return {made}
"""
USUAL = {"more": "", "pin": "True", "line": "yield self.func(*b)", "made": "Prepared(train_loader, prepare)"}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"more": ", non_blocking=True"}, False),
        ({"line": "yield to_device(b, device)", "more": ", non_blocking=True"}, False),
        ({"pin": "False"}, False),
        ({"made": "Kept(train_loader, prepare)"}, False),
        ({"made": "Prepared(data, prepare)"}, False),
        ({"line": "yield b", "made": "to_device(model, device)"}, False),
    ],
)
def test_a_class_that_moves_the_batches(change, found):
    assert told(MOVED.format(**USUAL | change), "LS022") is found


NUMBERED = """
import torch
from torch.utils.data import DataLoader

device = {device}

def train(model, data, optimizer):
    model.to({given})
    for x in DataLoader(data):
        optimizer.zero_grad()
        model(x.to({given})).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("device", "given", "found"),
    [
        ("0", "device", True),
        ("None", "0", True),
        ("torch.device('cuda')", "device", True),
        ("'cpu'", "device", False),
        ("torch.float64", "device", False),
        ("None", "torch.float64", False),
    ],
)
def test_a_device_by_its_number(device, given, found):
    assert told(NUMBERED.format(device=device, given=given), "LS022") is found
