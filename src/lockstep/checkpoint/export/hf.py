"""What `transformers` needs beside the weights: a config.json, and its own names for them.

    renamed = write_hub(options, state, shapes, folder)     writes folder/config.json
    renamed("blocks.0.attention.inputs.weight")         ("transformer.h.0.attn.c_attn.weight", True): transposed

The built-in GPT is a GPT-2 (Radford et al., 2019) under other names, whose matrices lie transposed there. A model that
came from a hub or a folder keeps its names and its config.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.config import Config
from lockstep.errors import CheckpointError
from lockstep.models.gpt import PRESETS
from lockstep.models.hf import HubModel
from lockstep.models.hf_heads import IMAGES, TEXTS, HubClassifier, HubEncoder
from lockstep.tasks.options import OWN, kind_of
from lockstep.text.hub_cache import default_cache

__all__ = ["write_hub"]

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


def write_hub(
    options: Mapping[str, Any], state: Mapping[str, Any], shapes: Shapes, folder: Path, classes: Sequence[str] = ()
) -> Renamed:
    """Writes `folder`/config.json, and returns what gives a tensor's name there and whether it lies transposed.

    Args:
        options: the run's configuration, nested as in its config.toml.
        state: of the checkpoint; of a built-in GPT it says the shape.
        shapes: of the model's tensors by plain name.
        classes: their names, where the run's task has classes.

    Raises:
        CheckpointError: the run's model is not one that transformers knows.
        ConfigError: the hub's model is not to be had any more, or transformers is not installed.
    """
    name = str(options.get("model_name", Config().model_name if options else ""))  # what is left out is the default
    if {"tokens.weight", "positions.weight"} <= shapes.keys() and ("gpt" in state or name in PRESETS):
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


def _heads(name: str, state: Mapping[str, Any], shapes: Shapes) -> int:
    """Of a built-in GPT: no tensor's shape says it. A checkpoint from before it was kept has the preset's, if it fits.

    Raises:
        CheckpointError: the width is another than the preset's.
    """
    if "gpt" in state:
        return int(state["gpt"]["heads"])
    width = shapes["tokens.weight"][1]
    if PRESETS[name].width != width:
        raise CheckpointError(
            f"--format hf: the checkpoint does not say how many heads its GPT of width {width} has; use --format "
            "safetensors"
        )
    return PRESETS[name].heads


def _gpt2(heads: int, options: Mapping[str, Any], state: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    rows, width = shapes["tokens.weight"]
    dropout = float(state.get("gpt", options.get("model", {})).get("dropout", 0.0))
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_pytorch_tanh",  # torch's own kernel, so that logits have the same bits
        "layer_norm_epsilon": 1e-5,
        "vocab_size": rows,  # padded, as the table is
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
