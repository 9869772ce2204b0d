"""Choice of a tracker's run: the program's own, or a new one that a resume continues."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import mlflow
import pytest
import small_runs
import wandb
import warm
from namespaces import in_mount_namespace
from shell import environment, free_port
from test_sinks_remote import history, offline, wandb_records
from toys import Ragged

import lockstep
from lockstep import checkpoint

PROGRAM = Path(__file__).with_name("tracked_program.py")
__all__ = ["offline"]  # a fixture


def settings(folder, **changes):
    values = {"max_steps": 4, "log_freq": 2, "ckpt_freq": 2, "eval_freq": 0, "report": False}
    return small_runs.config(folder, **values | changes)


def ids(folder):
    """The ids of a folder's W&B runs, in the order of their starts."""
    return [path.name.rpartition("-")[2] for path in sorted((folder / "wandb").glob("offline-run-*"))]


def ended(folder):
    """The records of a W&B run once its last one is written."""
    until = time.monotonic() + 60
    while not any(record.HasField("exit") for record in wandb_records(folder)):
        assert time.monotonic() < until, folder
        time.sleep(0.05)
    return wandb_records(folder)


# --- W&B, offline


def test_two_runs_of_one_name_differ_and_a_moved_one_continues(tmp_path):
    lockstep.train(settings(tmp_path / "a", wandb=True, stop_at=2), Ragged())
    lockstep.train(settings(tmp_path / "b", wandb=True), Ragged())
    shutil.move(tmp_path / "a", tmp_path / "elsewhere")
    time.sleep(1.1)  # W&B names its folder after the second in which a run starts
    lockstep.train(settings(tmp_path / "elsewhere", wandb=True), Ragged())
    first, again = ids(tmp_path / "elsewhere" / "r")
    assert first == again
    assert ids(tmp_path / "b" / "r") != [first]
    folders = sorted((tmp_path / "elsewhere" / "r" / "wandb").glob("offline-run-*"))
    codes = [record.exit.exit_code for folder in folders for record in ended(folder) if record.HasField("exit")]
    assert codes == [1, 0]  # stopped, finished


def test_the_id_is_drawn_once_also_without_a_checkpoint(tmp_path):
    def run_id(name="r", **changes):
        settings_ = settings(tmp_path, experiment_name=name, **changes)
        folder = lockstep.train(settings_, Ragged()).folder
        newest = checkpoint.newest(folder, say=print)
        recorded = json.loads((folder / "checkpoints" / "run.json").read_text())["id"]
        assert newest is None or checkpoint.read_run_state(newest).run_id == recorded
        return recorded

    first = run_id(max_steps=1, checkpoint={"mode": "none"})
    assert run_id(stop_at=2) == first
    (tmp_path / "r" / "checkpoints" / "run.json").unlink()  # as where a checkpoint alone was downloaded
    assert run_id() == first
    assert run_id("new", init_from=str(tmp_path / "r")) != first
    shutil.rmtree(tmp_path / "r" / "checkpoints")
    assert run_id() != first


def test_the_programs_wandb_run_gets_the_records_and_stays_open(tmp_path):
    mine = wandb.init(project="mine", name="my-name", id="mine1", tags=["t"], config={"lr": 3}, dir=tmp_path)
    for _ in range(7):
        wandb.log({"before": 1.0})  # raises W&B's own step above those of the run
    run = lockstep.Run(settings(tmp_path, wandb=True, log_freq=1), Ragged())
    for step in run:
        wandb.log({"body": float(step.global_step)})
    assert wandb.run is mine
    mine.log({"after": 1.0})
    assert (mine.config["lr"], mine.config["lockstep"]["experiment"]) == (3, "r")
    mine.finish()
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    lines = history(ended(folder))
    assert [line["global_step"] for line in lines if "running_loss" in line] == [1, 2, 3, 4]
    assert [line["body"] for line in lines if "body" in line] == [1.0, 2.0, 3.0, 4.0]
    assert [line for line in lines if "after" in line]
    assert not (tmp_path / "r" / "wandb").exists()


