"""GPUs by a stand-in for the driver's library, and NCCL's choice by its log."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from doctor_places import LAUNCHED, place, silent, wrong

from lockstep.diagnose.doctor import gpus, group
from lockstep.diagnose.doctor import gpus as nvml
from lockstep.diagnose.doctor.differences import judge_versions
from lockstep.diagnose.doctor.gpus import Gpu, NoDriver, kernel_faults, read_gpus
from lockstep.diagnose.doctor.network import NcclChoice, parse, read_log

GIB = 1 << 30
WELL = Gpu(0, "H100", 80 * GIB, GIB, ecc=0, clock=1980, clock_limit=1980, watts=700.0, watts_default=700.0, degrees=40)


class Library:
    """nvidia-ml-py of two devices; the second has every fault that it can tell."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0, 1, 0
    NVML_FEATURE_ENABLED, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 1, 2, 0

    def __init__(self):
        self.open = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H100" if handle else "NVIDIA H100"

    def nvmlDeviceGetUUID(self, handle):
        return b"GPU-1" if handle else "GPU-0"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=80 * GIB, used=(1 + 30 * handle) * GIB)

    def nvmlDeviceGetRemappedRows(self, handle):
        return (0, handle, handle, 0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=4711, usedGpuMemory=30 * GIB)] * handle

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return 0x48 * handle

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        return 3 * handle

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1980 - 1000 * handle

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return 1980

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000 - 300_000 * handle

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):
        return 700_000

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 40 + 50 * handle

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link > 3:
            raise self.NVMLError("not supported")
        return 0 if handle and link == 2 else 1

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return 16 >> handle

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return 16

    def nvmlDeviceGetP2PStatus(self, one, other, index):
        return 0


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(gpus, "kernel_log", lambda: "")
    return made


def test_what_the_driver_says_is_read(library):
    first, second = read_gpus()
    assert first == Gpu(
        *(0, "NVIDIA H100", 80 * GIB, GIB, [], 0, False, False, 1980, 1980, [], 700.0, 700.0, 40, [], 16, 16),
        ways={1: "NVLink"},
        uuid="GPU-0",
    )
    assert second.uuid == "GPU-1"
    assert second.slowed == ["hardware slowdown", "hardware thermal slowdown"]
    assert (second.links_down, second.remap_pending, second.processes) == ([2], True, [(4711, 30 * GIB)])
    assert library.open == 0


def test_every_fault_of_a_device_is_named(library):
    found = gpus.gpus(place(LAUNCHED))
    told = wrong(
        found.findings, "GPUs",
        "GPU 1 .* counts 3 uncorrectable memory errors; drain the node",
        "GPU 1 .* has defective memory .* reset",
        "GPU 1 .*: hardware slowdown, hardware thermal slowdown, at 90 degrees and 980 of 1980 MHz",
        "GPU 1 .* 400 W.* 700 W; nvidia-smi -i 1 -pl 700",
        "GPU 1 .*: NVLink 2 is down",
        "GPU 1 .* has 8 of 16 PCIe lanes",
    )  # fmt: skip
    assert not any("GPU 0" in each.text for each in told)
    foreign = gpus.judge_gpus([found.facts, {"pid": 1, "gpus": []}], place(LAUNCHED, hosts=["a", "a"]))
    wrong(foreign, "GPUs", r"GPU 1 \(NVIDIA H100\) at rank 0 on a: process 4711 holds 30 GiB of its memory; ")
    assert gpus.judge_gpus([found.facts, {"pid": 4711, "gpus": []}], place(LAUNCHED)) == []  # one of our ranks


def test_a_device_that_is_well_and_memory_that_nobody_shows():
    silent(gpus.judge_gpu(WELL))
    silent(gpus.judge_gpu(replace(WELL, slowed=["power cap"])))  # that is what a limit is for
    wrong(list(gpus.judge_gpu(replace(WELL, remap_failed=True))), "GPUs", "defective memory .*; replace")
    facts = [{"pid": 1, "gpus": [[0, "H100", 40 * GIB, [], ""]]}]
    wrong(gpus.judge_gpus(facts, place()), "GPUs", "40 GiB of its memory .* no process")


