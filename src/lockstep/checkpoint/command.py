"""Print the results of `lockstep checkpoint list | inspect | verify RUN`, and import weights.

Its flags are in commands/checkpoint.py.
"""

import json
import math
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.checkpoint.check import StoredTensor, find_source, is_marked, read_contents, verify_data
from lockstep.checkpoint.foreign import open_foreign, select_names
from lockstep.checkpoint.format import itemsize, read_manifest, step_of
from lockstep.checkpoint.store import fingerprint, list_steps, path_of, read_run_state, save, verify
from lockstep.checkpoint.stored import open_run
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, ConfigError, DifferenceError
from lockstep.files import bytes_text, printable

__all__ = ["import_weights", "run"]

# Characters of a row to print.
_SHOWN = 2000


def run(action: str, folder: str, step: int | None, *, tensors: bool = False, as_json: bool = False) -> int:
    """List, inspect or verify checkpoints, and print the result.

    Args:
        action: "list", "inspect" or "verify".
        folder: a run's, or a checkpoint's; or the URL of one.
        step: only the checkpoint of this step; None: any.
        tensors: `inspect` lists every tensor.
        as_json: `list` prints one JSON list.

    Returns:
        The exit code: 0, or 3 for damage that `verify` finds.

    Raises:
        CheckpointError: there is no such run or checkpoint.
    """
    with open_run(folder) as local_path:
        paths = _checkpoints(local_path, step)
        if action == "list":
            if as_json:
                return _list_json(paths)
            return _list(paths)
        if action == "verify":
            return _verify(paths)
        return _inspect(folder, paths, tensors)


def import_weights(source: Path, out: Path, prefix: str | None, drop: list[str]) -> Path:
    """Write another library's weights as a run with one checkpoint, and print them.

    Args:
        source: a file or folder, see foreign.py.
        out: the folder to write.
        prefix: as `select_names`.
        drop: as `select_names`.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the weights cannot be read or stored.
        ConfigError: `out` exists.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"OUT {printable(str(out))} already exists and is not overwritten; choose another name")
    if not source.exists():
        raise CheckpointError(f"SOURCE {printable(str(source))} does not exist; give a file or a folder of weights")
    with open_foreign(source) as weights:
        match = select_names(weights, prefix, drop)
        stored: dict[str, Any] = {}
        tensors = {}
        for name, file in match.source.items():
            tensors[f"model/{name}"] = stored.setdefault(file, weights.read(file))
        path = save(out, 0, tensors, {}, World(), engine="import")
    print(f"imported {weights.kind}: {match}, {bytes_text(read_manifest(path).size)}: {printable(str(out))}")
    return path


def _checkpoints(run: Path, step: int | None) -> list[Path]:
    """Return the checkpoints that RUN and --step select, ascending by step; at least one."""
    folder = printable(str(run))
    if step_of(run.resolve().name) is not None and run.is_dir():
        paths = [run.resolve()]
    elif (run / "checkpoints").is_dir():
        paths = [path_of(run, saved_step) for saved_step in list_steps(run)]
    else:
        raise CheckpointError(f"{folder} is neither a run's folder nor a checkpoint; pass SAVE_DIR/EXPERIMENT_NAME")
    if not paths:
        raise CheckpointError(f"{folder} has no checkpoint yet; it gets one every --ckpt-freq steps and at its end")
    chosen = []
    for path in paths:
        if step is None or step_of(path.name) == step:
            chosen.append(path)
    if not chosen:
        newest = ", ".join(str(step_of(path.name)) for path in paths[-5:])
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; the newest ones are {newest}")
    return chosen


def _list(paths: list[Path]) -> int:
    table = Table(box=None, pad_edge=False)
    for title in ("step", "epoch", "size", "written", "engine", "world", "whole"):
        table.add_column(title, justify="left" if title in ("engine", "whole") else "right", no_wrap=True)
    damaged = []
    for path in paths:
        problems = verify(path)
        damaged += problems
        table.add_row(*(Text(printable(cell, 40)) for cell in (str(step_of(path.name)), *_row(path), _yes(problems))))
    Console(highlight=False).print(table)
    for line in damaged:
        print(line)
    return 0


def _list_json(paths: list[Path]) -> int:
    """Print the table as JSON, with numbers; null if a damaged checkpoint lacks them."""
    rows = []
    for path in paths:
        problems = [printable(problem) for problem in verify(path)]
        row: dict[str, Any] = dict.fromkeys(("epoch", "bytes", "written", "engine", "world"))
        with suppress(CheckpointError):
            manifest = read_manifest(path)
            row |= {"bytes": manifest.size, "written": manifest.written, "engine": manifest.engine}
            row |= {"world": manifest.world, "epoch": _epoch_of(path)}
        rows.append({"step": step_of(path.name), **row, "whole": not problems, "problems": problems})
    print(json.dumps(rows, indent=1))
    return 0


def _yes(problems: list[str]) -> str:
    if problems:
        return "no"
    return "yes"


def _row(path: Path) -> tuple[str, ...]:
    """Return what is readable of epoch, size, time, engine and world size."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return ("?",) * 5
    return _epoch(path), bytes_text(manifest.size), _time(manifest.written), manifest.engine, str(manifest.world)


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(seconds, 1 << 40)))


