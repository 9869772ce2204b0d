"""What this machine gives to the ranks: devices, or cores that they share."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError

__all__ = ["Machine", "machine_for"]

_LAUNCHED = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the ranks compute on.

    Attributes:
        devices: CUDA devices that are used; 0: the ranks compute on the cores.
        cores: that this process may use, after the quota of its container.
        threads: of each rank, the same at every size, so that a rank is as fast at all of them.
    """

    devices: int
    cores: float
    threads: int

    def allowed(self, ranks: int) -> float:
        """How many ranks' work can be done at once: all of it on devices, else what the cores give."""
        return float(ranks) if self.devices else min(float(ranks), max(1.0, self.cores / self.threads))

    def shared(self, ranks: int) -> bool:
        """Whether so many ranks share cores."""
        return self.allowed(ranks) < ranks


def machine_for(device: str, sizes: Sequence[int], *, exact: bool) -> Machine:
    """This machine, for runs of these sizes. Loads torch where it must ask it for devices.

    Args:
        device: what --device says.
        exact: whether a rank computes on one thread anyway.

    Raises:
        ConfigError: a launcher started this process, or there are fewer devices than ranks.
    """
    inside = [name for name in _LAUNCHED if name in os.environ]
    if inside:
        raise ConfigError(
            f"lockstep scale starts the ranks itself, and here a launcher has set {', '.join(inside)}: start it once, "
            "outside of torchrun and lockstep launch"
        )
    devices = 0
    if device != "cpu":
        cuda = importlib.import_module("torch").cuda
        devices = cuda.device_count() if cuda.is_available() else 0
        if device == "cuda" and not devices:
            raise ConfigError("--device cuda: torch sees no CUDA device here; use --device auto or cpu")
        if devices and sizes[-1] > devices:
            raise ConfigError(
                f"--world-sizes has {sizes[-1]}, and this node shows {devices} devices: give {devices} at most, and "
                f"--extrapolate {sizes[-1]} for what may come of more"
            )
    cores = usable_cores()
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = 1 if exact else int(given) if given.isdigit() and int(given) else max(1, int(cores) // sizes[-1])
    return Machine(devices, cores, threads)


def usable_cores() -> float:
    """Cores that this process may run on, or the share of them that its container's quota leaves."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()[:2]
        return min(float(cores), max(1.0, int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # "max", or no such system
        return float(cores)
