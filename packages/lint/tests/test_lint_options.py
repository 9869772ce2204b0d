"""LS068, LS060 and LS058: options of another type, imports that a file lacks, and modules that are called."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

RULES = configure({}, "LS058,LS060,LS068", "", hints=True)

OPTIONS = """
import argparse
import random
import numpy as np
import torch
{head}
def options():
    parser = argparse.ArgumentParser()
    parser.add_argument({option})
    args = parser.parse_args()
    {change}
    return args

def main(args):
    {use}

main(options())
"""


def rules(option, use="print(args.x)", change="pass", head=""):
    text = OPTIONS.format(option=option, use=use, change=change, head=head)
    return [finding.rule for finding in check_text(text, RULES)]


@pytest.mark.parametrize("option", ["'--x', type=bool", "'-x', type=bool, default=True", "'--x', dest='x', type=bool"])
def test_a_type_that_makes_every_text_true(option):
    assert rules(option) == ["LS068"]
    assert rules(option, head="flag = bool\n") == ["LS068"]


@pytest.mark.parametrize(
    ("option", "use", "change", "head"),
    [
        ("'--x', action='store_true'", "print(args.x)", "pass", ""),
        ("'--x', type=bool, nargs='?', const=True", "print(args.x)", "pass", ""),
        ("'--x', type=bool", "print(args)", "pass", ""),  # nothing reads it
        ("'--x', type=bool", "print(args.x)", "args.x = torch.cuda.is_available()", ""),
        ("'--x', type=bool", "print(args.x)", "pass", "from texts import truth as bool"),
        ("'--x', type=bool", "print(args.x)", "pass", "import jsonargparse"),
        ("'--x', type=bool", "print(args.x)", "parser.register('type', bool, len)", ""),
    ],
)
def test_a_bool_that_is_read_right(option, use, change, head):
    assert rules(option, use, change, head) == []


NUMBERS = [
    "torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=args.x)",
    "torch.utils.data.DataLoader([1], batch_size=args.x)",
    "print([i for i in range(args.x)])",
    "np.random.seed(args.x)",
    "print(args.x - 1, -args.x)",
    "print(1 + args.x)",
    "print(3 % args.x == 0)",
    "print(args.x > 2)",
    "y = args.x; print(range(y))",
]


@pytest.mark.parametrize("use", NUMBERS)
def test_a_number_that_stays_a_text(use):
    assert rules("'--x', default=3", use) == ["LS068"]
    assert rules("'--x', default=3, type=str", use) == ["LS068"]
    for option in ("'--x', default=3, type=int", "'--x', default=3, choices=[3, 4]", "'--x', default=3, action=Own"):
        assert rules(option, use, head="from own import Own") == []
    assert rules("'--x', default=3", use, "args.x = int(args.x)") == []
    assert rules("'--x', default=3", use, "vars(args).update(torch.load('a'))") == []


@pytest.mark.parametrize(
    "use",
    [
        "torch.manual_seed(args.x)",  # it converts a text
        "random.seed(args.x)",
        "print(range(int(args.x)))",
        "print(f'{args.x}' + 'a', '%s' % args.x, 'a' * 2, args.x == 'a')",
        "torch.utils.data.DataLoader([1], collate_fn=args.x)",
    ],
)
def test_a_text_that_does(use):
    assert rules("'--x', default=3", use) == []


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("'--x', type=int, default='auto'", True),
        ("'--x', type=int, default='1e3'", True),
        ("'--x', type=float, default=''", True),
        ("'--x', type=float, default='1e-3'", False),
        ("'--x', type=float, default=None", False),
        ("'--x', type=int, default='auto', required=True", False),
        ("'x', type=int, default='auto'", False),
    ],
)
def test_a_default_that_its_type_cannot_read(option, wrong):
    assert bool(rules(option)) is wrong
    assert rules(option, change="parser.set_defaults(x=1)") == []


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from .nets import Net\n")
    (tmp_path / "parts" / "nets.py").write_text("import torch\n\nclass Net(torch.nn.Module):\n    pass\n")
    (tmp_path / "tools.py").write_text("import os as system\n\nfor item in range(2):\n    last = item\n")

    def told(text):
        (tmp_path / "train.py").write_text("import torch\n" + text)
        return [finding.rule for finding in check_paths([str(tmp_path / "train.py")], RULES)]

    return told


@pytest.mark.parametrize(
    "text",
    [
        "from tools import system, item, last\n",
        "from parts import Net, nets\n",
        "from parts.nets import Net\n",
        "try:\n    from tools import first\nexcept ImportError:\n    first = 2\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tools import first\n",
        "from unseen import first\n",
        "from torch import first\n",
        "def later():\n    from tools import first\n",  # nothing calls it
        "import sys\nsys.path.insert(0, '/opt/code')\nfrom tools import first\n",
    ],
)
def test_an_import_that_may_be_there(project, text):
    assert project(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "from tools import first\n",
        "from tools import (\n    last,\n    first as other,\n)\n",
        "from parts import Nets\n",
        "def later():\n    from parts.nets import Nets\nlater()\n",
    ],
)
def test_an_import_that_a_file_lacks(project, text):
    assert project(text) == ["LS060"]


@pytest.mark.parametrize(
    "tricks",
    [
        "def __getattr__(name):\n    return 2\n",
        "globals().update(first=2)\n",
        "from elsewhere import *\n",
        "exec('a')\n",
    ],
)
def test_a_file_whose_names_are_not_in_sight(project, tmp_path, tricks):
    (tmp_path / "tools.py").write_text(tricks)
    assert project("from tools import first\n") == []


def test_a_package_beside_a_file_that_python_does_not_start_from(project, tmp_path):
    (tmp_path / "parts" / "deep").mkdir()
    (tmp_path / "parts" / "deep" / "run.py").write_text("import torch\nfrom nets import Other\n")
    assert check_paths([str(tmp_path / "parts" / "deep" / "run.py")], RULES) == []


@pytest.mark.parametrize(
    ("head", "wrong"),
    [
        ("import tqdm", True),
        ("import tqdm as tqdm", True),
        ("import tqdm\nfrom tqdm import tqdm", False),
        ("import tqdm\ntqdm = tqdm.tqdm", False),
        ("import tools.tqdm as tqdm", False),
        ("import tqdm\nfrom tools import *", False),
        ("try:\n    import tqdm\nexcept ImportError:\n    def tqdm(x):\n        return x", False),
    ],
)
def test_a_module_that_is_called(head, wrong):
    found = check_text(f"import torch\n{head}\nfor x in tqdm(range(3)):\n    print(x)\n", RULES)
    assert [finding.rule for finding in found] == ["LS058"] * wrong
