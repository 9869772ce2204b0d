"""Streams of other libraries: their parts, their states, and what reads them past what cannot seek."""

import gc
import io
import itertools
import json
import logging
import random
import tarfile
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_stream_trial import Stateful as CountsEpochs
from test_streams import Parts, play, resumed
from torch.utils.data import IterableDataset, get_worker_info

import lockstep
from lockstep.adapters.hf_trainer.data import samples_of as trainer_samples
from lockstep.adapters.lightning.data import taken_apart
from lockstep.data.loader import check_dataset
from lockstep.data.stream_adapters import is_stream, source_of
from lockstep.data.streams import lanes_of
from lockstep.errors import ConfigError, DataError


class Count(IterableDataset):
    """Splits its numbers by worker, as documentation of torch shows it."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from range(worker, self.size, workers)


def samples_of(steps):
    return [sample for step in steps for batch in step.values() for sample in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_splits_itself_by_the_worker_info(workers):
    stream = lockstep.stream(Count(30), parts=8)
    steps, _ = play(stream, 1, 8, workers=workers)
    assert sorted(samples_of(steps)[:30]) == list(range(30))
    assert {sample % 8 for sample in steps[0][0]} == {steps[0][0][0] % 8}  # a micro-batch is of one part
    assert play(stream, 3, 8)[0] == steps
    assert get_worker_info() is None
    one, _ = play(Count(30), 2, 4, micro=2)  # not declared: one part, in its own order
    assert samples_of(one)[:12] == list(range(12))


def test_what_cannot_seek_is_read_past_with_a_line(caplog):
    wanted, _ = play(Count(40), 1, 5, micro=2)
    _, state = play(Count(40), 1, 3, micro=2)
    with caplog.at_level(logging.INFO, "lockstep"):
        assert play(Count(40), 1, 2, micro=2, place=resumed(state, 3))[0] == wanted[3:]
    (line,) = [each.message for each in caplog.records if "cannot seek" in each.message]
    assert "12 samples" in line
    caplog.clear()
    _, state = play(Parts([40]), 1, 3, micro=2)
    play(Parts([40]), 1, 2, micro=2, place=resumed(state, 3))  # it seeks
    assert not caplog.records


class Buffered(Count):
    """Has a shuffle buffer that draws from the process's generators, so a sample depends on all draws before it."""

    draws_random = True

    def __iter__(self):
        buffer = []
        for number in super().__iter__():
            buffer.append(number)
            if len(buffer) > 4:
                yield buffer.pop(int(torch.randint(len(buffer), ())))
        yield from buffer


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_read_past_draws_the_same(parts):
    """Parts begin within a micro-batch, and several slots read one part."""
    stream = lockstep.stream(Buffered(60), parts)
    wanted, _ = play(stream, 1, 14, size=3)
    for stop in (2, 5, 9):
        before, state = play(stream, 3, stop, size=3)
        assert before + play(stream, 2, 14 - stop, size=3, place=resumed(state, stop))[0] == wanted


class Stateful:
    """Its iterators cannot start anywhere but at the beginning and at a state, and count what they skipped."""

    parts, draws_random, begun = 3, False, 0

    def iter(self, part, start, state=None):
        return Stepping(self, part, state)


class Stepping:
    def __init__(self, owner, part, state):
        self.part, self.at, owner.begun = part, (state or {"at": 0})["at"], owner.begun + (state is not None)

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 7:
            raise StopIteration
        self.at += 1
        return self.part, self.at - 1

    def state_dict(self):
        return {"at": self.at}


def test_the_state_of_an_iterator_comes_back():
    stream = Stateful()
    wanted, _ = play(stream, 1, 6, micro=3, size=1)
    _, state = play(stream, 1, 4, micro=3, size=1)
    json.dumps(state.cursors)
    assert stream.begun == 0
    assert play(stream, 2, 2, micro=3, size=1, place=resumed(state, 4))[0] == wanted[4:]
    assert stream.begun


def test_a_state_that_is_no_json_is_refused():
    class Bad(Stepping):
        def state_dict(self):
            return {"at": torch.zeros(3)}

    class Stream(Stateful):
        def iter(self, part, start, state=None):
            return Bad(self, part, state)

    with pytest.raises(DataError, match="JSON"):
        play(Stream(), 1, 1)


@pytest.fixture
def rows(tmp_path):
    """Six files of different lengths."""
    files = []
    for number, length in enumerate([5, 3, 8, 1, 4, 6]):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"at": 100 * number + k}) + "\n" for k in range(length)))
        files.append(str(path))
    return files


@pytest.fixture
def hugging(rows, tmp_path):
    datasets = pytest.importorskip("datasets")
    return datasets.load_dataset("json", data_files=rows, split="train", streaming=True, cache_dir=str(tmp_path))


def numbers(steps):
    return [sample["at"] for sample in samples_of(steps)]


