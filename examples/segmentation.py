"""Segmentation, with a loss that weighs rare pixels more: python examples/segmentation.py --max-steps 60

The loss is the SUM of the pixels' weighted losses and `count` the sum of their weights: a step divides the two.
"""

import torch
from torch.nn import Conv2d, ReLU, Sequential
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


class Discs(lockstep.Task):
    weights = torch.tensor([1, 4])  # of background and disc: whole numbers, as a count is

    def model(self):
        return Sequential(Conv2d(1, 16, 5, padding=2), ReLU(), Conv2d(16, 2, 5, padding=2))

    def dataset(self, split):
        draw = torch.Generator().manual_seed(int(split == "train"))
        centres = torch.randint(4, 12, (256, 2, 1, 1), generator=draw)
        masks = ((torch.stack(torch.meshgrid(*[torch.arange(16)] * 2, indexing="ij")) - centres) ** 2).sum(1) < 9
        return TensorDataset(masks[:, None] + torch.randn(256, 1, 16, 16, generator=draw), masks.long())

    def count(self, batch):
        return int(self.weights[batch[1]].sum())

    def evaluate(self, model, batch):
        scores, masks = model(batch[0]), batch[1]
        found, either = (scores.argmax(1) & masks).sum(), (scores.argmax(1) | masks).sum()
        return F.cross_entropy(scores, masks, self.weights.to(scores)), {"iou": (found, either)}

    def loss(self, model, batch):
        return self.evaluate(model, batch)[0]


if __name__ == "__main__":
    print(lockstep.train(lockstep.Config.from_args(experiment_name="discs", exact=True), Discs()).evaluation)
