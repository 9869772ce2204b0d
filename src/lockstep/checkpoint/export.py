"""Export a checkpoint's weights to other formats.

    export(path, Path("model.safetensors"), "safetensors")

The formats are a safetensors file, a torch file, a folder of transformers ("hf"), and adapters of peft. Each is
written under a temporary name, and renamed when it is complete.
"""

import json
import os
import re
import secrets
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.checkpoint.files import printable, refusal_error, remove, write_file
from lockstep.checkpoint.format import CODES, itemsize, read_run_state, step_of
from lockstep.checkpoint.read import AVERAGE, FullTensors, averages_of, opened
from lockstep.checkpoint.store import list_steps, newest, path_of
from lockstep.checkpoint.write import bytes_of
from lockstep.config.schema import Config
from lockstep.config.task_options import OWN, kind_of
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.gpt import PRESETS
from lockstep.models.hf import HubModel
from lockstep.models.hf_heads import IMAGES, TEXTS, HubClassifier, HubEncoder
from lockstep.models.lora import Adapters, exported_name, write_config
from lockstep.run_state import RunState
from lockstep.text.cache import default_cache

__all__ = [
    "chosen",
    "export",
]


# --- transformers and peft

Shapes = Mapping[str, tuple[int, ...]]
Renamed = Callable[[str], tuple[str, bool]]

_TOP = {
    "tokens.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
_INNER = {
    "attention_norm": "ln_1",
    "attention.inputs": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "expand": "mlp.c_fc",
    "output": "mlp.c_proj",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)", re.ASCII)


def _write_hub(
    options: Mapping[str, Any], state: RunState, shapes: Shapes, folder: Path, classes: Sequence[str] = ()
) -> Renamed:
    """Write `folder`/config.json, and return the mapping of tensor names.

    Args:
        options: the run's configuration, nested as in its config.toml.
        state: of the checkpoint; it has the shape of a built-in GPT.
        shapes: of the model's tensors by plain name.
        classes: names of the classes, if the run's task has any.

    Returns:
        A function: name -> (its name there, whether it is transposed).

    Raises:
        CheckpointError: transformers does not know the run's model.
        ConfigError: the hub's model is not available any more, or transformers is not installed.
    """
    name = str(options.get("model_name", Config().model_name if options else ""))  # a missing option has its default
    if {"tokens.weight", "positions.weight"} <= shapes.keys() and (state.gpt or name in PRESETS):
        _write(folder, _gpt2(_heads(name, state, shapes), options, state, shapes))
        return _as_gpt2
    if not name or name.startswith(("builtin:", "timm:")) or all(key in shapes for key in _TOP):
        task = str(options.get("task", Config().task))
        made = f"model '{name}'" if kind_of(task) != OWN else f"model, of --task {task},"
        raise CheckpointError(
            f"--format hf: the run's {made} is neither the built-in GPT nor one that came from transformers; "
            "use --format safetensors"
        )
    asked = options.get("model", {})
    settings: dict[str, Any] = {
        "revision": str(asked.get("revision", "")),
        "trust_remote_code": bool(asked.get("trust_remote_code", False)),
        "cache": default_cache(),
        "say": lambda line: None,
    }
    kind = kind_of(str(options.get("task", "")))
    if kind == "images":
        HubClassifier(name, IMAGES, classes=classes, **settings).save_config(folder, shapes)
    elif kind == "classification":
        own = str(options.get("tokenizer", ""))
        encoder = HubEncoder(own or name, **settings | ({"revision": ""} if own else {}))
        HubClassifier(name, TEXTS, classes=classes, pad=encoder.pad, **settings).save_config(folder, shapes)
        encoder.save(folder)
    else:
        HubModel(name, **settings).save_config(folder, shapes)
    return lambda plain: (plain, False)


def _heads(name: str, state: RunState, shapes: Shapes) -> int:
    """Return the number of heads of a built-in GPT, which no tensor's shape shows.

    An older checkpoint does not record it; then it is the preset's, if that fits.

    Raises:
        CheckpointError: the width differs from the preset's.
    """
    if state.gpt:
        return int(state.gpt["heads"])
    width = shapes["tokens.weight"][1]
    if PRESETS[name].width != width:
        raise CheckpointError(
            f"--format hf: the checkpoint does not say how many heads its GPT of width {width} has; use --format "
            "safetensors"
        )
    return PRESETS[name].heads


def _gpt2(heads: int, options: Mapping[str, Any], state: RunState, shapes: Shapes) -> dict[str, Any]:
    rows, width = shapes["tokens.weight"]
    dropout = float((state.gpt or options.get("model", {})).get("dropout", 0.0))
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_pytorch_tanh",  # torch's kernel, so that logits have the same bits
        "layer_norm_epsilon": 1e-5,
        "vocab_size": rows,  # padded, as the embedding is
        "n_positions": shapes["positions.weight"][0],
        "n_embd": width,
        "n_layer": 1 + max(int(found[1]) for found in map(_BLOCK.fullmatch, shapes) if found),
        "n_head": heads,
        "attn_pdrop": dropout,
        "embd_pdrop": dropout,
        "resid_pdrop": dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
    }


