"""Measure what the data cost: order, speed against raw readers, seeks, memory, `data prepare` and padding.

    python bench/data.py                        # all parts, about ten minutes; or one or more of their names
    python bench/data.py order readers          # order readers streams workers seek memory prepare padding

Lines are JSON; `aim` is that of the part. Ratios are medians over rounds in turns, of processor time of one process,
except in `workers`, which counts seconds. Data are written into a temporary folder; nothing is downloaded.
"""

import argparse
import gc
import hashlib
import io
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import tracemalloc
from collections import Counter
from functools import cache, partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

import lockstep
from lockstep.data.batches import Batches, Loading, StepPlan
from lockstep.data.groups import TokenGroups, padding
from lockstep.data.mixture import MixtureOrder
from lockstep.data.sampler import Shuffled
from lockstep.data.shard_order import Geometry, ShardOrder
from lockstep.data.stream_adapters import source_of
from lockstep.data.stream_batches import StreamBatches, StreamData
from lockstep.data.stream_mixture import LaneMixture, reader_of
from lockstep.data.streams import Cursor, Lanes
from lockstep.distributed.world import World

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / path) for path in ("data", "")]
import test_streams  # noqa: E402  its `play`: ranks that exchange by a loop

MICRO, STEP, ROUNDS = 32, 4, 21  # samples, micro-batches, rounds
SHARDS, SAMPLES, BYTES = 16, 500, 2000


def say(what, **values):
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
    print(json.dumps({"what": what} | rounded), flush=True)


# --- the same order on any ranks and processes, and after a resume


class Numbers:
    """Part p of a stream has the samples (name, p, 0), (name, p, 1), ... with a random number each."""

    def __init__(self, name, lengths):
        self.name, self.lengths, self.parts = name, lengths, len(lengths)

    def iter(self, part, start):
        for offset in range(start, self.lengths[part]):
            yield self.name, part, offset, torch.rand(()).item()


class Indexed:
    """Samples with an index, in shards, with a random number each."""

    def __init__(self, *sizes):
        self.shard_sizes = list(sizes)

    def __len__(self):
        return sum(self.shard_sizes)

    def __getitem__(self, index):
        return index, torch.rand(()).item()


def play_indexed(dataset, ranks, steps, *, workers=0, place=0):
    """The samples of `steps` steps by micro-batch; the place after them is a step."""
    plan = StepPlan(8, 2, 8000)
    own = getattr(dataset, "make_order", None)
    order = own(3, 2) if own else ShardOrder(dataset.shard_sizes, 3, 2)
    order, found = order.placed(Geometry(8, 2), 0), [{} for _ in range(steps)]
    for rank in range(ranks):
        world = World(rank=rank, size=ranks)
        loader = Batches(
            test_streams.Task(), dataset, order, plan, world, seed=3, loading=Loading(workers, 2)
        ).from_step(place)
        for step, micro in itertools.islice(loader, steps):
            found[step - place] |= {batch.index: batch.held for batch in micro if batch.weight}
        loader.close()
    return found, place + steps


def play_stream(dataset, ranks, steps, *, workers=0, place=None):
    found, state = test_streams.play(dataset, ranks, steps, workers=workers, place=place)
    return found, test_streams.resumed(state, steps + (place[0] if place else 0))


def half(play, dataset, stop, ranks, workers):
    return play(dataset, ranks, stop, workers=workers)


def flat(steps):
    return [sample for step in steps for _, batch in sorted(step.items()) for sample in batch]


