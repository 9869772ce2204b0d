"""Run a user's function on several processes of this machine, from a notebook's cell or a script.

`launch(function, 2, args)` serves `lockstep.launch`. The processes are `spawn.start`'s, with a launcher's variables.
"""

import codecs
import contextlib
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.distributed import spawn
from lockstep.distributed.cpus import cores
from lockstep.distributed.spawn import RankFailure
from lockstep.errors import SETTINGS, ConfigError
from lockstep.launch.command import rank_variables

__all__ = ["launch"]

# Seconds between two looks at the output of rank 0.
_PAUSE = 0.1


class _FunctionEnd(NamedTuple):
    """The end of the function on one rank.

    Attributes:
        result: what it returned, pickled, because memory that is shared would end with the rank.
        interrupted: the message of the Ctrl-C that ended it; None: another end.
        exits: it called `sys.exit`, with `code`.
    """

    result: bytes = b""
    interrupted: str | None = None
    exits: bool = False
    code: Any = None


class _Caller(NamedTuple):
    """The settings of the starting process that its ranks take over.

    Attributes:
        threads: of torch, for each rank.
        variables: of the environment.
        typed: flags on the command line of the script.
        defaults: names of the values that the script set itself.
        is_prompt: the starting process is a notebook or a prompt.
    """

    threads: int
    variables: Mapping[str, str]
    typed: Mapping[str, Any]
    defaults: tuple[str, ...]
    is_prompt: bool


def launch(function: Callable[..., Any], processes: int, args: tuple[Any, ...]) -> list[Any]:
    """Start the processes and return what each returned; see `lockstep.launch`."""
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "lockstep.launch starts processes itself, and this one was started by a launcher: call the function "
            "directly, or start the script with python"
        )
    # `launch(train())` is a common slip.
    if not callable(function):
        raise ConfigError(
            f"lockstep.launch: the function is of the type {type(function).__name__}: pass the function itself, not "
            "what it returns: lockstep.launch(train, processes=2)"
        )
    if not isinstance(processes, int) or processes < 1:
        raise ConfigError(f"lockstep.launch: processes is {processes!r}: it must be a whole number of at least 1")
    if not isinstance(args, (tuple, list)):
        raise ConfigError(f"lockstep.launch: args is {args!r}: it must be a tuple, such as ({args!r},)")
    caller = _Caller(
        max(1, cores() // processes),
        {**rank_variables(processes, "", exact=False), **os.environ},
        SETTINGS.typed,
        tuple(SETTINGS.defaults),
        hasattr(sys, "ps1"),
    )
    with tempfile.TemporaryDirectory() as folder, _shown(Path(folder, f"rank-{processes}-0.log")):
        outcomes = _start(processes, (caller, function, args), Path(folder))
    # The ranks have saved what they trained, so the caller ends as it would have without them.
    for outcome in outcomes:
        if outcome.interrupted is not None:
            raise KeyboardInterrupt(outcome.interrupted)
    for outcome in outcomes:
        if outcome.exits:
            raise SystemExit(outcome.code)
    return [pickle.loads(outcome.result) for outcome in outcomes]


def _start(processes: int, args: tuple[Any, ...], folder: Path) -> list[_FunctionEnd]:
    try:
        outcomes: list[_FunctionEnd] = spawn.start(
            _call,
            processes,
            args,
            device="auto",
            folder=folder,
            preload=["lockstep.training.run"],
            name="the function",
            as_launcher=True,
        )
        return outcomes
    except RankFailure as failure:
        details = failure.details.get(failure.rank, "")
        # The line has the message; the traceback is that of an error in the function.
        if details and details not in str(failure):
            print(details, file=sys.stderr, flush=True)
        raise


def _call(caller: _Caller, function: Callable[..., Any], args: tuple[Any, ...]) -> _FunctionEnd:
    """Call the function on this rank."""
    for name, value in caller.variables.items():
        # The rank has its own of a launcher's variables.
        os.environ.setdefault(name, value)
    torch.set_num_threads(caller.threads)
    # A rank checks the flags of the calling script, whose command line it has not parsed.
    SETTINGS.typed = caller.typed
    SETTINGS.defaults = caller.defaults
    # In a notebook an early end returns, so that the cell shows what there is.
    if caller.is_prompt:
        sys.ps1 = ""
    # The output is a file, which Python would write in blocks.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        return _FunctionEnd(spawn.dump_result(function(*args)))
    except KeyboardInterrupt as end:
        return _FunctionEnd(interrupted=str(end))
    except SystemExit as end:
        return _FunctionEnd(exits=True, code=end.code)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


@contextlib.contextmanager
def _shown(path: Path) -> Iterator[None]:
    """Print what is written into a file, as it comes."""
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(path, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(path: Path, ended: threading.Event) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    position = 0
    while True:
        # Read once more after the end.
        is_last = ended.wait(_PAUSE)
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(position)
            data = file.read()
            position += len(data)
            # A character may be written in two parts.
            if data:
                print(decoder.decode(data), end="", flush=True)
        if is_last:
            return
