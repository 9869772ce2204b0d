"""LS029: the old autocast under another name, and beside the new one for other versions of torch."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

HEADER = """
import torch
from contextlib import nullcontext
from functools import partial
from packaging import version

def main(model, mixed, context):
"""


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("context = torch.cuda.amp.autocast if mixed else nullcontext", [8]),
        ("context = partial(torch.cuda.amp.autocast, dtype=torch.float16)", [8]),
        ("table = {'cuda': torch.cuda.amp.autocast, 'none': nullcontext}", [8]),
        ("old = context is torch.cuda.amp.autocast", []),
        ("old = isinstance(context, torch.cuda.amp.autocast)", []),
        # a call beside it is not one by that name
        ("autocast = torch.cuda.amp.autocast\n    with torch.cuda.amp.autocast():\n        model()", [8, 9]),
        ("if torch.__version__ >= '2.4':\n        pass\n    else:\n        context = torch.cuda.amp.autocast", []),
        (
            "if torch.__version__ >= '2.4':\n        pass\n    else:\n        with torch.cuda.amp.autocast(): model()",
            [],
        ),
        ("if hasattr(torch, 'amp'):\n        pass\n    else:\n        context = torch.cuda.amp.autocast", []),
        ("if hasattr(model, 'amp'):\n        pass\n    else:\n        context = torch.cuda.amp.autocast", [11]),
        ("if mixed:\n        with torch.cuda.amp.autocast(): model()", [9]),
        ("context = torch.amp.autocast if version.parse(mixed) else torch.cuda.amp.autocast", []),
        ("try:\n        pass\n    except AttributeError:\n        context = torch.cuda.amp.autocast", []),
        ("try:\n        pass\n    except ValueError:\n        context = torch.cuda.amp.autocast", [11]),
        ("if torch.__version__ < '1.6':\n        raise ValueError\n    context = torch.cuda.amp.autocast", [10]),
        ("if not torch.__version__:\n        @torch.cuda.amp.custom_fwd\n        def run(): pass", []),
        ("if mixed:\n        @torch.cuda.amp.custom_fwd\n        def run(): pass", [9]),
    ],
)
def test_the_old_autocast_and_who_uses_it(body, lines):
    found = check_text(f"{HEADER}    {body}\n", configure({}, "LS029", ""))
    assert [f.line for f in found] == lines


def test_a_name_for_the_old_one_is_told_where_it_is_given_and_used():
    text = "import torch\n\nautocast = torch.cuda.amp.autocast\n\n"
    text += "def main(model):\n    with autocast():\n        model()\n"
    assert [f.line for f in check_text(text, configure({}, "LS029", ""))] == [3, 6]
