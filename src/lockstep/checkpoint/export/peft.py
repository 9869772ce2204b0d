"""What `peft` needs beside the adapters' weights: an adapter_config.json, and its own names for them.

    renamed = write_adapters(options, state, names, folder)         # writes folder/adapter_config.json
    renamed["fc.lora_A.default.weight"]                             # "base_model.model.fc.lora_A.weight"

`peft.PeftModel.from_pretrained(base, folder)` then opens it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.config import Config
from lockstep.errors import CheckpointError
from lockstep.models.lora import Adapters, exported_name, write_config

__all__ = ["write_adapters"]


def write_adapters(
    options: Mapping[str, Any], state: Mapping[str, Any], names: Iterable[str], folder: Path
) -> dict[str, str]:
    """Writes `folder`/adapter_config.json, and returns each tensor's name there.

    Args:
        options: the run's configuration, nested as in its config.toml.
        state: of the checkpoint.
        names: of the checkpoint's model tensors.

    Raises:
        CheckpointError: it has no adapters, or tensors beside them, which the format has no place for.
        ConfigError: peft is not installed.
    """
    known = state.get("lora")
    if not known:
        raise CheckpointError("--format peft: the checkpoint has no adapters, but a whole model; use --format hf")
    kind = (known["rank"], float(known["alpha"]), known["dropout"], known["targets"], known["turned"])
    adapters = Adapters(*kind, tuple(known.get("modules_to_save", ())))
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


_TYPES = {"": "CAUSAL_LM", "causal-lm": "CAUSAL_LM", "classification": "SEQ_CLS", "images": ""}  # --task: peft's own