def test_each_rank_that_is_shown_one_device_asks_the_driver(library):
    """Under a scheduler's limits the driver shows each process its own device alone, as number 0."""
    second = LAUNCHED | {"RANK": "1", "LOCAL_RANK": "1"}
    assert gpus.gpus(place(second, devices=2)).facts["gpus"] == []  # the first rank sees the same
    both = gpus.gpus(place(second, devices=1)).facts
    assert [each[0] for each in both["gpus"]] == [0, 1]

    shown = [[{**both, "pid": rank, "gpus": [[0, *both["gpus"][rank][1:]]]} for rank in (0, 1)], [both, both]]
    for facts in shown:
        found = gpus.judge_gpus(facts, place(LAUNCHED, hosts=["a", "a"]))
        assert len(found) == 1  # also where the driver shows all devices to both
        assert "process 4711" in found[0].text
    assert "rank 1 on a" in gpus.judge_gpus(shown[0], place(LAUNCHED, hosts=["a", "a"]))[0].text


def test_the_kernels_word_for_a_fault():
    log = "6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
    log += "6,1,3,-;NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception"
    assert kernel_faults(log) == [("0000:3b:00", 79), ("0000:3b:00", 13)]
    wrong(gpus.judge_faults(kernel_faults(log)), "GPUs", "Xid 79 for 0000:3b:00; drain the node")
    assert gpus.judge_faults([("0000:3b:00", 13)]) == []  # a program's own fault
    assert nvml.kernel_log("/nonexistent") == ""


def test_missing_package_or_driver_is_a_line_on_what_is_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoDriver, match="install the extra doctor of torch-lockstep"):
        read_gpus()
    (line,) = gpus.gpus(place()).findings
    assert line.level == "skip"
    assert "memory errors (ECC, Xid), clocks" in line.text


def test_devices_that_are_not_alike():
    told = {"python": "3.12", "torch": "2.13", "lockstep": "0.1"}
    facts = [{"versions": told, "name": name, "memory": 80 * GIB} for name in ("H100", "A100")]
    found = judge_versions(facts, place(LAUNCHED, hosts=["a", "b"]))
    wrong(found, "devices", "unequal devices: rank 0: H100, 80 GiB; rank 1: A100", "--shares auto")


SOCKETS = """node-a:7:7 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.7<0>
node-a:7:7 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
node-a:7:9 [0] NCCL INFO NET/IB : No device found.
node-a:7:9 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.0.7<0>
node-a:7:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0> [1]eth1:10.1.0.7<0>
node-a:7:9 [0] NCCL INFO Using network Socket
node-a:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
RAILS = """node-a:7:7 [0] NCCL INFO Bootstrap : Using [0]ib0:10.0.0.7<0>
node-a:7:7 [0] NCCL INFO NCCL version 2.21.5+cuda12.4
node-a:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.4.7<0>
node-a:7:9 [0] NCCL INFO Using network IB
node-a:7:9 [0] NCCL INFO Channel 00/0 : 3[3] -> 8[0] [send] via NET/IB/0/GDRDMA
node-a:7:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
node-a:7:9 [0] NCCL INFO Channel 02/0 : 0[0] -> 1[1] via P2P/CUMEM
"""


def test_ncclls_log_says_what_it_chose(tmp_path):
    assert parse(SOCKETS) == NcclChoice("2.27.5+cuda12.9", "eth0", "Socket", ["eth0"], {"NET/Socket/0": 1})
    found = parse(RAILS)
    assert (found.network, found.devices, found.interface) == ("IB", ["mlx5_0:1", "mlx5_1:1"], "ib0")
    assert found.ways == {"NET/IB/0/GDRDMA": 1, "P2P/CUMEM": 2}
    assert "channels by P2P/CUMEM, NET/IB/0/GDRDMA" in str(found)
    (tmp_path / "nccl.log").write_text(RAILS)
    assert read_log(tmp_path / "nccl.log") == found
    assert read_log(tmp_path / "none") == NcclChoice() == parse("")


def test_sockets_where_infiniband_is_up(tmp_path):
    path = tmp_path / "nccl.here.log"
    path.write_text(SOCKETS)
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    environ = LAUNCHED | {"LOCAL_WORLD_SIZE": "1", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%h.log")}
    nodes = place(environ, hosts=["a", "b"], devices=1, root=tmp_path)
    facts = group.transport(nodes).facts
    found = group.judge_transport([facts, facts], nodes)
    wrong(found, "transport", r"rank 1 on b: NCCL uses sockets \(eth0\) .* mlx5_0:1", "--device /dev/infiniband")
    other = {**facts, "chosen": {**facts["chosen"], "network": "IB"}}
    wrong(group.judge_transport([facts, other], nodes), "transport", "different networks: rank 0 on a: Socket; rank 1")
    silent(group.judge_transport([other, other], nodes))
    silent(group.judge_transport([None, None], nodes))
