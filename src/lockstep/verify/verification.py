"""Run a verification: the single process, the same again, then every combination by world size.

`run` serves `lockstep verify`, `prove` serves `lockstep.verify`. An executor starts the processes, or uses the ranks
of a torchrun job; `Verification` makes the runs, and compares them.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import json
import math
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, final

from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.config.task_options import LIGHTNING, OWN, kind_of
from lockstep.distributed import spawn
from lockstep.distributed.spawn import RankFailed
from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import ConfigError, DifferenceError, LockstepError
from lockstep.training.named_task import load_task
from lockstep.verify import certificate
from lockstep.verify.compare import first_difference, traces_of
from lockstep.verify.faults import fault
from lockstep.verify.recorder import TENSORS
from lockstep.verify.request import (
    REFERENCE,
    Combination,
    Difference,
    Fault,
    RunSpec,
    TableRow,
    VerifyRequest,
    VerifyTable,
    combine,
    disturbed_spec,
    reference_specs,
    refusal,
    run_spec,
)
from lockstep.verify.tolerance import FINE, Tolerance, first_unequal, tolerance_of
from lockstep.verify.worker import log_operations, read_trace, run_rank

__all__ = [
    "Executor",
    "LocalExecutor",
    "RankFailed",
    "TorchrunExecutor",
    "Verification",
    "measured_rounding",
    "prove",
    "repeats",
    "run",
    "start",
]


def start(
    function: Callable[..., None], size: int, args: tuple[Any, ...], *, folder: Path, device: str, patience: float
) -> None:
    """Run `function(world, say, *args)` on each of `size` ranks to the end. See `spawn.start`."""
    preload = ["lockstep.verify.worker"]
    spawn.start(function, size, args, device=device, patience=patience, folder=folder, preload=preload, what="the task")


class Executor(Protocol):
    """Runner of combinations. Every rank of a job calls each method alike, then reads the same files.

    Attributes:
        folder: a new one that all ranks see.
        is_main: whether this process prints and writes.
        world_size: the only world size apart from 1; 0: any.
    """

    folder: Path
    is_main: bool
    world_size: int

    def run(self, specs: Sequence[RunSpec]) -> None:
        """Run specs of one world size in order.

        Raises:
            RankFailed: for the first that fails.
        """

    def log_operations(self, spec: RunSpec, step: int, name: str) -> None:
        """See `worker.log_operations`."""

    def close(self) -> None:
        """Leave the process groups."""


def _executor_for(config: Config, scratch: str) -> Executor:
    """Use the ranks of the job if a launcher started this process; else start processes."""
    if "WORLD_SIZE" in os.environ:
        return TorchrunExecutor(config, scratch)
    return LocalExecutor(config, _new_folder(scratch))


@final
class LocalExecutor:
    """Executor that starts the processes of each world size on this machine, and ends them.

    Their output goes to `folder` too.
    """

    is_main, world_size = True, 0

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder, self._config = folder, config

    def run(self, specs: Sequence[RunSpec]) -> None:
        self._start(run_rank, specs[0].combination.world_size, list(specs))

    def log_operations(self, spec: RunSpec, step: int, name: str) -> None:
        self._start(log_operations, 1, spec, step, name)

    def close(self) -> None:
        pass

    def _start(self, function: Callable[..., None], size: int, *args: Any) -> None:
        config = self._config
        start(function, size, args, folder=self.folder, device=config.device, patience=config.timeout)


@final
class TorchrunExecutor:
    """Executor inside a torchrun job; rank 0 runs single-process work while the others wait."""

    def __init__(self, config: Config, scratch: str) -> None:
        self._world = world = World.join(config.device, config.timeout)
        self.is_main, self.world_size = world.is_main, world.size
        made = on_all_ranks(world, lambda: str(_new_folder(scratch)) if world.is_main else "")
        self.folder = Path(world.gather(made)[0])
        on_all_ranks(world, lambda: _check_seen(self.folder))

    def run(self, specs: Sequence[RunSpec]) -> None:
        self._do(lambda world: run_rank(world, _silent, specs), one_process=specs[0].combination.world_size == 1)

    def log_operations(self, spec: RunSpec, step: int, name: str) -> None:
        self._do(lambda world: log_operations(world, _silent, spec, step, name), one_process=True)

    def close(self) -> None:
        self._world.leave()

    def _do(self, action: Callable[[World], None], one_process: bool) -> None:
        """Run `action` on all ranks, or on rank 0 only.

        An error on a single rank ends the job: the others may be in any collective.
        """
        if one_process:
            own = World(device=self._world.device)
            on_all_ranks(self._world, lambda: action(own) if self.is_main else None)
        else:
            action(self._world)
            self._world.barrier()  # collective: all ranks have written their traces
        gc.collect()


def _silent(*_: Any) -> None:
    pass


def _new_folder(scratch: str) -> Path:
    """Make a new folder below `scratch`, or the system's if that is "".

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="lockstep-verify-", dir=scratch or None))
    except OSError as error:
        raise ConfigError(f"--scratch {scratch}: {error.strerror or error}; choose another folder") from error


