"""The task of `loss_table`: each moment that a fault can be planted at calls a function of `loss_moments`."""

import multiprocessing

import loss_moments
import torch
from torch import nn

import lockstep

loss_moments.in_import()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        if multiprocessing.parent_process():
            loss_moments.in_worker()
        made = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=made), index % 4


class Classes(lockstep.Task):
    def model(self):
        loss_moments.in_model()
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def dataset(self, split):
        loss_moments.in_data()
        return Numbers()

    def loss(self, model, batch):
        loss_moments.in_loss()
        outputs = model(batch[0])
        outputs.register_hook(_backward)
        return nn.functional.cross_entropy(outputs, batch[1], reduction="sum")

    def evaluate(self, model, batch):
        loss_moments.in_evaluation()
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), {}


def _backward(gradient):
    loss_moments.in_backward()
