"""The commonest data sets are indexed once a micro-batch, with the bits of torch's own DataLoader."""

import random

import datasets
import numpy as np
import pytest
import torch
from refusals import refuses
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset
from toys import Partial

from lockstep.adapters.lightning.data import Sampled
from lockstep.data import rows
from lockstep.data.batches import Batches, Loading, StepPlan
from lockstep.data.loader import collate_draws, draws
from lockstep.data.mixture import mixture
from lockstep.data.rows import rows_of
from lockstep.data.sampler import Shuffled
from lockstep.distributed.world import World
from lockstep.errors import DataError, SampleError
from lockstep.guards.samples import RetryingDataset

SAMPLES = 22  # two steps of 8, and a ragged one


class Default(Partial):
    """A task with torch's collation, in which an item is a sample."""

    items_per_sample = None

    def dataset(self, split):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError


class Listing(Default):
    """A task whose own collation is handed the list of samples, and draws."""

    def collate(self, samples):
        return {"samples": samples, "drawn": [torch.rand(()).item(), np.random.random(), random.random()]}

    def count(self, batch):
        return len(batch["samples"])


def tensors(size=SAMPLES):
    drawn = torch.Generator().manual_seed(0)
    return [
        torch.randn(size, 3, 2, generator=drawn, dtype=torch.float64),
        torch.randint(5, (size,), generator=drawn),
        torch.randn(size, 4, generator=drawn).to(torch.bfloat16),
        torch.rand(size, generator=drawn) < 0.5,
    ]


def hub():
    columns = {"x": np.arange(SAMPLES * 3, dtype=np.float32).reshape(SAMPLES, 3).tolist(), "y": list(range(SAMPLES))}
    return datasets.Dataset.from_dict(columns).with_format("torch")


def strided():
    """Samples whose stack has strides that their selection has not."""
    x = torch.randn(SAMPLES, 4, 3, 2).to(memory_format=torch.channels_last)
    return TensorDataset(x, torch.arange(2 * SAMPLES)[::2])


def nested(dataset):
    inner = Subset(dataset, np.random.default_rng(0).permutation(SAMPLES))
    return Subset(inner, torch.arange(SAMPLES - 1, -1, -1))


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * part for part in super().__getitem__(index))


KINDS = {
    "tensors": lambda: TensorDataset(*tensors()),
    "subset": lambda: Subset(TensorDataset(*tensors(SAMPLES + 9)), list(range(5, SAMPLES + 5))),
    "nested": lambda: nested(TensorDataset(*tensors())),
    "negative": lambda: Subset(TensorDataset(*tensors()), list(range(-SAMPLES, 0))),
    "hub": hub,
    "subset of hub": lambda: nested(hub()),
    "strided": strided,
    "subclass": lambda: Doubled(*tensors()[:2]),
    "concatenated": lambda: ConcatDataset([TensorDataset(torch.arange(10)), TensorDataset(torch.arange(10, SAMPLES))]),
    "list": lambda: list(zip(*tensors(), strict=True)),
}


def feed(dataset, task=None, workers=0, retries=0, skips=0):
    guarded = RetryingDataset(dataset, retries=retries, skips=skips, rank=0)
    order, step_plan = Shuffled(len(dataset), 0), StepPlan(8, 4, SAMPLES)
    task, loading = task or Default(), Loading(workers, 2)
    return Batches(task, guarded, order, step_plan, World(), seed=1, loading=loading), guarded


def content(batches):
    stream = batches.from_step(0)
    found = [batch for _, micro in stream for batch in micro]
    stream.close()
    return [batch for batch in found if batch.weight]


def leaves(data):
    return list(data.items()) if isinstance(data, dict) else list(enumerate(data))


@pytest.mark.filterwarnings("ignore:.*non-writable")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_has_the_bits_of_torchs_loader(kind, workers):
    dataset = KINDS[kind]()
    batches, _ = feed(dataset, workers=workers)
    found = content(batches)
    order = Shuffled(SAMPLES, 0).at(0, SAMPLES)[1].tolist()
    cut = [order[a : a + 4] for a in range(0, SAMPLES, 4)]
    wanted = list(DataLoader(dataset, batch_sampler=cut))
    assert [batch.items for batch in found] == [4, 4, 4, 4, 4, 2]
    for batch, plain in zip(found, wanted, strict=True):
        assert type(batch.data) is type(plain)
        for (name, own), (other, theirs) in zip(leaves(batch.data), leaves(plain), strict=True):
            assert name == other
            assert torch.equal(own, theirs)
            assert (own.dtype, own.device, type(own)) == (theirs.dtype, theirs.device, type(theirs))
            assert own.stride() == theirs.stride() or own.numel() == 1
            assert not own.requires_grad


def test_the_kinds_that_are_indexed_at_once():
    known = {kind for kind in KINDS if rows_of(KINDS[kind]()) is not None}
    assert known == {"tensors", "subset", "nested", "negative", "hub", "subset of hub", "strided"}
    assert rows_of(strided()).batch([0, 1]) is None