def _check_seen(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"this node does not see {path}: give --scratch a folder on a disk that all nodes share")


def prove(request: VerifyRequest, against: dict[str, Any] | None = None) -> VerifyTable:
    """Run a verification for `lockstep.verify`. Its files are removed at the end.

    Args:
        against: a certificate to compare this machine's single process with, too.

    Raises:
        ConfigError, LockstepError: see `lockstep.verify`.
    """
    request = request.resolved()
    executor = _executor_for(request.config, request.scratch)
    try:
        table = Verification(request, executor, against).table()
        executor.close()
    finally:
        if executor.is_main:
            shutil.rmtree(executor.folder, ignore_errors=True)
    return table


class Verification:
    """A running verification: the reference, the same again, then all others by world size."""

    def __init__(self, request: VerifyRequest, executor: Executor, against: dict[str, Any] | None = None) -> None:
        self._request, self._executor, self._against = request, executor, against
        self._fault = fault(request.plant)
        self._rows: dict[Combination, TableRow] = {}
        self._reference: dict[str, Any] = {}
        self._measured: tuple[float, ...] = ()

    def table(self) -> VerifyTable:
        """Make all runs, and compare them. Raises as `lockstep.verify` does."""
        combinations = self._combinations()
        self._run_reference(compiled=any(one.compiled for one in combinations))
        self._refuse(combinations)  # again, now that the micro-batch is known
        table = VerifyTable(_title(self._request), notes=[*self._notes(), *_idle(combinations, self._request.config)])
        self._measured = measured_rounding(self._request, self._executor, self._fault, self._reference)
        self._run([one for one in combinations if one == REFERENCE])
        again = self._rows[REFERENCE]
        if again.difference:  # a difference of another combination could not be distinguished from this
            table.notes = [_explained(again.difference, self._spec(REFERENCE), self._executor)]
            table.difference = _undetermined(again.difference)
            table.rows = [dataclasses.replace(again, difference=table.difference)]
            return table
        for size in sorted({one.world_size for one in combinations}):
            self._run([one for one in combinations if one.world_size == size])
        self._repeat_different()
        table.rows = [self._rows[one] for one in combinations]
        if self._request.plant and table.ok:
            table.notes.append("nothing was found: this fault makes no difference in this run (see docs/verify.md)")
        if self._against:
            self._compare_with(self._against, table)
        table.certificate = certificate.make(self._request, self._reference, table.rows)
        return table

    def _combinations(self) -> list[Combination]:
        """List all combinations. Those that cannot run here get a row, or are refused."""
        request, own = self._request, self._executor.world_size
        found = combine(request.engines, [own] if own else request.world_sizes, request.compile)
        if own:  # with one process, only combinations that need no launcher
            found = [one for one in found if one.world_size > 1 or one.engine == REFERENCE.engine]
        self._refuse(found)
        if request.plant:
            self._fault.check(request.config, request.steps, request.resume)
            if all(one.world_size == 1 for one in found):
                raise ConfigError(f"--plant {request.plant} goes wrong on one of several ranks: add --world-sizes 2")
        return found

    def _refuse(self, combinations: list[Combination]) -> None:
        for one in combinations:
            reason = refusal(one, self._request.config)
            if reason:
                self._rows[one] = TableRow(one, "unavailable", reason=reason)
        self._check_available()

    def _check_available(self) -> None:
        missing = [row for row in self._rows.values() if row.verdict == "unavailable"]
        if missing and not self._request.skip_unavailable:
            reasons = "; ".join(f"{row.combination} cannot run here: {row.reason}" for row in missing)
            raise ConfigError(f"{reasons}; leave it out, or give --skip-unavailable")

    def _run_reference(self, *, compiled: bool) -> None:
        """Run the single process.

        Raises:
            ConfigError, LockstepError: it cannot run, or fails.
        """
        request = self._request
        try:
            self._executor.run(reference_specs(request, self._executor.folder, self._fault, compiled=compiled))
        except RankFailed as error:
            if error.usage:
                raise ConfigError(str(error).partition(": ")[2]) from error
            raise LockstepError(f"the single process failed: {error}") from error
        self._reference = self._trace("reference")
        taken = len(self._reference["steps"])
        if taken < request.steps:
            raise ConfigError(f"--steps {request.steps}: the whole plan has {taken}; lower it, or raise --num-epochs")
        size = request.config.batch_size // self._reference["micro_batches"]  # the model may have decided it
        config = dataclasses.replace(request.config, micro_batch_size=size)
        self._request = dataclasses.replace(request, config=config)

    def _trace(self, key: str) -> dict[str, Any]:
        traces = read_trace(self._executor.folder, key, 1)
        if traces is None:
            raise LockstepError("the single process left no trace; is the folder for traces shared by all nodes?")
        return traces[0]

    def _run(self, combinations: list[Combination]) -> None:
        """Add rows for combinations of one world size.

        After a failure the rest are started again.
        """
        waiting = [one for one in combinations if one not in self._rows]
        while waiting:
            failure = None
            try:
                self._executor.run([self._spec(one) for one in waiting])
            except RankFailed as error:
                failure = error
            while waiting:
                one = waiting.pop(0)
                traces = read_trace(self._executor.folder, one.key, one.world_size)
                if traces is None:
                    self._rows[one] = _failed(one, failure)
                    break
                self._rows[one] = self._row(one, traces)
        self._check_available()

    def _repeat_different(self) -> None:
        """Repeat combinations that differ.

        One that also differs from itself does not show a fault of its engine.
        """
        different = [] if self._request.plant else [one for one, row in self._rows.items() if row.difference]
        for one in different:
            spec, found = self._spec(one), self._rows[one].difference
            again = dataclasses.replace(spec, key=f"{spec.key}-again")
            try:
                self._executor.run([again])
            except RankFailed:
                continue  # keep the first result
            first, second = (read_trace(self._executor.folder, each.key, one.world_size) for each in (spec, again))
            if found and first and second and not repeats(first, second, found.step, spec.tolerance):
                self._rows[one] = dataclasses.replace(self._rows[one], difference=_undetermined(found))

    def _row(self, one: Combination, traces: list[dict[str, Any]]) -> TableRow:
        spec = self._spec(one)
        found = first_difference(traces_of(spec, self._trace(spec.reference), traces))
        parts = [step[kind] for trace in traces for step in trace["steps"] for kind in TENSORS if kind in step]
        largest: list[Any] = max(trace["steps"][-1]["weights"]["largest"] for trace in traces)
        verdict = "different" if found else "equal" if all(part["equal"] for part in parts) else "close"
        unproved = "" if found else unproved_by(self._reference, skips=_skips(self._request.config))
        if unproved:
            return TableRow(one, "not proved", reason=unproved)
        hidden = spec.tolerance.relative(self._request.steps - 1)
        return TableRow(one, verdict, (largest[0], largest[1]), found, hidden=hidden)

    def _spec(self, one: Combination) -> RunSpec:
        coarsest, folder = self._reference["coarsest"], self._executor.folder
        return run_spec(self._request, one, folder, self._fault, coarsest, self._measured)

    def _compare_with(self, given: dict[str, Any], table: VerifyTable) -> None:
        """Compare this machine's single process with the certificate's."""
        apart = certificate.same_machine(given)
        config = self._request.config
        allowed = tolerance_of(config, 1, self._reference["coarsest"], other_kernels=bool(apart))
        table.difference = certificate.against(given, self._reference, allowed)
        how = "bit for bit" if allowed.exact else "within rounding"
        other = f" (not the same: {'; '.join(apart)})" if apart else ""
        row = TableRow(REFERENCE, "different" if table.difference else "equal", difference=table.difference)
        found = row.text if table.difference else "it agrees"
        table.notes.append(f"against the certificate, {how}{other}: {found}")

    def _notes(self) -> list[str]:
        request, notes = self._request, []
        if request.resume:
            notes.append(f"each combination was saved, ended and resumed before step {request.resume}")
        if request.plant:
            moment = {"start": 0, "step": request.fault_step, "resume": request.resume, "end": request.steps}
            step = moment[self._fault.moment]
            notes.append(f"planted from step {step}: {self._fault.text}; to be found as: {self._fault.stage}")
        return notes


