"""The weights of a checkpoint, whole, for other programs: what `lockstep export` does (commands/export.py).

    export(chosen(Path("outputs/first"), None), Path("model.safetensors"), "safetensors")

Tensors are read, put together and written one after the other; only `torch`, whose file begins with the description
of everything, holds the weights, once. What stands at OUT is never written over.
"""

import json
import os
import secrets
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.checkpoint.dtypes import CODES, itemsize
from lockstep.checkpoint.export.deepspeed import write_universal
from lockstep.checkpoint.export.hf import write_hub
from lockstep.checkpoint.export.peft import write_adapters
from lockstep.checkpoint.files import printable, refusal_error, remove, write_file
from lockstep.checkpoint.format import read_manifest, read_state, step_of
from lockstep.checkpoint.read import AVERAGE, Whole, averages_of, opened
from lockstep.checkpoint.store import list_steps, newest, path_of
from lockstep.checkpoint.write import bytes_of
from lockstep.errors import CheckpointError, ConfigError

__all__ = ["Source", "chosen", "export", "safetensors_of"]


Beside = Callable[[Path], None]


class Source(NamedTuple):
    """What is exported.

    Attributes:
        path: the checkpoint's folder.
        tensors: its tensors.
        options: the run's config.toml as nested dicts; {} where there is none.
        step: of the checkpoint.
        state: what it keeps besides tensors.
        beside: writes what else belongs into the folder of `hf`: a tokenizer.
    """

    path: Path
    tensors: Whole
    options: dict[str, Any]
    step: int
    state: dict[str, Any]
    beside: Beside


def chosen(run: Path, step: int | None) -> Path:
    """The folder of the checkpoint in `run` of that step, whole; None: the newest whole one.

    Raises:
        CheckpointError: no such run, no such step, or none that is whole.
    """
    shown = printable(str(run))
    if run.is_dir() and step_of(run.resolve().name) is not None:
        return run.resolve()
    if not (run / "checkpoints").is_dir():
        raise CheckpointError(f"{shown} is neither a run's folder nor a checkpoint; pass SAVE_DIR/EXPERIMENT_NAME")
    if step is not None and step not in list_steps(run):
        there = ", ".join(map(str, list_steps(run))) or "none"
        raise CheckpointError(f"--step {step}: {shown} has no checkpoint of that step; it has: {there}")
    found = path_of(run, step) if step is not None else newest(run, say=lambda line: print(line, file=sys.stderr))
    if found is None:
        raise CheckpointError(f"{shown} has no whole checkpoint; `lockstep checkpoint verify` says what is wrong")
    return found


def export(
    path: Path,
    out: Path,
    form: str,
    *,
    weights: Whole | None = None,
    beside: Beside = lambda folder: None,
    ema: bool = False,
) -> Path:
    """Writes the model of the checkpoint in the folder `path` to `out` in the format `form`, and returns `out`.

    It appears under its name when it is complete.

    Args:
        form: "safetensors", "torch", "hf", "deepspeed", or "peft" for adapters.
        weights: in place of the checkpoint's own tensors, by the names that it would have: `model/NAME`.
        beside: writes what else belongs into the folder of `hf`.
        ema: the averaged weights of the checkpoint, in their own dtype, with its buffers.

    Raises:
        CheckpointError: damaged, without a model, not expressible in the format, or the file system refused.
        ConfigError: something is at `out` already, or the format takes no averaged weights.
    """
    if ema and form == "deepspeed":
        raise ConfigError("--ema with --format deepspeed: such a checkpoint is one to train on from; leave --ema out")
    if out.exists() or out.is_symlink():
        raise ConfigError(f"OUT {printable(str(out))} is there already and is not written over; choose another name")
    temporary = out.with_name(f".{out.name}.tmp-{secrets.token_hex(8)}")
    try:
        with nullcontext(weights) if weights else opened(path) as tensors:
            if not any(name.startswith("model/") for name in tensors.stored):
                raise CheckpointError(f"{printable(path.name)} has no model: nothing to export")
            taken = _averaged(path, tensors) if ema and not weights else tensors
            source = Source(path, taken, _options_of(path), read_manifest(path).step, read_state(path), beside)
            out.parent.mkdir(parents=True, exist_ok=True)
            _FORMATS[form](source, temporary)
        os.rename(temporary, out)
    except OSError as error:
        raise refusal_error(error) from error
    finally:
        remove(temporary)
    return out