@pytest.mark.parametrize("task", [Default, Listing])
def test_tensors_are_indexed_once_a_micro_batch(monkeypatch, task):
    calls = []
    batch = rows._TensorRows.batch
    monkeypatch.setattr(rows._TensorRows, "batch", lambda self, indices: calls.append(indices) or batch(self, indices))
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: pytest.fail("one by one"))
    batches, _ = feed(Subset(TensorDataset(*tensors()), list(range(SAMPLES))), task())
    content(batches)
    assert [len(indices) for indices in calls] == [4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("task", [Default, Listing])
def test_a_hub_dataset_is_read_once_a_micro_batch(monkeypatch, task):
    calls = []
    read = datasets.Dataset._getitem
    monkeypatch.setattr(datasets.Dataset, "_getitem", lambda self, key: calls.append(key) or read(self, key))
    batches, _ = feed(hub(), task())
    content(batches)
    assert [len(indices) for indices in calls] == [4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("kind", ["tensors", "nested", "hub", "list"])
@pytest.mark.parametrize("workers", [0, 2])
def test_custom_collation_gets_the_samples_and_same_draws(kind, workers):
    """Its draws depend on the seed, the step and the micro-batch, whoever loads it after whatever else was drawn."""
    dataset = KINDS[kind]()
    found = content(feed(dataset, Listing(), workers)[0])
    torch.rand(3)
    again = content(feed(dataset, Listing())[0])
    assert [batch.data["drawn"] for batch in found] == [batch.data["drawn"] for batch in again]
    order = Shuffled(SAMPLES, 0).at(0, SAMPLES)[1].tolist()
    samples = [sample for batch in found for sample in batch.data["samples"]]
    for index, sample in zip(order, samples, strict=True):
        wanted = dataset[index]
        assert type(sample) is type(wanted)
        for (_, own), (_, theirs) in zip(leaves(sample), leaves(wanted), strict=True):
            assert torch.equal(own, theirs)
            assert own.shape == theirs.shape


def test_dataset_without_draws_declares_it_for_its_collation():
    class Quiet(Doubled):
        draws_random = False

    quiet, tensor = Quiet(*tensors()), TensorDataset(*tensors())
    custom = hub().with_transform(lambda batch: batch)
    assert [draws(each) for each in (quiet, Subset(quiet, [0]), tensor, Doubled(*tensors()), custom)] == [
        *(False, False, False, True, True)
    ]
    assert [collate_draws(each) for each in (quiet, Subset(quiet, [0]), tensor, hub())] == [False, False, True, True]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("task", [Default, Listing])
def test_a_sample_that_is_missing_is_named(workers, task):
    dataset = Subset(TensorDataset(*tensors()), [*range(SAMPLES - 1), 99])
    batches, _ = feed(dataset, task(), workers)
    with refuses(SampleError, "rank 0", "sample 21", "index 99"):
        content(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_is_missing_is_skipped(workers):
    dataset = Subset(TensorDataset(torch.arange(SAMPLES)), [*range(5), 99, *range(6, SAMPLES)])
    batches, guarded = feed(dataset, workers=workers, retries=1, skips=1)
    order = [6 if index == 5 else index for index in Shuffled(SAMPLES, 0).at(0, SAMPLES)[1].tolist()]
    assert [index for batch in content(batches) for index in batch.data[0].tolist()] == order
    assert guarded.counts.tolist() == [1, 1]


def test_a_look_up_that_fails_is_tried_again_sample_by_sample(monkeypatch):
    read, failures = datasets.Dataset._getitem, iter([OSError("stale"), OSError("stale")])

    def flaky(self, key):
        if error := next(failures, None):
            raise error
        return read(self, key)

    plain = content(feed(hub())[0])
    monkeypatch.setattr(datasets.Dataset, "_getitem", flaky)
    batches, guarded = feed(hub(), retries=2)
    found = content(batches)
    assert all(torch.equal(own.data["x"], other.data["x"]) for own, other in zip(found, plain, strict=True))
    assert guarded.counts.tolist() == [0, 0]  # a whole look-up is no sample's try


def test_rows_of_unequal_length_are_left_to_the_collation():
    uneven = datasets.Dataset.from_dict({"x": [[0.0] * (1 + i % 2) for i in range(SAMPLES)]}).with_format("torch")
    found = content(feed(uneven, Listing())[0])
    assert {len(sample["x"]) for batch in found for sample in batch.data["samples"]} == {1, 2}
    with refuses(DataError, "`collate`", "rank 0", "step 1"):
        content(feed(uneven)[0])


def test_wrappers_pass_the_rows_on():
    dataset = TensorDataset(torch.arange(4))
    for wrapped in (Sampled(dataset, 3), RetryingDataset(Sampled(dataset, 3), retries=0, skips=0, rank=0)):
        assert rows_of(wrapped).batch([2, 0])[0].tolist() == [2, 0]
        assert (wrapped.draws_random, wrapped.collation_draws) == (False, True)


def test_replaced_tensors_are_read_from_then_on():
    dataset = TensorDataset(torch.arange(4))
    known = rows_of(dataset)
    assert known.batch([1])[0].tolist() == [1]
    dataset.tensors = (10 * torch.arange(4),)
    assert known.batch([1])[0].tolist() == [10]


def test_a_mixture_indexes_its_sources_at_once(monkeypatch):
    one, two = TensorDataset(torch.arange(10)), TensorDataset(torch.arange(100, 112))
    mixed = mixture({"one": one, "two": two}, {"one": 1, "two": 1})
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: pytest.fail("one by one"))
    assert [int(x) for (x,) in mixed.__getitems__([11, 3, 10, 0])] == [101, 3, 100, 0]
    assert (draws(mixed), collate_draws(mixed)) == (False, True)
