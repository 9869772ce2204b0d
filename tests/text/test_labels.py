"""Which tokens are learned: completions and the assistant's words, cut to the length of a sample, never silently."""

import json
import pickle

import hub_files
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import names, refuses

from lockstep.config.schema import Config
from lockstep.config.sections import Data
from lockstep.errors import DataError
from lockstep.models.hf import HubTokenizer, chat_tokens
from lockstep.tasks import language_model
from lockstep.tasks.language_model import corpus_for
from lockstep.text.documents import pack
from lockstep.text.hub import reader
from lockstep.text.token_store import TokenizerToTrain
from lockstep.training.start.named_task import make_task

pytestmark = pytest.mark.usefixtures("no_network")

# as ChatML has it, without and with marks around what the assistant writes; and one that changes earlier turns
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|endoftext|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}think {% endif %}"
    "{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [
    {"role": "user", "content": "name the rivers"},
    {"role": "assistant", "content": "three rivers"},
    {"role": "user", "content": "list colours"},
    {"role": "assistant", "content": "a short line"},
]


@pytest.fixture
def chat(tmp_path, model_folder):
    """Makes a tokenizer with a template."""

    def make(template):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "chat")
        return HubTokenizer(str(tmp_path / "chat"), cache=tmp_path, say=print)

    return make


def corpus(path, tokenizer=None, say=lambda line: None, seq_len=64, packing="padded", **data):
    config = Config(
        dataset_name=str(path), seq_len=seq_len, data=Data(packing=packing, **data), batch_size=4, precision="float64"
    )
    return corpus_for(config, lambda: tokenizer or TokenizerToTrain(300), say).corpus


def learned(found, sample):
    """The text that a sample's labels spell."""
    return found.decode([label for label in sample["labels"].tolist() if label >= 0])


def pairs(count):
    return [{"prompt": f"add {n}", "completion": f" name {n}."} for n in range(count)]


def test_a_completion_is_learned_and_its_prompt_is_not(tmp_path):
    found = corpus(hub_files.write_jsonl(tmp_path / "a.jsonl", pairs(40)))
    texts = {
        learned(found, sample)
        for part in (found.train, found.evaluation)
        for sample in map(part.__getitem__, range(len(part)))
    }
    assert texts == {f" name {n}." for n in range(40)}
    sample = found.train[3]
    assert sample["labels"][-1] == found.separator  # where it ends is learned too
    assert found.decode(sample["input_ids"].tolist()).startswith("add ")
    assert sample["input_ids"][0] == found.separator
    assert pickle.loads(pickle.dumps(found.train))[3]["labels"].equal(sample["labels"])
    assert found.train.items_per_sample is None


@pytest.mark.parametrize("packing", ["stream", "blocks", "padded", "documents"])
def test_the_same_tokens_are_learned_in_every_packing(tmp_path, packing):
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", pairs(80))
    found = corpus(path, packing=packing, labels="completion", seq_len=32, evaluation=0.3)
    labels = torch.cat([found.train[i]["labels"] for i in range(len(found.train))])
    words = found.decode(labels[labels >= 0].tolist())
    assert words.count("name") > 40
    assert "add" not in words
    everything = corpus(path, packing=packing, labels="all", seq_len=32, evaluation=0.3)
    assert "add" in learned(everything, everything.train[1])


def test_what_is_learned_where_nothing_is_said(tmp_path):
    alpaca = hub_files.write_jsonl(tmp_path / "a.jsonl", hub_files.rows(40))
    in_blocks = corpus(alpaca, packing="blocks", seq_len=32)
    assert in_blocks.train.items_per_sample == 31  # as the source script has it
    assert "Response" not in learned(*[(found := corpus(alpaca, seq_len=256)), found.train[0]])
    text = hub_files.write_jsonl(tmp_path / "t.jsonl", [{"text": text} for text in hub_files.texts(30)])
    assert (corpus(text, seq_len=256).train[0]["labels"] >= 0).all()
    with pytest.raises(DataError, match="--data.labels completion: "):
        corpus(text, labels="completion")


