"""Shards: each format's samples, a bounded cache, shards that change, stores that fail, and who fetches what."""

import base64
import contextlib
import http.server
import io
import json
import multiprocessing
import os
import resource
import tarfile
import threading
import time
import zlib
from collections import Counter
from decimal import Decimal
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from refusals import names, refuses
from small_runs import config
from toys import Partial

import lockstep
from lockstep.data import shard_cache
from lockstep.data.batches import Batches, Loading, StepPlan
from lockstep.data.shard_cache import ShardCache
from lockstep.data.shard_order import Geometry, own_order, place_order
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError, StorageError
from lockstep.guards.samples import RetryingDataset


class Elsewhere(LocalFileSystem):
    """The local disk, as a store of another name."""

    protocol = ("elsewhere",)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("elsewhere://"))

    def unstrip_protocol(self, name):
        return f"elsewhere://{name}"


fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shard_cache, "_PAUSES", (0.01, 0.02))
    return tmp_path / "cache" / "shards"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    return path


def tokens(folder, count=4, size=65):
    """Shards of numbers: sample i of all is the numbers from 4 * i on, its shard's first number aside."""
    for number in range(count):
        (np.arange(size, dtype="<u2") + number * (size - 1)).tofile(folder / f"{number:03d}.bin")
    return folder


def tar(path, count, prefix=""):
    with tarfile.open(path, "w") as out:
        for number in range(count):
            for extension, content in (("cls", str(number)), ("seg.TXT", f"text {number}")):
                member = tarfile.TarInfo(f"a.b/{prefix}{number:04d}.{extension}")
                member.size = len(content)
                out.addfile(member, io.BytesIO(content.encode()))
    return path


def first(dataset, indices):
    return [int(sample["input_ids"][0]) for sample in dataset.__getitems__(indices)]


# --- formats


TABLE = pa.table({"x": range(25), "list": [[i, i + 1] for i in range(25)], "s": [f"s{i}" for i in range(25)]})


def write_arrow(path, table, make=pa.ipc.new_stream, **options):
    with pa.OSFile(str(path), "wb") as out, make(out, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
        file.write_table(table, 10)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.parquet", lambda path: pq.write_table(TABLE, path, row_group_size=10)),
        ("a.arrow", lambda path: write_arrow(path, TABLE)),
        ("file.arrow", lambda path: write_arrow(path, TABLE, pa.ipc.new_file)),
        ("packed.arrow", lambda path: write_arrow(path, TABLE, compression="zstd")),
    ],
)
def test_tables(folder, cache, name, write):
    write(folder / name)
    for source in (str(folder / name), f"elsewhere://{folder}"):
        data = lockstep.shards(source)
        assert (len(data), data.shard_sizes.tolist(), data.draws_random) == (25, [25], False)
        sample = data[24]
        assert (sample["x"].item(), sample["list"].tolist(), sample["s"]) == (24, [24, 25], "s24")
        assert [row["s"] for row in data.__getitems__([3, 20, 3])] == ["s3", "s20", "s3"]
        assert data.fetches == source.startswith("elsewhere")
    assert lockstep.shards(folder, row_format="python")[1] == {"x": 1, "list": [1, 2], "s": "s1"}
    in_place = [path for path in cache.iterdir() if path.suffix == ".arrow"]
    assert bool(in_place) == (name != "a.arrow")  # a stream is read where it is


def test_tars(folder):
    tar(folder / "b-01.tar", 3)
    tar(folder / "b-02.tar", 2, "y")
    data = lockstep.shards(f"{folder}/b-{{01..02}}.tar")
    assert data.shard_sizes.tolist() == [3, 2]
    assert data[4] == {"__key__": "a.b/y0001", "cls": b"1", "seg.txt": b"text 1"}
    decoded = lockstep.shards([folder / "b-02.tar"], transform=lambda sample: int(sample["cls"]))
    assert [*map(decoded.__getitem__, range(2))] == [0, 1]
    assert decoded.draws_random


def test_tokens(folder):
    tokens(folder, 3)
    data = lockstep.shards(folder, seq_len=4, dtype="uint16")
    assert data.shard_sizes.tolist() == [16] * 3
    assert data[17]["labels"].tolist() == [69, 70, 71, 72]
    assert first(data, [47, 0, 16]) == [188, 0, 64]


