"""Start a command with a recorder in its Python processes.

`trace`, `profile`, `goodput` and `report` use it.

check_program("trace", program)
folder, created = new_folder("one", "trace.json", {})
code = run_attached("trace", program, {"LOCKSTEP_TRACE": str(folder)}).code

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
from typing import Any, NamedTuple

from lockstep.config.secrets import printable
from lockstep.errors import ConfigError
from lockstep.files import write_whole

__all__ = [
    "Exit",
    "check_program",
    "new_folder",
    "run_attached",
]

# Python imports the `sitecustomize` of this folder when it starts, which attaches the recorder.
_ATTACH = Path(__file__).parents[1] / "trace" / "attach"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Seconds between two calls of `tick`.
_TICK = 0.2


class Exit(NamedTuple):
    """Outcome of a command.

    Attributes:
        code: its exit code; 128 plus the signal's number if a signal killed it, as in a shell.
        interrupted: Ctrl-C was pressed.
    """

    code: int
    interrupted: bool


def check_program(name: str, program: Sequence[str]) -> None:
    """Raise ConfigError if there is no command, or its program does not exist.

    Args:
        name: of lockstep's command, for the message.
    """
    if not program:
        flags = "-o DIR " if name == "trace" else ""
        raise ConfigError(f"no command after `--`: lockstep {name} {flags}-- python train.py ...")
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
) -> Exit:
    """Run the command, and forward signals to it; Ctrl-C reaches it from the terminal.

    Args:
        name: of lockstep's command, for the message.
        variables: of the environment, which configure the recorder.
        tick: is called several times a second while the command runs.

    Raises:
        ConfigError: the program cannot be started: a file without a first line, or of another machine.
    """
    # First on the path, so that the recorder is found before a sitecustomize of the environment.
    paths = [str(_ATTACH), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    processes: list[subprocess.Popen[bytes]] = []
    # Signals that came before the process existed.
    early: list[int] = []
    interrupts: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)
        if not processes:
            early.append(number)

    # Ctrl-C reaches the command from the terminal: forwarding it would send it twice.
    def interrupt(number: int, _: FrameType | None) -> None:
        interrupts.append(number)
        if not processes:
            early.append(number)

    before: dict[int, Any] = {number: signal.signal(number, forward) for number in _SIGNALS}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        process = _start(name, program, environment)
        processes.append(process)
        for number in early:
            process.send_signal(number)
        while tick is not None and process.poll() is None:
            tick()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TICK)
        code = process.wait()
    finally:
        # The handlers belong to this process: restore them whatever happened.
        for number, handler in before.items():
            signal.signal(number, handler)
    code = code if code >= 0 else 128 - code
    # torchrun ends with 1 after Ctrl-C, and so does a Python that was still starting.
    if interrupts and code == 1:
        code = 128 + signal.SIGINT
    return Exit(code, bool(interrupts) or code == 128 + signal.SIGINT)


def _start(name: str, program: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(program, env=environment)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"lockstep {name}: '{printable(program[0])}' cannot be started: {why}") from error
