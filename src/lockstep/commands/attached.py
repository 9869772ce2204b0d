"""Start a command with a recorder in its Python processes, for `trace`, `profile`, `goodput` and `report`.

check_program("trace", program)
folder, created = new_folder("one", "trace.json", {})
code = run_attached("trace", program, {"LOCKSTEP_TRACE": str(folder)})

The command keeps its output, its exit code and its signals.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.config.secrets import printable
from lockstep.errors import ConfigError
from lockstep.files import write_whole

__all__ = [
    "check_program",
    "new_folder",
    "run_attached",
]

_ATTACH = Path(__file__).parents[1] / "trace" / "attach"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TICK = 0.2  # seconds


def check_program(name: str, program: Sequence[str]) -> None:
    """Raise ConfigError if there is no command, or its program does not exist.

    Args:
        name: of lockstep's command, for the message.
    """
    if not program:
        raise ConfigError(
            f"no command after `--`: lockstep {name} {'-o DIR ' * (name == 'trace')}-- python train.py ..."
        )
    if shutil.which(program[0]) is None:
        hint = f": python {program[0]}" if program[0].endswith(".py") else ""
        raise ConfigError(
            f"lockstep {name}: program '{printable(program[0])}' not found; give a command after `--`{hint}"
        )


def new_folder(text: str, mark: str, content: Mapping[str, Any]) -> tuple[Path, bool]:
    """Create a folder with the file `mark`; return it and whether it is new.

    Raises:
        ConfigError: it is not empty, or cannot be written.
    """
    folder = Path(text).expanduser().absolute()
    try:
        created = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if any(path.name != mark for path in folder.iterdir()):
            raise ConfigError(f"--out {printable(text)} is not empty: give a new folder, it is never overwritten")
        write_whole(folder / mark, json.dumps(content) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {printable(text)}: {error.strerror or error}") from error
    return folder, created


def run_attached(
    name: str, program: Sequence[str], variables: Mapping[str, str], tick: Callable[[], None] | None = None
) -> int:
    """Run the command, forward signals to it and return its exit code; Ctrl-C reaches it from the terminal.

    A command killed by a signal gives 128 plus the signal's number, as in a shell.

    Args:
        name: of lockstep's command, for the message.
        variables: of the environment, which tell the recorder what to do.
        tick: is called several times a second while the command runs.

    Raises:
        ConfigError: the program cannot be started: a file without a first line, or of another machine.
    """
    paths = [str(_ATTACH), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        process = subprocess.Popen(program, env=environment)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"lockstep {name}: '{printable(program[0])}' cannot be started: {why}") from error

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before: dict[int, Any] = {number: signal.signal(number, forward) for number in _SIGNALS}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        while tick is not None and process.poll() is None:
            tick()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TICK)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
