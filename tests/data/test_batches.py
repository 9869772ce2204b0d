"""What each micro-batch holds and draws depends on (seed, step, micro-batch) alone."""

import dataclasses
import gc
import os
import random
import subprocess
import sys
import warnings
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import threadpoolctl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run
from refusals import refuses
from toys import Holes, HolesMean, Partial, fit, parts, train

from lockstep.data.batches import Batches, Loading, Origin, StepPlan, slots
from lockstep.data.device import mover
from lockstep.data.sampler import Sequential, Shuffled
from lockstep.distributed.balance import equal_shares, shares_of_counts
from lockstep.distributed.world import World
from lockstep.errors import DataError
from lockstep.text.corpus import ByteBPE


class Numbers(torch.utils.data.Dataset):
    """Sample i is (i, and what each of the three generators draws)."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, torch.rand(()).item(), np.random.random(), random.random()


class Task(Partial):
    def collate(self, samples):
        return {"samples": samples, "noise": torch.rand(()).item()}

    def count(self, batch):
        return sum(index % 3 + 1 for index, *_ in batch["samples"])


def batches(size, step_plan, rank=0, world_size=1, workers=0, order=None, task=None, dataset=None):
    world = World(rank=rank, size=world_size)
    dataset = dataset or Numbers(size)
    order = order or Shuffled(size, 5)
    return Batches(task or Task(), dataset, order, step_plan, world, seed=5, loading=Loading(workers))


def content(found):
    return [(step, [(b.index, b.weight, b.items, b.data) for b in micro]) for step, micro in found]


@given(st.integers(1, 60), st.integers(1, 17))
def test_slots_cover_every_micro_batch_once(micro_batches, world_size):
    shares = equal_shares(micro_batches, world_size)
    by_rank = [slots(shares, rank, micro_batches) for rank in range(world_size)]
    assert {len(mine) for mine in by_rank} == {-(-micro_batches // world_size)}
    counted = [slot.micro for mine in by_rank for slot in mine if slot.weight]
    assert counted == list(range(micro_batches))
    assert all(slot.weight in (0.0, 1.0) and 0 <= slot.micro < micro_batches for mine in by_rank for slot in mine)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_given_shares_are_each_ranks_own_number(counts, data):
    shares, present = shares_of_counts(counts), data.draw(st.integers(1, sum(counts)))
    by_rank = [slots(shares, rank, present) for rank in range(len(counts))]
    assert [len(mine) for mine in by_rank] == counts
    assert [slot.micro for mine in by_rank for slot in mine if slot.weight] == list(range(present))


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 50),
    micro=st.integers(1, 4),
    count=st.integers(1, 5),
    epochs=st.integers(1, 3),
    world_size=st.integers(1, 5),
    start=st.integers(0, 6),
)
def test_every_sample_comes_once_an_epoch_on_any_world_and_start(size, micro, count, epochs, world_size, start):
    step_plan = StepPlan(micro * count, micro, epochs * size)
    seen = []
    for rank in range(world_size):
        early = batches(size, step_plan, rank, world_size).from_step(0)
        late = batches(size, step_plan, rank, world_size).from_step(min(start, step_plan.steps))
        steps = [next(early) for _ in range(min(start, step_plan.steps))] + list(late)
        for step, mine in steps:
            for batch in (b for b in mine if b.weight):
                first, _ = step_plan.positions(step, batch.index)
                seen += [(first + k, index) for k, (index, *_) in enumerate(batch.data["samples"])]
    assert sorted(position for position, _ in seen) == list(range(epochs * size))
    for epoch in range(epochs):
        assert sorted(i for p, i in seen if p // size == epoch) == list(range(size))


def test_content_and_draws_do_not_depend_on_rank_worker_or_start():
    step_plan = StepPlan(6, 2, 26)
    alone = dict(content(batches(13, step_plan).from_step(0)))
    assert len({noise for micro in alone.values() for *_, data in micro for noise in (data["noise"],)}) == 13
    for world_size, workers, start in ((1, 2, 0), (2, 0, 1), (3, 1, 2)):
        for rank in range(world_size):
            for step, micro in content(batches(13, step_plan, rank, world_size, workers).from_step(start)):
                whole = {index: (items, data) for index, weight, items, data in alone[step] if weight}
                for index, weight, items, data in micro:
                    assert (items if weight else whole[index][0], data) == whole[index]


class Alike:
    """Every position holds sample 3 of epoch 0: all are seeded alike."""

    def at(self, start, stop):
        return np.zeros(stop - start, dtype=np.int64), np.full(stop - start, 3, dtype=np.int64)


def test_samples_seeded_alike_are_collated_with_other_noise():
    found = [
        data for _, micro in content(batches(9, StepPlan(4, 2, 16), order=Alike()).from_step(0)) for *_, data in micro
    ]
    assert len({str(data["samples"]) for data in found}) == 1
    assert len({data["noise"] for data in found}) == 8


def test_a_sample_draws_other_numbers_in_another_epoch():
    found = batches(5, StepPlan(5, 1, 15), order=Shuffled(5, 5)).from_step(0)
    drawn = [tuple(batch.data["samples"][0]) for _, micro in found for batch in micro]
    assert sorted(index for index, *_ in drawn) == sorted(3 * list(range(5)))
    for generator in (1, 2, 3):
        assert len({sample[generator] for sample in drawn}) == 15


@given(st.integers(1, 90), st.integers(0, 4), st.integers(1, 9), st.integers(1, 30), st.integers(1, 3))
def test_a_stream_that_is_cut_anew_goes_on_where_it_was(total, step, size, later, micro):
    before = StepPlan(size * micro, micro, total)
    position = before.start(min(step, before.steps))
    after = StepPlan(later * micro, micro, total, Origin(min(step, before.steps), position))
    positions = [
        place
        for step_plan, first, last in ((before, 0, after.origin.step), (after, after.origin.step, after.steps))
        for each in range(first, last)
        for index in range(step_plan.present(each))
        for place in range(*step_plan.positions(each, index))
    ]
    assert positions == list(range(total))


def test_an_empty_slot_counts_nothing():
    found = [micro for rank in range(3) for _, micro in batches(8, StepPlan(8, 2, 8), rank, 3).from_step(0)]
    weights = [batch.weight for micro in found for batch in micro]
    assert weights == [1.0] * 4 + [0.0] * 2
    assert all(batch.items == 0 for micro in found for batch in micro if not batch.weight)


def test_items_of_coming_steps_are_known_ahead():
    feed = batches(13, StepPlan(4, 2, 26)).from_step(0)
    ahead = [feed.items(step) for step in range(9)]
    assert ahead[7:] == [0, 0]
    for step, micro in feed:
        assert feed.items(step) == ahead[step] == sum(batch.items for batch in micro)


def test_declared_number_of_items_is_checked_once():
    class Declared(Task):
        items_per_sample = 2

    with refuses(DataError, "items_per_sample", "count", "rank 0", "step 1"):
        next(batches(13, StepPlan(4, 2, 26), task=Declared()).from_step(0))


def test_dataset_without_draws_leaves_the_generators_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    list(batches(13, StepPlan(4, 2, 26), task=Quiet(), dataset=Plain(13)).from_step(0))
    assert torch.equal(before, torch.random.get_rng_state())


class Pair(NamedTuple):
    a: torch.Tensor
    b: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    images: torch.Tensor
    nested: dict
    size: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        object.__setattr__(self, "size", self.size + len(self.images))


class Named(dict):
    pass


class Movable:
    """Moves itself in place and says nothing."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)


