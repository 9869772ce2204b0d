"""Check the launcher's variables, and compare versions, code, configuration and devices of all ranks.

facts = versions(place).facts              # on each rank
findings = judge_versions([facts, ...], place)
"""

import hashlib
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.config import cli
from lockstep.config.secrets import mask
from lockstep.diagnose.doctor.board import address_of, interfaces
from lockstep.diagnose.doctor.finding import CheckContext, CheckResult, Finding, advice_on, chosen, fail, ok, warn
from lockstep.distributed.launcher import unlaunched
from lockstep.training.guards import device_of, differing
from lockstep.training.run_dir import kept_variables

__all__ = [
    "judge_settings",
    "judge_versions",
    "launcher",
    "numbers",
    "same_settings",
    "settings",
    "versions",
]


_NUMBERS = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
_NAME = "variables"
_START = "start with `lockstep launch --nproc-per-node N -- ...` or torchrun, which set them all"


def numbers(environ: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """Return RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE; None if they are inconsistent."""
    found = {}
    for name, least in _NUMBERS.items():
        text = environ.get(name, "")
        if text and (not text.isascii() or not text.isdigit() or int(text) < least):
            return None
        found[name] = int(text) if text else least
    if "LOCAL_WORLD_SIZE" not in environ:
        found["LOCAL_WORLD_SIZE"] = found["WORLD_SIZE"]
    if found["RANK"] >= found["WORLD_SIZE"]:
        return None
    return found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]


def launcher(place: CheckContext) -> CheckResult:
    """Check that the launcher's variables are set and consistent."""
    return CheckResult(list(_launcher(place)) or [ok(_NAME, _describe_variable(place))])


def _describe_variable(place: CheckContext) -> str:
    if "WORLD_SIZE" not in place.environ:
        return "no launcher: one process"
    return f"RANK, LOCAL_RANK, WORLD_SIZE {place.size} and the master's address agree"


def _launcher(place: CheckContext) -> Iterator[Finding]:  # noqa: C901
    environ = place.environ
    wrong = False
    for name, least in _NUMBERS.items():
        text = environ.get(name, "")
        if name in environ and (not text.isascii() or not text.isdigit() or int(text) < least):
            wrong = True
            yield fail(_NAME, f"{name} is '{text}', and must be a number from {least}", _START)
    if wrong:
        return
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        found = unlaunched(environ)
        if found:
            yield fail(_NAME, found.problem, found.remedy)
        return
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)
    ]
    if missing:
        there = next(name for name in ("WORLD_SIZE", "RANK") if name in environ)
        yield fail(
            _NAME, f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, and {there} is", _START
        )
        return
    rank, local, size = (int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if rank >= size:
        yield fail(_NAME, f"RANK is {rank} and WORLD_SIZE {size}: ranks are 0 to {size - 1}", _START)
    on_node = int(environ.get("LOCAL_WORLD_SIZE", size))
    if on_node > size:
        yield fail(_NAME, f"LOCAL_WORLD_SIZE is {on_node}, more than WORLD_SIZE, {size}", _START)
    if local >= on_node:
        yield fail(_NAME, f"LOCAL_RANK is {local}, and LOCAL_WORLD_SIZE {on_node}: they are 0 to {on_node - 1}", _START)
    elif local > rank:
        yield fail(_NAME, f"LOCAL_RANK is {local}, more than RANK, {rank}", _START)
    port = environ["MASTER_PORT"]
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        yield fail(_NAME, f"MASTER_PORT is '{port}'", "give a number from 1 to 65535, the same on all nodes")
    ranks = max(local + 1, int(environ.get("LOCAL_WORLD_SIZE", 1)))
    if 1 < place.devices < ranks and place.config.device != "cpu":  # a single device may be this process's own
        seen = environ.get("CUDA_VISIBLE_DEVICES")
        mend = f"start at most {place.devices} processes on this node, or show each one device of its own"
        if seen is not None:
            mend += f", or let each see all devices: CUDA_VISIBLE_DEVICES is '{seen}'"
        yield fail(_NAME, f"{ranks} processes are on this node, and torch sees {place.devices} CUDA devices here", mend)


def settings(place: CheckContext) -> CheckResult:
    """Check that the variables for NCCL, gloo and CUDA are effective and sensible."""
    found = [*_interfaces(place), *_advised(place)]
    kept = [name for name in place.environ if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))]
    told = f"{', '.join(sorted(kept))} set, and nothing against {'it' if len(kept) == 1 else 'them'}"
    return CheckResult(found or [ok("settings", told if kept else "NCCL and gloo are left to choose")])


