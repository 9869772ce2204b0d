"""The ranks' groups: whether they form, whether a sum over them is right, and how fast it is.

found = sums(place)                         # facts: what each rank gave, what came out, by backend
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.diagnose.doctor.addresses import gloo_address, infiniband, interfaces, link_speed
from lockstep.diagnose.doctor.finding import Finding, Found, Place, fail, ok, warn
from lockstep.diagnose.doctor.nccl_log import Chosen, read_log
from lockstep.distributed.world import World
from lockstep.units import bytes_text

__all__ = ["bandwidth", "expected", "group", "judge_bandwidth", "judge_sums", "judge_transport", "sums", "transport"]

_FORM = 15.0  # seconds
_LENGTHS = {"gloo": (1 << 10, 1 << 16, 1 << 20, 1 << 22), "nccl": (1 << 10, 1 << 18, 1 << 22, 1 << 26)}  # float32
_REPEATS, _ENOUGH = 5, 1.5  # of each size; seconds that the next size may take
_SHARE = {"gloo": 0.15, "nccl": 0.4}  # of what the link should give; gloo copies through the processor


def group(place: Place) -> Found:
    """Forms the groups that training would form, gloo and, on CUDA devices, NCCL."""
    if place.size == 1:
        return Found([ok("group", "one process: nothing to exchange")])
    if place.world is None:
        place.world = World.join(place.config.device, _FORM)
    backend = "gloo and NCCL" if place.world.device.type == "cuda" else "gloo"
    return Found([ok("group", f"{place.size} ranks formed a group of {backend}")])


def _backends(world: World) -> list[tuple[str, torch.device, Any]]:
    """(name, where its tensors lie, group): of each way in which the ranks exchange."""
    found: list[tuple[str, torch.device, Any]] = [("gloo", torch.device("cpu"), world.control)]
    if world.device.type == "cuda":
        found.append(("nccl", world.device, None))  # the default group's
    return found


def own(rank: int) -> list[float]:
    """What a rank gives to the sum: of two of them another two cannot make the same."""
    return [rank + 1.0, (rank + 1.0) ** 2, 2.0 ** (rank % 40)]


def expected(size: int) -> list[float]:
    """The sum of what `size` ranks give."""
    return [sum(column) for column in zip(*map(own, range(size)), strict=True)]


def sums(place: Place) -> Found:
    """A sum over all ranks, by each backend, and what each rank gave to it."""
    world = place.world
    if world is None or world.size == 1:
        return Found()
    facts = {}
    for name, device, ranks in _backends(world):
        given = torch.tensor(own(world.rank), dtype=torch.float64, device=device)
        each = [torch.zeros_like(given) for _ in range(world.size)]
        dist.all_gather(each, given, group=ranks)  # collective
        total = given.clone()
        dist.all_reduce(total, group=ranks)  # collective
        facts[name] = {"total": total.tolist(), "each": [one.tolist() for one in each]}  # waits for the device
    return Found([], facts)


def judge_sums(facts: list[Any], place: Place) -> list[Finding]:
    """Compares what came out on each rank with what should have."""
    found = []
    wanted = expected(place.size)
    names = {name for each in facts if each for name in each}
    for name in sorted(names):
        wrong = {rank: each[name] for rank, each in enumerate(facts) if each and each[name]["total"] != wanted}
        for rank, each in wrong.items():
            odd = [other for other, gave in enumerate(each["each"]) if gave != own(other)]
            total = each["total"][0]
            text = f"{name}: the sum of all ranks is {total:g} on {place.who(rank)}, and should be {wanted[0]:g}"
            if odd:
                text += (
                    f"; what came from {place.who(odd[0])} is {each['each'][odd[0]][0]:g}, and not {own(odd[0])[0]:g}"
                )
            mend = "look for a defective link or device there: NCCL_DEBUG=INFO (`lockstep launch --nccl-debug`), dmesg"
            found.append(fail("sum", text, mend))
    if not found and names:
        found.append(ok("sum", f"{' and '.join(sorted(names))}: {wanted[0]:g} on all ranks, as it should be"))
    return found


def bandwidth(place: Place) -> Found:
    """Times sums of growing messages."""
    world = place.world
    if world is None or world.size == 1:
        return Found()
    facts: dict[str, Any] = {}
    for name, device, ranks in _backends(world):
        times: dict[str, float] = {}
        for length in _LENGTHS[name]:
            data = torch.ones(length, device=device)
            seconds = []
            for _ in range(1 + _REPEATS):
                data.fill_(1.0)
                _ready(device)
                world.barrier()  # collective
                began = time.perf_counter()
                dist.all_reduce(data, group=ranks)  # collective
                _ready(device)
                seconds.append(time.perf_counter() - began)
            times[str(4 * length)] = statistics.median(seconds[1:])
            slowest = max(world.gather(times[str(4 * length)]))  # collective
            if slowest * 4 * (1 + _REPEATS) > _ENOUGH:
                break
        facts[name] = times
    _, interface = gloo_address(place.environ, place.host)
    facts["link"] = link_speed(place.root, interface)
    facts["interface"] = interface
    return Found([], facts)


def _ready(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # waits for the device


def judge_bandwidth(facts: list[Any], place: Place) -> list[Finding]:
    """What the largest message gives, beside what the slowest link should."""
    there = [each for each in facts if each]
    if not there:
        return []
    found = []
    links = [each["link"] for each in there]
    link = min(links) if all(links) and place.several_nodes else 0.0
    for name in ("gloo", "nccl"):
        times = there[0].get(name)
        if not times:
            continue
        sizes = sorted(map(int, times))
        least, most = (max(each[name][str(size)] for each in there) for size in (sizes[0], sizes[-1]))
        rate = 2 * (place.size - 1) / place.size * sizes[-1] / most
        text = f"{name}: {1e3 * least:.2g} ms for {bytes_text(sizes[0])}"
        text += f", {bytes_text(rate)}/s at {bytes_text(sizes[-1])}"
        if link and rate < _SHARE[name] * link:
            slowest = place.who(links.index(link))
            text += f"; the link of {slowest} ({there[0]['interface']}) should give {bytes_text(link)}/s"
            mend = "look for another load, errors (`ip -s link`) or a lower speed of the switch (`ethtool`)"
            found.append(warn("bandwidth", text, mend + ("; InfiniBand, if there is any" if name == "nccl" else "")))
        else:
            told = f" of {bytes_text(link)}/s" if link else " (this machine does not report the speed of the link)"
            found.append(ok("bandwidth", text + told))
    return found


def transport(place: Place) -> Found:
    """What NCCL chose, by its own log, where it has begun; and what there would be."""
    path = place.environ.get("NCCL_DEBUG_FILE", "")
    if not place.devices or place.size == 1 or not path:
        return Found([], None)
    chosen = read_log(Path(path.replace("%h", place.host).replace("%p", str(os.getpid()))))
    facts = {
        "chosen": json.loads(chosen.to_json()),
        "infiniband": infiniband(place.root),
        "there": interfaces(place.root),
    }
    return Found([], facts)


def judge_transport(facts: list[Any], place: Place) -> list[Finding]:
    """Whether NCCL took sockets where InfiniBand is up, and whether all ranks took the same."""
    there = {rank: each for rank, each in enumerate(facts) if each}
    if not there:
        return [
            ok("transport", "no NCCL here; on CUDA devices: which interface and transport it takes, from its own log")
        ]
    found = []
    chosen = {rank: Chosen(**each["chosen"]) for rank, each in there.items()}
    for rank, one in chosen.items():
        ports = there[rank]["infiniband"]
        if ports and one.network == "Socket" and place.several_nodes:
            text = f"{place.who(rank)}: NCCL takes sockets ({one.interface}), and {', '.join(ports)} is up"
            mend = "unset NCCL_IB_DISABLE and NCCL_NET; in a container: libibverbs, --device /dev/infiniband, "
            mend += "--ulimit memlock=-1"
            found.append(fail("transport", text, mend))
    networks = {one.network for one in chosen.values() if one.network}
    if len(networks) > 1:
        told = "; ".join(f"{place.who(rank)}: {one.network}" for rank, one in chosen.items())
        found.append(
            fail("transport", f"NCCL takes different networks: {told}", "set NCCL_NET, or mend the odd node's")
        )
    first = chosen[min(chosen)]
    return found or [ok("transport", f"NCCL {first}")]
