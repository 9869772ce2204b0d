"""Run `lockstep init` and `lockstep lint`."""

from importlib.metadata import entry_points
from pathlib import Path

from lockstep.config.cli import Parser
from lockstep.config.secrets import printable
from lockstep.errors import ConfigError, UsageError

__all__ = [
    "init_command",
    "lint_command",
]


_TEMPLATES = Path(__file__).parents[1] / "templates"
_FILES = ("task.py", "config.toml", "test_task.py")


def init_command(argv: list[str]) -> int:
    """Run `lockstep init` and return its exit code.

    Raises:
        ConfigError: the path is not an empty folder or cannot be written; nothing was written.
    """
    try:
        args = _init_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    folder = Path(args.dir)
    label = printable(args.dir)
    texts = {}
    for name in _FILES:
        texts[name] = (_TEMPLATES / name).read_text(encoding="utf-8")
    try:
        _check_empty(folder, label)
        folder.mkdir(parents=True, exist_ok=True)
        _write_files(folder, texts)
    except OSError as error:
        raise ConfigError(f"init {label}: {error.strerror or error}; give another folder") from None
    print(f"wrote {', '.join(str(Path(label) / name) for name in _FILES)}")
    prefix = "" if label == "." else f"cd {label} && "
    print(f"  {prefix}lockstep train --config config.toml\n  {prefix}pytest")
    return 0


def _write_files(folder: Path, texts: dict[str, str]) -> None:
    """Write all files, or none, since `lockstep init` refuses a folder with some."""
    written: list[Path] = []
    try:
        for name, text in texts.items():
            # "x" fails if a file exists, so none is overwritten.
            with (folder / name).open("x", encoding="utf-8") as handle:
                written.append(folder / name)
                handle.write(text)
    except OSError:
        for path in written:
            path.unlink()
        raise


def _check_empty(folder: Path, label: str) -> None:
    if folder.exists():
        existing = sorted(path.name for path in folder.iterdir())
    else:
        existing = []
    conflicts = [name for name in existing if name in _FILES]
    if conflicts:
        raise ConfigError(f"init {label}: {', '.join(conflicts)} would be overwritten; give a new folder")
    if existing:
        some = printable(", ".join(existing[:3])) + (f" and {len(existing) - 3} more" if len(existing) > 3 else "")
        raise ConfigError(f"init {label}: the folder is not empty, it contains {some}; give a new one")


def _init_parser() -> Parser:
    text = "Create a folder with a working task, config and test to start from."
    parser = Parser(prog="lockstep init", description=text)
    parser.add_argument("dir", metavar="DIR", help="a new folder, or an empty one")
    return parser


def lint_command(argv: list[str]) -> int:
    """Run `lockstep lint`, the distribution `lockstep-lint`, and return its exit code.

    Raises:
        UsageError: the linter is not installed.
    """
    points = tuple(entry_points(group="lockstep.commands", name="lint"))
    if not points:
        raise UsageError("lockstep lint needs the package lockstep-lint: install packages/lint of the repository")
    code: int = points[0].load()(argv)
    return code