def test_steps_that_the_program_names_itself_are_kept(tmp_path):
    mine = wandb.init(id="mine2", dir=tmp_path)
    for step in lockstep.Run(settings(tmp_path, wandb=True, log_freq=1, eval_freq=1), Ragged()):
        wandb.log({"body": float(step.global_step)}, step=step.global_step)
    mine.finish()
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    lines = history(ended(folder))
    assert [(line["_step"], line["body"]) for line in lines if "body" in line] == [(k, float(k)) for k in (1, 2, 3, 4)]
    assert [line["global_step"] for line in lines if "evaluation/loss" in line] == [1, 2, 3, 4]


def test_the_id_and_name_of_the_environment_go_before(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "agentrun1")
    monkeypatch.setenv("WANDB_NAME", "theirs")
    lockstep.train(settings(tmp_path, wandb=True), Ragged())
    assert ids(tmp_path / "r") == ["agentrun1"]
    [folder] = (tmp_path / "r" / "wandb").glob("offline-run-*")
    assert next(each.run for each in ended(folder) if each.HasField("run")).display_name == "theirs"


# --- MLflow, a server on loopback


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server of MLflow on loopback."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    address = f"http://127.0.0.1:{port}"
    store = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--default-artifact-root", str(folder / "files")]
    # Its runner of jobs, which nobody needs here, restarts a failing process for ever.
    settings = environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
    words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([*words, *store], stdout=log, stderr=log, env=settings, start_new_session=True)
    try:
        until = time.monotonic() + 240
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


def go(server, kind, folder, *, machine=None):
    """Run the program; on a machine whose `machine[1]` is the folder `machine[0]`."""
    words = [warm.python(), str(PROGRAM), kind, str(folder)]
    words = in_mount_namespace(words, *machine) if machine else words
    env = environment(MLFLOW_TRACKING_URI=server, PYTHONPATH=os.pathsep.join(sys.path))
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=200, check=False)


def runs(server, experiment="lockstep"):
    """{id: (status, steps of the losses, parameters, tags)} of an experiment's runs, the oldest first."""
    client = mlflow.MlflowClient(server)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id], order_by=["start_time"])
    steps = {run.info.run_id: client.get_metric_history(run.info.run_id, "running_loss") for run in found}
    return {
        run.info.run_id: (run.info.status, sorted(point.step for point in steps[run.info.run_id]), run.data)
        for run in found
    }


def test_two_machines_with_one_path_have_runs_of_their_own(server, tmp_path):
    """And the second machine continues the first one's run, at another path."""
    first, second, path = tmp_path / "first", tmp_path / "second", tmp_path / "runs"
    for folder in (first, second, path):
        folder.mkdir()
    before = set(runs(server)) if mlflow.MlflowClient(server).get_experiment_by_name("lockstep") else set()
    for machine in (first, second):
        done = go(server, "stopped", path, machine=(machine, path))
        assert done.returncode == 0, done.stderr
    found = {run: each for run, each in runs(server).items() if run not in before}
    assert [each[:2] for each in found.values()] == [("KILLED", [2]), ("KILLED", [2])]
    assert not list(path.iterdir())
    shutil.move(first / "r", tmp_path / "r")
    assert go(server, "whole", tmp_path, machine=(second, path)).returncode == 0
    after = [each[:2] for run, each in runs(server).items() if run not in before]
    assert after == [("FINISHED", [2, 4]), ("KILLED", [2])]


def test_the_programs_mlflow_run_and_experiment_are_used(server, tmp_path):
    done = go(server, "theirs", tmp_path)
    assert done.returncode == 0, done.stderr
    (status, steps, data), own, broken = runs(server, "theirs").values()
    assert (status, steps, data.metrics["after"]) == ("FINISHED", [2], 1.0)  # as the program ended it
    assert (data.tags["mlflow.runName"], data.tags["team"]) == ("mine", "vision")
    assert (data.params["lr"], data.params["lockstep.lr"]) == ("mine", "0.01")
    assert (own[:2], own[2].params["lr"]) == (("FINISHED", [2, 4]), "0.01")
    assert broken[:2] == ("FAILED", [2])