def _as_gpt2(name: str) -> tuple[str, bool]:
    if name in _TOP:
        return _TOP[name], False
    found = _BLOCK.fullmatch(name)
    if not found or found[2] not in _INNER:
        raise CheckpointError(f"--format hf: a GPT-2 has no place for the tensor '{name}'; use --format safetensors")
    is_matrix = found[3] == "weight" and not found[2].endswith("norm")
    return f"transformer.h.{found[1]}.{_INNER[found[2]]}.{found[3]}", is_matrix


def _write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_adapters(options: Mapping[str, Any], state: RunState, names: Iterable[str], folder: Path) -> dict[str, str]:
    """Write `folder`/adapter_config.json, and return each tensor's name there.

    Args:
        options: the run's configuration, nested as in its config.toml.
        state: of the checkpoint.
        names: of the checkpoint's model tensors.

    Raises:
        CheckpointError: it has no adapters, or has other tensors that the format cannot store.
        ConfigError: peft is not installed.
    """
    if not state.lora:
        raise CheckpointError("--format peft: the checkpoint has no adapters, but a whole model; use --format hf")
    adapters = Adapters.of(state.lora)
    renamed = {name: exported_name(name, adapters.whole) for name in names}
    beside = next((name for name, new in renamed.items() if not new), None)
    if beside is not None:
        raise CheckpointError(
            f"--format peft has no place for '{beside}', which the run kept beside its adapters; use --format torch "
            "--merge"
        )
    task, name = str(options.get("task", "")), str(options.get("model_name", Config().model_name))
    base = name if task in _TYPES and not name.startswith("builtin:") else ""
    write_config(adapters, folder, base, _TYPES[task] if base else "")
    return renamed


_TYPES = {"": "CAUSAL_LM", "causal-lm": "CAUSAL_LM", "classification": "SEQ_CLS", "images": ""}  # --task -> peft's own


# --- all formats

Beside = Callable[[Path], None]


class ExportSource(NamedTuple):
    """A checkpoint to export.

    Attributes:
        path: the checkpoint's folder.
        tensors: its tensors.
        options: the run's config.toml as nested dicts; {} without one.
        state: everything in it except tensors.
        beside: writes the other files of an `hf` folder: a tokenizer.
    """

    path: Path
    tensors: FullTensors
    options: dict[str, Any]
    state: RunState
    beside: Beside


def chosen(run: Path, step: int | None) -> Path:
    """Return a complete checkpoint of the run: of this step, or the newest.

    Args:
        run: a run's folder, or a checkpoint's, which is returned as it is.
        step: None: the newest complete one.

    Raises:
        CheckpointError: no such run, no such step, or none is complete.
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
    weights: FullTensors | None = None,
    beside: Beside = lambda folder: None,
    ema: bool = False,
) -> Path:
    """Export the model of a checkpoint in the format `form`, and return `out`.

    `out` gets its name only when it is complete.

    Args:
        path: the checkpoint's folder.
        out: the path to write; must not exist.
        form: "safetensors", "torch", "hf", or "peft" for adapters.
        weights: replaces the checkpoint's own tensors, by the names it would have: `model/NAME`.
        beside: writes the other files of an `hf` folder.
        ema: export the averaged weights, in their own dtype, with the checkpoint's buffers.

    Raises:
        CheckpointError: damaged, without a model, not expressible in the format, or the file system refused.
        ConfigError: `out` exists.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"OUT {printable(str(out))} is there already and is not written over; choose another name")
    temporary = out.with_name(f".{out.name}.tmp-{secrets.token_hex(8)}")
    try:
        with nullcontext(weights) if weights else opened(path) as tensors:
            if not any(name.startswith("model/") for name in tensors.stored):
                raise CheckpointError(f"{printable(path.name)} has no model: nothing to export")
            taken = _averaged(path, tensors) if ema and not weights else tensors
            source = ExportSource(path, taken, _options_of(path), read_run_state(path), beside)
            out.parent.mkdir(parents=True, exist_ok=True)
            _FORMATS[form](source, temporary)
        os.rename(temporary, out)
    except OSError as error:
        raise refusal_error(error) from error
    finally:
        remove(temporary)
    return out


