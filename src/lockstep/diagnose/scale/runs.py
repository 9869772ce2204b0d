"""Measure one setting by a run in its own folder, from its records.

    sample = measure(request, Setting(2, 16), machine, micro_batch_size=4)

A run is an ordinary one. Its first record is its start (kernels chosen, caches warmed up) and is left out. `existing`
reads runs that were made before.
"""

import contextlib
import importlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import cli
from lockstep.config.cli import option_list
from lockstep.config.engine_options import ENGINES, PLAIN
from lockstep.config.fields import parse_shares
from lockstep.config.schema import SINK_FLAGS, Config, default_micro_batch_size, has_fixed_cut
from lockstep.config.secrets import printable
from lockstep.distributed.cpus import affinity_cores, cpu_quota
from lockstep.errors import ConfigError, LockstepError
from lockstep.logging import jsonl
from lockstep.run_state import RunState

__all__ = [
    "PROFILE",
    "STRONG",
    "WEAK",
    "WINDOWS",
    "Machine",
    "RunFailed",
    "RunSample",
    "ScaleRequest",
    "Setting",
    "ascending",
    "existing",
    "machine_for",
    "measure",
    "micro_batch_of",
    "order",
    "run_training",
]


# Parent of /proc and /sys.
_ROOT = Path("/")
_LAUNCHED = ("WORLD_SIZE", "RANK", "LOCAL_RANK")


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of the ranks.

    Attributes:
        devices: CUDA devices in use; 0: the ranks compute on the cores.
        cores: usable by this process, within its container's quota.
        threads: of each rank, the same at every size, so that a rank is equally fast at all of them.
    """

    devices: int
    cores: float
    threads: int

    def count_concurrent(self, ranks: int) -> float:
        """Return how many ranks can compute at once.

        On devices it is all; else the cores limit it.
        """
        if self.devices:
            return float(ranks)
        return min(float(ranks), max(1.0, self.cores / self.threads))

    def shares_cores(self, ranks: int) -> bool:
        """Whether so many ranks share cores."""
        return self.count_concurrent(ranks) < ranks


def machine_for(device: str, sizes: Sequence[int], *, exact: bool) -> Machine:
    """Describe this machine for runs of these sizes.

    Loads torch if it must look for devices.

    Args:
        device: the value of --device.
        exact: a rank computes on one thread anyway.

    Raises:
        ConfigError: a launcher started this process, or there are fewer devices than ranks.
    """
    inside = [name for name in _LAUNCHED if name in os.environ]
    if inside:
        raise ConfigError(
            f"lockstep scale starts the ranks itself, but a launcher has set {', '.join(inside)}: run it once, "
            "outside of torchrun and lockstep launch"
        )
    devices = 0
    if device != "cpu":
        cuda = importlib.import_module("torch").cuda
        devices = cuda.device_count() if cuda.is_available() else 0
        if device == "cuda" and not devices:
            raise ConfigError("--device cuda: torch sees no CUDA device here; use --device auto or cpu")
        if devices and sizes[-1] > devices:
            raise ConfigError(
                f"--world-sizes has {sizes[-1]}, but this node shows {devices} devices: give {devices} at most"
            )
    count = affinity_cores()
    cores = min(float(count), max(1.0, cpu_quota(_ROOT) or count))
    omp_threads = os.environ.get("OMP_NUM_THREADS", "")
    if exact:
        threads = 1
    else:
        if omp_threads.isdigit() and int(omp_threads):
            threads = int(omp_threads)
        else:
            threads = max(1, int(cores) // sizes[-1])
    return Machine(devices, cores, threads)


STRONG = "strong"
WEAK = "weak"
# The option of train that traces steps FIRST:LAST.
PROFILE = "profile"
# Counted records of a run; one more before them is its start.
WINDOWS = 4
# Planned steps, so that neither the end nor an evaluation is part of the measurement.
_PLANNED_STEPS = 1_000_000


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """A setting to measure: numbers of ranks, and of samples in a step."""

    ranks: int
    batch_size: int


@dataclass(frozen=True)
class ScaleRequest:
    """A measurement to make.

    Attributes:
        flags: of train, as given; `config` is their result.
        sizes: numbers of ranks, ascending.
        modes: STRONG (the same batch), WEAK (the batch grows with the ranks), or both.
        rounds: runs of each setting.
        steps: counted steps of each run, divided into WINDOWS records.
    """

    flags: tuple[str, ...]
    config: Config
    sizes: tuple[int, ...]
    modes: tuple[str, ...] = (STRONG, WEAK)
    rounds: int = 3
    steps: int = 20

    def __post_init__(self) -> None:
        for flag, value, least in (("rounds", self.rounds, 1), ("steps", self.steps, WINDOWS)):
            if value < least:
                raise ConfigError(f"--{flag} is {value}: it must be at least {least}")
        if len(self.sizes) < 2:
            raise ConfigError(
                f"--world-sizes has {len(self.sizes)} size: scaling is a ratio, so give two at least, such as 1,2"
            )
        if ENGINES.get(self.config.engine, ENGINES[PLAIN]).one_process and self.config.engine != "auto":
            raise ConfigError(f"--engine {self.config.engine} is one process whatever the size: leave it out")
        if parse_shares(self.config.shares):
            raise ConfigError(
                f"--shares {self.config.shares} fits one number of ranks only: leave it out, or give --shares auto"
            )

    @property
    def base(self) -> int:
        """The smallest size, to which all others are compared."""
        return self.sizes[0]

    @property
    def window(self) -> int:
        """Steps of a record."""
        return -(-self.steps // WINDOWS)

    def check(self, micro_batch_size: int) -> None:
        """Check that all ranks have work, and that the batch can grow with them.

        Raises:
            ConfigError: it is not so.
        """
        parts = self.config.batch_size // micro_batch_size
        cut = f"a step of {self.config.batch_size} samples has {parts} micro-batch{'es' * (parts > 1)}"
        most = self.base if self.modes == (WEAK,) else self.sizes[-1]
        if most > parts:
            if self.modes == (WEAK,):
                weak = ""
            else:
                weak = "; or give --weak, where the batch grows"
            raise ConfigError(
                f"--world-sizes has {most}, but {cut}: the other ranks would compute nothing; raise --batch-size or "
                f"lower --micro-batch-size{weak}"
            )
        if WEAK in self.modes and parts % self.base:
            raise ConfigError(
                f"--weak: {cut}, which {self.base} ranks cannot share equally, so it cannot grow with them; choose a "
                "--batch-size that they can, or --strong"
            )

    def settings(self, mode: str = "") -> list[Setting]:
        """Return the distinct settings to run, by ranks; of one mode only if given."""
        batch = self.config.batch_size
        settings = set()
        for scaling in (mode,) if mode else self.modes:
            for size in self.sizes:
                settings.add(Setting(size, batch if scaling == STRONG else batch * size // self.base))
        return sorted(settings)

    def train_flags(self, setting: Setting, folder: str, micro_batch_size: int, windows: int = WINDOWS) -> list[str]:
        """Return the flags of `train` for one run: the given ones, then the measurement's.

        Args:
            folder: the parent of the run's folder `run`.
            windows: records that are counted; 0: only enough steps to start.
        """
        steps = (windows + 1) * self.window if windows else 2
        options: dict[str, object] = {
            "experiment-name": "run",
            "save-dir": folder,
            "batch-size": setting.batch_size,
            "max-steps": _PLANNED_STEPS,
            "stop-at": steps,
            "extend-to": 0,
            "log-freq": self.window if windows else 2,
            "ckpt-freq": 0,
            "eval-freq": _PLANNED_STEPS,
            "patience": 0,
            "patience-metric": "",
        }
        if PROFILE in option_list():
            options[PROFILE] = ""
        if micro_batch_size:
            options["micro-batch-size"] = micro_batch_size
        overrides = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*self.flags, *overrides, *(f"--no-{name}" for name in SINK_FLAGS), "--on-oom", "stop"]


def ascending(flag: str, text: str) -> tuple[int, ...]:
    """Parse `1,2,4` to (1, 2, 4).

    Raises:
        ConfigError: anything but ascending numbers from 1.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ConfigError(f"{flag} is '{text}': it must be numbers of ranks such as 1,2,4")
    sizes = tuple(int(word) for word in words)
    if sizes[0] < 1 or any(after <= before for before, after in pairwise(sizes)):
        raise ConfigError(f"{flag} is '{text}': it must be ascending numbers from 1, each once, such as 1,2,4")
    return sizes