def test_text_next_to_instructions_is_ignored_for_answers(tmp_path):
    both = [{**row, "text": f"written out: {row['output']}"} for row in hub_files.rows(60)]
    path, told = hub_files.write_jsonl(tmp_path / "a.jsonl", both), []
    answers = {row["output"] for row in both}
    for data in ({}, {"labels": "completion"}, {"packing": "stream"}):
        found = corpus(path, seq_len=256, evaluation=0.3, say=told.append, **data)
        sample = found.train[0]
        assert found.decode(sample["input_ids"].tolist()).count("### Instruction:")
        assert "Instruction" not in learned(found, sample)
        assert any(answer in learned(found, sample) for answer in answers)
    assert any("learning from instruction and output; the column text is ignored" in line for line in told)
    for data in ({"labels": "all"}, {"packing": "blocks"}, {"text_column": "text"}):
        found = corpus(path, seq_len=256, evaluation=0.3, **data)
        assert "written out: " in learned(found, found.train[0])
        assert "Instruction" not in found.decode(found.train[0]["input_ids"].tolist())
    in_blocks = corpus(path, packing="blocks", labels="completion", seq_len=256, evaluation=0.3)
    assert "Instruction" not in learned(in_blocks, in_blocks.train[0])
    assert "Instruction" in in_blocks.decode(in_blocks.train[0]["input_ids"].tolist())
    with pytest.raises(DataError, match="--data.labels completion: "):
        corpus(path, labels="completion", text_column="text")


def test_rows_of_prompts_and_conversations_are_found_by_column():
    read = reader({"prompt": True, "response": True}, "", "x", answers=True)
    assert read({"prompt": "a", "response": "b"}).given == 1
    empty = read({"prompt": None, "response": None})  # a missing value is an empty text
    assert (empty.text, empty.given) == ("", 0)
    read = reader({"id": True, "messages": False}, "", "x", answers=True)
    assert read({"messages": [{"role": "user", "content": None, "tools": None}]}).messages == (
        {"role": "user", "content": ""},
    )
    assert reader({"text": True, "messages": False}, "", "x", answers=True)({"text": "a", "messages": TALK}).messages
    assert reader({"text": True, "messages": False}, "", "x", answers=False)({"text": "a"}).text == "a"
    with pytest.raises(DataError, match="'messages' must be a list of turns"):
        read({"messages": [{"name": "user"}]})
    with pytest.raises(DataError, match=r"no 'prompt' with 'completion'.*its columns: a, b"):
        reader({"a": True, "b": True}, "", "x", answers=True)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_words_are_learned(chat, template):
    tokenizer = chat(template)
    tokens, labelled = tokenizer.encode_chat(TALK, 0)
    theirs = tokenizer._tokenizer
    assert tokens == theirs.apply_chat_template(TALK, tokenize=True)["input_ids"]
    said = theirs.decode([token for token, mark in zip(tokens, labelled, strict=True) if mark])
    assert said == "three rivers<|endoftext|>a short line<|endoftext|>"
    assert all(tokenizer.encode_chat(TALK, 0, masked=False)[1])


def test_tools_beside_messages_reach_the_template_or_are_said(tmp_path, chat):
    """As a list of schemas or its JSON text; what a table fills into other rows' keys is not rendered."""
    schema = {"type": "function", "function": {"name": "add", "parameters": {"x": {"type": "number"}}}}
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN
    rendered = chat(template)._tokenizer.apply_chat_template(TALK, tools=[schema], tokenize=True)["input_ids"]
    for name, value in (("list", [schema]), ("text", json.dumps([schema]))):
        path = hub_files.write_jsonl(tmp_path / f"{name}.jsonl", [{"messages": TALK, "tools": value}] * 20)
        said = []
        found = corpus(path, chat(template), said.append, packing="padded", seq_len=400)
        assert found.train[0]["input_ids"].tolist() == rendered[:-1]
        assert not [line for line in said if "column tools" in line]
        corpus(path, chat(PLAIN), said.append, packing="padded", seq_len=400)
        assert [line for line in said if "column tools" in line]
    read = reader({"messages": False, "tools": False}, "", "x", answers=True)
    example = read({"messages": TALK, "tools": [{**schema, "strict": None}]})
    assert example.tools == (schema,)
    with refuses(DataError, "tools"):
        read({"messages": TALK, "tools": "add"})


def test_an_empty_file_is_named(tmp_path, chat):
    (tmp_path / "none.jsonl").touch()
    with refuses(DataError, "none.jsonl", "an empty file"):
        corpus(tmp_path / "none.jsonl", chat(PLAIN), packing="padded", seq_len=400)


def test_chats_of_sharegpt_are_read_as_messages(tmp_path, chat):
    turns = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in TALK]
    path = hub_files.write_jsonl(tmp_path / "s.jsonl", [{"id": "a", "conversations": turns}] * 20)
    plain = hub_files.write_jsonl(tmp_path / "m.jsonl", [{"messages": TALK}] * 20)
    both = [corpus(each, chat(PLAIN), packing="padded", seq_len=400) for each in (path, plain)]
    assert both[0].chat
    assert both[0].train[0]["labels"].tolist() == both[1].train[0]["labels"].tolist()
    read = reader({"conversations": False, "system": True}, "", "x", answers=True)
    row = {"conversations": [{"from": "observation", "value": "7", "weight": None}], "system": "short"}
    assert read(row).messages == ({"role": "system", "content": "short"}, {"role": "tool", "content": "7"})
    with refuses(DataError, "conversations", "from", "value"):
        read({"conversations": [{"value": "no role"}]})