def measured_rounding(
    request: VerifyRequest, executor: Executor, planted: Fault, reference: dict[str, Any]
) -> tuple[float, ...]:
    """Measure how far each step's gradient moves if its sums are rounded differently.

    Args:
        reference: the single process's trace.

    Returns:
        The distance of each step, as a share of the gradient's norm; () if it cannot matter.

    Raises:
        LockstepError: the single process failed.
    """
    plain = tolerance_of(request.config, 2, reference["coarsest"], other_kernels=False)
    if plain.bound(request.steps - 1) <= FINE:
        return ()
    spec = disturbed_spec(request, executor.folder, planted)
    try:
        executor.run([spec])
    except RankFailed as error:
        raise LockstepError(f"the single process failed when its rounding was measured: {error}") from error
    traces = read_trace(executor.folder, spec.key, 1)
    return _moved(reference, traces[0]) if traces else ()


def _undetermined(found: Difference) -> Difference:
    """The difference between two runs of one combination."""
    text = f"two runs of the same differ from here on ({found.stage}: {found.text})"
    return Difference(found.step, "determinism", found.where, -1, text)


def repeats(one: list[dict[str, Any]], two: list[dict[str, Any]], step: int, tolerance: Tolerance) -> bool:
    """Whether two runs of one combination agree up to a step, on each rank.

    Args:
        one, two: the traces of all ranks.
        step: the last that counts, or the number of steps for the evaluation after it.
    """
    for mine, theirs in zip(one, two, strict=True):
        for a, b in zip(mine["steps"][: step + 1], theirs["steps"], strict=False):
            pairs = [(a["norm"], b["norm"])]
            for slot, other in zip(a["slots"], b["slots"], strict=True):
                if any(slot[key] != other[key] for key in ("data", "seeded", "drawn")):
                    return False
                pairs += [(slot[key], other[key]) for key in ("loss", "scaled") if slot[key] is not None]
            if not all(tolerance.close(a["step"], *pair) for pair in pairs):
                return False
        if step >= len(mine["steps"]) and mine.get("evaluation") != theirs.get("evaluation"):
            return False
    return True


