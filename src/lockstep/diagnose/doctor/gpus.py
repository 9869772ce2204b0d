"""The GPUs of this node: errors, clocks, power, links, and who else holds their memory.

found = gpus(place)                         # without a GPU one line that says what would be looked at
"""

import os
from collections.abc import Iterator
from typing import Any

from lockstep.diagnose.doctor.finding import Finding, Found, Place, fail, ok, warn
from lockstep.diagnose.doctor.nvml import Gpu, NoDriver, kernel_faults, kernel_log, read_gpus
from lockstep.units import bytes_text

__all__ = ["gpus", "judge_gpus"]

_LOOKS = "errors of its memory (ECC, Xid), clocks and power, NVLink and PCIe, foreign processes"
_FOREIGN = 512 << 20  # bytes that a device may hold without one of the run's processes: contexts, displays
_GRAVE = {48, 63, 64, 74, 79, 92, 94, 95, 119, 120}  # Xid of memory, links, and devices that are gone
_RESET = "drain the node and reset the device (nvidia-smi -r), or restart it; if it comes again, have it replaced"


def gpus(place: Place) -> Found:
    """Examine each device by what its driver reports, before anything is computed.

    The node's first rank asks for all. Where a scheduler shows each process one device, each asks: the driver may show
    it no other one either, under the same number in every process.
    """
    if place.local_rank and place.devices != 1:
        return Found([], {"pid": os.getpid(), "gpus": []})
    try:
        found = read_gpus()
    except NoDriver as error:
        return Found([ok("GPUs", f"not looked at: {error}; with one: {_LOOKS}")], {"pid": os.getpid(), "gpus": []})
    findings = [finding for gpu in found for finding in judge_gpu(gpu)]
    findings += judge_faults(kernel_faults(kernel_log()))
    held = [[gpu.index, gpu.name, gpu.used, gpu.processes, gpu.uuid] for gpu in found]
    if not findings:
        findings = [ok("GPUs", _described(found))]
    return Found(findings, {"pid": os.getpid(), "gpus": held})


def _described(found: list[Gpu]) -> str:
    if not found:
        return "the driver shows none"
    ways = sorted({way for gpu in found for way in gpu.ways.values()})
    counts = (
        f"{len(found)} x {found[0].name}" if len({gpu.name for gpu in found}) == 1 else f"{len(found)} of several kinds"
    )
    return f"{counts}, {found[0].degrees} degrees" + (f", {' and '.join(ways)} between them" if ways else "")


def judge_gpu(gpu: Gpu) -> Iterator[Finding]:
    """What is wrong with one device."""
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
    """What the kernel's log says of devices that failed."""
    grave = sorted({(address, number) for address, number in faults if number in _GRAVE})
    return [fail("GPUs", f"the kernel's log has Xid {number} of {address}", _RESET) for address, number in grave]


def judge_gpus(facts: list[Any], place: Place) -> list[Finding]:
    """Find processes outside this run that hold memory of its devices; a device is reported once."""
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
