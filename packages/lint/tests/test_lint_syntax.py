"""`async=True`, an argument of torch before Python 3.7."""

import pytest

from lockstep_lint.analysis.source import parse_text
from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

OLD = """import torch
loader = torch.utils.data.DataLoader(data, pin_memory=True, num_workers=2)
for x, y in loader:
    x = x.cuda({first})
    y = y.cuda(non_blocking=True)
    loss = model(x, y).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("first", "lines"), [("", [4]), ("async=True", []), ("device, async = True", [])])
def test_the_argument_of_python_before_3_7(first, lines):
    found = check_text(OLD.format(first=first), configure({}, "LS022", ""))
    assert [finding.line for finding in found] == lines


@pytest.mark.parametrize("text", ["async = 1\nx = (", "f(async=)", "async def f(:\n    pass"])
def test_async_that_no_python_parses(text):
    with pytest.raises(SyntaxError):
        parse_text(text)
