"""Parse the flags of `lockstep data`; `tasks/prepare.py` does the work.

lockstep data prepare wiki/ --tokenizer train:8192 --out wiki-tokens  tokenize into shards, in parallel processes
lockstep data inspect wiki-tokens --verify                            what is in them; exit code 3 when one is damaged
lockstep train --dataset-name wiki-tokens                             train on them
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from lockstep.config.cli import Parser
from lockstep.distributed.cpus import cores
from lockstep.errors import ConfigError

__all__ = ["command"]


def command(argv: list[str]) -> int:
    """Run `lockstep data` and return its exit code: 0, or 3 for damage.

    Raises:
        ConfigError: an unknown flag, an invalid value, or a folder that cannot be written.
        DataError: no such data, or data that cannot be read.
    """
    try:
        args = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    if args.action == "inspect":
        return _inspect(args)
    return _prepare(args)


def _prepare(args: argparse.Namespace) -> int:
    for flag, least in (("processes", 0), ("shard_mib", 1), ("seq_len", 2)):
        if getattr(args, flag) < least:
            value = getattr(args, flag)
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} is {value}: it must be at least {least}")
    if not 0.0 <= args.skip <= 1.0:
        raise ConfigError(f"--skip is {args.skip}: it must be from 0 to 1")
    if not 0.0 < args.evaluation < 1.0:
        raise ConfigError(f"--evaluation is {args.evaluation}: it must be above 0 and below 1")
    # Imported late: it loads torch.
    prepare: Any = importlib.import_module("lockstep.tasks.prepare")
    hub: Any = importlib.import_module("lockstep.text.hub")
    store: Any = importlib.import_module("lockstep.text.token_store")
    files: Any = importlib.import_module("lockstep.files")
    packing = store.Packing(args.packing, args.seq_len, args.evaluation, args.labels)
    columns = args.text_column, args.encoding, packing.answers, args.skip
    request = hub.DataRequest(args.source, args.subset, args.split, args.revision, *columns)
    folder = Path(args.out).expanduser()
    # Tables of the rows are shared between runs, so they are in the cache.
    rows = files.cache_folder(args.cache) / "rows"
    job = prepare.PrepareJob(
        request, packing, args.shard_mib << 20, args.tokenizer, args.trust_remote_code, folder, rows
    )
    tokenizer = prepare.named_tokenizer(args.tokenizer, args.trust_remote_code, rows, _say)
    processes = args.processes or cores()
    index = prepare.prepare_shards(job, tokenizer, processes=processes, say=_say)
    print("\n".join([*prepare.describe_index(index), f"train with: lockstep train --dataset-name {args.out}"]))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    # Imported late: it loads torch.
    prepare: Any = importlib.import_module("lockstep.tasks.prepare")
    folder = Path(args.folder).expanduser()
    index = prepare.read_index(folder)
    damage = list(prepare.check_shards(folder, index, contents=args.verify))
    if args.json:
        print(json.dumps({**index, "damage": damage}))
    else:
        checked = "sizes and checksums" if args.verify else "sizes"
        state = f"{len(damage)} damaged" if damage else "whole"
        print("\n".join([*prepare.describe_index(index), f"{len(index['files'])} files, by their {checked}: {state}"]))
        print("\n".join(damage), end="\n" * bool(damage))
    if args.sample is not None and not damage:
        print(prepare.sample_text(folder, index, args.sample))
    if damage:
        return 3
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> Parser:
    parser = Parser(prog="lockstep data", description="Tokenize a dataset into shards, or look at such shards.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare | inspect")
    text = "tokenize a dataset into memory-mapped shards, in parallel processes; started again, it resumes"
    action = actions.add_parser("prepare", help=text, description=text)
    add = action.add_argument
    add("source", metavar="SOURCE", help="as --dataset-name: a hub dataset, a file or a folder of them, builtin:stdlib")
    add("--out", required=True, metavar="FOLDER", help="the folder to write")
    add("--tokenizer", required=True, help="a tokenizer of the hub, a folder, or train:VOCAB")
    add("--processes", type=int, default=0, help="processes that tokenize; 0: one for each core (default: 0)")
    add("--shard-mib", type=int, default=64, help="data in a shard, in MiB (default: 64)")
    add("--packing", default="stream", choices=["stream", "padded", "documents"], help="as --data.packing of train")
    add("--seq-len", type=int, default=1024, help="as --seq-len of train; a stream takes any (default: 1024)")
    add("--labels", default="auto", choices=["auto", "all", "completion"], help="as --data.labels of train")
    add("--evaluation", type=float, default=0.05, help="share to hold out if there is no such split (default: 0.05)")
    add("--skip", type=float, default=0.01, help="as --data.skip of train (default: 0.01)")
    for flag, default, text in (
        ("--subset", "", "subset (configuration) of a hub dataset"),
        ("--split", "train", "split to train on (default: train)"),
        ("--revision", "", "branch, tag or commit of a hub dataset"),
        ("--text-column", "", "column with the text"),
        ("--encoding", "", "encoding of csv and json files"),
        ("--cache", "", "folder for the rows of data files as tables (default: $LOCKSTEP_CACHE)"),
    ):
        add(flag, default=default, help=text)
    add("--trust-remote-code", action="store_true", help="run the Python code that comes with a tokenizer")
    text = "print what shards hold; exit code 3 if one is damaged"
    action = actions.add_parser("inspect", help=text, description=text)
    action.add_argument("folder", metavar="FOLDER", help="the folder that `prepare` wrote")
    action.add_argument("--verify", action="store_true", help="compare every file's checksum")
    action.add_argument("--sample", type=int, metavar="N", help="print the text of training sample N")
    action.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
