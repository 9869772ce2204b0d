"""Run a verification: the single process, its repeat, then every combination by world size.

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
from lockstep.config.parallel_options import DEGREES
from lockstep.config.schema import DEFAULTS, Config
from lockstep.config.task_options import LIGHTNING, OWN, kind_of
from lockstep.distributed import spawn
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.spawn import RankFailure
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DifferenceError, LockstepError
from lockstep.training.start.named_task import load_task
from lockstep.verify import certificate
from lockstep.verify.compare import against_one_replica, first_difference, join_replicas, traces_of
from lockstep.verify.faults import fault
from lockstep.verify.operations import first_unequal
from lockstep.verify.recorder import TENSORS
from lockstep.verify.request import (
    REFERENCE,
    Combination,
    Difference,
    Fault,
    TableRow,
    TrainingSpec,
    VerifyRequest,
    VerifyTable,
    combine,
    disturbed_spec,
    format_numbers,
    reference_specs,
    refusal,
    run_spec,
    with_one_replica,
)
from lockstep.verify.tolerance import FINE, Tolerance, tolerance_of
from lockstep.verify.worker import log_operations, read_trace, run_rank

__all__ = [
    "RankFailure",
    "prove",
    "run",
    "start",
]


def start(
    function: Callable[..., None], size: int, args: tuple[Any, ...], *, folder: Path, device: str, patience: float
) -> None:
    """Run `function(world, say, *args)` on `size` ranks and wait for all. See `spawn.start`."""
    preload = ["lockstep.verify.worker"]
    spawn.start(function, size, args, device=device, patience=patience, folder=folder, preload=preload, name="the task")


class Executor(Protocol):
    """Interface that runs combinations.

    Every rank of a job calls each method, then reads the same files.

    Attributes:
        folder: new folder that all ranks see.
        is_main: whether this process prints and writes.
        world_size: the only world size besides 1; 0: any.
    """

    folder: Path
    is_main: bool
    world_size: int

    def run(self, specs: Sequence[TrainingSpec]) -> None:
        """Run specs of one world size in order.

        Raises:
            RankFailure: for the first that fails.
        """

    def log_operations(self, spec: TrainingSpec, step: int, name: str) -> None:
        """See `worker.log_operations`."""

    def close(self) -> None:
        """Destroy the process groups."""


def _executor_for(config: Config, scratch: str) -> Executor:
    """Use the ranks of the torchrun job if there is one; else start processes."""
    if "WORLD_SIZE" in os.environ:
        return TorchrunExecutor(config, scratch)
    return LocalExecutor(config, _new_folder(scratch))


@final
class LocalExecutor:
    """Executor that starts the processes of each world size on this machine."""

    is_main = True
    world_size = 0

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder = folder
        self._config = config

    def run(self, specs: Sequence[TrainingSpec]) -> None:
        self._start(run_rank, specs[0].combination.world_size, list(specs))

    def log_operations(self, spec: TrainingSpec, step: int, name: str) -> None:
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
        self.is_main = world.is_main
        self.world_size = world.size
        # All ranks: rank 0 creates the folder, and its error ends the others.
        path = on_all_ranks(world, lambda: str(_new_folder(scratch)) if world.is_main else "")
        # All ranks, once: they read and write in rank 0's folder.
        self.folder = Path(world.gather(path)[0])
        # All ranks: a node that does not see the folder ends the job before a run starts.
        on_all_ranks(world, lambda: _check_visible(self.folder))

    def run(self, specs: Sequence[TrainingSpec]) -> None:
        self._do(lambda world: run_rank(world, _silent, specs), one_process=specs[0].combination.world_size == 1)

    def log_operations(self, spec: TrainingSpec, step: int, name: str) -> None:
        self._do(lambda world: log_operations(world, _silent, spec, step, name), one_process=True)

    def close(self) -> None:
        self._world.leave()

    def _do(self, action: Callable[[World], None], one_process: bool) -> None:
        """Run `action` on all ranks, or on rank 0 only.

        An error on a single rank ends the job: the others may be in any collective.
        """
        if one_process:
            alone = World(device=self._world.device)
            # All ranks: the others wait while rank 0 works alone.
            on_all_ranks(self._world, lambda: action(alone) if self.is_main else None)
        else:
            action(self._world)
            # All ranks: their traces are read after this, so all must be written.
            self._world.barrier()  # collective
        # Free this run's engine before the next run needs the memory.
        gc.collect()


def _silent(*_: Any) -> None:
    pass


def _new_folder(scratch: str) -> Path:
    """Create a new folder below `scratch`, or below the system's if it is "".

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="lockstep-verify-", dir=scratch or None))
    except OSError as error:
        raise ConfigError(f"--scratch {scratch}: {error.strerror or error}; choose another folder") from error


