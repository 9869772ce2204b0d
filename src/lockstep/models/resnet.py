"""A residual network with BatchNorm for small images, in one short file.

    logits = ResNet(channels=3, classes=10)(images)         # float [batch, channels, height, width] -> [batch, classes]

The one for small images of He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385, section 4.2: a
3x3 stem, three stages of 16, 32 and 64 channels, the second and third at half the height and width of the one before,
the mean over all places, one linear layer. Weights are drawn as in He et al., arXiv 1502.01852 (fan-out); each block
begins as its shortcut (Goyal et al., arXiv 1706.02677, section 5.1), which is a 1x1 convolution where shapes change.
"""

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ResNet", "Residual"]

_STAGES = (16, 32, 64)  # channels


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut: [batch, inner, h, w] -> [batch, outer, h / stride, w / stride]."""

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
    """The network; it draws its parameters from torch's default generator, in an order that depends on its shape alone.

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
            for place in range(depth):
                self.blocks.append(Residual(inner, outer, 2 if stage and not place else 1))
                inner = outer
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(inner, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew, in a fixed order."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d | nn.Linear):
                module.reset_parameters()
        for block in self.blocks:
            nn.init.zeros_(cast(Residual, block).second_norm.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes] of images [batch, channels, height, width]."""
        x = F.relu(self.stem_norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.drop(x.mean(dim=(2, 3)))))