@pytest.mark.parametrize(
    "turn", [{"from": "bot", "value": "x"}, {"role": "bot", "content": "x"}], ids=lambda turn: next(iter(turn))
)
def test_an_unknown_role_is_named_with_its_row(tmp_path, chat, turn):
    name = "messages" if "role" in turn else "conversations"
    asked = dict(zip(turn, ("user", "hi"), strict=True))
    path = hub_files.write_jsonl(tmp_path / "c.jsonl", [{name: [asked]}] * 5 + [{name: [asked, turn]}])
    with refuses(DataError, "row 5", "'bot'", "assistant", "gpt"):
        corpus(path, chat(PLAIN), packing="padded", evaluation=0.01)
    named = PLAIN + "{% if m is defined and m.role == 'bot' %}{% endif %}"
    assert corpus(path, chat(named), packing="padded", evaluation=0.01, labels="all").chat


def test_conversations_are_prepared_and_gone_on_with(tmp_path, chat):
    path = hub_files.write_jsonl(tmp_path / "c.jsonl", [{"messages": TALK}] * 20)
    found = corpus(path, chat(PLAIN), packing="documents")
    assert found.chat
    sample = found.train[0]
    assert learned(found, sample).startswith("three riversa short line")
    assert found.decode(found.encode_prompt("list colours")) == "<|user|>list colours<|assistant|>"
    assert found.opening()[:4] == sample["input_ids"][:4].tolist()


def test_what_a_template_cannot_tell_names_the_row(tmp_path, chat, model_folder):
    path = hub_files.write_jsonl(tmp_path / "c.jsonl", [{"messages": TALK[:2]}] * 3 + [{"messages": TALK}])
    with pytest.raises(DataError, match=r"row 3: .* message 1 .*--data.labels all"):
        corpus(path, chat(FORGETFUL), evaluation=0.01)
    corpus(path, chat(FORGETFUL), evaluation=0.01, labels="all")
    bare = HubTokenizer(str(model_folder), cache=tmp_path, say=print)
    with pytest.raises(DataError, match=r"row \d is a conversation, .* no chat template; .*--tokenizer"):
        corpus(path, bare)
    with pytest.raises(DataError, match="conversations .*--tokenizer"):
        corpus(path)
    with pytest.raises(DataError, match=r"row 7: .* chat template .*\(no\)"):
        chat_tokens(chat("{{ raise_exception('no') }}")._tokenizer, TALK, 7)


def test_examples_with_truncated_completions_are_counted(tmp_path):
    rows = pairs(30)
    rows[17] = {"prompt": "list the colours of the world " * 9, "completion": "no"}
    rows[18] = {"prompt": "add ", "completion": "name a line " * 30}
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", rows)
    said = []
    found = corpus(path, say=said.append, seq_len=40, evaluation=0.04)
    told = [line for line in said if "seq-len" in line]
    assert len(told) == 2
    assert names(told[0], "2 examples", "train split", "--seq-len 40")
    assert names(told[1], "1 example", "train split", "row 17", "--seq-len 40")
    assert len(found.train) == 28
    said.clear()
    corpus(path, say=said.append, seq_len=40, evaluation=0.04)
    assert said == told  # said at every start, though prepared once
    assert max(len(found.train[i]["labels"]) for i in range(28)) == 40


def test_nothing_to_learn_at_all_is_refused(tmp_path, chat):
    silent = hub_files.write_jsonl(tmp_path / "c.jsonl", [{"messages": TALK[:1]}] * 9)
    for packing in ("padded", "stream"):
        with pytest.raises(DataError, match=r"its train split has no labels: .*--data.labels all"):
            corpus(silent, chat(PLAIN), packing=packing, seq_len=8)


def test_long_texts_become_pieces_that_miss_no_token(tmp_path):
    path = hub_files.write_jsonl(
        tmp_path / "t.jsonl", [{"text": " ".join(hub_files.texts(9, seed))} for seed in range(6)]
    )
    for packing in ("padded", "documents"):
        said = []
        found, whole = (corpus(path, say=said.append, packing=kind, seq_len=16) for kind in (packing, "stream"))
        assert not [line for line in said if "--seq-len" in line]  # nothing is cut off
        labels = torch.cat([found.train[i]["labels"] for i in range(len(found.train))])
        assert sorted(labels[labels >= 0].tolist()) == sorted(whole.train._tokens.tolist())


