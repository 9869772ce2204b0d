"""LS042: gradients cleared inside Accelerate's accumulate."""

import pytest
from rule_findings import count

TEXT = """
from accelerate import Accelerator

def main(model, optimizer, loader):
    accelerator = Accelerator(gradient_accumulation_steps={steps})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        with accelerator.accumulate(model):
            {first}
            accelerator.backward(model(x).mean())
            optimizer.step()
            {after}
"""


@pytest.mark.parametrize(
    ("steps", "first", "after", "number"),
    [
        ("4", "optimizer.zero_grad()", "pass", 1),
        ("1", "optimizer.zero_grad()", "pass", 0),
        ("4", "pass", "optimizer.zero_grad()", 0),
    ],
)
def test_where_gradients_are_cleared(steps, first, after, number):
    assert count(TEXT.format(steps=steps, first=first, after=after), "LS042") == number
