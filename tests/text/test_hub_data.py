"""Tables and hub data: which text is learned, how it is split and packed, and that it is prepared once."""

import bz2
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import hub_files
import pyarrow as pa
import pytest
import torch
import warm
from refusals import names, refuses

from lockstep.config.schema import Config
from lockstep.config.sections import Data
from lockstep.data.batches import Batches, StepPlan
from lockstep.data.sampler import Shuffled
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError
from lockstep.models.hf import HubTokenizer
from lockstep.tasks.language_model import corpus_for, hub_task
from lockstep.text import hub, tables
from lockstep.text.hub import DataRequest, open_rows, reader, table_files
from lockstep.text.token_store import TokenizerToTrain, _progress
from lockstep.training.start.named_task import make_task

pytestmark = pytest.mark.usefixtures("no_network")


def corpus(name, own=None, say=lambda line: None, seq_len=16, tokenizer="", seed=0, **options):
    data = Data(**{"packing": "stream", **options})
    config = Config(
        dataset_name=str(name), seq_len=seq_len, tokenizer=str(tokenizer), seed=seed, data=data, batch_size=4
    )
    return corpus_for(config, own or (lambda: TokenizerToTrain(300)), say).corpus


def stream(samples):
    return [token for sample in samples for token in sample["input_ids"].tolist()]


def documents(found):
    """The documents of both splits as texts, from a stream."""
    texts = []
    for samples in (found.train, found.evaluation):
        tokens = [int(token) for token in samples._tokens]
        document = []
        for token in tokens:
            if token == found.separator:
                texts.append(found.decode(document))
                document = []
            else:
                document.append(token)
    return texts


def test_every_kind_of_table_gives_the_same_documents(tmp_path):
    records = [{"text": text} for text in hub_files.texts(30)]
    hub_files.write_jsonl(tmp_path / "a.jsonl", records)
    hub_files.write_parquet(tmp_path / "a.parquet", records)
    (tmp_path / "a.csv").write_text("text\n" + "".join(f'"{record["text"]}"\n' for record in records))
    (tmp_path / "a.json").write_text("[" + ",".join(f'{{"text": "{record["text"]}"}}' for record in records) + "]")
    found = [documents(corpus(tmp_path / f"a.{kind}")) for kind in ("jsonl", "parquet", "csv", "json")]
    assert found[0] == found[1] == found[2] == found[3]
    assert sorted(found[0]) == sorted(record["text"] for record in records)


def test_instructions_become_prompts(tmp_path):
    with_input, without = {"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Go.", "output": "ok"}
    read = reader({"instruction": True, "input": True, "output": True}, "", "x", answers=True)
    assert read(with_input).text.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3")
    assert read({**without, "input": None}).text.endswith("request.\n\n### Instruction:\nGo.\n\n### Response:\nok")
    texts = documents(corpus(hub_files.write_jsonl(tmp_path / "a.jsonl", hub_files.rows(12))))
    assert sorted(texts) == sorted(read(row).text for row in hub_files.rows(12))


@pytest.mark.parametrize(
    ("columns", "wanted", "expected"),
    [
        ({"text": True, "instruction": True, "output": True}, "", "the text"),
        ({"label": False, "body": True}, "", "the body"),
        ({"a": True, "b": True}, "b", "the b"),
    ],
)
def test_the_text_column_is_found_or_named(columns, wanted, expected):
    assert reader(columns, wanted, "x", answers=False)({name: f"the {name}" for name in columns}).text == expected


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [("body", "no column 'body'"), ("", "no column 'text', 'messages' or 'conversations'"), ("n", "no text")],
)
def test_a_missing_column_lists_those_that_there_are(tmp_path, wanted, problem):
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", [{"title": "a", "story": "b", "n": 1}] * 4)
    with pytest.raises(DataError, match=rf"{problem}.*its columns: title, story, n;"):
        corpus(path, text_column=wanted)
    assert not list((tmp_path / "cache").glob("tokens-*/"))


def test_a_csv_in_an_odd_encoding(tmp_path):
    path = tmp_path / "a.csv"
    text = "text\n" + "drei Flüsse in Köln\n" * 90
    path.write_bytes(text.encode("cp1252"))
    with pytest.raises(DataError, match=r"a.csv is not utf-8 .*--data.encoding cp1252") as caught:
        corpus(path)
    assert "\n" not in str(caught.value)
    assert set(documents(corpus(path, encoding="cp1252"))) == {"drei Flüsse in Köln"}
    for encoding in ("utf-16", "utf-8-sig"):  # a mark at the beginning says which
        path.write_bytes(text.encode(encoding))
        assert set(documents(corpus(path))) == {"drei Flüsse in Köln"}
    with pytest.raises(DataError, match="--data.encoding runes is unknown"):
        corpus(path, encoding="runes")


