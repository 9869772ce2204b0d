"""Checkpoints in an object store: S3 on loopback, and what a store may do to a run."""

import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import object_store
import pytest
import small_runs
import torch
import warm
from fsspec.implementations.memory import MemoryFileSystem
from ranks import run
from refusals import names, refuses
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.command import run as command
from lockstep.checkpoint.remote import RemoteRun
from lockstep.checkpoint.upload import OWNER, Uploader
from lockstep.cli import dispatch
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, ConfigError, LockstepError, StorageError

URL = "s3://bucket/runs"


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, object_store.serve(patch) as store:
        yield store


@pytest.fixture
def store(server, monkeypatch):
    server.heal()
    server.clear()
    monkeypatch.setattr("lockstep.checkpoint.remote._PAUSES", (0.01, 0.02))
    return server


def config(folder, **changes):
    local = changes.pop("local", "local")
    options = {"local_dir": str(folder / local), "keep": 2} | changes.pop("checkpoint", {})
    return small_runs.config(changes.pop("url", URL), checkpoint=options, **changes)


def saved(folder, *steps):
    """A run's folder with checkpoints of these steps."""
    for step in steps:
        tensors = {"model/weight": torch.full((5, 3), float(step)), "model/bias": torch.arange(step + 1.0)}
        checkpoint.save(folder, step, tensors, {}, World(), engine="single")
    return folder


def whole(remote):
    return {step: remote.verify(step) for step in remote.steps()}


class OwnStore(MemoryFileSystem):
    """A file system that a program registers with fsspec."""

    protocol = "own"
    store, pseudo_dirs = {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("own://"))


@pytest.mark.parametrize("url", [URL, "own://runs", "file"])
def test_a_checkpoint_is_whole_in_the_store_or_not_there(tmp_path, store, url):
    fsspec.register_implementation("own", OwnStore, clobber=True)
    remote = RemoteRun(f"file://{tmp_path}/store" if url == "file" else url, "r")
    remote.check()
    folder = saved(tmp_path / "r", 3, 6)
    assert remote.upload(folder, 3) > 0
    assert remote.upload(folder, 3) == 0
    remote.upload(folder, 6)
    assert whole(remote) == {3: [], 6: []}
    remote.download(tmp_path / "other", 6)
    assert checkpoint.fingerprint(checkpoint.path_of(tmp_path / "other", 6)) == checkpoint.fingerprint(
        checkpoint.path_of(folder, 6)
    )
    name = "checkpoints/step-00000006/rank-00000.safetensors"
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    remote.write(name, bytes(data))
    assert names(*remote.verify(6), "step-00000006/rank-00000.safetensors")
    with refuses(CheckpointError, "step-00000006/rank-00000.safetensors"):
        remote.download(tmp_path / "again", 6)
    assert not list((tmp_path / "again").rglob("step-*")) + list((tmp_path / "again").rglob(".step-*"))
    remote.discard_files([name])
    with refuses(CheckpointError, "step-00000006/rank-00000.safetensors"):
        remote.download(tmp_path / "again", 6)
    remote.discard([3])
    assert remote.steps() == [6]
    remote.discard_files(["checkpoints/step-00000006/manifest.json"])
    assert (remote.steps(), remote.leftovers()) == ([], [6])
    remote.upload(folder, 6)
    assert whole(remote) == {6: []}


REFUSALS = [
    ((".*", "", "AccessDenied", 403), ConfigError, "403"),
    (("PUT", "", "AccessDenied", 403), ConfigError, "403"),
    (("GET", "", "AccessDenied", 403), ConfigError, "403"),
    (("DELETE", "", "AccessDenied", 403), ConfigError, "403"),
    ((".*", "", "RequestTimeTooSkewed", 403), ConfigError, "clock"),
    ((".*", "", "InvalidAccessKeyId", 403), ConfigError, "credentials"),
    ((".*", "", "ExpiredToken", 400), ConfigError, "credentials"),
]


