"""What must be the same on all ranks, and is not: versions, code, configuration, variables, devices.

facts = versions(place).facts               # on each rank
findings = judge_versions([facts, ...], place)
"""

import hashlib
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.config import options
from lockstep.config.secrets import mask
from lockstep.diagnose.doctor.finding import Finding, Found, Place, fail, ok, warn
from lockstep.run.devices import device_of, differing
from lockstep.run.environment import kept_variables

__all__ = ["judge_settings", "judge_versions", "same_settings", "versions"]

# These differ by rank where nothing is wrong, or only say who started it.
_OWN = {
    *(
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "SLURM_JOB_ID",
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
    ),
    *("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"),
    *("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
}
_MENDS = {
    "lockstep's code": "install the same commit everywhere",
    "task's code": "copy the same task to every node",
    "configuration": "start all ranks with the same flags and --config",
}


def versions(place: Place) -> Found:
    """What computes on this rank."""
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    device = torch.device("cuda", min(place.local_rank, place.devices - 1)) if place.devices else torch.device("cpu")
    device = torch.device("cpu") if place.config.device == "cpu" else device
    name, size = device_of(device)
    facts = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lockstep": lockstep.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "",  # type: ignore[no-untyped-call]
        "cuda": torch.version.cuda or "",
        "lockstep's code": _digest(sorted(Path(lockstep.__file__).parent.rglob("*.py"))),
        "task's code": _task_digest(place.config.task),
        "configuration": _config_digest(place),
        "architecture": platform.machine(),
    }
    return Found([], {"versions": facts, "device": str(device), "name": name, "memory": size, "host": place.host})


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _task_digest(task: str) -> str:
    """Of the file of --task FILE.py:CLASS; "" for a task by name, or a file that is not there, which is said later."""
    path = Path(task.partition(":")[0])
    return _digest([path]) if path.suffix == ".py" and path.is_file() else ""


def _config_digest(place: Place) -> str:
    flat = options.flat(place.config)
    return hashlib.sha256(repr(sorted(flat.items())).encode()).hexdigest()[:16]


def judge_versions(facts: list[Any], place: Place) -> list[Finding]:
    """Names the ranks whose versions, code or configuration are not those of most."""
    there = {rank: each["versions"] for rank, each in enumerate(facts) if each is not None}
    if not there:
        return []
    found = []
    for name in next(iter(there.values())):
        odd, usual = _odd({rank: each[name] for rank, each in there.items()})
        for rank in odd:
            is_digest = name in _MENDS
            text = (
                f"{place.who(rank)} has another {name}"
                if is_digest
                else f"{place.who(rank)} has {name} {there[rank][name] or 'none'}"
            )
            text += "" if is_digest else f", the others {usual or 'none'}"
            found.append(fail("versions", text, _MENDS.get(name, f"install the same {name} on all nodes")))
    first = next(iter(there.values()))
    told = ", ".join(f"{name} {first[name]}" for name in ("python", "torch", "lockstep"))
    found = found or [ok("versions", f"{told}{', on all ranks' if len(there) > 1 else ''}")]
    return found + _devices(facts, place)


def _devices(facts: list[Any], place: Place) -> list[Finding]:
    there = [[each["name"], each["memory"]] for each in facts if each is not None]
    told = differing(there) if len(there) == len(facts) else ""
    if not told:
        return []
    return [warn("devices", told, "--shares auto gives each as much work as it can do; else all wait for the slowest")]


def _odd(values: dict[int, Any]) -> tuple[list[int], Any]:
    """The ranks that have not what most have, and what most have; of two halves that of rank 0 counts."""
    counts = Counter(values.values())
    first = values[min(values)]
    usual = max(counts, key=lambda value: (counts[value], value == first))
    return [rank for rank, value in values.items() if value != usual], usual


def same_settings(place: Place) -> Found:
    """The variables that steer torch, NCCL and gloo, without secrets."""
    kept, _ = kept_variables(place.environ)
    own = {
        name: mask(value) for name, value in kept.items() if name not in _OWN and not name.startswith("TORCHELASTIC_")
    }
    return Found([], own)


def judge_settings(facts: list[Any], place: Place) -> list[Finding]:
    """Names the ranks that have a variable which the others have not, or another value of it."""
    there = {rank: each for rank, each in enumerate(facts) if each is not None}
    found = []
    for name in sorted({name for each in there.values() for name in each}):
        odd, usual = _odd({rank: each.get(name) for rank, each in there.items()})
        found += [
            warn(
                "same settings",
                f"{name} is {_said(there[rank].get(name))} on {place.who(rank)}, and {_said(usual)} on the others",
                "set it alike on all nodes (srun and ssh pass variables on only where told to)",
            )
            for rank in odd
        ]
    if len(there) == 1:
        return []
    return found or [ok("same settings", "variables of torch, NCCL and gloo are the same on all ranks")]


def _said(value: str | None) -> str:
    return "not set" if value is None else f"'{value}'"