@pytest.mark.parametrize("workers", [0, 2])
def test_hugging_face_stream_has_files_as_parts_and_seeks(hugging, workers, caplog):
    assert source_of(hugging).parts == 6
    wanted, _ = play(hugging, 1, 14, micro=2)
    assert sorted(numbers(wanted)[:27]) == sorted(
        100 * n + k for n, c in enumerate([5, 3, 8, 1, 4, 6]) for k in range(c)
    )
    for stop in (3, 11):  # the latter in the second epoch
        before, state = play(hugging, 2, stop, micro=2, workers=workers)
        assert state.place.epoch == (stop == 11)
        with caplog.at_level(logging.INFO, "lockstep"):
            assert before + play(hugging, 1, 14 - stop, micro=2, place=resumed(state, stop))[0] == wanted
    assert "cannot seek" not in caplog.text


def test_shuffle_buffer_is_read_past_as_its_state_lacks_samples(hugging):
    stream = hugging.shuffle(seed=3, buffer_size=4)
    wanted, _ = play(stream, 1, 14, micro=2)
    assert sorted(numbers(wanted)[:27]) == sorted(numbers(play(hugging, 1, 14, micro=2)[0])[:27])
    before, state = play(stream, 2, 3, micro=2)
    assert before + play(stream, 1, 11, micro=2, place=resumed(state, 3))[0] == wanted


def test_parquet_files_and_a_map_are_a_stream_too(tmp_path):
    datasets = pytest.importorskip("datasets")
    for number in range(4):
        datasets.Dataset.from_dict({"at": list(range(10 * number, 10 * number + 7))}).to_parquet(
            tmp_path / f"{number}.parquet"
        )
    files = [str(tmp_path / f"{number}.parquet") for number in range(4)]
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
    stream = stream.map(lambda row: {"at": row["at"] + 1000}).filter(lambda row: row["at"] % 10 != 3)
    wanted, _ = play(stream, 1, 6, micro=4, size=1)
    assert sorted(numbers(wanted)[:24]) == [1000 + 10 * n + k for n in range(4) for k in (0, 1, 2, 4, 5, 6)]
    before, state = play(stream, 2, 2, micro=4, size=1)
    assert before + play(stream, 4, 4, micro=4, size=1, place=resumed(state, 2))[0] == wanted


def tar(path, names):
    with tarfile.open(path, "w") as file:
        for name in names:
            data = json.dumps({"at": name}).encode()
            info = tarfile.TarInfo(f"{name:04d}.json")
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_webdataset_has_its_urls_as_parts(tmp_path, workers, monkeypatch):
    webdataset = pytest.importorskip("webdataset")
    monkeypatch.setenv("WORLD_SIZE", "2")  # lockstep splits: its own splitters are left out
    for number, length in enumerate([5, 3, 0, 4]):
        tar(tmp_path / f"{number}.tar", [100 * number + k for k in range(length)])
    urls = [str(tmp_path / f"{number}.tar") for number in range(4)]
    stream = webdataset.WebDataset(urls, shardshuffle=False).decode().map(lambda sample: sample["json"])
    assert source_of(stream).parts == 4
    wanted, _ = play(stream, 1, 8, micro=2, workers=workers)
    assert sorted(numbers(wanted)[:12]) == [100 * n + k for n, c in enumerate([5, 3, 0, 4]) for k in range(c)]
    before, state = play(stream, 2, 3, micro=2)
    assert before + play(stream, 1, 5, micro=2, place=resumed(state, 3))[0] == wanted
    gc.collect()  # it leaves files open


@pytest.fixture
def uneven(tmp_path):
    """Four tars of 4, 4, 4 and 52 samples."""
    number = 0
    for place, length in enumerate([4, 4, 4, 52]):
        tar(tmp_path / f"{place}.tar", range(number, number + length))
        number += length
    return [str(tmp_path / f"{place}.tar") for place in range(4)]


def web(urls, **options):
    webdataset = pytest.importorskip("webdataset")
    random.seed(1)
    stream = webdataset.WebDataset(urls, **{"shardshuffle": False, **options})
    return stream.decode().map(lambda sample: sample["json"])


def in_steps(make, ranks, steps, workers=0, place=None):
    """As `play`, with the lanes of a run; the stream is made anew."""
    lanes = lanes_of(source_of(make()), 4, 2, 3)
    return play(make(), ranks, steps, workers=workers, place=place, lanes=lanes)