def _moved(reference: dict[str, Any], disturbed: dict[str, Any]) -> tuple[float, ...]:
    """For each step, the gradient's relative move; () if gradients are hidden."""
    found: list[float] = []
    for step, other in zip(reference["steps"], disturbed["steps"], strict=False):
        square = step.get("gradient", {}).get("square", 0.0)
        apart = other.get("gradient", {}).get("apart", math.nan)
        found.append(apart / math.sqrt(square) if square else math.nan)
    return tuple(found) if found and all(map(math.isfinite, found)) else ()


def _idle(combinations: list[Combination], config: Config) -> list[str]:
    """A note if ranks have no micro-batch in a step: this proves little about them."""
    parts = config.micro_batches
    without = [one for one in combinations if one.world_size > parts]
    if not without:
        return []
    return [
        f"a step has {_counted(parts)}, so in {', '.join(map(str, without))} ranks stand by without data, "
        "which proves little of them: give a smaller --micro-batch-size, or a larger --batch-size"
    ]


def unproved_by(reference: dict[str, Any], *, skips: bool) -> str:
    """Describe losses and gradients of the single process that are not finite, so they prove nothing.

    Where both runs have NaN nothing was compared. A weight that is not finite shows in the next loss.

    Args:
        skips: such steps are left out of the training, so the others prove it.

    Returns:
        The description, or "".
    """
    steps = reference["steps"]
    wrong = {at: name for at, step in enumerate(steps) if (name := _not_finite(step))}
    if not wrong or (skips and len(wrong) < len(steps)):
        return ""
    first = min(wrong)
    text = f"the {wrong[first]} is not finite, first in step {first}, which compares nothing"
    return f"{text}: {len(steps) - len(wrong)} of {len(steps)} steps were compared"


