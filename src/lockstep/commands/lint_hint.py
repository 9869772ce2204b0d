"""Offer the linter where a command has seen a script: `lint_hint(["python", "train.py"])`."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from lockstep.config.secrets import printable

__all__ = ["lint_hint"]


def lint_hint(words: Iterable[str]) -> str:
    """Return a line that offers `lockstep lint` for a script.

    Args:
        words: the words of a command, or a task such as `digits.py:Digits`.

    Returns:
        The line, for the first Python file among the words; "" if there is none, or lockstep-lint is not installed.
    """
    files = (word.partition(":")[0] for word in words)
    script = None
    for name in files:
        if name.endswith(".py") and Path(name).is_file():
            script = name
            break
    if script is None or find_spec("lockstep_lint") is None:
        return ""
    return f"to check the script itself for common mistakes, run `lockstep lint {printable(script)}`"
