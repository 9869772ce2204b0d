"""Small built-in models: a perceptron for tables, a ResNet and a vision transformer.

    logits = ViT(size=32, patch=4, channels=3, classes=10)(images)  # float [batch, 3, 32, 32] -> [batch, classes]

`ViT` follows Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv 2010.11929: the image as a row of patches, each
mapped to the width, a class token before them, learned positions, pre-norm blocks, and a linear layer on the class
token. Its layers are initialised as a language model's: N(0, 0.02), truncated at two deviations, and zero biases; the
last one starts at zero.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import ConfigError

__all__ = [
    "MLP",
    "ResNet",
    "ViT",
    "patch_for",
]


class MLP(nn.Module):
    """Perceptron of two hidden SiLU layers, between standardised features and target.

    The means and scales are buffers: they are saved with the weights, so an export takes raw rows. Rows are
    standardised in float64, before anything is rounded: times in seconds since 1970 lose minutes in float32. The
    buffers hold the bits of float64 as int64, so that no conversion of the model's precision rounds them. The weights
    have torch's own initialisation, from its default generator.

    Args:
        mean, scale: of each feature: subtracted, and divided by.
        target_mean, target_scale: of the target.
        width: of the hidden layers.
        dropout: probability, after each of them.
    """

    def __init__(
        self,
        mean: Sequence[float],
        scale: Sequence[float],
        target_mean: float,
        target_scale: float,
        *,
        width: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("scale", scale), ("target", [target_mean, target_scale])):
            self.register_buffer(f"{name}_bits", torch.tensor(list(values), dtype=torch.float64).view(torch.int64))
        self.blocks = nn.ModuleList()
        for inner in (len(mean), width):
            self.blocks.append(nn.Sequential(nn.Linear(inner, width), nn.SiLU(), nn.Dropout(dropout)))
        self.head = nn.Linear(width, 1)

    @property
    def mean(self) -> Tensor:
        """The mean of each feature in the training rows: float64 [features]."""
        return cast(Tensor, self.mean_bits).view(torch.float64)

    @property
    def scale(self) -> Tensor:
        """The standard deviation of each feature, by which it is divided: float64 [features]."""
        return cast(Tensor, self.scale_bits).view(torch.float64)

    def forward(self, rows: Tensor) -> Tensor:
        """Predict float64 [batch] from rows [batch, features]."""
        x = ((rows.double() - self.mean) / self.scale).to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        target = cast(Tensor, self.target_bits).view(torch.float64)
        return cast(Tensor, self.head(x))[:, 0].double() * target[1] + target[0]


# Channels of each stage.
_STAGES = (16, 32, 64)


class Residual(nn.Module):
    """Two 3x3 convolutions with a shortcut around them.

    [batch, inner, h, w] -> [batch, outer, h / stride, w / stride].
    """

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outer)
        plain = stride == 1 and inner == outer
        self.shortcut = nn.Identity() if plain else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.shortcut(x) + self.second_norm(self.second(hidden)))


class ResNet(nn.Module):
    """Residual network; draws its parameters from torch's default generator.

    The order of the draws depends on its shape alone.

    Args:
        channels: of the images.
        classes: of the logits.
        depth: blocks of a stage.
        dropout: probability, before the last layer.

    Attributes:
        blocks: the residual blocks, the units that engines shard, compile and recompute.
    """

    def __init__(self, channels: int, classes: int, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, _STAGES[0], 3, 1, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(_STAGES[0])
        self.blocks = nn.ModuleList()
        inner = _STAGES[0]
        for stage, outer in enumerate(_STAGES):
            for index in range(depth):
                # The first block of each later stage halves the image.
                self.blocks.append(Residual(inner, outer, 2 if stage and not index else 1))
                inner = outer
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(inner, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters, in a fixed order."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d | nn.Linear):
                module.reset_parameters()
        for block in self.blocks:
            # Each block starts as its shortcut (Goyal et al., arXiv 1706.02677, section 5.1).
            nn.init.zeros_(cast(Residual, block).second_norm.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [batch, classes] of images [batch, channels, height, width]."""
        x = F.relu(self.stem_norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.drop(x.mean(dim=(2, 3)))))


def patch_for(size: int) -> int:
    """Choose the height and width of a patch for images of `size` pixels.

    There are about 8 patches to a side; a patch has 2 to 16 pixels.

    Raises:
        ConfigError: no such number divides the size.
    """
    limit = min(16, max(2, size // 8))
    patch_size = 0
    for patch in range(limit, 1, -1):
        if size % patch == 0:
            patch_size = patch
            break
    if not patch_size:
        raise ConfigError(
            f"--images.size {size} is not a multiple of any patch size from 2 to {limit} pixels, which builtin:vit "
            "needs; use a multiple of 8"
        )
    return patch_size


class Layer(nn.Module):
    """Transformer layer: attention, then a two-layer perceptron, each on the normalised stream.

    The forward maps [batch, places, width] to the same shape.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        # One product computes queries, keys and values: one kernel instead of three.
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, places, width = x.shape
        projections = self.inputs(self.attention_norm(x)).view(batch, places, 3, self.heads, width // self.heads)
        # Each [batch, heads, places, width / heads]
        query, key, value = projections.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.drop(self.output(mixed.transpose(1, 2).reshape(batch, places, width)))
        return cast(Tensor, x + self.drop(self.contract(F.gelu(self.expand(self.mlp_norm(x))))))


class ViT(nn.Module):
    """Vision transformer; draws its parameters from torch's default generator.

    The order of the draws depends on its shape alone.

    Args:
        size: height and width of the images.
        patch: height and width of a patch; divides `size`.
        channels: of the images.
        classes: of the logits.
        layers, width, heads: of the transformer.
        dropout: probability, after the embedding, in attention and after each half of a layer.

    Attributes:
        blocks: the layers, the units that engines shard, compile and recompute.
    """

    def __init__(
        self,
        size: int,
        patch: int,
        channels: int,
        classes: int,
        *,
        layers: int = 6,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters, in a fixed order."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or name == "head.weight":
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [batch, classes] of images [batch, channels, size, size]."""
        # [batch, patches, width]
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x[:, 0])))
