"""Planted faults in the launcher's variables and in those for NCCL and gloo."""

import pytest
from doctor_places import LAUNCHED, place, silent, wrong

from lockstep.diagnose.doctor.board import gloo_address, infiniband, link_speed
from lockstep.diagnose.doctor.differences import launcher, numbers, settings, slurm
from lockstep.diagnose.doctor.finding import select_interfaces


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"RANK": "2"}, ["RANK is 2, but WORLD_SIZE is 2: ranks are 0 to 1", "lockstep launch"]),
        ({"RANK": None}, ["RANK is not set, but WORLD_SIZE is"]),
        ({"WORLD_SIZE": None}, ["WORLD_SIZE is not set, but RANK is"]),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, ["MASTER_ADDR, MASTER_PORT are not set"]),
        ({"LOCAL_RANK": None}, ["LOCAL_RANK is not set"]),
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE is 'two'", "at least 1"]),
        ({"RANK": "-1"}, ["RANK is '-1'"]),
        ({"LOCAL_RANK": "2", "RANK": "1"}, ["LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2: local ranks are 0 to 1"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK is 1, .* RANK 0"]),
        ({"LOCAL_WORLD_SIZE": "4"}, ["LOCAL_WORLD_SIZE is 4, .* WORLD_SIZE 2"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT is '70000'", "from 1 to 65535"]),
    ],
)
def test_contradictions_of_the_launcher(changes, texts):
    environ = {name: value for name, value in (LAUNCHED | changes).items() if value is not None}
    assert all(each.level == "FAIL" for each in wrong(launcher(place(environ)).findings, "variables", *texts))


def test_more_processes_than_devices():
    environ = LAUNCHED | {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    environ |= {"CUDA_VISIBLE_DEVICES": "3,4"}
    found = launcher(place(environ, devices=2)).findings
    wrong(found, "variables", "3 processes .* 2 CUDA", "start at most 2", "CUDA_VISIBLE_DEVICES is '3,4'")
    on_rank_0 = launcher(place(environ | {"RANK": "0", "LOCAL_RANK": "0"}, devices=2)).findings
    assert on_rank_0 == found  # one line for all ranks
    silent(launcher(place(environ, devices=2, config={"device": "cpu"})).findings)
    silent(launcher(place(environ, devices=3)).findings)
    several = {name: value for name, value in environ.items() if name != "LOCAL_WORLD_SIZE"}
    silent(launcher(place(several | {"LOCAL_RANK": "0"}, devices=2)).findings)  # how many are here is not known


def test_one_device_that_is_the_process_s_own_is_enough():
    """Of two processes that share it the group says so, when the ranks have met."""
    environ = LAUNCHED | {"RANK": "1", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3"}
    silent(launcher(place(environ, devices=1)).findings)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8"},  # without srun's other variables
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PET_NODE_RANK": "0", "PET_NNODES": "2"},
    ],
)
def test_a_schedulers_tasks_that_would_each_train_alone(environ):
    wrong(launcher(place(environ)).findings, "variables", "each would train alone", "one torchrun or `lockstep launch`")


@pytest.mark.parametrize("environ", [{}, LAUNCHED, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}])
def test_nothing_is_wrong_with_what_launchers_set(environ):
    silent(launcher(place(environ)).findings)
    silent(settings(place(environ)).findings)


def test_what_slurm_granted_and_what_is_usable(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {5})
    job = LAUNCHED | {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "64", "SLURM_GPUS_ON_NODE": "8"}
    wrong(slurm(place(job)).findings, "Slurm", "8 GPUs", "CUDA_VISIBLE_DEVICES")
    wrong(slurm(place(job, devices=8)).findings, "Slurm", "2 of this node's 8 GPUs", "--nproc-per-node")
    launched = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "64", "TORCHELASTIC_RUN_ID": "7"} | LAUNCHED
    wrong(slurm(place(launched)).findings, "Slurm", "bound .* 1 of 64 cores", "--cpu-bind=none")
    for fine in (LAUNCHED, job | {"SLURM_GPUS_ON_NODE": "0"}, job | {"SLURM_GPUS_ON_NODE": "2"}):
        silent(slurm(place(fine, devices=2)).findings)
    silent(slurm(place(job, config={"device": "cpu"})).findings)


