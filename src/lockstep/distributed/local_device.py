"""The CUDA device of a rank, and the proof that no two ranks of a host compute on one.

    device = local_device("auto", local_rank=3, local_size=8)       # cuda:3; cuda:0 where it is shown its own alone
    check_unshared(world.gather(identity(device)))                  # on all ranks

Slurm (`--gpus-per-task=1`, `--gpu-bind`), Ray and MIG show each process one device, which is number 0 in every one of
them. From inside a process that looks like eight ranks on a node of one GPU: only the devices' own names tell.
"""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.errors import ConfigError

__all__ = ["check_unshared", "identity", "local_device"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BY_UUID = (2, 30)  # NCCL from here on tells devices apart by their UUID; before, by their place on the bus
_SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"  # with which the same NCCL lets ranks share a device


def local_device(name: str, local_rank: int, local_size: int = 1) -> torch.device:
    """Choose the device of a rank.

    Args:
        name: "auto", "cpu" or "cuda", of --device.
        local_rank: index of this process on its node.
        local_size: processes on the node, as far as the launcher says.

    Raises:
        ConfigError: there is no CUDA device, or there are several, and fewer than processes.
    """
    found = torch.cuda.device_count() if name in ("auto", "cuda") and torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not found):
        return torch.device("cpu")
    if not found:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device auto or cpu")
    if found == 1:  # this process's own, or the node's only one: the ranks find out once they have met
        return torch.device("cuda", 0)
    ranks = max(local_size, local_rank + 1)
    if ranks > found:
        raise ConfigError(
            f"local rank {local_rank} of {ranks}: this process sees {found} CUDA devices; start at most {found} "
            "processes on this node, or show each process one device of its own"
        )
    return torch.device("cuda", local_rank)


def identity(device: torch.device) -> list[str] | None:
    """Describe a CUDA device as NCCL compares it; None where NCCL may put several ranks on it.

    Returns:
        [host, key, name]. The host is what NCCL takes for one: its name and this boot, or NCCL_HOSTID. The key is the
        device's UUID, which a MIG instance has of its own; NCCL before 2.30 goes by the place on the bus, which the
        instances of a GPU share.
    """
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version >= _BY_UUID and os.environ.get(_SHARED) == "1":
        return None
    found = torch.cuda.get_device_properties(device)
    uuid = str(found.uuid)
    bus = [str(getattr(found, name, uuid)) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return [_host(), uuid if version >= _BY_UUID else ":".join(bus), f"{found.name}, UUID {uuid}"]


def check_unshared(devices: Sequence[Sequence[str] | None]) -> None:
    """Refuse two ranks on one device of a host, which NCCL would do too, minutes later and without the way out.

    Args:
        devices: by rank, its `identity`; None of a rank that does not use NCCL.

    Raises:
        ConfigError: names both ranks and the device; the same on every rank.
    """
    first: dict[tuple[str, str], int] = {}
    for rank, device in enumerate(devices):
        if device is None:
            continue
        host, key, name = device
        other = first.setdefault((host, key), rank)
        if other != rank:
            raise ConfigError(
                f"ranks {other} and {rank} have one CUDA device ({name}, on {host.partition('/')[0]}), which NCCL "
                "refuses: start one process for each device, each with its own LOCAL_RANK, or show each process "
                "another device (CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1; of MIG, instances of different GPUs)"
            )


def _host() -> str:
    named = os.environ.get("NCCL_HOSTID")
    if named:
        return named
    try:
        return f"{platform.node()}/{_BOOT.read_text(encoding='ascii').strip()}"
    except OSError:  # not Linux
        return platform.node()
