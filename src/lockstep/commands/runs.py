"""`lockstep runs [DIR] [--json]`: the flags; `run/listing.py` does the work, without torch.

lockstep runs                       a table of the runs in outputs/
lockstep runs outputs/sweep         of another folder
lockstep runs --json                the same as one JSON list, for scripts
"""

import importlib
from pathlib import Path

from lockstep.config.flags import Parser

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep runs` with the arguments `argv` and returns its exit code.

    Raises:
        ConfigError: a flag that does not exist, or no such folder.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    importlib.import_module("lockstep.run.listing").show(Path(given.folder), as_json=given.json)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="lockstep runs", description="Lists the runs in a folder: how far, how good, how they ended.")
    text = "a folder of runs, or one run's folder (default: outputs, as for train --save-dir)"
    parser.add_argument("folder", metavar="DIR", nargs="?", default="outputs", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON list, with numbers as numbers")
    return parser
