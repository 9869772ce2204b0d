"""Which ranks have what device, and how much more work the memory of one can take."""

import pytest
import torch

from lockstep.training.step.guards import describe_unequal_devices, max_slots, name_and_memory

GIB = 1024**3
H100, A100 = ["NVIDIA H100", 80 * GIB], ["NVIDIA A100", 40 * GIB]


def test_equal_devices_are_not_told():
    assert describe_unequal_devices([H100] * 4) == ""
    assert describe_unequal_devices([["cpu", 64 * GIB], ["cpu", 63 * GIB]]) == ""  # a few percent are the firmware's
    assert describe_unequal_devices([H100] * 2, [1.0, 0.97]) == ""


def test_unequal_ones_are_told_by_name_memory_and_speed():
    assert describe_unequal_devices([H100, H100, A100, H100]) == (
        "unequal devices: ranks 0-1, 3: NVIDIA H100, 80 GiB; rank 2: NVIDIA A100, 40 GiB"
    )
    assert describe_unequal_devices([["cpu", 64 * GIB], ["cpu", 32 * GIB]]).endswith(
        "rank 0: cpu, 64 GiB; rank 1: cpu, 32 GiB"
    )
    assert describe_unequal_devices([H100, H100], [1.0, 0.52]) == (
        "unequal devices: rank 0: NVIDIA H100, 80 GiB, speed 1; rank 1: NVIDIA H100, 80 GiB, speed 0.52"
    )


def test_this_machine_has_a_name_and_memory():
    name, size = name_and_memory(torch.device("cpu"))
    assert name
    assert size > GIB / 4


@pytest.mark.parametrize(
    ("now", "free", "wanted"),
    [
        (4, 0, 4),  # nothing is free: as it is
        (4, 199, 4),
        (4, 200, 8),  # two more sums of 100 bytes each: twice the run
        (4, 400, 16),
        (5, 199, 8),  # up to 2 log2(8) are held already
        (4, 10**9, 64),
        (1, 0, 1),
        (64, 0, 64),
    ],
)
def test_sums_that_wait_bound_a_share(now, free, wanted):
    assert max_slots(64, now, 100, free) == wanted