def order(args):
    """Resume after 9 of 24 steps from each number of ranks to each, and from each number of processes to each."""
    uneven, few = [5, 9, 2, 7, 1, 0, 3, 3, 8, 4, 6, 7], [20, 15]
    two = {"a": 0.7, "b": 0.3}
    cases = {
        "stream": (play_stream, Numbers("a", uneven), sum(uneven)),
        "stream of few parts": (play_stream, Numbers("a", few), sum(few)),
        "mixture of streams": (
            play_stream,
            lockstep.mixture({"a": Numbers("a", uneven), "b": Numbers("b", few)}, [(2, {"a": 1}), (9, two)]),
            0,
        ),
        "shards": (play_indexed, Indexed(9, 4, 13, 7, 5, 12), 50),
        "mixture of shards": (play_indexed, lockstep.mixture({"a": Indexed(9, 4, 13), "b": Indexed(5, 2)}, two), 0),
    }
    ranks, processes = (list(itertools.product(each, repeat=2)) for each in ((1, 2, 3, 4), (0, 1, 4)))
    pairs = [list(zip(each, processes[number % 9], strict=True)) for number, each in enumerate(ranks)]
    if args.all:
        pairs = list(itertools.product(itertools.product((1, 2, 3, 4), (0, 1, 4)), repeat=2))
    for name in args.kinds or cases:
        play, dataset, epoch = cases[name]
        began, steps, stop = time.perf_counter(), 24, 9
        wanted, _ = play(dataset, 1, steps)
        before = cache(partial(half, play, dataset, stop))
        equal = 0
        for start, end in pairs:
            found, place = before(*start)
            rest, _ = play(dataset, end[0], steps - stop, workers=end[1], place=place)
            equal += found + rest == wanted
        times = Counter(sample[:-1] for sample in flat(wanted)[:epoch])
        say(
            "order",
            data=name,
            runs=len(pairs),
            equal=equal,
            each_once_an_epoch=len(times) == epoch and set(times.values()) == {1} if epoch else None,
            digest=hashlib.sha256(repr(wanted).encode()).hexdigest()[:12],
            seconds=time.perf_counter() - began,
            aim="all equal",
        )


# --- shards beside the raw readers


def write_arrow(folder):
    for shard in range(SHARDS):
        rows = {"number": range(SAMPLES), "content": [os.urandom(BYTES) for _ in range(SAMPLES)]}
        table = pa.table(rows)
        with (
            pa.OSFile(str(folder / f"{shard:03d}.arrow"), "wb") as out,
            pa.ipc.new_stream(out, table.schema) as file,
        ):
            file.write_table(table, 1000)


def write_tar(folder):
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as out:
            for row in range(SAMPLES):
                for extension, content in (("bin", os.urandom(BYTES)), ("cls", b"7")):
                    member = tarfile.TarInfo(f"{shard:03d}{row:06d}.{extension}")
                    member.size = len(content)
                    out.addfile(member, io.BytesIO(content))