def test_mds_is_read_as_its_own_package_wrote_it(folder):
    """The files are of mosaicml-streaming 0.13."""
    for name, content in json.loads((Path(__file__).parent / "mds_files.json").read_text()).items():
        (folder / name).write_bytes(zlib.decompress(base64.b64decode(content)))
    data = lockstep.shards(folder)
    assert data.shard_sizes.tolist() == [4, 3]
    for number in range(7):
        sample = data[number]
        assert (sample["n"], sample["text"], sample["raw"]) == (-number, f"text {number} ä", b"\0" * 0 or sample["raw"])
        assert sample["raw"] == (bytes([number]) * number or b"x")
        assert sample["arr"].tolist() == list(range(number + 1))
        assert sample["typed"].tolist() == [[number] * (number + 1)] * 2
        assert (sample["fixed"].shape, sample["fixed"].dtype) == ((2, 3), np.float32)
        assert (sample["f"], sample["j"]) == (np.float32(number / 3), {"a": [number]})
        assert (sample["si"], sample["sd"]) == (10**20 + number, Decimal(f"{number}.10"))
        assert (sample["png"].getpixel((0, 0)), sample["pil"].getpixel((1, 0))) == (number, (number, 0, 1))
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1]["samples"] = 2
    (folder / "index.json").write_text(json.dumps(index))
    with refuses(DataError, index["shards"][1]["raw_data"]["basename"], "3", "2"):
        lockstep.shards(folder)
    index["shards"][1]["samples"] = 3
    for codec in ("gzip", "zstd", "snappy", "brotli"):
        short = {"gzip": "gz", "brotli": "br"}.get(codec, codec)
        for shard in index["shards"]:
            packed = pa.compress((folder / shard["raw_data"]["basename"]).read_bytes(), codec, asbytes=True)
            (folder / (name := f"{shard['raw_data']['basename']}.{short}")).write_bytes(packed)
            shard |= {"compression": short, "zip_data": {"basename": name, "bytes": len(packed), "hashes": {}}}
        (folder / "index.json").write_text(json.dumps(index))
        assert lockstep.shards(folder)[5]["text"] == "text 5 ä"
    index["shards"][1]["samples"] = 4
    (folder / "index.json").write_text(json.dumps(index))
    with refuses(DataError, name, "3", "4"):  # a compressed one, when it is opened
        _ = lockstep.shards(folder)[6]
    index["shards"][1]["samples"] = 3
    index["shards"][0]["column_encodings"][0] = index["shards"][1]["column_encodings"][0] = "pkl"
    (folder / "index.json").write_text(json.dumps(index))
    with refuses(DataError, "index.json", "arr", "pkl"):
        lockstep.shards(folder)


# --- a folder is its shards, and a shard is whole


def members(path, *files, mode="w", **attributes):
    with tarfile.open(path, mode) as out:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for attribute, value in attributes.items():
                setattr(member, attribute, value)
            out.addfile(member, io.BytesIO(content))
    return path.read_bytes()


def cut_tar(path):
    content = members(path, *((f"{number}.txt", bytes(700)) for number in range(40)))
    path.write_bytes(content[: 3 * 512 * 20])  # after a member of zeros: its end looks like a tar's


def damaged_tar(path):
    content = bytearray(members(path, *((f"{number}.txt", b"x") for number in range(4))))
    content[1024:1030] = b"\xff" * 6  # the header of the second member
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "write", "named"),
    [
        ("a.tar", cut_tar, ["a.tar"]),
        ("a.tar", damaged_tar, ["a.tar", "1024"]),
        ("a.tar", lambda path: members(path, ("a.txt", b"1"), ("a.cls", b"0"), ("a.txt", b"2")), ["a.tar", "a.txt"]),
        ("a.tar", lambda path: members(path, ("a.txt", b"1"), ("b.txt", b"0"), ("a.cls", b"2")), ["a.tar", "a.cls"]),
        ("a.tar", lambda path: members(path, ("a.txt", b""), type=tarfile.SYMTYPE), ["a.tar", "a.txt"]),
        ("a.tar", lambda path: members(path, ("a", b"1"), ("b.txt", b"2")), ["a.tar", "1 of 2"]),
        ("b.tar.gz", lambda path: members(path, ("a.txt", b"1"), mode="w:gz"), ["b.tar.gz", "*.parquet"]),
        ("b.tgz", lambda path: path.touch(), ["b.tgz"]),
        ("deeper", lambda path: path.mkdir(), ["deeper"]),
        (
            "b.parquet",
            lambda path: pq.write_table(pa.table({"x": [1.5]}), path),
            ["b.parquet", "x: double", "x: int64"],
        ),
    ],
)
def test_what_a_folder_has_is_read_whole_or_refused_by_name(folder, name, write, named):
    write(folder / name)
    if name != "a.tar":
        pq.write_table(TABLE.select(["x"]), folder / "a.parquet")
        pq.write_table(TABLE.select(["x"])[:0], folder / "empty.parquet")
    for beside in ("README.md", "_SUCCESS", "dataset_info.json", ".hidden"):
        (folder / beside).touch()
    with refuses(DataError, *named) as error:
        lockstep.shards(folder)
    assert "\n" not in str(error.value)


