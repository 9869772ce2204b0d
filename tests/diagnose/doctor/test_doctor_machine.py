"""Planted faults of the machine and of the run's folder."""

import errno
import fcntl
import os
import resource
import subprocess

import pytest
import warm
from doctor_places import LAUNCHED, place, silent, wrong
from shell import environment

from lockstep.diagnose.doctor import machine, task
from lockstep.diagnose.doctor import machine as disk
from lockstep.diagnose.doctor.examine import CHECKS

GIB = 1 << 30


def test_every_process_taking_every_core():
    found = machine.judge_cores(16, 0, 16, place(LAUNCHED))
    wrong([found], "cores", "2 x 16 threads on 16 cores", "OMP_NUM_THREADS=8")
    silent([machine.judge_cores(16, 0, 8, place(LAUNCHED))])
    silent([machine.judge_cores(2, 0, 1, place(LAUNCHED))])


def test_a_load_and_stolen_time_that_would_disturb_a_measurement(tmp_path):
    wrong([machine.judge_load(1.2, 0.0, 2, 2, place())], "cores", "load 1.2 on 2 cores", "end them")
    wrong([machine.judge_load(0.1, 0.2, 2, 2, place())], "cores", "takes 20% of the cores' time", "interleaved")
    assert machine.judge_load(0.4, 0.01, 2, 2, place()) is None
    assert machine.judge_load(20.0, 0.0, 64, 2, place()) is None  # there is room
    here = place(root=tmp_path)
    assert machine.cores(here).findings[0].text.endswith("loader processes")  # nothing is known
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("99.00 0.1 0.2 1/2 3")
    (tmp_path / "proc/stat").write_text("cpu  1 2 3 4 5 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    wrong(machine.cores(here).findings[-1:], "cores", "load 99.0")


def test_a_container_that_may_take_less_than_it_sees():
    found = machine.judge_cores(64, 2.0, 64, place())
    wrong([found], "cores", "1 x 64 threads on the container's quota of 2 cores", "OMP_NUM_THREADS=2")


def test_ranks_that_are_each_bound_to_their_own_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(machine, "cpu_quota", lambda root: 0.0)
    monkeypatch.setattr(machine.torch, "get_num_threads", lambda: 2)
    wrong(machine.cores(place(LAUNCHED, root=tmp_path)).findings, "cores", "2 x 2 threads on 2 cores")
    silent(machine.cores(place(LAUNCHED | {"LOCKSTEP_CORES": "4"}, root=tmp_path)).findings)


def test_more_loader_processes_than_cores():
    found = machine.judge_cores(4, 0, 1, place(LAUNCHED, config={"data": {"workers": 8}}))
    wrong([found], "cores", "2 ranks with 8 loader processes each on 4 cores", "--data.workers 3")
    silent([machine.judge_cores(8, 0, 1, place(LAUNCHED, config={"data": {"workers": 4}}))])


MODULE = """
import torch
from lightning import LightningModule

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.line(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=8, num_workers=1)

class Broken(Line):
    def __init__(self):
        raise ValueError("odd")
"""


@pytest.mark.filterwarnings("ignore:::lightning", "ignore:::pytorch_lightning", "ignore:.*LeafSpec.*")
def test_the_loaders_of_a_lightning_module_are_counted(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    (tmp_path / "modules.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    for name, workers in (("Line", 1), ("Broken", 0)):
        config = {"task": f"lightning:modules.py:{name}"}
        here = place(config=config, told=config)
        here.with_task = True
        assert task.loaders(here).findings == []
        assert f"{workers} loader processes" in machine.judge_cores(64, 0, 1, here).text
        assert (here.module is None) == (name == "Broken")
    order = [check.name for check in CHECKS]
    assert order.index("loaders") < order.index("cores") < order.index("task")


def test_more_ranks_than_cores():
    wrong([machine.judge_cores(1, 0, 1, place(LAUNCHED))], "cores", "2 ranks on 1 cores", "start fewer")


def test_little_memory_by_the_machine_or_by_the_containers_limit(tmp_path):
    (tmp_path / "proc").mkdir()
    told = tmp_path / "proc/meminfo"
    told.write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {1 << 10} kB\n")
    wrong(machine.memory(place(root=tmp_path)).findings, "memory", r"1 MiB of 64 GiB free \(machine\)")
    told.write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")
    silent(machine.memory(place(root=tmp_path)).findings)
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    for name, text in {
        "memory.max": 2 * GIB,
        "memory.current": 2 * GIB - 5000,
        "memory.stat": "inactive_file 0",
    }.items():
        (folder / name).write_text(f"{text}\n")
    found = machine.memory(place(LAUNCHED, root=tmp_path)).findings
    wrong(found, "memory", r"of 2 GiB free \(container limit\)", "2 ranks need 1 GiB")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB - 10000}\n")
    silent(machine.memory(place(LAUNCHED, root=tmp_path)).findings)


def test_a_containers_small_shared_memory():
    with_workers = {"data": {"workers": 2}}
    found = machine.judge_shared(64 << 20, 60 << 20, place(config=with_workers))
    wrong([found], "shared memory", "60 MiB free of 64 MiB, for 2 loader processes", "--shm-size=8g or --ipc=host")
    assert found.level == "FAIL"
    full = machine.judge_shared(8 * GIB, 1 << 20, place(config=with_workers))
    wrong([full], "shared memory", "delete files in /dev/shm")
    wrong([machine.judge_shared(64 << 20, 60 << 20, place(LAUNCHED, devices=2))], "shared memory", "for NCCL")
    silent([machine.judge_shared(64 << 20, 60 << 20, place())])
    silent([machine.judge_shared(8 * GIB, 8 * GIB, place(config=with_workers))])


def test_few_open_files_for_this_world():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    environ = LAUNCHED | {"WORLD_SIZE": "4096"}
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        found = machine.open_files(place(environ)).findings
        silent(machine.open_files(place(LAUNCHED)).findings)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wrong(found, "open files", "4096 open files.* 4096 ranks need about", "ulimit -n 65536")


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    def refuse(*args, **more):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    asked = place(config={"save_dir": str(tmp_path)})
    silent(disk.disk(asked).findings)
    monkeypatch.setattr(disk.tempfile, "TemporaryFile", refuse)
    wrong(disk.disk(asked).findings, "disk", f"{tmp_path}: Read-only", "another --save-dir")


def test_a_disk_that_is_slow_or_full(tmp_path):
    wrong(list(disk.judge_disk(tmp_path, 1e6, 10 * GIB)), "disk", "writes and syncs 977 KiB a second", "local disk")
    wrong(list(disk.judge_disk(tmp_path, 1e9, 1 << 20)), "disk", "has 1 MiB free, .* 1 GiB")
    silent(disk.judge_disk(tmp_path, 1e9, 10 * GIB))


def test_locks_that_are_not_there_or_do_not_hold(tmp_path, monkeypatch):
    asked = place(config={"save_dir": str(tmp_path)})
    silent(disk.locks(asked).findings)
    monkeypatch.setattr(disk.fcntl, "flock", lambda handle, how: None)
    wrong(disk.locks(asked).findings, "locks", "can be locked again", "mount it with locking")

    def refuse(handle, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    wrong(disk.locks(asked).findings, "locks", f"{tmp_path}: No locks available", "nolock")
    assert list(tmp_path.iterdir()) == []
    assert fcntl.LOCK_EX


def test_a_file_server_with_another_time(tmp_path):
    asked = place(config={"save_dir": str(tmp_path)})
    silent(disk.clock(asked).findings)
    wrong([disk.judge_clock(1000.0, 1030.0, 1030.5)], "folder's clock", "30.0 s off", "chronyc")
    wrong([disk.judge_clock(1040.0, 1030.0, 1030.5)], "folder's clock", "9.5 s off")


@pytest.mark.parametrize("name", ["missing", "missing/deeper"])
def test_nothing_is_made_for_a_run_that_is_not_there(tmp_path, name):
    done = subprocess.run(
        [warm.python(), "-m", "lockstep", "doctor", "--save-dir", str(tmp_path / name), "--json"],
        env=environment(), capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
