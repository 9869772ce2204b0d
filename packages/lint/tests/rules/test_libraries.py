"""Errors in programs that reach a line are hints in libraries and unit tests."""

import pytest

from lockstep_lint.runner import check_text

LOG = """
import torch.distributed as dist

def log(loss, rank):
    if rank == 0:
        dist.all_reduce(loss)

def main(loss, rank):
    log(loss, rank)
"""
GUARD = "\nif __name__ == '__main__':\n    {call}\n"


@pytest.mark.parametrize(
    ("text", "path", "level"),
    [
        (LOG, "example.py", "hint"),
        (LOG + GUARD.format(call="main(1, dist.get_rank())"), "example.py", "error"),
        (LOG + "\nmain(1, dist.get_rank())\n", "example.py", "error"),
        (LOG + GUARD.format(call="print(1)"), "example.py", "hint"),
        (
            "import pytest\n" + LOG + "\ndef test_log():\n    main(1, dist.get_rank())\n",
            "tests/test_example.py",
            "hint",
        ),
    ],
)
def test_an_error_needs_a_program(text, path, level):
    assert [(found.rule, found.severity) for found in check_text(text, None, path)] == [("LS018", level)]
