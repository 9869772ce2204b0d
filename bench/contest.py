"""How contestants are compared: in one process (or one group of them), by turns, on the same model, data and order.

    results = contest({"bare": stepper, "lockstep": stepper}, rounds=30, steps=50)

A stepper is a callable that takes the next `steps` steps. Each round every contestant takes its turn, in an order that
rotates, so that a slow moment of the machine hits all alike. Reported are each one's median time a step and the median,
over the rounds, of its ratio to the first one's.
"""

import json
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.multiprocessing as multiprocessing

__all__ = ["contest", "machine", "show", "start"]

Stepper = Callable[[int], None]


def contest(
    steppers: dict[str, Stepper],
    *,
    rounds: int,
    steps: int,
    barrier: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict]:
    """{name: {microseconds, ratio, spread}}: a step's median time, and its ratio to the first contestant's.

    One process alone may take `time.process_time` as its clock, which does not count what others use of the machine.
    """
    names = list(steppers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # once unmeasured: allocations, first calls
        barrier()
        steppers[name](steps)
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            barrier()
            began = clock()
            steppers[name](steps)
            barrier()  # the slowest rank ends the turn, and a device is done with it
            times[name].append((clock() - began) / steps * 1e6)
    base = times[names[0]]
    results = {}
    for name in names:
        ratios = [mine / first for mine, first in zip(times[name], base, strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        results[name] = {
            "microseconds": statistics.median(times[name]),
            "ratio": statistics.median(ratios),
            "spread": quarters[2] - quarters[0],
        }
    return results


def start(compete: Callable[..., None], world: int, *arguments: object) -> None:
    """Runs compete(rank, world, port, folder, *arguments) in `world` new processes; port and folder are theirs."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder, context = tempfile.mkdtemp(prefix="lockstep-bench-"), multiprocessing.get_context("spawn")
    ranks = [context.Process(target=compete, args=(rank, world, port, folder, *arguments)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    shutil.rmtree(folder)


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            return next(line.partition(":")[2].strip() for line in handle if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def show(title: str, results: dict[str, dict], **setting: object) -> None:
    """A table for people, and one JSON line a contestant."""
    print(f"\n{title}")
    print(f"  {'contestant':<24} {'us a step':>10} {'ratio':>7} {'spread':>7}")
    for name, found in results.items():
        print(f"  {name:<24} {found['microseconds']:>10.1f} {found['ratio']:>7.3f} {found['spread']:>7.3f}")
    for name, found in results.items():
        print(json.dumps({"setting": title, **setting, "contestant": name, **found}))