def _check_visible(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"this node does not see {path}; set --scratch to a folder that all nodes share")


def prove(request: VerifyRequest, against: dict[str, Any] | None = None) -> VerifyTable:
    """Run a verification for `lockstep.verify`, and remove its files at the end.

    Args:
        against: certificate to compare this machine's single process with, too.

    Raises:
        ConfigError, LockstepError: see `lockstep.verify`.
    """
    request = request.resolve()
    executor = _executor_for(request.config, request.scratch)
    try:
        table = Verification(request, executor, against).table()
        executor.close()
    finally:
        if executor.is_main:
            shutil.rmtree(executor.folder, ignore_errors=True)
    return table


class Verification:
    """Running verification: the reference, its repeat, then all others by world size."""

    def __init__(self, request: VerifyRequest, executor: Executor, against: dict[str, Any] | None = None) -> None:
        self._request = request
        self._executor = executor
        self._against = against
        self._fault = fault(request.plant)
        self._rows: dict[Combination, TableRow] = {}
        self._reference: dict[str, Any] = {}
        self._measured: tuple[float, ...] = ()
        # True if the user chose no cut of a step: then a run in which a rank is idle proves nothing.
        self._needs_work = False

    def table(self) -> VerifyTable:
        """Run and compare all combinations. Raises as `lockstep.verify` does."""
        combinations = self._combinations()
        self._run_reference(combinations)
        # The second check: only now is the micro-batch size known.
        self._refuse(combinations)
        table = VerifyTable(
            _title(self._request), notes=[*self._notes(), *_idle_note(combinations, self._request.config)]
        )
        self._measured = measured_rounding(self._request, self._executor, self._fault, self._reference)
        self._run([combination for combination in combinations if combination == REFERENCE])
        repeat = self._rows[REFERENCE]
        # Two runs of the single process differ, so a difference of a combination would show nothing.
        if repeat.difference:
            table.notes = self._kept_notes() or [_explain(repeat.difference, self._spec(REFERENCE), self._executor)]
            table.difference = _nondeterminism(repeat.difference)
            table.rows = [dataclasses.replace(repeat, difference=table.difference)]
            return table
        for size in sorted({combination.world_size for combination in combinations}):
            self._run([combination for combination in combinations if combination.world_size == size])
        self._repeat_different()
        table.rows = [self._rows[combination] for combination in combinations]
        if any(row.difference for row in table.rows) and not self._request.plant:
            table.notes += self._kept_notes()
        if self._request.plant and table.ok:
            table.notes.append("no difference: this fault does not change this run (see docs/verify.md)")
        if self._against:
            self._compare_with(self._against, table)
        table.certificate = certificate.make(self._request, self._reference, table.rows)
        return table

    def _combinations(self) -> list[Combination]:
        """List all combinations. One that cannot run here gets a row, or an error."""
        request = self._request
        job_size = self._executor.world_size
        sizes = [job_size] if job_size else request.world_sizes
        combinations = combine(request.engines, sizes, request.compile, request.divisions, exact=request.config.exact)
        if request.config.exact:
            combinations = with_one_replica(combinations, job_size)
        # With one process, only combinations that need no launcher.
        if job_size:
            combinations = [
                combination
                for combination in combinations
                if combination.world_size > 1 or combination.engine == REFERENCE.engine
            ]
        self._refuse(combinations)
        if request.plant:
            self._fault.check(request.config, request.steps, request.resume)
            if all(combination.world_size == 1 for combination in combinations):
                raise ConfigError(f"--plant {request.plant} needs several ranks; add --world-sizes 2")
            name = self._fault.divided
            if name and max(getattr(request, name)) == 1:
                raise ConfigError(f"--plant {request.plant} needs a divided model; add --parallel.{name} 2")
        return combinations

    def _refuse(self, combinations: list[Combination]) -> None:
        for combination in combinations:
            reason = refusal(combination, self._request.config)
            if reason:
                self._rows[combination] = TableRow(combination, "unavailable", reason=reason)
        self._check_available()

    def _check_available(self) -> None:
        missing = []
        for row in self._rows.values():
            if row.verdict == "unavailable":
                missing.append(row)
        if missing and not self._request.skip_unavailable:
            reasons = "; ".join(f"{row.combination} cannot run here: {row.reason}" for row in missing)
            raise ConfigError(f"{reasons}; drop it, or add --skip-unavailable")

    def _run_reference(self, combinations: list[Combination]) -> None:
        """Run the single process, and again if its cut would leave a rank without work.

        Raises:
            ConfigError, LockstepError: it cannot run, or fails.
        """
        compiled = any(combination.compiled for combination in combinations)
        is_open = not self._request.config.micro_batch_size
        self._record_reference(compiled=compiled)
        # The model may have chosen the micro-batch size.
        chosen = self._request.config.micro_batch_size or (
            self._request.config.batch_size // self._reference["micro_batches"]
        )
        worlds = []
        for entry in combinations:
            if entry not in self._rows:
                worlds.append(entry.replicas)
        if is_open:
            size = _busy_size(self._request.config.batch_size, chosen, worlds)
        else:
            size = chosen
        config = dataclasses.replace(self._request.config, micro_batch_size=size)
        self._request = dataclasses.replace(self._request, config=config)
        self._needs_work = is_open
        if size != chosen:
            self._record_reference(compiled=compiled)

    def _record_reference(self, *, compiled: bool) -> None:
        request = self._request
        try:
            self._executor.run(reference_specs(request, self._executor.folder, self._fault, compiled=compiled))
        except RankFailure as error:
            if error.usage:
                raise ConfigError(str(error).partition(": ")[2]) from error
            raise LockstepError(f"the single process failed: {error}") from error
        self._reference = self._trace("reference")
        steps_run = len(self._reference["steps"])
        if steps_run < request.steps:
            raise ConfigError(
                f"--steps {request.steps}: the run has only {steps_run} steps; lower --steps, or raise --num-epochs"
            )

    def _trace(self, key: str) -> dict[str, Any]:
        traces = read_trace(self._executor.folder, key, 1)
        if traces is None:
            raise LockstepError("the single process wrote no trace; do all nodes share the --scratch folder?")
        return traces[0]

    def _run(self, combinations: list[Combination]) -> None:
        """Add rows for combinations of one world size.

        After a failure, restart with the remaining ones.
        """
        pending = [combination for combination in combinations if combination not in self._rows]
        while pending:
            failure = None
            try:
                self._executor.run([self._spec(combination) for combination in pending])
            except RankFailure as error:
                failure = error
            # Runs before the failed one have traces. The first without a trace is the failed one.
            while pending:
                combination = pending.pop(0)
                traces = read_trace(self._executor.folder, combination.key, combination.world_size)
                if traces is None:
                    self._rows[combination] = _failed_row(combination, failure)
                    break
                self._rows[combination] = self._row(combination, traces)
        self._check_available()

    def _repeat_different(self) -> None:
        """Repeat combinations that differ, since one that differs from its repeat is nondeterministic."""
        if self._request.plant:
            different = []
        else:
            different = [combination for combination, row in self._rows.items() if row.difference]
        for combination in different:
            spec = self._spec(combination)
            difference = self._rows[combination].difference
            repeat = dataclasses.replace(spec, key=f"{spec.key}-again")
            try:
                self._executor.run([repeat])
            except RankFailure:
                # Keep the first result.
                continue
            trace, repeated_trace = (
                read_trace(self._executor.folder, run.key, combination.world_size) for run in (spec, repeat)
            )
            if (
                difference
                and trace
                and repeated_trace
                and not repeats(trace, repeated_trace, difference.step, spec.tolerance)
            ):
                self._rows[combination] = dataclasses.replace(
                    self._rows[combination], difference=_nondeterminism(difference)
                )

    def _row(self, combination: Combination, traces: list[dict[str, Any]]) -> TableRow:
        spec = self._spec(combination)
        difference = first_difference(traces_of(spec, self._trace(spec.reference), traces))
        if combination.is_divided:
            return self._row_of_divided(combination, spec, difference, traces)
        comparisons = []
        for trace in traces:
            for step in trace["steps"]:
                for tensor_type in TENSORS:
                    if tensor_type in step:
                        comparisons.append(step[tensor_type])
        if difference:
            verdict = "different"
        else:
            verdict = "equal" if all(comparison["equal"] for comparison in comparisons) else "close"
        return self._judge(combination, spec, verdict, difference, traces)

    def _row_of_divided(
        self, combination: Combination, spec: TrainingSpec, difference: Difference | None, traces: list[dict[str, Any]]
    ) -> TableRow:
        """Return the row of a divided model; in exact mode several replicas must have the bits of one.

        Args:
            difference: from the single process.
        """
        request = self._request
        verdict = "close"
        if not difference and request.config.exact and combination.replicas > 1:
            # It ran before, as the world sizes are in ascending order.
            one = read_trace(self._executor.folder, combination.one_replica.key, combination.parallel.size)
            if one is None:
                return TableRow(combination, "not proved", reason=f"{combination.one_replica} has no result")
            parallel = combination.parallel
            difference = against_one_replica(
                join_replicas(one, parallel), join_replicas(traces, parallel), request.config.optim.clip
            )
            verdict = "equal"
            if difference:
                text = f"{difference.text}, compared with {combination.parallel.label} x 1 replica"
                difference = dataclasses.replace(difference, text=text)
        if difference:
            verdict = "different"
        row = self._judge(combination, spec, verdict, difference, traces)
        return dataclasses.replace(row, apart=_largest_share(self._reference, traces[: combination.parallel.size]))

    def _judge(
        self,
        combination: Combination,
        spec: TrainingSpec,
        verdict: str,
        difference: Difference | None,
        traces: list[dict[str, Any]],
    ) -> TableRow:
        """Return the row of a verdict, or "not proved"."""
        largest: list[Any] = max(trace["steps"][-1]["weights"]["largest"] for trace in traces)
        if difference:
            unproved = ""
        else:
            unproved = nonfinite_values(self._reference, skips=_skips(self._request.config))
        if not difference and not unproved and self._needs_work:
            unproved = _idle_ranks(traces)
        if unproved:
            return TableRow(combination, "not proved", reason=unproved)
        # The smallest difference that the tolerance of the last step would show.
        hidden = spec.tolerance.relative(self._request.steps - 1)
        return TableRow(combination, verdict, (largest[0], largest[1]), difference, hidden=hidden)

    def _spec(self, combination: Combination) -> TrainingSpec:
        coarsest = self._reference["coarsest"]
        folder = self._executor.folder
        return run_spec(self._request, combination, folder, self._fault, coarsest, self._measured)

    def _compare_with(self, content: dict[str, Any], table: VerifyTable) -> None:
        """Compare this machine's single process with the certificate's."""
        changes = certificate.same_machine(content)
        config = self._request.config
        tolerance = tolerance_of(config, 1, self._reference["coarsest"], other_kernels=bool(changes))
        table.difference = certificate.against(content, self._reference, tolerance)
        how = "bit for bit" if tolerance.exact else "within rounding"
        suffix = f" (changed: {'; '.join(changes)})" if changes else ""
        row = TableRow(REFERENCE, "different" if table.difference else "equal", difference=table.difference)
        result = row.text if table.difference else "it agrees"
        table.notes.append(f"against the certificate, {how}{suffix}: {result}")

    def _kept_notes(self) -> list[str]:
        """Return a note on what `loss` keeps between calls; [] if nothing.

        Such values explain differences.
        """
        names: list[str] = self._reference.get("kept", [])
        if not names:
            return []
        return [
            f"`loss` keeps {', '.join(names)} from call to call, each rank and each resumed run its own: compute what "
            "belongs to a step in `step_loss`, or use `task.step`"
        ]

    def _notes(self) -> list[str]:
        request = self._request
        notes = []
        if request.resume:
            notes.append(f"each combination was saved, ended and resumed after step {request.resume}")
        if request.plant:
            moments = {"start": "step 1", "step": f"step {request.fault_step + 1}"}
            moments |= {"resume": f"step {request.resume + 1}", "end": f"the evaluation after step {request.steps}"}
            moment = moments[self._fault.moment]
            notes.append(f"planted from {moment}: {self._fault.text}; expected cause: {self._fault.stage}")
        return notes


