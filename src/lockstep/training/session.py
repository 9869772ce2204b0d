"""State of a run in progress, and what a task's hooks may do with it.

    context = HookContext(session, built)
    task.hooks.before_run(context, built.start)

Hooks may log, gather over the ranks, store state in checkpoints and stop the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.checkpoint import Saver
from lockstep.config.schema import Config
from lockstep.distributed.exchange import CONTINUE, StepExchange
from lockstep.distributed.membership import Member
from lockstep.distributed.world import World
from lockstep.errors import LockstepError
from lockstep.logging import Sinks
from lockstep.records import Best, EvaluationRecord, Step
from lockstep.report.goodput import Timeline
from lockstep.run_state import RunState
from lockstep.training.build import Built

__all__ = [
    "HookContext",
    "ReadNumbers",
    "Session",
    "kept",
]


ReadNumbers = Callable[[Step], tuple[float, dict[str, float]]]


class Wishes:
    """Stop requests of signals, while there is no exchange to pass them on."""

    def __init__(self) -> None:
        self.request = CONTINUE

    def stop(self, stop_request: int) -> None:
        """Request a stop, as `StepExchange.stop`."""
        self.request = max(self.request, stop_request)


@dataclass
class Session:
    """State of a run, while it goes on and after it.

    Attributes:
        given: the task that the caller passed, or None.
        world: the world that the caller passed, or None.
        built: the run's current parts; None before and after.
        kept: the caller's own objects with tensors to store in checkpoints, by name.
        first: the tensors' initial values, of these objects and of the task.
        present: the step whose body runs.
        reader: reads that step's loss and numbers.
        wants_stop: the caller requested the end in the current body.
        abandoned: the caller requested the end without a save.
        has_body: the caller has their own loop around the steps.
        joined: the current world.
        member: this process as a member of a run that survives lost ranks; None: a loss ends the run.
        exchange, saver: those of the current ranks, while there are any.
        lost: the last error that reported a lost rank.
        waited: whether this process waited for the others for all of `--timeout`.
        digest: hash of what must be equal on all members.
        wishes: stop requests of signals, while there is no exchange.
        evaluated: the step of the last evaluation.
        tries: how often new groups were formed since the last step.
        save_due: the checkpoint of the current step, or one before it, was lost with a rank.
        timeline: records where the time goes.
        losses: a line for each rank that this start of the run lost.
        began_on: number of ranks before the first loss.
        least_steps: minimum length of the plan; further epochs are added to reach it.
    """

    config: Config
    given: Any
    world: World | None
    status: str = "new"
    exit_code: int = 0
    built: Built | None = None
    sinks: Sinks = field(default_factory=lambda: Sinks([]))
    model: nn.Module | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    present: Step | None = None
    reader: ReadNumbers | None = None
    wants_stop: bool = False
    abandoned: bool = False
    has_body: bool = True
    is_main: bool = True
    global_step: int = 0
    evaluation: EvaluationRecord | None = None
    best: Best | None = None
    joined: World | None = None
    member: Member | None = None
    exchange: StepExchange | None = None
    saver: Saver | None = None
    lost: str = ""
    waited: bool = False
    digest: str = ""
    wishes: Wishes = field(default_factory=Wishes)
    evaluated: int = -1
    tries: int = 0
    save_due: bool = False
    timeline: Timeline = field(default_factory=Timeline)
    least_steps: int = 0
    losses: list[str] = field(default_factory=list)
    began_on: int = 0

    @property
    def status_when_left(self) -> str:
        """The status of a run whose loop the caller left."""
        return "abandoned" if self.abandoned else "stopped"

    def note_first(self, own: dict[str, Tensor]) -> None:
        """Copy these tensors' initial values, if the run may go back to its start."""
        if self.member or "rollback" in (self.config.guards.nonfinite, self.config.guards.spike):
            self.first |= {name: tensor.detach().clone() for name, tensor in own.items()}

    def go_back_to_first(self, built: Built) -> None:
        """Restore the initial values, for a rollback without a checkpoint.

        Everything else is built again.
        """
        own = built.own
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self.first[name])
        built.load_state_dict(own)

    def read_numbers(self, step: Step) -> tuple[float, dict[str, float]]:
        """Read the loss of `step` and its numbers, while its body runs.

        A step that the caller keeps must not keep the run alive: it holds only this method.

        A step that is kept must not keep the run: it has this alone.

        Raises:
            LockstepError: the next step has begun, or the run has ended.
        """
        if self.reader is None or self.present is not step:
            raise LockstepError(
                f"the loss of step {step.global_step} was not read before the next step began, and is not kept; read "
                "step.loss in the body of its own step"
            )
        return self.reader(step)


@final
class HookContext:
    """Implementation of `lockstep.hooks.RunContext`."""

    def __init__(self, session: Session, built: Built) -> None:
        self._session, self._built = session, built
        self.state: dict[str, Any] = kept(built.state)
        self.log_freq: int = built.config.log_freq

    def log(self, values: Mapping[str, float]) -> None:
        if self._session.is_main and values:
            self._session.sinks.log({"global_step": self._session.global_step, **values})

    def gather(self, value: Any) -> list[Any]:
        return self._built.world.gather(value)  # collective

    def stop(self) -> None:
        self._session.wants_stop = True


def kept(state: RunState) -> dict[str, Any]:
    """Return the part of a run's state that belongs to its task's hooks."""
    if state.hooks is None:
        state.hooks = {}
    return state.hooks
