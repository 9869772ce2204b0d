"""Choose each rank's device, and refuse one that two ranks share.

device = local_device("auto", local_rank, local_size)
check_unshared(world.gather(identity(device)))
"""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.errors import ConfigError

__all__ = [
    "check_unshared",
    "identity",
    "local_device",
]


_BOOT = Path("/proc/sys/kernel/random/boot_id")
# NCCL distinguishes devices by UUID from this version on; before it, by their bus ID.
_BY_UUID = (2, 30)
# The variable that lets ranks share a device, in the same NCCL.
_SHARE_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


def local_device(name: str, local_rank: int, local_size: int = 1) -> torch.device:
    """Choose the device of a rank.

    Args:
        name: "auto", "cpu" or "cuda", of --device.
        local_rank: index of this process on its node.
        local_size: processes on the node; 1 if the launcher does not set it.

    Raises:
        ConfigError: there is no CUDA device, or there are several, but fewer than processes.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        count = torch.cuda.device_count()
    else:
        count = 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device auto or cpu")
    # The only visible device. Whether another rank shares it is checked once the ranks have joined.
    if count == 1:
        return torch.device("cuda", 0)
    ranks = max(local_size, local_rank + 1)
    if ranks > count:
        raise ConfigError(
            f"local rank {local_rank} of {ranks}: this process sees {count} CUDA devices; start at most {count} "
            "processes on this node, or show each process one device of its own"
        )
    return torch.device("cuda", local_rank)


def identity(device: torch.device) -> list[str] | None:
    """Return what NCCL compares to distinguish CUDA devices.

    Returns:
        [host, key, name]; None if NCCL allows several ranks on the device. The host is NCCL's notion of one: its name
        and this boot, or NCCL_HOSTID. The key is the device's UUID, which each MIG instance has; NCCL before 2.30 uses
        the bus ID, which a GPU's instances share.
    """
    # torch has no type for this call.
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version >= _BY_UUID and os.environ.get(_SHARE_VARIABLE) == "1":
        return None
    properties = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid)
    bus = []
    for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"):
        bus.append(str(getattr(properties, name, uuid)))
    return [_host(), uuid if version >= _BY_UUID else ":".join(bus), f"{properties.name}, UUID {uuid}"]


def check_unshared(devices: Sequence[Sequence[str] | None]) -> None:
    """Raise ConfigError if two ranks share a device.

    NCCL would refuse it too, but minutes later and without a way out.

    Args:
        devices: by rank, its `identity`; None for a rank that does not use NCCL.

    Raises:
        ConfigError: names both ranks and the device; the same on every rank.
    """
    ranks: dict[tuple[str, str], int] = {}
    for rank, device in enumerate(devices):
        if device is None:
            continue
        host, key, name = device
        first_rank = ranks.setdefault((host, key), rank)
        if first_rank != rank:
            raise ConfigError(
                f"ranks {first_rank} and {rank} share one CUDA device ({name}, on {host.partition('/')[0]}), which "
                "NCCL refuses: start one process for each device, each with its own LOCAL_RANK, or show each process "
                "another device (CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1; of MIG, instances of different GPUs)"
            )


def _host() -> str:
    host_id = os.environ.get("NCCL_HOSTID")
    if host_id:
        return host_id
    try:
        return f"{platform.node()}/{_BOOT.read_text(encoding='ascii').strip()}"
    except OSError:
        # Only Linux has a boot ID.
        return platform.node()
