"""`lockstep export RUN OUT`: which weights go out, and what goes beside them; `checkpoint/export/` writes the formats.

export_run(Asked("outputs/first", "gpt", "hf", which="best"), print)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint.check import Stored
from lockstep.checkpoint.dtypes import dtype_name
from lockstep.checkpoint.export.export import chosen, export
from lockstep.checkpoint.read import Whole
from lockstep.config.secrets import printable
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.models.hf import HubTokenizer, save_trained
from lockstep.models.lora import merge
from lockstep.run.folder import RunFolder
from lockstep.run.using import Wanted, config_of, opened, task_of
from lockstep.tasks.causal_lm import CausalLM, Sampling
from lockstep.tasks.hf import HubCausalLM
from lockstep.tasks.options import LANGUAGE, kind_of

__all__ = ["Asked", "export_run"]

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be exported.

    Attributes:
        run: a run's folder, or a checkpoint's.
        out: what is to be made.
        form: see `checkpoint.export.export`.
        which: "last" (the newest whole one), "best", or a step.
        merge: adapters are added to their base.
        task: FILE.py:CLASS of the run's task, where it was started from Python and its base is needed.
        ema: the averaged weights.
    """

    run: str
    out: str
    form: str
    which: str | int = "last"
    merge: bool = False
    task: str = ""
    ema: bool = False


def export_run(asked: Asked, say: Say) -> Path:
    """Writes what is asked for, and returns the checkpoint that it came from.

    Raises:
        CheckpointError: no such run or checkpoint, damage, or weights that the format cannot take.
        ConfigError: something is at `out` already, or the format and the checkpoint do not go together.
    """
    path = chosen(Path(asked.run), _step(asked))
    state = checkpoint.read_state(path)
    weights = _weights(asked, path, state)
    export(path, Path(asked.out), asked.form, weights=weights, beside=partial(_beside, path, say), ema=asked.ema)
    return path


def _step(asked: Asked) -> int | None:
    """The step that is meant; None: the newest."""
    if asked.which != "best":
        return None if asked.which == "last" else int(asked.which)
    run = Path(asked.run)
    best = RunFolder(str(run.parent), run.name).read_evaluated().get("best")
    if not best:
        raise CheckpointError(f"--best: {printable(asked.run)} has no evaluation that is finite; leave --best out")
    return int(best["step"])


def _weights(asked: Asked, path: Path, state: dict[str, Any]) -> Whole | None:
    """The tensors to write, where they are not the checkpoint's own."""
    adapters = "lora" in state
    if asked.merge and not adapters:
        raise ConfigError(f"--merge: {printable(path.name)} holds a whole model, and no adapters; leave --merge out")
    if asked.form == "peft" and asked.merge:
        raise ConfigError("--format peft is for adapters alone: leave --merge out, or use --format hf")
    if not asked.merge:
        if adapters and asked.form != "peft":
            raise ConfigError(
                f"--format {asked.form}: {printable(path.name)} holds adapters alone; use --format peft, or --merge to "
                "add them to their base"
            )
        return None
    run, step = path.parent.parent, int(path.name.rpartition("-")[2])
    with opened(Wanted(str(run), step, asked.task, device="cpu", ema=asked.ema)) as used:
        return _whole(merge(used.model))


def _whole(tensors: dict[str, Tensor]) -> Whole:
    """Tensors in memory as a checkpoint's; those that are tied are stored once."""
    stored: dict[tuple[int, tuple[int, ...]], Stored] = {}
    named, held = {}, {f"model/{name}": tensor.detach().contiguous() for name, tensor in tensors.items()}
    for name, tensor in held.items():
        kept = Stored(dtype_name(tensor.dtype), tuple(tensor.shape), [])
        named[name] = stored.setdefault((tensor.data_ptr(), tuple(tensor.shape)), kept)
    return Whole(named, held.__getitem__)


def _beside(path: Path, say: Say, folder: Path) -> None:
    """The tokenizer and how to generate, of a language model whose run knows its data."""
    run = path.parent.parent
    if not (run / "config.toml").is_file():
        return
    try:
        wanted = Wanted(str(run))
        config = config_of(run, wanted)
        state = checkpoint.read_state(path)
        if kind_of(config.task) != LANGUAGE or state.get("plan", {}).get("task") not in _LANGUAGE:
            return
        corpus: Any = task_of(run, config, wanted, state, say).corpus  # type: ignore[attr-defined]
    except LockstepError as error:
        say(f"exported without a tokenizer: {error}")
        return
    if isinstance(corpus.tokenizer, HubTokenizer):
        corpus.tokenizer.save(folder)
        corpus.tokenizer.save_generation(folder)
    else:
        plain = Sampling()
        corpus.tokenizer.save(folder / "tokenizer.json")
        save_trained(folder, corpus.separator, temperature=plain.temperature, top_k=plain.top_k)


_LANGUAGE = (CausalLM.__qualname__, HubCausalLM.__qualname__)
