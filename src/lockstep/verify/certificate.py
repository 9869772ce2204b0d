"""Write and compare certificates: JSON files with a verification's result and its single process's trace.

write(path, made)
given = read(path)
difference = against(given, trace, allowance)           of this machine's single process to the certificate's
"""

import json
from pathlib import Path
from typing import Any

from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.config.task_options import OWN, kind_of
from lockstep.errors import ConfigError
from lockstep.files import write_whole
from lockstep.training import run_dir
from lockstep.verify.compare import Traces, first_difference
from lockstep.verify.recorder import TENSORS
from lockstep.verify.request import Difference, TableRow, VerifyRequest
from lockstep.verify.tolerance import EXACT, Tolerance

__all__ = ["against", "config_of", "make", "read", "same_machine", "write"]

_FORMAT = 1
_KEYS = {"versions", "machine", "devices", "config", "steps", "engines", "world_sizes", "resume_at", "compile", "task"}


def make(request: VerifyRequest, trace: dict[str, Any], rows: list[TableRow]) -> dict[str, Any]:
    """Build a certificate as plain values: the request, the single process's trace, the table's rows."""
    about = run_dir.describe()
    machine = {key: value for key, value in about["machine"].items() if key != "hostname"}
    return {
        "format": _FORMAT,
        "versions": about["versions"],
        "machine": machine,
        "devices": about["devices"],
        "config": cli.flat(request.config, own_task=request.task is not None or kind_of(request.config.task) == OWN),
        "steps": request.steps,
        "engines": list(request.engines),
        "world_sizes": list(request.world_sizes),
        "resume_at": request.resume,
        "compile": request.compile,
        "task": request.config.task or (type(request.task).__qualname__ if request.task is not None else ""),
        "rows": [
            {"combination": str(row.combination), "verdict": row.verdict, "found": row.text, "largest": row.largest[0]}
            for row in rows
        ],
        "fingerprints": [step["fingerprint"] for step in trace["steps"]],
        "trace": trace,
    }


def write(path: Path, made: dict[str, Any]) -> None:
    """Write a certificate atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_whole(path, json.dumps(made, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror or error}; choose another file") from error


def read(path: Path) -> dict[str, Any]:
    """Read a certificate.

    Raises:
        ConfigError: the file is no certificate, or cannot be read.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        wrong = given["format"] != _FORMAT
        whole = wrong or (given.keys() >= _KEYS and len(given["trace"]["steps"]) == given["steps"] > 0)
    except OSError as error:
        raise ConfigError(f"--against {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--against {path} is no certificate that `lockstep verify` wrote") from error
    if wrong:
        raise ConfigError(f"--against {path} has format {given['format']}; this lockstep reads {_FORMAT}")
    if not whole:
        raise ConfigError(f"--against {path} is no certificate that `lockstep verify` wrote: parts of it are missing")
    return dict(given)


def config_of(given: dict[str, Any]) -> Config:
    """Return the configuration that was proved.

    Raises:
        ConfigError: this version does not know one of its options.
    """
    unknown = sorted(set(given["config"]) - set(cli.option_list()))
    if unknown:
        raise ConfigError(f"--against: the certificate has options that this version lacks: {', '.join(unknown)}")
    return cli.build(given["config"])


def same_machine(given: dict[str, Any]) -> list[str]:
    """Describe how versions and hardware differ from the certificate's; [] if bits must agree."""
    about = run_dir.describe()
    keys = [("versions", key) for key in about["versions"]] + [("machine", "cpu")]
    different = [
        f"{key} {given[part].get(key)} there, {about[part][key]} here"
        for part, key in keys
        if given[part].get(key) != about[part][key]
    ]
    there, here = ([device["name"] for device in each["devices"]] for each in (given, about))
    return different + ([f"devices {there} there, {here} here"] if there[:1] != here[:1] else [])


def against(given: dict[str, Any], trace: dict[str, Any], tolerance: Tolerance) -> Difference | None:
    """Find the first difference between this machine's single process and the certificate's.

    The stages are compared in the usual order. A certificate has only digests and 2-norms of tensors, so with a
    tolerance the norms are compared.
    """
    expected = given["trace"]
    steps = [_held(mine, theirs, tolerance) for mine, theirs in zip(trace["steps"], expected["steps"], strict=False)]
    if len(steps) != len(expected["steps"]):
        text = f"{len(trace['steps'])} steps instead of {len(expected['steps'])}"
        return Difference(len(steps), "data", "steps", 0, text)
    return first_difference(Traces(expected, [{**trace, "steps": steps}], tolerance))


def _held(mine: dict[str, Any], theirs: dict[str, Any], tolerance: Tolerance) -> dict[str, Any]:
    """This machine's record of a step, compared with the certificate's as a rank's would be."""
    step, kinds = mine["step"], [kind for kind in TENSORS if kind in mine]
    return mine | {kind: _compared(mine[kind], theirs.get(kind), step, tolerance) for kind in kinds}


def _compared(mine: dict[str, Any], theirs: dict[str, Any] | None, step: int, tolerance: Tolerance) -> dict[str, Any]:
    found: dict[str, Any] = {"digests": {}, "first": None, "missing": [], "equal": True, "sums": [0.0] * 4}
    there = theirs["digests"] if theirs else {}
    found["missing"] = sorted(mine["digests"].keys() ^ there.keys())
    total = max(mine["square"], theirs["square"] if theirs else 0.0) ** 0.5
    for name in (name for name in mine["digests"] if name in there):
        if mine["digests"][name] == there[name]:
            continue
        found["equal"] = False
        norms = [mine["norms"][name], theirs["norms"][name]] if theirs else [0.0, 0.0]
        limit = -1.0 if tolerance is EXACT else tolerance.relative(step) * total
        if found["first"] is None and not abs(norms[0] - norms[1]) <= limit:
            difference = abs(norms[0] - norms[1])
            values = [f"a tensor of norm {norm!r}" for norm in norms]
            found["first"] = {"name": name, "values": values, "at": [], "difference": difference, "allowed": limit}
    return found