def test_nested_batches_keep_their_shape_on_the_way_to_a_device():
    moved = mover(torch.device("meta"))({"x": [torch.ones(2), (torch.ones(1), 3)], "p": Pair(torch.ones(1), "s")})
    assert moved["x"][0].device.type == moved["x"][1][0].device.type == moved["p"].a.device.type == "meta"
    assert (moved["x"][1][1], moved["p"].b, type(moved["p"])) == (3, "s", Pair)


def test_dataclasses_and_dict_subclasses_are_moved_as_they_are():
    move, x = mover(torch.device("meta")), torch.ones(2)
    batch = {
        "dataclass": Frozen(x, {"y": x}),
        "named": Named(a=x),
        "ordered": OrderedDict(b=x),
        "default": defaultdict(list, c=[x]),
        "packed": torch.nn.utils.rnn.pack_sequence([x, x[:1]]),
        "movable": Movable(x),
        "kind": Movable,
    }
    moved = move(batch)
    found = [moved["dataclass"].images, moved["dataclass"].nested["y"], moved["named"]["a"], moved["ordered"]["b"]]
    found += [moved["default"]["c"][0], moved["packed"].data, moved["movable"].x]
    assert {tensor.device.type for tensor in found} == {"meta"}
    assert moved["packed"].batch_sizes.device.type == "cpu"  # where torch wants it
    assert {name: type(value) for name, value in moved.items()} == {name: type(value) for name, value in batch.items()}
    assert (moved["dataclass"].size, moved["default"]["none"]) == (2, [])
    kept = [batch["dataclass"].images, batch["named"]["a"], batch["default"]["c"][0], batch["movable"].x]
    assert {tensor.device.type for tensor in kept} == {"cpu"}


