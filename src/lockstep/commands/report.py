"""`lockstep report RUN [RUN ...] [--output FILE]`: the flags; `report/` does the work.

lockstep report outputs/digits                      writes outputs/digits/report.html, as the end of the run does
lockstep report outputs/a outputs/b -o both.html    the two beside each other
"""

import importlib
from pathlib import Path

from lockstep.config.flags import Parser
from lockstep.config.secrets import printable
from lockstep.errors import ConfigError

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep report` with the arguments `argv` and returns its exit code.

    Raises:
        ConfigError: a flag that does not exist, no run's folder, or a page that cannot be written.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    folders = [Path(run).expanduser() for run in given.run]
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None:
        where = printable(str(missing))
        raise ConfigError(f"{where} is no folder; give a run's: SAVE_DIR/EXPERIMENT_NAME")
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


def _parser() -> Parser:
    text = (
        "Writes one page of HTML about a run: curves, time, guards, proof, settings. Several runs: beside each other."
    )
    parser = Parser(prog="lockstep report", description=text)
    parser.add_argument("run", metavar="RUN", nargs="+", help="a run's folder: SAVE_DIR/EXPERIMENT_NAME")
    text = "the page (default: RUN/report.html; needed for several runs)"
    parser.add_argument("-o", "--output", default="", metavar="FILE", help=text)
    return parser