def order(settings: Sequence[Setting], rounds: int) -> list[tuple[int, Setting]]:
    """Return (round, setting) of every run, alternating in direction against a drift of the machine."""
    return [
        (number, setting)
        for number in range(rounds)
        for setting in (settings if number % 2 == 0 else list(reversed(settings)))
    ]


_RATE = "items_per_second"
_TOTAL = "time/total"
_PARTS = "time/"
_ERROR = re.compile(r"^(?:lockstep|\S+\.py): error: (.*)$")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds between SIGTERM and SIGKILL.
_PATIENCE = 15.0
_OF_LAUNCHERS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*|LOCKSTEP_(LAUNCHER|ROUND))"
)


class RunFailed(LockstepError):
    """A run of a measurement failed; the message is its own first error."""


@dataclass(frozen=True)
class RunSample:
    """The records of one run.

    Attributes:
        rates: items a second over all ranks, one for each record; `rate` is their median.
        total: milliseconds of a step on rank 0, median of the records.
        parts: the same by part: data, forward, backward, update...
    """

    setting: Setting
    round: int
    rates: list[float]
    total: float
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def measure(
    request: ScaleRequest, setting: Setting, machine: Machine, micro_batch_size: int, number: int = 0
) -> RunSample:
    """Run one setting to the end, and read its records.

    Args:
        number: of the round.

    Raises:
        RunFailed: the run failed, or wrote too few records.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-scale-") as folder:
        flags = request.train_flags(setting, folder, micro_batch_size)
        run_training(request, setting, flags, machine, Path(folder))
        records = windows_of(jsonl.read(Path(folder) / "run" / "metrics.jsonl"), after=request.window)
    if not records:
        raise RunFailed(f"the run wrote no records after step {request.window}")
    parts = parts_of(records)
    return RunSample(setting, number, [record[_RATE] for record in records], parts.pop("total"), parts)


def windows_of(records: Sequence[dict[str, Any]], after: int) -> list[dict[str, Any]]:
    """Return the training records of steps after `after`."""
    windows = []
    for record in records:
        if record.get("global_step", 0) > after and record.get(_RATE, 0) > 0:
            windows.append(record)
    return windows


def parts_of(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return {part: milliseconds a step}, medians over the records, with "total"."""
    names = sorted({name for record in records for name in record if name.startswith(_PARTS)} | {_TOTAL})
    medians = {}
    for name in names:
        medians[name.removeprefix(_PARTS)] = statistics.median([float(record.get(name, 0.0)) for record in records])
    return medians