def measured_rounding(
    request: VerifyRequest, executor: Executor, planted: Fault, reference: dict[str, Any]
) -> tuple[float, ...]:
    """Measure how far each step's gradient moves when its sums are rounded differently.

    Args:
        reference: the single process's trace.

    Returns:
        The distance of each step, as a share of the gradient's norm; () if it cannot matter.

    Raises:
        LockstepError: the single process failed.
    """
    plain = tolerance_of(request.config, 2, reference["coarsest"], other_kernels=False)
    # The bound by the dtypes is so small that a measurement is useless; see FINE.
    if plain.bound(request.steps - 1) <= FINE:
        return ()
    spec = disturbed_spec(request, executor.folder, planted)
    try:
        executor.run([spec])
    except RankFailure as error:
        raise LockstepError(f"the single process failed while its rounding was measured: {error}") from error
    traces = read_trace(executor.folder, spec.key, 1)
    if traces:
        return _relative_moves(reference, traces[0])
    return ()


def _nondeterminism(difference: Difference) -> Difference:
    """Turn a difference into one between two runs of the same combination."""
    text = f"two runs of this combination differ from here on ({difference.stage}: {difference.text})"
    return Difference(difference.step, "determinism", difference.where, -1, text)


def repeats(first: list[dict[str, Any]], second: list[dict[str, Any]], step: int, tolerance: Tolerance) -> bool:
    """Whether two runs of one combination agree up to a step, on each rank.

    Args:
        first, second: the traces of all ranks.
        step: last step to compare; the number of steps includes the evaluation.
    """
    for trace, repeat in zip(first, second, strict=True):
        for a, b in zip(trace["steps"][: step + 1], repeat["steps"], strict=False):
            pairs = [(a["norm"], b["norm"])]
            for slot, peer in zip(a["slots"], b["slots"], strict=True):
                if any(slot[key] != peer[key] for key in ("data", "seeded", "drawn")):
                    return False
                for key in ("loss", "scaled"):
                    if slot[key] is not None:
                        pairs.append((slot[key], peer[key]))
            if not all(tolerance.close(a["step"], *pair) for pair in pairs):
                return False
        if step >= len(trace["steps"]) and trace.get("evaluation") != repeat.get("evaluation"):
            return False
    return True


