"""Defaults by name: `--preset source` is the single-device script that most people start from.

    values = applied({"model_name": "openai-community/gpt2", "dataset_name": "tatsu-lab/alpaca"})

A preset sets defaults and nothing else: a config file and flags win over it, and what has no effect beside them is left
out of it. It is taken by itself where the model and
the data are both named on the hub, since that is the script's own command; `--preset none` refuses it.
"""

from typing import Any

from lockstep.config.config import Config
from lockstep.config.hub_name import is_hub_name
from lockstep.config.together import without_idle
from lockstep.tasks.options import LANGUAGE, kind_of

__all__ = ["PRESETS", "applied", "described"]

# The options of the script in chapter 1 of the "distributed training guide": AdamW with torch's own defaults, the
# rate of CosineAnnealingLR(T_max=1000, eta_min=lr / 100), bf16 parameters, blocks of text without separators.
_SOURCE: dict[str, Any] = {
    "seed": 0,
    "num_epochs": 100,
    "lr": 3e-5,
    "batch_size": 1,
    "log_freq": 100,
    "ckpt_freq": 500,
    "seq_len": 1024,
    "precision": "bf16-true",
    "data.packing": "blocks",
    "optim.beta2": 0.999,
    "optim.weight_decay": 0.01,
    "optim.decay_embeddings": True,
    "optim.clip": 0.0,
    "optim.schedule": "cosine-periodic",
    "optim.period": 1000,
    "optim.warmup_steps": 0,
    "optim.floor": 0.01,
}
PRESETS: dict[str, dict[str, Any]] = {"none": {}, "source": _SOURCE}


def applied(values: dict[str, Any]) -> dict[str, Any]:
    """`values` (dotted names, from file and flags) over the defaults of the preset that they name or bring about."""
    chosen = values.get("preset", "auto")
    both = all(is_hub_name(str(values.get(key, ""))) for key in ("model_name", "dataset_name"))
    if chosen == "auto" and both and kind_of(str(values.get("task", ""))) == LANGUAGE:
        chosen = "source"
    return {**without_idle(PRESETS.get(chosen, {}), values), **values, "preset": chosen}


def described(config: Config) -> str:
    """The one line that says what the preset "source" chose, as it stands after the file and the flags."""
    optim = config.optim
    period = f" over {optim.period} steps" if optim.period else ""
    return (
        f"preset source: seed {config.seed}, {config.num_epochs} epochs, lr {config.lr:g} ({optim.schedule}"
        f"{period} to {optim.floor:.0%}), batch {config.batch_size}, {config.precision}, blocks of "
        f"{config.seq_len} tokens; flags win over it, --preset none leaves it out"
    )
