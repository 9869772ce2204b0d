"""Steps that are not to be applied, and the way back to a checkpoint from before them.

    skips = Skips(folder)
    skips.add(412)                          # at most `limit` in a run
    engine = skips.around(engine, start)    # drops the gradients of those steps
    raise Rollback(412)                     # run.py starts again from the newest checkpoint

The list stands in the run's folder (skips.json), since the checkpoint gone back to does not know of it.
"""

import contextlib
import json
import os
import secrets
from contextlib import AbstractContextManager
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from lockstep.checkpoint.files import refusal, write_file
from lockstep.engines.base import Engine, StepResult
from lockstep.errors import LockstepError

__all__ = ["Rollback", "Skips"]


class Rollback(LockstepError):
    """The run goes back to its newest checkpoint, and will leave out the step that is named."""


class Skips:
    """The steps that are left out of a run. Every rank holds the same list; rank 0 writes it.

    Args:
        path: of the file; what is in it is taken over.
        limit: how many steps may be left out in all.
        writes: whether this rank writes.
    """

    def __init__(self, path: Path, limit: int, writes: bool) -> None:
        self._path, self._limit, self._writes = path, limit, writes
        self.steps: list[int] = []
        with contextlib.suppress(OSError, ValueError, TypeError):
            self.steps = [int(step) for step in json.loads(path.read_text(encoding="utf-8"))]

    def add(self, step: int, why: str) -> None:
        """Leaves `step` out from now on.

        Raises:
            LockstepError: that would be one too many, or the file cannot be written.
        """
        if step not in self.steps:
            if len(self.steps) >= self._limit:
                raise LockstepError(
                    f"{why}; {self._limit} steps were left out before (--guards.limit): lower --lr or clean the data"
                )
            self.steps.append(step)
            if self._writes:
                self._write()

    def _write(self) -> None:
        part = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            write_file(part, [json.dumps(self.steps).encode() + b"\n"])
            os.replace(part, self._path)  # whole or not at all: without it a rollback would meet the step again
        except OSError as error:
            part.unlink(missing_ok=True)
            raise LockstepError(refusal(error)) from error

    def around(self, engine: Engine, start: int) -> Engine:
        """The engine, its updates left out in these steps; itself where there are none to come."""
        coming = frozenset(step for step in self.steps if step >= start)
        return _Skipping(engine, coming, start) if coming else engine


@final
class _Skipping:
    """An engine that applies no update in some steps; `step` is called once a step from `start` on."""

    def __init__(self, inner: Engine, steps: frozenset[int], start: int) -> None:
        self.model: nn.Module = inner.model
        self._inner, self._steps, self._next = inner, steps, start

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return self._inner.accumulate(last)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._inner.backward(loss, weight)

    def step(self, factor: float) -> StepResult:
        self._next += 1
        if self._next - 1 not in self._steps:
            return self._inner.step(factor)
        for parameter in self.model.parameters():
            parameter.grad = None
        return StepResult(torch.zeros(()), False)

    def state(self) -> dict[str, Tensor]:
        return self._inner.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        self._inner.restore(state)
