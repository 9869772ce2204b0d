"""What the driver says of the GPUs, by nvidia-ml-py (extra `doctor`): the one file that knows it.

gpus = read_gpus()                          # one `Gpu` each; raises NoDriver, whose text says what is missing
"""

import contextlib
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Gpu", "NoDriver", "kernel_faults", "kernel_log", "read_gpus"]

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
    """There is nothing to ask: no package, or no driver."""


@dataclass(frozen=True)
class Gpu:
    """One device, as the driver numbers them.

    Attributes:
        memory, used: bytes.
        processes: (process, bytes) of those that hold memory, as far as the driver tells a container.
        ecc: uncorrected errors since the driver was loaded; None: not counted.
        remap_pending, remap_failed: rows of defective memory wait for a reset to be put aside, or could not be.
        clock, clock_limit: MHz of the multiprocessors now, and at most.
        slowed: why the clocks are held back; [] where they are not.
        watts, watts_default: its power limit, and the one that it was made for; 0: not told.
        degrees: Celsius.
        links_down: NVLinks that are not up, of those that there are.
        link_width, link_width_limit: PCIe lanes now, and at most.
        ways: to each later device: how far apart they are.
        uuid: its own in all the world, whatever number it has for a process; "": not told.
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
    """Every device of this node. Raises NoDriver."""
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
    """One device; what its kind or driver does not tell keeps its default."""

    def ask(function: str, *more: Any) -> Any:
        """None for what is not told."""
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
    """Text of the driver's library, whose older releases give bytes."""
    return said.decode() if isinstance(said, bytes) else str(said)


def _links_down(ask: Callable[..., Any], nvml: Any) -> list[int]:
    """NVLinks that are there and not up; none where no link is, as on a device that has none."""
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
    """(PCI address, number) of each Xid, the driver's word for a fault, in the kernel's log."""
    return [(address.removeprefix("PCI:"), int(number)) for address, number in _XID.findall(text)]


def kernel_log(path: Path = Path("/dev/kmsg")) -> str:
    """The kernel's log, where this user may read it; else ""."""
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
