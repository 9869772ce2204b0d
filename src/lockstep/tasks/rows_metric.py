"""A metric whose state is a row of tensors for each micro-batch: see `lockstep.run.stateful_metrics`."""

import copy
from typing import Any, Self

__all__ = ["RowsMetric"]


class RowsMetric:
    """What `Predictions` of a Trainer and `Epoch` of a LightningModule share: how rows are merged, copied and dropped.

    Attributes:
        several: `compute` of a subclass gives several numbers by name.
    """

    several = True

    def __init__(self) -> None:
        self._rows: list[list[Any]] = []

    @property
    def metric_state(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def merge_state(self, state: dict[str, Any]) -> None:
        """Puts the rows of another before its own."""
        self._rows = state["rows"] + self._rows

    def reset(self) -> None:
        self._rows = []

    def clone(self) -> Self:
        made = copy.copy(self)
        made._rows = list(self._rows)
        return made

    def cpu(self) -> Self:
        return self