@pytest.mark.parametrize(("fault", "kind", "named"), REFUSALS)
def test_what_a_store_refuses_is_one_line_before_writing(tmp_path, store, fault, kind, named):
    store.fail(*fault)
    with refuses(kind, "--save-dir", f"{URL}/r", named):
        lockstep.train(config(tmp_path), Ragged())
    assert not list(tmp_path.iterdir())


def test_url_that_cannot_work_is_one_line_before_writing(tmp_path, store, monkeypatch):
    with refuses(ConfigError, "--save-dir", "s3://nowhere/r", "bucket"):
        lockstep.train(config(tmp_path, url="s3://nowhere"), Ragged())
    with refuses(ConfigError, "--save-dir", "nostore"):
        lockstep.train(config(tmp_path, url="nostore://bucket/x"), Ragged())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "s3fs", None)
        patch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
        with refuses(ConfigError, "--save-dir", "s3fs", "pip install"):
            lockstep.train(config(tmp_path), Ragged())
        patch.setitem(sys.modules, "gcsfs", None)
        with refuses(ConfigError, "--save-dir", "gcsfs", "pip install"):
            lockstep.train(config(tmp_path, url="gs://bucket"), Ragged())
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with refuses(ConfigError, "--save-dir", "credentials"):
            lockstep.train(config(tmp_path), Ragged())
    store.fail(".*", "", "InternalError", 500)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with refuses(StorageError, "--save-dir", URL + "/r"):
        lockstep.train(config(tmp_path), Ragged())
    assert not list(tmp_path.iterdir())


def test_run_resumes_from_the_store_on_another_machine_bitwise(tmp_path, store, capfd):
    first = lockstep.train(config(tmp_path, stop_at=7), Ragged())
    assert first.folder == tmp_path / "local/s3/bucket/runs/r"
    assert RemoteRun(URL, "r").steps() == [6, 7]
    names(capfd.readouterr().err, first.folder, f"{URL}/r")
    second = lockstep.train(config(tmp_path, local="other"), Ragged())
    lockstep.train(small_runs.config(tmp_path / "plain"), Ragged())
    assert small_runs.mark(second.folder.parent) == small_runs.mark(tmp_path / "plain")
    remote = RemoteRun(URL, "r")
    assert whole(remote) == {9: [], 12: []}
    there = {key.removeprefix("runs/r/") for key in store.names()}
    here = {str(path.relative_to(second.folder)) for path in second.folder.rglob("*") if path.is_file()}
    assert there == here - {"run.lock"}
    assert remote.read("metrics.jsonl") == (second.folder / "metrics.jsonl").read_bytes()
    steps = [record["global_step"] for record in checkpoint_records(second.folder)]
    assert steps == sorted(steps)
    assert steps[0] == 2
    begun = config(tmp_path, experiment_name="new", init_from=f"{URL}/r", local="third", lr=0.0, max_steps=1)
    assert (
        small_runs.mark(lockstep.train(begun, Ragged()).folder.parent, "new")[0]
        == small_runs.mark(second.folder.parent)[0]
    )
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or object_store.SECRET.encode() not in path.read_bytes(), path
    assert object_store.SECRET not in "".join(capfd.readouterr())
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert command("verify", f"{URL}/r", None) == 0
        assert command("list", f"{URL}/r", 12) == 0
    names(out.getvalue(), "step-00000012", "step-00000009")


def checkpoint_records(folder):
    from lockstep.logging.jsonl import read

    return read(folder / "metrics.jsonl")


def on_ranks(world, folder, steps, local):
    settings = config(folder, url=f"file://{folder}/store", stop_at=steps, local=local, engine="ddp")
    return lockstep.train(settings, Ragged(), world).global_step


def test_two_ranks_download_what_one_uploaded(tmp_path):
    assert run(on_ranks, 1, tmp_path, 7, "a") == [7]
    assert run(on_ranks, 2, tmp_path, 9, "b") == [9, 9]
    remote = RemoteRun(f"file://{tmp_path}/store", "r")
    assert whole(remote) == {7: [], 9: []}


