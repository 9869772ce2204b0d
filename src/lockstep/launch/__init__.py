"""Start a run on several processes and nodes, and restart it after a failure.

    losses = lockstep.launch(train, processes=2, args=(0.1,))       # from a notebook's cell, or a script

Importing this package does not load torch; `launch` imports the module that does.
"""

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["launch"]


def launch(function: Callable[..., Any], processes: int = 2, args: tuple[Any, ...] = ()) -> list[Any]:
    """Run `function(*args)` on several processes of this machine, as ranks of one run.

    In each, `lockstep.train` and `lockstep.Run` work as under `lockstep launch`. The output of rank 0 is shown here. On
    Ctrl-C the ranks save and end; a second one ends them at once. A function or task that a notebook's cell defines
    needs the package cloudpickle (the extra `notebook`). A script calls this under `if __name__ == "__main__":`.

    Args:
        function: called once in each process.
        processes: number of processes; on GPUs at most one for each.
        args: its arguments, picklable.

    Returns:
        What each rank returned, by rank. It must be picklable.

    Raises:
        ConfigError: this process is itself one of several, or the function cannot be sent.
        LockstepError: a rank failed; the line names the first. The traceback of its own code is printed.
        KeyboardInterrupt: Ctrl-C; what `lockstep.train` did is saved.
        SystemExit: a rank called `sys.exit`, or `lockstep.train` ended early, as after SIGTERM.
    """
    results: list[Any] = importlib.import_module("lockstep.launch.local").launch(function, processes, args)
    return results