def _epoch(path: Path) -> str:
    try:
        epoch = _epoch_of(path)
    except CheckpointError:
        return "?"
    if epoch is None:
        return "-"
    return str(epoch)


def _epoch_of(path: Path) -> int | None:
    """Return the run's epoch; None for a checkpoint of `lockstep.save_state`, which has none."""
    position = read_run_state(path).place
    if position:
        return position.epoch
    return None


def _verify(paths: list[Path]) -> int:
    damaged = 0
    for path in paths:
        problems = verify_data(path)
        damaged += bool(problems)
        print(f"{path.name}: {'; '.join(problems) if problems else 'whole'}")
    if damaged:
        return DifferenceError.exit_code
    return 0


def _inspect(folder: str, paths: list[Path], tensors: bool) -> int:
    path = _newest_whole(paths)
    manifest = read_manifest(path)
    contents = read_contents(path, manifest)
    model = []
    for name, tensor in contents.items():
        if name.startswith("model/"):
            model.append(tensor)
    rows: dict[str, Any] = {
        "checkpoint": f"{folder}, {path.name}" if find_source(path) else path,
        "step": manifest.step,
        "epoch": _epoch(path),
        "world size": manifest.world,
        "engine": manifest.engine,
        "tensors": len(contents),
        "parameters": f"{sum(math.prod(tensor.shape) for tensor in _once(model)):,}",
        "bytes": f"{manifest.size:,}",
    }
    if manifest.not_finite:
        rows["not finite"] = ", ".join(manifest.not_finite)
    for title, value in rows.items():
        print(f"{title:<12} {printable(str(value), _SHOWN)}")
    if model:
        print(f"fingerprint {fingerprint(path)}")
    if tensors:
        for name, tensor in sorted(contents.items()):
            size = math.prod(tensor.shape) * itemsize(tensor.dtype)
            print(f"{printable(name)}  {tensor.dtype}  {list(tensor.shape)}  {bytes_text(size)}")
    return 0


def _once(tensors: list[StoredTensor]) -> list[StoredTensor]:
    """Return each stored tensor once, even if it has two names."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _newest_whole(paths: list[Path]) -> Path:
    """Return the newest complete checkpoint; a single one need only be undamaged."""
    for path in reversed(paths):
        problems = verify(path)
        if len(paths) == 1 and is_marked(path):
            problems = problems[1:]
        if not problems:
            return path
        print(f"skipped checkpoint {path.name}: {problems[0]}", file=sys.stderr)
    raise CheckpointError("no checkpoint here is complete; see `lockstep checkpoint verify RUN`")