def test_a_failed_upload_is_retried_then_named_and_made_up_for(tmp_path, store, capfd):
    store.fail("PUT", r"rank-00000\.safetensors", "SlowDown", 503, 1)
    lockstep.train(config(tmp_path, stop_at=3), Ragged())
    assert RemoteRun(URL, "r").steps() == [3]
    store.fail("PUT", r"step-00000006/", "AccessDenied", 403)
    store.fail("PUT", r"step-00000007/", "AccessDenied", 403)
    capfd.readouterr()
    result = lockstep.train(config(tmp_path, stop_at=7), Ragged())
    assert result.status == "stopped"
    last = capfd.readouterr().out.strip().splitlines()
    names(" ".join(last[-4:]), "step-00000006", "step-00000007", f"{URL}/r")
    assert RemoteRun(URL, "r").steps() == [3]
    store.heal()
    lockstep.train(config(tmp_path, stop_at=7), Ragged())  # nothing to train, and something to upload
    assert whole(RemoteRun(URL, "r")) == {6: [], 7: []}
    lockstep.train(config(tmp_path), Ragged())
    assert whole(RemoteRun(URL, "r")) == {9: [], 12: []}


SLOW = [pytest.param(*each, marks=pytest.mark.slow) for each in (("NoSuchBucket", 404), ("RequestTimeTooSkewed", 403))]
LATER = [("ExpiredToken", 400), ("InternalError", 503), *SLOW]


@pytest.mark.parametrize(("code", "status"), LATER)
def test_store_failing_midway_ends_no_run_and_has_no_half_save(tmp_path, store, monkeypatch, capfd, code, status):
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    run = lockstep.Run(config(tmp_path), Ragged())
    for step in run:
        if step.global_step == 5:
            store.fail(".*", r"step-|checkpoints|owner" if code == "InternalError" else "", code, status)
    assert run.status == "finished"
    told = "".join(capfd.readouterr())
    assert names(told, "step-00000012", f"{URL}/r")
    assert told.count("Traceback") == 0
    store.heal()
    assert not any(whole(RemoteRun(URL, "r")).values())
    lockstep.train(config(tmp_path), Ragged())  # nothing to train, and something to upload
    assert whole(RemoteRun(URL, "r")) == {9: [], 12: []}
    files = [path for path in tmp_path.rglob("*") if path.is_file()] + [None]
    texts = [path.read_bytes() if path else (told + "".join(capfd.readouterr())).encode() for path in files]
    texts += [RemoteRun(URL, "").read(name.removeprefix("runs/")) or b"" for name in store.names()]
    assert not [text for text in texts if object_store.SECRET.encode() in text]