def test_concatenated_tars_are_read_to_their_end(folder):
    parts = [members(folder / "part", *((f"{key}.txt", key.encode()) for key in keys)) for keys in ("ab", "c", "def")]
    (folder / "part").unlink()
    (folder / "0.tar").write_bytes(b"".join(parts))
    data = lockstep.shards(f"{folder}/?.tar")
    assert [sample["txt"] for sample in data.__getitems__(list(range(6)))] == [b"a", b"b", b"c", b"d", b"e", b"f"]
    with refuses(DataError, "1-*.tar"):
        lockstep.shards([f"{folder}/?.tar", f"{folder}/1-*.tar"])


@pytest.mark.parametrize(
    ("content", "given", "kind", "named"),
    [
        (np.arange(1000, dtype="<u4"), {}, ConfigError, ["dtype"]),
        (np.arange(1000, dtype="<u4"), {"dtype": "uint16"}, DataError, ["0.bin", "uint32"]),
        (np.arange(1000, dtype="<u2"), {"dtype": "uint32"}, DataError, ["0.bin", "uint32"]),
        (np.arange(999, dtype="<u2"), {"dtype": "uint32"}, DataError, ["0.bin", "1998"]),
        (np.arange(1000, dtype="<u2"), {"dtype": "uint16", "vocab_size": 900}, DataError, ["0.bin", "vocab_size", 900]),
        (None, {"dtype": "uint16"}, DataError, ["0.bin", ".npy"]),
    ],
)
def test_tokens_of_another_width_are_refused(folder, content, given, kind, named):
    if content is None:
        np.save(folder / "0.npy", np.arange(1000, dtype="<u2"))
        (folder / "0.npy").rename(folder / "0.bin")
    else:
        content.tofile(folder / "0.bin")
    with refuses(kind, *named):
        lockstep.shards(folder, seq_len=8, **given).__getitems__(list(range(120)))


def test_an_index_carries_the_width_and_lists_every_shard(folder):
    tokens(folder, 2)
    lockstep.index_shards(folder, seq_len=4, dtype="uint16")
    assert first(lockstep.shards(folder, seq_len=4), [16]) == [64]
    tokens(folder, 3)
    with refuses(DataError, "002.bin"):
        lockstep.shards(folder, seq_len=4)


# --- the same order on any ranks, and who fetches what


class Task(Partial):
    def collate(self, samples):
        return [int(sample["input_ids"][0]) for sample in samples]

    def count(self, batch):
        return len(batch)


def batches(dataset, geometry, rank, world, workers=0, steps=6, shuffle_shards=2):
    order = place_order(own_order(dataset, 1, shuffle_shards), geometry, 0)
    plan = StepPlan(*geometry, steps * geometry.size)
    return Batches(Task(), dataset, order, plan, World(rank=rank, size=world), seed=1, loading=Loading(workers, 2))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_order_is_equal_for_any_ranks_and_workers(folder):
    tokens(folder, 12)
    many = lockstep.shards(folder, seq_len=4, dtype="uint16")
    few = lockstep.shards([folder / "003.bin", folder / "001.bin"], seq_len=4, dtype="uint16")
    data = lockstep.mixture({"many": many, "few": few}, [(0, {"many": 1}), (4, {"many": 1, "few": 3})])
    found = {}
    for world in (1, 2, 3, 4):
        for workers in (0, 1, 4):
            micro = {}
            for rank in range(world):
                stream = batches(data, Geometry(16, 2), rank, world, workers, steps=3).micro(0)
                micro |= {(step, batch.index): batch.held for step, batch in stream if batch.weight}
            found[world, workers] = micro
    assert all(micro == found[1, 0] for micro in found.values())
    assert sorted(found[1, 0]) == [(step, micro) for step in range(3) for micro in range(8)]


