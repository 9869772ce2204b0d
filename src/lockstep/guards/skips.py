"""Steps that are not to be applied, and the way back to a checkpoint from before them.

    skips = Skips(folder / "checkpoints" / "skips.json", limit, world, plan)
    skips.add(412, "why")                   # at most `limit` in a run
    412 in skips.steps                      # the loop's limit for it is -inf: the engine leaves it out
    raise Rollback("why")                   # run.py starts again from the newest checkpoint

The list stands beside the checkpoints, since the one that is gone back to does not know of it: whoever moves them away
moves it too.
"""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from lockstep.checkpoint.files import refusal_error
from lockstep.distributed.world import World
from lockstep.errors import LockstepError
from lockstep.files import retry_io, write_whole

__all__ = ["Rollback", "Skips"]


class Rollback(LockstepError):
    """The run goes back to its newest checkpoint, and will leave out the step that is named."""


class Skips:
    """The steps that are left out of a run. Rank 0 reads and writes the file, and tells the others.

    Args:
        path: of the file; what is in it is taken over where it was written for the same plan.
        limit: how many steps may be left out in all.
        world: its ranks make one together, and call `add` together.
        plan: what the steps' numbers mean: a run with another one has other steps.

    Attributes:
        steps: in the order in which they were found.
    """

    def __init__(self, path: Path, limit: int, world: World, plan: dict[str, Any]) -> None:
        self._path, self._limit, self._world = path, limit, world
        self._plan = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]
        self.steps: list[int] = world.gather(self._read() if world.is_main else [])[0]  # collective

    def add(self, step: int, why: str) -> None:
        """Leaves `step` out from now on. Collective.

        Raises:
            LockstepError: that would be one too many, or the file cannot be written.
        """
        if step in self.steps:
            return
        if len(self.steps) >= self._limit:
            raise LockstepError(
                f"{why}; {self._limit} steps were left out before (--guards.limit): lower --lr or clean the data"
            )
        self.steps.append(step)
        error = self._write() if self._world.is_main else None
        self._world.check(error)  # collective

    def _read(self) -> list[int]:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            found = json.loads(retry_io(lambda: self._path.read_text(encoding="utf-8")))
            if found["plan"] == self._plan:
                return [int(step) for step in found["steps"]]
        return []

    def _write(self) -> LockstepError | None:
        try:  # whole or not at all: without it a rollback would meet the step again
            write_whole(self._path, json.dumps({"steps": self.steps, "plan": self._plan}) + "\n")
        except OSError as error:
            return refusal_error(error)
        return None
