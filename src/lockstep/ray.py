"""Train on the nodes of a Ray cluster.

    folder = lockstep.ray.train(config, "task.py:Digits", nodes=2, gpus_per_node=8)
    lockstep.ray.doctor(config, "task.py:Digits", nodes=2, gpus_per_node=8)     # checks the same nodes first

Ray places one actor a node, and each starts `lockstep launch` there. If an actor or a node is lost, or a rank fails,
all start again from the newest checkpoint. The package ray, the extra `ray`, is imported here only.
"""

import contextlib
import dataclasses
import importlib
import inspect
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.distributed.launcher import LAUNCHER_VARIABLE
from lockstep.errors import FINAL_CODES, ConfigError, LockstepError
from lockstep.extras import install_extra
from lockstep.launch.secret import SECRET_VARIABLE
from lockstep.launch.workers import life_pipe, private_folder

__all__ = ["doctor", "train"]

# Seconds until Ray has the nodes, which it may have to start.
_PATIENCE = 1800.0
# Seconds for the nodes to end after one has ended, on top of --timeout.
_GRACE = 60.0
# Seconds between SIGTERM and SIGKILL.
_KILL = 30.0
# In place of an exit code.
_LOST = -1


def train(
    config: Config,
    task: type | str | None = None,
    *,
    nodes: int = 1,
    processes_per_node: int = 0,
    gpus_per_node: int = 0,
    cpus_per_node: int = 0,
    restarts: int = 3,
    env: Mapping[str, str] | None = None,
) -> Path:
    """Train on Ray's nodes to the end.

    Args:
        config: everything except the task. `save_dir` must be on storage that all nodes share, or a URL.
        task: a class in a file, or FILE.py:CLASS, that every node can read; None: the task that `config` names.
        nodes: how many; Ray puts them on different machines where it can.
        processes_per_node: 0: one for each GPU, else one.
        gpus_per_node: GPUs that Ray reserves.
        cpus_per_node: cores that Ray reserves, shared by the processes; 0: one for each.
        restarts: how often all start again after a loss or a failure.
        env: further environment variables of the processes.

    Returns:
        The run's folder; if `save_dir` is a URL its local copy, which is on node 0's machine.

    Raises:
        ConfigError: ray is not installed, or an argument is invalid.
        LockstepError: the run failed; the line names the node and quotes its last line.
    """
    size = _Size(nodes, processes_per_node, gpus_per_node, cpus_per_node, restarts)
    _run("train", config, task, size, env or {})
    return Path(config.local_dir).expanduser() / config.experiment_name


def doctor(
    config: Config,
    task: type | str | None = None,
    *,
    nodes: int = 1,
    processes_per_node: int = 0,
    gpus_per_node: int = 0,
    cpus_per_node: int = 0,
    env: Mapping[str, str] | None = None,
) -> None:
    """Check Ray's nodes and their network, as `lockstep doctor` does.

    The report is printed on the driver.

    The arguments are those of `train`.

    Raises:
        ConfigError: ray is not installed, or an argument is invalid.
        LockstepError: a check reports FAIL, or a node was lost.
    """
    _run("doctor", config, task, _Size(nodes, processes_per_node, gpus_per_node, cpus_per_node, 0), env or {})


class _Size(NamedTuple):
    """What the user asks Ray for."""

    nodes: int
    processes_per_node: int
    gpus_per_node: int
    cpus_per_node: int
    restarts: int


