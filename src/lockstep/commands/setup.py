"""`lockstep lint [PATH ...]`: runs the linter, the distribution `lockstep-lint`, where that is installed."""

from importlib.metadata import entry_points
from pathlib import Path

from lockstep.config.cli import Parser
from lockstep.config.secrets import printable
from lockstep.errors import ConfigError, UsageError

__all__ = [
    "completion_command",
    "init_command",
    "lint_command",
]


_FOLDER = Path(__file__).parents[1] / "completions"
_SHELL_FILES = {"bash": "lockstep.bash", "zsh": "_lockstep"}


def completion_command(argv: list[str]) -> int:
    """Runs `lockstep completion` with the arguments `argv` and returns its exit code.

    Raises:
        ConfigError: another shell, or a checkout that was never installed, which has no such file.
    """
    try:
        given = _completion_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    path = _FOLDER / _SHELL_FILES[given.shell]
    if not path.is_file():
        raise ConfigError(f"there is no {path}: it is made when the package is installed (pip install, also with -e)")
    print(path.read_text(encoding="utf-8"), end="")
    return 0


def _completion_parser() -> Parser:
    parser = Parser(prog="lockstep completion", description="Prints the completion file of a shell.")
    parser.add_argument(
        "shell", choices=list(_SHELL_FILES), help='bash: eval "$(lockstep completion bash)"; zsh: in $fpath'
    )
    return parser


_TEMPLATES = Path(__file__).parents[1] / "templates"
_FILES = ("task.py", "config.toml", "test_task.py")


def init_command(argv: list[str]) -> int:
    """Runs `lockstep init` with the arguments `argv` and returns its exit code.

    Raises:
        ConfigError: the folder has something in it, is no folder, or cannot be written; nothing was written.
    """
    try:
        given = _init_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    folder, shown = Path(given.dir), printable(given.dir)
    texts = {name: (_TEMPLATES / name).read_text(encoding="utf-8") for name in _FILES}
    try:
        _check_empty(folder, shown)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as handle:
                handle.write(text)
    except OSError as error:
        raise ConfigError(f"init {shown}: {error.strerror or error}") from None
    print(f"wrote {', '.join(str(Path(shown) / name) for name in _FILES)}")
    where = "" if shown == "." else f"cd {shown} && "
    print(f"  {where}lockstep train --config config.toml\n  {where}pytest")
    return 0


def _check_empty(folder: Path, shown: str) -> None:
    found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    mine = [name for name in found if name in _FILES]
    if mine:
        raise ConfigError(f"init {shown}: {', '.join(mine)} would be overwritten; give a new folder")
    if found:
        some = printable(", ".join(found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise ConfigError(f"init {shown}: the folder is not empty, it has {some}; give a new one")


def _init_parser() -> Parser:
    text = "Makes a folder with a task, a config and a test that run at once, to be changed into your own."
    parser = Parser(prog="lockstep init", description=text)
    parser.add_argument("dir", metavar="DIR", help="a new folder, or an empty one")
    return parser


def lint_command(argv: list[str]) -> int:
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
