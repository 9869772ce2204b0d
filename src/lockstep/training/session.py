"""Hold the state of a run, and give a task's hooks access to it.

    context = HookContext(session, built)
    task.hooks.before_run(context, built.start)

Hooks may log, gather over the ranks, store state in checkpoints and stop the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.checkpoint import Saver
from lockstep.checkpoint.upload import Uploader
from lockstep.config.schema import Config
from lockstep.distributed.exchange import CONTINUE, StepExchange
from lockstep.distributed.membership import Member
from lockstep.distributed.world import World
from lockstep.errors import LockstepError
from lockstep.logging import Sinks
from lockstep.records import Best, EvaluationRecord, Step
from lockstep.run_state import RunState
from lockstep.timeline import Timeline
from lockstep.training.build import RunParts
from lockstep.training.selection import Criterion, select_value

__all__ = [
    "HookContext",
    "ReadNumbers",
    "Session",
    "hook_state",
]


ReadNumbers = Callable[[Step], tuple[float, dict[str, float]]]


class PendingStop:
    """The strongest stop request of a signal while no exchange can pass it on."""

    def __init__(self) -> None:
        self.request = CONTINUE

    def stop(self, stop_request: int) -> None:
        """Request a stop, as `StepExchange.stop` does."""
        self.request = max(self.request, stop_request)


@dataclass
class Session:
    """State of a run, from its start to after its end.

    Attributes:
        caller_task: the task that the caller passed, or None.
        caller_world: the world that the caller passed, or None.
        built: the run's parts; None before and after.
        caller_objects: objects that the caller stores in checkpoints, by name.
        initial_tensors: initial values of the tensors of these objects and of the task.
        current_step: the step whose loop body runs.
        reader: reads the loss and the numbers of that step.
        wants_stop: the caller asked to stop in this loop body.
        abandoned: the caller asked to end without a save.
        has_body: the caller loops over the steps.
        world: the current process groups.
        member: this process in a run that survives lost ranks; None: a lost rank ends the run.
        exchange, saver: of the current ranks; None between two groups.
        last_rank_loss: text of the last error that reported a lost rank.
        timed_out: this process waited for the others nearly all of `--timeout`.
        digest: hash of what must be equal on all members.
        pending_stop: stop request of a signal while there is no exchange.
        evaluated_step: step of the last evaluation; -1: none.
        regroup_tries: attempts to form new groups since the last step.
        save_due: a checkpoint up to the current step was lost with a rank.
        timeline: records where the time goes.
        lost_ranks: a line for each rank that this start of the run lost.
        initial_ranks: number of ranks before the first loss.
            losses: ranks lost over all starts that were noticed here; a checkpoint may be from before it.
        uploader: to the run's object store, on the first rank of each folder; it outlives a rollback.
        min_steps: minimum length of the plan; epochs are added to reach it.
        cut: of a step, as the last build chose it: `resume.FIXED` or `BY_RANKS`; "": nothing is built yet.
        trial_cut: why the trial needs smaller micro-batches, until the folder records it; "": it does not.
    """

    config: Config
    caller_task: Any
    caller_world: World | None
    status: str = "new"
    exit_code: int = 0
    built: RunParts | None = None
    sinks: Sinks = field(default_factory=lambda: Sinks([]))
    model: nn.Module | None = None
    caller_objects: dict[str, Any] = field(default_factory=dict)
    initial_tensors: dict[str, Tensor] = field(default_factory=dict)
    current_step: Step | None = None
    reader: ReadNumbers | None = None
    wants_stop: bool = False
    abandoned: bool = False
    has_body: bool = True
    is_main: bool = True
    global_step: int = 0
    evaluation: EvaluationRecord | None = None
    best: Best | None = None
    world: World | None = None
    member: Member | None = None
    exchange: StepExchange | None = None
    saver: Saver | None = None
    last_rank_loss: str = ""
    timed_out: bool = False
    digest: str = ""
    pending_stop: PendingStop = field(default_factory=PendingStop)
    evaluated_step: int = -1
    regroup_tries: int = 0
    save_due: bool = False
    timeline: Timeline = field(default_factory=Timeline)
    min_steps: int = 0
    lost_ranks: list[str] = field(default_factory=list)
    initial_ranks: int = 0
    losses: int = 0
    uploader: Uploader | None = None
    cut: str = ""
    trial_cut: str = ""

    @property
    def early_status(self) -> str:
        """The status of a run whose loop the caller leaves early."""
        if self.abandoned:
            return "abandoned"
        return "stopped"

    def copy_initial_tensors(self, own: dict[str, Tensor]) -> None:
        """Copy the initial values of `own` if the run may go back to its start."""
        guards = self.config.guards
        if self.member or "rollback" in (guards.nonfinite, guards.spike) or self.config.on_oom == "smaller":
            self.initial_tensors |= {name: tensor.detach().clone() for name, tensor in own.items()}

    def restore_initial_tensors(self, built: RunParts) -> None:
        """Restore the initial values for a rollback without a checkpoint."""
        tensors = built.own_tensors
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(self.initial_tensors[name])
        built.load_state_dict(tensors)

    def read_numbers(self, step: Step) -> tuple[float, dict[str, float]]:
        """Read the loss and the numbers of `step` while its loop body runs.

        A `Step` holds this method and not the run: a caller that keeps steps must not keep the model alive.

        Raises:
            LockstepError: the next step has begun, or the run has ended.
        """
        if self.reader is None or self.current_step is not step:
            raise LockstepError(
                f"the loss of step {step.global_step} is no longer available; read step.loss in the loop body of its "
                "own step"
            )
        return self.reader(step)


@final
class HookContext:
    """Access of a task's hooks to the run, as `lockstep.hooks.RunContext`."""

    def __init__(self, session: Session, built: RunParts) -> None:
        self._session = session
        self._built = built
        self.state: dict[str, Any] = hook_state(built.state)
        self.log_freq: int = built.config.log_freq

    def log(self, values: Mapping[str, float]) -> None:
        if self._session.is_main and values:
            self._session.sinks.log({"global_step": self._session.global_step, **values})

    def gather(self, value: Any) -> list[Any]:
        # For the task's hooks, which every rank runs.
        return self._built.world.gather(value)

    def stop(self) -> None:
        self._session.wants_stop = True

    def compare(self, metric: str, value: float, *, higher: bool) -> bool:
        built = self._built
        step = self._session.global_step
        return select_value(built.state.selection, Criterion(metric, 1 if higher else -1, 0.0), step, value)

    @property
    def best(self) -> Best | None:
        update_best(self._session)
        return self._session.best


def hook_state(state: RunState) -> dict[str, Any]:
    """Return the hooks' own part of a run's state, made if missing."""
    if state.hooks is None:
        state.hooks = {}
    return state.hooks


def update_best(session: Session) -> None:
    """Set the session's best evaluation from the run's state."""
    built = session.built
    best = built.state.selection.best if built else None
    if built and best:
        path = checkpoint.path_of(built.folder.path, best.step)
        # An earlier start of the run may have written it.
        exists = built.config.checkpoint.mode != "none" or path.is_dir()
        session.best = Best(best.step, best.loss, str(path) if exists else "", best.metric, best.metric_value)