def _averaged(path: Path, tensors: FullTensors) -> FullTensors:
    """Replace each weight by its average, also under the aliases of tied weights."""
    average = {f"model/{name.removeprefix(AVERAGE)}": name for name in averages_of(path, tensors.stored)}
    of = {id(tensors.stored[name]): averaged for name, averaged in average.items()}
    place = {name: of.get(id(stored), name) for name, stored in tensors.stored.items()}
    return FullTensors({name: tensors.stored[place[name]] for name in place}, lambda name: tensors.read(place[name]))


def _options_of(path: Path) -> dict[str, Any]:
    """Read the config.toml of the checkpoint's run; {} without one."""
    file = path.parent.parent / "config.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}


def _classes_of(path: Path) -> list[str]:
    """Read the task's class names from the run's environment.json; [] without them."""
    file = path.parent.parent / "environment.json"
    try:
        found: list[str] = json.loads(json.loads(file.read_text(encoding="utf-8"))["sources"]["classes"])
    except (FileNotFoundError, ValueError, KeyError):
        return []
    return found


def _weights(tensors: FullTensors) -> tuple[list[str], dict[str, str]]:
    """Return the model's names, each stored tensor once, and the aliases.

    Returns:
        (names, alias -> name) of tied tensors.
    """
    first: dict[int, str] = {}
    seconds: dict[str, str] = {}
    for name in sorted(name for name in tensors.stored if name.startswith("model/")):
        kept = first.setdefault(id(tensors.stored[name]), name)
        if kept != name:
            seconds[name.removeprefix("model/")] = kept.removeprefix("model/")
    return [name.removeprefix("model/") for name in first.values()], seconds


class Outgoing(NamedTuple):
    """A tensor to write: name, dtype name, shape, and a function that reads it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def _safetensors_of(tensors: Iterable[Outgoing], notes: dict[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file; each tensor is read in turn and dropped.

    Raises:
        CheckpointError: a tensor has a dtype that readers of the format do not know.
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


def outgoing(source: ExportSource, names: Iterable[str]) -> Iterator[Outgoing]:
    """Yield the model's tensors of these plain names, as they are stored."""
    for name in names:
        stored = source.tensors.stored[f"model/{name}"]
        yield Outgoing(name, stored.dtype, stored.shape, partial(source.tensors.read, f"model/{name}"))


def _safetensors(source: ExportSource, out: Path) -> None:
    """Write aliases of tied tensors into the header, where safetensors.torch.load_model expects them."""
    names, seconds = _weights(source.tensors)
    write_file(out, _safetensors_of(outgoing(source, names), seconds))


def _torch(source: ExportSource, out: Path) -> None:
    names, seconds = _weights(source.tensors)
    # Copies: saving a view of a mapped file would save the whole file.
    held = {name: source.tensors.read(f"model/{name}").clone() for name in names}
    held |= {second: held[name] for second, name in seconds.items()}
    torch.save(held, out)


def _hub(source: ExportSource, out: Path) -> None:
    names, seconds = _weights(source.tensors)
    shapes = {name: source.tensors.stored[f"model/{name}"].shape for name in (*names, *seconds)}
    out.mkdir()
    renamed = _write_hub(source.options, source.state, shapes, out, _classes_of(source.path))
    source.beside(out)
    sent = []
    for each in outgoing(source, names):
        name, turned = renamed(each.name)
        shape = each.shape[::-1] if turned else each.shape
        read = partial(_turned, each.read) if turned else each.read
        sent.append(Outgoing(name, each.dtype, shape, read))
    write_file(out / "model.safetensors", _safetensors_of(sent, {}))


def _turned(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    return read().t()


def _peft(source: ExportSource, out: Path) -> None:
    names, _ = _weights(source.tensors)
    out.mkdir()
    renamed = _write_adapters(source.options, source.state, names, out)
    sent = [each._replace(name=renamed[each.name]) for each in outgoing(source, names)]
    write_file(out / "adapter_model.safetensors", _safetensors_of(sent, {}))


_FORMATS: dict[str, Callable[[ExportSource, Path], None]] = {
    "safetensors": _safetensors,
    "torch": _torch,
    "hf": _hub,
    "peft": _peft,
}
