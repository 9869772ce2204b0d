"""--task classification: a transformers model on a file of texts, the same bits on one rank and on two."""

import json
import os
import warnings

import hub_files
import pytest
import torch
from pictures_here import write_texts
from ranks import run
from refusals import refuses
from torch.nn import functional as F

import lockstep
from lockstep import checkpoint
from lockstep.cli import dispatch
from lockstep.config.schema import Config
from lockstep.errors import ConfigError, DataError, ResumeError
from lockstep.logging.jsonl import read
from lockstep.tasks.classification import make
from lockstep.training.inference import InferenceRequest, load_run

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts and with a small model of the GPT-2 kind, which has no token to fill a batch up with."""
    folder = tmp_path_factory.mktemp("classes")
    write_texts(folder / "texts.jsonl", 64)
    hub_files.write_model(folder / "gpt2", weights=True)
    return folder


def config(place, folder, **changes):
    named = {"model_name": str(place / "gpt2"), "dataset_name": str(place / "texts.jsonl")}
    settings = {"batch_size": 8, "micro_batch_size": 2, "max_steps": 4, "log_freq": 2, "seq_len": 16, "device": "cpu"}
    return Config(
        **{"task": "classification", "experiment_name": "r", "save_dir": str(folder), **named, **settings, **changes}
    )


def trained(world, place, folder, cache, runs):
    os.environ["LOCKSTEP_CACHE"] = str(cache)  # which the server that ranks are forked from does not know
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = []
    for name, changes in runs:
        result = lockstep.train(config(place, folder, experiment_name=name, exact=True, **changes), None, world)
        found.append(checkpoint.fingerprint(checkpoint.newest(result.folder, say=print)))
    return found


def recorded(folder, name="r"):
    record = [record for record in read(folder / name / "metrics.jsonl") if "evaluation/loss" in record][-1]
    return {key: record[f"evaluation/{key}"] for key in ("loss", "accuracy", "f1")}


def test_one_rank_and_two_have_the_same_bits_and_numbers(place, tmp_path, monkeypatch):
    for name in ("LOCKSTEP_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")  # which `trained` sets
    threads = torch.get_num_threads()
    try:  # here, where transformers is loaded already
        (one,) = trained(None, place, tmp_path, tmp_path / "cache", [("one", {})])
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    two = run(
        trained,
        2,
        place,
        tmp_path,
        tmp_path / "cache",
        [("two", {"data": {"workers": 1}, "eval_workers": 0})],
        timeout=250.0,
    )
    assert two == [[one], [one]]
    assert recorded(tmp_path, "one") == recorded(tmp_path, "two")


def test_batches_are_padded_and_the_loss_is_the_packages_own(place, tmp_path):
    transformers = pytest.importorskip("transformers")
    said = []
    task = make(config(place, tmp_path, precision="float64"), said.append)
    assert (task.classes, task.defaults) == (("town", "water"), "fine-tuning")
    training, evaluation = task.dataset("train"), task.dataset("evaluation")
    assert (len(training), len(evaluation)) == (58, 6)
    samples = training.__getitems__(list(range(5)))
    (empty,) = training.encoder.encode([""], None, 16)  # one padding token: no model takes a text of none
    samples.append((empty, 0))
    inputs, labels = batch = task.collate(samples)
    lengths = [len(sample["input_ids"]) for sample, _ in samples]
    assert len(set(lengths)) > 1
    assert inputs["input_ids"].shape == (6, max(lengths))
    assert inputs["attention_mask"].sum(1).tolist() == lengths
    assert max(lengths) <= 16
    texts = [len(training.texts[0][sample]) for sample in range(6)]
    assert task.work(training, range(6)) == 6 * min(max(texts), 5 * 16)
    assert task.work(training, [1]) == min(texts[1], 5 * 16)
    torch.manual_seed(0)
    model = task.model().double().eval()
    assert any("gpt2: newly initialised for 2 classes: score.weight" in line for line in said)
    loss, metrics = task.evaluate(model, batch)
    alone = [task.loss(model, task.collate([sample])) for sample in samples]  # without anything to fill up
    assert float(loss.detach()) == pytest.approx(float(sum(alone).detach()), rel=1e-9)
    theirs = transformers.GPT2ForSequenceClassification(model.config).double().eval()
    theirs.load_state_dict(model.state_dict())
    logits = theirs(**inputs).logits.detach()
    assert float(loss.detach()) == pytest.approx(float(F.cross_entropy(logits, labels, reduction="sum")), rel=1e-9)
    assert int(metrics["accuracy"][0]) == int((logits.argmax(1) == labels).sum())


def test_evaluate_and_export(place, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    sklearn = pytest.importorskip("sklearn.metrics")
    result = lockstep.train(config(place, tmp_path, max_steps=40, num_epochs=9, lr=1e-2, exact=True))
    shown = recorded(tmp_path)
    capsys.readouterr()
    assert dispatch(["evaluate", str(result.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"loss": found["loss"], **found["metrics"]} == shown
    with pytest.raises(ConfigError, match="trained TextClassification, .*lockstep evaluate"):
        dispatch(["generate", str(result.folder), "--prompt", "a"])
    assert dispatch(["export", str(result.folder), str(tmp_path / "hf"), "--format", "hf"]) == 0
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    assert back.config.id2label == {0: "town", 1: "water"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    task = make(config(place, tmp_path), print)
    texts, labels = task.dataset("evaluation").texts[0], task.dataset("evaluation").labels
    with torch.no_grad():
        logits = torch.cat(
            [back(**tokenizer(text, truncation=True, max_length=16, return_tensors="pt")).logits for text in texts]
        )
    best = logits.argmax(1)
    assert shown["accuracy"] == pytest.approx(float((best == labels).double().mean()))
    assert shown["f1"] == pytest.approx(sklearn.f1_score(labels, best, average="macro"), rel=1e-6)


def test_columns_and_classes_in_one_line(place, tmp_path):
    rows = [{"a": f"word {n}", "b": "other", "kind": n % 3, "part": n / 4} for n in range(12)]
    hub_files.write_jsonl(tmp_path / "pairs.jsonl", rows)
    named = {"dataset_name": str(tmp_path / "pairs.jsonl")}

    def refused(match, **data):
        with pytest.raises(DataError, match=match) as caught:
            make(config(place, tmp_path, **named, data=data), print)
        assert "\n" not in str(caught.value)

    refused(
        "has no column 'text' or 'sentence' .*; its columns: a, b, kind, part; name the one with --data.text-column"
    )
    refused("has no column 'c'; its columns: a, b, kind, part; name one with --data.text-column", text_column="c")
    refused("the column 'kind' has int64, not string", text_column="kind")
    refused("--data.text-column a,b,a names 3 columns", text_column="a,b,a")
    refused("has no column 'label' or 'labels' or 'class'; its columns", text_column="a")
    refused("has 0.25 in the column 'part'", text_column="a", label_column="part")
    refused("the column 'b' has one class, 'other'", text_column="a", label_column="b")
    task = make(config(place, tmp_path, **named, data={"text_column": "a,b", "label_column": "kind"}), print)
    assert task.classes == ("0", "1", "2")
    pair, single = task.dataset("train")[0][0], task.encoder.encode([task.dataset("train").texts[0][0]], None, 16)[0]
    assert len(pair["input_ids"]) > len(single["input_ids"])
    with pytest.raises(DataError, match="--task classification .*--dataset-name"):
        make(config(place, tmp_path, dataset_name=""), print)
    small = hub_files.write_model(tmp_path / "small", weights=True, vocab_size=200)
    for tokenizer, line in (
        ("", r"--model-name: its tokenizer has \d+ tokens and .*small 200; "),
        (str(place / "gpt2"), r"--tokenizer .*gpt2 has \d+ tokens and .*small 200; "),
    ):
        with pytest.raises(ConfigError, match=line) as caught:
            make(config(place, tmp_path, model_name=str(small), tokenizer=tokenizer), print)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--seq-len 65 is longer than the context of .*, 64"):
        make(config(place, tmp_path, seq_len=65), print)


def test_model_is_reinitialised_and_resume_with_other_texts(place, tmp_path):
    settings = {"model": {"pretrained": False}, "dataset_name": str(tmp_path / "texts.jsonl")}
    write_texts(tmp_path / "texts.jsonl", 32)
    assert make(config(place, tmp_path, **settings), print).defaults == "general"
    lockstep.train(config(place, tmp_path, stop_at=2, **settings))
    write_texts(tmp_path / "texts.jsonl", 34)
    with refuses(ResumeError, "training data", "--experiment-name"):
        lockstep.train(config(place, tmp_path, **settings))


def test_adapters_with_a_new_head(place, tmp_path):
    """The head, which is drawn for these classes, is trained whole; peft opens both."""
    peft = pytest.importorskip("peft", reason="the extra peft is not installed")
    transformers = pytest.importorskip("transformers")
    named = {"lora": {"rank": 2}, "model": {"pretrained": True}, "max_steps": 12, "lr": 1e-2}
    runs = [("fsdp", {"engine": "fsdp", **named}), ("zero", {"engine": "zero", **named})]
    ((fsdp, zero), _) = run(trained, 2, place, tmp_path, tmp_path / "cache", runs, timeout=250.0)
    assert fsdp == zero
    with load_run(InferenceRequest(str(tmp_path / "fsdp"))) as used:
        task, model = used.task, used.model.eval()
        inputs, _ = task.collate(task.dataset("evaluation").__getitems__([0, 1, 2]))
        wanted = model(**inputs).logits.detach()
    out = tmp_path / "adapters"
    assert dispatch(["export", str(tmp_path / "fsdp"), str(out), "--format", "peft"]) == 0
    torch.manual_seed(9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = transformers.AutoModelForSequenceClassification.from_pretrained(place / "gpt2", num_labels=2)
        plain.config.pad_token_id = model.config.pad_token_id
        theirs = peft.PeftModel.from_pretrained(plain, out).eval()
    assert theirs.peft_config["default"].task_type == "SEQ_CLS"
    assert torch.equal(theirs(**inputs).logits, wanted)
    assert dispatch(["export", str(tmp_path / "fsdp"), str(tmp_path / "merged"), "--format", "hf", "--merge"]) == 0
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(whole(**inputs).logits, wanted, rtol=1e-5, atol=1e-5)
