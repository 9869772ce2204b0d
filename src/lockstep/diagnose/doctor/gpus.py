"""Check the GPUs of this node: errors, clocks, power, links, and foreign processes.

found = gpus(place)                        # without a GPU, one line that lists the checks
"""

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.diagnose.doctor.finding import CheckContext, CheckResult, Finding, fail, ok, warn
from lockstep.files import bytes_text

__all__ = [
    "Gpu",
    "NoDriver",
    "gpus",
    "judge_gpus",
    "kernel_faults",
    "kernel_log",
    "read_gpus",
]


_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
_NVLINKS = 18
_SLOWDOWNS = {  # bits of the clocks' event reasons, of nvml.h, that hold a device back
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_COMMON = {
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
        processes: (process, bytes) of those that use memory, as far as the driver shows them to a container.
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
        raise NoDriver("nvidia-ml-py is not installed: pip install 'torch-lockstep[doctor]'") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDriver(f"no NVIDIA driver answers ({error})") from None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [_gpu(nvml, index, handle, handles) for index, handle in enumerate(handles)]
    except nvml.NVMLError as error:
        raise NoDriver(f"the NVIDIA driver gives no answer ({error})") from None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, handle: Any, handles: list[Any]) -> Gpu:
    """Read one device; values that its kind or driver does not report keep their defaults."""

    def ask(function: str, *more: Any) -> Any:
        """Query a value; None if it is not supported."""
        named = getattr(nvml, function, None)
        try:
            return None if named is None else named(handle, *more)
        except nvml.NVMLError:
            return None

    name, uuid = ask("nvmlDeviceGetName"), ask("nvmlDeviceGetUUID") or ""
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
        [(int(one.pid), int(one.usedGpuMemory or 0)) for one in running],
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
        {other: _way(nvml, handle, handles[other]) for other in range(index + 1, len(handles))},
        _text(uuid),
    )


def _text(said: Any) -> str:
    """Convert text of the driver's library, whose older releases return bytes."""
    return said.decode() if isinstance(said, bytes) else str(said)


def _links_down(ask: Callable[..., Any], nvml: Any) -> list[int]:
    """Existing NVLinks that are not up; none if no link is up."""
    states = {link: ask("nvmlDeviceGetNvLinkState", link) for link in range(_NVLINKS)}
    up = [link for link, state in states.items() if state == nvml.NVML_FEATURE_ENABLED]
    return [link for link, state in states.items() if up and state is not None and link not in up]


def _way(nvml: Any, one: Any, other: Any) -> str:
    try:
        if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        return _COMMON.get(int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)), "unknown")
    except (nvml.NVMLError, AttributeError):
        return "unknown"


def kernel_faults(text: str) -> list[tuple[str, int]]:
    """Find (PCI address, number) of each Xid, the driver's fault code, in the kernel log."""
    return [(address.removeprefix("PCI:"), int(number)) for address, number in _XID.findall(text)]


def kernel_log(path: Path = Path("/dev/kmsg")) -> str:
    """Return the kernel log, if this user may read it; else ""."""
    found = []
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                found.append(os.read(handle, 8192).decode("utf-8", "replace"))
                if not found[-1]:
                    break
        except OSError:  # no more lines
            pass
        finally:
            os.close(handle)
    return "\n".join(found)


_LOOKS = "errors of its memory (ECC, Xid), clocks and power, NVLink and PCIe, foreign processes"
_FOREIGN = 512 << 20  # bytes that a device may hold without one of the run's processes: contexts, displays
_GRAVE = {48, 63, 64, 74, 79, 92, 94, 95, 119, 120}  # Xid of memory, links, and devices that are gone
_RESET = "drain the node and reset the device (nvidia-smi -r), or restart it; if it comes again, have it replaced"


