"""On a CUDA device that is not there: in which order micro-batches are copied, pinned, waited for and used."""

import pytest
import torch
from fake_cuda import DEVICE, FakeCuda
from toys import Partial

from lockstep.data.batches import Batches, StepPlan
from lockstep.data.device import AHEAD, mover
from lockstep.data.sampler import Shuffled
from lockstep.distributed.world import World


class Numbers(torch.utils.data.Dataset):
    draws_random = False

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return index


class Pairs(Partial):
    """Two tensors a micro-batch."""

    def collate(self, samples):
        return {"x": torch.tensor(samples), "y": torch.tensor(samples, dtype=torch.float64)}

    def count(self, batch):
        return len(batch["x"])


def batches(size=8, micro=4, total=32):
    return Batches(Pairs(), Numbers(), Shuffled(64, 5), StepPlan(size, micro, total), World(device=DEVICE), seed=5)


COPY = ["pinned", "copy to the device on stream 1"] * 2


def taken(number):
    uses = ["memory is used by stream 0"] * 2
    return [f"stream 0 waits for event {2 * number}", *uses, f"event {2 * number + 1} on stream 0"]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_micro_batch_is_copied_while_the_last_one_is_computed(ahead):
    """Whether the steps to come are loaded early (to count their items) or when they are needed."""
    with FakeCuda() as cuda:
        feed = batches().from_step(0)
        for step in range(ahead):
            feed.items(step)
        assert cuda.log == []
        for step, micro in feed:
            for batch in micro:
                data = batch.data
                assert cuda.holds(data["x"])
                assert data["x"].device == DEVICE
                cuda.log.append(f"computed {step} {batch.index}")
    begun = [*COPY, "event 0 on stream 1", *taken(0)]
    for number in range(1, 8):
        step, micro = divmod(number - 1, 2)
        coming = [*COPY, f"event {2 * number} on stream 1"]
        computed = [f"computed {step} {micro}"]
        early = micro == 0 or step + 1 < ahead
        begun += [*coming, *computed] if early else [*computed, *coming]
        begun += taken(number)
    assert cuda.log == [*begun, "computed 3 1"]
    assert cuda.waits == []


def test_the_host_is_held_back_where_it_is_far_ahead():
    """Of a step of many micro-batches, or an evaluation, few lie on the device at a time."""
    with FakeCuda(fast=False) as cuda:
        for number, (_, batch) in enumerate(batches(64, 4, 64).micro(0)):
            begun = 2 * (number - AHEAD) + 1
            batch.data
            waits = [line for line in cuda.log if line.startswith("wait")]
            assert waits[-1:] == ([f"wait for event {begun}"] if begun > 0 else [])
            assert len(waits) == max(0, number + 1 - AHEAD)
    assert number == 15


def test_what_is_asked_for_again_is_copied_again():
    with FakeCuda() as cuda:
        feed = batches().from_step(0)
        _, (first, second) = next(feed)
        one = first.data
        del one
        two = first.data  # for the search for what is not finite
        assert two["x"].tolist() == first.held["x"].tolist()
        assert sum("copy to the device" in line for line in cuda.log) == 6  # of two tensors each: it, the next, it
        second.data
        assert sum("copy to the device" in line for line in cuda.log) == 6
        assert not cuda.holds(first.held["x"])


def test_what_is_pinned_already_is_not_pinned_again():
    with FakeCuda() as cuda:
        value = torch.ones(3).pin_memory()
        assert cuda.log == ["pinned"]
        moved = mover(DEVICE)([value])
        assert cuda.log.count("pinned") == 1
        assert cuda.holds(moved[0])


class Quiet:
    """Moves itself, and takes nothing but a device."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)
        return self


class Able(Quiet):
    def to(self, device, non_blocking=False):
        self.x = self.x.to(device, non_blocking=non_blocking)

    def pin_memory(self):
        self.x = self.x.pin_memory()
        return self


class Mapped(dict):
    """As a BatchEncoding: a mapping that moves itself."""

    def to(self, *args, **kwargs):
        for name, value in self.items():
            self[name] = value.to(*args, **kwargs)
        return self


@pytest.mark.parametrize(("kind", "waits"), [(Quiet, 1), (Able, 0), (lambda x: Mapped(x=x), 0), (lambda x: pack(x), 0)])
def test_batch_that_moves_itself_uses_the_computing_stream(kind, waits):
    """Nobody knows what of it is the side stream's, so it is on none; it waits where it cannot be pinned."""
    with FakeCuda() as cuda:
        held = kind(torch.arange(4.0))
        moved = mover(DEVICE)({"a": held})["a"]
        found = moved["x"] if isinstance(moved, Mapped) else moved.data if hasattr(moved, "data") else moved.x
        kept = held["x"] if isinstance(held, Mapped) else held.data if hasattr(held, "data") else held.x
        assert cuda.holds(found)
        assert not cuda.holds(kept)
        assert all("stream 0" in line for line in cuda.log if line.startswith("copy"))
    assert len(cuda.waits) == waits


def pack(x):
    return torch.nn.utils.rnn.pack_sequence([x, x[:1]])


def test_data_on_the_device_or_not_pinnable_is_moved_as_it_is():
    with FakeCuda() as cuda:
        there = torch.ones(2).pin_memory().to(DEVICE, non_blocking=True)
        cuda.log.clear()
        assert mover(DEVICE)((there, 3, "s")) == (there, 3, "s")
        assert not [line for line in cuda.log if "copy" in line or "memory" in line]