def test_where_a_process_stands():
    assert numbers({}) == (0, 0, 1, 1)
    assert numbers(LAUNCHED) == (0, 0, 2, 2)
    assert numbers({**LAUNCHED, "RANK": "2"}) is None
    assert numbers({**LAUNCHED, "RANK": "x"}) is None


def system(root, interfaces=("eth0", "lo"), ports=()):
    """Files of /sys of a machine with these interfaces, and InfiniBand ports: {"mlx5_0": "4: ACTIVE"}."""
    for name in interfaces:
        (root / "sys/class/net" / name).mkdir(parents=True)
    for name, state in dict(ports).items():
        folder = root / "sys/class/infiniband" / name / "ports/1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(state + "\n")
    return root


@pytest.mark.parametrize(
    ("environ", "level", "texts"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "FAIL", ["GLOO_SOCKET_IFNAME is 'eth7'", "eth0, eth01, lo"]),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "FAIL", ["NCCL_SOCKET_IFNAME is 'ib'", "=NAME"]),
        ({"NCCL_TIMEOUT": "1800"}, "warn", ["NCCL_TIMEOUT=1800", "--timeout"]),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "warn", ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]),
        ({"NCCL_DEBUG_FILE": "/tmp/nccl_rank_%r.log"}, "warn", ["%r is no placeholder", "--nccl-debug"]),
        ({"NCCL_IB_DISABLE": "1"}, "warn", ["NCCL_IB_DISABLE=1"]),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warn", ["makes the host wait for every kernel"]),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "warn", ["compares every collective"]),
        ({"NCCL_P2P_DISABLE": "1"}, "warn", ["host memory"]),
        ({"NCCL_IB_DISABLE": "0"}, "warn", ["NCCL_IB_DISABLE=0"]),
        ({"NCCL_BUFFSIZE": "8388608"}, "warn", ["NCCL_BUFFSIZE=8388608"]),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "warn", ["NCCL_SOCKET_IFNAME=eth0", "="]),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "warn", ["TORCH_NCCL_ASYNC_ERROR_HANDLING=0"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, "warn", ["hides every device"]),
    ],
)
def test_settings_that_do_harm_or_nothing(tmp_path, environ, level, texts):
    root = system(tmp_path, ("eth0", "eth01", "lo"), ports={"mlx5_0": "4: ACTIVE", "mlx5_1": "1: DOWN"})
    found = wrong(settings(place(environ, root=root)).findings, "settings", *texts)
    assert {each.level for each in found} == {level}


def test_one_log_for_all_ranks_and_the_loopback_between_nodes(tmp_path):
    root = system(tmp_path)
    wrong(
        settings(place(LAUNCHED | {"NCCL_DEBUG_FILE": "nccl.log"}, root=root)).findings, "settings", "one file for all"
    )
    nodes = LAUNCHED | {"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    wrong(settings(place(nodes, root=root)).findings, "settings", "GLOO_SOCKET_IFNAME is the loopback", "eth0, lo")
    fine = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_BUFFSIZE": "1048576"}
    fine |= {"NCCL_SOCKET_IFNAME": "eth0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    silent(settings(place(LAUNCHED | fine, root=root)).findings)


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth1", ["eth1"]),
        ("^eth", ["lo"]),
        ("^=eth0,lo", ["eth1"]),
        ("ib,lo", ["lo"]),
    ],
)
def test_ncclls_way_to_name_interfaces(asked, left):
    assert select_interfaces(asked, ["eth0", "eth1", "lo"]) == left


def test_what_the_systems_files_say(tmp_path):
    root = system(tmp_path, ports={"mlx5_0": "4: ACTIVE", "mlx5_1": "1: DOWN"})
    assert infiniband(root) == ["mlx5_0:1"]
    (root / "sys/class/net/eth0/speed").write_text("10000\n")
    assert link_speed(root, "eth0") == 0.0  # a virtual one: what it says is made up
    (root / "sys/class/net/eth0/device").mkdir()
    assert link_speed(root, "eth0") == 1.25e9
    assert link_speed(root, "lo") == 0.0
    assert gloo_address({"GLOO_SOCKET_IFNAME": "lo"}, "anything") == ("127.0.0.1", "lo")
    assert gloo_address({}, "no-such-name.invalid") == ("127.0.0.1", "lo")
