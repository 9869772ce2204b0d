"""environment.json: where a run ran, without its secrets.

    write(folder / "environment.json", describe())

Of the environment's variables only those that change how training runs are kept, with masked values; of all others the
names alone.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.secrets import is_secret_name, mask, mask_args
from lockstep.files import write_whole

__all__ = ["describe", "kept_variables", "sources_of", "write"]

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "OMP_", "MKL_", "CUDA_")
_NAMES = {
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "SLURM_JOB_ID",
    "WORLD_SIZE",
}

_GIT_TIMEOUT = 2.0  # seconds; a repository on a slow network disk must not hold up a run


def describe(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Versions, machine, devices, git commit, command line and environment of this process, as plain JSON values.

    Memory is in bytes. What is not there (CUDA, a git repository) is None. Loads torch, and initialises CUDA where
    there is a device.

    Args:
        argv: the command line; None means this process's.
        environ: the environment; None means this process's.
    """
    variables = os.environ if environ is None else environ
    kept, others = kept_variables(variables)
    return {
        "versions": _versions(),
        "machine": _machine(),
        "devices": _devices(),
        "git": _git(),
        "command": mask_args(sys.argv if argv is None else argv, variables),
        "environment": kept,
        "environment_names": others,
    }


def kept_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables whose values may be kept, masked, and the names of all others. Both sorted by name."""
    kept, others = {}, []
    for name in sorted(environ):
        if name in _NAMES or name.startswith(_PREFIXES):
            kept[mask(name, environ)] = "***" if is_secret_name(name) else mask(environ[name], environ)
        else:
            others.append(mask(name, environ))  # someone may have set a secret as a name
    return kept, others


def write(path: Path, description: Mapping[str, Any]) -> None:
    """Writes the description as JSON, in one move: a reader finds the old file or the new one.

    Raises:
        OSError: the folder is missing, full or not writable.
    """
    write_whole(path, json.dumps(description, indent=2) + "\n")


def sources_of(run: Path) -> dict[str, str]:
    """What a run's folder says of its task's sources; {} where it says nothing that can be read."""
    try:
        found: dict[str, str] = json.loads((run / "environment.json").read_text(encoding="utf-8"))["sources"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}
    return found


def _versions() -> dict[str, str | None]:
    import torch

    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "lockstep": sys.modules["lockstep"].__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": _installed("numpy"),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": _dotted(torch.cuda.nccl.version()) if nccl else None,  # type: ignore[no-untyped-call]
    }


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return None


def _machine() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "platform": platform.platform(),
        "hostname": platform.node(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpu_usable": usable,
        "memory": _memory(),
    }


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            models = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
            return next(models, None) or platform.machine()
    except OSError:  # not Linux
        return platform.processor() or None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not known on this system
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": device.name, "memory": device.total_memory, "capability": f"{device.major}.{device.minor}"}
        for device in found
    ]


def _git() -> dict[str, Any] | None:
    # The file system monitor is a program that a repository's own settings may name; nothing of it runs here.
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT, env=environ, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or no answer in time
        return None
    lines = answer.stdout.decode(errors="replace").splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    changed = any(not line.startswith("#") for line in lines)
    return {"commit": None if commit == "(initial)" else commit, "changed": changed}
