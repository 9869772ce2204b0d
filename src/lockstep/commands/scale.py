"""`lockstep scale --world-sizes 1,2,4 -- [flags of train]`: exit code 0, or 1 where a size failed.

lockstep scale --world-sizes 1,2,4 -- --task mine.py:Task --batch-size 64
lockstep scale --world-sizes 1,2 --strong --rounds 5 --extrapolate 8,64 -- --task mine.py:Task
lockstep scale --world-sizes 1,2,4 --json -- --exact
lockstep scale --runs outputs/n8 outputs/n16 --ranks-per-node 8 --extrapolate 64          of several nodes

Here are the flags; `diagnose/scale/command.py` does the work.
"""

import argparse
import importlib
from pathlib import Path

from lockstep.config import options
from lockstep.config.flags import Parser
from lockstep.config.hints import FOREIGN
from lockstep.diagnose.scale.request import STRONG, WEAK, Request, ascending
from lockstep.errors import ConfigError

__all__ = ["command"]

_ELSEWHERE = "it is no flag of scale; those of train stand behind `--`"


def command(argv: list[str]) -> int:
    """Runs `lockstep scale` with the arguments `argv`, prints the tables and returns 0.

    Raises:
        ConfigError: a flag of scale or of train that does not hold; exit code 2, and nothing was started.
        LockstepError: a run failed; what was measured is printed before.
    """
    own, flags = _split(argv)
    try:
        given = _parser().read(own)
        further = ascending("--extrapolate", given.extrapolate) if given.extrapolate else ()
        if given.runs:
            return _of_runs(given, flags, further)
        if given.ranks_per_node:
            raise ConfigError("--ranks-per-node goes with --runs: what is started here is on one node")
        sizes = ascending("--world-sizes", given.world_sizes)
        config = options.parse(flags)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    asked = tuple(mode for mode, wanted in ((STRONG, given.strong), (WEAK, given.weak)) if wanted)
    request = Request(
        tuple(flags),
        config,
        sizes,
        modes=asked or (STRONG, WEAK),
        rounds=given.rounds,
        steps=given.steps,
        extrapolate=further,
    )
    if config.micro_batch_size:
        request.check(config.micro_batch_size)
    code: int = importlib.import_module("lockstep.diagnose.scale.command").run(request, as_json=given.json)
    return code


def _of_runs(given: argparse.Namespace, flags: list[str], further: tuple[int, ...]) -> int:
    """The tables of runs that were made before."""
    if flags:
        raise ConfigError("--runs reads runs that were made before: leave out the flags of train behind `--`")
    paths = [Path(each).expanduser() for each in given.runs]
    module = importlib.import_module("lockstep.diagnose.scale.command")
    code: int = module.compare(paths, further, given.ranks_per_node, as_json=given.json)
    return code


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """scale's own flags, and those of train behind `--`, with or without the word `train`."""
    if "--" not in argv:
        if "train" in argv:
            raise ConfigError("`--` is missing before `train`: lockstep scale --world-sizes 1,2 -- [flags of train]")
        return argv, []
    at = argv.index("--")
    behind = argv[at + 1 :]
    return argv[:at], behind[1:] if behind[:1] == ["train"] else behind


def _parser() -> Parser:
    elsewhere = {name.partition(".")[2] or name: _ELSEWHERE for name in (*FOREIGN, *options.option_list())}
    parser = Parser(
        prog="lockstep scale",
        usage="lockstep scale --world-sizes 1,2,4 [flags] -- [flags of train]",
        description="Measures how training speeds up with the number of processes on this machine: the same batch "
        "(strong), and one that grows with them (weak). Each size is a real run of a few steps in a temporary folder.",
        epilog="The flags of train: `lockstep train --help`, and `lockstep train --help-all`.",
        foreign={name: said for name, said in elsewhere.items() if name not in (*_OWN, "world_size")},
    )
    add = parser.add_argument
    add(
        "--world-sizes", default="1,2", metavar="N,N,...", help="numbers of processes, ascending (default: %(default)s)"
    )
    add("--strong", action="store_true", help="the same batch at every size (default: both)")
    add("--weak", action="store_true", help="the batch grows with the size, the micro-batch stays (default: both)")
    add("--rounds", type=int, default=3, metavar="N", help="runs of each size, in turns (default: %(default)s)")
    add("--steps", type=int, default=20, metavar="N", help="steps of a run that are counted (default: %(default)s)")
    add("--extrapolate", default="", metavar="N,N,...", help="sizes to carry the fit on to")
    add("--runs", nargs="+", default=[], metavar="DIR", help="start nothing: compare runs that were made before")
    add("--ranks-per-node", type=int, default=0, metavar="N", help="of --runs on several nodes (default: all on one)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


_OWN = ("world_sizes", "strong", "weak", "rounds", "steps", "extrapolate", "runs", "ranks_per_node", "json")
