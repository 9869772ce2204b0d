"""Set up the log: a file per rank in the run's folder, and stderr.

    logger = open_log(folder, rank=0, stderr=True)
    logger.info("training starts")    # 2026-03-01T12:00:00.000+00:00 rank 0 INFO training starts
    close_log()

Everything goes to the logger named "lockstep" and its children; the root logger belongs to the calling program and is
not changed. Secrets are masked in the formatted text, so that no argument or traceback bypasses it.
"""

import logging
import sys
from datetime import UTC, datetime
from pathlib import Path

from lockstep.config.secrets import mask, printable
from lockstep.distributed.progress import rank_label
from lockstep.errors import name_settings

__all__ = [
    "close_log",
    "open_log",
]


# Attribute of a log record with its final text.
_MESSAGE = "lockstep_message"


def open_log(folder: Path, rank: int, stderr: bool = True) -> logging.Logger:
    """Log to `folder`/logs/rank-00000.log (appended) and, if asked, to stderr.

    On stderr rank 0 shows INFO and above, other ranks WARNING and above with their rank; a record with
    `extra={"only_file": True}` is not shown there. A second call closes what the first opened.

    Args:
        folder: the run's folder.
        rank: this process's rank.
        stderr: log to stderr too.

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
    # A handler of the root logger would show each line again, unmasked.
    logger.propagate = False
    return logger


def close_log() -> None:
    """Undo `open_log`: close the files and restore the logger. Safe to call twice."""
    logger = logging.getLogger("lockstep")
    handlers = []
    for handler in logger.handlers:
        if isinstance(handler, _File | _Stderr):
            handlers.append(handler)
    for handler in handlers:
        logger.removeHandler(handler)
        handler.close()
    if handlers:
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def _message_of(record: logging.LogRecord) -> str:
    """Return the message, masked and printable; made once for all handlers."""
    # Masking is slow, so the text is stored in the record for the next handler.
    text = vars(record).get(_MESSAGE)
    if text is None:
        text = vars(record)[_MESSAGE] = printable(mask(name_settings(record.getMessage())))
    return str(text)


class _FileLines(logging.Formatter):
    """Format with date and UTC offset, rank and level before every line, tracebacks included."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        lines = [_message_of(record)]
        if record.exc_info:
            for line in mask(self.formatException(record.exc_info)).split("\n"):
                lines.append(printable(line))
        if record.stack_info:
            for line in mask(record.stack_info).split("\n"):
                lines.append(printable(line))
        return "\n".join(f"{when} rank {self._rank} {record.levelname} {line}" for line in lines)


class _TerminalLine(logging.Formatter):
    """Format for the terminal: level only for warnings, rank only if not 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            level = f"{record.levelname.lower()}: "
        else:
            level = ""
        prefix = f"{rank_label(self._rank)}: " if self._rank else ""
        return f"{prefix}{level}{_message_of(record)}"


class _File(logging.FileHandler):
    """Handler of the rank's file. The first failed write is reported on stderr."""

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
        except OSError as error:
            # A full disk may still refuse lines that are buffered.
            self._report(error)

    def _report(self, error: BaseException | None) -> None:
        if not self._failed and sys.stderr is not None:
            print(printable(mask(f"{self._path} is incomplete: {type(error).__name__}: {error}")), file=sys.stderr)
        self._failed = True


class _Stderr(logging.Handler):
    """Handler that prints to the current sys.stderr, which a progress bar replaces."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.WARNING if rank else logging.INFO)
        self.setFormatter(_TerminalLine(rank))
        self.addFilter(lambda record: not getattr(record, "only_file", False))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            # The terminal is closed, or the message cannot be formatted.
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: without stderr there is nowhere to report it."""
