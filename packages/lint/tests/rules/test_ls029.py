"""LS029: moved or deprecated."""

import pytest
from rule_findings import lines as lines_of

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def test_a_name_for_the_old_one_is_told_where_it_is_given():
    text = "import torch\n\nautocast = torch.cuda.amp.autocast\n\n"
    text += "def main(model):\n    with autocast():\n        model()\n"
    assert [f.line for f in check_text(text, configure({}, "LS029", ""))] == [3, 6]


FIRST = "from accelerate import Accelerator\naccelerator = Accelerator()\n"


FLAG = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', type=int)\n"


ENV = "parser.parse_args().local_rank = int(__import__('os').environ.get('LOCAL_RANK', -1))\n"


APEX = "import torch\ntry:\n    import apex\nexcept ImportError:\n    pass\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (FIRST + FLAG, [5]),
        ("import torch\nfrom transformers import Trainer\nTrainer()\n" + FLAG, [6]),
        ("import deepspeed\ndeepspeed.initialize()\n" + FLAG, []),
        (APEX + "apex.amp.scale_loss(1)\nmodel = apex.amp.initialize(2)\n", [6, 7]),
        (APEX + "apex.parallel.convert_syncbn_model(1)\n", [6]),
        (APEX + "from apex import amp\napex.amp.scale_loss(1)\napex.parallel.Reducer(2)\n", [7, 8]),
        (APEX + "norm = apex.normalization.FusedLayerNorm(3)\n", []),
        (APEX, []),
        ("import torch\nfrom apex import amp\nm = amp.initialize(1)\n", [3]),
    ],
)
def test_what_is_deprecated_is_told_where_it_is_used(text, told):
    assert lines_of(text, "LS029") == told


NAMED_CONTEXT = """
import torch
from contextlib import nullcontext
from torch.cuda import amp
from torch.cuda.amp import autocast
from torch.cuda.amp.grad_scaler import GradScaler

def main(model, x, mixed):
    {given}
    with context():
        return model(x)
"""


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ("context = torch.cuda.amp.autocast if mixed else nullcontext", [9]),
        ("context = nullcontext if not mixed else amp.autocast", [9]),
        ("context = autocast if mixed else nullcontext", [9]),
        ("context = partial(autocast, enabled=mixed)", [9]),
        ("context = autocast", [9, 10]),
        ("autocast = context = torch.cuda.amp.autocast\n    autocast()", [9, 10, 11]),
        ("context = torch.autocast if mixed else nullcontext", []),
        ("context = nullcontext", []),
        ("context = lambda: autocast(enabled=mixed)", [9]),
    ],
)
def test_an_autocast_that_is_called_by_another_name(given, lines):
    found = check_text(NAMED_CONTEXT.format(given=given), configure({}, "LS029", ""))
    assert [finding.line for finding in found] == lines