def _skips(config: Config) -> bool:
    """Whether steps that are not finite are left out of the training, by the guard or by the loss scaler."""
    return config.guards.nonfinite == "skip" or config.precision == "fp16"


def _not_finite(step: dict[str, Any]) -> str:
    """Name the number of a step that is not finite; "" if there is none."""
    losses = [slot["loss"] for slot in step["slots"] if slot["loss"] is not None]
    if not all(map(math.isfinite, losses)):
        return "loss"
    return "" if math.isfinite(step["norm"]) else "gradient's norm"


def _failed(one: Combination, error: RankFailed | None) -> TableRow:
    reason = str(error) if error else "a rank left no trace"
    return TableRow(one, "unavailable" if error and error.usage else "failed", reason=reason)


def _counted(parts: int) -> str:
    return "1 micro-batch" if parts == 1 else f"{parts} micro-batches"


def _title(request: VerifyRequest) -> str:
    config = request.config
    how = "every bit" if config.exact else "within the error of another order of summation (docs/verify.md)"
    return (
        f"{request.steps} steps of {config.batch_size} samples in {_counted(config.micro_batches)}, "
        f"{config.precision}, compared with a single process: {how}"
    )


def _explained(found: Difference, spec: RunSpec, executor: Executor) -> str:
    """Explain a difference between two runs of the single process: the task is not deterministic.

    Two more processes record every operation of the step in which the runs differ. If the data differ already, or the
    state after the resume, that is the answer.
    """
    head = f"the task is not deterministic in one process, so nothing else can be compared: step {found.step}"
    states = ("data", "optimizer state", "weights", "initial weights")
    if found.stage in states or found.step >= spec.request.steps:  # or in the evaluation after the last one
        return f"{head}, {found.stage}, {found.where}: {found.text}"
    try:
        for name in ("one", "other"):
            executor.log_operations(spec, found.step, name)
    except RankFailed as error:
        return f"{head}, {found.stage}, {found.where}; the operation could not be found: {error}"
    one, other = (json.loads((spec.folder / f"{name}.json").read_text("utf-8")) for name in ("one", "other"))
    difference = first_unequal(one, other)
    if difference is None:
        return f"{head}, {found.stage}, {found.where}; two more runs agreed in all {len(one)} operations of it"
    place, (module, operation, _), (_, instead, _) = difference
    where = f"in {module}" if module else "in the loss or its gradient"
    if operation != instead:
        return f"{head}: operation {place} is {operation} in one run and {instead} in another, {where}"
    return f"{head}: the first operation that differs is {operation} (number {place} of the step), {where}"


