"""Write and compare certificates: JSON files with a verification's result and its single process's trace.

write(path, content)
content = read(path)
difference = against(content, trace, tolerance)         compares this machine's single process with the certificate's
"""

import json
from pathlib import Path
from typing import Any

from lockstep.config import cli
from lockstep.config.parallel_options import DEGREES
from lockstep.config.schema import Config
from lockstep.config.task_options import OWN, kind_of
from lockstep.errors import ConfigError
from lockstep.files import write_whole
from lockstep.training.state import run_dir
from lockstep.verify.compare import Traces, first_difference
from lockstep.verify.recorder import TENSORS
from lockstep.verify.request import Difference, TableRow, VerifyRequest
from lockstep.verify.tolerance import EXACT, Tolerance

__all__ = ["against", "config_of", "make", "read", "same_machine", "write"]

_FORMAT = 1
_WRITE_AGAIN = "write it again with `lockstep verify --out`"
_KEYS = {"versions", "machine", "devices", "config", "steps", "engines", "world_sizes", "resume_at", "compile", "task"}


def make(request: VerifyRequest, trace: dict[str, Any], rows: list[TableRow]) -> dict[str, Any]:
    """Build a certificate as plain values: the request, the single process's trace, the table's rows."""
    about = run_dir.describe_process()
    # The host name does not change a result, and may be private.
    machine = {}
    for key, value in about["machine"].items():
        if key != "hostname":
            machine[key] = value
    return {
        "format": _FORMAT,
        "versions": about["versions"],
        "machine": machine,
        "devices": about["devices"],
        "config": cli.flatten(request.config, own_task=request.task is not None or kind_of(request.config.task) == OWN),
        "steps": request.steps,
        "engines": list(request.engines),
        "world_sizes": list(request.world_sizes),
        **{name: list(getattr(request, name)) for name in DEGREES},
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


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a certificate atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_whole(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror or error}; choose another file") from error


def read(path: Path) -> dict[str, Any]:
    """Read a certificate.

    Raises:
        ConfigError: the file is not a certificate, or cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        wrong = content["format"] != _FORMAT
        complete = wrong or (content.keys() >= _KEYS and len(content["trace"]["steps"]) == content["steps"] > 0)
    except OSError as error:
        raise ConfigError(f"--against {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--against {path} is not a certificate; {_WRITE_AGAIN}") from error
    if wrong:
        raise ConfigError(
            f"--against {path} has format {content['format']}, this version reads {_FORMAT}; {_WRITE_AGAIN}"
        )
    if not complete:
        raise ConfigError(f"--against {path} is an incomplete certificate; {_WRITE_AGAIN}")
    return dict(content)


def config_of(content: dict[str, Any]) -> Config:
    """Return the configuration that was proved.

    Raises:
        ConfigError: this version does not know one of its options.
    """
    unknown = sorted(set(content["config"]) - set(cli.option_list()))
    if unknown:
        raise ConfigError(
            f"--against: this version does not have these options of the certificate: {', '.join(unknown)}; "
            f"{_WRITE_AGAIN}"
        )
    return cli.build(content["config"])


def same_machine(content: dict[str, Any]) -> list[str]:
    """Describe how versions and hardware differ from the certificate's; [] if bits must agree."""
    about = run_dir.describe_process()
    keys = [("versions", key) for key in about["versions"]] + [("machine", "cpu")]
    different = []
    for section, key in keys:
        if content[section].get(key) != about[section][key]:
            different.append(f"{key} {content[section].get(key)} there, {about[section][key]} here")
    listed, present = ([device["name"] for device in facts["devices"]] for facts in (content, about))
    return different + ([f"devices {listed} there, {present} here"] if listed[:1] != present[:1] else [])


def against(content: dict[str, Any], trace: dict[str, Any], tolerance: Tolerance) -> Difference | None:
    """Find the first difference between this machine's single process and the certificate's.

    The stages are compared in the usual order. A certificate has only digests and 2-norms of tensors, so with a
    tolerance the norms are compared.
    """
    expected = content["trace"]
    steps = []
    for actual, record in zip(trace["steps"], expected["steps"], strict=False):
        steps.append(_compare_step(actual, record, tolerance))
    if len(steps) != len(expected["steps"]):
        text = f"{len(trace['steps'])} steps instead of {len(expected['steps'])}"
        return Difference(len(steps), "data", "steps", 0, text)
    return first_difference(Traces(expected, [{**trace, "steps": steps}], tolerance))


def _compare_step(actual: dict[str, Any], expected: dict[str, Any], tolerance: Tolerance) -> dict[str, Any]:
    """Compare a step's record with the certificate's, as a rank's record."""
    step = actual["step"]
    tensor_types = []
    for tensor_type in TENSORS:
        if tensor_type in actual:
            tensor_types.append(tensor_type)
    return actual | {
        tensor_type: _compare_tensors(actual[tensor_type], expected.get(tensor_type), step, tolerance)
        for tensor_type in tensor_types
    }


def _compare_tensors(
    actual: dict[str, Any], expected: dict[str, Any] | None, step: int, tolerance: Tolerance
) -> dict[str, Any]:
    result: dict[str, Any] = {"digests": {}, "first": None, "missing": [], "equal": True, "parts": {}}
    digests = expected["digests"] if expected else {}
    result["missing"] = sorted(actual["digests"].keys() ^ digests.keys())
    total = max(actual["square"], expected["square"] if expected else 0.0) ** 0.5
    for name in (name for name in actual["digests"] if name in digests):
        if actual["digests"][name] == digests[name]:
            continue
        result["equal"] = False
        if expected:
            norms = [actual["norms"][name], expected["norms"][name]]
        else:
            norms = [0.0, 0.0]
        limit = -1.0 if tolerance is EXACT else tolerance.relative(step) * total
        if result["first"] is None and not abs(norms[0] - norms[1]) <= limit:
            difference = abs(norms[0] - norms[1])
            values = [f"a tensor of norm {norm!r}" for norm in norms]
            result["first"] = {"name": name, "values": values, "at": [], "difference": difference, "allowed": limit}
    return result
