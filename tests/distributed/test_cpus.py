"""The cores of a process, a node and a container, and how they are shared out."""

import os
import subprocess
import sys

import pytest

from lockstep.distributed.cpus import CORES_VARIABLE, bind, cores, cpu_quota, node_cores, share_cores


def container(root, version, quota):
    """Files of a container's cgroup with a quota in microseconds of 100,000; "max" or -1: none."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    if version == 2:
        folder = root / "sys/fs/cgroup"
        files = {"cpu.max": f"{quota} 100000\n"}
    else:
        (root / "proc/self/cgroup").write_text("4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n")
        folder = root / "sys/fs/cgroup/cpu,cpuacct/docker/abc"
        files = {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": "100000\n"}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize(("version", "none"), [(2, "max"), (1, -1)])
def test_a_containers_quota_limits_the_cores(tmp_path, monkeypatch, version, none):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    for quota, found, whole in ((250000, 2.5, 2), (50000, 0.5, 1), (none, 0.0, 64), (9900000, 99.0, 64)):
        container(tmp_path, version, quota)
        assert cpu_quota(tmp_path) == found
        assert cores(tmp_path) == whole
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "8")
    assert cores(tmp_path) == 8


def test_a_quota_of_the_group_around_this_ones_counts(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/container\n")
    folder = tmp_path / "sys/fs/cgroup/pod/container"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text("max 100000\n")
    (folder.parent / "cpu.max").write_text("300000 100000\n")
    assert cpu_quota(tmp_path) == 3.0


def machine(root, places):
    """The system's files on where each CPU is: {cpu: (NUMA node, socket, core)}."""
    for cpu, (node, socket, core) in places.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{node}").mkdir()
        (folder / "topology/physical_package_id").write_text(f"{socket}\n")
        (folder / "topology/core_id").write_text(f"{core}\n")


def test_hyperthreads_and_neighbours_share(tmp_path):
    # Two sockets of two cores with two threads, numbered in turn over the sockets, as servers do.
    machine(tmp_path, {cpu: (cpu % 2, cpu % 2, cpu // 2 % 2) for cpu in range(8)})
    assert share_cores(range(8), 2, tmp_path) == [{0, 2, 4, 6}, {1, 3, 5, 7}]
    assert share_cores(range(8), 4, tmp_path) == [{0, 4}, {2, 6}, {1, 5}, {3, 7}]
    assert share_cores(range(8), 8, tmp_path) == [{0}, {4}, {2}, {6}, {1}, {5}, {3}, {7}]
    assert share_cores(range(8), 3, tmp_path) == [{0, 4}, {2, 6, 1, 5}, {3, 7}]
    assert share_cores(range(8), 9, tmp_path) == []


def test_each_core_is_in_one_share_also_without_topology(tmp_path):
    for count in (1, 2, 5, 16, 61):
        for shares in range(1, count + 1):
            found = share_cores(range(count), shares, tmp_path)
            assert sorted(cpu for share in found for cpu in share) == list(range(count))
            sizes = sorted(map(len, found))
            assert len(sizes) == shares
            assert sizes[-1] - sizes[0] <= 1


def test_a_bound_process_does_not_hide_the_nodes_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert node_cores({}) == 1
    assert node_cores({CORES_VARIABLE: "16"}) == 16


def test_a_process_and_its_threads_are_bound():
    code = "import sys, threading; threading.Thread(target=sys.stdin.read).start(); print(1, flush=True)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        process.stdout.readline()
        one = {max(os.sched_getaffinity(0))}
        bind(process.pid, one)
        threads = [int(name) for name in os.listdir(f"/proc/{process.pid}/task")]
        assert len(threads) == 2
        assert all(os.sched_getaffinity(thread) == one for thread in threads)
        process.stdin.close()
    bind(process.pid, one)  # it has ended
