"""Seed the program, and define the net and samples of the image stories; `judged` are for the score alone."""

import torch
from seed import seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(seed)
pixels, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
train, test = TensorDataset(images[:1200], labels[:1200]), TensorDataset(images[1200:1500], labels[1200:1500])
judged = images[1500:], labels[1500:]


def net():
    convolution = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(256, 10))
