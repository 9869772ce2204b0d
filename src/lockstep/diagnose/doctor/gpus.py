"""Check the GPUs of this node: errors, clocks, power, links, and foreign processes.

result = gpus(place)                       # without a GPU, one line that lists the checks
"""

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.diagnose.doctor.finding import CheckContext, CheckResult, Finding, fail, ok, skip, warn
from lockstep.extras import install_extra
from lockstep.files import bytes_text

__all__ = [
    "gpus",
    "judge_gpus",
]


# NVRM is the prefix of the NVIDIA driver in the kernel log.
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
# Most NVLinks of a device, NVML_NVLINK_MAX_LINKS of nvml.h.
_NVLINKS = 18
# Bits of the clocks' event reasons, of nvml.h, that slow a device down.
_SLOWDOWNS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# Values of nvmlGpuTopologyLevel_t, of nvml.h.
_TOPOLOGY = {
    0: "one board",
    10: "one PCIe switch",
    20: "PCIe switches",
    30: "one host bridge",
    40: "one NUMA node",
    50: "between NUMA nodes",
}


class NoDriver(Exception):
    """There is no GPU to query: no package, or no driver."""


@dataclass(frozen=True)
class Gpu:
    """A device, by the driver's number.

    Attributes:
        memory, used: bytes.
        processes: (process, bytes) of those that use memory; in a container the driver may hide some.
        ecc: uncorrected errors since the driver was loaded; None: not counted.
        remap_pending, remap_failed: rows of defective memory wait for a reset to be remapped, or could not be.
        clock, clock_limit: MHz of the multiprocessors now, and at most.
        slowed: reasons for which the clocks are throttled; [] for none.
        watts, watts_default: its power limit, and its default one; 0: unknown.
        degrees: Celsius.
        links_down: existing NVLinks that are not up.
        link_width, link_width_limit: PCIe lanes now, and at most.
        ways: the connection to each later device.
        uuid: globally unique, whatever number it has for a process; "": unknown.
    """

    index: int
    name: str
    memory: int
    used: int
    processes: list[tuple[int, int]] = field(default_factory=list)
    ecc: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    clock: int = 0
    clock_limit: int = 0
    slowed: list[str] = field(default_factory=list)
    watts: float = 0.0
    watts_default: float = 0.0
    degrees: int = 0
    links_down: list[int] = field(default_factory=list)
    link_width: int = 0
    link_width_limit: int = 0
    ways: dict[int, str] = field(default_factory=dict)
    uuid: str = ""


def read_gpus() -> list[Gpu]:
    """Read every device of this node.

    Raises:
        NoDriver: no package, or no driver.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        raise NoDriver(f"nvidia-ml-py is not installed: {install_extra('doctor')}") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDriver(f"no NVIDIA driver responds ({error})") from None
    try:
        handles = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        return [_gpu(nvml, index, handle, handles) for index, handle in enumerate(handles)]
    except nvml.NVMLError as error:
        raise NoDriver(f"the NVIDIA driver does not respond ({error})") from None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, handle: Any, handles: list[Any]) -> Gpu:
    """Read one device; values that its kind or driver does not report keep their defaults."""

    def ask(function: str, *more: Any) -> Any:
        """Query a value; None if it is not supported."""
        query = getattr(nvml, function, None)
        try:
            if query is None:
                return None
            return query(handle, *more)
        except nvml.NVMLError:
            return None

    name = ask("nvmlDeviceGetName")
    uuid = ask("nvmlDeviceGetUUID") or ""
    memory = ask("nvmlDeviceGetMemoryInfo")
    remapped = ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    running = ask("nvmlDeviceGetComputeRunningProcesses") or []
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    return Gpu(
        index,
        _text(name),
        int(memory.total) if memory else 0,
        int(memory.used) if memory else 0,
        [(int(process.pid), int(process.usedGpuMemory or 0)) for process in running],
        ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        bool(remapped[2]),
        bool(remapped[3]),
        int(ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM) or 0),
        int(ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM) or 0),
        [text for bit, text in _SLOWDOWNS.items() if int(reasons) & bit],
        float(ask("nvmlDeviceGetEnforcedPowerLimit") or 0) / 1e3,
        float(ask("nvmlDeviceGetPowerManagementDefaultLimit") or 0) / 1e3,
        int(ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU) or 0),
        _links_down(ask, nvml),
        int(ask("nvmlDeviceGetCurrPcieLinkWidth") or 0),
        int(ask("nvmlDeviceGetMaxPcieLinkWidth") or 0),
        {later: _connection(nvml, handle, handles[later]) for later in range(index + 1, len(handles))},
        _text(uuid),
    )


def _text(value: Any) -> str:
    """Convert text of the driver's library, whose older releases return bytes."""
    if isinstance(value, bytes):
        return value.decode()
    return str(value)


def _links_down(ask: Callable[..., Any], nvml: Any) -> list[int]:
    """Return existing NVLinks that are not up; [] if no link is up."""
    states = {}
    for link in range(_NVLINKS):
        states[link] = ask("nvmlDeviceGetNvLinkState", link)
    up = []
    for link, state in states.items():
        if state == nvml.NVML_FEATURE_ENABLED:
            up.append(link)
    links = []
    for link, state in states.items():
        if up and state is not None and link not in up:
            links.append(link)
    return links


def _connection(nvml: Any, first: Any, second: Any) -> str:
    try:
        if nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        return _TOPOLOGY.get(int(nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)), "unknown")
    except (nvml.NVMLError, AttributeError):
        return "unknown"


def kernel_faults(text: str) -> list[tuple[str, int]]:
    """Find (PCI address, number) of each Xid, the driver's fault code, in the kernel log."""
    faults = []
    for address, number in _XID.findall(text):
        faults.append((address.removeprefix("PCI:"), int(number)))
    return faults


