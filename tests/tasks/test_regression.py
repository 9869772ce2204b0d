"""--task regression: a perceptron on a table, the same bits on one rank and on two."""

import json
import os

import hub_files
import pytest
import torch
from ranks import run
from refusals import names, refuses

import lockstep
from lockstep import checkpoint
from lockstep.cli import dispatch
from lockstep.config.schema import Config
from lockstep.errors import ConfigError, DataError
from lockstep.logging.jsonl import read
from lockstep.models.vision import MLP
from lockstep.tasks.regression import make
from lockstep.training.start.weights import load_model, select_checkpoint


def config(folder, **changes):
    settings = {"batch_size": 32, "micro_batch_size": 8, "log_freq": 10, "device": "cpu"}
    return Config(**{"task": "regression", "experiment_name": "r", "save_dir": str(folder), **settings, **changes})


def trained(world, folder, name, changes):
    os.environ["LOCKSTEP_CACHE"] = str(folder / "cache")
    result = lockstep.train(config(folder, experiment_name=name, exact=True, **changes), None, world)
    return checkpoint.fingerprint(checkpoint.newest(result.folder, say=print))


def recorded(folder, name="r"):
    record = [record for record in read(folder / name / "metrics.jsonl") if "evaluation/loss" in record][-1]
    return {key: record[f"evaluation/{key}"] for key in ("loss", "mae", "r2")}


def test_one_rank_and_two_have_the_same_bits(tmp_path):
    changes = {"max_steps": 6, "model": {"dropout": 0.1}}
    one = run(trained, 1, tmp_path, "one", changes, timeout=250.0)
    assert run(trained, 2, tmp_path, "two", {**changes, "engine": "fsdp"}, timeout=250.0) == one * 2
    assert recorded(tmp_path, "one") == recorded(tmp_path, "two")