def test_a_full_local_disk_leaves_no_checkpoint_in_the_store(tmp_path, store, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("lockstep.checkpoint.write.shutil.disk_usage", lambda path: usage)
    with refuses(LockstepError, "10 B", tmp_path):
        lockstep.train(config(tmp_path), Ragged())
    assert not [name for name in store.names() if "step-" in name]
    monkeypatch.undo()


def test_every_command_takes_a_url_and_reads_what_it_needs(tmp_path, store, capsys, monkeypatch):
    folder = lockstep.train(config(tmp_path, stop_at=7), Ragged()).folder
    url, temporary = f"{URL}/r", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    capsys.readouterr()

    def told(*argv):
        code = dispatch([*map(str, argv)])
        return code, "".join(capsys.readouterr())

    def same(*argv):
        """The command says the same about the URL as about the folder, but for their names."""
        there, here = (
            told(*[url if each == "RUN" else each for each in argv]),
            told(*[folder if each == "RUN" else each for each in argv]),
        )
        assert there == here, argv
        return there

    for argv in (("list", "RUN"), ("list", "RUN", "--json"), ("verify", "RUN"), ("verify", "RUN", "--step", "6")):
        assert same("checkpoint", *argv)[0] == 0
    assert (
        told("checkpoint", "inspect", f"{url}/checkpoints/step-00000007")[1].splitlines()[1:]
        == (told("checkpoint", "inspect", folder)[1].splitlines()[1:])
    )
    for argv in (("goodput", "RUN", "--json"),):
        assert same(*argv)[0] == 0
    assert told("runs", URL)[0] == 0
    assert names(told("runs", URL)[1], "r", "stopped")
    store.requests.clear()
    for where, out in ((url, "there"), (folder, "here")):
        assert told("export", where, tmp_path / f"{out}.safetensors", "--step", "6")[0] == 0
        assert told("report", where, "-o", tmp_path / f"{out}.html")[0] == 0
    assert (tmp_path / "there.safetensors").read_bytes() == (tmp_path / "here.safetensors").read_bytes()
    model = lockstep.load(url, Ragged(), which=6)
    for name, tensor in lockstep.load(folder, Ragged(), which=6).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert told("checkpoint", "prune", url, "--keep", "1", "--no-keep-best")[0] == 0
    remote = RemoteRun(URL, "r")
    assert whole(remote) == {7: []}
    remote.write(OWNER, b'{"owner": "process 7 on c, started now", "token": "x"}')
    assert not list(temporary.iterdir())
    for argv in (("export", f"{URL}/none", tmp_path / "none"), ("evaluate", f"{URL}/none"), ("goodput", f"{URL}/none")):
        with refuses(CheckpointError, f"{URL}/none"):
            dispatch([*map(str, argv)])
    store.fail(".*", "", "AccessDenied", 403)
    with refuses(ConfigError, url, "403"):
        dispatch(["checkpoint", "list", url])


def test_the_nearest_whole_copy_is_resumed(tmp_path, store, capfd):
    folder = lockstep.train(config(tmp_path, stop_at=7), Ragged()).folder
    requests = store.requests.copy()
    lockstep.train(config(tmp_path, stop_at=8), Ragged())
    assert not [key for key in store.requests - requests if key.startswith("GET") and key.endswith(".safetensors")]
    for step in (7, 8):  # damaged here, whole there
        path = next(checkpoint.path_of(folder, step).glob("*.safetensors"), None)
        if path:
            path.write_bytes(path.read_bytes()[:-1] + b"x")
    lockstep.train(config(tmp_path), Ragged())
    lockstep.train(small_runs.config(tmp_path / "plain"), Ragged())
    assert small_runs.mark(folder.parent) == small_runs.mark(tmp_path / "plain")
    remote = RemoteRun(URL, "q")
    saved(tmp_path / "local/s3/bucket/runs/q", 3)
    remote.upload(tmp_path / "local/s3/bucket/runs/q", 3)
    name = "checkpoints/step-00000003/rank-00000.safetensors"
    remote.write(name, b"x" * len(remote.read(name)))
    with refuses(CheckpointError, "s3://bucket/runs/q", "--experiment-name"):
        lockstep.train(config(tmp_path, local="third", experiment_name="q"), Ragged())
    names(capfd.readouterr().err, "step-00000003")


def test_a_full_disk_is_named_before_a_download(tmp_path, store, monkeypatch):
    remote = RemoteRun(URL, "r")
    remote.upload(saved(tmp_path / "r", 3), 3)
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("lockstep.checkpoint.remote.shutil.disk_usage", lambda path: usage)
    with refuses(CheckpointError, "10 B", "--checkpoint.local-dir"):
        remote.download(tmp_path / "new", 3)
    assert not list((tmp_path / "new").rglob("*step*"))


def uploader(folder, **options):
    return Uploader(RemoteRun(URL, "r"), folder, **{"keep": 2, "every": 0, "beat": 0.1} | options)


def alive(owner):
    return False


def test_two_runs_do_not_upload_to_one_url(tmp_path, store, caplog):
    folder, lines = saved(tmp_path / "r", 3), []
    first, second = uploader(folder), uploader(saved(tmp_path / "b", 9))
    first.claim("process 1 on a", alive, lines.append)
    with refuses(ConfigError, f"{URL}/r", "process 1 on a", "--experiment-name"):
        second.claim("process 2 on b", alive, lines.append)
    assert names(lines[0], "process 1 on a")
    second.claim("process 2 on b", lambda owner: owner == "process 1 on a", lines.append)  # it is said to be dead
    assert names(first.settle(), f"{URL}/r")  # but it lives: it stops, and says so
    assert names(caplog.text, "process 2 on b")
    assert second.settle() == ""
    assert RemoteRun(URL, "r").steps() == [9]
    first.close()
    assert RemoteRun(URL, "r").read(OWNER)
    second.close()
    assert RemoteRun(URL, "r").read(OWNER) is None
    RemoteRun(URL, "r").write(OWNER, b'{"owner": "process 7 on c", "token": "x"}')  # it was killed
    third = uploader(folder)
    third.claim("process 3 on d", alive, lines.append)
    assert names(lines[-1], "process 7 on c")
    third.close()


def test_an_upload_never_blocks_a_save_and_keeps_what_it_sends(tmp_path, store):
    folder = saved(tmp_path / "r", 3)
    sending = uploader(folder, keep=1)
    sending.claim("process 1 on a", alive, print)
    store.delay = 0.4
    sending.submit(None)
    deadline = time.monotonic() + 30
    while sending.sending is None and time.monotonic() < deadline:
        time.sleep(0.005)
    start = time.perf_counter()
    saved(folder, 6, 9)
    removed = checkpoint.retain(folder, last=1, best=None, every=0, sending=sending.sending)
    sending.submit(None)
    assert time.perf_counter() - start < 0.4 * 3  # three requests of the upload that goes on
    assert removed == [6]
    store.delay = 0.0
    assert sending.settle() == "" or True
    checkpoint.retain(folder, last=1, best=None, every=0)
    assert sending.settle() == ""
    assert whole(RemoteRun(URL, "r")) == {9: []}
    sending.close()


class Hanging(RemoteRun):
    """A store that takes no file."""

    def put(self, path, name):
        time.sleep(30)


def test_a_store_that_hangs_ends_the_wait_at_its_limit(tmp_path, store):
    folder = saved(tmp_path / "r", 3)
    stuck = Uploader(Hanging(URL, "r"), folder, keep=2, every=0, wait=0.3)
    stuck.claim("process 1 on a", alive, print)
    start = time.perf_counter()
    assert names(stuck.settle(), "step-00000003", f"{URL}/r", "--checkpoint.upload-wait", folder)
    stuck.close()
    assert time.perf_counter() - start < 15
    again = uploader(folder)
    again.claim("process 2 on a", lambda owner: True, print)
    assert again.settle() == ""
    assert whole(RemoteRun(URL, "r")) == {3: []}
    again.close()


SCRIPT = """
import sys, lockstep, small_runs
from pathlib import Path
from toys import Ragged
from lockstep import checkpoint
config = small_runs.config({url!r}, checkpoint={{"local_dir": {local!r}}}, max_steps=100000, ckpt_freq=20)
sys.exit(lockstep.train(config, Ragged()).exit_code)
"""


def test_a_signal_during_an_upload_ends_with_75_and_a_whole_copy(tmp_path, store):
    store.delay = 0.3
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(url=URL, local=str(tmp_path / "local")))
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [warm.python(), str(script)],
        env=environ,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    deadline = time.monotonic() + 120
    while not any("rank-00000.safetensors" in key for key in list(store.requests)) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75, "".join(lines)
    reader.join(10)
    process.stdout.close()
    remote, folder = RemoteRun(URL, "r"), tmp_path / "local/s3/bucket/runs/r"
    newest = checkpoint.list_steps(folder)[-1]
    assert remote.steps()[-1] == newest
    assert not any(whole(remote).values())
    assert remote.leftovers() == []
    names("".join(lines), f"{URL}/r", newest)
