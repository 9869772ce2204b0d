"""Export a checkpoint's weights to other formats.

    export(path, Path("model.safetensors"), "safetensors")

The formats are a safetensors file, a torch file, a folder of torch.distributed.checkpoint ("dcp"), one of transformers
("hf"), and adapters of peft. Each is written under a temporary name, and renamed when it is complete.
"""

import json
import os
import re
import secrets
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.checkpoint.files import remove, write_file
from lockstep.checkpoint.foreign import write_dcp
from lockstep.checkpoint.format import CODES, itemsize, read_run_state, step_of
from lockstep.checkpoint.read import AVERAGE, FullTensors, averages_of, evaluated_of, open_tensors
from lockstep.checkpoint.store import list_steps, newest, path_of
from lockstep.checkpoint.write import bytes_of
from lockstep.config.schema import DEFAULTS
from lockstep.config.task_options import OWN, kind_of
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.files import bytes_text, default_cache, printable, refusal_error, storage_error
from lockstep.models.gpt import PRESETS
from lockstep.models.hf import HubModel
from lockstep.models.hf_heads import IMAGES, TEXTS, HubClassifier, HubEncoder
from lockstep.models.lora import Adapters, exported_name, write_config
from lockstep.run_state import RunState

__all__ = [
    "choose_checkpoint",
    "export",
]


# --- transformers and peft