PIPELINES = {
    "plain": lambda urls: web(urls),
    "with_epoch": lambda urls: web(urls).with_epoch(64),
    "a longer epoch": lambda urls: web(urls).with_epoch(96),
    "repeat": lambda urls: web(urls).repeat(),
    "shuffle": lambda urls: web(urls, shardshuffle=4).shuffle(16),
    "a seeded shuffle": lambda urls: web(urls).shuffle(16, seed=3),
    "a kept generator": lambda urls: web(urls).shuffle(16, rng=random.Random(5)),
    "detshuffle": lambda urls: web(urls, shardshuffle=4, detshuffle=True),
    "slice": lambda urls: web(urls).slice(40),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", PIPELINES)
def test_webdataset_keeps_its_counts_over_ranks_and_a_resume(uneven, name):
    make = partial(PIPELINES[name], uneven)
    wanted, _ = in_steps(make, 1, 12)
    alone = itertools.islice(itertools.chain.from_iterable(make() for _ in range(3)), 96)
    counts = [Counter(sample["at"] for sample in found) for found in (samples_of(wanted), alone)]
    assert sorted(counts[0].values()) == sorted(counts[1].values())
    assert all(sum(map(len, step.values())) == 8 for step in wanted)  # no half steps
    before, state = in_steps(make, 3, 5)
    assert before + in_steps(make, 2, 7, place=resumed(state, 5))[0] == wanted
    gc.collect()  # it leaves files open


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("epoch", [0, 40])
def test_a_resampled_webdataset_is_drawn_alike_on_any_rank(uneven, epoch):
    def make():
        stream = web(uneven, resampled=True)
        return stream.with_epoch(epoch) if epoch else stream

    wanted, _ = in_steps(make, 1, 12)
    assert all(sum(map(len, step.values())) == 8 for step in wanted)
    before, state = in_steps(make, 2, 7)
    assert before + in_steps(make, 1, 5, workers=1, place=resumed(state, 7))[0] == wanted
    gc.collect()


def interleaved(stream):
    datasets = pytest.importorskip("datasets")
    other = stream.map(lambda row: {"at": row["at"] + 2000})
    return datasets.interleave_datasets([stream, other], [0.7, 0.3], seed=1, stopping_strategy="all_exhausted")


FORMS = {
    "take": lambda stream: stream.take(16),
    "skip": lambda stream: stream.skip(3),
    "repeat": lambda stream: stream.repeat(2),
    "endless": lambda stream: stream.repeat(None),
    "batch": lambda stream: stream.batch(4),
    "interleave": interleaved,
    "indices": lambda stream: stream.map(lambda row, index: {"at": index}, with_indices=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_hugging_face_stream_has_one_processs_samples_an_epoch(hugging, form):
    stream = FORMS[form](hugging)
    alone = [str(sample) for sample in itertools.islice(stream, 54)]
    wanted, _ = play(stream, 1, 24, micro=2)
    assert Counter([str(sample) for sample in samples_of(wanted)][: len(alone)]) == Counter(alone)
    before, state = play(stream, 2, 5, micro=2)
    assert before + play(stream, 1, 19, micro=2, place=resumed(state, 5))[0] == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataset_keeps_its_epochs_over_a_resume(workers):
    wanted, _ = play(CountsEpochs(), 1, 20)
    alone = CountsEpochs()
    assert samples_of(wanted)[:60] == [*alone, *alone]  # in another order
    for stop in (3, 4, 13):  # in the first epoch, at its end and in the fourth
        stream = CountsEpochs()
        before, state = play(stream, 2, stop, workers=workers)
        json.dumps(state.cursors)
        assert before + play(CountsEpochs(), 3, 20 - stop, place=resumed(state, stop))[0] == wanted
        assert (stream.at, stream.epoch) == (0, 0)


def test_what_is_a_stream_and_what_is_refused():
    assert not is_stream([1, 2])
    assert not is_stream(torch.utils.data.DataLoader([1, 2]))  # which is refused by name
    assert not is_stream(torch.utils.data.TensorDataset(torch.zeros(3)))
    assert is_stream(Count(3))
    assert is_stream(Parts([1]))
    with pytest.raises(DataError, match="only once"):
        source_of(iter([1, 2]))
    with pytest.raises(DataError, match="parts = 0"):
        source_of(Parts([]))
    streaming = type("StreamingDataset", (Count,), {"__module__": "streaming.base.dataset"})(3)
    streaming.streams = [SimpleNamespace(remote="s3://corpus", local="/tmp/corpus", split="train")]
    for attempt in (
        lambda: source_of(streaming),
        lambda: check_dataset(streaming, "evaluation"),
        lambda: check_dataset(torch.utils.data.Subset(streaming, [0]), "train"),  # of a rank's share
        lambda: trainer_samples(None, streaming, "train_dataset"),
        lambda: taken_apart(torch.utils.data.DataLoader(streaming), "train_dataloader"),
    ):
        with pytest.raises(DataError, match=r"StreamingDataset of MosaicML.*lockstep.shards\('s3://corpus/train'\)"):
            attempt()
    with pytest.raises(ConfigError, match="parts is 0"):
        lockstep.stream(Count(3), parts=0)
    with pytest.raises(ConfigError, match="__iter__"):
        lockstep.stream(3, parts=1)
