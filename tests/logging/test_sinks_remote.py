"""Sinks beside metrics.jsonl: what was written is read back; nothing secret is in it; no failure stops a run."""

import contextlib
import csv
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refuses
from toys import Ragged

import lockstep
from lockstep.config.schema import Config
from lockstep.errors import SETTINGS, ConfigError
from lockstep.logging import Sinks
from lockstep.logging.csv_file import CsvFile
from lockstep.logging.mlflow_run import MLflow
from lockstep.logging.trackers import TensorBoard, WandB, check, mask_values, remote_sinks

PLANTED = "planted-s3cret-value"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in ("WANDB_PROJECT", "WANDB_API_KEY", "WANDB_DIR", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


def scalars(folder):
    """{tag: [(step, value), ...]} as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wandb_records(folder):
    """The records of an offline run: its file is a log of 32 KiB blocks, each record after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2 as protocol

    [path] = folder.glob("*.wandb")
    data, at, held, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = protocol.Record()
            record.ParseFromString(held)
            found.append(record)
            held = b""
    return found


def history(records):
    """Each logged step as {name: value}."""
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.mark.parametrize("back", [0, 2])
def test_tensorboard_events_are_read_back_also_after_a_resume(tmp_path, back):
    first = TensorBoard(tmp_path)
    first.start({"experiment": "E"})
    for step in (1, 2, 3):
        first.log(
            {"global_step": step, "running_loss": 1.0 / step, "time/data": 2.0, "note": "text", "evaluation/loss": None}
        )
    first.close(None)
    again = TensorBoard(tmp_path, resume_step=back)
    again.start({"experiment": "E"})
    for step in range(back + 1, 4):
        again.log({"global_step": step, "running_loss": 9.0})
    again.close({})
    found = scalars(tmp_path)
    assert [value for _, value in found.pop("lockstep/time/data")] == [2.0] * back
    assert found == {"running_loss": [(1, 1.0), (2, 0.5), (3, 9.0)] if back else [(1, 9.0), (2, 9.0), (3, 9.0)]}


SCRIPT = """
import json, sys
from pathlib import Path
from lockstep.logging.trackers import WandB
step = int(sys.argv[1])
sink = WandB(Path("."), "E 1", "ab12", resume_step=step)
sink.start(json.loads(sys.argv[2]))
sink.log({"global_step": step + 1, "running_loss": 0.25})
sink.close({"complete": True})
"""


def test_an_offline_wandb_run_is_written_and_resumed(tmp_path):
    info = {"experiment": "E 1", "args": {"lr": 0.5}, "training_data_size": 100, "num_batches": 25}
    (tmp_path / "mine.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # of this process
    for step in ("0", "3"):
        subprocess.run([sys.executable, "mine.py", step, json.dumps(info)], cwd=tmp_path, check=True, env=environ)
        time.sleep(1.1)  # W&B names its folder after the second in which a run starts
    folders = sorted((tmp_path / "wandb").glob("offline-run-*-ab12"))
    for folder, step in zip(folders, (1, 4), strict=True):
        records = wandb_records(folder)
        run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
        assert (run.run_id, run.display_name, run.project) == ("ab12", "E 1", "lockstep")
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert {key: config[key] for key in info} == info
        [line] = history(records)
        assert (line["_step"], line["running_loss"]) == (step, 0.25)
        assert len(list(folder.glob("files/code/**/mine.py"))) == 1  # the program that ran


def test_the_project_is_the_flags_or_the_environments(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert WandB(tmp_path, "E", "ab12")._options["project"] == "theirs"
    assert WandB(tmp_path, "E", "ab12", project="ours")._options["project"] == "ours"


def settings(folder, **changes):
    values = {"batch_size": 8, "micro_batch_size": 2, "log_freq": 2, "ckpt_freq": 2, "max_steps": 4}
    return Config(
        **values | {"experiment_name": "r", "save_dir": str(folder), "precision": "float64", "device": "cpu"} | changes
    )


def test_a_run_with_both(tmp_path):
    assert len(list(lockstep.Run(settings(tmp_path, tensorboard=True, wandb=True), Ragged()))) == 4
    folder = tmp_path / "r"
    assert [step for step, _ in scalars(folder / "tensorboard")["running_loss"]] == [2, 4]
    [kept] = (folder / "wandb").glob("offline-run-*")
    records = wandb_records(kept)
    assert [line["global_step"] for line in history(records) if "lr" in line] == [2, 4]
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["training_data_size"], config["num_batches"]) == (40, 5)
    assert config["args"]["batch_size"] == 8


def test_no_secret_reaches_a_sink(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", PLANTED)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 20 + PLANTED)
    monkeypatch.setattr(sys, "argv", ["lockstep", "train", "--hub-token", PLANTED])
    url = f"https://me:{PLANTED}@host/x"
    info = mask_values({"args": {"dataset_name": url, "hub_token": PLANTED}, "note": PLANTED, "number": 1})
    assert info["number"] == 1
    assert PLANTED not in str(info)
    sinks = Sinks([TensorBoard(tmp_path / "tensorboard"), WandB(tmp_path, "E", "ab12")])
    sinks.start(info)
    sinks.log({"global_step": 1, "running_loss": 1.0, "note": url})
    sinks.close({"complete": True})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix == ".wandb"]
    assert not [path for path in files if PLANTED.encode() in path.read_bytes()]


def test_a_sink_that_fails_is_reported_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", refuse)
    monkeypatch.setattr("wandb.init", refuse)
    training = lockstep.Run(settings(tmp_path, tensorboard=True, wandb=True), Ragged())
    assert len(list(training)) == 4
    shown = capsys.readouterr()
    for name in ("TensorBoard", "WandB"):
        # In the log, and on the last screen.
        for text in (shown.err, shown.out):
            assert len(re.findall(rf"{name} failed\b.*ConnectionError: no route", text)) == 1


def test_missing_package_ends_it_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.logging.trackers.find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", "mlflow"):
        config = settings(tmp_path, **{name: True})
        with pytest.raises(ConfigError, match=rf"--{name} needs .*install the extra {name} of torch-lockstep"):
            check(config)
        with pytest.raises(ConfigError):
            list(lockstep.Run(config, Ragged()))
    assert not list(tmp_path.glob("r"))
    assert remote_sinks(settings(tmp_path), tmp_path, 0, "ab12") == []


def test_a_project_without_its_sink_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(SETTINGS, "typed", {"wandb_project": "mine"})
    with refuses(ConfigError, "--wandb-project", "--wandb"):
        check(settings(tmp_path, wandb_project="mine"))
    # `verify` switches the sinks off.
    monkeypatch.setattr(SETTINGS, "typed", {"wandb_project": "mine", "wandb": True})
    check(settings(tmp_path, wandb_project="mine"))


def test_wandb_without_a_key_ends_it_before_writing(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.chdir(tmp_path)
    # W&B reads the environment once in a process.
    settings_of_wandb = SimpleNamespace(mode="online", api_key=None, base_url="https://tracker.example")
    monkeypatch.setattr("wandb.setup", lambda: SimpleNamespace(settings=settings_of_wandb))
    config = settings(tmp_path, wandb=True)
    with refuses(ConfigError, "wandb", "WANDB_API_KEY", "WANDB_MODE=offline"):
        lockstep.train(config, Ragged())
    assert list(tmp_path.iterdir()) == []
    # Another rank than the first opens no sink.
    check(config, is_main=False)
    for name, value in (("WANDB_API_KEY", "k" * 40), ("WANDB_MODE", "offline"), ("WANDB_MODE", "disabled")):
        with monkeypatch.context() as set_here:
            set_here.setenv(name, value)
            check(config)
    for name, value in (("mode", "offline"), ("api_key", "k" * 40)):
        with monkeypatch.context() as set_here:
            set_here.setattr(settings_of_wandb, name, value)
            check(config)
    with monkeypatch.context() as set_here:
        set_here.setattr("wandb.run", object())
        check(config)
    with monkeypatch.context() as set_here:
        set_here.setattr("wandb.setup", lambda: int("mode 'sometimes'"))
        set_here.setenv("WANDB_API_KEY", "k" * 40)
        with refuses(ConfigError, "wandb", "mode 'sometimes'"):
            check(config)
    logins = tmp_path / "logins"
    monkeypatch.setenv("NETRC", str(logins))
    for host, is_known in (("api.wandb.ai", False), ("tracker.example", True)):
        logins.write_text(f"machine {host} login user password {'k' * 40}\n")
        with contextlib.nullcontext() if is_known else refuses(ConfigError, "wandb"):
            check(config)


def rows(folder):
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_rows_gain_columns_and_a_resume_cuts_them(tmp_path):
    path = tmp_path / "metrics.csv"
    sink = CsvFile(path)
    sink.start({})
    sink.log({"global_step": 2, "running_loss": 0.1 + 0.2})
    sink.log({"global_step": 2, "evaluation/loss": float("nan"), "note": 'a "b",\nc'})
    sink.log({"global_step": 4, "running_loss": 0.5})
    sink.close(None)
    found = rows(tmp_path)
    assert [float(row["running_loss"] or -1) for row in found] == [0.1 + 0.2, -1, 0.5]
    assert (found[1]["evaluation/loss"], found[1]["note"]) == ("nan", 'a "b",\nc')
    path.write_bytes(path.read_bytes() + b"6,0.2")  # a kill in the middle of a row
    for evaluated, kept in ((True, ["2", "2"]), (False, ["2"])):
        again = CsvFile(path, resume_step=2, evaluated=evaluated)
        again.start({})
        assert [row["global_step"] for row in rows(tmp_path)] == kept
        again.log({"global_step": 4, "running_loss": 0.25, "late": 1})
        again.close({})
        assert (rows(tmp_path)[-1]["running_loss"], rows(tmp_path)[-1]["late"]) == ("0.25", "1")


def test_a_run_writes_csv_and_resumes_it(tmp_path):
    for stop, kept in ((2, ["2"]), (4, ["2", "4"])):
        list(lockstep.Run(settings(tmp_path, csv=True, stop_at=stop % 4), Ragged()))
        trained = [row["global_step"] for row in rows(tmp_path / "r") if row["running_loss"]]
        assert trained == kept


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow, about SQLAlchemy
def test_mlflow_goes_on_in_the_same_run_without_secrets(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PLANTED)
    monkeypatch.setattr(sys, "argv", ["lockstep", "train", "--hub-token", PLANTED])
    info = mask_values(
        {"experiment": "E", "args": {"lr": 0.5, "hub_token": PLANTED}, "note": f"https://me:{PLANTED}@host"}
    )
    for step in (0, 3):
        sink = MLflow(tmp_path, "E", "ab12")
        sink.start(info)
        sink.log({"global_step": step + 1, "running_loss": 0.25, "a(b)": 1, "note": "text", "evaluation/loss": None})
        sink.close({"complete": True} if step else None)
    client = __import__("mlflow").MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["lr"]) == ("E", "FINISHED", "0.5")
    curve = client.get_metric_history(run.info.run_id, "running_loss")
    assert sorted((point.step, point.value) for point in curve) == [(1, 0.25), (4, 0.25)]
    assert run.data.metrics.keys() == {"running_loss", "a_b_"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and PLANTED.encode() in path.read_bytes()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_server_of_mlflow_that_fails_is_reported_once(tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/missing/folder/mlflow.db?me={PLANTED}")
    monkeypatch.setenv("SOME_PASSWORD", PLANTED)
    sinks = Sinks([MLflow(tmp_path, "E", "ab12")])
    sinks.start({})
    for step in (1, 2):
        sinks.log({"global_step": step, "running_loss": 1.0})
    sinks.close({"complete": True})
    assert len(re.findall(r"MLflow failed\b", caplog.text)) == 1


def test_the_sink_of_the_documents_writes_evaluations(tmp_path):
    names = {}
    page = (Path(__file__).parents[2] / "docs/sinks.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    task = Ragged()
    task.hooks = names["ToDatabase"](tmp_path / "numbers.db")
    list(lockstep.Run(settings(tmp_path, csv=True, eval_freq=2), task))
    with sqlite3.connect(tmp_path / "numbers.db") as base:
        found = base.execute("select step from numbers where name like '%loss%' order by step").fetchall()
    assert found == [(2,), (4,)]
    assert [row["samples_seen"] for row in rows(tmp_path / "r") if row["samples_seen"]] == ["16.0", "32.0"]