def _run(command: str, config: Config, task: type | str | None, size: _Size, env: Mapping[str, str]) -> None:
    for name, value in size._asdict().items():
        least = int(name == "nodes")
        if value < least:
            raise ConfigError(f"{name} is {value}: it must be at least {least}")
    ray = _import_ray()
    if not ray.is_initialized():
        ray.init()
    if "://" not in config.save_dir:
        config = dataclasses.replace(config, save_dir=str(Path(config.save_dir).expanduser().absolute()))
    processes = size.processes_per_node or size.gpus_per_node or 1
    cores = size.cpus_per_node or processes
    # Every process would otherwise use all cores that Ray reserved for the node.
    threads = 1 if config.exact else max(1, cores // processes)
    job = _RayJob(
        command=command,
        settings=cli.to_toml(config, own_task=task is not None),
        flags=["--task", _task_name(task)] if task is not None else [],
        nodes=size.nodes,
        processes=processes,
        bundle={"CPU": float(cores)} | ({"GPU": float(size.gpus_per_node)} if size.gpus_per_node else {}),
        variables={"OMP_NUM_THREADS": str(threads), SECRET_VARIABLE: secrets.token_hex(32), **env},
        timeout=config.timeout,
    )
    # Process ids of the launchers of lost actors.
    earlier: list[int] = []
    for attempt in range(size.restarts + 1):
        code, line = _run_round(ray, job, earlier)
        if code == 0:
            return
        if code in FINAL_CODES or attempt == size.restarts:
            break
        print(f"lockstep: {line}; restart {attempt + 1} of {size.restarts}", file=sys.stderr, flush=True)
    if command == "train":
        again = "; the same call resumes from the newest checkpoint, if there is one"
    else:
        again = ""
    error = LockstepError(f"{line}{again}")
    error.exit_code = max(code, 1)
    raise error


@dataclasses.dataclass(frozen=True)
class _RayJob:
    """The launchers that each round starts, and what Ray reserves for them.

    Attributes:
        command: train or doctor.
        settings: the configuration, as a file's text.
        flags: further flags of the command.
        bundle: what Ray reserves for a node.
        variables: of the launchers.
        timeout: seconds for a rank to answer.
    """

    command: str
    settings: str
    flags: list[str]
    nodes: int
    processes: int
    bundle: dict[str, float]
    variables: dict[str, str]
    timeout: float


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"lockstep.ray needs the package ray ({error.name} is missing): {install_extra('ray')}"
        ) from error


def _task_name(task: type | str) -> str:
    """Return FILE.py:CLASS with the file's whole path.

    Raises:
        ConfigError: the class is in no file.
    """
    if isinstance(task, str):
        file, colon, name = task.rpartition(":")
        if Path(file).is_file():
            return f"{Path(file).absolute()}{colon}{name}"
        return task
    try:
        path = inspect.getsourcefile(task)
    except (TypeError, OSError):
        path = None
    if path is None or not isinstance(task, type) or "." in task.__qualname__:
        raise ConfigError(f"task is {task!r}: it must be a class that a file defines, or 'FILE.py:CLASS'")
    return f"{Path(path).absolute()}:{task.__qualname__}"


def _run_round(ray: Any, job: _RayJob, earlier: list[int]) -> tuple[int, str]:
    """Start all nodes, and wait for their end.

    Args:
        earlier: process ids of launchers that may still be ending; this round's are added.

    Returns:
        (exit code, 0 if all succeeded; what happened first, for the last line).
    """
    groups = importlib.import_module("ray.util")
    placement = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    group = groups.placement_group([job.bundle] * job.nodes, strategy="SPREAD")
    actors: list[Any] = []
    try:
        _wait_for_nodes(ray, job, group)
        actors = [
            ray.remote(_NodeActor)
            .options(
                num_cpus=job.bundle["CPU"],
                num_gpus=job.bundle.get("GPU", 0.0),
                # `stop` must arrive while `run` waits.
                max_concurrency=4,
                scheduling_strategy=placement(group, placement_group_bundle_index=index),
            )
            .remote()
            for index in range(job.nodes)
        ]
        return _follow(ray, job, actors, earlier)
    finally:
        # An actor that is gone needs no stop.
        with contextlib.suppress(Exception):
            ray.get([actor.stop.remote() for actor in actors], timeout=_KILL + 10)
        for actor in actors:
            ray.kill(actor)
        groups.remove_placement_group(group)


def _wait_for_nodes(ray: Any, job: _RayJob, group: Any) -> None:
    ready = group.ready()
    until = time.monotonic() + _PATIENCE
    while not ray.wait([ready], timeout=15.0)[0]:
        what = f"{job.nodes} nodes with {' and '.join(f'{amount:g} {name}' for name, amount in job.bundle.items())}"
        if time.monotonic() >= until:
            raise LockstepError(
                f"Ray had not {what} within {_PATIENCE:g} s: add nodes (`ray status` shows what it has), or ask for "
                "fewer; the same call resumes from the newest checkpoint, if there is one"
            )
        print(f"lockstep: waiting until Ray has {what}", file=sys.stderr, flush=True)