def test_each_shard_is_fetched_by_few_ranks(folder, tmp_path):
    tokens(folder, 48)
    geometry, who, seen = Geometry(32, 4), Counter(), Counter()
    for rank in range(4):
        data = lockstep.shards(f"elsewhere://{folder}", seq_len=4, dtype="uint16", cache=tmp_path / str(rank))
        for _, batch in batches(data, geometry, rank, 4, steps=24).micro(0):
            seen.update(batch.held)
        fetched = [path for path in (tmp_path / str(rank)).iterdir() if path.suffix == ".shard"]
        who.update(path.name for path in fetched)
        assert data.fetches == len(fetched) < 20  # of 48
    assert set(seen.values()) == {1}
    assert len(seen) == 48 * 16
    assert len(who) == 48
    assert max(who.values()) <= 2


# --- the cache


def test_a_cache_is_bounded(folder, cache):
    tokens(folder, 10)
    data = lockstep.shards(f"elsewhere://{folder}", seq_len=4, dtype="uint16", cache_size=500)
    assert data.fetches == 0  # tokens are counted by their size
    for index in (0, 16, 32, 48, 0, 64):
        assert first(data, [index]) == [4 * index]
        assert used(cache) <= 500
    assert data.fetches == 5  # what is open stays open
    with refuses(ConfigError, "cache_size", "100 B"):
        first(lockstep.shards(f"elsewhere://{folder}", seq_len=4, dtype="uint16", cache_size=100), [0])