def on_meta():
    gc.collect()
    return sum(type(held) is torch.Tensor and held.is_meta for held in gc.get_objects())


def test_prefetched_batches_stay_on_the_host_until_computed():
    class Tensors(Task):
        def collate(self, samples):
            return torch.tensor([index for index, *_ in samples])

        def count(self, batch):
            return len(batch)

    world = World(device=torch.device("meta"))
    found = Batches(Tensors(), Numbers(64), Shuffled(64, 5), StepPlan(8, 2, 64), world, seed=5)
    before, feed = on_meta(), found.from_step(0)
    assert [feed.items(step) for step in range(8)] == [8] * 8
    _, micro = next(feed)
    assert on_meta() == before
    for batch in micro:
        data = batch.data
        assert data.is_meta
        assert on_meta() == before + 1
        del data
    assert on_meta() == before


class Threads(torch.utils.data.Dataset):
    """What each sample sees of the threads that its libraries would use."""

    draws_random = False

    def __len__(self):
        return 4

    def __getitem__(self, index):
        pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
        variable = int(os.environ["OPENCV_FOR_THREADS_NUM"])  # which OpenCV reads when it is imported
        return {"torch": [torch.get_num_threads(), *pools], "cv2": [sys.modules["cv2"].threads, variable]}


class OpenCV:
    threads = 8

    def setNumThreads(self, count):
        self.threads = max(count, 1)


@pytest.mark.parametrize(("own", "opencv"), [(None, [1, 1]), ("1", [1, 1]), ("3", [8, 3])])
def test_loader_processes_compute_with_one_thread(monkeypatch, own, opencv):
    """OpenCV too, whether it is loaded before or after; but by a variable of the user's own."""
    monkeypatch.delenv("OPENCV_FOR_THREADS_NUM", raising=False)
    if own:
        monkeypatch.setenv("OPENCV_FOR_THREADS_NUM", own)

    monkeypatch.setitem(sys.modules, "cv2", OpenCV())
    found = batches(4, StepPlan(2, 2, 4), workers=1, task=Listed(), dataset=Threads())
    seen = [sample for _, micro in found.from_step(0) for b in micro for sample in b.data]
    assert len(seen) == 4
    assert {threads for sample in seen for threads in sample["torch"]} == {1}
    assert [sample["cv2"] for sample in seen] == [opencv] * 4


class Listed(Partial):
    def collate(self, samples):
        return samples

    def count(self, batch):
        return len(batch)


class Encoded(torch.utils.data.Dataset):
    """Numbers of the tokens in each sample's text, encoded by threads where the environment says so."""

    draws_random = False

    def __init__(self):
        self.tokenizer = ByteBPE.train(["a plain text to begin with\n"], 300)

    def __len__(self):
        return 64

    def __getitems__(self, indices):
        return [len(tokens) for tokens in self.tokenizer.encode_all([f"{index} plain texts" for index in indices])]


