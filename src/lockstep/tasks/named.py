"""The task that `--model-name` and `--dataset-name` name."""

import dataclasses
import difflib
from collections.abc import Callable
from pathlib import Path

from lockstep.config import Config
from lockstep.data import text
from lockstep.errors import ConfigError
from lockstep.models.gpt import PRESETS
from lockstep.tasks.causal_lm import CausalLM

__all__ = ["named_task"]


def named_task(config: Config, say: Callable[[str], None]) -> CausalLM:
    """The built-in language model on the named text, prepared now where it is not yet.

    Raises:
        ConfigError: an unknown model, or one that the sequence length does not fit.
        DataError: text that is missing, empty or too short.
    """
    if config.model_name not in PRESETS:
        close = difflib.get_close_matches(config.model_name, PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(PRESETS)}"
        raise ConfigError(f"--model-name '{config.model_name}' is unknown: {hint}")
    preset = PRESETS[config.model_name]
    if config.seq_len > preset.context:
        raise ConfigError(
            f"--seq-len {config.seq_len} is longer than the context of {config.model_name}, {preset.context}; lower it"
        )
    corpus = text.prepare(
        config.dataset_name,
        seq_len=config.seq_len,
        vocab_size=config.data.vocab_size,
        eval_fraction=config.data.evaluation,
        seed=config.seed,
        cache=Path(config.data.cache) if config.data.cache else None,
        say=say,
    )
    shape = dataclasses.replace(preset, vocab_size=corpus.vocab_size, dropout=config.model.dropout)
    return CausalLM(corpus, shape)