def used(cache):
    """Bytes of the shards in the cache, at a moment at which none of them is removed."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return sum(each.stat().st_size for each in cache.iterdir() if each.suffix == ".shard")


def read_all(number, folder, cache, limit, results):
    data = lockstep.shards(f"elsewhere://{folder}", seq_len=4, dtype="uint16", cache=cache, cache_size=limit)
    most = 0
    for turn in range(4):
        for shard in np.random.default_rng(turn + 9 * number).permutation(12).tolist():
            assert first(data, [16 * shard + 3]) == [4 * (16 * shard + 3)]
            data._open.clear()  # so that the cache is asked each time
            most = max(most, used(cache))
    results.put((most, data.fetches))


def read_on_a_full_disk(folder, results):
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))  # bytes of a file
    try:
        first(lockstep.shards(f"elsewhere://{folder}", seq_len=4, dtype="uint16"), [0])
    except ConfigError as error:
        results.put(str(error))


def test_full_disk_names_the_cache_and_leaves_no_partial_file(folder, cache):
    tokens(folder, 2)
    results = multiprocessing.SimpleQueue()
    process = multiprocessing.Process(target=read_on_a_full_disk, args=(folder, results))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert names(results.get(), str(cache), "`cache`")
    assert not list(cache.glob("*.shard*")) + list(cache.glob(".*.tmp-*"))


def test_a_file_that_another_process_removes_is_made_again(folder, cache, monkeypatch):
    tokens(folder, 3)
    removed = set()
    get = ShardCache.get

    def get_and_lose(self, name, *args):
        path = get(self, name, *args)
        if name not in removed:
            removed.add(name)
            path.unlink()
        return path

    monkeypatch.setattr(ShardCache, "get", get_and_lose)
    data = lockstep.shards(f"elsewhere://{folder}", seq_len=4, dtype="uint16", cache=cache)
    assert len([data[index] for index in range(len(data))]) == len(data) > 0
    assert any(name.endswith(".index.json") for name in removed)
    assert len(removed) == 4


def test_two_processes_share_a_cache(folder, cache):
    tokens(folder, 12)
    results = multiprocessing.SimpleQueue()
    processes = [
        multiprocessing.Process(target=read_all, args=(number, folder, cache, 700, results)) for number in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for _ in processes:
        most, fetches = results.get()
        assert most <= 700
        assert fetches > 12
    results.close()
    assert [path.name for path in cache.iterdir() if path.name.startswith(".") and path.name != ".lock"] == []


def test_a_process_that_died_leaves_its_room_to_others(cache):
    cache.mkdir(parents=True)
    (cache / ".gone.400.claim").touch()
    (cache / ".gone.tmp-0123456789abcdef").write_bytes(b"x" * 400)
    path = ShardCache(cache, 500, "here").get("new", 300, lambda part: part.write_bytes(b"y" * 300))
    assert path.read_bytes() == b"y" * 300
    assert sorted(each.name for each in cache.iterdir() if each.name != ".lock") == ["new"]


def test_files_that_fit_one_at_a_time_do_not_wait_for_each_other(cache):
    def get(letter, size):
        for number in range(4):
            cached = ShardCache(cache, 100, "here")
            cached.get(f"{letter}{number}", size, lambda part: (time.sleep(0.02), part.write_bytes(b"x" * 60)))

    threads = [threading.Thread(target=get, args=given, daemon=True) for given in (("a", 60), ("b", 60), ("c", 30))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("content", [b"", b"{", b"x" * 200])
def test_what_is_damaged_in_the_cache_is_made_again(folder, cache, content, caplog):
    pq.write_table(TABLE, folder / "a.parquet")
    for name in ("*.shard", "*.index.json"):
        for path in cache.glob(name):
            path.write_bytes(content)
        data = lockstep.shards(f"elsewhere://{folder}")
        assert [int(data[i]["x"]) for i in range(len(data))] == [*range(25)]
    assert "is made again" in caplog.text


# --- shards that change


def damage(path, how):
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, path.stat().st_size - 10)
    else:
        content = bytearray(path.read_bytes())
        content[5] ^= 1
        path.write_bytes(content)
        if how == "content":  # and the time of modification is as before
            os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("how", ["missing", "truncated", "changed", "content"])
@pytest.mark.parametrize("scheme", ["", "elsewhere://"])
def test_a_shard_that_is_not_as_it_was_is_one_line(folder, scheme, how):
    path = tokens(folder, 3) / "001.bin"
    os.utime(path, ns=(1, 1))
    if how == "content":
        assert lockstep.index_shards(folder, seq_len=4, dtype="uint16") == folder / "lockstep-index.json"
        size = path.stat().st_size
    data = lockstep.shards(f"{scheme}{folder}", seq_len=4, dtype="uint16")
    assert first(data, [0]) == [0]
    damage(path, how)
    with refuses(DataError, "001.bin", *([] if how != "truncated" else [130, 120])) as error:
        data[20]
    assert "\n" not in str(error.value)
    assert first(data, [1, 40]) == [4, 160]  # the others are as they were
    if how == "content":
        assert path.stat().st_size == size
        assert names(str(error.value), "xxh3_64")


def test_a_mapped_shard_that_becomes_shorter_is_no_crash(folder):
    data = lockstep.shards(tokens(folder, 1), seq_len=4, dtype="uint16")
    assert first(data, [2]) == [8]
    os.truncate(folder / "000.bin", 0)
    with refuses(DataError, "000.bin", 0, 130):
        data[3]


@pytest.mark.parametrize("name", ["a.tar", "a.arrow", "a.parquet"])
def test_a_file_that_is_truncated_from_the_start_is_one_line(folder, name):
    if name == "a.tar":
        tar(folder / name, 3)
    elif name == "a.arrow":
        write_arrow(folder / name, TABLE)
    else:
        pq.write_table(TABLE, folder / name)
    os.truncate(folder / name, (folder / name).stat().st_size // 3 // 512 * 512)
    with refuses(DataError, name) as error:
        lockstep.shards(folder)
    assert "\n" not in str(error.value)


# --- a server


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.refusals, self.delay, self.cut = folder, 0, 0.0, 0
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server = self.server
        if server.refusals:
            server.refusals -= 1
            self.send_error(503)
            return
        path = server.folder / self.path.strip("/")
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            time.sleep(server.delay)
            if server.cut:
                server.cut -= 1
                content = content[:20]
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(folder):
    with Server(tokens(folder, 3)) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_server_that_is_late_or_refuses_briefly_loses_nothing(server):
    data = lockstep.shards(f"{server.url}/{{000..002}}.bin", seq_len=4, dtype="uint16")
    server.delay = 0.3
    assert first(data, [0]) == [0]
    server.delay, server.refusals = 0.0, 2
    assert first(data, [16]) == [64]
    server.cut = 1
    assert first(data, [32]) == [128]
    assert data.fetches == 3


def test_a_server_that_goes_on_to_fail_is_one_line(server, monkeypatch):
    data = lockstep.shards(f"{server.url}/{{000..002}}.bin", seq_len=4, dtype="uint16")
    server.refusals = 10**6
    with refuses(StorageError, f"{server.url}/000.bin") as error:
        RetryingDataset(data, retries=2, skips=9, rank=0)[0]  # no other sample takes its place
    assert "\n" not in str(error.value)
    server.refusals = 0
    (server.folder / "001.bin").unlink()
    with refuses(DataError, "001.bin"):
        data[16]
    monkeypatch.setattr(shard_cache, "_SILENCE", 0.1)
    data = lockstep.shards(f"{server.url}/002.bin", seq_len=4, dtype="uint16")
    server.delay = 0.5
    with refuses(StorageError, "002.bin", "does not answer"):
        data[0]
    assert first(lockstep.shards(server.folder / "000.bin", seq_len=4, dtype="uint16"), [5]) == [20]


# --- a run


class Numbers(lockstep.Task):
    reduction = "mean"

    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def model(self):
        return torch.nn.Linear(4, 1, dtype=torch.float64)

    def dataset(self, split):
        return lockstep.shards(f"elsewhere://{self.folder}", seq_len=4, dtype="uint16") if split == "train" else None

    def loss(self, model, batch):
        self.seen += batch["input_ids"][:, 0].tolist()
        return model(batch["input_ids"].double() / 1000).square().mean()


def test_a_run_in_shards_resumes_with_another_batch_size(folder, tmp_path):
    tokens(folder, 8)
    given = {"max_steps": 0, "num_epochs": 2, "data": {"shuffle_shards": 2}, "log_freq": 1}
    seen = []
    for size, stop in ((8, 8), (16, 0)):
        task = Numbers(folder)
        changes = given | {"batch_size": size, "micro_batch_size": 4, "stop_at": stop, "resume_anyway": True}
        with lockstep.Run(config(tmp_path / "runs", **changes), task, World()) as session:
            for count, _ in enumerate(session):
                if not count:
                    del task.seen[:-size]  # those of the trial
        seen += task.seen
    assert Counter(seen) == Counter({4 * index: 2 for index in range(128)})
    assert len(set(seen[:128])) == 128
    records = [json.loads(line) for line in (tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()]
    assert max(record.get("loading/fetched", 0) for record in records) > 0
    os.truncate(folder / "000.bin", 30)
    with refuses(lockstep.errors.ResumeError, "other training data"):
        changes = given | {"batch_size": 16, "micro_batch_size": 4, "extend_to": "3epochs"}
        lockstep.train(config(tmp_path / "runs", **changes), Numbers(folder), World())


# --- what is refused


@pytest.mark.parametrize(
    ("source", "given", "kind", "named"),
    [
        ("nothing", {}, DataError, ["nothing"]),
        ("empty", {}, DataError, ["empty", "format"]),
        ("both", {}, DataError, ["several formats"]),
        ("000.bin", {}, ConfigError, ["seq_len"]),
        ("000.bin", {"seq_len": 1000, "dtype": "uint16"}, DataError, ["000.bin"]),
        ("000.bin", {"format": "csv"}, ConfigError, ["csv", "parquet"]),
        ("both", {"format": "mds"}, DataError, ["index.json"]),
        ("000.bin", {"cache_size": 0}, ConfigError, ["cache_size"]),
        ("a.arrow", {"row_format": "pandas"}, ConfigError, ["row_format", "pandas"]),
    ],
)
def test_bad_input_is_one_line(folder, source, given, kind, named):
    tokens(folder, 1)
    (folder / "empty").mkdir()
    (folder / "both").mkdir()
    tar(folder / "both" / "a.tar", 1)
    pq.write_table(TABLE, folder / "both" / "a.parquet")
    write_arrow(folder / "a.arrow", TABLE)
    with refuses(kind, *named) as error:
        lockstep.shards(folder / source, **given)
    assert "\n" not in str(error.value)


def test_a_store_that_fsspec_does_not_know_is_refused():
    with refuses(ConfigError, "nosuch"):
        lockstep.shards("nosuch://bucket/a.tar")
    with refuses(ConfigError, "mixes"):
        lockstep.shards(["a.tar", "s3://bucket/b.tar"])
