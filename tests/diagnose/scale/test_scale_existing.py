"""`lockstep scale --runs`: the records of runs that were made before, in the place of runs that are started here."""

import json
import shutil

import pytest
import torch

import lockstep
from lockstep import cli
from lockstep.config.cli import to_toml
from lockstep.config.schema import Config
from lockstep.diagnose.scale.runs import existing
from lockstep.errors import ConfigError


class Mine(lockstep.Task):
    def model(self):
        return torch.nn.Linear(4, 1)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(40, 4)) if split == "train" else None

    def loss(self, model, batch):
        return model(batch[0]).square().sum()


def folder(path, ranks, rate, batch=64, **changes):
    """What a run of so many ranks leaves; its first record is ten times slower."""
    path.mkdir()
    config = Config(batch_size=batch, micro_batch_size=changes.pop("micro", 2), **changes)
    (path / "config.toml").write_text(to_toml(config))
    (path / "state.json").write_text(json.dumps({"world_size": ranks, "global_step": 50}))
    step = 1000 * batch / rate
    with (path / "metrics.jsonl").open("w") as file:
        for number, slower in enumerate((10, 1, 1.002, 0.998), 1):
            times = {"time/forward": 0.4 * step * slower, "time/total": step * slower}
            record = {"global_step": 10 * number, "items_per_second": rate / slower, **times}
            file.write(json.dumps(record) + "\n")
        file.write(json.dumps({"global_step": 40, "evaluation/loss": 1.0}) + "\n")
    return path


def printed(capsys, *words):
    assert cli.dispatch(["scale", "--runs", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_runs_of_several_nodes_are_compared(tmp_path, capsys):
    rates = {8: 800.0, 16: 1540.0, 32: 2900.0}
    paths = [folder(tmp_path / f"n{ranks}", ranks, rate) for ranks, rate in rates.items()]
    found = printed(capsys, *reversed(paths))
    assert [row["mode"] for row in found["rows"]] == ["strong"] * 3
    assert [row["efficiency"] for row in found["rows"]] == pytest.approx([1, 1540 / 1600, 2900 / 3200], abs=1e-3)
    assert [row["step_ms"] for row in found["rows"]] == pytest.approx(
        [64e3 / rate for rate in rates.values()], rel=0.01
    )
    notes = " ".join(found["notes"])
    assert "records of earlier runs" in notes
    assert "gloo" not in notes


def test_growing_batch_is_weak_and_two_equal_runs_are_rounds(tmp_path, capsys):
    paths = [folder(tmp_path / "a", 2, 200.0, 64), folder(tmp_path / "b", 4, 380.0, 128)]
    paths.append(folder(tmp_path / "c", 4, 390.0, 128))
    found = printed(capsys, *paths)
    assert [(row["mode"], len(row["rounds"])) for row in found["rows"]] == [("weak", 1), ("weak", 2)]
    assert found["rows"][1]["efficiency"] == pytest.approx(0.95, abs=0.02)


def test_what_else_differs_is_said(tmp_path, capsys):
    paths = [folder(tmp_path / "a", 1, 100.0, seed=1), folder(tmp_path / "b", 2, 190.0, precision="bf16", seed=2)]
    notes = printed(capsys, *paths)["notes"]
    assert [line for line in notes if "differ in" in line] == [
        "the runs also differ in precision (auto, bf16), not only in ranks"
    ]


def test_runs_that_cannot_be_compared_are_one_line(tmp_path):
    one, two = folder(tmp_path / "a", 1, 100.0), folder(tmp_path / "b", 2, 190.0)
    for paths, line in (
        ([one], "all are of 1 ranks"),
        ([one, folder(tmp_path / "again", 1, 101.0)], "all are of 1 ranks"),
        ([one, folder(tmp_path / "other", 3, 190.0, 90)], "64 on 1, 90 on 3 ranks"),
        ([one, folder(tmp_path / "cut", 2, 190.0, micro=4)], "micro-batches of 4"),
        ([one, tmp_path / "nowhere"], "is not a complete run folder"),
        ([one, tmp_path / "a" / "state.json"], "is not a complete run folder"),
    ):
        with pytest.raises(ConfigError, match=line) as caught:
            existing(paths)
        assert "\n" not in str(caught.value)
    (two / "metrics.jsonl").write_text("\n".join((two / "metrics.jsonl").read_text().splitlines()[:1]) + "\n")
    with pytest.raises(ConfigError, match="fewer than two records"):
        existing([one, two])
    for damage in ("{", "[]", '{"world_size": "2"}', '{"world_size": 0}', "{}", "[" * 100_000):
        (two / "state.json").write_text(damage)
        with pytest.raises(ConfigError, match="is not a complete run folder"):
            existing([one, two])
    (two / "state.json").write_text('{"world_size": 2}')
    for damage in ("x = [", "batch_size = 'y'\nmicro_batch_size = 1\n", ""):
        (two / "config.toml").write_text(damage)
        with pytest.raises(ConfigError, match="is not a complete run folder"):
            existing([one, two])


def test_the_folder_of_a_real_run_is_read(tmp_path):
    settings = {"batch_size": 8, "micro_batch_size": 2, "log_freq": 2, "device": "cpu", "save_dir": str(tmp_path)}
    config = Config(**settings, experiment_name="one", max_steps=8)
    lockstep.train(config, Mine())
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    state = tmp_path / "two" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"world_size": 2}))
    found = existing([tmp_path / "one", tmp_path / "two"])
    assert found.request.sizes == (1, 2)
    assert [len(sample.rates) for sample in found.samples] == [3, 3]
    assert all(sample.total > 0 and "forward" in sample.parts for sample in found.samples)
