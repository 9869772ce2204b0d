"""`lockstep runs [DIR] [--json]`: the flags; `training/runs.py` does the work, without torch.

lockstep runs                       a table of the runs in outputs/
lockstep runs outputs/sweep         of another folder
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
    """Runs `lockstep goodput` with the arguments `argv` and returns its exit code.

    Raises:
        ConfigError: a flag that does not exist, or a folder that holds no run's timeline.
    """
    try:
        given = _goodput_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    importlib.import_module("lockstep.report.goodput").show(Path(given.run), as_json=given.json)
    return 0


def _goodput_parser() -> Parser:
    text = "Says where the wall time of a run went, over all its starts: the parts add up to 100%."
    parser = Parser(prog="lockstep goodput", description=text)
    parser.add_argument("run", metavar="RUN", help="a run's folder: SAVE_DIR/EXPERIMENT_NAME")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in seconds")
    return parser


def report_command(argv: list[str]) -> int:
    """Runs `lockstep report` with the arguments `argv` and returns its exit code.

    Raises:
        ConfigError: a flag that does not exist, no run's folder, or a page that cannot be written.
    """
    try:
        given = _report_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    folders = [Path(run).expanduser() for run in given.run]
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None:
        where = printable(str(missing))
        raise ConfigError(f"{where} is not a folder; give a run's folder, SAVE_DIR/EXPERIMENT_NAME")
    if len(folders) > 1 and not given.output:
        raise ConfigError("--output FILE says where the page about several runs is to be written")
    path = Path(given.output).expanduser() if given.output else folders[0] / "report.html"
    page = importlib.import_module("lockstep.report.page")  # loads torch, for the fingerprints
    try:
        page.write(folders, path)
    except OSError as error:
        raise ConfigError(f"--output {printable(str(path))}: {error.strerror or error}") from error
    print(f"report: {printable(str(path))}")
    return 0


def _report_parser() -> Parser:
    text = (
        "Writes one page of HTML about a run: curves, time, guards, proof, settings. Several runs: beside each other."
    )
    parser = Parser(prog="lockstep report", description=text)
    parser.add_argument("run", metavar="RUN", nargs="+", help="a run's folder: SAVE_DIR/EXPERIMENT_NAME")
    text = "the page (default: RUN/report.html; needed for several runs)"
    parser.add_argument("-o", "--output", default="", metavar="FILE", help=text)
    return parser


def runs_command(argv: list[str]) -> int:
    """Runs `lockstep runs` with the arguments `argv` and returns its exit code.

    Raises:
        ConfigError: a flag that does not exist, or no such folder.
    """
    try:
        given = _runs_parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    importlib.import_module("lockstep.training.runs").show(Path(given.folder), as_json=given.json)
    return 0


def _runs_parser() -> Parser:
    parser = Parser(prog="lockstep runs", description="Lists the runs in a folder: how far, how good, how they ended.")
    text = "a folder of runs, or one run's folder (default: outputs, as for train --save-dir)"
    parser.add_argument("folder", metavar="DIR", nargs="?", default="outputs", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON list, with numbers as numbers")
    return parser
