"""bench/lightning.jsonl, the list of other people's LightningModules, and the language that it is written in."""

import hashlib
import importlib.util
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def language() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lightning_row", BENCH / "modules" / "lightning_row.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_thirty_modules_of_fifteen_repositories_by_digest(language: ModuleType) -> None:
    rows = language.rows()
    assert len(rows) == 30
    assert len({row["repository"] for row in rows}) >= 15
    assert len({(row["repository"], row["path"], row["class"]) for row in rows}) == 30
    for row in rows:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", row["repository"])
        assert re.fullmatch(r"[0-9a-f]{40}", row["commit"])
        assert re.fullmatch(r"[0-9a-f]{64}", row["sha256"])


def test_nothing_but_descriptions_stands_in_the_list(language: ModuleType) -> None:
    """A text is a name or a word: no line of code."""

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for each in value.values() for text in texts(each)]
        if isinstance(value, list):
            return [text for each in value for text in texts(each)]
        return [value] if isinstance(value, str) else []

    for row in language.rows():
        for text in texts(row["arguments"]) + texts(row["data"]):
            assert re.fullmatch(r"[\w.]+", text), text


def test_every_sample_can_be_made_and_its_batch_too(language: ModuleType) -> None:
    for row in language.rows():
        training, others = language.loaders(row, parts=2)
        assert len(training) == 2 * language.BATCHES
        assert len(others) == row["data"].get("validation", 0)
        next(iter(training))
        for loader in others:
            assert len(list(loader)) == 2, "the last batch is short"


def test_arguments_are_objects_calls_partials_and_namespaces(language: ModuleType) -> None:
    made = language.value(
        {
            "plain": [1, {"a": "b"}],
            "loss": {"object": "torch.nn.functional.mse_loss"},
            "layer": {"call": "torch.nn.Linear", "args": [2], "kwargs": {"out_features": 3}},
            "rate": {"partial": "torch.optim.SGD", "kwargs": {"lr": 0.5}},
            "options": {"namespace": {"depth": 2}},
        }
    )
    assert made["plain"] == [1, {"a": "b"}]
    assert made["loss"] is torch.nn.functional.mse_loss
    assert made["layer"].weight.shape == (3, 2)
    assert made["rate"](made["layer"].parameters()).param_groups[0]["lr"] == 0.5
    assert made["options"].depth == 2
    with pytest.raises(SystemExit, match="torch.nn has no Nobody"):
        language.value({"object": "torch.nn.Nobody"})


def test_a_sample_is_the_same_in_every_process(language: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning_row", language)
    described = [{"normal": [2]}, {"fields": {"y": {"classes": 9, "shape": [3]}, "name": {"text": ["a", "b"]}}}]
    samples = language.Samples(described, 4)
    numbers, fields = samples[1]
    again, other = pickle.loads(pickle.dumps(samples))[1], samples[2]
    assert torch.equal(numbers, again[0])
    assert torch.equal(fields["y"], again[1]["y"])
    assert fields["name"] == again[1]["name"] == "b"
    assert not torch.equal(numbers, other[0])
    assert torch.equal(language.Samples(described, 4, begin=1)[0][0], numbers)
    with pytest.raises(IndexError):
        samples[4]


def test_none_stays_none_in_a_batch(language: ModuleType) -> None:
    numbers, nothing = language.collate([(torch.ones(2), None), (torch.zeros(2), None)])
    assert numbers.shape == (2, 2)
    assert nothing is None


def test_another_file_than_the_one_that_is_named_is_not_tried(language: ModuleType, tmp_path: Path) -> None:
    row = {"repository": "a/b", "commit": "1" * 40, "path": "m.py", "roots": ["", "src"], "sha256": ""}
    with pytest.raises(SystemExit, match="not there; lay a/b at 111111111111 into"):
        language.prepare(row, tmp_path)
    (tmp_path / "a+b").mkdir()
    (tmp_path / "a+b" / "m.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match="another file than at 111111111111"):
        language.prepare(row, tmp_path)
    before = list(sys.path)
    try:
        language.prepare(row | {"sha256": hashlib.sha256(b"x = 1\n").hexdigest()}, tmp_path)
        assert sys.path[1:3] == [str(tmp_path / "a+b"), str(tmp_path / "a+b" / "src")]
    finally:
        sys.path[:] = before
