"""LS025: prepared on every rank."""

import textwrap

import pytest
from rule_findings import found as found_of

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

FOLDER = """
import os
from pathlib import Path
import torch.distributed as dist

def main(args, rank):
    dist.init_process_group("nccl")
    {lines}
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("if not os.path.exists(args.out): os.makedirs(args.out)", True),
        ("if not os.path.isdir(args.out): os.mkdir(args.out)", True),
        ("if not Path(args.out).exists(): Path(args.out).mkdir(parents=True)", True),
        ("if os.path.exists(args.out): return\n    os.makedirs(args.out)", True),
        ("if not os.path.exists(args.out): os.makedirs(args.out, exist_ok=True)", False),
        ("if rank == 0 and not os.path.exists(args.out): os.makedirs(args.out)", False),
        ("if rank == 0:\n        if not os.path.exists(args.out): os.makedirs(args.out)", False),
        ("try:\n        os.makedirs(args.out)\n    except FileExistsError:\n        pass", False),
        ("if not os.path.exists(f'out{rank}'): os.makedirs(f'out{rank}')", False),
    ],
)
def test_a_folder_that_ranks_look_for_at_once(lines, found):
    assert found_of(FOLDER.format(lines=lines), "LS025") is found


PLACES = """
import os
from pathlib import Path
import torch.distributed as dist
from torchvision.datasets import CIFAR10

def main(args, rank):
    dist.init_process_group("nccl")
    {first}
    data = CIFAR10({place}, download=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("first", "place", "found"),
    [
        ("pass", "'data'", True),
        ("root = Path(args.data) / 'cifar'", "root", True),
        ("root = Path(args.data)", "root=root", True),
        ("root = Path(args.data) / str(rank)", "root", False),
        ("root = f'data{dist.get_rank()}'", "root=root", False),
        ("pass", "os.path.join('data', str(rank))", False),
        ("root = tempfile.mkdtemp()", "root", False),
        ("root = args.template", "root", True),
        ("root = f'data{os.getpid()}'", "root", False),
        ("root = tempfile.mkdtemp()", "root + '/cifar'", False),
        ("root = args.data", "os.path.join(root, 'cifar')", True),
        ("args = make(rank)", "os.path.join(args.data, 'cifar')", True),
        ("pass", "args.rootTemp", False),
        ("pass", "args.contemporary", True),
        ("pass", "args.ranker_dir", True),
        ("root = f'data{args.num_workers}'", "root", True),
        ("root = f'data{args.lora_rank}'", "root", True),
        ("root = f'data{args.worker_id}'", "root", False),
    ],
)
def test_a_download_into_a_place_of_its_own(first, place, found):
    assert found_of(PLACES.format(first=first, place=place), "LS025") is found


def findings_of(tmp_path, files, rule="LS028"):
    """Return the lines of a rule's findings in the first of some files."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    found = check_paths([str(tmp_path / next(iter(files)))], configure({}, rule, ""))
    return [finding.line for finding in found]


@pytest.mark.parametrize(
    ("before", "after", "number"),
    [
        ("if rank != 0:\n        dist.barrier()", "if rank == 0:\n        dist.barrier()", 0),
        ("pass", "if rank != 0:\n        dist.barrier()", 1),
        ("pass", "pass", 1),
    ],
)
def test_barriers_before_a_folder(tmp_path, before, after, number):
    text = "import os\nimport torch.distributed as dist\n\ndef main(rank, out):\n    dist.init_process_group('nccl')\n"
    text += f"    {before}\n    if not os.path.exists(out):\n        os.makedirs(out)\n    {after}\n"
    assert len(findings_of(tmp_path, {"run.py": text}, "LS025")) == number


@pytest.mark.parametrize(
    ("held", "number"),
    [("FileLock('data.lock')", 0), ("locks.held('data')", 1), ("self.block", 1), ("portalocker.Lock('data')", 0)],
)
def test_a_download_that_one_process_after_the_other_makes(tmp_path, held, number):
    text = "import torch.distributed as dist\nfrom torchvision.datasets import MNIST\n\n"
    text += f"def main(self, rank):\n    dist.init_process_group('nccl')\n    with {held}:\n"
    text += "        return MNIST('data', download=True)\n"
    assert len(findings_of(tmp_path, {"run.py": text}, "LS025")) == number


SOUND = """
import os
import shutil
import torch.distributed as dist

def clear(folder):
    if os.path.isdir(folder):
        shutil.rmtree(folder)

def main(rank):
    dist.init_process_group("nccl")
    if rank == 0:
        clear("out")
    dist.barrier()

if __name__ == "__main__":
    main(int(os.environ["RANK"]))
"""


def test_a_folder_that_the_caller_names():
    assert check_text(SOUND, configure({}, "LS025", "")) == []
