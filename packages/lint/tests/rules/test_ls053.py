"""LS053: data repeated by workers."""

import pytest
from rule_findings import count

TEXT = """
from torch.utils.data import DataLoader, IterableDataset

class Lines(IterableDataset):
    def __init__(self, folder, given):
        self.files = {files}

    def __iter__(self):
        for file in self.files{part}:
            yield file

def make(given):
    return DataLoader(Lines("data", given), batch_size=8, num_workers={workers})
"""


@pytest.mark.parametrize(
    ("files", "part", "workers", "number"),
    [
        ("sorted(folder)", "", "4", 1),
        ("sorted(folder)", "", "0", 0),
        ("sorted(folder)", "[info.id :: info.num_workers]", "4", 0),
        ("given", "", "4", 0),
    ],
)
def test_what_each_worker_reads(files, part, workers, number):
    assert count(TEXT.format(files=files, part=part, workers=workers), "LS053") == number
