"""`lockstep goodput RUN [--json]`: the flags; `report/goodput.py` does the work, without torch.

lockstep goodput outputs/digits         training, redone, stalls, saves, evaluation, start, lost: all of the wall time
lockstep goodput outputs/digits --json  the same for scripts, in seconds
"""

import importlib
from pathlib import Path

from lockstep.config.flags import Parser

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Runs `lockstep goodput` with the arguments `argv` and returns its exit code.

    Raises:
        ConfigError: a flag that does not exist, or a folder that holds no run's timeline.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    importlib.import_module("lockstep.report.goodput").show(Path(given.run), as_json=given.json)
    return 0


def _parser() -> Parser:
    text = "Says where the wall time of a run went, over all its starts: the parts add up to 100%."
    parser = Parser(prog="lockstep goodput", description=text)
    parser.add_argument("run", metavar="RUN", help="a run's folder: SAVE_DIR/EXPERIMENT_NAME")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in seconds")
    return parser
