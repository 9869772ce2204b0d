"""The log: one file a rank, in the run's folder, and what a person should see on stderr.

    logger = open_log(folder, rank=0, stderr=True)
    logger.info("training starts")    # 2026-03-01T12:00:00.000+00:00 rank 0 INFO training starts
    close_log()

Everything goes to the logger named "lockstep" and its children; the root logger, which belongs to the program that
calls lockstep, is left alone. Secrets are masked in the finished text, so that no argument or traceback goes around it.
"""

import logging
import sys
from datetime import UTC, datetime
from pathlib import Path

from lockstep.config.secrets import mask, printable
from lockstep.distributed.progress import rank_label
from lockstep.errors import said

__all__ = [
    "close_log",
    "open_log",
]


def open_log(folder: Path, rank: int, stderr: bool = True) -> logging.Logger:
    """Sends the logger "lockstep" to `folder`/logs/rank-00000.log (appended) and, where asked, to stderr.

    On stderr rank 0 shows INFO and above, other ranks WARNING and above with their rank; a record with
    `extra={"only_file": True}` is not shown there. Called again, it closes what
    it opened before.

    Args:
        folder: the run's folder.
        rank: this process's rank.

    Raises:
        OSError: the file cannot be opened.
    """
    close_log()
    path = folder / "logs" / f"rank-{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("lockstep")
    logger.addHandler(_File(path, rank))
    if stderr:
        logger.addHandler(_Stderr(rank))
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a root handler would show each line again, unmasked
    return logger


def close_log() -> None:
    """Undoes `open_log`: files closed, the logger as it was. Does nothing where nothing is open."""
    logger = logging.getLogger("lockstep")
    ours = [handler for handler in logger.handlers if isinstance(handler, _File | _Stderr)]
    for handler in ours:
        logger.removeHandler(handler)
        handler.close()
    if ours:
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


class _FileLines(logging.Formatter):
    """Date and time with UTC offset, rank and level in front of every line, those of a traceback too."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        lines = [printable(mask(said(record.getMessage())))]
        if record.exc_info:
            lines += [printable(line) for line in mask(self.formatException(record.exc_info)).split("\n")]
        if record.stack_info:
            lines += [printable(line) for line in mask(record.stack_info).split("\n")]
        return "\n".join(f"{when} rank {self._rank} {record.levelname} {line}" for line in lines)


class _PersonLine(logging.Formatter):
    """One line a record for a person: no date, the level only where something is wrong, the rank only if not 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        who = f"{rank_label(self._rank)}: " if self._rank else ""
        return f"{who}{level}{printable(mask(said(record.getMessage())))}"


class _File(logging.FileHandler):
    """Appends to the rank's file. The first write that fails is reported on stderr; training goes on."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(_FileLines(rank))
        self._path = path
        self._failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        self._report(sys.exc_info()[1])

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # lines that a full disk still refuses
            self._report(error)

    def _report(self, error: BaseException | None) -> None:
        if not self._failed and sys.stderr is not None:
            print(printable(mask(f"{self._path} misses lines: {type(error).__name__}: {error}")), file=sys.stderr)
        self._failed = True


class _Stderr(logging.Handler):
    """Prints to whatever sys.stderr is when the record comes: a progress bar puts its own in place."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.WARNING if rank else logging.INFO)
        self.setFormatter(_PersonLine(rank))
        self.addFilter(lambda record: not getattr(record, "only_file", False))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # a closed terminal, or a message that does not format
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: with stderr gone there is nowhere to say so."""