def kernel_log(path: Path = Path("/dev/kmsg")) -> str:
    """Return the kernel log, if this user may read it; else ""."""
    chunks = []
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                chunks.append(os.read(handle, 8192).decode("utf-8", "replace"))
                if not chunks[-1]:
                    break
        except OSError:
            # There are no more lines.
            pass
        finally:
            os.close(handle)
    return "\n".join(chunks)


_CHECKS = "memory errors (ECC, Xid), clocks and power, NVLink and PCIe, foreign processes"
# Bytes that a device may have in use without one of the run's processes: contexts, displays.
_FOREIGN = 512 << 20
# Xids of memory, links and lost devices.
_FATAL_XIDS = {48, 63, 64, 74, 79, 92, 94, 95, 119, 120}
_RESET = "drain the node and reset the device (nvidia-smi -r), or restart it; if it recurs, replace the device"


def gpus(place: CheckContext) -> CheckResult:
    """Check each device by its driver's report, before any computation.

    The node's first rank queries all. If a scheduler shows each process one device, each queries: the driver may show
    it no other either, under the same number in every process.
    """
    if place.local_rank and place.devices != 1:
        return CheckResult([], {"pid": os.getpid(), "gpus": []})
    try:
        devices = read_gpus()
    except NoDriver as error:
        return CheckResult([skip("GPUs", f"{error}; with a GPU: {_CHECKS}")], {"pid": os.getpid(), "gpus": []})
    findings = [finding for gpu in devices for finding in judge_gpu(gpu)]
    findings += judge_faults(kernel_faults(kernel_log()))
    usage = []
    for gpu in devices:
        usage.append([gpu.index, gpu.name, gpu.used, gpu.processes, gpu.uuid])
    if not findings:
        findings = [ok("GPUs", _summary(devices))]
    return CheckResult(findings, {"pid": os.getpid(), "gpus": usage})


def _summary(devices: list[Gpu]) -> str:
    if not devices:
        return "the driver reports no device"
    ways = sorted({way for gpu in devices for way in gpu.ways.values()})
    if len({gpu.name for gpu in devices}) == 1:
        counts = f"{len(devices)} x {devices[0].name}"
    else:
        counts = f"{len(devices)} of several kinds"
    return f"{counts}, {devices[0].degrees} degrees" + (f", {' and '.join(ways)} between them" if ways else "")


def judge_gpu(gpu: Gpu) -> Iterator[Finding]:
    """Yield a finding for each problem of a device."""
    label = f"GPU {gpu.index} ({gpu.name})"
    if gpu.remap_failed:
        yield fail("GPUs", f"{label} has defective memory that could not be remapped", "replace the device")
    elif gpu.remap_pending:
        yield fail("GPUs", f"{label} has defective memory that is remapped at the next reset", _RESET)
    if gpu.ecc:
        yield fail("GPUs", f"{label} counts {gpu.ecc} uncorrectable memory errors", _RESET)
    reasons = []
    for reason in gpu.slowed:
        if reason != "power cap":
            reasons.append(reason)
    if reasons:
        text = f"{label} is throttled: {', '.join(reasons)}, at {gpu.degrees} degrees"
        text += f" and {gpu.clock} of {gpu.clock_limit} MHz"
        yield warn("GPUs", text, "check its cooling and its power supply")
    if gpu.watts and gpu.watts_default and gpu.watts < 0.9 * gpu.watts_default:
        text = f"{label} has a power limit of {gpu.watts:.0f} W, below its default of {gpu.watts_default:.0f} W"
        yield warn("GPUs", text, f"nvidia-smi -i {gpu.index} -pl {gpu.watts_default:.0f}, or limit all devices alike")
    if gpu.links_down:
        links = ", ".join(map(str, gpu.links_down))
        yield fail(
            "GPUs",
            f"{label}: NVLink {links} is down",
            "restart the fabric manager, then the node; if it stays down, have it repaired",
        )
    if 0 < gpu.link_width < gpu.link_width_limit:
        text = f"{label} has {gpu.link_width} of {gpu.link_width_limit} PCIe lanes"
        yield warn("GPUs", text, "reseat the card: copies from the host are slower in proportion")


def judge_faults(faults: list[tuple[str, int]]) -> list[Finding]:
    """Report fatal device errors in the kernel log."""
    grave = sorted({(address, number) for address, number in faults if number in _FATAL_XIDS})
    findings = []
    for address, number in grave:
        findings.append(fail("GPUs", f"the kernel log has Xid {number} for {address}", _RESET))
    return findings


def judge_gpus(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Find processes outside this run that use its devices' memory; report each device once."""
    pids = {fact["pid"] for fact in facts if fact}
    findings = []
    uuids = set[str]()
    for rank, fact in enumerate(facts):
        for index, name, memory_used, processes, uuid in fact["gpus"] if fact else []:
            # Several ranks of a node may have queried the same device.
            if uuid and uuid in uuids:
                continue
            uuids.add(uuid)
            foreign = [(pid, size) for pid, size in processes if pid not in pids and size > _FOREIGN]
            text = f"GPU {index} ({name}) at {place.who(rank)}: "
            if foreign:
                pid, size = max(foreign, key=lambda pair: pair[1])
                text += f"process {pid} holds {bytes_text(size)} of its memory"
                findings.append(warn("GPUs", text, "stop it, or wait for it: `nvidia-smi` lists processes"))
            elif not processes and memory_used > 2 * _FOREIGN:
                text += f"{bytes_text(memory_used)} of its memory are in use, but the driver shows no process"
                findings.append(
                    warn("GPUs", text, "a process outside this container uses it: run `nvidia-smi` on the host")
                )
    return findings
