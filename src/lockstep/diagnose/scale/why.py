"""Why a size is slow: the verdict of a profile where `train` can make one, else the parts of its step that grew.

slow = slowest(rows)                            # the first size below 80 %; None: all are good
why = grown(slow, base, machine, samples)       # "of a step, backward grew by 8.0 ms, data by 1.3 ms"
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.config import options
from lockstep.diagnose.scale.findings import GOOD, Row
from lockstep.diagnose.scale.machine import Machine
from lockstep.diagnose.scale.request import PROFILE, WINDOWS, Request, Setting
from lockstep.diagnose.scale.runs import RunFailed, Sample, started

__all__ = ["grown", "profiled", "slowest"]

_TRACED = 10  # steps
_SMALL = 0.02  # of a step: parts that grew by less are not named


def slowest(rows: Sequence[Row]) -> Row | None:
    """The smallest size whose speed-up is below 80 % of what its ranks, or the cores that they share, allow."""
    slow = [row for row in rows if not row.error and row.speedup == row.speedup and row.of_cores < GOOD]
    return min(slow, key=lambda row: (row.ranks, row.of_cores), default=None)


def profiled(request: Request, row: Row, machine: Machine, micro_batch_size: int) -> dict[str, Any] | None:
    """What `verdict.json` of a profile of this size says: "sentence", "parts", "next"...; None where there is none."""
    if PROFILE not in options.option_list():
        return None
    with tempfile.TemporaryDirectory(prefix="lockstep-scale-") as folder:
        setting = Setting(row.ranks, row.batch_size)
        first = request.window + 1  # its start is over
        last = first + min(_TRACED, (WINDOWS - 1) * request.window) - 1
        flags = [*request.train_flags(setting, folder, micro_batch_size), f"--{PROFILE}", f"{first}:{last}"]
        try:
            started(request, setting, flags, machine, Path(folder))
            paths = sorted((Path(folder) / "run" / PROFILE).glob("*/verdict.json"))
            found = json.loads(paths[0].read_text(encoding="utf-8")) if paths else None
        except (RunFailed, OSError, ValueError):
            return None
    return found if isinstance(found, dict) and isinstance(found.get("sentence"), str) else None


def grown(row: Row, base: Row, machine: Machine, samples: Sequence[Sample]) -> str:
    """Which parts of rank 0's step take longer than they would if the step scaled, by the time/ records; "" for none.

    In strong scaling a part of the smallest size would shrink with the rank's micro-batches, in weak scaling stay. On
    shared cores all of it takes as many times longer as there are ranks to a core's worth of compute.
    """
    now, then = _parts(samples, row), _parts(samples, base)
    crowd = row.ranks / machine.allowed(row.ranks) * machine.allowed(base.ranks) / base.ranks
    shrink = row.work / base.work * crowd
    more = {name: spent - then.get(name, 0.0) * shrink for name, spent in now.items()}
    total = sum(now.values())
    named = sorted(((ms, name) for name, ms in more.items() if ms > _SMALL * total), reverse=True)
    if not named:
        return ""
    told = ", ".join(f"{name} by {ms:.3g} ms" for ms, name in named)
    note = "; the backward includes the exchange" if "exchange" not in now and named[0][1] == "backward" else ""
    return f"of the {total:.3g} ms of a step on rank 0, beside what they would be if they scaled, grew: {told}{note}"


def _parts(samples: Sequence[Sample], row: Row) -> dict[str, float]:
    """{part: milliseconds a step}, medians over the rounds."""
    mine = [each.parts for each in samples if each.setting == Setting(row.ranks, row.batch_size)]
    names = sorted({name for parts in mine for name in parts})
    return {name: statistics.median(parts.get(name, 0.0) for parts in mine) for name in names}
