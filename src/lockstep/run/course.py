"""What a task's hooks may ask of a run: the record, the other ranks, what a checkpoint keeps, an early end.

course = RunCourse(session, built)
task.hooks.begins(course, built.start)
"""

from collections.abc import Mapping
from typing import Any, final

from lockstep.run.build import Built
from lockstep.run.session import Session

__all__ = ["RunCourse", "kept"]


@final
class RunCourse:
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
