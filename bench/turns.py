"""Two trainings in turns: which one's steps take how many times as long, on a machine whose speed changes.

with Going(command_of, folder) as one, Going(...) as other:
    ratios = in_turns(one, other, rounds=7, steps=10)

Both go on for ever, and one of them at a time: the processes of the other are stopped (SIGSTOP) meanwhile, its loaders
too. Each step's end is noted by the training itself, by a clock that all processes share; only steps that lie wholly
within a turn count, without its first ones, in which caches and what was loaded ahead are not as usual.
"""

import os
import signal
import socket
import statistics
import subprocess
import time
from pathlib import Path

__all__ = ["Going", "in_turns", "spread"]

PATIENCE = 300.0  # seconds for a step, the first one with --compile included
SKIPPED = 4  # steps at the begin of a turn


class Going:
    """A training of `ranks` processes, `command`, which appends a line to `ends` after each step: time.monotonic()."""

    def __init__(self, command, ends, environment, ranks=1):
        self.ends = Path(ends)
        self.ends.touch()
        self.log = open(self.ends.with_suffix(".log"), "w+b")  # noqa: SIM115 - closed at the exit
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        where |= {"LOCAL_WORLD_SIZE": str(ranks)}
        self.processes = []
        for rank in range(ranks):
            own = {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            given = {"env": {**environment, **own}, "stdout": self.log, "stderr": self.log, "start_new_session": True}
            self.processes.append(subprocess.Popen(command, **given))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.tell(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.log.close()

    def tell(self, number):
        """Sends a signal to all of its processes: each rank leads a group, in which its loaders are."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, number)

    @property
    def steps(self):
        return self.ends.read_bytes().count(b"\n")

    def until(self, steps):
        """Lets it go on until it has taken so many steps in all, and stops it. Raises SystemExit where it fails."""
        began, least = time.monotonic(), self.steps
        self.tell(signal.SIGCONT)
        while (now := self.steps) < steps:
            if any(process.poll() is not None for process in self.processes) or time.monotonic() - began > PATIENCE:
                self.log.seek(0)
                raise SystemExit(f"it ended, or hangs, after {now} steps:\n{self.log.read().decode()[-4000:]}")
            began = began if now == least else time.monotonic()
            least = now
            time.sleep(0.003)
        self.tell(signal.SIGSTOP)

    def turn(self, steps):
        """Milliseconds of each of so many steps, taken now."""
        first = self.steps
        self.until(first + 1 + SKIPPED + steps)
        ends = [float(line) for line in self.ends.read_text().split("\n")[:-1]]
        ends = ends[first + SKIPPED :][: steps + 1]
        return 1e3 * (ends[-1] - ends[0]) / steps


def in_turns(one, other, warm, rounds, steps):
    """By round, how many times as long `one` takes for a step as `other`, and milliseconds of a step of each.

    Args:
        warm: steps that each takes before.
        steps: of a turn.
    """
    for each in (one, other):
        each.until(warm)
    found = [(one.turn(steps), other.turn(steps)) for _ in range(rounds)]
    return [a / b for a, b in found], statistics.median(a for a, _ in found), statistics.median(b for _, b in found)


def spread(ratios):
    """The quartiles: half of the rounds lie between them."""
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, high


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]
