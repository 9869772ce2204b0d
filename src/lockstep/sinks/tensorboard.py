"""TensorBoard events in the run's folder: `lockstep train --tensorboard`, then `tensorboard --logdir outputs`.

The only file that needs the package `tensorboard` (through torch's own writer).
"""

import json
from pathlib import Path
from typing import Any, final

from lockstep.config.secrets import mask

__all__ = ["TensorBoard"]


@final
class TensorBoard:
    """Writes each number of a record as a scalar at its global_step.

    Args:
        folder: where the event files lie; made by `start`.
        resume_step: steps taken before. Readers then hide the events of later steps, which will run again.
    """

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        self._folder, self._resume_step = folder, resume_step
        self._writer: Any = None

    def start(self, info: dict[str, Any]) -> None:
        """Opens a new event file, beside those of earlier starts, and writes `info` as text.

        Raises:
            ImportError: the package is missing.
            OSError: the folder cannot be written.
        """
        from torch.utils.tensorboard import SummaryWriter

        purge = self._resume_step + 1 if self._resume_step else 0  # where a run begins again, all that was before
        self._writer = SummaryWriter(self._folder, purge_step=purge)
        text = mask(json.dumps(info, indent=1, default=str))
        self._writer.add_text("run", f"```\n{text}\n```", self._resume_step)

    def log(self, record: dict[str, Any]) -> None:
        """Writes the record's numbers; the writer's own thread brings them to the disk."""
        step = int(record["global_step"])
        for name, value in record.items():
            if name != "global_step" and not isinstance(value, str | None):
                self._writer.add_scalar(name, value, step)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Flushes and closes the file."""
        if self._writer is not None:
            self._writer.close()
