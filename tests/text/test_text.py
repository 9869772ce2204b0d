"""The text corpus: what it takes, how it splits, what it writes, and what happens when preparing is interrupted."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from refusals import names, refuses
from torch.utils.data import DataLoader

from lockstep.errors import ConfigError, DataError
from lockstep.files import default_cache
from lockstep.text import sources
from lockstep.text.cache import alone
from lockstep.text.corpus import ByteBPE, Windows, token_type
from lockstep.text.hub import plain_rows
from lockstep.text.sources import find, pieces, split_files
from lockstep.text.token_store import Packing, TokenizerToTrain, prepare

WORDS = ["the", "a", "step", "rank", "loss", "batch", "seed", "data", "order", "köln", "東京", "🙂", "token\tline"]


def lines(count, seed=0):
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=9)) + "\n" for _ in range(count))


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    (root / "deep" / "er").mkdir(parents=True)
    for index in range(10):
        place = root / "deep" / "er" if index % 2 else root
        (place / f"{index}.txt").write_text(lines(40, seed=index), encoding="utf-8", newline="")
    return root


def opened(name, tmp_path, say=lambda line: None, **changed):
    settings = {"seq_len": 16, "vocab_size": 320, "eval_fraction": 0.2, "cache": tmp_path / "cache", **changed}
    rows, packing = plain_rows(str(name)), Packing("stream", settings["seq_len"], settings["eval_fraction"])
    tokenizer = TokenizerToTrain(settings["vocab_size"])
    return prepare(str(name), rows.digest, rows.documents, tokenizer, packing, cache=settings["cache"], say=say)


def all_tokens(windows):
    return np.fromfile(windows.path, dtype=token_type(windows.vocab_size)).tolist()


def documents(corpus):
    """The texts of both splits, decoded document by document."""
    found = []
    for windows in (corpus.train, corpus.evaluation):
        document = []
        for token in all_tokens(windows):
            if token == corpus.separator:
                found.append(corpus.decode(document))
                document = []
            else:
                document.append(token)
        assert document == []  # every document ends with a separator
    return found


def test_every_document_comes_back_whole_and_in_one_split(folder, tmp_path):
    texts = sorted(path.read_text(encoding="utf-8") for path in folder.rglob("*.txt"))
    corpus = opened(folder, tmp_path)
    assert sorted(documents(corpus)) == texts
    assert all_tokens(corpus.train).count(corpus.separator) == 8
    assert all_tokens(corpus.evaluation).count(corpus.separator) == 2


def test_windows_overlap_by_one_token_and_labels_are_shifted(folder, tmp_path):
    windows = opened(folder, tmp_path).train
    tokens = all_tokens(windows)
    assert len(windows) == (len(tokens) - 1) // 16
    for index in (0, 1, len(windows) - 1):
        sample = windows[index]
        assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
        assert sample["input_ids"].tolist() == tokens[index * 16 : index * 16 + 16]
        assert sample["labels"].tolist() == tokens[index * 16 + 1 : index * 16 + 17]
    for index in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows[index]


def test_a_batch_is_its_samples_also_in_workers(folder, tmp_path):
    windows = opened(folder, tmp_path).train
    several = windows.__getitems__([5, 0, 5])
    assert [sample["labels"].tolist() for sample in several] == [windows[i]["labels"].tolist() for i in (5, 0, 5)]
    assert windows.__getitems__([]) == []
    assert windows.draws_random is False
    loader = DataLoader(windows, batch_size=7, num_workers=2)
    assert torch.cat([batch["input_ids"] for batch in loader]).tolist() == [s["input_ids"].tolist() for s in windows]


def test_samples_pickle_as_a_path(folder, tmp_path):
    windows = opened(folder, tmp_path).train
    packed = pickle.dumps(windows)
    assert len(packed) < 1000
    assert pickle.loads(packed)[3]["labels"].tolist() == windows[3]["labels"].tolist()


def test_second_start_prepares_nothing_and_loads_no_tokenizer(folder, tmp_path, monkeypatch):
    first = opened(folder, tmp_path)
    monkeypatch.setattr(ByteBPE, "train", None)
    monkeypatch.setattr(ByteBPE, "load", None)
    said = []
    again = opened(folder, tmp_path, say=said.append, seq_len=32)
    assert said == []
    assert again.fingerprint == first.fingerprint
    assert again.folder == first.folder
    assert again.train.seq_len == 32


def test_preparing_twice_writes_the_same_bytes(folder, tmp_path):
    first, second = (opened(folder, tmp_path, cache=tmp_path / name) for name in ("one", "two"))
    names = sorted(path.name for path in first.folder.iterdir())
    assert names == ["evaluation.bin", "facts.json", "tokenizer.json", "train.bin"]
    for name in names:
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


@pytest.mark.parametrize("change", [{"vocab_size": 300}, {"eval_fraction": 0.3}])
def test_another_setting_is_another_corpus(folder, tmp_path, change):
    assert opened(folder, tmp_path).fingerprint != opened(folder, tmp_path, **change).fingerprint


def test_another_content_or_name_is_another_corpus(folder, tmp_path):
    prints = [opened(folder, tmp_path).fingerprint]
    (folder / "0.txt").write_text(lines(40, seed=99), encoding="utf-8")
    prints.append(opened(folder, tmp_path).fingerprint)
    (folder / "0.txt").rename(folder / "00.txt")
    prints.append(opened(folder, tmp_path).fingerprint)
    assert len(set(prints)) == 3


def test_fingerprint_does_not_depend_on_the_folders_place(folder, tmp_path):
    before = opened(folder, tmp_path).fingerprint
    assert opened(folder.rename(tmp_path / "elsewhere"), tmp_path).fingerprint == before


def test_the_vocabulary_is_learned_from_the_train_split_alone(folder, tmp_path):
    corpus = opened(folder, tmp_path)
    train, _ = split_files(find(str(folder)), 0.2, 0)
    assert ByteBPE.train((text for text, _ in pieces(train)), 320).encode(lines(3)) == corpus.encode(lines(3))
    assert corpus.vocab_size <= 320
    assert corpus.separator == corpus.vocab_size - 1


@pytest.mark.parametrize("text", ["plain", "  four\n\n\ttabs  ", "köln 東京 🙂\u2028", "\0\x7f", "<|end|>", ""])
def test_any_text_is_encoded_and_decoded(folder, tmp_path, text):
    corpus = opened(folder, tmp_path)
    tokens = corpus.encode(text)
    assert corpus.separator not in tokens
    assert corpus.decode([*tokens, corpus.separator]) == text


def test_a_single_file_is_split_after_a_line(tmp_path):
    file = tmp_path / "book.anything"
    file.write_text(lines(300), encoding="utf-8")
    train, evaluation = documents(opened(file, tmp_path, eval_fraction=0.1))
    assert train + evaluation == file.read_text(encoding="utf-8")
    assert train.endswith("\n")
    assert 0.08 < len(evaluation) / len(train + evaluation) < 0.12


def test_a_file_is_cut_at_a_lines_end_where_one_is_just_there(tmp_path):
    file = tmp_path / "rows.txt"
    file.write_text("123456789\n" * 10)
    for fraction, cut in ((0.2, 80), (0.21, 80), (0.19, 90), (0.3, 70)):
        (train,), (evaluation,) = split_files(find(str(file)), fraction, 0)
        assert (train.start, train.stop, evaluation.start, evaluation.stop) == (0, cut, cut, 100)


def test_a_single_line_is_split_between_characters(tmp_path):
    file = tmp_path / "line.txt"
    text = "".join(random.Random(0).choices("東京都道府県", k=600))
    file.write_text(text, encoding="utf-8")
    for fraction in (0.1, 0.2, 0.3331):
        assert "".join(documents(opened(file, tmp_path, eval_fraction=fraction))) == text


def test_line_ends_and_byte_order_marks_leave_no_trace(tmp_path):
    for kind, mark, end in (("unix", b"", b"\n"), ("other", b"\xef\xbb\xbf", b"\r\n")):
        for index in range(3):
            file = tmp_path / kind / f"{index}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(mark + lines(60, seed=index).encode().replace(b"\n", end))
    unix, other = (opened(tmp_path / kind, tmp_path) for kind in ("unix", "other"))
    # The split is by bytes, so the texts are compared, not the files.
    assert sorted(documents(unix)) == sorted(documents(other))


def test_a_folder_is_what_is_read_and_what_is_left_out_by_name(folder, tmp_path):
    """A hundredth may be left out with a line, more is an error; the links, hidden files and README are no data."""
    for name in (".hidden.txt", ".git/x.txt", "__pycache__/x.py", "a/code.PY", "empty.txt", "LICENSE"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("" if name == "empty.txt" else "x\n")
    said = []
    files = find(str(folder), say=said.append)
    names_found = [source.name for source in files]
    assert names_found == sorted(names_found)
    assert "a/code.PY" in names_found
    assert (len(files), said) == (12, [])
    (folder / "latin.txt").write_bytes("Köln\n".encode("latin-1") * 5)
    (folder / "picture.png").write_bytes(b"x")
    (folder / "circle").symlink_to(folder)
    with refuses(DataError, "latin.txt", "picture.png", "circle", "3 of 15", "--data.skip") as error:
        opened(folder, tmp_path)
    assert "\n" not in str(error.value)
    rows = plain_rows(str(folder), 0.3, said.append)
    assert names(said.pop(), "latin.txt", "3 of 15")
    tokenizer, packing = TokenizerToTrain(300), Packing("stream", 4, 0.2)
    prepared = prepare("x", rows.digest, rows.documents, tokenizer, packing, cache=tmp_path, say=said.append)
    assert len(documents(prepared)) == 11


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_compressed_text_has_the_tokens_of_its_content(folder, tmp_path, suffix):
    plain = opened(folder, tmp_path)
    packing = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard}[suffix]
    for path in sorted(folder.rglob("*.txt")):
        path.with_name(path.name + suffix).write_bytes(packing(path.read_bytes()))
        path.unlink()
    found = opened(folder, tmp_path / "other")
    assert sorted(documents(found)) == sorted(documents(plain))
    one = folder / f"0.txt{suffix}"
    (train,), (evaluation,) = split_files(find(str(one)), 0.2, 0)  # cut at a line of the content
    assert "".join(text for part in (train, evaluation) for text, _ in pieces([part])) == lines(40, seed=0)
    one.write_bytes(one.read_bytes()[:-20])
    with refuses(DataError, one):
        opened(folder, tmp_path)


def zstandard(data):
    return pytest.importorskip("pyarrow").compress(data, "zstd", asbytes=True)


def test_long_documents_are_read_in_pieces_that_end_with_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_PIECE", 100)
    file = tmp_path / "long.txt"
    file.write_text(lines(40), encoding="utf-8")
    train, _ = split_files(find(str(file)), 0.1, 0)
    found = list(pieces(train))
    assert len(found) > 5
    assert all(text.endswith("\n") for text, _ in found)
    assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
    assert file.read_text(encoding="utf-8").startswith("".join(text for text, _ in found))


def test_the_split_holds_when_another_file_comes(tmp_path):
    def evaluation(count):
        folder = tmp_path / str(count)
        folder.mkdir()
        for index in range(count):
            (folder / f"{index:03}.txt").write_text("x" * 100)
        return {span.path.name for span in split_files(find(str(folder)), 0.2, seed=0)[1]}

    before, after = evaluation(100), evaluation(105)
    assert (len(before), len(after)) == (20, 21)
    assert len(before & after) >= 15


def test_a_vocabulary_over_65536_is_written_in_four_bytes():
    assert token_type(65_536).itemsize == 2
    assert token_type(65_537).itemsize == 4


def test_the_standard_library_is_found_without_its_tests():
    names = [source.name for source in find("builtin:stdlib")]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"LOCKSTEP_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/lockstep"),
        ({"LOCKSTEP_CACHE": "~/d", "HOME": "/c"}, "/c/d"),
        ({"HOME": "/c"}, "/c/.cache/lockstep"),
    ],
)
def test_the_default_cache(monkeypatch, chosen, expected):
    for name in ("LOCKSTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert default_cache() == Path(expected)


# --- interruptions and neighbours

SCRIPT = """
import os, signal, sys
from pathlib import Path
from lockstep.text.token_store import TokenizerToTrain as Trained, prepare
from lockstep.text.token_store import Packing
from lockstep.text.hub import plain_rows

