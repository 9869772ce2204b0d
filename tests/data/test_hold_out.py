"""lockstep.hold_out: the same parts in every run, each sample in one of them."""

import pytest
import torch
from refusals import refuses
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data.rows import rows_of
from lockstep.errors import ConfigError, DataError

ROWS = TensorDataset(torch.arange(50))


@pytest.mark.parametrize(("samples", "share", "held"), [(50, 0.1, 5), (2, 0.01, 1), (3, 0.99, 2)])
def test_each_sample_is_in_one_part_of_the_share(samples, share, held):
    train, evaluation = lockstep.hold_out(list(range(samples)), share)
    assert len(evaluation) == held
    assert sorted([*train, *evaluation]) == list(range(samples))


def test_the_split_is_of_its_own_seed_and_not_of_the_generators():
    torch.manual_seed(0)
    first = lockstep.hold_out(ROWS)[1].indices
    torch.manual_seed(1)
    assert lockstep.hold_out(ROWS)[1].indices == first
    assert lockstep.hold_out(ROWS, seed=1)[1].indices != first
    assert first != list(range(45, 50))
    assert rows_of(lockstep.hold_out(ROWS)[0])  # read a micro-batch at a time


def test_what_cannot_be_split():
    for share in (0, 1, 1.5, "a tenth"):
        with refuses(ConfigError, "share", repr(share)):
            lockstep.hold_out(ROWS, share)
    with refuses(DataError, "1 samples"):
        lockstep.hold_out([3])
    for stream in (iter([1, 2, 3]), DataLoader(ROWS)):
        with refuses(DataError, type(stream).__name__):
            lockstep.hold_out(stream)
