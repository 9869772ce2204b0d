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
from lockstep.diagnose.doctor.board import interfaces
from lockstep.diagnose.doctor.finding import (
    CheckContext,
    CheckResult,
    Finding,
    advice_on,
    fail,
    ok,
    select_interfaces,
    warn,
)
from lockstep.distributed.cpus import node_cores
from lockstep.distributed.launcher import address_of
from lockstep.distributed.starters import find_launch_mistake
from lockstep.training.state.run_dir import split_environment
from lockstep.training.step.guards import describe_unequal_devices, name_and_memory

__all__ = [
    "judge_settings",
    "judge_versions",
    "launcher",
    "numbers",
    "same_settings",
    "settings",
    "slurm",
    "versions",
]


# Least value of each variable, also its default.
_NUMBERS = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
_NAME = "variables"
_START = "start with `lockstep launch --nproc-per-node N -- ...` or torchrun, which set them all"


def numbers(environ: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """Return RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE; None if they are inconsistent."""
    values = {}
    for name, least in _NUMBERS.items():
        text = environ.get(name, "")
        if text and (not text.isascii() or not text.isdigit() or int(text) < least):
            return None
        values[name] = int(text) if text else least
    if "LOCAL_WORLD_SIZE" not in environ:
        values["LOCAL_WORLD_SIZE"] = values["WORLD_SIZE"]
    if values["RANK"] >= values["WORLD_SIZE"]:
        return None
    return values["RANK"], values["LOCAL_RANK"], values["WORLD_SIZE"], values["LOCAL_WORLD_SIZE"]


def launcher(place: CheckContext) -> CheckResult:
    """Check that the launcher's variables are set and consistent."""
    return CheckResult(list(_launcher_findings(place)) or [ok(_NAME, _describe_variable(place))])


def _describe_variable(place: CheckContext) -> str:
    if "WORLD_SIZE" not in place.environ:
        return "no launcher: one process"
    return f"RANK, LOCAL_RANK, WORLD_SIZE {place.size} and MASTER_ADDR are consistent"


# One check after the other, each with its own way out: splitting would hide their order.
def _launcher_findings(place: CheckContext) -> Iterator[Finding]:  # noqa: C901
    environ = place.environ
    wrong = False
    for name, least in _NUMBERS.items():
        text = environ.get(name, "")
        if name in environ and (not text.isascii() or not text.isdigit() or int(text) < least):
            wrong = True
            yield fail(_NAME, f"{name} is '{text}': must be an integer of at least {least}", _START)
    if wrong:
        return
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        hint = find_launch_mistake(environ)
        if hint:
            yield fail(_NAME, hint.problem, hint.remedy)
        return
    missing = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            missing.append(name)
    if missing:
        present = next(name for name in ("WORLD_SIZE", "RANK") if name in environ)
        yield fail(
            _NAME, f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, but {present} is", _START
        )
        return
    rank, local, size = (int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if rank >= size:
        yield fail(_NAME, f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are 0 to {size - 1}", _START)
    on_node = int(environ.get("LOCAL_WORLD_SIZE", size))
    if on_node > size:
        yield fail(_NAME, f"LOCAL_WORLD_SIZE is {on_node}, greater than WORLD_SIZE {size}", _START)
    if local >= on_node:
        yield fail(
            _NAME,
            f"LOCAL_RANK is {local}, but LOCAL_WORLD_SIZE is {on_node}: local ranks are 0 to {on_node - 1}",
            _START,
        )
    elif local > rank:
        yield fail(_NAME, f"LOCAL_RANK is {local}, greater than RANK {rank}", _START)
    port = environ["MASTER_PORT"]
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        yield fail(_NAME, f"MASTER_PORT is '{port}'", "give a number from 1 to 65535, the same on all nodes")
    ranks = max(local + 1, int(environ.get("LOCAL_WORLD_SIZE", 1)))
    # If only one device is visible, it may be this process's own.
    if 1 < place.devices < ranks and place.config.device != "cpu":
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        mend = f"start at most {place.devices} processes on this node, or make one device visible to each"
        if visible is not None:
            mend += f", or let each see all devices: CUDA_VISIBLE_DEVICES is '{visible}'"
        yield fail(_NAME, f"{ranks} processes run on this node, but torch sees {place.devices} CUDA devices", mend)


def slurm(place: CheckContext) -> CheckResult:
    """Compare what Slurm granted on this node with what this process can use."""
    environ = place.environ
    if "SLURM_JOB_ID" not in environ:
        return CheckResult()
    bound = node_cores(environ)
    cores, gpus = (_whole(environ, f"SLURM_{name}_ON_NODE") for name in ("CPUS", "GPUS"))
    findings = list(_slurm_findings(place, bound, cores, gpus))
    summary = f"job {environ['SLURM_JOB_ID']}: {cores or bound} cores and {gpus} GPUs on this node"
    return CheckResult(findings or [ok("Slurm", summary)])


def _slurm_findings(place: CheckContext, bound: int, cores: int, gpus: int) -> Iterator[Finding]:
    environ = place.environ
    if gpus and not place.devices and place.config.device != "cpu":
        text = f"Slurm granted {gpus} GPUs on this node, but torch sees none"
        yield fail("Slurm", text, "check CUDA_VISIBLE_DEVICES, and nvidia-smi under srun; or pass --device cpu")
    elif place.devices > 1 and place.local_size < place.devices and gpus == place.devices:
        text = f"{place.local_size} ranks use {place.local_size} of this node's {gpus} GPUs"
        yield warn("Slurm", text, f"start {gpus} on each node: --nproc-per-node, or --ntasks-per-node of srun")
    if "TORCHELASTIC_RUN_ID" in environ and bound < min(place.local_size, cores):
        text = f"srun bound the launcher of {place.local_size} ranks to {bound} of {cores} cores"
        yield warn("Slurm", text, "add --cpu-bind=none to srun; the ranks share the cores by themselves")


def _whole(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if text.isdecimal():
        return int(text)
    return 0


def settings(place: CheckContext) -> CheckResult:
    """Check the environment variables of NCCL, gloo and CUDA."""
    findings = [*_interface_findings(place), *_advice_findings(place)]
    variables = []
    for name in place.environ:
        if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_")):
            variables.append(name)
    summary = f"{', '.join(sorted(variables))} set, with no known problem"
    return CheckResult(findings or [ok("settings", summary if variables else "NCCL and gloo use their defaults")])


def _interface_findings(place: CheckContext) -> Iterator[Finding]:
    available = interfaces(place.root)
    environ = place.environ
    listing = ", ".join(sorted(available)) or "none"
    for name in [entry for entry in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if entry]:
        if name not in available:
            text = f"GLOO_SOCKET_IFNAME is '{name}': no such interface"
            yield fail("settings", text, f"use the full name of one of {listing}")
        elif place.root.as_posix() == "/" and not address_of(name):
            yield fail("settings", f"GLOO_SOCKET_IFNAME is '{name}': it has no address", f"use one of {listing}")
        elif place.several_nodes and name.startswith("lo"):
            text = "GLOO_SOCKET_IFNAME is the loopback, but the run has several nodes"
            yield warn("settings", text, f"use the interface between the nodes, one of {listing}")
    pattern = environ.get("NCCL_SOCKET_IFNAME", "")
    if pattern and not select_interfaces(pattern, available):
        text = f"NCCL_SOCKET_IFNAME is '{pattern}': no interface matches"
        yield fail(
            "settings", text, f"interfaces are {listing}; give a prefix, =NAME for a full name, ^NAME for all others"
        )


def _advice_findings(place: CheckContext) -> Iterator[Finding]:
    for advice in advice_on(place):
        yield warn("settings", f"{advice.name}={place.environ[advice.name]} {advice.effect}", advice.remedy)


# These variables differ by rank legitimately, or only identify the launcher.
_PER_RANK = {
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
_REMEDIES = {
    "lockstep's code": "install the same commit everywhere",
    "task's code": "copy the same task to every node",
    "configuration": "start all ranks with the same flags and --config",
}


def versions(place: CheckContext) -> CheckResult:
    """Collect versions, code digests and the device of this rank."""
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    if place.devices:
        device = torch.device("cuda", min(place.local_rank, place.devices - 1))
    else:
        device = torch.device("cpu")
    device = torch.device("cpu") if place.config.device == "cpu" else device
    name, size = name_and_memory(device)
    facts = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lockstep": lockstep.__version__,
        # torch has no type for this call.
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
    if path.suffix == ".py" and path.is_file():
        return _digest([path])
    return ""


def _config_digest(place: CheckContext) -> str:
    flat = cli.flatten(place.config)
    return hashlib.sha256(repr(sorted(flat.items())).encode()).hexdigest()[:16]


def judge_versions(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Name the ranks whose versions, code or configuration differ from the majority's."""
    by_rank = {}
    for rank, fact in enumerate(facts):
        if fact is not None:
            by_rank[rank] = fact["versions"]
    if not by_rank:
        return []
    findings = []
    for name in next(iter(by_rank.values())):
        odd, usual = _minority({rank: fact[name] for rank, fact in by_rank.items()})
        for rank in odd:
            is_digest = name in _REMEDIES
            if is_digest:
                text = f"{place.who(rank)}: {name} differs from the other ranks'"
            else:
                text = f"{place.who(rank)} has {name} {by_rank[rank][name] or 'none'}"
            text += "" if is_digest else f", the others {usual or 'none'}"
            findings.append(fail("versions", text, _REMEDIES.get(name, f"install the same {name} on all nodes")))
    versions_of_rank = next(iter(by_rank.values()))
    summary = ", ".join(f"{name} {versions_of_rank[name]}" for name in ("python", "torch", "lockstep"))
    findings = findings or [ok("versions", f"{summary}{', on all ranks' if len(by_rank) > 1 else ''}")]
    return findings + _device_findings(facts, place)


def _device_findings(facts: list[Any], place: CheckContext) -> list[Finding]:
    devices = []
    for fact in facts:
        if fact is not None:
            devices.append([fact["name"], fact["memory"]])
    if len(devices) == len(facts):
        difference = describe_unequal_devices(devices)
    else:
        difference = ""
    if not difference:
        return []
    return [
        warn("devices", difference, "--shares auto gives each rank work by its speed; else all wait for the slowest")
    ]


def _minority(values: dict[int, Any]) -> tuple[list[int], Any]:
    """Return the ranks that differ from the majority, and its value; rank 0 wins ties."""
    counts = Counter(values.values())
    value_of_first = values[min(values)]
    usual = max(counts, key=lambda value: (counts[value], value == value_of_first))
    return [rank for rank, value in values.items() if value != usual], usual


def same_settings(place: CheckContext) -> CheckResult:
    """Collect the variables that control torch, NCCL and gloo, without secrets."""
    variables, _ = split_environment(place.environ)
    masked = {}
    for name, value in variables.items():
        if name not in _PER_RANK and not name.startswith("TORCHELASTIC_"):
            masked[name] = mask(value)
    return CheckResult([], masked)


def judge_settings(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Name the ranks with a variable that the others lack or set differently."""
    by_rank = {}
    for rank, fact in enumerate(facts):
        if fact is not None:
            by_rank[rank] = fact
    findings = []
    for name in sorted({name for fact in by_rank.values() for name in fact}):
        odd, usual = _minority({rank: fact.get(name) for rank, fact in by_rank.items()})
        for rank in odd:
            findings.append(
                warn(
                    "same settings",
                    f"{name} is {_value_text(by_rank[rank].get(name))} on {place.who(rank)}, "
                    f"but {_value_text(usual)} on the others",
                    "set it to the same value on all nodes (srun and ssh forward variables only on request)",
                )
            )
    if len(by_rank) == 1:
        return []
    return findings or [ok("same settings", "variables of torch, NCCL and gloo are the same on all ranks")]


def _value_text(value: str | None) -> str:
    if value is None:
        return "not set"
    return f"'{value}'"