def _largest_share(reference: dict[str, Any], replica: list[dict[str, Any]]) -> float:
    """Return how far the gradient of one replica is from the single process's, in the step where it is farthest.

    Args:
        replica: the traces of its ranks. Tensors that all of them have in full count several times, so the result is
            too large rather than too small.

    Returns:
        A share of the gradient's norm.
    """
    largest = 0.0
    for at, step in enumerate(reference["steps"]):
        square = step.get("gradient", {}).get("square", 0.0)
        apart = [trace["steps"][at].get("gradient", {}).get("apart", 0.0) for trace in replica]
        if square:
            largest = max(largest, math.hypot(*apart) / math.sqrt(square))
    return largest


def _relative_moves(reference: dict[str, Any], disturbed: dict[str, Any]) -> tuple[float, ...]:
    """Return the gradient's relative move in each step; () if an engine hides its gradients."""
    moves: list[float] = []
    for step, disturbed_step in zip(reference["steps"], disturbed["steps"], strict=False):
        square = step.get("gradient", {}).get("square", 0.0)
        distance = disturbed_step.get("gradient", {}).get("apart", math.nan)
        moves.append(distance / math.sqrt(square) if square else math.nan)
    if moves and all(map(math.isfinite, moves)):
        return tuple(moves)
    return ()


