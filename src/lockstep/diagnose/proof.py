"""One proof under way: the single process, then itself again, then every combination by world size."""

import dataclasses
from pathlib import Path
from typing import Any

from lockstep.diagnose import certificate
from lockstep.diagnose.combination import REFERENCE, Combination, combine, refusal
from lockstep.diagnose.compare import first_difference
from lockstep.diagnose.determinism import explained
from lockstep.diagnose.executor import Executor, Joined
from lockstep.diagnose.jobs import allowance, job, reference_jobs, traces_of
from lockstep.diagnose.plant import fault as fault_of
from lockstep.diagnose.processes import RankFailed
from lockstep.diagnose.recorder import TENSORS
from lockstep.diagnose.table import Row, Table
from lockstep.diagnose.trial import Job, read_trace
from lockstep.diagnose.wanted import Wanted
from lockstep.errors import ConfigError, LockstepError

__all__ = ["Proof"]


class Proof:
    """One proof under way: first the reference, then itself again, then all others by world size."""

    def __init__(self, wanted: Wanted, executor: Executor, folder: Path) -> None:
        self._wanted, self._executor, self._folder = wanted, executor, folder
        self._fault = fault_of(wanted.plant)
        self._rows: dict[Combination, Row] = {}
        self._reference: dict[str, Any] = {}

    def table(self) -> Table:
        combinations = self._chosen()
        self._run_reference(any(one.compiled for one in combinations))
        table = Table(_title(self._wanted), notes=self._notes())
        self._run([one for one in combinations if one == REFERENCE])
        again = self._rows[REFERENCE]
        if again.difference:  # whatever another combination showed, it could not be told from this
            found = explained(again.difference, self._job(REFERENCE), self._executor)
            return dataclasses.replace(table, rows=[again], notes=[found], difference=again.difference)
        for size in sorted({one.world_size for one in combinations}):
            self._run([one for one in combinations if one.world_size == size])
        table.rows = [self._rows[one] for one in combinations]
        if self._wanted.plant and table.ok:
            table.notes.append("nothing was found: this fault makes no difference in this run (see docs/verify.md)")
        if self._wanted.given:
            self._compare_with(self._wanted.given, table)
        table.certificate = certificate.make(self._wanted, self._reference, table.rows)
        return table

    def _chosen(self) -> list[Combination]:
        """All combinations. Those that cannot run here have a row already, or are refused."""
        wanted = self._wanted
        joined = isinstance(self._executor, Joined)
        sizes = [self._executor.world.size] if isinstance(self._executor, Joined) else wanted.world_sizes
        found = combine(wanted.engines, sizes, wanted.compile)
        if joined:  # of one process there is only what needs no launcher
            found = [one for one in found if one.world_size > 1 or one.engine == REFERENCE.engine]
        for one in found:
            reason = refusal(one, wanted.config)
            if reason:
                self._rows[one] = Row(one, "unavailable", reason=reason)
        self._check_available()
        if wanted.plant:
            self._fault.check(wanted.config, wanted.steps, wanted.resume)
            if all(one.world_size == 1 for one in found):
                raise ConfigError(f"--plant {wanted.plant} goes wrong on one of several ranks: add --world-sizes 2")
        return found

    def _check_available(self) -> None:
        missing = [row for row in self._rows.values() if row.verdict == "unavailable"]
        if missing and not self._wanted.skip_unavailable:
            reasons = "; ".join(f"{row.combination} cannot run here: {row.reason}" for row in missing)
            raise ConfigError(f"{reasons}; leave it out, or give --skip-unavailable")

    def _run_reference(self, compiled: bool) -> None:
        """Runs the single process; raises where it cannot."""
        wanted = self._wanted
        try:
            self._executor.run(reference_jobs(wanted, self._folder, self._fault, compiled=compiled))
        except RankFailed as error:
            if error.usage:
                raise ConfigError(str(error).partition(": ")[2]) from error
            raise LockstepError(f"the single process failed: {error}") from error
        self._reference = self._alone("reference")
        taken = len(self._reference["steps"])
        if taken < wanted.steps:
            raise ConfigError(f"--steps {wanted.steps}: the whole plan has {taken}; lower it, or raise --num-epochs")

    def _alone(self, key: str) -> dict[str, Any]:
        traces = read_trace(self._folder, key, 1)
        if traces is None:
            raise LockstepError("the single process left no trace; is the folder for traces shared by all nodes?")
        return traces[0]

    def _run(self, combinations: list[Combination]) -> None:
        """Rows for combinations of one world size; after a failure the rest are started again."""
        waiting = [one for one in combinations if one not in self._rows]
        while waiting:
            failure = None
            try:
                self._executor.run([self._job(one) for one in waiting])
            except RankFailed as error:
                failure = error
            while waiting:
                one = waiting.pop(0)
                traces = read_trace(self._folder, self._job(one).key, one.world_size)
                if traces is None:
                    self._rows[one] = self._failed(one, failure)
                    break
                self._rows[one] = self._row(one, traces)
        self._check_available()

    def _failed(self, one: Combination, error: RankFailed | None) -> Row:
        reason = str(error) if error else "a rank left no trace"
        return Row(one, "unavailable" if error and error.usage else "failed", reason=reason)

    def _row(self, one: Combination, traces: list[dict[str, Any]]) -> Row:
        made = self._job(one)
        reference = self._alone(made.reference)
        found = first_difference(traces_of(made, reference, traces))
        parts = [step[kind] for trace in traces for step in trace["steps"] for kind in TENSORS if kind in step]
        largest: list[Any] = max((trace["steps"][-1]["weights"]["largest"] for trace in traces), default=[0.0, ""])
        verdict = "different" if found else "equal" if all(part["equal"] for part in parts) else "close"
        return Row(one, verdict, (largest[0], largest[1]), found)

    def _job(self, one: Combination) -> Job:
        return job(self._wanted, one, self._folder, self._fault, self._reference["coarsest"])

    def _compare_with(self, given: dict[str, Any], table: Table) -> None:
        """This machine's single process against the certificate's."""
        apart = certificate.same_machine(given)
        config = self._wanted.config
        allowed = allowance(config, 1, self._reference["coarsest"], other_kernels=bool(apart))
        table.difference = certificate.against(given, self._reference, allowed)
        how = "bit for bit" if allowed.exact else "within rounding"
        other = f" (not the same: {'; '.join(apart)})" if apart else ""
        row = Row(REFERENCE, "different" if table.difference else "equal", difference=table.difference)
        found = row.text if table.difference else "it agrees"
        table.notes.append(f"against the certificate, {how}{other}: {found}")

    def _notes(self) -> list[str]:
        wanted, notes = self._wanted, []
        if wanted.resume:
            notes.append(f"each combination was saved, ended and resumed before step {wanted.resume}")
        if wanted.plant:
            moment = {"start": 0, "step": wanted.fault_step, "resume": wanted.resume, "end": wanted.steps}
            step = moment[self._fault.moment]
            notes.append(f"planted from step {step}: {self._fault.text}; to be found as: {self._fault.stage}")
        return notes


def _title(wanted: Wanted) -> str:
    config = wanted.config
    how = "every bit" if config.exact else "within the error of another order of summation (docs/verify.md)"
    return (
        f"{wanted.steps} steps of {config.batch_size} samples in {config.micro_batches} micro-batches, "
        f"{config.precision}, compared with a single process: {how}"
    )