Shapes = Mapping[str, tuple[int, ...]]
NameMap = Callable[[str], tuple[str, bool]]

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
) -> NameMap:
    """Write `folder`/config.json for transformers, and return the mapping of tensor names.

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
    # A missing option has its default value.
    name = str(options.get("model_name", DEFAULTS.model_name if options else ""))
    if {"tokens.weight", "positions.weight"} <= shapes.keys() and (state.gpt or name in PRESETS):
        _write(folder, _gpt2(_heads(name, state, shapes), options, state, shapes))
        return _as_gpt2
    if not name or name.startswith(("builtin:", "timm:")) or all(key in shapes for key in _TOP):
        task = str(options.get("task", DEFAULTS.task))
        if kind_of(task) != OWN:
            model = f"model '{name}'"
        else:
            model = f"model, of --task {task},"
        raise CheckpointError(
            f"--format hf: the run's {model} is neither the built-in GPT nor one from transformers; "
            "use --format safetensors"
        )
    model_options = options.get("model", {})
    settings: dict[str, Any] = {
        "revision": str(model_options.get("revision", "")),
        "trust_remote_code": bool(model_options.get("trust_remote_code", False)),
        "cache": default_cache(),
        "say": lambda line: None,
    }
    task_name = kind_of(str(options.get("task", "")))
    if task_name == "images":
        HubClassifier(name, IMAGES, classes=classes, **settings).save_config(folder, shapes)
    elif task_name == "classification":
        tokenizer = str(options.get("tokenizer", ""))
        encoder = HubEncoder(tokenizer or name, **settings | ({"revision": ""} if tokenizer else {}))
        HubClassifier(name, TEXTS, classes=classes, pad=encoder.pad, **settings).save_config(folder, shapes)
        encoder.save(folder)
    else:
        HubModel(name, **settings).save_config(folder, shapes)
    return lambda plain: (plain, False)


def _heads(name: str, state: RunState, shapes: Shapes) -> int:
    """Return the number of heads of a built-in GPT, which no tensor's shape reveals.

    Older checkpoints do not record it; for them it is the preset's, if the width fits.

    Raises:
        CheckpointError: the width differs from the preset's.
    """
    if state.gpt:
        return int(state.gpt["heads"])
    width = shapes["tokens.weight"][1]
    if PRESETS[name].width != width:
        raise CheckpointError(
            f"--format hf: the checkpoint does not record the number of heads of its GPT of width {width}; use "
            "--format safetensors"
        )
    return PRESETS[name].heads


def _gpt2(heads: int, options: Mapping[str, Any], state: RunState, shapes: Shapes) -> dict[str, Any]:
    rows, width = shapes["tokens.weight"]
    dropout = float((state.gpt or options.get("model", {})).get("dropout", 0.0))
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        # As torch's kernel computes it, so that logits are bitwise identical.
        "activation_function": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-5,
        # Padded, as the embedding is.
        "vocab_size": rows,
        "n_positions": shapes["positions.weight"][0],
        "n_embd": width,
        "n_layer": 1 + max(int(match[1]) for match in map(_BLOCK.fullmatch, shapes) if match),
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
    match = _BLOCK.fullmatch(name)
    if not match or match[2] not in _INNER:
        raise CheckpointError(f"--format hf: GPT-2 has no tensor for '{name}'; use --format safetensors")
    is_matrix = match[3] == "weight" and not match[2].endswith("norm")
    return f"transformer.h.{match[1]}.{_INNER[match[2]]}.{match[3]}", is_matrix


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
        raise CheckpointError("--format peft: the checkpoint has a full model and no adapters; use --format hf")
    adapters = Adapters.of(state.lora)
    renamed = {name: exported_name(name, adapters.whole) for name in names}
    stray = next((name for name, new in renamed.items() if not new), None)
    if stray is not None:
        raise CheckpointError(
            f"--format peft cannot store '{stray}', which the run has besides its adapters; use --format torch --merge"
        )
    task = str(options.get("task", ""))
    name = str(options.get("model_name", DEFAULTS.model_name))
    if task in _TYPES and not name.startswith("builtin:"):
        base = name
    else:
        base = ""
    write_config(adapters, folder, base, _TYPES[task] if base else "")
    return renamed


# --task -> peft's task type
_TYPES = {
    "": "CAUSAL_LM",
    "causal-lm": "CAUSAL_LM",
    "classification": "SEQ_CLS",
    "images": "",
}


# --- all formats

WriteExtras = Callable[[Path], None]


class ExportSource(NamedTuple):
    """A checkpoint to export.

    Attributes:
        path: the checkpoint's folder.
        tensors: its tensors.
        options: the run's config.toml as nested dicts; {} without one.
        state: the run's state in it.
        write_extras: writes the other files of an `hf` folder, such as a tokenizer.
    """

    path: Path
    tensors: FullTensors
    options: dict[str, Any]
    state: RunState
    write_extras: WriteExtras


def choose_checkpoint(run: Path, step: int | None) -> Path:
    """Return the run's complete checkpoint of this step, or its newest.

    Args:
        run: a run's folder; or a checkpoint's, which is returned unchecked.
        step: None: the newest complete one.

    Raises:
        CheckpointError: no such run, no such step, or none is complete.
    """
    folder = printable(str(run))
    if run.is_dir() and step_of(run.resolve().name) is not None:
        return run.resolve()
    if not (run / "checkpoints").is_dir():
        raise CheckpointError(f"{folder} is neither a run's folder nor a checkpoint; pass SAVE_DIR/EXPERIMENT_NAME")
    if step is not None and step not in list_steps(run):
        steps = ", ".join(map(str, list_steps(run))) or "none"
        raise CheckpointError(f"--step {step}: {folder} has no checkpoint of that step; it has: {steps}")
    path = path_of(run, step) if step is not None else newest(run, say=lambda line: print(line, file=sys.stderr))
    if path is None:
        raise CheckpointError(f"{folder} has no complete checkpoint; see `lockstep checkpoint verify`")
    return path


def export(
    path: Path,
    out: Path,
    form: str,
    *,
    weights: FullTensors | None = None,
    write_extras: WriteExtras = lambda folder: None,
    ema: bool = False,
) -> Path:
    """Export the model of a checkpoint in the format `form`, and return `out`.

    `out` appears only once it is complete.

    Args:
        path: the checkpoint's folder.
        out: the path to write; must not exist.
        form: "safetensors", "torch", "dcp", "hf", or "peft" for adapters.
        weights: replaces the checkpoint's own tensors, by the names it would have: `model/NAME`.
        write_extras: writes the other files of an `hf` folder.
        ema: export the averaged weights, in their own dtype, with the checkpoint's buffers.

    Raises:
        CheckpointError: damaged, without a model, not representable in the format, or unreadable.
        ConfigError: `out` exists or cannot be written, or its disk has too little room.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"OUT {printable(str(out))} already exists and is not overwritten; choose another name")
    temporary = out.with_name(f".{out.name}.tmp-{secrets.token_hex(8)}")
    try:
        with nullcontext(weights) if weights else open_tensors(path) as tensors:
            if not any(name.startswith("model/") for name in tensors.contents):
                raise CheckpointError(f"{printable(path.name)} has no model to export")
            if weights:
                source_tensors = tensors
            else:
                source_tensors = _weights_for_use(path, tensors, ema=ema)
            source = ExportSource(path, source_tensors, _options_of(path), read_run_state(path), write_extras)
            out.parent.mkdir(parents=True, exist_ok=True)
            _check_room(out, source.tensors)
            _FORMATS[form](source, temporary)
        os.rename(temporary, out)
    except OSError as error:
        raise _write_error(out, temporary, error) or refusal_error(error) from error
    finally:
        remove(temporary)
    return out


def _check_room(out: Path, tensors: FullTensors) -> None:
    """Raise ConfigError if the model's tensors do not fit on the disk.

    torch.save and dcp report a full disk as errors of their own, after they have filled it.
    """
    stored = {}
    for name, tensor in tensors.contents.items():
        if name.startswith("model/"):
            stored[id(tensor)] = tensor
    size = sum(torch.Size(tensor.shape).numel() * itemsize(tensor.dtype) for tensor in stored.values())
    if (free := shutil.disk_usage(out.parent).free) < size:
        raise ConfigError(
            f"OUT {printable(str(out))}: {bytes_text(free)} free, and the weights take {bytes_text(size)}; make room, "
            "or choose another folder"
        )


def _write_error(out: Path, temporary: Path, error: OSError) -> LockstepError | None:
    """Return the error for an unwritable `out`; None if another file failed."""
    if isinstance(error.filename, str | bytes | os.PathLike):
        refused = Path(os.fsdecode(error.filename))
    else:
        refused = None
    if refused is None or not (temporary.is_relative_to(refused) or refused.is_relative_to(temporary)):
        return None
    reason = error.strerror or str(error)
    return storage_error(error) or ConfigError(f"OUT {printable(str(out))}: {reason}; choose another folder")


