"""`--migrate`: calls the installed lockstep, which alone knows what it serves. It declares itself by an entry point."""

from importlib.metadata import entry_points

__all__ = ["FORMATS", "MigrateProblem", "migrate"]

FORMATS = ("text", "json")


class MigrateProblem(Exception):
    """Refuses `--migrate` for a file or its flags. The message is one line: what, where, and the way out."""


def migrate(paths: list[str], form: str) -> int:
    """Prints which lines of each file become which in lockstep.

    Returns:
        the exit code: 1 where something would be refused, else 0.

    Raises:
        MigrateProblem: lockstep is not installed, or it can tell nothing of a file.
        FileNotFoundError: there is no such path.
    """
    found = tuple(entry_points(group="lockstep_lint.migrate", name="migrate"))
    if not found:
        raise MigrateProblem("--migrate needs lockstep itself: pip install 'torch-lockstep[lint]'")
    code: int = found[0].load()(paths, form)
    return code