def _averaged(path: Path, tensors: Whole) -> Whole:
    """The tensors, with each weight's average in its place, also under the second names of what is tied."""
    average = {f"model/{name.removeprefix(AVERAGE)}": name for name in averages_of(path, tensors.stored)}
    of = {id(tensors.stored[name]): averaged for name, averaged in average.items()}
    place = {name: of.get(id(stored), name) for name, stored in tensors.stored.items()}
    return Whole({name: tensors.stored[place[name]] for name in place}, lambda name: tensors.read(place[name]))


def _options_of(path: Path) -> dict[str, Any]:
    """The config.toml of the run that the checkpoint lies in; {} where there is none."""
    file = path.parent.parent / "config.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}


def _classes_of(path: Path) -> list[str]:
    """The names of the classes, of a task that has such; they stand in the run's environment.json."""
    file = path.parent.parent / "environment.json"
    try:
        found: list[str] = json.loads(json.loads(file.read_text(encoding="utf-8"))["sources"]["classes"])
    except (FileNotFoundError, ValueError, KeyError):
        return []
    return found


def _weights(tensors: Whole) -> tuple[list[str], dict[str, str]]:
    """(the model's names, each stored tensor once; second names of tied tensors -> the first)."""
    first: dict[int, str] = {}
    seconds: dict[str, str] = {}
    for name in sorted(name for name in tensors.stored if name.startswith("model/")):
        kept = first.setdefault(id(tensors.stored[name]), name)
        if kept != name:
            seconds[name.removeprefix("model/")] = kept.removeprefix("model/")
    return [name.removeprefix("model/") for name in first.values()], seconds


class Outgoing(NamedTuple):
    """A tensor to write: its name, dtype name and shape, and how to get it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def safetensors_of(tensors: Iterable[Outgoing], notes: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file; each tensor is read when its turn comes, and dropped.

    Raises:
        CheckpointError: a tensor has a dtype that the format, as others read it, does not know.
    """
    ordered = sorted(tensors, key=lambda each: (-itemsize(each.dtype), each.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **notes}}
    end = 0
    for each in ordered:
        begin = end
        if each.dtype not in CODES:
            raise CheckpointError(f"safetensors has no {each.dtype}, which '{each.name}' is: use --format torch")
        end += torch.Size(each.shape).numel() * itemsize(each.dtype)
        header[each.name] = {"dtype": CODES[each.dtype], "shape": list(each.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for each in ordered:
        yield bytes_of(each.read())


def outgoing(source: Source, names: Iterable[str]) -> Iterator[Outgoing]:
    """The model's tensors of these plain names, as they are stored."""
    for name in names:
        stored = source.tensors.stored[f"model/{name}"]
        yield Outgoing(name, stored.dtype, stored.shape, partial(source.tensors.read, f"model/{name}"))


def _safetensors(source: Source, out: Path) -> None:
    """Second names of tied tensors stand in the header, where safetensors.torch.load_model looks for them."""
    names, seconds = _weights(source.tensors)
    write_file(out, safetensors_of(outgoing(source, names), seconds))


def _torch(source: Source, out: Path) -> None:
    names, seconds = _weights(source.tensors)
    # Copies: a tensor that is a part of a mapped file would be saved with the whole file.
    held = {name: source.tensors.read(f"model/{name}").clone() for name in names}
    held |= {second: held[name] for second, name in seconds.items()}
    torch.save(held, out)


def _hub(source: Source, out: Path) -> None:
    names, seconds = _weights(source.tensors)
    shapes = {name: source.tensors.stored[f"model/{name}"].shape for name in (*names, *seconds)}
    out.mkdir()
    renamed = write_hub(source.options, source.state, shapes, out, _classes_of(source.path))
    source.beside(out)
    sent = []
    for each in outgoing(source, names):
        name, turned = renamed(each.name)
        shape = each.shape[::-1] if turned else each.shape
        read = partial(_turned, each.read) if turned else each.read
        sent.append(Outgoing(name, each.dtype, shape, read))
    write_file(out / "model.safetensors", safetensors_of(sent, {}))


def _turned(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    return read().t()


def _peft(source: Source, out: Path) -> None:
    names, _ = _weights(source.tensors)
    out.mkdir()
    renamed = write_adapters(source.options, source.state, names, out)
    sent = [each._replace(name=renamed[each.name]) for each in outgoing(source, names)]
    write_file(out / "adapter_model.safetensors", safetensors_of(sent, {}))


def _deepspeed(source: Source, out: Path) -> None:
    write_universal(source.tensors, source.step, out)


_FORMATS: dict[str, Callable[[Source, Path], None]] = {
    "safetensors": _safetensors,
    "torch": _torch,
    "hf": _hub,
    "peft": _peft,
    "deepspeed": _deepspeed,
}
