"""`lockstep lint [PATH ...]`: runs the linter, the distribution `lockstep-lint`, where that is installed."""

from importlib.metadata import entry_points

from lockstep.errors import UsageError

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep lint` with the arguments after that name.

    Returns:
        its exit code.

    Raises:
        UsageError: the linter is not installed.
    """
    found = tuple(entry_points(group="lockstep.commands", name="lint"))
    if not found:
        raise UsageError("lockstep lint needs the package lockstep-lint: pip install 'torch-lockstep[lint]'")
    code: int = found[0].load()(argv)
    return code
