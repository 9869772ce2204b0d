"""`lockstep data`: shards hold the whole data whatever wrote them, and what stops it, or damages them, is told."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import hub_files
import pytest
from refusals import names, refuses

from lockstep import cli
from lockstep.config.schema import Config
from lockstep.config.sections import Data
from lockstep.errors import ConfigError, DataError
from lockstep.tasks import prepare
from lockstep.tasks.language_model import corpus_for
from lockstep.text.token_store import TokenizerToTrain

pytestmark = pytest.mark.usefixtures("no_network")
ROWS = 60


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A jsonl file that makes several shards, which `shards` writes."""
    monkeypatch.setattr(prepare, "_open_data", small_ranges(prepare._open_data))
    path = tmp_path / "rows.jsonl"
    hub_files.write_jsonl(path, [{"text": text} for text in hub_files.texts(ROWS)])
    return path


def small_ranges(opened):
    """Cut the data into ranges of 1 KiB, which no flag does."""
    return lambda job, say: opened(replace(job, shard_size=1 << 10), say)


def run(*words):
    return cli.dispatch(["data", *map(str, words)])


def shards(source, out, *flags):
    cache = ["--cache", Path(out).parent / "cache"]
    assert run("prepare", source, "--out", out, "--tokenizer", "train:300", "--processes", 1, *cache, *flags) == 0
    return Path(out)


def corpus(name, **changed):
    data = {"packing": changed.pop("packing", "stream"), "cache": str(Path(name).parent / "cache")}
    config = Config(dataset_name=str(name), batch_size=4, data=Data(**data), **{"seq_len": 16, **changed})
    return corpus_for(config, lambda: TokenizerToTrain(300), lambda line: None).corpus


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".starts", ".labels")}


def texts(samples, found):
    """The texts of a split's documents; a stream's windows overlap by one token."""
    tokens = [token for part in samples._parts for token in part._tokens.tolist()]
    document, all_texts = [], []
    for token in tokens:
        if token == found.separator:
            all_texts.append(found.decode(document))
            document = []
        else:
            document.append(token)
    return all_texts


def test_shards_hold_each_document_once_in_the_runs_split(table, tmp_path):
    found, whole = corpus(shards(table, tmp_path / "out")), corpus(table)
    assert len(found.train.shard_sizes) > 2
    assert sorted(texts(found.train, found) + texts(found.evaluation, found)) == sorted(hub_files.texts(ROWS))
    document = [int(token) for token in whole.evaluation._tokens]
    assert [token for part in found.evaluation._parts for token in part._tokens.tolist()] == document
    assert found.train.tokens == whole.train.tokens
    assert found.fingerprint != whole.fingerprint


