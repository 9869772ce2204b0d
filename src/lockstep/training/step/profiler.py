"""Trace the steps of `--profile 100:110` on every rank, and analyse the traces.

    profiler = StepProfiler(built, make_clock(device), step_loader)     # train with profiler.clock
    with profiler:
        profiler.after(start)
        for step in ...:
            profiler.after(step)                # after each step, on every rank
        profiler.end()                          # writes a trace that the run's end cuts short

Each rank writes RUN/profile/100-110/rank-R.json.gz, and rank 0 writes verdict.json there. Without `--profile` nothing
is traced or marked. No number of a run depends on it. The costs that the verdict needs (optimizer, pages, events,
threads, batches from loader processes) are measured by `StepTrace`.
"""

import logging
import os
import time
from pathlib import Path
from typing import Any, Self

from lockstep.clock import Clock, MarkingClock
from lockstep.config.engine_options import ENGINES, own_options
from lockstep.config.fields import parse_profile
from lockstep.data.batches import StepLoader
from lockstep.diagnose.profile.reading import ProfileTrace, ProfileTraceError, read
from lockstep.diagnose.profile.tracing import StepTrace
from lockstep.diagnose.profile.verdict import ProfileVerdict, judge
from lockstep.distributed.progress import rank_label
from lockstep.engines.registry import name_of
from lockstep.errors import ConfigError
from lockstep.training.state.parts import RunParts

__all__ = [
    "StepProfiler",
    "check_range",
]


_LOG = logging.getLogger("lockstep")


def _folder_of(built: RunParts) -> Path:
    """Return the folder of the traces."""
    start, end = parse_profile(built.config.profile) or (0, 0)
    return built.setup.folder.path / "profile" / f"{start}-{end}"


def check_range(built: RunParts) -> None:
    """Raise ConfigError if `--profile` ends after the run, or its folder is not writable."""
    span = parse_profile(built.config.profile)
    total = built.run_plan.step_plan.steps
    if span is None:
        return
    if span[1] > total:
        raise ConfigError(
            f"--profile {built.config.profile} ends after the run, which has {total} steps; choose earlier steps"
        )
    if not built.world.is_main or span[1] <= built.start:
        return
    folder = _folder_of(built)
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--profile: cannot write to {parent}; make it writable, or leave --profile out")


class StepProfiler:
    """Profiler of the steps of `--profile`. Its constructor is not collective.

    Attributes:
        clock: the clock to train with: the constructor's, with marks for the trace if there is one.
    """

    def __init__(self, built: RunParts, clock: Clock, step_loader: StepLoader) -> None:
        self._built = built
        self._step_loader = step_loader
        self._span = parse_profile(built.config.profile)
        self._marks = MarkingClock(clock) if self._span else None
        self.clock: Clock = self._marks or clock
        self._trace = StepTrace(built.world.device, built.world.size, self._marks) if self._marks else None
        # The last step that finished.
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop an unfinished trace."""
        if self._trace is not None:
            self._trace.drop()

    def after(self, done: int) -> float:
        """Start or end the trace if that is due after `done` steps.

        Collective after the last step of the trace.

        Returns:
            The seconds that this took.
        """
        trace = self._trace
        if trace is None or self._span is None or done > self._span[1]:
            return 0.0
        start = time.perf_counter()
        first_step, last_step = self._span
        present = self._step_loader.present
        # A trace is in progress: note the samples of this step.
        if trace.first:
            self._done = done
            trace.note_traced((batch.held, batch.items) for batch in present if batch.weight)
        if done < first_step - 1:
            trace.note_untraced()
        if done == last_step:
            self.end()
        elif done >= first_step - 2 and not trace.is_prepared:
            # torch's profiler warms up in the step before the trace.
            parameters = sum(p.numel() for p in self._built.model.parameters() if p.requires_grad)
            if self._built.config.data.workers:
                batches = []
            else:
                batches = [batch.held for batch in present[:1]]
            trace.prepare(parameters, batches)
        if first_step - 1 <= done < last_step and not trace.first:
            trace.begin(done + 1)
        return time.perf_counter() - start

    def end(self) -> None:
        """Write the trace in progress, if there is one. Collective then."""
        if self._trace is None or not self._trace.first:
            return
        if self._done >= self._trace.first:
            self._finish(self._trace)
        else:
            # The trace has no step.
            self._trace.drop()

    def _finish(self, trace: StepTrace) -> None:
        """Write, read and analyse the traces. Collective.

        If the file system refuses, there is no verdict, and the run continues.
        """
        world = self._built.world
        packed = dict[str, Any]()
        problem = ""
        path = _folder_of(self._built) / f"rank-{world.rank}.json.gz"
        try:
            trace.stop(path, self._done, world.rank, self._facts())
            packed = read(path).packed
        except (OSError, RuntimeError, ProfileTraceError) as error:
            problem = f"{rank_label(world.rank)}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        # Rank 0 analyses the traces of all ranks.
        results = world.gather([packed, problem])
        problems = [entry for _, entry in results if entry]
        if world.is_main:
            if problems:
                _LOG.warning("--profile %s: no verdict: %s", self._built.config.profile, problems[0])
            else:
                self._log_verdict(judge([ProfileTrace.unpack(entry) for entry, _ in results]), path.parent)

    def _log_verdict(self, verdict: ProfileVerdict, folder: Path) -> None:
        for line in str(verdict).splitlines():
            _LOG.info("%s", line)
        try:
            verdict.write(folder)
            _LOG.info("traces for https://ui.perfetto.dev and verdict.json: %s", folder)
        except OSError as error:
            _LOG.warning("--profile: %s: %s", folder, error.strerror or error)

    def _facts(self) -> dict[str, Any]:
        """Return the facts of the run that the verdict needs."""
        built = self._built
        config = self._built.config
        engine = name_of(config.engine, built.world)
        trained = [p for p in built.model.parameters() if p.requires_grad]
        return {
            "micro_batches": config.micro_batches,
            "micro_batch_size": config.micro_size,
            "slots": len(self._step_loader.present),
            "engine_options": own_options(engine),
            "shares": ENGINES[engine].shares,
            "gradient_bytes": sum(p.numel() * p.element_size() for p in trained),
            "parameters": sum(p.numel() for p in trained),
            "options": built.arguments,
        }
