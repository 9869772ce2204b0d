"""LS015: torch.load."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text, code="LS036"):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


DEVICE = """
import torch
from torch.utils.data import DataLoader

def train(model, data, optimizer, criterion, cfg, given):
    {device}
    loader = DataLoader(data, num_workers=2, pin_memory=True)
    model.load_state_dict(torch.load("x.pt"))
    for x, y in loader:
        x = x.to(device)
        loss = criterion(model(x), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
"""


@pytest.mark.parametrize(
    ("device", "waits", "copies"),
    [
        ('device = "mps" if torch.backends.mps.is_available() else "cuda"', [15], 2),
        ('device, timestamps = "cpu", 0', [], 0),
        ('device = given["name"]', [], 2),
        ("device = y.device", [], 2),
    ],
)
def test_what_a_gpu(device, waits, copies):
    text = DEVICE.format(device=device)
    assert told(text) == waits
    assert told(text, "LS015") == ([] if device.startswith("device, timestamps") else [8])  # whoever saved it had a GPU
    assert len(told(text, "LS022")) == copies