def _follow(ray: Any, job: _RayJob, actors: Sequence[Any], earlier: list[int]) -> tuple[int, str]:
    lost = ray.exceptions.RayError
    try:
        addresses = ray.get([actor.place.remote() for actor in actors])
        host, port = addresses[0]
        runs = []
        for index, actor in enumerate(actors):
            runs.append(actor.run.remote(job, [*_meeting(job, host, port), f"--node-rank={index}"], earlier))
        pids = ray.get([actor.pid.remote() for actor in actors])
    except lost as error:
        return _LOST, f"a node of Ray failed before the run began ({_last_line(str(error))})"
    earlier += pids
    nodes = {}
    for index, run in enumerate(runs):
        nodes[run] = f"node {index} ({addresses[index][0]})"
    waiting = list(runs)
    ends = list[tuple[int, str]]()
    until = 0.0
    while waiting:
        finished, waiting = ray.wait(waiting, timeout=1.0)
        for run in finished:
            try:
                code, line = ray.get(run)
                ends.append((code, f"{nodes[run]} ended with code {code}: {line}"))
            except lost as error:
                ends.append((_LOST, f"{nodes[run]} was lost ({type(error).__name__})"))
        if any(code for code, _ in ends):
            until = until or time.monotonic() + job.timeout + _GRACE
            if time.monotonic() > until:
                # The caller stops the others.
                break
    failed = [end for end in ends if end[0]]
    if not failed:
        return 0, ""
    # Report bad input first, then a lost node, because the others failed for it; otherwise the first failure.
    return min(failed, key=lambda end: 0 if end[0] in FINAL_CODES else 1 if end[0] == _LOST else 2)


def _meeting(job: _RayJob, host: str, port: int) -> list[str]:
    flags_of_launch = [f"--nproc-per-node={job.processes}"]
    if job.nodes == 1:
        return flags_of_launch
    # A lost node ends all nodes. Ray then finds another one, and all start again; without this flag the remaining nodes
    # would continue without it.
    return [
        *flags_of_launch,
        f"--nnodes={job.nodes}",
        f"--master-addr={host}",
        f"--master-port={port}",
        "--max-losses=0",
    ]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


class _NodeActor:
    """The actor of a node: starts the launcher there, which ends with the actor."""

    def __init__(self) -> None:
        self._folder = private_folder()
        self._pipe = life_pipe(self._folder)
        self._launcher: subprocess.Popen[str] | None = None

    def place(self) -> tuple[str, int]:
        """Return this node's address, and a port that is free there."""
        host = importlib.import_module("ray.util").get_node_ip_address()
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            return host, int(server.getsockname()[1])

    def run(self, job: _RayJob, flags: Sequence[str], earlier: Sequence[int]) -> tuple[int, str]:
        """Run the launcher to its end; return its exit code and its last line."""
        _wait_for_end(earlier)
        settings = self._folder / "config.toml"
        settings.write_text(job.settings, encoding="utf-8")
        words = ["launch", *flags, "--", job.command, "--config", str(settings), *job.flags]
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "lockstep", *words],
            env=os.environ | job.variables | {LAUNCHER_VARIABLE: str(self._pipe)},
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        last_line = ""
        assert self._launcher.stderr
        for line in self._launcher.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            last_line = line.strip() or last_line
        return self._launcher.wait(), last_line

    def pid(self) -> int:
        """Return the launcher's process id, once it has one.

        0 if it could not be started.
        """
        until = time.monotonic() + 2 * _KILL
        while self._launcher is None and time.monotonic() < until:
            time.sleep(0.05)
        if self._launcher:
            return self._launcher.pid
        return 0

    def stop(self) -> None:
        """Let the run save itself; kill what does not end."""
        if self._launcher and self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(_KILL)
                return
            # The launcher's ranks end with it.
            self._launcher.kill()


def _wait_for_end(pids: Sequence[int]) -> None:
    """Wait until the launchers of lost actors on this machine have ended.

    They keep the run's folder locked until they have saved it.
    """
    until = time.monotonic() + _KILL
    while time.monotonic() < until and any(_is_launcher(pid) for pid in pids if pid):
        time.sleep(0.1)


def _is_launcher(pid: int) -> bool:
    try:
        return b"lockstep\0launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
