"""Runs of several nodes that share no folder, only an object store."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import small_runs
import torch
from ranks import run
from refusals import names, refuses
from shell import environment, free_port
from warm import python

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.remote import RemoteRun
from lockstep.checkpoint.stored import open_run
from lockstep.distributed.world import World
from lockstep.errors import LockstepError


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 2


class Layers(lockstep.Task):
    reduction = "mean"  # no trial can show it for fsdp with --exact

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))

    def dataset(self, split):
        return Numbers()

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def config(folder, **changes):
    options = {"exact": True, "precision": "float32", "eval_freq": 0}
    local = {"local_dir": "local", "keep": 2}
    return small_runs.config(f"file://{folder}/store", checkpoint=local, **options | changes)


def place(folder, node):
    """A node's own disk."""
    path = folder / f"node{node}"
    path.mkdir(exist_ok=True)
    os.chdir(path)
    return path / f"local/file/{str(folder).strip('/')}/store/r"


def on_nodes(world, folder, steps, engine, first, per_node):
    """Train on nodes `first`, ... of `per_node` ranks each."""
    place(folder, first + world.rank // per_node)
    result = lockstep.train(config(folder, stop_at=steps, engine=engine), Layers(), world)
    return [result.global_step, list(world.leads)]


def on_new_nodes(world, folder, url):
    """Begin a new run with a sharded model at the weights of a URL."""
    place(folder, 6 + world.rank)
    new = config(folder, experiment_name="new", init_from=url, lr=0.0, max_steps=1, engine="fsdp")
    lockstep.train(new, Layers(), world)
    copies = Path("local/file", str(folder).strip("/"), "store/r/checkpoints/step-00000012")
    return sorted(path.name for path in copies.glob("*"))


def test_nodes_without_a_shared_folder_upload_parts_and_resume(tmp_path):
    remote = RemoteRun(f"file://{tmp_path}/store", "r")
    assert run(on_nodes, 4, tmp_path, 7, "fsdp", 0, 2) == [[7, [0, 0, 2, 2]]] * 4
    assert {step: remote.verify(step) for step in remote.steps()} == {6: [], 7: []}
    assert not list((tmp_path / "store/r/uploads").rglob("*.json"))
    data = [sorted(path.name for path in tmp_path.glob(f"node{n}/**/step-00000007/*.safetensors")) for n in (0, 1)]
    assert data == [[f"rank-0000{rank}.safetensors" for rank in ranks] for ranks in ((0, 1), (2, 3))]
    logs = {path.name for path in (tmp_path / "store/r/logs").iterdir()}
    assert logs == {f"rank-0000{rank}.log" for rank in range(4)}
    assert run(on_nodes, 2, tmp_path, 9, "ddp", 1, 1) == [[9, [0, 1]]] * 2  # one of them, and a new one
    assert run(on_nodes, 1, tmp_path, 12, "single", 5, 1) == [[12, []]]
    lockstep.train(small_runs.config(tmp_path / "plain", exact=True, precision="float32"), Layers())
    mark = small_runs.mark(tmp_path / "plain")
    last = RemoteRun(f"file://{tmp_path}/store", "r")
    assert {step: last.verify(step) for step in last.steps()} == {9: [], 12: []}
    with open_run(last.url) as path:
        assert checkpoint.fingerprint(checkpoint.path_of(path, 12)) == mark[0]
    copies = run(on_new_nodes, 2, tmp_path, last.url)
    assert copies == [["index.json", "manifest.json", "state.json"]] * 2  # of the data each rank read its part
    with open_run(f"file://{tmp_path}/store/new/checkpoints/step-00000001") as path:
        assert checkpoint.fingerprint(path) == mark[0]


TASK = """
import os, signal
from pathlib import Path
import torch, lockstep

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 2

class Mortal(lockstep.Task):
    def model(self):
        return torch.nn.Linear(8, 2)

    def dataset(self, split):
        return Numbers()

    def loss(self, model, batch):
        mark = Path(__file__).with_name("dead")
        if os.environ.get("RANK") == "1" and os.environ.get("DIES") and self.step == 6 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def launchers(folder, *flags, nodes=("a", "b"), **variables):
    """Train with a launcher for each node, each in a folder of its own, to which --checkpoint.local-dir is relative."""
    (folder / "mortal.py").write_text(TASK)
    sizes = "--batch-size 4 --micro-batch-size 2 --ckpt-freq 3 --eval-freq 0 --log-freq 1 --exact --timeout 20"
    task = ["--task", f"{folder / 'mortal.py'}:Mortal", "--device", "cpu", "--checkpoint.local-dir", "local"]
    train = ["train", *task, *sizes.split(), *flags]
    port, processes = free_port(), []
    for number, name in enumerate(nodes):
        (folder / name).mkdir(exist_ok=True)
        where = ["--nnodes", str(len(nodes)), "--node-rank", str(number), "--master-addr", "127.0.0.1"]
        command = [python(), "-m", "lockstep", "launch", *where, "--master-port", str(port), "--", *train]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, cwd=folder / name, env=environment(**variables), **pipes))
    told = [process.communicate(timeout=120)[0] for process in processes]
    return [process.returncode for process in processes], told


def parts(folder, value):
    """A checkpoint's files on two nodes: all but the data on the first, which is rank 0's."""
    for node in ("a", "b"):
        path = checkpoint.path_of(folder / node, 3)
        shutil.rmtree(path, ignore_errors=True)
    whole = checkpoint.save(folder / "whole", 3, {"model/w": torch.full((9,), value)}, {}, World(), engine="single")
    for node in ("a", "b"):
        shutil.copytree(whole, path := checkpoint.path_of(folder / node, 3))
        for name in ("index.json", "state.json") if node == "b" else ("rank-00000.safetensors",):
            (path / name).unlink()
    shutil.rmtree(folder / "whole")


def test_manifest_follows_the_files_of_all_nodes_of_its_save(tmp_path, monkeypatch):
    remote, data = RemoteRun(f"file://{tmp_path}/store", "r"), "checkpoints/step-00000003/rank-00000.safetensors"

    def send(node):
        return remote.upload_part(tmp_path / node, 3, node, last=node == "a")

    parts(tmp_path, 1.0)
    assert (send("a"), remote.steps(), remote.leftovers()) == (None, [], [3])
    assert send("b") > 0
    assert send("a") > 0
    assert remote.verify(3) == []
    assert (send("a"), send("b")) == (0, 0)
    parts(tmp_path, 2.0)  # the step is saved again, after a rollback
    assert (send("b"), remote.verify(3)) == (None, [])  # the first stays whole until node 0 removes its manifest
    assert (send("a"), remote.steps()) == (None, [])
    assert send("b") > 0
    remote.write(data, b"cut")  # what was sent is damaged there
    with refuses(LockstepError, data, "3 bytes"):
        send("a")
    assert remote.steps() == []
    assert (send("a"), send("b") > 0, send("a") > 0) == (None, True, True)
    assert remote.verify(3) == []
    remote.discard([3])

    def finish_first(name):
        monkeypatch.undo()
        assert send("a") > 0
        return remote.read(name)

    assert (send("a"), send("b") > 0) == (None, True)
    monkeypatch.setattr(remote, "read", finish_first)  # rank 0's node finishes while b looks for its own note
    assert send("b") > 0
    assert remote.verify(3) == []
    assert not list((tmp_path / "store").rglob("b.json"))
    remote.discard([3])
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_lost_rank_on_another_node_is_replaced_and_uploaded(tmp_path):
    url = f"file://{tmp_path}/store"
    codes, told = launchers(tmp_path, "--save-dir", url, "--max-steps", "12", "--stop-at", "8", DIES="1")
    assert codes == [0, 0], "\n".join(told)
    assert (tmp_path / "dead").exists()
    remote = RemoteRun(url, "default")
    assert {step: remote.verify(step) for step in remote.steps()} == {3: [], 6: [], 8: []}
    codes, told = launchers(tmp_path, "--save-dir", url, "--max-steps", "12", nodes=("b", "c"))
    assert codes == [0, 0], "\n".join(told)
    assert {step: remote.verify(step) for step in remote.steps()} == {8: [], 9: [], 12: []}
    codes, told = launchers(tmp_path, "--save-dir", str(tmp_path / "plain"), "--max-steps", "12", nodes=("d",))
    assert codes == [0], told
    newest = checkpoint.newest(tmp_path / "plain/default", say=print)
    with open_run(f"{url}/default") as path:
        assert checkpoint.fingerprint(checkpoint.path_of(path, 12)) == checkpoint.fingerprint(newest)
    codes, told = launchers(tmp_path, "--save-dir", "here", "--max-steps", "12")
    assert set(codes) == {2}, told
    assert names("".join(told), "does not see the run's folder", "--save-dir")
