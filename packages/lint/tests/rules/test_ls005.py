"""LS005: BatchNorm under DDP."""

import pytest
from rule_findings import found as found_of

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

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
    assert found_of(WRAPPED.format(made=made), "LS005") is found


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, body=None):
        super().__init__()
        self.layer = nn.BatchNorm1d(4)
"""


WRAPPED_2 = """
{line}
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(rank):
    return DDP({made}.to(rank), device_ids=[rank])
"""


@pytest.mark.parametrize(
    ("line", "made", "found"),
    [
        ("import parts.builder", "parts.builder.Net()", True),
        ("import parts.deep.more", "parts.deep.more.Net()", True),
        ("import parts", "parts.builder.Net()", True),
        ("from parts import deep", "deep.more.Net()", True),
        ("import parts.builder", "parts.builder.Other()", False),
        ("import pieces.builder", "pieces.builder.Net()", False),
    ],
)
@pytest.mark.parametrize("package", [True, False])
def test_a_package_that_is_named_with_its_file(tmp_path, line, made, found, package):
    (tmp_path / "parts" / "deep").mkdir(parents=True)
    (tmp_path / "parts" / "builder.py").write_text(NET)
    (tmp_path / "parts" / "deep" / "more.py").write_text(NET)
    if package:
        (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "main.py").write_text(WRAPPED_2.format(line=line, made=made))
    assert bool(check_paths([str(tmp_path / "main.py")], configure({}, "LS005", ""))) is found


@pytest.mark.parametrize(("norm", "expected"), [("BatchNorm2d", True), ("GroupNorm", False)])
def test_a_model_of_an_object_that_is_wrapped_in_its_place(tmp_path, norm, expected):
    text = "from torch import nn\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n"
    text += f"class Trainer:\n    def __init__(self):\n        self.model = nn.Sequential(nn.{norm}(8, 8))\n\n"
    text += "def main(rank):\n    trainer = Trainer()\n    trainer.model = DDP(trainer.model, device_ids=[rank])\n"
    (tmp_path / "run.py").write_text(text)
    assert bool(check_paths([str(tmp_path / "run.py")], configure({}, "LS005", ""))) is expected
