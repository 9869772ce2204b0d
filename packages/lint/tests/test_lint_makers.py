"""LS008: what makes a model, what seems to, and heads that are added to a loaded one; packages that are named with
their files; folders that a function adds to the path.
"""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, body=None):
        super().__init__()
        self.layer = nn.BatchNorm1d(4)
"""
WRAPPED = """
{line}
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(rank):
    return DDP({made}.to(rank), device_ids=[rank])
"""


@pytest.mark.parametrize(
    ("line", "made", "found"),
    [
        ("import parts.builder", "parts.builder.Net()", True),
        ("import parts.deep.more", "parts.deep.more.Net()", True),
        ("import parts", "parts.builder.Net()", True),
        ("from parts import deep", "deep.more.Net()", True),
        ("import parts.builder", "parts.builder.Other()", False),
        ("import pieces.builder", "pieces.builder.Net()", False),
    ],
)
@pytest.mark.parametrize("package", [True, False])
def test_a_package_that_is_named_with_its_file(tmp_path, line, made, found, package):
    (tmp_path / "parts" / "deep").mkdir(parents=True)
    (tmp_path / "parts" / "builder.py").write_text(NET)
    (tmp_path / "parts" / "deep" / "more.py").write_text(NET)
    if package:
        (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "main.py").write_text(WRAPPED.format(line=line, made=made))
    assert bool(check_paths([str(tmp_path / "main.py")], configure({}, "LS005", ""))) is found


ADDS = (
    "import os.path as osp\nimport sys\n\ndef add_path(path):\n    if path not in sys.path:\n        {does}\n\n{call}\n"
)


@pytest.mark.parametrize(
    ("does", "call", "found"),
    [
        ("sys.path.insert(0, path)", "lib_path = osp.join(this_dir, '..', 'lib')\nadd_path(lib_path)", True),
        ("sys.path.append(path)", "add_path(osp.join(this_dir, '..', 'lib'))", True),
        ("print(path)", "lib_path = osp.join(this_dir, '..', 'lib')\nsys.path.insert(0, lib_path)", True),
        ("print(path)", "add_path(osp.join(this_dir, '..', 'lib'))", False),
        ("sys.path.insert(0, path)", "add_path(osp.join(this_dir, '..', 'bin'))", False),
    ],
)
def test_a_function_that_adds_to_the_path(tmp_path, does, call, found):
    for name in ("lib", "bin", "tools"):
        (tmp_path / name).mkdir()
    (tmp_path / "setup.py").write_text("")
    (tmp_path / "lib" / "nets.py").write_text(NET)
    (tmp_path / "tools" / "_init_paths.py").write_text(ADDS.format(does=does, call=call))
    script = WRAPPED.format(line="import _init_paths\nfrom nets import Net", made="Net()")
    (tmp_path / "tools" / "main.py").write_text(script)
    assert bool(check_paths([str(tmp_path / "tools" / "main.py")], configure({}, "LS005", ""))) is found