def say(line):
    print(line, flush=True)
    if line.startswith(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

name, cache, rows = sys.argv[1], Path(sys.argv[2]), plain_rows(sys.argv[1])
packing = Packing("stream", 16, 0.2)
corpus = prepare(name, rows.digest, rows.documents, Trained(320), packing, cache=cache, say=say)
print("opened", corpus.fingerprint, len(corpus.train), flush=True)
"""


def start(folder, tmp_path, killed_at="never"):
    command = [warm.python(), "-c", SCRIPT, str(folder), str(tmp_path / "cache"), killed_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_preparation_leaves_nothing_that_counts(folder, tmp_path):
    killed = start(folder, tmp_path, killed_at="tokenizing")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "cache").glob("*.tmp"))) == 1
    assert len(documents(opened(folder, tmp_path))) == 10
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_of_several_processes_one_prepares(folder, tmp_path):
    running = [start(folder, tmp_path) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert sum("learning" in output for output in outputs) == 1


def test_waiting_process_says_so_and_survives_the_others_death(folder, tmp_path):
    holder = (
        "from filelock import FileLock; import sys, time; l = FileLock(sys.argv[1]); l.acquire(); print(flush=True)"
    )
    lock = tmp_path / "cache" / f"tokens-{opened(folder, tmp_path, cache=tmp_path / 'first').fingerprint}.lock"
    lock.parent.mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", holder + "; time.sleep(60)", str(lock)], stdout=subprocess.PIPE, text=True
    )
    other.stdout.readline()
    said = []

    def say(line):
        said.append(line)
        if line.startswith("waiting"):
            other.kill()
            other.communicate()

    began = time.monotonic()
    opened(folder, tmp_path, say=say)
    assert time.monotonic() - began < 30
    assert said[0].startswith("waiting for another process")


def test_a_damaged_corpus_is_prepared_again(folder, tmp_path):
    corpus = opened(folder, tmp_path)
    (corpus.folder / "train.bin").write_bytes(b"\0")
    assert len(documents(opened(folder, tmp_path))) == 10
    (corpus.folder / "facts.json").write_text("{")
    assert len(documents(opened(folder, tmp_path))) == 10


def test_files_that_change_meanwhile_are_noticed(folder, tmp_path):
    def say(line):
        if line.startswith("learning"):
            (folder / "1.txt").write_text("new\n" * 100)

    with pytest.raises(DataError, match="files changed"):
        opened(folder, tmp_path, say=say)
    assert not list((tmp_path / "cache").glob("*.tmp"))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_file_that_vanishes_meanwhile_is_named(folder, tmp_path):
    def say(line):
        if line.startswith("learning"):
            for path in folder.rglob("*.txt"):
                path.unlink()

    with pytest.raises(DataError, match=r"cannot read .*\.txt any more"):
        opened(folder, tmp_path, say=say)


def test_the_record_says_what_the_corpus_is(folder, tmp_path):
    corpus = opened(folder, tmp_path)
    facts = json.loads((corpus.folder / "facts.json").read_text())
    assert facts["fingerprint"] == corpus.fingerprint
    assert facts["tokens"] == {"train": corpus.train.tokens, "evaluation": corpus.evaluation.tokens}


# --- bad input: one line, with the flag


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no such file or folder"),
        ("", "no such file or folder"),
        ("~nobody-of-this-name/x", "no such file or folder"),
        ("x" * 5000, "File name too long"),
        ("builtin:wikipedia", "the built-in corpus is builtin:stdlib"),
        ("bare", "has no text files"),
        ("blank", "none of its 1 files is UTF-8 text"),
        ("binary.txt", "none of its 1 files is UTF-8 text"),
    ],
)
def test_missing_or_empty_data_is_refused(tmp_path, monkeypatch, name, message):
    (tmp_path / "bare").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        opened(name, tmp_path)
    assert str(caught.value).startswith(f"--dataset-name {name}: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("count", "part"), [(2, "train"), (60, "evaluation")])
def test_a_split_shorter_than_one_window_is_refused(tmp_path, count, part):
    file = tmp_path / "short.txt"
    file.write_text("one two three\n" * count)
    with pytest.raises(DataError, match=rf"its {part} split has \d+ tokens, .*--seq-len 64 \+ 1"):
        opened(file, tmp_path, seq_len=64, eval_fraction=0.1)


def test_a_single_character_is_too_short(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(DataError, match="--seq-len 1"):
        opened(tmp_path / "x.txt", tmp_path, seq_len=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 256}, "vocab_size 256 is too small"),
    ],
)
def test_a_number_out_of_range_is_refused(folder, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        opened(folder, tmp_path, **change)


def test_a_cache_that_cannot_be_written_is_refused(folder, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="LOCKSTEP_CACHE"):
        opened(folder, tmp_path)


def test_a_full_disk_is_named_and_leaves_nothing(folder, tmp_path, monkeypatch):
    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ByteBPE, "save", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        opened(folder, tmp_path)
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError, match=r"cannot read .*texts: Permission denied"):
        find(str(folder))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def homeless():
        raise RuntimeError

    for name in ("LOCKSTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="LOCKSTEP_CACHE"):
        default_cache()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may read every file")
def test_a_file_that_may_not_be_read_is_named(folder, tmp_path):
    (folder / "0.txt").chmod(0)
    with pytest.raises(DataError, match=r"cannot read .*0\.txt"):
        opened(folder, tmp_path)


def test_an_empty_token_file_has_no_samples(tmp_path):
    (tmp_path / "none.bin").touch()
    assert len(Windows(tmp_path / "none.bin", 300, 4)) == 0


def test_held_out_files_do_not_depend_on_the_folders_order():
    files = [sources.TextFile(name, Path(name), 100, "", True) for name in "abcdefgh"]
    chosen = sources._choose_evaluation(files, 300.0, 5)
    assert len(chosen) == 3
    assert sources._choose_evaluation(files[::-1], 300.0, 5) == chosen
    assert {source.name for source in chosen} != {"a", "b", "c"}


def test_the_lock_of_a_folder_makes_the_folders_above_it(tmp_path):
    with alone(tmp_path / "a" / "b" / "c", pytest.fail, "it"):
        assert (tmp_path / "a" / "b").is_dir()
