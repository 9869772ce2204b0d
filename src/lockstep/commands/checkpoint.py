"""Parse the flags of `lockstep checkpoint`; `checkpoint/command.py` does the work.

lockstep checkpoint list outputs/first          a table: step, epoch, size, written, engine, world, whole
lockstep checkpoint list outputs/first --json   the same as one JSON list, for scripts
lockstep checkpoint inspect outputs/first       the newest whole one, with its fingerprint
lockstep checkpoint verify outputs/first        one line each; exit code 3 when one is damaged
lockstep checkpoint prune outputs/first --keep 1        removes all but the newest whole one and the best
lockstep checkpoint import last.ckpt outputs/base       another library's weights as a checkpoint, for --init-from
"""

import argparse
import importlib
from pathlib import Path

from lockstep.config.cli import Parser
from lockstep.errors import ConfigError

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Run `lockstep checkpoint` and return its exit code: 0, or 3 for damage.

    Raises:
        CheckpointError: there is no such run or no such checkpoint.
        ConfigError: an unknown flag, an invalid value, or `prune` of a run that is still running.
    """
    try:
        args = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    if args.action == "prune":
        return _prune(args)
    if args.action == "import":
        # Imported late: it loads torch.
        import_weights = importlib.import_module("lockstep.checkpoint.command").import_weights
        import_weights(Path(args.source), Path(args.out), args.prefix, args.drop)
        return 0
    # Imported late: it loads torch.
    run = importlib.import_module("lockstep.checkpoint.command").run
    options = {"tensors": getattr(args, "tensors", False), "as_json": getattr(args, "json", False)}
    code: int = run(args.action, args.run, args.step, **options)
    return code


def _prune(args: argparse.Namespace) -> int:
    if args.keep < 1:
        raise ConfigError(f"--keep is {args.keep}: it must be at least 1; to remove all, delete the run's folder")
    # Imported late: it loads torch.
    prune = importlib.import_module("lockstep.training.prune").prune
    prune(args.run, args.keep, best=args.keep_best, dry_run=args.dry_run, as_json=args.json)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="lockstep checkpoint",
        description="List, inspect, verify or prune the checkpoints of a run, or import one.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | inspect | verify | prune | import")
    for name, text in (
        (
            "list",
            "print a table of the checkpoints: step, epoch, size, time written, engine, world size, complete or not",
        ),
        ("inspect", "print the contents and fingerprint of one checkpoint (default: the newest complete one)"),
        ("verify", "check every file of every checkpoint; exit code 3 if one is damaged"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("run", metavar="RUN", help="the folder or URL of a run, or of one checkpoint")
        action.add_argument("--step", type=int, help="only the checkpoint of this step")
        if name == "inspect":
            action.add_argument("--tensors", action="store_true", help="list every tensor")
        if name == "list":
            action.add_argument("--json", action="store_true", help="print one JSON list, with numbers as numbers")
    text = "remove all but the newest complete checkpoints and the best; refused while the run is running"
    action = actions.add_parser("prune", help=text, description=text)
    action.add_argument("run", metavar="RUN", help="a run's folder or URL")
    action.add_argument(
        "--keep", type=int, required=True, metavar="N", help="number of newest complete checkpoints to keep, at least 1"
    )
    text = "also keep the checkpoint of the best evaluation (default: yes)"
    action.add_argument("--keep-best", action=argparse.BooleanOptionalAction, default=True, help=text)
    action.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    action.add_argument(
        "--json", action="store_true", help="print the removed checkpoints as one JSON list: step, bytes, removed"
    )
    text = "write weights that another library saved as a checkpoint, which --init-from takes; no pickle in them is run"
    action = actions.add_parser("import", help=text, description=text)
    add = action.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="a DCP folder, a Lightning .ckpt, a folder or file of safetensors, a torch file",
    )
    add("out", metavar="OUT", help="the folder to write; must not exist")
    add(
        "--prefix",
        help="take the tensors whose names begin with this, and remove it (default: module., if all have it)",
    )
    add("--drop", action="append", default=[], metavar="PATTERN", help="leave out these names, such as '*.attn.bias'")
    return parser
