"""Measure shards and mixtures: speed against raw readers, a seek among 10^9 samples, memory over 10^6 samples.

    python bench/data_shards.py                 # about a minute; writes into a temporary folder

Each ratio is (rate of `lockstep.shards`) / (rate of the raw reader), the median of interleaved rounds; the aim is 0.95.
Both read the same samples in the order of `--data.shuffle-shards 4`, in micro-batches of 32. Raw readers: for Arrow one
datasets.Dataset over all files; for MDS and tars what their packages do for a sample by its index: open the shard,
seek, read, decode (neither package is needed here).
"""

import io
import json
import os
import resource
import statistics
import tarfile
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

import lockstep
from lockstep.data.mixture import MixtureOrder
from lockstep.data.sampler import Shuffled
from lockstep.data.shard_order import Geometry, ShardOrder

SHARDS, SAMPLES, BYTES, BATCH, ROUNDS = 16, 500, 2000, 32, 7


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
    folder = folder / name
    folder.mkdir()
    write(folder)
    data, reader = lockstep.shards(folder, cache=folder.parent / "cache"), raw(folder)
    order = ShardOrder(data.shard_sizes, 0, 4).placed(Geometry(4 * BATCH, BATCH), 0)
    batches = order.at(0, SHARDS * SAMPLES // BATCH * BATCH)[1].reshape(-1, BATCH).tolist()
    ratios, rates = [], []
    for _ in range(ROUNDS):
        seconds = []
        for read in (data.__getitems__, reader):
            began = time.perf_counter()
            for batch in batches:
                read(batch)
            seconds.append(time.perf_counter() - began)
        ratios.append(seconds[1] / seconds[0])
        rates.append(len(batches) * BATCH / seconds[0])
    print(f"{name:8} {statistics.median(rates):10,.0f} samples/s   {statistics.median(ratios):5.2f} of the raw reader")


def seek():
    sharded = ShardOrder(np.full(100_000, 10_000), 0, 8)
    mixed = MixtureOrder(
        ["a", "b", "c"],
        [sharded, Shuffled(10**8, 1), Shuffled(1000, 2)],
        [(0, [700_000, 200_000, 100_000]), (10**5, [100_000, 600_000, 300_000])],
        0,
        in_lanes=True,
    )
    for name, order in (("shards", sharded), ("mixture", mixed)):
        began = time.perf_counter()
        placed = order.placed(Geometry(1024, 8), 0)
        placed.at(10**9 - 1024, 10**9)
        first = time.perf_counter() - began
        began = time.perf_counter()
        placed.at(10**9, 10**9 + 4096)
        each = (time.perf_counter() - began) / 4096
        print(f"{name:8} a seek to sample 10^9 takes {first:.3f} s; then {1e6 * each:.1f} us a sample")


def memory(folder):
    """Resident memory over 10^6 samples, after the first tenth."""
    np.arange(64 * 15_626 + 1, dtype="<u2").tofile(folder / "000.bin")
    for number in range(1, 16):
        (folder / f"{number:03d}.bin").write_bytes((folder / "000.bin").read_bytes())
    data = lockstep.shards([*sorted(folder.glob("*.bin"))], seq_len=16, cache=folder / "cache")
    order = ShardOrder(data.shard_sizes, 0, 2).placed(Geometry(1024, 64), 0)
    peaks = []
    for start in range(0, 1_000_000, 4096):
        data.__getitems__(order.at(start, start + 4096)[1].tolist())
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(f"memory   peak grows by {peaks[-1] - peaks[len(peaks) // 10]:.1f} MiB over the last 900,000 of 10^6 samples")


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name, write, raw in (
            ("arrow", write_arrow, raw_arrow),
            ("mds", write_mds, raw_mds),
            ("tar", write_tar, raw_tar),
        ):
            compare(name, write, raw, Path(folder))
        seek()
        memory(Path(folder))


if __name__ == "__main__":
    main()