def micro_batch_of(request: ScaleRequest, machine: Machine) -> int:
    """Return the samples of one forward, by a short run of the smallest size.

    That run also prepares the data.

    Raises:
        RunFailed: `train` refuses the request, or fails; its exit code is the run's.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-scale-") as folder:
        setting = Setting(request.base, request.config.batch_size)
        micro_batch_size = request.config.micro_batch_size
        # All sizes must compute the same micro-batches, or they could not be compared.
        if not has_fixed_cut(request.config):
            micro_batch_size = default_micro_batch_size(request.config.batch_size)
        run_training(
            request, setting, request.train_flags(setting, folder, micro_batch_size, windows=0), machine, Path(folder)
        )
        return int(cli.read_toml(Path(folder) / "run" / "config.toml")["micro_batch_size"])


def command_of(engine: str, ranks: int, flags: Sequence[str]) -> list[str]:
    """Return the command of a run.

    One rank runs without a launcher, unless its engine, named by --engine, needs one.
    """
    launch = ["launch", "--nproc-per-node", str(ranks), "--max-losses", "0", "--"]
    alone = ranks == 1 and engine == "auto"
    return [sys.executable, "-m", "lockstep", *([] if alone else launch), "train", *flags]


def run_training(request: ScaleRequest, setting: Setting, flags: Sequence[str], machine: Machine, folder: Path) -> None:
    """Start a run and wait for its end.

    Its output goes to a file in `folder`.

    Raises:
        RunFailed: it ended with a code other than 0.
    """
    command = command_of(request.config.engine, setting.ranks, flags)
    log = folder / "output.txt"
    environment = {}
    for name, value in os.environ.items():
        if not _OF_LAUNCHERS.fullmatch(name):
            environment[name] = value
    environment["OMP_NUM_THREADS"] = str(machine.threads)
    run: subprocess.Popen[bytes] | None = None
    with open(log, "wb") as output:
        try:
            # A signal between the start and the assignment would leave the run behind.
            with _defer_signals():
                run = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    # As a launcher starts its ranks: schedulers share the cores by session.
                    start_new_session=True,
                )
            code = run.wait()
        finally:
            if run is not None:
                _end(run)
    if code:
        error = RunFailed(first_error(log.read_text(encoding="utf-8", errors="replace"), code))
        error.exit_code = code if code in (2, 130) else 1
        raise error


@contextlib.contextmanager
def _defer_signals() -> Iterator[None]:
    """Context manager that defers signals to its end.

    A process that is just starting would be left behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[int] = []
    before = {number: signal.signal(number, lambda which, _: signals.append(which)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if signals:
            signal.raise_signal(signals[0])


def _end(run: "subprocess.Popen[bytes]") -> None:
    """Terminate a running run, and kill it after a while.

    It saves itself first.
    """
    if run.poll() is None:
        run.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(_PATIENCE)
        run.kill()
        run.wait()


def first_error(output: str, code: int) -> str:
    """Return the first error line of a failed run, or its last line."""
    lines = []
    for line in output.splitlines():
        if line.strip():
            lines.append(line.strip())
    errors = []
    for line in lines:
        if match := _ERROR.match(line):
            errors.append(match[1])
    if errors:
        return errors[0]
    if lines:
        return lines[-1]
    return f"exited with code {code} without output"


# Options that may differ between compared runs. Any other difference gets a note.
_FREE = ("experiment_name", "save_dir", "batch_size", "seed", "lr", "num_epochs", "max_steps", "stop_at", "extend_to")
_FREE_SECTIONS = ("optim.", "checkpoint.")


class Existing(NamedTuple):
    """A request and its samples, as if measured here."""

    request: ScaleRequest
    machine: Machine
    samples: list[RunSample]
    notes: list[str]


class _ExistingRun(NamedTuple):
    path: Path
    setting: Setting
    config: dict[str, Any]
    records: list[dict[str, Any]]


def existing(paths: Sequence[Path]) -> Existing:
    """Read the runs in these folders.

    Each is of one size; several of one size are its rounds.

    Raises:
        ConfigError: no run's folder, one without records, or runs that differ in more than the ranks.
    """
    runs = sorted(map(_read_run, paths), key=lambda run: run.setting)
    sizes = tuple(sorted({run.setting.ranks for run in runs}))
    if len(sizes) < 2:
        raise ConfigError(
            f"--runs: all are of {sizes[0]} ranks: scaling is a ratio, so give runs of two sizes at least"
        )
    first_run = runs[0]
    micro = first_run.config["micro_batch_size"]
    for run in runs:
        if run.config["micro_batch_size"] != micro:
            raise ConfigError(
                f"--runs: {_path_text(run.path)} has micro-batches of {run.config['micro_batch_size']} and "
                f"{_path_text(first_run.path)} of {micro}: give runs with one --micro-batch-size"
            )
    log_freq = first_run.config["log_freq"]
    request = ScaleRequest(
        (),
        Config(batch_size=first_run.setting.batch_size, micro_batch_size=micro),
        sizes,
        modes=(_mode(runs),),
        rounds=max(sum(run.setting == setting for run in runs) for setting in {run.setting for run in runs}),
        steps=WINDOWS * (log_freq if isinstance(log_freq, int) else 1),
    )
    counts: dict[Setting, int] = {}
    samples = []
    for run in runs:
        number = counts[run.setting] = counts.get(run.setting, -1) + 1
        parts = parts_of(run.records)
        rates = [record["items_per_second"] for record in run.records]
        samples.append(RunSample(run.setting, number, rates, parts.pop("total"), parts))
    notes = [
        "from the records of earlier runs, which did not take turns; whether their ranks shared cores or a network is "
        "unknown",
        *_differences(runs),
    ]
    return Existing(request, Machine(sizes[-1], 0.0, 1), samples, notes)


def _mode(runs: Sequence[_ExistingRun]) -> str:
    batches = {run.setting.batch_size for run in runs}
    if len(batches) == 1:
        return STRONG
    base = runs[0].setting
    if all(run.setting.batch_size * base.ranks == base.batch_size * run.setting.ranks for run in runs):
        return WEAK
    listing = ", ".join(f"{run.setting.batch_size} on {run.setting.ranks}" for run in runs)
    raise ConfigError(
        f"--runs: the batches are {listing} ranks: give runs of one batch (strong scaling), or runs whose batch grows "
        "with the ranks (weak)"
    )


def _read_run(path: Path) -> _ExistingRun:
    """Read a run's folder. The first record covers the run's start, and is left out."""
    source = f"--runs: {_path_text(path)}"
    try:
        state = RunState.from_json(json.loads((path / "state.json").read_text(encoding="utf-8")), lenient=True)
        config = _flat(tomllib.loads((path / "config.toml").read_text(encoding="utf-8")))
        ranks = state.world_size
        batch = config["batch_size"]
        micro = config["micro_batch_size"]
        if (
            not ranks
            or not all(isinstance(value, int) and value > 0 for value in (ranks, batch, micro))
            or batch % micro
        ):
            raise ValueError
        records = windows_of(jsonl.read(path / "metrics.jsonl"), after=0)[1:]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{source} is not a complete run folder; give folders below --save-dir") from error
    if not records:
        raise ConfigError(f"{source} has fewer than two records of its speed: train on, or give a smaller --log-freq")
    return _ExistingRun(path, Setting(ranks, batch), config, records)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the run's config.toml by dotted name, unknown ones too."""
    return {
        name if section == name else f"{section}.{name}": value
        for section, entry in values.items()
        for name, value in (entry if isinstance(entry, dict) else {section: entry}).items()
    }


def _differences(runs: Sequence[_ExistingRun]) -> list[str]:
    """Describe each other option in which the runs differ."""
    names = sorted({name for run in runs for name in run.config})
    lines = []
    for name in names:
        values = list(dict.fromkeys(str(run.config.get(name, "its default")) for run in runs))
        if len(values) > 1 and name not in _FREE and not name.startswith(_FREE_SECTIONS):
            lines.append(f"the runs also differ in {name} ({', '.join(values)}), not only in ranks")
    return lines


def _path_text(path: Path) -> str:
    return printable(str(path))