def _idle_note(combinations: list[Combination], config: Config) -> list[str]:
    """Note that ranks without a micro-batch prove little."""
    parts = config.micro_batches
    without = []
    for combination in combinations:
        if _leaves_idle(parts, combination.replicas):
            without.append(combination)
    if not without:
        return []
    return [
        f"a step has {_count_text(parts)}, so some ranks of {', '.join(map(str, without))} have no data, which proves "
        "little about them: lower --micro-batch-size, or raise --batch-size"
    ]


def _leaves_idle(parts: int, world_size: int) -> bool:
    """Whether the last rank gets none of a step's micro-batches.

    Each rank before it has the same number.
    """
    return -(-parts // world_size) * (world_size - 1) >= parts > 0 and world_size > 1


def _busy_size(batch_size: int, chosen: int, worlds: list[int]) -> int:
    """Return the largest micro-batch size that gives every rank of every world work.

    Args:
        chosen: the upper limit.

    Returns:
        At least 2 samples, which BatchNorm needs; `chosen` if no such size does.
    """
    for size in range(chosen, 1, -1):
        if batch_size % size == 0 and not any(_leaves_idle(batch_size // size, world) for world in worlds):
            return size
    return chosen


def _idle_ranks(traces: list[dict[str, Any]]) -> str:
    """Name the ranks that computed no micro-batch in any step; "" if there are none."""
    slots = {}
    for trace in traces:
        slots[trace["rank"]] = [slot for step in trace["steps"] for slot in step["slots"]]
    idle = []
    for rank, slots_of_rank in slots.items():
        if not any(slot["weight"] for slot in slots_of_rank):
            idle.append(rank)
    if not idle:
        return ""
    return f"rank {format_numbers(idle)} computed no micro-batch; set --micro-batch-size, or raise --batch-size"


def nonfinite_values(reference: dict[str, Any], *, skips: bool) -> str:
    """Describe losses and gradients of the single process that are not finite.

    They prove nothing.

    Where both runs have NaN nothing was compared. A weight that is not finite shows in the next loss.

    Args:
        skips: such steps are left out of the training, so the others prove it.

    Returns:
        The description, or "".
    """
    steps = reference["steps"]
    wrong = {}
    for at, step in enumerate(steps):
        if name := _not_finite(step):
            wrong[at] = name
    if not wrong or (skips and len(wrong) < len(steps)):
        return ""
    first_step = min(wrong)
    text = f"the {wrong[first_step]} is not finite, first in step {first_step + 1}, which compares nothing"
    return f"{text}: {len(steps) - len(wrong)} of {len(steps)} steps were compared"


def _skips(config: Config) -> bool:
    """Whether the training skips steps that are not finite, by guard or loss scaler."""
    return config.guards.nonfinite == "skip" or config.precision == "fp16"


def _not_finite(step: dict[str, Any]) -> str:
    """Name the number of a step that is not finite; "" if there is none."""
    losses = []
    for slot in step["slots"]:
        if slot["loss"] is not None:
            losses.append(slot["loss"])
    if not all(map(math.isfinite, losses)):
        return "loss"
    if math.isfinite(step["norm"]):
        return ""
    return "gradient's norm"


def _failed_row(combination: Combination, error: RankFailure | None) -> TableRow:
    reason = str(error) if error else "a rank wrote no trace"
    return TableRow(combination, "unavailable" if error and error.usage else "failed", reason=reason)


def _count_text(parts: int) -> str:
    if parts == 1:
        return "1 micro-batch"
    return f"{parts} micro-batches"


def _title(request: VerifyRequest) -> str:
    config = request.config
    if config.exact:
        how = "bit for bit"
    else:
        how = "within the rounding error of another summation order (docs/verify.md)"
    return (
        f"{request.steps} steps of {config.batch_size} samples in {_count_text(config.micro_batches)}, "
        f"{config.precision}, compared with a single process: {how}"
    )


def _explain(difference: Difference, spec: TrainingSpec, executor: Executor) -> str:
    """Explain a difference between two runs of the single process: the task is nondeterministic.

    Two more processes record every operation of the first step that differs, unless its data or its state after the
    resume differ already.
    """
    head = (
        f"the task is nondeterministic in a single process, so nothing else can be compared: step {difference.number}"
    )
    states = ("data", "optimizer state", "weights", "initial weights")
    # No step can be run again for these stages, and none for the evaluation after the last step.
    if difference.stage in states or difference.step >= spec.request.steps:
        return f"{head}, {difference.stage}, {difference.where}: {difference.text}"
    try:
        for name in ("one", "other"):
            executor.log_operations(spec, difference.step, name)
    except RankFailure as error:
        return f"{head}, {difference.stage}, {difference.where}; the search for the operation failed: {error}"
    first_log, second_log = (json.loads((spec.folder / f"{name}.json").read_text("utf-8")) for name in ("one", "other"))
    mismatch = first_unequal(first_log, second_log)
    if mismatch is None:
        return (
            f"{head}, {difference.stage}, {difference.where}; two more runs agreed in all {len(first_log)} operations"
        )
    index, (module, operation, _), (_, instead, _) = mismatch
    where = f"in {module}" if module else "in the loss or its gradient"
    if operation != instead:
        return f"{head}: operation {index} is {operation} in one run and {instead} in another, {where}"
    return f"{head}: the first different operation is {operation} (number {index} of the step), {where}"


# Flags that apply together with --against.
_MACHINE_FLAGS = ("device", "timeout", "save_dir", "task")


def run(own: argparse.Namespace) -> int:
    """Run the verification of the parsed flags `own`, print its table and return 0.

    `commands/verify.py` parses the flags.

    Raises:
        DifferenceError: a combination differs; exit code 3.
        UsageError: the request is impossible; exit code 2.
    """
    values = cli.collect_options(vars(own))
    config = cli.build(cli.apply_preset(values))
    if config.task.startswith(LIGHTNING):
        config, _ = importlib.import_module("lockstep.adapters.lightning.convert").configure(values)
    _check_out(own.out)
    if kind_of(config.task) == OWN:
        # Load the task here first, so that an error is one line and not a failed rank.
        load_task(config.task)
    content = certificate.read(Path(own.against)) if own.against else None
    if content:
        request = _repeat_request(own, config, content)
    else:
        request = _request(own, config, precision=values.get("precision", ""))
    with _remove_on_sigterm():
        table = prove(request, content)
    if _is_main():
        print(table, flush=True)
        if own.out and table.certificate:
            certificate.write(Path(own.out), table.certificate)
            print(f"  certificate: {own.out}", flush=True)
    if not table.ok:
        wrong = []
        for row in table.rows:
            if not row.ok and row.verdict != "unavailable":
                wrong.append(str(row.combination))
        different = table.difference or any(row.verdict in ("different", "failed") for row in table.rows)
        if different:
            summary = "not the same training"
        else:
            summary = "not proved to be the same training"
        if table.difference and table.difference.stage == "determinism":
            summary = "two runs of the single process differ, so nothing else was compared"
        problem = DifferenceError(f"{summary}: {', '.join(wrong) or 'the certificate'}; see the table")
        # Rank 0 prints the line; the other ranks of a job only end with the same code.
        problem.relayed = not _is_main()
        raise problem
    return 0


def _check_out(out: str) -> None:
    """Check before the proof that a certificate can be written.

    Raises:
        ConfigError: it cannot.
    """
    if out and _is_main() and (Path(out).is_dir() or not Path(out).parent.is_dir()):
        raise ConfigError(f"--out {out} must be a file in an existing folder")


def _is_main() -> bool:
    """Whether this process prints and writes; under torchrun only rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _remove_on_sigterm() -> Iterator[None]:
    """Make SIGTERM end the processes and remove the files, like Ctrl-C.

    `timeout` and schedulers send it.

    In a torchrun job rank 0 has the files; it notices that other ranks ended when it waits for them.
    """
    if not _is_main() or threading.current_thread() is not threading.main_thread():
        yield
        return

    # SystemExit runs the `finally` blocks, which the default action of SIGTERM does not.
    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _request(own: argparse.Namespace, config: Config, **changes: Any) -> VerifyRequest:
    """Build the request of the flags, with `changes` applied."""
    fields = {
        "engines": own.engines,
        "world_sizes": own.world_sizes,
        "steps": own.steps,
        "resume_at": own.resume_at,
        "compile": bool(config.compile),
        "plant": own.plant,
        "plant_at": own.plant_at,
        "skip_unavailable": own.skip_unavailable,
        "scratch": own.scratch,
        **{name: getattr(own, name) for name in DEGREES},
    }
    return VerifyRequest(dataclasses.replace(config, compile=False), **fields | changes)


def _repeat_request(own: argparse.Namespace, config: Config, content: dict[str, Any]) -> VerifyRequest:
    """Build the request that repeats a certificate's.

    Raises:
        ConfigError: a flag that would be ignored.
    """
    flags = cli.flatten(DEFAULTS)
    conflicts = []
    for key in ("engines", "world_sizes", "steps", "resume_at"):
        if key in own.named:
            conflicts.append(key)
    for key, value in cli.flatten(config).items():
        if value != flags[key] and key not in _MACHINE_FLAGS:
            conflicts.append(key)
    if conflicts:
        flags_text = ", ".join(f"--{key.replace('_', '-')}" for key in conflicts)
        raise ConfigError(f"--against takes {flags_text} from the certificate; drop these flags")
    proved: Config = certificate.config_of(content)
    machine = {key: getattr(config, key) for key in _MACHINE_FLAGS} | {"task": config.task or proved.task}
    proved = dataclasses.replace(proved, **machine)
    same = {}
    for key in ("engines", "world_sizes", "steps", "resume_at", "compile"):
        same[key] = content[key]
    # A certificate of an earlier version has no divided models.
    for name in DEGREES:
        same[name] = content.get(name, ())
    return _request(own, proved, **same, precision=proved.precision)