def test_text_files_are_cut_within_documents_and_end_them_once(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_open_data", small_ranges(prepare._open_data))
    (tmp_path / "long.txt").write_text("".join(f"line {k} of a long document\n" for k in range(200)))
    found = corpus(shards(tmp_path / "long.txt", tmp_path / "out"))
    assert len(found.train.shard_sizes) > 3
    assert len(texts(found.train, found)) == 1


@pytest.mark.parametrize("packing", ["padded", "documents"])
def test_a_sample_is_that_of_its_shard(table, tmp_path, packing):
    flags = ["--packing", packing, "--seq-len", 16]
    found = corpus(shards(table, tmp_path / "out", *flags), packing=packing)
    train, samples = found.train, list(range(len(found.train)))[::-3]
    flat = [(part, index) for part in train._parts for index in range(len(part))]
    for index, sample in zip(samples, train.__getitems__(samples), strict=True):
        part, own = flat[index]
        assert all((sample[name] == value).all() for name, value in part[own].items())
    if packing == "padded":
        assert train.longest(samples) == max(len(train[index]["input_ids"]) for index in samples)
    with pytest.raises(IndexError):
        train[len(train)]
    with refuses(DataError, "--data.packing", packing, "--seq-len", 16):
        corpus(tmp_path / "out", packing=packing, seq_len=32)


def test_what_was_written_is_kept_when_the_disk_is_full(table, tmp_path, monkeypatch, capsys):
    whole, written = contents(shards(table, tmp_path / "whole")), []

    def full(job, facts, shard, write=prepare._write_shard):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(shard.name)
        return write(job, facts, shard)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_write_shard", full)
        with refuses(ConfigError, "--out", "No space left on device"):
            shards(table, tmp_path / "out")
    with refuses(DataError, "--out", tmp_path / "out"):
        corpus(tmp_path / "out")
    (tmp_path / "out" / f"{written[1]}.bin").write_bytes(b"")  # as after a power cut
    capsys.readouterr()
    shards(table, tmp_path / "out")
    assert names(capsys.readouterr().err, "1 of")
    assert contents(tmp_path / "out") == whole
    assert run("inspect", tmp_path / "out", "--verify") == 0


def test_any_number_of_processes_writes_the_same(tmp_path):
    """Shards of real processes; the data is larger than a shard of 1 MiB."""
    (tmp_path / "a.txt").write_text("".join(f"{k} words of a file\n" for k in range(60_000)))
    out = shards(tmp_path / "a.txt", tmp_path / "one", "--shard-mib", 1)
    assert len(json.loads((out / "tokens.json").read_text())["shards"]["train"]) > 1
    both = shards(tmp_path / "a.txt", tmp_path / "two", "--shard-mib", 1, "--processes", 2)
    assert contents(out) == contents(both)


def test_ctrl_c_while_processes_start_is_one_line(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{k} words of a file\n" for k in range(60_000)))
    words = ["data", "prepare", tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "train:300"]
    words += ["--shard-mib", "1", "--processes", "2"]
    command = [sys.executable, "-m", "lockstep", *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 3:  # multiprocessing's tracker of resources, and two that tokenize
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.15)  # they import
    os.killpg(process.pid, signal.SIGINT)
    lines = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 130
    assert [line for line in lines if "vocabulary" not in line] == ["lockstep: interrupted"]


@pytest.mark.slow
def test_a_killed_process_is_told_and_finished_shards_are_kept(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{k} words of a file\n" for k in range(400_000)))
    words = ["data", "prepare", tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "train:300"]
    words += ["--shard-mib", "1", "--processes", "2"]
    command = [sys.executable, "-m", "lockstep", *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not list((tmp_path / "out").glob("train-*.json")):
        assert process.poll() is None
        time.sleep(0.05)
    pids = [int(pid) for pid in children.read_text().split()]
    tokenizing = [pid for pid in pids if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(tokenizing[0], signal.SIGKILL)
    lines = process.communicate(timeout=100)[1].splitlines()
    assert process.returncode == 2
    names(lines[-1], "--processes")
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=100, check=True).stderr
    assert "are there already" in done


def test_damage_is_told_by_file(table, tmp_path, capsys):
    out = shards(table, tmp_path / "out")
    assert run("inspect", out, "--sample", 0) == 0
    file = out / "train-00001.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run("inspect", out) == 0  # the sizes alone
    capsys.readouterr()
    assert run("inspect", out, "--verify") == 3
    assert names(capsys.readouterr().out, file.name)
    file.write_bytes(content[:-1])
    assert run("inspect", out, "--json") == 3
    assert [names(line, file.name) for line in json.loads(capsys.readouterr().out.splitlines()[-1])["damage"]] == [True]
    with refuses(DataError, "--dataset-name", file.name):
        corpus(out)
    file.unlink()
    with refuses(DataError, "--dataset-name", file.name):
        corpus(out)


def test_bad_input_writes_nothing(table, tmp_path):
    out = shards(table, tmp_path / "out")
    before = contents(out)
    for flag, value in (("--tokenizer", "train:400"), ("--shard-mib", 2), ("--seq-len", 8)):
        with refuses(ConfigError, "--out", flag):
            shards(table, out, "--packing", "padded", flag, value)
    with refuses(ConfigError, "--out", tmp_path):
        shards(table, tmp_path)
    for flag, value in (("--processes", -1), ("--shard-mib", 0), ("--evaluation", 1.5), ("--seq-len", 0)):
        with refuses(ConfigError, flag, value):
            shards(table, tmp_path / "new", flag, value)
    with refuses(ConfigError, "--tokenizer", "nowhere"):
        shards(table, tmp_path / "new", "--tokenizer", "nowhere")
    with refuses(DataError, "--dataset-name", "absent.txt"):
        shards(tmp_path / "absent.txt", tmp_path / "new")
    with refuses(ConfigError, "--sample", 10_000):
        run("inspect", out, "--sample", 10_000)
    with refuses(ConfigError, "--tokenizer"):
        corpus(out, tokenizer="train:400")
    assert contents(out) == before
    assert not (tmp_path / "new" / "job.json").exists()