def _weights_for_use(path: Path, tensors: FullTensors, *, ema: bool) -> FullTensors:
    """Return the tensors with the averaged weights, or those for evaluation, under all names."""
    if ema:
        chosen = {}
        for name in averages_of(path, tensors.contents):
            chosen[f"model/{name.removeprefix(AVERAGE)}"] = name
    else:
        chosen = evaluated_of(tensors.contents)
    if not chosen:
        return tensors
    # Names of tied parameters share one stored tensor.
    of = {}
    for name, chosen_name in chosen.items():
        of[id(tensors.contents[name])] = chosen_name
    sources = {}
    for name, tensor in tensors.contents.items():
        sources[name] = of.get(id(tensor), name)
    return FullTensors(
        {name: tensors.contents[sources[name]] for name in sources}, lambda name: tensors.read(sources[name])
    )


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
        classes: list[str] = json.loads(json.loads(file.read_text(encoding="utf-8"))["sources"]["classes"])
    except (FileNotFoundError, ValueError, KeyError):
        return []
    return classes


def _weights(tensors: FullTensors) -> tuple[list[str], dict[str, str]]:
    """Return the model's names, each stored tensor once, and the aliases.

    Returns:
        (names, alias -> name) of tied tensors.
    """
    first_names: dict[int, str] = {}
    seconds: dict[str, str] = {}
    for name in sorted(name for name in tensors.contents if name.startswith("model/")):
        original = first_names.setdefault(id(tensors.contents[name]), name)
        if original != name:
            seconds[name.removeprefix("model/")] = original.removeprefix("model/")
    return [name.removeprefix("model/") for name in first_names.values()], seconds


class ExportTensor(NamedTuple):
    """A tensor to write: name, dtype name, shape, and a function that reads it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def _safetensors_of(tensors: Iterable[ExportTensor], notes: dict[str, str]) -> Iterator[bytes | memoryview]:
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
            raise CheckpointError(f"safetensors has no dtype {each.dtype}, as '{each.name}' needs; use --format torch")
        end += torch.Size(each.shape).numel() * itemsize(each.dtype)
        header[each.name] = {"dtype": CODES[each.dtype], "shape": list(each.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # The format wants the tensors aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for each in ordered:
        yield bytes_of(each.read())


def export_tensors(source: ExportSource, names: Iterable[str]) -> Iterator[ExportTensor]:
    """Yield the model's tensors of these plain names, as they are stored."""
    for name in names:
        tensor = source.tensors.contents[f"model/{name}"]
        yield ExportTensor(name, tensor.dtype, tensor.shape, partial(source.tensors.read, f"model/{name}"))


def _safetensors(source: ExportSource, out: Path) -> None:
    """Write aliases of tied tensors into the header, where safetensors.torch.load_model expects them."""
    names, seconds = _weights(source.tensors)
    write_file(out, _safetensors_of(export_tensors(source, names), seconds))


def _torch(source: ExportSource, out: Path) -> None:
    names, seconds = _weights(source.tensors)
    # Copies: saving a view of a mapped file would save the whole file.
    weights = {name: source.tensors.read(f"model/{name}").clone() for name in names}
    weights |= {second: weights[name] for second, name in seconds.items()}
    torch.save(weights, out)


def _dcp(source: ExportSource, out: Path) -> None:
    """Write each name of a tied tensor, as a reader of the format expects."""
    names, seconds = _weights(source.tensors)
    weights = {name: source.tensors.read(f"model/{name}") for name in names}
    write_dcp(out, weights | {second: weights[name] for second, name in seconds.items()})


def _hub(source: ExportSource, out: Path) -> None:
    names, seconds = _weights(source.tensors)
    shapes = {name: source.tensors.contents[f"model/{name}"].shape for name in (*names, *seconds)}
    out.mkdir()
    name_map = _write_hub(source.options, source.state, shapes, out, _classes_of(source.path))
    source.write_extras(out)
    outgoing = []
    for tensor in export_tensors(source, names):
        name, is_transposed = name_map(tensor.name)
        shape = tensor.shape[::-1] if is_transposed else tensor.shape
        read = partial(_read_transposed, tensor.read) if is_transposed else tensor.read
        outgoing.append(ExportTensor(name, tensor.dtype, shape, read))
    write_file(out / "model.safetensors", _safetensors_of(outgoing, {}))


def _read_transposed(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    return read().t()


def _peft(source: ExportSource, out: Path) -> None:
    names, _ = _weights(source.tensors)
    out.mkdir()
    renamed = _write_adapters(source.options, source.state, names, out)
    outgoing = []
    for tensor in export_tensors(source, names):
        outgoing.append(tensor._replace(name=renamed[tensor.name]))
    write_file(out / "adapter_model.safetensors", _safetensors_of(outgoing, {}))


_FORMATS: dict[str, Callable[[ExportSource, Path], None]] = {
    "safetensors": _safetensors,
    "torch": _torch,
    "dcp": _dcp,
    "hf": _hub,
    "peft": _peft,
}