def write_mds(folder):
    rows = []
    for shard in range(SHARDS):
        samples = [np.uint32(BYTES).tobytes() + os.urandom(BYTES) + np.int64(row).tobytes() for row in range(SAMPLES)]
        offsets = 4 + 4 * (SAMPLES + 1) + np.cumsum([0, *map(len, samples)])
        content = np.uint32(SAMPLES).tobytes() + offsets.astype("<u4").tobytes() + b"".join(samples)
        (folder / f"{shard:03d}.mds").write_bytes(content)
        rows.append(
            {
                "format": "mds",
                "version": 2,
                "compression": None,
                "samples": SAMPLES,
                "zip_data": None,
                "column_names": ["content", "number"],
                "column_encodings": ["bytes", "int"],
                "column_sizes": [None, 8],
                "raw_data": {"basename": f"{shard:03d}.mds", "bytes": len(content), "hashes": {}},
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": rows}))


def raw_arrow(folder):
    rows = datasets.concatenate_datasets([datasets.Dataset.from_file(str(path)) for path in sorted(folder.iterdir())])
    return rows.with_format("torch").__getitems__


def raw_tar(folder):
    paths = sorted(folder.iterdir())
    members = []
    for path in paths:
        with tarfile.open(path) as tar:
            members.append([(each.name, each.offset_data, each.size) for each in tar])

    def read(indices):
        samples = []
        for index in indices:
            shard, row = divmod(index, SAMPLES)
            sample = {}
            with paths[shard].open("rb") as file:
                for name, offset, size in members[shard][2 * row : 2 * row + 2]:
                    key, _, extension = name.partition(".")
                    file.seek(offset)
                    sample["__key__"], sample[extension] = key, file.read(size)
            samples.append(sample)
        return samples

    return read


def raw_mds(folder):
    def read(indices):
        samples = []
        for index in indices:
            shard, row = divmod(index, SAMPLES)
            with open(folder / f"{shard:03d}.mds", "rb", 0) as file:
                file.seek(4 * (1 + row))
                begin, end = np.frombuffer(file.read(8), np.uint32)
                file.seek(begin)
                data = file.read(end - begin)
            size = int(np.frombuffer(data[:4], np.uint32)[0])
            samples.append({"content": data[4 : 4 + size], "number": int(np.frombuffer(data[4 + size :], np.int64)[0])})
        return samples

    return read


def compare(name, write, raw, folder):
    """`lockstep.shards` beside a raw reader: the same samples, in the order of --data.shuffle-shards 4."""
    folder = folder / name
    folder.mkdir()
    write(folder)
    data, reader = lockstep.shards(folder, cache=folder.parent / "cache"), raw(folder)
    placed = ShardOrder(data.shard_sizes, 0, 4).placed(Geometry(4 * MICRO, MICRO), 0)
    batches = placed.at(0, SHARDS * SAMPLES // MICRO * MICRO)[1].reshape(-1, MICRO).tolist()
    ratios, rates = [], []
    for _ in range(ROUNDS):
        seconds = []
        for read in (data.__getitems__, reader):
            began = time.process_time()
            for batch in batches:
                read(batch)
            seconds.append(time.process_time() - began)
        ratios.append(seconds[1] / seconds[0])
        rates.append(len(batches) * MICRO / seconds[0])
    say("readers", data=name, of_raw=statistics.median(ratios), samples_per_second=statistics.median(rates), aim=0.95)


def readers(args):
    """Raw: for Arrow one datasets.Dataset over all files; for MDS and tars what their packages do for one sample."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("arrow", "mds", "tar"):
            compare(name, globals()[f"write_{name}"], globals()[f"raw_{name}"], Path(folder))


# --- streams beside their own iterators


class Tensors:
    """The cheapest samples: a tensor that is there already, and its number."""

    def __init__(self, draws_random=False, parts=64):
        self.parts, self.draws_random, self.row = parts, draws_random, torch.zeros(16)

    def iter(self, part, start):
        row = self.row
        for number in range(start, 10**6):
            yield row, number


class Json(Tensors):
    """A line of JSON with 16 numbers, as a tensor."""

    line = json.dumps({"x": [0.5] * 16, "y": 1})

    def iter(self, part, start):
        for _ in range(start, 10**6):
            row = json.loads(self.line)
            yield torch.tensor(row["x"]), row["y"]


class Jpeg(Tensors):
    """A jpeg of 96 x 96, decoded to a tensor."""

    def __init__(self, draws_random=False):
        from PIL import Image

        super().__init__(draws_random)
        self.open, out = Image.open, io.BytesIO()
        pixels = np.random.default_rng(0).normal(128, 30, (12, 12, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).resize((96, 96)).save(out, "jpeg")
        self.data = out.getvalue()

    def iter(self, part, start):
        for number in range(start, 10**6):
            yield torch.from_numpy(np.array(self.open(io.BytesIO(self.data)))).permute(2, 0, 1), number


class Tokens(Tensors):
    """256 tokens of an Arrow table, as int64."""

    def __init__(self, draws_random=False):
        super().__init__(draws_random)
        self.column = pa.array(np.random.default_rng(0).integers(0, 50_000, 2**20).astype(np.uint16))

    def iter(self, part, start):
        for number in range(start, 10**6):
            row = self.column.slice(number * 256 % 2**20, 256).to_numpy()
            yield {"tokens": torch.from_numpy(row.astype(np.int64))}


class Iterated(IterableDataset):
    """The same samples for torch's DataLoader; each process has parts of its own."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        own = range(info.id if info else 0, self.stream.parts, info.num_workers if info else 1)
        for part in itertools.cycle(own):
            yield from self.stream.iter(part, 0)


class Plain(lockstep.Task):
    """The parts of a task that loading needs."""

    def model(self):
        raise NotImplementedError

    def dataset(self, split):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError


def bare(iterated):
    """Read the samples, and collate them; yields their number, as all contestants do."""
    rows = iter(iterated)
    while True:
        batch = default_collate(list(itertools.islice(rows, MICRO)))  # is held while the next one is read
        yield MICRO
        del batch


def dataloader(iterated, workers=0):
    """Read the same samples with torch's DataLoader."""
    options = {"num_workers": workers, "prefetch_factor": 4 if workers else None}
    for _batch in DataLoader(iterated, MICRO, **options):
        yield MICRO


def loaded(dataset, workers=0):
    """Read the same samples as a run does."""
    size, data = MICRO * STEP, StreamData(source_of(dataset))
    lanes, plan = Lanes(data.source.parts, STEP, MICRO, 0), StepPlan(size, MICRO, 10**9 // size * size)
    loader = StreamBatches(Plain(), data, lanes, plan, World(), loading=Loading(workers)).from_step(0)
    try:
        for _, micro in loader:
            yield sum(int(batch.items) for batch in micro)
    finally:
        loader.close()


def read(contestant, count):
    """Read `count` samples or a few more, and return their number."""
    total = 0
    while total < count:
        total += next(contestant)
    return total


def in_turns(contestants, count, clock):
    """Return the seconds a sample of each contestant in each round, whose order rotates. [rounds][contestants]"""
    for each in contestants:
        read(each, 16 * MICRO * STEP)  # opens all parts
    rounds = []
    for number in range(ROUNDS):
        seconds = [0.0] * len(contestants)
        for place in range(len(contestants)):
            which = (number + place) % len(contestants)
            began = clock()
            total = read(contestants[which], count)
            seconds[which] = (clock() - began) / total
        rounds.append(seconds)
    for each in contestants:
        each.close()
    return rounds


def beside(what, dataset, iterated, count, aim=0.95, **named):
    """Compare a stream with its iterator, and with torch's DataLoader."""
    rounds = in_turns([bare(iterated), dataloader(iterated), loaded(dataset)], count, time.process_time)
    say(
        what,
        **named,
        of_iterator=statistics.median(first / third for first, _, third in rounds),
        of_dataloader=statistics.median(second / third for _, second, third in rounds),
        samples_per_second=1 / statistics.median(third for _, _, third in rounds),
        aim=aim,
    )


def streams(args):
    for kind, draws, count in (
        (Tensors, False, 5120),
        (Json, False, 1280),
        (Json, True, 1280),
        (Tokens, False, 2560),
        (Jpeg, False, 256),
        (Jpeg, True, 256),
    ):
        stream = kind(draws)
        beside("streams", stream, Iterated(stream), count, data=kind.__name__, draws_random=draws)
    mixed = lockstep.mixture({"a": Json(), "b": Json()}, {"a": 0.7, "b": 0.3})
    beside("streams", mixed, Iterated(Json()), 1280, data="mixture of two Json")
    with tempfile.TemporaryDirectory() as folder:
        hugging(Path(folder))
        web(Path(folder))


def hugging(folder):
    """Arrow files by `datasets`, streamed: 256 tokens each."""
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("int32"))})
    rows = np.random.default_rng(0).integers(0, 50_000, (4000, 256)).tolist()
    datasets.Dataset.from_dict({"tokens": rows}, features=features).save_to_disk(folder / "arrow", num_shards=8)
    for formatted in (None, "torch"):
        stream = datasets.load_from_disk(folder / "arrow").to_iterable_dataset(8).with_format(formatted)
        stream.draws_random = False
        beside("streams", stream, Repeated(stream), 640, data=f"datasets, Arrow, format {formatted}")


class Repeated(IterableDataset):
    """A stream without an end."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        while True:
            yield from self.stream


def web(folder):
    """Tars by webdataset, if it is installed."""
    try:
        import webdataset
    except ImportError:
        say("streams", data="webdataset", skipped="not installed")
        return
    (folder / "tars").mkdir()
    write_tar(folder / "tars")
    urls = [str(path) for path in sorted((folder / "tars").iterdir())]
    stream = webdataset.WebDataset(urls, shardshuffle=False).to_tuple("bin", "cls")
    stream.draws_random = False
    beside("streams", stream, Repeated(stream), 640, data="webdataset")


def workers(args):
    """Seconds with loader processes."""
    for (kind, count), processes in itertools.product(((Json, 6400), (Jpeg, 640)), (1, 2)):
        stream = kind()
        contestants = [dataloader(Iterated(stream), processes), loaded(stream, processes)]
        rounds = in_turns(contestants, count, time.perf_counter)
        say(
            "workers",
            data=kind.__name__,
            processes=processes,
            of_dataloader=statistics.median(first / second for first, second in rounds),
            samples_per_second=1 / statistics.median(second for _, second in rounds),
            aim=0.95,
        )


# --- seeks and memory


def seek(args):
    sharded = ShardOrder(np.full(100_000, 10_000), 0, 8)
    mixed = MixtureOrder(
        ["a", "b", "c"],
        [sharded, Shuffled(10**8, 1), Shuffled(1000, 2)],
        [(0, [700_000, 200_000, 100_000]), (10**5, [100_000, 600_000, 300_000])],
        0,
        in_lanes=True,
    )
    for name, each in (("shards", sharded), ("mixture", mixed)):
        began = time.perf_counter()
        placed = each.placed(Geometry(1024, 8), 0)
        placed.at(10**9 - 1024, 10**9)
        first = time.perf_counter() - began
        began = time.perf_counter()
        placed.at(10**9, 10**9 + 4096)
        rest = (time.perf_counter() - began) / 4096
        say("seek", data=name, sample=10**9, seconds=first, then_us_a_sample=1e6 * rest, aim="1 s")
    lanes, points = Lanes(64, 4, 32, 0), [(0, {"a": 1}), (10**6, {"a": 1, "b": 1})]
    stream = lockstep.mixture({"a": Endless(), "b": Endless()}, points)
    counts = LaneMixture(lanes, stream.points).counts(3, 10**9)
    places = {
        "stream": (Endless(), Cursor(10**9, 0, 10**9)),
        "mixture of streams": (stream, Cursor(10**9, 0, 0, [[count, 0, count, None] for count in counts])),
    }
    for name, (data, cursor) in places.items():
        began = time.perf_counter()
        reader_of(source_of(data), lanes).read(3, 10**9, 32, epoch=0, cursor=cursor)  # as of a checkpoint
        say("seek", data=name, sample=10**9, seconds=time.perf_counter() - began, aim="1 s")


class Endless:
    """Parts that seek."""

    parts, draws_random = 64, True

    def iter(self, part, start):
        return itertools.count(start)


def memory(args):
    """Over 10^6 samples after 10^5: allocated for a stream; resident for shards."""
    for name, data in (
        ("stream", Tensors(parts=8)),
        ("mixture of streams", lockstep.mixture({"a": Tensors(), "b": Tensors()}, {"a": 0.7, "b": 0.3})),
    ):
        peaks = []
        for count in (100_000, 1_000_000):
            gc.collect()
            tracemalloc.start()
            read(loaded(data), count)
            peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
            tracemalloc.stop()
        say("memory", data=name, peak_mib_of_1e5=peaks[0], peak_mib_of_1e6=peaks[1], aim="constant")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        np.arange(64 * 15_626 + 1, dtype="<u2").tofile(folder / "000.bin")
        for number in range(1, 16):
            (folder / f"{number:03d}.bin").write_bytes((folder / "000.bin").read_bytes())
        data = lockstep.shards([*sorted(folder.glob("*.bin"))], seq_len=16, dtype="uint16", cache=folder / "cache")
        placed = ShardOrder(data.shard_sizes, 0, 2).placed(Geometry(1024, 64), 0)
        peaks = []
        for start in range(0, 1_000_000, 4096):
            data.__getitems__(placed.at(start, start + 4096)[1].tolist())
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    say("memory", data="shards", grows_mib_after_1e5=peaks[-1] - peaks[len(peaks) // 10], aim="constant")


# --- data prepare


def prepare(args):
    """Processor time of `lockstep data prepare` beside that of the tokenizer's own batches, in one thread."""
    import tokenizers
    import transformers

    words = ["".join(chr(97 + int(c)) for c in row) for row in np.random.default_rng(0).integers(0, 26, (20_000, 6))]
    draw = np.random.default_rng(1)
    texts = [" ".join(words[min(int(z), 19_999)] for z in draw.zipf(1.3, 400)) for _ in range(args.documents)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trained = tokenizers.ByteLevelBPETokenizer()
        trained.train_from_iterator(texts[:2000], vocab_size=8000, special_tokens=["<|endoftext|>"])
        options = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **options)
        fast.save_pretrained(folder / "tokenizer")
        for name, count in (("few", 100), ("all", len(texts))):
            (folder / name).mkdir()
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[:count])
            (folder / name / "rows.jsonl").write_text(lines)
        ratios, rates = [], []
        for number in range(args.rounds):
            began = time.process_time()
            tokens = 0
            for start in range(0, len(texts), 1000):
                tokens += sum(map(len, fast(texts[start : start + 1000])["input_ids"]))
            own = time.process_time() - began
            few, whole = (prepared(folder, name, number) for name in ("few", "all"))
            ratios.append(own / (whole - few))
            rates.append(tokens / (whole - few))
    say(
        "prepare",
        of_tokenizer=statistics.median(ratios),
        tokens_per_second_a_core=statistics.median(rates),
        tokens=tokens,
        aim=0.8,
    )


