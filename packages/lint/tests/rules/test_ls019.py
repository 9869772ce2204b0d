"""LS019: no destroy_process_group."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

ALL = configure({}, "LS019", "")


SCRIPT = """
import torch.distributed as dist
from helpers import tools

def main():
    dist.init_process_group("nccl")
    {call}

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("tools.cleanup()", False),
        ("tools.close_dist()", False),
        ("tools.exit()", False),
        ("tools.dist2plane(1)", True),  # a distance
        ("tools.is_distributed()", True),  # a question
        ("tools.get_dist_info()", True),
        ("tools.get_complexity_info()", True),
        ("tools.worker_init_fn(3)", True),
    ],
)
def test_names_of_what_may_end_it(tmp_path, call, told):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(call=call))
    assert bool(check_paths([str(path)], ALL)) is told


STARTS = "import torch.distributed as dist\n\ndef main():\n    dist.init_process_group('nccl')\n\n{}\n"


@pytest.mark.parametrize(("last", "other", "told"), [("main()", "", True), ("", "", False), ("main()", "run", False)])
def test_a_main_function_that_the_file_calls(tmp_path, last, other, told):
    path = tmp_path / "run.py"
    path.write_text(STARTS.format(last))
    (tmp_path / "other.py").write_text(f"import {other or 'os'}\n")
    assert bool(check_paths([str(path)], ALL)) is told


def printed(text, path="example.py"):
    return [finding.line for finding in check_text(text, configure({}, "LS028", ""), path)]
