"""Parse the flags of `lockstep runs`, `report` and `goodput`.

lockstep runs                       a table of the runs in outputs/
lockstep runs outputs/sweep         the runs in another folder
lockstep runs --json                the same as one JSON list, for scripts
"""

import importlib
from pathlib import Path

from lockstep.config.cli import Parser
from lockstep.config.secrets import printable
from lockstep.errors import ConfigError

__all__ = [
    "goodput_command",
    "report_command",
    "runs_command",
]


def goodput_command(argv: list[str]) -> int:
    """Run `lockstep goodput` and return its exit code.

    Raises:
        ConfigError: an unknown flag, or a folder without a run's timeline.
    """
    try:
        args = _goodput_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    importlib.import_module("lockstep.report.goodput").show(Path(args.run), as_json=args.json)
    return 0


def _goodput_parser() -> Parser:
    text = "Report where the wall time of a run went, over all its restarts; the parts add up to 100%."
    parser = Parser(prog="lockstep goodput", description=text)
    parser.add_argument("run", metavar="RUN", help="a run's folder: SAVE_DIR/EXPERIMENT_NAME")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in seconds")
    return parser


def report_command(argv: list[str]) -> int:
    """Run `lockstep report` and return its exit code.

    Raises:
        ConfigError: an unknown flag, not a run's folder, or a page that cannot be written.
    """
    try:
        args = _report_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    folders = [Path(run).expanduser() for run in args.run]
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None:
        name = printable(str(missing))
        raise ConfigError(f"{name} is not a folder; give a run's folder: SAVE_DIR/EXPERIMENT_NAME")
    if len(folders) > 1 and not args.output:
        raise ConfigError("several runs need --output FILE, the page to write")
    path = Path(args.output).expanduser() if args.output else folders[0] / "report.html"
    page = importlib.import_module("lockstep.report.page")  # loads torch, for the fingerprints
    try:
        page.write(folders, path)
    except OSError as error:
        raise ConfigError(f"--output {printable(str(path))}: {error.strerror or error}") from error
    print(f"report: {printable(str(path))}")
    return 0


def _report_parser() -> Parser:
    text = "Write an HTML page about a run: curves, time, guards, proof, settings. Several runs are shown side by side."
    parser = Parser(prog="lockstep report", description=text)
    parser.add_argument("run", metavar="RUN", nargs="+", help="a run's folder: SAVE_DIR/EXPERIMENT_NAME")
    text = "file to write (default: RUN/report.html; required for several runs)"
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
    importlib.import_module("lockstep.training.runs").print_runs(Path(args.folder), as_json=args.json)
    return 0


def _runs_parser() -> Parser:
    parser = Parser(prog="lockstep runs", description="List the runs in a folder: progress, best metric, status.")
    text = "a folder of runs, or one run's folder (default: outputs, as for train --save-dir)"
    parser.add_argument("folder", metavar="DIR", nargs="?", default="outputs", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON list, with numbers as numbers")
    return parser