def test_defaults_learn_diabetes_with_scikit_learns_numbers(tmp_path, capsys):
    metrics = pytest.importorskip("sklearn.metrics")
    result = lockstep.train(config(tmp_path, precision="float64"))
    task = make(config(tmp_path, precision="float64"), print)
    model = task.model().double().eval()
    load_model(select_checkpoint(result.folder, "last"), model)
    rows, targets = task.dataset("evaluation").tensors
    with torch.no_grad():
        predictions = model(rows)
    shown = recorded(tmp_path)
    assert shown["r2"] == pytest.approx(metrics.r2_score(targets, predictions), rel=1e-9)
    assert shown["mae"] == pytest.approx(metrics.mean_absolute_error(targets, predictions), rel=1e-9)
    spread = task.dataset("train").tensors[1].std(correction=0)
    assert shown["loss"] == pytest.approx(float(((predictions - targets) / spread).square().mean()), rel=1e-6)
    assert shown["r2"] > 0.4
    capsys.readouterr()
    assert dispatch(["evaluate", str(result.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["r2"] == pytest.approx(shown["r2"], rel=1e-12)
    with pytest.raises(ConfigError, match="trained Regression, .*lockstep evaluate"):
        dispatch(["generate", str(result.folder), "--prompt", "a"])
    out = tmp_path / "out.pt"
    assert dispatch(["export", str(result.folder), str(out), "--format", "torch"]) == 0
    plain = MLP([0.0] * 10, [1.0] * 10, 0.0, 1.0).double()
    plain.load_state_dict(torch.load(out, weights_only=True))  # what it is scaled by comes along
    with torch.no_grad():
        assert torch.equal(plain(rows), predictions)


def test_r2_is_that_of_the_rows_that_are_evaluated(tmp_path):
    metrics = pytest.importorskip("sklearn.metrics")
    changes = {"precision": "float64", "max_steps": 3, "eval_micro_batch_size": 7, "limit_eval_batches": 3}
    result = lockstep.train(config(tmp_path, **changes))
    task = make(config(tmp_path, **changes), print)
    model = task.model().double().eval()
    load_model(select_checkpoint(result.folder, "last"), model)
    rows, targets = (part[:21] for part in task.dataset("evaluation").tensors)
    with torch.no_grad():
        wanted = metrics.r2_score(targets, model(rows))
    assert result.evaluation.metrics["r2"] == pytest.approx(wanted, rel=1e-9)


def test_a_table_of_ones_own_and_what_is_wrong_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    rows = [{"name": f"n{n}", "a": n, "b": n * 0.5, "same": 1, "price": 3.0 * n} for n in range(20)]
    named = {"dataset_name": str(hub_files.write_parquet(tmp_path / "table.parquet", rows))}

    def made(**data):
        return make(config(tmp_path, **named, data=data), print)

    task = made()
    assert (task.sources["target"], task.sources["features"]) == ("price", "a, b, same")
    rows_of, targets = task.dataset("train").tensors
    assert (rows_of.shape, targets.shape) == ((16, 3), (16,))
    model = task.model()
    assert model.scale[2] == 1  # of what is the same everywhere
    inner = (rows_of - model.mean) / model.scale
    assert torch.allclose(inner[:, :2].std(0, correction=0), torch.ones(2, dtype=torch.float64))
    task = made(target_column="a", feature_columns="b, price")
    assert (task.sources["target"], task.sources["features"]) == ("a", "b, price")

    def refused(match, **data):
        with pytest.raises(DataError, match=match) as caught:
            made(**data)
        assert "\n" not in str(caught.value)

    refused(
        "has no column 'c'; its columns: name, a, b, same, price; name one with --data.target-column", target_column="c"
    )
    refused("has no column 'c'; its columns: .*; see --data.feature-columns", feature_columns="a,c")
    refused("the column 'name' has (large_)?string, not numbers", feature_columns="name")
    refused("'price' is the target; .*--data.feature-columns", feature_columns="a,price")
    rows[3]["a"] = None
    named = {"dataset_name": str(hub_files.write_jsonl(tmp_path / "holes.jsonl", rows))}
    refused("has None in the column 'a'")
    with pytest.raises(ConfigError, match="--model-name 'builtin:resnet' .*builtin:mlp"):
        make(config(tmp_path, model_name="builtin:resnet"), print)
    with pytest.raises(DataError, match="unknown; the built-in table is builtin:diabetes"):
        make(config(tmp_path, dataset_name="builtin:iris"), print)


def test_a_column_is_used_in_full_precision_or_named(tmp_path, monkeypatch, capsys):
    """Times in seconds since 1970 are standardised before they are rounded, whatever the precision of the weights."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    rows = [{"time": 1.7e9 + n * 37 % 100, "name": f"n{n}", "y": n * 37 % 100 / 2} for n in range(400)]
    table = str(hub_files.write_jsonl(tmp_path / "times.jsonl", rows))
    for precision, least in (("float32", 0.99), ("bf16-true", 0.9)):
        changes = {"max_steps": 150, "precision": precision, "experiment_name": precision}
        result = lockstep.train(config(tmp_path, dataset_name=table, **changes))
        assert result.evaluation.metrics["r2"] > least
    said = []
    make(config(tmp_path, dataset_name=table), said.append)
    assert names(said[-1], "name")
    (tmp_path / "a.csv").write_text("a;b;y\n" + "1,5;2;3\n" * 7 + "1,5;?;3\n" + "2,5;1;3\n" * 7)
    with refuses(DataError, "row 7", "'?'", "'b'", "--data.feature-columns"):
        make(config(tmp_path, dataset_name=str(tmp_path / "a.csv")), said.append)
    assert names(said[-1], "semicolons")
    task = make(config(tmp_path, dataset_name=str(tmp_path / "a.csv"), data={"feature_columns": "a"}), said.append)
    assert task.dataset("train").tensors[0].unique().tolist() == [1.5, 2.5]


def test_evaluating_on_other_data_takes_the_columns_by_name(tmp_path, monkeypatch, capsys):
    """In the run's unit, whatever the other data's spread; the default target would be the last column."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    rows = [{"a": n % 7, "b": (n * 5 % 11) * 10.0, "price": 3.0 * (n % 7) - n * 5 % 11} for n in range(40)]
    table = str(hub_files.write_parquet(tmp_path / "table.parquet", rows))
    lockstep.train(config(tmp_path, dataset_name=table, max_steps=5))
    capsys.readouterr()

    def evaluated(name, change):
        other = hub_files.write_parquet(tmp_path / f"{name}.parquet", [change(row) for row in rows])
        assert dispatch(["evaluate", str(tmp_path / "r"), "--json", "--data", str(other)]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["loss"], found["metrics"]["mae"], found["metrics"]["r2"]

    same = evaluated("same", lambda row: row)
    assert same == tuple(recorded(tmp_path).values())
    turned = evaluated("turned", lambda row: {"more": 1.5, "price": row["price"], "b": row["b"], "a": row["a"]})
    assert turned == same
    # The same errors, where other targets stand in the training split: the loss is in the run's unit.
    evaluation = {
        tuple(r.tolist()) for r in make(config(tmp_path, dataset_name=table), print).dataset("evaluation")[:][0]
    }
    wide = evaluated("wide", lambda r: r if (r["a"], r["b"]) in evaluation else {**r, "price": 100 * r["price"]})
    assert wide == same
    for name, columns in (("fewer", ("a", "price")), ("untold", ("a", "b"))):
        other = hub_files.write_parquet(
            tmp_path / f"{name}.parquet", [{key: row[key] for key in columns} for row in rows]
        )
        match = "r learned 'price' from a, b: .*has no column '(b|price)'; its columns: "
        with pytest.raises(DataError, match=match) as caught:
            dispatch(["evaluate", str(tmp_path / "r"), "--data", str(other)])
        assert "\n" not in str(caught.value)
