"""A small perceptron for tables, which knows how to scale its numbers.

model = MLP(mean, scale, target_mean, target_scale)     # float64 [features] each of the first two
predictions = model(rows)                               # float [batch, features] -> [batch], in the target's unit
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

__all__ = ["MLP"]


class MLP(nn.Module):
    """Two hidden layers with SiLU between standardised features and a standardised target.

    What they are standardised by are buffers: they go where the weights go, so that an export takes plain rows. Weights
    are torch's own draw, from its default generator.

    Args:
        mean, scale: of each feature: the first is taken off, the second divided by.
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
            self.register_buffer(name, torch.tensor(list(values), dtype=torch.float32))
        self.blocks = nn.ModuleList()
        for inner in (len(mean), width):
            self.blocks.append(nn.Sequential(nn.Linear(inner, width), nn.SiLU(), nn.Dropout(dropout)))
        self.head = nn.Linear(width, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """Predictions [batch] of rows [batch, features]."""
        x = (rows - cast(Tensor, self.mean)) / cast(Tensor, self.scale)
        for block in self.blocks:
            x = block(x)
        target = cast(Tensor, self.target)
        return cast(Tensor, self.head(x))[:, 0] * target[1] + target[0]
