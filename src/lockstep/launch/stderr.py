"""Keep each rank's standard error in a file, and show it too.

    output = RankStderr("DIR", folder)    # DIR/rank-00003.err, then rank-00003.2.err, ... of later starts
    path = output.open("3")                 # for a process's stderr; "" if the file cannot be created
    output.show()                           # at each poll: new whole lines, with their rank
    output.close()                          # the rest; empty files are removed

Each rank writes to its file itself, so that what a launcher no longer shows is not lost.
"""

import contextlib
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from lockstep.distributed.progress import rank_label
from lockstep.errors import ConfigError

__all__ = ["RankStderr"]

# Bytes of a file shown at a time.
_ENOUGH = 1 << 20


class RankStderr(DefaultLogsSpecs):
    """Assigns each process its file, for torch's agent.

    Args:
        log_dir: for torch's own files.
        folder: of the ranks' files; None: their stderr is the launcher's.

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(self, log_dir: str, folder: Path | None) -> None:
        super().__init__(log_dir)
        self._folder = folder
        self._readers: list[_RankFile] = []
        if folder:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--stderr {folder}: cannot create it: {error.strerror or error}") from error

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return torch's destinations, with our files for stderr."""
        # Close the files of the processes before a restart.
        self.close()
        places: LogsDest = super().reify(envs)
        for local, environment in envs.items():
            places.stderrs[local] = self.open(environment["RANK"])
        return places

    def open(self, rank: str) -> str:
        """Create the next file of a rank, and show it from now on.

        Returns:
            Its path, or "" if it cannot be created.
        """
        if self._folder is None:
            return ""
        stem = f"rank-{int(rank):05d}"
        number = 1
        while True:
            path = self._folder / (f"{stem}.err" if number == 1 else f"{stem}.{number}.err")
            try:
                # Another node may have had this rank, in the same folder.
                with open(path, "xb"):
                    break
            except FileExistsError:
                number += 1
            except OSError as error:
                print(f"lockstep: --stderr: {path}: {error.strerror or error}", file=sys.stderr, flush=True)
                return ""
        self._readers.append(_RankFile(path, int(rank)))
        return str(path)

    def show(self) -> None:
        """Print what the ranks have written since, in whole lines."""
        for reader in self._readers:
            reader.show()

    def close(self) -> None:
        """Print the rest, and remove empty files."""
        for reader in self._readers:
            reader.close()
        self._readers = []


def _write(text: bytes) -> None:
    # A closed terminal must not end the run.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
        sys.stderr.buffer.write(text)
        sys.stderr.flush()


class _RankFile:
    """The launcher's place in a rank's file."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        # Rank 0's lines have no label, as in the log.
        self._label = f"{rank_label(rank)}: ".encode() if rank else b""
        self._rest = b""

    def show(self, *, is_last: bool = False) -> None:
        new = b""
        # The storage may not answer. The file keeps the text, so only the display is late.
        with contextlib.suppress(OSError):
            new = self._file.read(_ENOUGH) or b""
        *lines, self._rest = (self._rest + new).split(b"\n")
        # Keep a partial line until its end arrives, unless it is the last or very long.
        if self._rest and (is_last or len(self._rest) > _ENOUGH):
            lines = [*lines, self._rest]
            self._rest = b""
        if lines:
            labelled = (line if line.startswith(self._label) else self._label + line for line in lines)
            _write(b"".join(line + b"\n" for line in labelled))

    def close(self) -> None:
        while True:
            before = self._file.tell()
            self.show()
            if self._file.tell() == before:
                break
        self.show(is_last=True)
        self._file.close()
        with contextlib.suppress(OSError):
            if not self._path.stat().st_size:
                self._path.unlink()
