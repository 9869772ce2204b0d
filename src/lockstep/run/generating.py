"""`lockstep generate RUN`: text from a run that trained a language model."""

from collections.abc import Sequence

from lockstep.config.secrets import printable
from lockstep.errors import ConfigError
from lockstep.run.using import Wanted, opened
from lockstep.task import written
from lockstep.tasks.causal_lm import CausalLM, Sampling
from lockstep.tasks.hf import HubCausalLM

__all__ = ["generate_texts"]


def generate_texts(wanted: Wanted, prompts: Sequence[str], sampling: Sampling) -> list[str]:
    """Prints each prompt with what the model goes on with, one after the other, and returns these texts.

    Each is drawn by itself, from the same seed, so that no text depends on what else was asked.

    Raises:
        CheckpointError, ConfigError: see `run.using.opened`; and a run that is of no language model.
    """
    texts = []
    with opened(wanted) as used:
        task = used.task
        if not isinstance(task, CausalLM | HubCausalLM):
            kind = type(written(task)).__name__
            raise ConfigError(
                f"{printable(wanted.run)} trained {kind}, which is no language model that lockstep knows and writes no "
                "text; `lockstep evaluate` shows what it learnt"
            )
        used.model.eval()
        for text in task.write(used.model, prompts, used.world.device, sampling):
            texts.append(text)
            if used.world.is_main:
                print("\n" * (len(texts) > 1) + printable(text, keep="\n\t"), flush=True)
    return texts
