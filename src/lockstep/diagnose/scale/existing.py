"""Runs that were made already, on any number of nodes, in the place of runs that are started here.

    request, machine, samples, notes = existing([Path("outputs/n8"), Path("outputs/n16")], (64,), per_node=8)

Only their folders' files are read; no torch.
"""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.config import Config
from lockstep.config.secrets import printable
from lockstep.diagnose.scale.machine import Machine
from lockstep.diagnose.scale.request import STRONG, WEAK, WINDOWS, Request, Setting
from lockstep.diagnose.scale.runs import Sample, parts_of, windows_of
from lockstep.errors import ConfigError
from lockstep.sinks import jsonl

__all__ = ["Existing", "existing"]

# What may differ between runs that are compared; of anything else a note is made.
_FREE = ("experiment_name", "save_dir", "batch_size", "seed", "lr", "num_epochs", "max_steps", "stop_at", "extend_to")
_FREE_SECTIONS = ("optim.", "checkpoint.")


class Existing(NamedTuple):
    """What is asked for and what was found, as if it had been measured here."""

    request: Request
    machine: Machine
    samples: list[Sample]
    notes: list[str]


class _Run(NamedTuple):
    path: Path
    setting: Setting
    config: dict[str, Any]
    records: list[dict[str, Any]]


def existing(paths: Sequence[Path], extrapolate: tuple[int, ...], per_node: int) -> Existing:
    """The runs in these folders, each a size; several of one size are its rounds.

    Args:
        per_node: ranks on a node; 0: all on one.

    Raises:
        ConfigError: no run's folder, one without records, or runs that differ in more than the ranks.
    """
    if per_node < 0:
        raise ConfigError(f"--ranks-per-node is {per_node}: it must be at least 1; 0: all on one node")
    runs = sorted((_read(path) for path in paths), key=lambda run: run.setting)
    sizes = tuple(sorted({run.setting.ranks for run in runs}))
    if len(sizes) < 2:
        raise ConfigError(
            f"--runs: all are of {sizes[0]} ranks: scaling is a ratio, so give runs of two sizes at least"
        )
    first = runs[0]
    micro = first.config["micro_batch_size"]
    for run in runs:
        if run.config["micro_batch_size"] != micro:
            raise ConfigError(
                f"--runs: {_named(run.path)} has micro-batches of {run.config['micro_batch_size']} and "
                f"{_named(first.path)} of {micro}: give runs that cut a step alike"
            )
    log_freq = first.config["log_freq"]
    request = Request(
        (),
        Config(batch_size=first.setting.batch_size, micro_batch_size=micro),
        sizes,
        modes=(_mode(runs),),
        rounds=max(sum(run.setting == setting for run in runs) for setting in {run.setting for run in runs}),
        steps=WINDOWS * (log_freq if isinstance(log_freq, int) else 1),
        extrapolate=extrapolate,
        ranks_per_node=per_node,
    )
    seen: dict[Setting, int] = {}
    samples = []
    for run in runs:
        number = seen[run.setting] = seen.get(run.setting, -1) + 1
        parts = parts_of(run.records)
        rates = [record["items_per_second"] for record in run.records]
        samples.append(Sample(run.setting, number, rates, parts.pop("total"), parts))
    notes = [
        "from the records of runs that were made before, and not in turns; whether their ranks shared cores or a "
        "network is not known",
        *_differences(runs),
    ]
    return Existing(request, Machine(sizes[-1], 0.0, 1), samples, notes)


def _mode(runs: Sequence[_Run]) -> str:
    batches = {run.setting.batch_size for run in runs}
    if len(batches) == 1:
        return STRONG
    first = runs[0].setting
    if all(run.setting.batch_size * first.ranks == first.batch_size * run.setting.ranks for run in runs):
        return WEAK
    told = ", ".join(f"{run.setting.batch_size} on {run.setting.ranks}" for run in runs)
    raise ConfigError(
        f"--runs: the batches are {told} ranks: give runs of one batch (strong scaling), or whose batch grows with the "
        "ranks (weak)"
    )


def _read(path: Path) -> _Run:
    """A run's folder. The first record is the run's start, and left out."""
    where = f"--runs: {_named(path)}"
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        config = _flat(tomllib.loads((path / "config.toml").read_text(encoding="utf-8")))
        ranks, batch, micro = state["world_size"], config["batch_size"], config["micro_batch_size"]
        if not all(isinstance(each, int) and each > 0 for each in (ranks, batch, micro)) or batch % micro:
            raise ValueError
        found = windows_of(jsonl.read(path / "metrics.jsonl"), after=0)[1:]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where} is no run's folder, or not a whole one; give folders below --save-dir") from error
    if not found:
        raise ConfigError(f"{where} has fewer than two records of its speed: train on, or give a smaller --log-freq")
    return _Run(path, Setting(ranks, batch), config, found)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted names and values of the run's config.toml; another version's options are taken as they are."""
    return {
        name if section == name else f"{section}.{name}": value
        for section, found in values.items()
        for name, value in (found if isinstance(found, dict) else {section: found}).items()
    }


def _differences(runs: Sequence[_Run]) -> list[str]:
    """A line for each other option in which the runs differ."""
    names = sorted({name for run in runs for name in run.config})
    found = []
    for name in names:
        values = list(dict.fromkeys(str(run.config.get(name, "its default")) for run in runs))
        if len(values) > 1 and name not in _FREE and not name.startswith(_FREE_SECTIONS):
            found.append(f"the runs also differ in {name} ({', '.join(values)}), and not in their ranks alone")
    return found


def _named(path: Path) -> str:
    return printable(str(path))
