"""What frameworks prepare, and what it is called then."""

import pytest

from lockstep_lint.config import Config
from lockstep_lint.runner import check_text

CODE = frozenset({"LS065"})
HEAD = "import torch\nfrom accelerate import Accelerator\nfrom apex import amp\n\n"


def messages(*lines):
    body = "".join(f"    {line}\n" for line in lines)
    text = f"{HEAD}def main(model, other, optimizer, loader):\n    accelerator = Accelerator()\n{body}"
    return [finding.message for finding in check_text(text, Config(CODE, CODE))]


@pytest.mark.parametrize(
    "line",
    [
        "optimizer, model = amp.initialize(model, optimizer, opt_level='O1')",
        "model, optimizer, loader = amp.initialize(model, optimizers=optimizer)",
        "model, optimizer = accelerator.prepare(model, other, optimizer)",
        "model, optimizer, loader = accelerator.prepare(optimizer, model, loader)",
        "model, optimizer = accelerator.prepare(model, model)",
    ],
)
def test_names_that_do_not_fit(line):
    assert len(messages(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "model = amp.initialize(model, opt_level='O1')",
        "model, optimizer = amp.initialize(model, optimizers=optimizer)",
        "net, optim = accelerator.prepare(model, optimizer)",
        "self.net, optim = accelerator.prepare(model.half(), optimizer)",
        "model, _ = accelerator.prepare(model, loader)",
        "pair = accelerator.prepare(model, optimizer)",
        "model, optimizer = accelerator.prepare([model, optimizer])",
    ],
)
def test_names_that_fit(line):
    assert messages(line) == []


def test_one_name_for_all():
    line = "model = accelerator.prepare(model, optimizer)"
    assert len(messages(line, "model.train()")) == 1
    assert messages(line, "model, optimizer = model", "model.train()") == []


def test_an_object_that_another_one_replaces():
    made = "decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)"
    line = "model, decay = accelerator.prepare(model, other)"
    assert len(messages(made, line)) == 1
    assert messages(made, "print(decay)", line) == []
    assert messages(line) == []


def test_what_nobody_takes_back():
    line = "accelerator.prepare(model, optimizer)"
    assert len(messages(line, "optimizer.step()")) == 1
    assert messages(line) == []
    assert messages("accelerator.prepare(model)", "model.eval()") == []