def prepared(folder, name, number):
    """Seconds of processor time of the command and its process."""
    command = [sys.executable, "-m", "lockstep", "data", "prepare", str(folder / name), "--processes", "1"]
    command += ["--tokenizer", str(folder / "tokenizer"), "--out", str(folder / f"{name}-{number}")]
    command += ["--cache", str(folder / f"cache-{name}-{number}")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# --- batches by tokens


def pad(args):
    draw = np.random.default_rng(0)
    for mean, spread in ((4.0, 1.0), (5.0, 0.6), (6.0, 1.2)):
        lengths = np.clip(np.exp(draw.normal(mean, spread, 100_000)), 1, 8192).astype(int)
        for bound in (8192, 16_384):
            share = float(padding(TokenGroups(lengths, bound, 0), lengths))
            say("padding", log_mean=mean, log_spread=spread, micro_batch_tokens=bound, padding=share, aim=0.05)


PARTS = {
    "order": order,
    "readers": readers,
    "streams": streams,
    "workers": workers,
    "seek": seek,
    "memory": memory,
    "prepare": prepare,
    "padding": pad,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--all", action="store_true", help="order: all 144 resumes of each kind of data; half an hour")
    parser.add_argument("--kinds", action="append", metavar="KIND", help="order: only this kind of data, as printed")
    parser.add_argument("--documents", type=int, default=20_000, help="prepare: documents of 400 words")
    parser.add_argument("--rounds", type=int, default=3, help="prepare")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for part in args.parts or PARTS:
        PARTS[part](args)


if __name__ == "__main__":
    main()
