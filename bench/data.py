"""Measure how fast data are read, against the bare reader, and the memory that this takes.

    python bench/data.py streams [--samples 1000000]

Each pair is timed in turns, in processor time of the one process; its ratio is the median of the turns. Lines are JSON.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
import tracemalloc

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

import lockstep
from lockstep.data.batches import StepPlan
from lockstep.data.stream_adapters import source_of
from lockstep.data.stream_batches import StreamBatches, StreamData
from lockstep.data.streams import Lanes
from lockstep.distributed.world import World

MICRO, STEP = 32, 4  # samples, micro-batches
TURNS = 9


class Counted:
    """The cheapest samples: a tensor that is there already, and its number."""

    def __init__(self, parts, length, draws_random):
        self.parts, self.length, self.draws_random = parts, length, draws_random
        self.row = torch.zeros(16)

    def iter(self, part, start):
        row = self.row
        for number in range(start, self.length):
            yield row, number


class Parsed(Counted):
    """Cheap samples: a line of JSON with 16 numbers, as a tensor."""

    line = json.dumps({"x": [0.5] * 16, "y": 1})

    def iter(self, part, start):
        for _ in range(start, self.length):
            row = json.loads(self.line)
            yield torch.tensor(row["x"]), row["y"]


class Plain(lockstep.Task):
    """The parts of a task that loading needs."""

    def model(self):
        raise NotImplementedError

    def dataset(self, split):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError


def bare(stream, samples):
    """Seconds of the iterator and the collation alone."""
    began = time.process_time()
    rows = itertools.chain.from_iterable(stream.iter(part, 0) for part in itertools.cycle(range(stream.parts)))
    for _ in range(samples // MICRO):
        default_collate(list(itertools.islice(rows, MICRO)))
    return time.process_time() - began


class Iterated(IterableDataset):
    """The same samples for torch's DataLoader."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        for part in itertools.cycle(range(self.stream.parts)):
            yield from self.stream.iter(part, 0)


def dataloader(stream, samples):
    """Seconds of the same samples in a DataLoader, in one process."""
    began = time.process_time()
    for _ in itertools.islice(DataLoader(Iterated(stream), MICRO), samples // MICRO):
        pass
    return time.process_time() - began


def loaded(stream, samples):
    """Seconds of the same samples as a run loads them, in one process."""
    size = MICRO * STEP
    lanes = Lanes(stream.parts, STEP, MICRO, 0)
    plan = StepPlan(size, MICRO, samples // size * size)
    loader = StreamBatches(Plain(), StreamData(source_of(stream)), lanes, plan, World()).from_step(0)
    began = time.process_time()
    for _ in loader:
        pass
    seconds = time.process_time() - began
    loader.close()
    return seconds


def streams(args):
    """The speed of a plain iterable, and the memory over many samples."""
    for kind, draws in ((Counted, False), (Parsed, False), (Parsed, True)):
        stream, count = kind(64, 10**6, draws), 100 * MICRO * STEP
        ratios, others, rates = [], [], []
        bare(stream, count), loaded(stream, count)  # imports
        for _ in range(TURNS):
            first, second, third = bare(stream, count), loaded(stream, count), dataloader(stream, count)
            ratios.append(first / second)
            others.append(third / second)
            rates.append(count / second)
        values = {"of_bare": ratios, "of_dataloader": others, "samples_per_second": rates}
        medians = {name: statistics.median(each) for name, each in values.items()}
        say("streams", kind=kind.__name__, draws_random=draws, **medians)
    stream = Counted(8, 10**4, False)
    peaks = []
    for count in (args.samples // 10, args.samples):
        gc.collect()
        tracemalloc.start()
        loaded(stream, count)
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
    say("memory", samples=[args.samples // 10, args.samples], peak_mib=peaks)


def say(what, **values):
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
    print(json.dumps({"what": what} | rounded), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["streams"])
    parser.add_argument("--samples", type=int, default=10**6, help="over which memory is measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    {"streams": streams}[args.part](args)


if __name__ == "__main__":
    main()