@given(st.lists(st.integers(1, 50), max_size=80))
@settings(max_examples=60)
def test_windows_hold_every_document_once_and_are_well_filled(lengths):
    windows = pack(lengths, 50)
    assert sorted(document for window in windows for document in window) == list(range(len(lengths)))
    filled = [sum(lengths[document] for document in window) for window in windows]
    assert all(0 < size <= 50 for size in filled)
    assert len([size for size in filled if size <= 25]) <= 1  # two half-empty ones would be one
    assert windows == pack(list(lengths), 50)


def test_longest_come_first_and_go_to_the_tightest_fit():
    for lengths, room, wanted in (
        ([2, 2, 4, 4], 6, [{0, 3}, {1, 2}]),
        ([7, 6, 3, 4], 10, [{0, 2}, {1, 3}]),
        ([5, 5, 5], 10, [{0, 1}, {2}]),
        ([], 10, []),
    ):
        found = [set(window) for window in pack(lengths, room)]
        filled = [sorted(lengths[document] for document in window) for window in found]
        assert sorted(filled) == sorted(sorted(lengths[document] for document in window) for window in wanted)


def test_a_window_restarts_its_positions(tmp_path):
    found = corpus(hub_files.write_jsonl(tmp_path / "a.jsonl", pairs(40)), packing="documents", seq_len=48)
    for index in range(len(found.train)):
        sample = found.train[index]
        assert {len(values) for values in sample.values()} == {48}
        begun = torch.cat((torch.tensor([True]), sample["documents"].diff() != 0))
        assert (sample["positions"][begun] == 0).all()
        assert (sample["positions"].diff()[~begun[1:]] == 1).all()
    assert sum(int((found.train[i]["labels"] == found.separator).sum()) for i in range(len(found.train))) == 38
    for index in (-1, len(found.train)):
        with pytest.raises(IndexError):
            found.train[index]
    assert found.train.draws_random is False
    facts = json.loads((found.folder / "facts.json").read_text())
    assert facts["masked"] is True


def test_prompts_stay_apart_by_themselves_and_texts_do_not(tmp_path):
    found = {}
    for name, rows in (("prompts", pairs(30)), ("texts", [{"text": text * 9} for text in hub_files.texts(30)])):
        path = hub_files.write_jsonl(tmp_path / f"{name}.jsonl", rows)
        config = Config(dataset_name=str(path), data=Data(vocab_size=300))
        for context in (0, 64):
            chosen = corpus_for(config, lambda: TokenizerToTrain(300), print, context).corpus
            found[name, context] = chosen.packing, chosen.train.seq_len
        assert chosen.prompts == (name == "prompts")
    documents, tokens, labels = corpus(tmp_path / "prompts.jsonl").learned
    assert 20 < documents < 30
    assert 0 < labels < tokens
    assert found == {
        ("prompts", 0): ("padded", 1024),
        ("prompts", 64): ("padded", 64),
        ("texts", 0): ("stream", 128),
        ("texts", 64): ("stream", 64),
    }


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_an_answer_ends_where_the_template_ends_a_turn(tmp_path, chat, template, model_folder):
    tokenizer = chat(template)
    tokenizer._tokenizer.save_pretrained(tmp_path / "model")
    hub_files.gpt2_config().save_pretrained(tmp_path / "model")
    path = hub_files.write_jsonl(tmp_path / "c.jsonl", [{"messages": TALK}] * 20)
    task = make_task(Config(dataset_name=str(path), model_name=str(tmp_path / "model")), print)
    assert task.corpus.ends == [0]  # <|endoftext|>
    model = task.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the likeliest token is 0
    assert task.sample(model, torch.device("cpu")) == "<|user|>name the rivers<|assistant|>\n"


@pytest.mark.parametrize(("packing", "hub"), [("stream", False), ("documents", False), ("padded", True)])
def test_the_sample_of_text_begins_as_the_data_does_or_as_asked(tmp_path, model_folder, monkeypatch, packing, hub):
    monkeypatch.setattr(language_model, "_SAMPLE_TOKENS", 3)
    path = hub_files.write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "add three", "completion": f" {n}."} for n in range(30)]
    )
    for prompt in ("", "name the"):
        data = Data(packing=packing, vocab_size=300, prompt=prompt, evaluation=0.3)
        named = {"model_name": str(model_folder)} if hub else {}
        task = make_task(Config(dataset_name=str(path), seq_len=12, data=data, **named), print)
        torch.manual_seed(0)
        text = task.sample(task.model(), torch.device("cpu"))
        assert text.startswith(prompt or "add three")
        assert len(text) > len(prompt or "add three")