def gpus(place: CheckContext) -> CheckResult:
    """Check each device by its driver's report, before any computation.

    The node's first rank queries all. If a scheduler shows each process one device, each queries: the driver may show
    it no other either, under the same number in every process.
    """
    if place.local_rank and place.devices != 1:
        return CheckResult([], {"pid": os.getpid(), "gpus": []})
    try:
        found = read_gpus()
    except NoDriver as error:
        return CheckResult(
            [ok("GPUs", f"not looked at: {error}; with one: {_LOOKS}")], {"pid": os.getpid(), "gpus": []}
        )
    findings = [finding for gpu in found for finding in judge_gpu(gpu)]
    findings += judge_faults(kernel_faults(kernel_log()))
    held = [[gpu.index, gpu.name, gpu.used, gpu.processes, gpu.uuid] for gpu in found]
    if not findings:
        findings = [ok("GPUs", _described(found))]
    return CheckResult(findings, {"pid": os.getpid(), "gpus": held})


def _described(found: list[Gpu]) -> str:
    if not found:
        return "the driver shows none"
    ways = sorted({way for gpu in found for way in gpu.ways.values()})
    counts = (
        f"{len(found)} x {found[0].name}" if len({gpu.name for gpu in found}) == 1 else f"{len(found)} of several kinds"
    )
    return f"{counts}, {found[0].degrees} degrees" + (f", {' and '.join(ways)} between them" if ways else "")


def judge_gpu(gpu: Gpu) -> Iterator[Finding]:
    """Yield the problems of a device."""
    who = f"GPU {gpu.index} ({gpu.name})"
    if gpu.remap_failed:
        yield fail("GPUs", f"{who} has defective memory that could not be put aside", "have it replaced")
    elif gpu.remap_pending:
        yield fail("GPUs", f"{who} has defective memory that a reset would put aside", _RESET)
    if gpu.ecc:
        yield fail("GPUs", f"{who} counts {gpu.ecc} memory errors that could not be corrected", _RESET)
    held_back = [reason for reason in gpu.slowed if reason != "power cap"]
    if held_back:
        text = f"{who} is held back: {', '.join(held_back)}, at {gpu.degrees} degrees"
        text += f" and {gpu.clock} of {gpu.clock_limit} MHz"
        yield warn("GPUs", text, "look at its cooling and its power supply")
    if gpu.watts and gpu.watts_default and gpu.watts < 0.9 * gpu.watts_default:
        text = f"{who} may take {gpu.watts:.0f} W, and was made for {gpu.watts_default:.0f} W"
        yield warn("GPUs", text, f"nvidia-smi -i {gpu.index} -pl {gpu.watts_default:.0f}, or have all of them alike")
    if gpu.links_down:
        links = ", ".join(map(str, gpu.links_down))
        yield fail(
            "GPUs", f"{who}: NVLink {links} is down", "restart the node (fabric manager first); else have it looked at"
        )
    if 0 < gpu.link_width < gpu.link_width_limit:
        text = f"{who} has {gpu.link_width} of {gpu.link_width_limit} PCIe lanes"
        yield warn("GPUs", text, "have it put in again: copies from the host are slower by as much")


def judge_faults(faults: list[tuple[str, int]]) -> list[Finding]:
    """Report the devices that failed, by the kernel log."""
    grave = sorted({(address, number) for address, number in faults if number in _GRAVE})
    return [fail("GPUs", f"the kernel's log has Xid {number} of {address}", _RESET) for address, number in grave]


def judge_gpus(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Find processes outside this run that use its devices' memory; report each device once."""
    ours = {each["pid"] for each in facts if each}
    found, seen = [], set[str]()
    for rank, each in enumerate(facts):
        for index, name, used, processes, uuid in each["gpus"] if each else []:
            if uuid and uuid in seen:
                continue
            seen.add(uuid)
            foreign = [(pid, size) for pid, size in processes if pid not in ours and size > _FOREIGN]
            text = f"GPU {index} ({name}) at {place.who(rank)}: "
            if foreign:
                pid, size = max(foreign, key=lambda pair: pair[1])
                text += f"process {pid} holds {bytes_text(size)} of its memory"
                found.append(warn("GPUs", text, "end it, or wait for it: `nvidia-smi` lists them"))
            elif not processes and used > 2 * _FOREIGN:
                text += f"{bytes_text(used)} of its memory are held, and no process is shown that holds it"
                found.append(
                    warn("GPUs", text, "somebody outside this container uses it; `nvidia-smi` on the host lists them")
                )
    return found
