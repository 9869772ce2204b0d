"""LS034: numpy randomness in workers."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

DATA = """
import numpy as np
from torch.utils.data import Dataset

def jitter(x):
    return x + np.random.randn()

class Points(Dataset):
    def __init__(self, mode="train"):
        self.mode = mode

    def __getitem__(self, i):
        if self.mode == "train":
            return jitter(i)
        return i
"""


LOADED = """
import torch
from torch.utils.data import DataLoader
from points import Points

options = {options}
loader = DataLoader({data}, {workers})
"""


USUAL = {"options": "{}", "data": "Points()", "workers": "num_workers=4"}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"data": "Points(mode='train')"}, True),
        ({"data": "dataset=Points('train')"}, True),
        ({"options": "{'num_workers': 8}", "workers": "**options"}, True),
        ({"data": "Points('val')"}, False),
        ({"options": "{'num_workers': 0}", "workers": "**options"}, False),
        ({"options": "{'batch_size': 4}", "workers": "**options"}, False),
        ({"workers": "num_workers=0"}, False),
        ({"workers": "num_workers=4, worker_init_fn=print"}, False),
    ],
)
def test_a_dataset_of_another_file(tmp_path, change, found):
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "points.py").write_text(DATA)
    (tmp_path / "train.py").write_text(LOADED.format(**USUAL | change))
    findings = check_paths([str(tmp_path / "train.py")], configure({}, "LS034", ""))
    assert [f.rule for f in findings] == ["LS034"] * found


GENERATORS = """
import numpy as np
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __init__(self):
        self.rng = np.random.{made}(0)

    def __getitem__(self, i):
        return i + {drawn}

loader = DataLoader(Noisy(), num_workers=2)
"""


@pytest.mark.parametrize(
    ("made", "drawn", "torch", "levels"),
    [
        ("default_rng", "self.rng.normal()", "2.1", ["error"]),
        ("RandomState", "self.rng.randn()", "2.1", ["error"]),
        ("default_rng", "np.random.randn()", "2.1", ["hint"]),  # seeded in each worker
        ("default_rng", "np.random.randn()", "1.8", ["error"]),
        ("default_rng", "torch.randn(())", "1.8", []),
    ],
)
def test_numpys_generators_in_workers(tmp_path, made, drawn, torch, levels):
    (tmp_path / "requirements.txt").write_text(f"torch=={torch}\n")
    (tmp_path / "train.py").write_text(GENERATORS.format(made=made, drawn=drawn))
    found = check_paths([str(tmp_path / "train.py")], configure({}, "LS034", ""))
    assert [finding.severity.value for finding in found] == levels
