"""`lockstep.ray`: a run on the nodes of a Ray cluster; the real ones need the package ray."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from refusals import refuses
from shell import LINE_TASK, environment

import lockstep.ray
from lockstep import checkpoint
from lockstep.config.schema import Config
from lockstep.errors import ConfigError

TASK = LINE_TASK.replace("return ((", "__import__('time').sleep(0.02)\n        return ((")

# A cluster of two Ray nodes on this machine: `lose` ends an actor, a node or nothing, once the run is at step 10.
DRIVER = """
import os, signal, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
import lockstep
import lockstep.ray

folder, lose = Path(sys.argv[1]), sys.argv[2]
if lose == "one":
    ray.init(num_cpus=2, include_dashboard=False)
else:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    workers = [cluster.add_node(num_cpus=1) for _ in range(2 + (lose == "node"))]  # one to spare
    ray.init(cluster.address)

def actor():
    # The process of node 1's actor is the parent of its launcher.
    for each in Path("/proc").glob("[0-9]*"):
        try:
            words = (each / "cmdline").read_bytes().split(bytes(1))
        except OSError:
            continue
        if b"launch" in words and b"--node-rank=1" in words and f"{folder}/task.py:Line".encode() in words:
            return int((each / "stat").read_text().rpartition(")")[2].split()[1])

def harm():
    log = folder / "r" / "metrics.jsonl"
    while not log.exists() or log.read_text().count("\\n") < 12:
        time.sleep(0.1)
    if lose == "actor":
        os.kill(actor(), signal.SIGKILL)
    else:
        raylet = int(Path(f"/proc/{actor()}/stat").read_text().rpartition(")")[2].split()[1])
        (node,) = [each for each in workers if raylet in [process.pid for _, process in each.live_processes()]]
        cluster.remove_node(node, allow_graceful=False)
    print("HARMED", flush=True)

if lose in ("actor", "node"):
    threading.Thread(target=harm, daemon=True).start()
config = lockstep.Config(
    experiment_name="r", save_dir=str(folder), max_steps=int(sys.argv[3]), batch_size=8, micro_batch_size=2,
    device="cpu", eval_freq=0, log_freq=1, ckpt_freq=5, timeout=20.0, exact=True,
)
print(lockstep.ray.train(config, str(folder / "task.py:Line"), nodes=2, env={"GLOO_SOCKET_IFNAME": "lo"}), flush=True)
"""

needs_ray = pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed")


def test_bad_input_is_one_line(monkeypatch, tmp_path):
    for arguments, named in (
        ({"nodes": 0}, ["nodes", 0]),
        ({"processes_per_node": -1}, ["processes_per_node", -1]),
        ({"restarts": -1}, ["restarts", -1]),
    ):
        with refuses(ConfigError, *named):
            lockstep.ray.train(Config(), **arguments)
    monkeypatch.setitem(sys.modules, "ray", None)
    with refuses(ConfigError, "ray", "pip install 'torch-lockstep[ray]'") as caught:
        lockstep.ray.train(Config())
    assert "\n" not in str(caught.value)


def test_a_task_is_named_by_its_file(tmp_path, monkeypatch):
    class Inner:
        pass

    (tmp_path / "task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    assert lockstep.ray._task_name("task.py:Line") == f"{tmp_path}/task.py:Line"
    assert lockstep.ray._task_name("elsewhere.py:Line") == "elsewhere.py:Line"
    assert lockstep.ray._task_name(lockstep.Task) == f"{Path(lockstep.__file__).parent}/task.py:Task"
    for task in (Inner, Inner(), int):
        with refuses(ConfigError, "task"):
            lockstep.ray._task_name(task)


def test_a_launcher_that_still_ends_is_waited_for(monkeypatch):
    monkeypatch.setattr(lockstep.ray, "_KILL", 20.0)
    code = "import time; time.sleep(0.5)"
    with subprocess.Popen([sys.executable, "-c", code, "lockstep", "launch"]) as process:
        began = time.monotonic()
        while not lockstep.ray._is_launcher(process.pid) and process.poll() is None:
            time.sleep(0.01)
        lockstep.ray._wait_for_end([process.pid, 0, os.getpid()])
        assert time.monotonic() - began < 20
        assert process.wait(20) == 0


def drive(tmp_path, lose, steps):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "driver.py").write_text(DRIVER)
    words = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path), lose, str(steps)]
    variables = environment(
        RAY_TEST_MARK=f"lockstep-{os.getpid()}-{time.time_ns()}", RAY_DISABLE_DOCKER_CPU_WARNING="1"
    )
    with subprocess.Popen(
        words, env=variables, cwd=tmp_path, stdout=-1, stderr=-2, text=True, start_new_session=True
    ) as driver:
        try:
            shown = driver.communicate(timeout=280)[0]
        except subprocess.TimeoutExpired:
            os.killpg(driver.pid, signal.SIGKILL)
            pytest.fail(driver.communicate()[0][-4000:])
    assert driver.returncode == 0, shown
    return shown


def fingerprint(tmp_path):
    return checkpoint.fingerprint(checkpoint.newest(tmp_path / "r", say=print))


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("lose", ["actor", "node"])
def test_a_lost_actor_or_node_starts_all_again_from_the_checkpoint(tmp_path, lose):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "task.py").write_text(TASK)
    train = ["train", "--task", f"{alone}/task.py:Line", "--save-dir", str(alone), "--experiment-name", "r", "--exact"]
    train += [
        "--max-steps",
        "60",
        "--batch-size",
        "8",
        "--micro-batch-size",
        "2",
        "--device",
        "cpu",
        "--eval-freq",
        "0",
    ]
    subprocess.run([sys.executable, "-m", "lockstep", *train], env=environment(), check=True, capture_output=True)
    (tmp_path / "ray").mkdir()
    shown = drive(tmp_path / "ray", lose, 60)
    assert "HARMED" in shown
    assert "was lost" in shown
    assert "restart 1 of 3" in shown
    assert "restart 2 of 3" not in shown
    state = json.loads(next((tmp_path / "ray" / "r").glob("checkpoints/step-00000060/state.json")).read_text())
    assert state
    assert fingerprint(tmp_path / "ray") == fingerprint(alone)


@needs_ray
@pytest.mark.slow
def test_two_nodes_on_one_machine(tmp_path):
    shown = drive(tmp_path, "one", 4)
    assert str(tmp_path / "r") in shown
    assert "restart" not in shown
