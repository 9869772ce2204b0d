"""Runs a script of this folder, with or without `lockstep trace` around it, and reads its journals."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from table import Case, saved_at

__all__ = ["Failed", "checked", "command", "journals", "ran"]

HERE = Path(__file__).parent
# Share of the weights' length beyond what rounding makes of them in ten updates, of float32 and of bfloat16.
PARTED, PARTED_COARSE = 1e-5, 1e-2


class Failed(RuntimeError):
    """A script, or `lockstep` itself, ended badly; the message has its last lines."""


def command(script: str, world: int, flags: tuple[str, ...]) -> list[str]:
    """The command of one run of train_SCRIPT.py on `world` processes."""
    file = str(HERE / f"train_{script}.py")
    if world == 1:
        return [sys.executable, file, *flags]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    return [*launcher, "--master-addr", "127.0.0.1", "--master-port", str(port), file, *flags]


def ran(words: list[str], good: tuple[int, ...] = (0,), timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end. Raises Failed for an exit code not in `good`, or none in time."""
    more = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, env={**os.environ, **more})
    except subprocess.TimeoutExpired as late:
        raise Failed(f"{' '.join(words)} did not end in {timeout:g} s") from late
    if done.returncode not in good:
        raise Failed(f"{' '.join(words)} ended with {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done


def journals(out: Path, world: int) -> list[dict[str, Any]]:
    """What each rank wrote with `--out`."""
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world)]


def _apart(mine: list[float], theirs: list[float]) -> float:
    length = sum(value * value for value in theirs) ** 0.5
    return sum((a - b) ** 2 for a, b in zip(mine, theirs, strict=True)) ** 0.5 / length


def first_parted(one: list[list[float]], two: list[list[float]], begin: int, most: float) -> int | None:
    """The first update after which the weights differ by more than rounding; `begin` is two's first."""
    for step, (theirs, mine) in enumerate(zip(one[begin:], two, strict=False)):
        if _apart(mine, theirs) > most:
            return step + begin
    return None


def checked(case: Case, one: dict[str, Any], two: list[dict[str, Any]]) -> str:
    """ "" where the mistake does what the table says it does, else what it does instead."""
    begin = saved_at(case.script) if case.resumed else 0
    if case.check == "report":
        found, expected = two[0]["evaluations"], one["evaluations"]
        pairs = zip(found, expected, strict=True)
        return "" if any(abs(a - b) > 1e-4 * abs(b) for a, b in pairs) else f"reports {found}, as without the mistake"
    if case.check == "ranks":
        first, second = two[0]["weights"], two[1]["weights"]
        parted = next((k + begin for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        return "" if parted in case.steps else f"the ranks part at {parted}"
    coarse = "bf16" in case.flags
    steps = [first_parted(one["weights"], rank["weights"], begin, PARTED_COARSE if coarse else PARTED) for rank in two]
    if coarse and min((step for step in steps if step is not None), default=-1) >= min(case.steps):
        return ""  # a small mistake passes what rounding makes of the weights later
    parted = min((step for step in steps if step is not None), default=None)
    return "" if parted in case.steps else f"the weights part at {parted}"