def encoded_on_rank(world):
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # a user's own
    dataset = Encoded()
    here = dataset.__getitems__(range(64))  # starts the threads
    found = batches(64, StepPlan(32, 32, 64), workers=1, task=Listed(), dataset=dataset)
    there = [count for _, micro in found.from_step(0) for b in micro for count in b.data]
    return here, there, os.environ["TOKENIZERS_PARALLELISM"]


def test_forked_loader_does_not_wait_for_tokenizer_threads():
    here, there, kept = run(encoded_on_rank, 1, timeout=60)[0]
    assert sorted(here) == sorted(there)
    assert kept == "true"


def test_a_position_a_trillion_samples_in_is_found_at_once():
    feed = batches(10**12, StepPlan(32, 4, 10**12), order=Shuffled(10**12, 1), dataset=Numbers(10**12)).from_step(
        3 * 10**10
    )
    step, micro = next(feed)
    assert step == 3 * 10**10
    assert all(0 <= index < 10**12 for b in micro for index, *_ in b.data["samples"])


def test_sequential_order_is_the_evaluation_sets_own():
    found = batches(5, StepPlan(6, 2, 5), order=Sequential(5)).from_step(0)
    assert [[i for i, *_ in b.data["samples"]] for b in next(found)[1]] == [[0, 1], [2, 3], [4]]


class Plain(Numbers):
    draws_random = False

    def __getitem__(self, index):
        return (index,)


class Quiet(Task):
    def collate(self, samples):
        return {"samples": samples}


def test_a_step_may_be_larger_than_what_is_looked_up_at_once():
    found = batches(5000, StepPlan(5000, 2500, 10_000), task=Quiet(), dataset=Plain(5000), order=Sequential(5000))
    rows = [[index for b in micro for (index,) in b.data["samples"]] for _, micro in found.from_step(0)]
    assert rows == [list(range(5000))] * 2


def test_first_micro_batch_in_parts_has_the_items_of_each():
    cuts = [(0, 1), (1, 3), (0, 3), (2, 5)]
    for quiet, task, dataset in ((True, Quiet(), Plain(13)), (False, Task(), Numbers(13))):
        found = batches(13, StepPlan(6, 3, 26), rank=1, world_size=2, task=task, dataset=dataset)
        whole = found.samples(2, 1) + found.samples(3, 0)
        for (a, b), (part, drew) in zip(cuts, found.parts(2, cuts), strict=True):
            assert [index for index, *_ in part.data["samples"]] == whole[a:b]
            assert (part.index, part.weight, part.items) == (1, 1.0, sum(index % 3 + 1 for index in whole[a:b]))
            assert drew is not quiet


def test_batches_can_be_imported_without_the_engines():
    names = ("lockstep.engines", "lockstep.config.engine_options")  # which load nothing
    code = (
        f"import sys, lockstep.data.batches; sys.exit(any('.engines' in n and n not in {names} for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [2, 8])
def test_a_mean_over_no_items_is_no_part_of_the_step(name, size):
    """Written by hand such a mean is 0 / 0, and NaN in each gradient; the sum of the same losses is not."""
    settings = {"size": size, "micro": 1, "count": 6, "lr": 0.001}
    losses, norms, _ = fit(World(), Holes(), **settings, name="single")
    for found in [fit(World(), HolesMean(), **settings, name="single"), *run(fitted, 2, settings, name)]:
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[1] == pytest.approx(norms, rel=1e-9)


def fitted(world, settings, name):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    made, found = parts(world, HolesMean(), **settings, name=name)
    return train(world, made, found, HolesMean())


def test_empty_means_are_the_same_bits_at_every_world_size():
    settings = {"size": 4, "micro": 1, "count": 5, "exact": True}
    _, *wanted = fit(World(), HolesMean(dropout=0.1), **settings, name="single")
    assert run(exactly, 2, settings) == [wanted, wanted]


def exactly(world, settings):
    return list(fit(world, HolesMean(dropout=0.1), **settings, name="ddp")[1:])


def test_a_mean_with_nothing_to_average_anywhere_is_refused():
    class Nothing(Task):
        reduction = "mean"

        def count(self, batch):
            return 0

    with pytest.raises(DataError, match="no micro-batch of steps 1 to 7 has an item"):
        next(batches(13, StepPlan(4, 2, 26), task=Nothing()).from_step(0))
