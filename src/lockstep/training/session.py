"""What a task's hooks may ask of a run: the record, the other ranks, what a checkpoint keeps, an early end.

course = RunCourse(session, built)
task.hooks.begins(course, built.start)
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
from lockstep.training.build import Built

__all__ = [
    "HookContext",
    "ReadNumbers",
    "Session",
    "Wishes",
    "kept",
]


ReadNumbers = Callable[[Step], tuple[float, dict[str, float]]]


class Wishes:
    """What signals ask for while there is no exchange that could be told."""

    def __init__(self) -> None:
        self.request = CONTINUE

    def stop(self, stop_request: int) -> None:
        """As `StepExchange.stop`."""
        self.request = max(self.request, stop_request)


@dataclass
class Session:
    """What a run knows of itself while it goes on, and what is left of it.

    Attributes:
        given, world: the task and the world that the caller gave, or None.
        built: the run as it is built now; None before and after.
        kept: the caller's own objects with tensors that a checkpoint keeps, by name; `first`: what these began with.
        present: the step whose body runs, and `reader`, which reads its loss and its numbers.
        wants_stop: the caller asked for the end in the present body.
        abandoned: the caller asked for the end without a save.
        has_body: the caller has a loop of their own around the steps.
        joined: the present world.
        member: this process as a member of a run that outlives the loss of a rank; None: a loss ends the run.
        exchange, saver: those of the present ranks, while there are any.
        lost: the last error that said that a rank is gone; waited: the others had all of `--timeout` to come.
        digest: of what must be the same on all members.
        wishes: what signals ask for while there is no exchange.
        evaluated: the step after which the last evaluation was made.
        tries: how often new groups were formed since the last step.
        save_due: the checkpoint of the present step, or one before it, was lost with a rank.
        timeline: where the time goes.
        losses: a line for each rank that this start of the run lost; `began_on`: its ranks before the first.
        least_steps: that the plan is to have, by going on through further epochs.
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
        """Return the status of a run whose loop was left."""
        return "abandoned" if self.abandoned else "stopped"

    def note_first(self, own: dict[str, Tensor]) -> None:
        """Notes what the task's tensors, or those of what is kept, begin with, where a run may go back to its start."""
        if self.member or "rollback" in (self.config.guards.nonfinite, self.config.guards.spike):
            self.first |= {name: tensor.detach().clone() for name, tensor in own.items()}

    def go_back_to_first(self, built: Built) -> None:
        """Gives them these values again: everything else is made anew, where there is no checkpoint to go back to."""
        own = built.own
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self.first[name])
        built.load_state_dict(own)

    def read_numbers(self, step: Step) -> tuple[float, dict[str, float]]:
        """The loss of `step` and its numbers, while its body runs.

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
    """See `lockstep.hooks.Course`."""

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


def kept(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a run's state that is its task's hooks'."""
    found: dict[str, Any] = state.setdefault("hooks", {})
    return found
