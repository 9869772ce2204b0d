"""`lockstep.ray`: a run on the nodes of a Ray cluster."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from namespaces import cluster
from refusals import names, refuses
from shell import LINE_TASK, environment

import lockstep.ray
from lockstep import checkpoint
from lockstep.config.schema import Config
from lockstep.errors import ConfigError

TASK = LINE_TASK.replace("return ((", "__import__('time').sleep(0.02)\n        return ((")

DRIVER = """
import sys
import ray
import lockstep
import lockstep.ray

folder, steps, address, lockstep.ray._PATIENCE = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
ray.init(address, **({"num_cpus": 2, "include_dashboard": False} if address == "local" else {}))
config = lockstep.Config(
    experiment_name="r", save_dir=folder, max_steps=steps or 1, batch_size=8, micro_batch_size=2, device="cpu",
    eval_freq=0, log_freq=1, ckpt_freq=5, timeout=20.0, exact=True,
)
try:
    if steps == 0:
        lockstep.ray.doctor(config, f"{folder}/task.py:Line", nodes=2)
    else:
        print(lockstep.ray.train(config, f"{folder}/task.py:Line", nodes=2), flush=True)
except lockstep.errors.LockstepError as error:
    sys.exit(f"lockstep: error: {error}")
"""


def test_bad_input_is_one_line(monkeypatch, tmp_path):
    for arguments, named in (
        ({"nodes": 0}, ["nodes", 0]),
        ({"processes_per_node": -1}, ["processes_per_node", -1]),
        ({"restarts": -1}, ["restarts", -1]),
    ):
        with refuses(ConfigError, *named):
            lockstep.ray.train(Config(), **arguments)
    monkeypatch.setitem(sys.modules, "ray", None)
    with refuses(ConfigError, "ray", "install the extra ray of torch-lockstep") as caught:
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


RAY = {
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # else some commands of Ray make one, in the user's home, and others have none
    "RAY_AUTH_TOKEN": secrets.token_hex(16),
}
STEPS = 60


def prepare(folder):
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(TASK)
    (folder / "driver.py").write_text(DRIVER)
    return folder


def driver(folder, steps, address="local", patience=300):
    return [sys.executable, str(folder / "driver.py"), str(folder), str(steps), address, str(patience)]


def fingerprint(folder):
    return checkpoint.fingerprint(checkpoint.newest(folder / "r", say=print))


def undisturbed(folder):
    """The bits of the same run on one process, without Ray."""
    sizes = f"--max-steps {STEPS} --batch-size 8 --micro-batch-size 2 --device cpu --eval-freq 0 --exact".split()
    train = ["train", "--task", f"{folder}/task.py:Line", "--save-dir", str(folder), "--experiment-name", "r", *sizes]
    subprocess.run([sys.executable, "-m", "lockstep", *train], env=environment(), check=True, capture_output=True)
    return fingerprint(folder)


def test_two_launchers_on_one_ray_node(tmp_path):
    folder = prepare(tmp_path / "r")
    done = subprocess.run(driver(folder, 4), env=environment(**RAY), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(folder / "r") in done.stdout
    assert "restart" not in done.stderr


class RayCluster:
    """A Ray cluster on nodes of their own: the head, without cores for runs, and others with a core each."""

    def __init__(self, nodes, folder):
        self.nodes, self.folder, self.address = nodes, folder, f"{nodes[0].address}:6379"
        self.daemons = []
        self.environment = environment(**RAY)
        del self.environment["GLOO_SOCKET_IFNAME"]
        try:
            self._start(0, "--head", "--port=6379", f"--temp-dir={folder}", "--include-dashboard=false")
            for number in range(1, len(nodes)):
                self._start(number, f"--address={self.address}")
        except BaseException:
            self.close()
            raise

    def _start(self, number, *words):
        own = [f"--node-ip-address={self.nodes[number].address}", f"--num-cpus={min(number, 1)}", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *own, *words]
        output = self.folder / f"node{number}.txt"
        with output.open("w") as file:
            daemon = self.nodes[number].start(
                [*command, "--object-store-memory=80000000"], env=self.environment, stdout=file
            )
        self.daemons.append(daemon)
        until = time.monotonic() + 90
        while "Ray runtime started" not in output.read_text():
            assert daemon.poll() is None, output.read_text()
            assert time.monotonic() < until, output.read_text()
            time.sleep(0.1)

    def close(self):
        for node in self.nodes:
            node.kill()
        for daemon in self.daemons:
            daemon.wait()

    def train(self, folder, lose="", patience=300, steps=STEPS):
        """Run the driver to its end, the doctor's with 0 steps, and lose an "actor" or a "node" after step 10.

        Returns its exit code and output.
        """
        words = driver(prepare(folder), steps, self.address, patience)
        with self.nodes[0].start(words, env=self.environment) as process:
            if lose:
                until = time.monotonic() + 120
                log = folder / "r" / "metrics.jsonl"
                while not log.exists() or log.read_text().count("\n") < 12:
                    assert process.poll() is None, process.stdout.read()
                    assert time.monotonic() < until
                    time.sleep(0.05)
                launcher = self._launcher(folder)
                if lose == "node":
                    next(node for node in self.nodes if launcher in node.processes()).kill()
                else:
                    actor = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
                    os.kill(actor, signal.SIGKILL)
            try:
                shown = process.communicate(timeout=200)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                pytest.fail(process.communicate()[0][-4000:])
        return process.returncode, shown

    def _launcher(self, folder):
        """The process id of node 1's launcher."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                if {b"launch", b"--node-rank=1", f"{folder}/task.py:Line".encode()} <= set(words):
                    return int(path.name)
        raise AssertionError("node 1 has no launcher")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lost_actor_or_node_restarts_from_the_checkpoint_or_ends(tmp_path):
    """One Ray cluster for all four: undisturbed, an actor lost, a node lost with another to spare, and without."""
    wanted = undisturbed(prepare(tmp_path / "alone"))
    short = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # a socket's path has 107 bytes
    with short, cluster(4) as nodes, contextlib.closing(RayCluster(nodes, Path(short.name))) as ray:
        code, shown = ray.train(tmp_path / "doctor", steps=0)
        assert code == 0, shown
        assert "0 FAIL, in" in shown
        for check in ("meeting", "versions", "shared folder", "tcp", "bandwidth", "task"):
            assert re.search(rf"ok +{check}\b", shown), check
        for number, lose in enumerate(("", "actor", "node")):
            folder = tmp_path / str(number)
            code, shown = ray.train(folder, lose)
            assert code == 0, shown
            assert fingerprint(folder) == wanted
            assert ("was lost" in shown, "restart 1 of 3" in shown) == (bool(lose), bool(lose))
            assert "restart 2 of 3" not in shown
        code, shown = ray.train(tmp_path / "last", "node", patience=20)
    assert code == 1, shown
    assert "restart 1 of 3" in shown
    (last,) = [line for line in shown.splitlines() if line.startswith("lockstep: error: ")]  # Ray logs more after it
    assert names(last, "2 nodes with 1 CPU", "ray status", "checkpoint")
