"""Parse the flags of `lockstep runs`, `report` and `goodput`.

lockstep runs                       a table of the runs in outputs/
lockstep runs outputs/sweep         the runs in another folder
lockstep runs --json                the same as one JSON list, for scripts
"""

import importlib
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from lockstep.commands.script import script_command
from lockstep.config.cli import Parser
from lockstep.config.fields import is_url
from lockstep.config.secrets import printable
from lockstep.errors import ConfigError

__all__ = [
    "goodput_command",
    "open_folder",
    "report_command",
    "runs_command",
]


def open_folder(name: str, *, weights: bool = False) -> AbstractContextManager[Path]:
    """Open a run's folder by its path or its URL; only a URL loads torch.

    Args:
        weights: its checkpoints are needed too.
    """
    if not is_url(name):
        return nullcontext(Path(name).expanduser())
    opened: AbstractContextManager[Path] = importlib.import_module("lockstep.checkpoint.stored").open_run(
        name, weights=weights
    )
    return opened


def goodput_command(argv: list[str]) -> int:
    """Run `lockstep goodput` and return its exit code.

    Raises:
        ConfigError: an unknown flag, or a folder without a run's timeline.
    """
    if "--" in argv:
        return script_command("goodput", argv)
    try:
        args = _goodput_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    with open_folder(args.run) as run:
        importlib.import_module("lockstep.report.goodput").show(run, as_json=args.json)
    return 0


def _goodput_parser() -> Parser:
    text = "Report where the wall time of a run went, over all its restarts; the parts add up to 100%. After `--`: run "
    text += "the command of any torch script, with its records in the new folder --out, and report on it."
    usage = "lockstep goodput RUN [--json]\n       lockstep goodput [--out DIR] [--json] -- COMMAND [arguments]"
    parser = Parser(prog="lockstep goodput", usage=usage, description=text)
    parser.add_argument("run", metavar="RUN", help="a run's folder or URL: SAVE_DIR/EXPERIMENT_NAME")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in seconds")
    return parser


def report_command(argv: list[str]) -> int:
    """Run `lockstep report` and return its exit code.

    Raises:
        ConfigError: an unknown flag, not a run's folder, or a page that cannot be written.
    """
    if "--" in argv:
        return script_command("report", argv)
    try:
        args = _report_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    urls = [run for run in args.run if is_url(run)]
    if urls and not args.output:
        raise ConfigError(f"{printable(urls[0])} is a URL, which needs --output FILE, the page to write")
    with ExitStack() as stack:
        return _write_report([stack.enter_context(open_folder(run, weights=True)) for run in args.run], args.output)


def _write_report(folders: list[Path], output: str) -> int:
    missing = None
    for folder in folders:
        if not folder.is_dir():
            missing = folder
            break
    if missing is not None:
        name = printable(str(missing))
        raise ConfigError(f"{name} is not a folder; give a run's folder: SAVE_DIR/EXPERIMENT_NAME")
    if len(folders) > 1 and not output:
        raise ConfigError("several runs need --output FILE, the page to write")
    if output:
        path = Path(output).expanduser()
    else:
        path = folders[0] / "report.html"
    # Imported late: it loads torch, for the fingerprints.
    page = importlib.import_module("lockstep.report.page")
    try:
        page.write(folders, path)
    except OSError as error:
        raise ConfigError(f"--output {printable(str(path))}: {error.strerror or error}") from error
    print(f"report: {printable(str(path))}")
    return 0


def _report_parser() -> Parser:
    text = (
        "Write an HTML page about a run: curves, time, guards, proof, settings. Several runs are shown side by side. "
    )
    text += (
        "After `--`: run the command of any torch script, with its records in the new folder --out, and report on it."
    )
    usage = "lockstep report RUN [RUN ...] [-o FILE]\n       lockstep report [--out DIR] -- COMMAND [arguments]"
    parser = Parser(prog="lockstep report", usage=usage, description=text)
    parser.add_argument("run", metavar="RUN", nargs="+", help="a run's folder or URL: SAVE_DIR/EXPERIMENT_NAME")
    text = "file to write (default: RUN/report.html; required for several runs and for a URL)"
    parser.add_argument("-o", "--output", default="", metavar="FILE", help=text)
    return parser


def runs_command(argv: list[str]) -> int:
    """Run `lockstep runs` and return its exit code.

    Raises:
        ConfigError: an unknown flag, or no such folder.
    """
    try:
        args = _runs_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    context: AbstractContextManager[Path] = nullcontext(Path(args.folder))
    if is_url(args.folder):
        # Imported late: it loads torch.
        context = importlib.import_module("lockstep.checkpoint.stored").open_runs(args.folder)
    with context as folder:
        importlib.import_module("lockstep.training.runs").print_runs(folder, as_json=args.json)
    return 0


def _runs_parser() -> Parser:
    parser = Parser(prog="lockstep runs", description="List the runs in a folder: progress, best metric, status.")
    text = "a folder of runs, or one run's folder, or the URL of either (default: outputs, as for train --save-dir)"
    parser.add_argument("folder", metavar="DIR", nargs="?", default="outputs", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON list, with numbers as numbers")
    return parser
