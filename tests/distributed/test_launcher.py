"""Several processes that a scheduler started without a launcher: refused wherever a run starts."""

import os

import pytest
import small_runs

import lockstep
from lockstep.commands import train as train_command
from lockstep.distributed.launcher import check_launched, find_launch_mistake
from lockstep.distributed.world import World
from lockstep.errors import ConfigError

STEP = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}
RANK = {"RANK": "1", "WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        (STEP, "srun -N2 --ntasks-per-node=1 sh -c 'lockstep launch --nnodes 2 --node-rank $SLURM_NODEID"),
        (STEP, "--nproc-per-node 4 -- train"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "1"}, "srun -n1 lockstep launch --nproc-per-node 8 -- train"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun -n1 lockstep launch --nproc-per-node 2"),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, "mpirun -n1 lockstep launch --nproc-per-node 3"),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "2"}, "lockstep launch -- train"),
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}, "lockstep launch --nnodes $SKYPILOT_NUM_NODES"),
    ],
)
def test_tasks_that_would_each_train_alone_are_told_the_command_that_was_meant(environ, command):
    with pytest.raises(ConfigError) as found:
        check_launched(environ)
    assert command in str(found.value)
    assert f"unset {next(iter(environ))}" in str(found.value)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**STEP, **RANK},  # torchrun or `lockstep launch` under srun
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # srun -n1, and the shell of salloc
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
        {"SLURM_STEP_NUM_TASKS": "8"},
        {"PET_NODE_RANK": "0", "PET_NNODES": "1"},  # a TrainJob of one node
        {**STEP, "SLURM_STEP_NUM_TASKS": "many"},
    ],
)
def test_one_task_and_what_a_launcher_started_are_let_through(environ):
    assert find_launch_mistake(environ) is None


def test_every_way_into_a_run_refuses_them_before_anything_is_written(tmp_path, monkeypatch):
    for name in RANK:
        monkeypatch.delenv(name, raising=False)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    config = small_runs.config(tmp_path)
    ways = [
        lambda: train_command.command(["--save-dir", str(tmp_path)]),
        lambda: train_command.command(["--find-lr"]),
        lambda: lockstep.train(config, None),
        lambda: World.join("cpu"),
    ]
    for way in ways:
        with pytest.raises(ConfigError, match="SLURM_PROCID"):
            way()
    assert not os.listdir(tmp_path)