_OF_THE_MACHINE = ("device", "timeout", "save_dir", "task")  # flags that apply with --against


def run(own: argparse.Namespace) -> int:
    """Run the verification that the parsed flags `own` request, print its table and return 0.

    `commands/verify.py` parses the flags.

    Raises:
        DifferenceError: a combination differs; exit code 3.
        UsageError: the request is impossible; exit code 2.
    """
    values = cli.told(vars(own))
    config = cli.build(cli.applied(values))
    if config.task.startswith(LIGHTNING):
        config, _ = importlib.import_module("lockstep.adapters.lightning.convert").configured(values)
    _check_out(own.out)
    if kind_of(config.task) == OWN:
        load_task(config.task)  # load it here first: an error is one line, not a failed rank's
    given = certificate.read(Path(own.against)) if own.against else None
    asked = _repeated(own, config, given) if given else _request(own, config, precision=values.get("precision", ""))
    with _removing():
        table = prove(asked, given)
    if _is_main():
        print(table, flush=True)
        if own.out and table.certificate:
            certificate.write(Path(own.out), table.certificate)
            print(f"  certificate: {own.out}", flush=True)
    if not table.ok:
        wrong = [str(row.combination) for row in table.rows if not row.ok and row.verdict != "unavailable"]
        different = table.difference or any(row.verdict in ("different", "failed") for row in table.rows)
        what = "not the same training" if different else "not proved to be the same training"
        if table.difference and table.difference.stage == "determinism":
            what = "two runs of the same differ, so nothing else was compared"
        problem = DifferenceError(f"{what}: {', '.join(wrong) or 'the certificate'}; see the table")
        problem.relayed = not _is_main()
        raise problem
    return 0


def _check_out(out: str) -> None:
    """Check before the proof that a certificate can be written.

    Raises:
        ConfigError: it cannot.
    """
    if out and _is_main() and (Path(out).is_dir() or not Path(out).parent.is_dir()):
        raise ConfigError(f"--out {out}: give a file in a folder that exists")


def _is_main() -> bool:
    """Whether this process prints and writes: under torchrun only rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _removing() -> Iterator[None]:
    """Context manager in which SIGTERM ends the processes and removes the files, as Ctrl-C does.

    `timeout` and schedulers send SIGTERM. In a torchrun job rank 0 has the files; it notices the end of the others
    where it waits for them.
    """
    if not _is_main() or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _request(own: argparse.Namespace, config: Config, **changes: Any) -> VerifyRequest:
    """The request that the flags make, but for `changes`."""
    asked = {
        "engines": own.engines,
        "world_sizes": own.world_sizes,
        "steps": own.steps,
        "resume_at": own.resume_at,
        "compile": bool(config.compile),
        "plant": own.plant,
        "plant_at": own.plant_at,
        "skip_unavailable": own.skip_unavailable,
        "scratch": own.scratch,
    }
    return VerifyRequest(dataclasses.replace(config, compile=False), **asked | changes)


def _repeated(own: argparse.Namespace, config: Config, given: dict[str, Any]) -> VerifyRequest:
    """The request that repeats a certificate's.

    Raises:
        ConfigError: a flag that would be ignored.
    """
    flags = cli.flat(Config())
    mine = [key for key in ("engines", "world_sizes", "steps", "resume_at") if key in own.named]
    mine += [key for key, value in cli.flat(config).items() if value != flags[key] and key not in _OF_THE_MACHINE]
    if mine:
        shown = ", ".join(f"--{key.replace('_', '-')}" for key in mine)
        raise ConfigError(f"--against repeats what its certificate says: leave out {shown}")
    proved: Config = certificate.config_of(given)
    here = {key: getattr(config, key) for key in _OF_THE_MACHINE} | {"task": config.task or proved.task}
    proved = dataclasses.replace(proved, **here)
    same = {key: given[key] for key in ("engines", "world_sizes", "steps", "resume_at", "compile")}
    return _request(own, proved, **same, precision=proved.precision)
