"""Processes that a scheduler started without a launcher: ranks of srun, else refused wherever a run starts."""

import os
import sys
from types import SimpleNamespace

import pytest
import small_runs
from refusals import refuses
from shell import SLURM_TASK

import lockstep
from lockstep.commands import train as train_command
from lockstep.distributed import starters
from lockstep.distributed.launcher import OPENCV_THREADS, limit_opencv
from lockstep.distributed.starters import SlurmTask, find_launch_mistake, node_address, read_starter
from lockstep.distributed.world import World
from lockstep.errors import ConfigError


@pytest.mark.parametrize(("threads", "variable", "left"), [(8, None, 1), (4, None, 4), (8, "6", 8)])
def test_ranks_of_torchrun_have_one_thread_of_opencv(monkeypatch, threads, variable, left):
    """Torchrun sets OMP_NUM_THREADS, which OpenCV does not read."""
    opencv = SimpleNamespace(getNumThreads=lambda: threads, getNumberOfCPUs=lambda: 8, count=threads)
    opencv.setNumThreads = lambda count: setattr(opencv, "count", count)
    monkeypatch.setitem(sys.modules, "cv2", opencv)
    environ = {OPENCV_THREADS: variable} if variable else {}
    limit_opencv(environ)
    assert (opencv.count, environ[OPENCV_THREADS]) == (left, variable or "1")


STEP = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}
RANK = {"RANK": "1", "WORLD_SIZE": "8"}


def test_each_task_of_srun_is_a_rank(monkeypatch):
    monkeypatch.setattr(starters, "node_address", lambda host: f"{host}.cluster")
    environ = dict(SLURM_TASK)
    read_starter(environ)
    expected = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert expected.items() <= environ.items()
    assert environ["MASTER_ADDR"] == "gpu003.cluster"
    assert 10000 <= int(environ["MASTER_PORT"]) < 30000
    ports = {
        SlurmTask.read({**SLURM_TASK, **other}).port
        for other in ({}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"})
    }
    assert len(ports) == 3  # steps of one job, and a job that is requeued while its port is still in use
    own = {**SLURM_TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5", "OMP_NUM_THREADS": "3"}
    read_starter(own)
    assert (own["MASTER_ADDR"], own["MASTER_PORT"], own["OMP_NUM_THREADS"]) == ("10.0.0.1", "5", "3")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[1-2]", "n1"), ("gpu[003-004,7],login1", "gpu003"), ("a1,b2", "a1"), ("r[1-2]n[5,6]x", "r1n5x")],
)
def test_the_first_host_of_a_list(nodes, first):
    assert SlurmTask.read({**SLURM_TASK, "SLURM_STEP_NODELIST": nodes}).host == first


def test_tasks_on_a_node_are_counted():
    environ = {**SLURM_TASK, "SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_STEP_NUM_TASKS": "7"}
    assert [SlurmTask.read({**environ, "SLURM_NODEID": str(node)}).local_size for node in range(3)] == [3, 3, 1]


def test_threads_are_a_share_of_the_cores_that_slurm_grants(monkeypatch):
    monkeypatch.setattr(starters, "cores", lambda: 64)
    monkeypatch.setattr(starters, "node_address", lambda host: host)
    for granted, threads in (("8", "4"), ("1", "1")):
        environ = {**SLURM_TASK, "SLURM_CPUS_ON_NODE": granted, "SLURM_NODEID": "0"}
        read_starter(environ)
        assert environ["OMP_NUM_THREADS"] == threads
        assert environ["LOCKSTEP_CORES"] == granted  # the doctor's count: Slurm may have bound this task to some


def test_a_node_whose_name_does_not_resolve_has_slurms_address(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho NodeName=$4 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=$4\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert node_address("localhost") == "localhost"
    assert node_address("no-such-node.invalid") == "10.1.2.3"
    scontrol.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node_address("no-such-node.invalid") == "no-such-node.invalid"


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        (STEP, "srun -N2 --ntasks-per-node=1 lockstep launch --nproc-per-node 4 -- train"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "1"}, "srun -n1 lockstep launch --nproc-per-node 8 -- train"),
        ({**SLURM_TASK, "SLURM_HET_SIZE": "2"}, "srun -N2 --ntasks-per-node=1 lockstep launch"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun -n1 lockstep launch --nproc-per-node 2"),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, "mpirun -n1 lockstep launch --nproc-per-node 3"),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "2"}, "lockstep launch -- train"),
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}, "lockstep launch --nnodes $SKYPILOT_NUM_NODES"),
    ],
)
def test_tasks_training_alone_are_told_the_intended_command(environ, command):
    with refuses(ConfigError, command, next(name for name in environ if name.endswith(("PROCID", "RANK")))):
        read_starter(dict(environ))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**SLURM_TASK, **RANK},  # torchrun or `lockstep launch` under srun
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # srun -n1, and the shell of salloc
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
        {"SLURM_STEP_NUM_TASKS": "8"},
        {"PET_NODE_RANK": "0", "PET_NNODES": "1"},  # a TrainJob of one node
        {**STEP, "SLURM_STEP_NUM_TASKS": "many"},
    ],
)
def test_one_task_and_what_a_launcher_started_are_let_through(environ):
    assert find_launch_mistake(environ) is None
    after = dict(environ)
    read_starter(after)
    assert after == environ


def test_every_entry_to_a_run_refuses_them_before_writing(tmp_path, monkeypatch):
    for name in RANK:
        monkeypatch.delenv(name, raising=False)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    config = small_runs.config(tmp_path)
    ways = [
        lambda: train_command.command(["--save-dir", str(tmp_path)]),
        lambda: train_command.command(["--show-groups"]),
        lambda: lockstep.train(config, None),
        lambda: World.join("cpu"),
    ]
    for way in ways:
        with refuses(ConfigError, "SLURM_PROCID"):
            way()
    assert not os.listdir(tmp_path)