def _interfaces(place: CheckContext) -> Iterator[Finding]:
    known, environ = interfaces(place.root), place.environ
    shown = ", ".join(sorted(known)) or "none"
    for name in [each for each in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if each]:
        if name not in known:
            text = f"GLOO_SOCKET_IFNAME names {name}, and there is no such interface"
            yield fail("settings", text, f"name one of {shown}, by its whole name")
        elif place.root.as_posix() == "/" and not address_of(name):
            yield fail("settings", f"GLOO_SOCKET_IFNAME names {name}, which has no address", f"take one of {shown}")
        elif place.several_nodes and name.startswith("lo"):
            text = "GLOO_SOCKET_IFNAME is the loopback, and there are several nodes"
            yield warn("settings", text, f"name the interface between the nodes, one of {shown}; right on one machine")
    asked = environ.get("NCCL_SOCKET_IFNAME", "")
    if asked and not chosen(asked, known):
        text = f"NCCL_SOCKET_IFNAME is '{asked}', and no interface goes with it"
        yield fail("settings", text, f"there are {shown}; a prefix, =NAME for a whole name, ^NAME for all others")


def _advised(place: CheckContext) -> Iterator[Finding]:
    for advice in advice_on(place):
        yield warn("settings", f"{advice.name}={place.environ[advice.name]} {advice.effect}", advice.remedy)


# These differ by rank legitimately, or only identify the launcher.
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


def versions(place: CheckContext) -> CheckResult:
    """Collect versions, code digests and the device of this rank."""
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
    return CheckResult([], {"versions": facts, "device": str(device), "name": name, "memory": size, "host": place.host})


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _task_digest(task: str) -> str:
    """Digest the file of --task FILE.py:CLASS.

    "" for a task by name, or a missing file, which another check reports.
    """
    path = Path(task.partition(":")[0])
    return _digest([path]) if path.suffix == ".py" and path.is_file() else ""


def _config_digest(place: CheckContext) -> str:
    flat = cli.flat(place.config)
    return hashlib.sha256(repr(sorted(flat.items())).encode()).hexdigest()[:16]


def judge_versions(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Name the ranks whose versions, code or configuration differ from the majority's."""
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


def _devices(facts: list[Any], place: CheckContext) -> list[Finding]:
    there = [[each["name"], each["memory"]] for each in facts if each is not None]
    told = differing(there) if len(there) == len(facts) else ""
    if not told:
        return []
    return [warn("devices", told, "--shares auto gives each as much work as it can do; else all wait for the slowest")]


def _odd(values: dict[int, Any]) -> tuple[list[int], Any]:
    """The ranks that differ from the majority, and its value; rank 0 wins ties."""
    counts = Counter(values.values())
    first = values[min(values)]
    usual = max(counts, key=lambda value: (counts[value], value == first))
    return [rank for rank, value in values.items() if value != usual], usual


def same_settings(place: CheckContext) -> CheckResult:
    """Collect the variables that control torch, NCCL and gloo, without secrets."""
    kept, _ = kept_variables(place.environ)
    own = {
        name: mask(value) for name, value in kept.items() if name not in _OWN and not name.startswith("TORCHELASTIC_")
    }
    return CheckResult([], own)


def judge_settings(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Name the ranks with a variable that the others lack or set differently."""
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