def test_a_folder_has_the_splits_that_its_files_are_named_after(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "README.md").write_text("about")
    hub_files.write_parquet(folder / "train-00000-of-00001.parquet", [{"text": f"add {n}"} for n in range(30)])
    hub_files.write_parquet(folder / "validation-00000-of-00001.parquet", [{"text": f"rivers {n}"} for n in range(9)])
    found = corpus(folder, seq_len=4)
    assert sum("add" in text for text in documents(found)) == 30
    assert documents(found)[-9:] == [f"rivers {n}" for n in range(9)]
    with pytest.raises(DataError, match=r"--data.split test: .* has the splits train, validation"):
        corpus(folder, seq_len=4, split="test")
    assert len(documents(corpus(folder, seq_len=4, split="train[:50%]"))) == 15 + 9


def test_two_rows_are_enough_for_both_splits(tmp_path):
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in hub_files.texts(2)])
    found = corpus(path, seq_len=4)
    assert sorted(documents(found)) == sorted(hub_files.texts(2))
    assert min(len(found.train), len(found.evaluation)) > 0


def test_folder_of_tables_is_selected_by_subset_and_read_whole(tmp_path):
    """A file that `datasets` would leave out by its name or kind is an error with its name."""
    asked = []

    def load_dataset_builder(**given):
        asked.append(given)
        found = {"train": [str(tmp_path / "a.csv")]}
        return SimpleNamespace(config=SimpleNamespace(data_files=found), builder_configs={})

    package = SimpleNamespace(load_dataset_builder=load_dataset_builder)
    (tmp_path / "a.csv").write_text("text;n\nadd;1,5\n", encoding="utf-8-sig")
    said = []
    tables.open_tables(package, DataRequest(str(tmp_path), subset="small"), tmp_path, said.append)
    wanted = {"path": str(tmp_path), "name": "small", "cache_dir": str(tmp_path)}
    assert asked == [wanted, {**wanted, "encoding": "utf-8-sig", "sep": ";", "decimal": ","}]
    assert names(said.pop(), "semicolons", "','")
    (tmp_path / "b.jsonl").write_text("{}")
    (tmp_path / "c.pdf").write_text("x")
    with refuses(DataError, "b.jsonl", "c.pdf", "2 of 3", "--data.skip"):
        tables.open_tables(package, DataRequest(str(tmp_path)), tmp_path, print)


@pytest.mark.parametrize(
    ("begin", "problem"), [("a,b\n1,2,3\n", "2 names"), ("1.5,2\n3,4\n", "'1.5'"), ("a,a\n1,2\n", "'a' twice")]
)
def test_a_csv_whose_first_line_names_no_columns_is_refused(tmp_path, begin, problem):
    (tmp_path / "a.csv").write_text(begin * 2)
    with refuses(DataError, "a.csv", problem):
        corpus(tmp_path / "a.csv")


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".tsv", ".csv.bz2"])
def test_compressed_tables_and_other_separators_are_read(tmp_path, suffix):
    texts = hub_files.texts(20)
    content = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts)
    if "sv" in suffix:
        content = "n\ttext\n" + "".join(f"1\t{text}\n" for text in texts)
    packing = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": lambda data: pa.compress(data, "zstd", asbytes=True)}
    path = tmp_path / f"a{suffix}"
    path.write_bytes(packing.get(path.suffix, bytes)(content.encode()))
    assert sorted(documents(corpus(path))) == sorted(texts)
    if path.suffix in packing:
        path.write_bytes(path.read_bytes()[:-20])
        with refuses(DataError, path.name):
            corpus(path)


def test_a_folder_of_text_stays_text(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    hub_files.write_jsonl(tmp_path / "b.jsonl", [{"text": "a"}])
    assert table_files(str(tmp_path)) == []
    assert table_files(str(tmp_path / "b.jsonl")) == [tmp_path / "b.jsonl"]
    assert table_files("builtin:stdlib") == table_files(str(tmp_path / "a.py")) == []


def test_the_evaluation_part_is_the_same_for_every_seed_of_a_run(tmp_path):
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", [{"text": f"name {number}"} for number in range(40)])
    parts = {seed: corpus(path, seed=seed, evaluation=0.2, seq_len=4) for seed in (0, 1)}
    assert parts[0].fingerprint == parts[1].fingerprint
    assert len(documents(parts[0])) == len(set(documents(parts[0]))) == 40
    evaluated = [int(token) for token in parts[0].evaluation._tokens].count(parts[0].separator)
    assert evaluated == 8


def grouped(tokenized, size):
    """`group_texts` of run_clm_no_trainer.py, said in other words: the rest of each thousand is dropped."""
    blocks = []
    for start in range(0, len(tokenized), 1000):
        joined = [token for tokens in tokenized[start : start + 1000] for token in tokens]
        blocks += [joined[at : at + size] for at in range(0, len(joined) - size + 1, size)]
    return blocks


def test_blocks_are_those_of_the_source_script(tmp_path, model_folder):
    texts = hub_files.texts(1234)
    folder = tmp_path / "data"
    folder.mkdir()
    hub_files.write_parquet(folder / "train.parquet", [{"text": text} for text in texts])
    hub_files.write_parquet(folder / "test.parquet", [{"text": text} for text in texts[:20]])
    found = corpus(folder, tokenizer=model_folder, packing="blocks", seq_len=32)
    tokenizer = HubTokenizer(str(model_folder), cache=tmp_path, say=print)
    expected = grouped(tokenizer.encode_all(texts), 32)
    samples = found.train.__getitems__(range(len(found.train)))
    assert [sample["input_ids"].tolist() for sample in samples] == expected
    assert samples[5]["labels"].tolist() == [*expected[5][1:], -100]
    assert found.train.items_per_sample == 31
    with pytest.raises(IndexError):
        found.train[len(expected)]


def test_no_rank_has_a_part_of_its_own_that_could_be_shorter(tmp_path):
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", hub_files.rows(61))
    samples = corpus(path, seq_len=32, labels="all").train
    config = Config(dataset_name=str(path), seq_len=32, batch_size=6, micro_batch_size=1)
    config = replace(config, data=Data(vocab_size=300, labels="all"))
    task = make_task(config, lambda line: None)
    for size in (2, 3, 5):
        worlds = [World(rank=rank, size=size) for rank in range(size)]
        step_plan = StepPlan(6, 1, len(samples))  # an epoch, whose last step is short
        feeds = [
            list(Batches(task, samples, Shuffled(len(samples), 0), step_plan, world).from_step(0)) for world in worlds
        ]
        shapes = [[(step, len(micro)) for step, micro in feed] for feed in feeds]
        assert all(shape == shapes[0] for shape in shapes)  # the same steps, the same slots: no rank waits for another
        items = sum(batch.items for feed in feeds for _, micro in feed for batch in micro)
        assert items == len(samples) * 32  # and every sample once


@pytest.mark.parametrize(
    ("size", "read", "told"),
    [(100, [1] * 100, [25, 50, 75, 100]), (0, [0], [100]), (1, [1], [100]), (100, [30, 30, 300], [30, 60, 100])],
)
def test_each_quarter_of_what_is_read_is_told_once(size, read, told):
    said = []
    report = _progress("train", SimpleNamespace(size=size, weigh=lambda example: example), said.append)
    for part in read:
        report([part])
    wanted = [f"tokenizing the train split: {share}%" for share in told]
    assert said == (wanted if any(read) else [])


def test_it_is_prepared_once_by_content(tmp_path, monkeypatch):
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", hub_files.rows(40))
    said = []
    first = corpus(path, say=said.append)
    assert said[0].startswith("preparing")
    assert "tokenizing the train split: 100%" in said
    said.clear()
    monkeypatch.setitem(sys.modules, "datasets", None)  # what is prepared needs the package no more
    path.touch()
    again = corpus(path.rename(tmp_path / "b.jsonl").rename(path), say=said.append, seq_len=32)
    assert (said, again.folder, again.fingerprint) == ([], first.folder, first.fingerprint)
    monkeypatch.undo()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    hub_files.write_jsonl(path, hub_files.rows(40, seed=1))
    assert corpus(path).fingerprint != first.fingerprint


SLOW = """
import sys, time
from lockstep.text import token_store
from lockstep.config.schema import Config
from lockstep.config.sections import Data
from lockstep.tasks.language_model import corpus_for
write = token_store.write_split
def slow(*arguments, **named):
    count = write(*arguments, **named)
    print("half", flush=True)
    time.sleep(60)
    return count
token_store.write_split = slow
config = Config(dataset_name=sys.argv[1], seq_len=16, data={"packing": "stream"})
corpus_for(config, lambda: token_store.TokenizerToTrain(300), lambda line: None)
"""


def test_interruption_leaves_nothing_that_looks_complete(tmp_path):
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", hub_files.rows(40))
    killed = subprocess.Popen([sys.executable, "-c", SLOW, str(path)], stdout=subprocess.PIPE, text=True)
    assert killed.stdout.readline() == "half\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    left = list((tmp_path / "cache").glob("tokens-*.tmp"))
    assert len(left) == 1
    found = corpus(path)
    assert sorted(documents(found)) == sorted(documents(corpus(path, cache=str(tmp_path / "other"))))
    assert not left[0].exists()


def test_many_processes_prepare_once(tmp_path):
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", hub_files.rows(40))
    code = SLOW.replace("time.sleep(60)", "time.sleep(0.5)").replace("lambda line: None", "print")
    started = [
        subprocess.Popen([warm.python(), "-c", code, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sum("preparing" in out for out in outs) == 1


def test_plain_text_needs_no_package_for_tables(tmp_path, model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "notes.md").write_text("\n".join(hub_files.texts(60)))
    config = Config(dataset_name=str(tmp_path / "notes.md"), model_name=str(model_folder), seq_len=16)
    assert len(make_task(config, lambda line: None).dataset("train")) > 10
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", hub_files.rows(40))
    with pytest.raises(DataError, match="install the extra hf of torch-lockstep"):
        corpus(path)


def test_tokenizers_by_name(tmp_path, model_folder):
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", hub_files.rows(60))
    texts = {"dataset_name": str(path), "seq_len": 16, "data": {"packing": "stream"}}
    config = Config(**texts, model_name=str(model_folder), tokenizer="train:280")
    task = make_task(config, print)
    assert task.corpus.vocab_size <= 280
    torch.manual_seed(0)
    assert task.model().config.vocab_size == task.corpus.vocab_size
    assert corpus(path, tokenizer=model_folder).vocab_size == 300
    (tmp_path / "t.txt").write_text("\n".join(hub_files.texts(60)))
    plain = make_task(Config(dataset_name=str(tmp_path / "t.txt"), seq_len=16, tokenizer="train:290"), lambda _: None)
    assert plain.corpus.vocab_size == 290
    for tokenizer, problem in (
        ("train:12", "at least 257"),
        ("train:x", "at least 257"),
        ("nowhere", "no such folder"),
    ):
        with pytest.raises(ConfigError, match=problem):
            corpus(path, tokenizer=tokenizer)


def test_a_tokenizer_with_more_tokens_than_its_pretrained_model(tmp_path):
    hub_files.write_model(tmp_path / "small", weights=True, vocab_size=290)
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", hub_files.rows(40))
    base = {
        "dataset_name": str(path),
        "model_name": str(tmp_path / "small"),
        "seq_len": 16,
        "data": {"packing": "stream"},
    }
    with pytest.raises(ConfigError, match=r"its tokenizer has 300 tokens and .* 290, .*resize_token_embeddings"):
        hub_task(Config(**base, model={"pretrained": True}), print)
    with pytest.raises(ConfigError, match=r"--tokenizer has 300 tokens and .* 290; drop --tokenizer"):
        hub_task(Config(**base, tokenizer=str(tmp_path / "small"), model={"pretrained": True}), print)
    assert hub_task(Config(**base), print).model().config.vocab_size == 300


def test_what_does_not_fit_is_said_before_anything_is_prepared(tmp_path, model_folder):
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", hub_files.rows(40))
    base = {"dataset_name": str(path), "model_name": str(model_folder)}
    with pytest.raises(ConfigError, match="--seq-len 65 is longer than the context"):
        hub_task(Config(**base, seq_len=65, preset="source"), print)
    task = hub_task(Config(**base, preset="source", data=Data(packing="blocks", evaluation=0.3)), print)
    assert task.corpus.train.seq_len == 64
    with pytest.raises(ConfigError, match="leaves a block nothing to predict"):
        hub_task(Config(**base, seq_len=1, data=Data(packing="blocks")), print)
    with pytest.raises(DataError, match=r"evaluation split has \d+ tokens, fewer than one window of --seq-len 64 \+ 1"):
        corpus(hub_files.write_jsonl(tmp_path / "b.jsonl", [{"text": "add"}] * 40), seq_len=64)
    with pytest.raises(DataError, match="--dataset-name .*: 1 row, "):
        corpus(hub_files.write_jsonl(tmp_path / "one.jsonl", [{"text": "a"}]))


def test_a_hub_dataset_is_asked_for_by_its_subset_and_revision(monkeypatch):
    """As `datasets` takes them, where the hub can be reached; without them its own defaults."""
    asked = []

    def load_dataset_builder(name, subset, revision):
        asked.append((name, subset, revision))
        return SimpleNamespace(hash="c0ffee")

    monkeypatch.setattr(hub, "_datasets", lambda wanted: SimpleNamespace(load_dataset_builder=load_dataset_builder))
    monkeypatch.setattr(hub, "reach", lambda say: True)
    chosen = open_rows(DataRequest("some/corpus", subset="small", revision="v2"), print)
    plain = open_rows(DataRequest("some/corpus"), print)
    assert asked == [("some/corpus", "small", "v2"), ("some/corpus", None, None)]
    assert chosen.revision == plain.revision == "c0ffee"
    assert chosen.digest != plain.digest


def test_a_hub_name_without_a_network_ends_at_once():
    began = time.monotonic()
    with pytest.raises(DataError, match=r"hub is unreachable; .*hf download some-one/some-data.*HF_HOME") as caught:
        open_rows(DataRequest("some-one/some-data"), lambda line: None)
    assert time.monotonic() - began < 10
    assert "\n" not in str(caught.value)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
