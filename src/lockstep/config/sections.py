"""The sections of the configuration: what belongs together, with each option's help text and default.

    config = Config(optim=Optim(clip=0.5), data={"workers": 2})

A field whose default is "auto" is given its value once the task and the plan are known: see `lockstep.training.resolve`.
"""  # noqa: E501

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.fields import FieldError, FieldName, named, option
from lockstep.config.task_options import TASKS

__all__ = [
    "LATER",
    "Checkpoint",
    "Data",
    "Fp16",
    "Guards",
    "Lora",
    "Model",
    "Optim",
    "auto",
    "check_gradients",
    "check_together",
    "check_unsaved",
    "without_idle",
]


def auto(default: Any, text: str, *, span: bool = False) -> Any:
    """A number that `lockstep.training.resolve` chooses where it is left out; `default`, out of bounds, holds its place.

    Args:
        span: as for `option`.
    """  # noqa: E501
    return field(default=default, metadata={"help": text, "choices": (), "auto": True, "span": span})


_ALL = ", ".join(TASKS)
_HUB = "causal-lm, images, classification"  # with models of the hub
LATER = -math.inf  # holds the place of a float that is chosen later


@named()
@dataclass(frozen=True, slots=True)
class Data:
    """How samples are prepared and loaded."""

    workers: int = option(0, "loader processes a rank; 0 loads in the training process")
    prefetch: int = option(4, "micro-batches that each loader process keeps ready")
    evaluation: float = option(0.05, "share of the files (or of the one file) kept aside for evaluation", tasks=_ALL)
    vocab_size: int = option(4096, "entries of the tokenizer that is trained on the training split", builtin=True)
    cache: str = option(
        "", "where prepared data lies (default: $LOCKSTEP_CACHE, else the user's cache folder)", tasks=_ALL
    )
    subset: str = option("", "subset (configuration) of a hub dataset", tasks=_ALL)
    split: str = option(
        "train", "split to train on; the evaluation takes validation or test, or a part split off", tasks=_ALL
    )
    revision: str = option("", "branch, tag or commit of a hub dataset (default: its newest)", tasks=_ALL)
    text_column: str = option(
        "",
        "column that holds the text (default: text, or messages, prompt/completion, instruction/output, or the one)",
        tasks="causal-lm, classification",
    )
    image_column: str = option("", "column that holds the image (default: the one)", tasks="images")
    label_column: str = option(
        "", "column that holds the class (default: label, labels or class)", tasks="images, classification"
    )
    target_column: str = option(
        "", "column that holds the number to learn (default: target, y, or the last of numbers)", tasks="regression"
    )
    feature_columns: str = option(
        "", "columns to learn from, NAME,NAME (default: all others that hold numbers)", tasks="regression"
    )
    encoding: str = option(
        "", "encoding of csv and json files (default: utf-8, or what a byte order mark says)", tasks=_ALL
    )
    packing: str = option(
        "stream",
        "stream: a separator after each document; blocks: none, and each 1000 examples cut into blocks, the rest left; "
        "padded: an example a sample; documents: whole ones in a window, attention kept inside each",
        *("stream", "blocks", "padded", "documents"),
        builtin=True,
    )
    labels: str = option(
        "auto",
        "tokens that are learned; auto: completions and the assistant's turns where rows have them, all in blocks",
        *("auto", "all", "completion"),
        builtin=True,
    )
    prompt: str = option("", "how the sample of text at a run's end begins (default: as the data does)", builtin=True)
    drop_last: bool = option(False, "leave out the last step of a run where it would be short of samples")


@named()
@dataclass(frozen=True, slots=True)
class Model:
    """The model's own settings."""

    dropout: float = option(0.0, "dropout probability of the built-in models", tasks=_ALL)
    pretrained: bool = option(
        False, "begin with the weights of the hub model or folder that --model-name names", tasks=_HUB
    )
    revision: str = option("", "branch, tag or commit of a hub model (default: its newest)", tasks=_HUB)
    trust_remote_code: bool = option(False, "run the Python code that a hub model brings with it", tasks=_HUB)
    loss_chunk: int = option(
        -1,
        "tokens whose logits the loss makes at a time, to save memory; 0: all; -1: some where all would be large",
        builtin=True,
    )


@named()
@dataclass(frozen=True, slots=True)
class Optim:
    """The optimizer and its schedule."""

    name: str = option(
        "adamw", "optimizer; muon: for hidden matrices, with adamw for the rest", "adamw", "adam", "sgd", "muon"
    )
    beta1: float = option(0.9, "adamw, adam, muon's adamw: decay of the gradient's running mean")
    beta2: float = auto(
        LATER, "adamw, adam, muon's adamw: decay of the squared gradient's running mean; auto: 0.95, 0.999 (as --lr)"
    )
    eps: float = option(1e-8, "adamw, adam, muon's adamw: added to the denominator")
    momentum: float = option(0.9, "sgd: decay of the gradient's running sum")
    nesterov: bool = option(False, "sgd: Nesterov's momentum")
    muon_lr: float = option(0.0, "muon: peak rate of the matrices; 0: --lr")
    muon_scale: str = option(
        "match-rms",
        "muon: what makes a matrix's rate suit its shape; match-rms: updates as large as adamw's; original: Jordan's",
        *("match-rms", "original"),
    )
    muon_momentum: float = option(0.95, "muon: decay of the gradient's running mean")
    ns_steps: int = option(5, "muon: Newton-Schulz iterations")
    weight_decay: float = auto(
        LATER, "decay of matrices; auto: 0.1 from scratch, 0 pretrained, 0.01 other work; sgd 1e-4, adam 0"
    )
    decay_embeddings: bool = option(False, "decay embeddings too")
    groups: str = option(
        "", "rules by name, the first that matches: 'head.*: lr=10x; *.bias: lr=1e-4, decay=0; tokens.*: freeze'"
    )
    layer_decay: float = option(1.0, "what the rate is multiplied by from each layer to the one before it; 1: none")
    ema: float = option(
        0.0, "decay of a moving average of the weights, which evaluations take and checkpoints keep; 0: none"
    )
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    schedule: str = option(
        "cosine",
        "shape of the rate after the warm-up; wsd: constant, then down over --optim.cooldown",
        *("cosine", "cosine-periodic", "linear", "polynomial", "wsd", "constant"),
        *("inverse-sqrt", "step", "one-cycle", "plateau"),
    )
    period: int = option(
        0,
        "cosine-periodic: steps from peak to floor, and back; step: from drop to drop; 0: the plan, a third of it",
        span=True,
    )
    warmup_steps: int = auto(
        -1,
        "steps of linear warm-up; auto: a twentieth of the plan, at most 50; one-cycle: the rise, 0.3 of the plan",
        span=True,
    )
    cooldown: float = option(0.2, "wsd: share of the plan in which the rate falls")
    power: float = option(1.0, "polynomial: exponent of the fall")
    gamma: float = option(0.1, "step, plateau: what the rate is multiplied by at each drop")
    plateau_patience: int = option(10, "plateau: evaluations in a row that may be no better before the rate drops")
    plateau_cooldown: int = option(0, "plateau: evaluations after a drop that do not count as no better")
    floor: float = auto(
        LATER,
        "last (inverse-sqrt, step, plateau: least) rate, as a share of --lr; auto: 0.1, 0 for these, one-cycle 4e-6",
    )


@named()
@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters beside the linear layers, which alone are trained (extra `peft`); see docs/tasks/lora.md."""

    rank: int = option(0, "rows of each adapter; 0: no adapters, the model itself is trained")
    alpha: float = option(0.0, "an adapter's output is multiplied by this / rank; 0: twice the rank")
    dropout: float = option(0.0, "dropout probability of what goes into an adapter")
    targets: str = option(
        "", "names of the layers to adapt, or patterns: 'q_proj, layers.*.mlp.*'; default: all linear ones but the head"
    )
    modules_to_save: str = option(
        "", "names or patterns of modules that are trained whole beside them; default: what the task drew anew, a head"
    )


@named()
@dataclass(frozen=True, slots=True)
class Fp16:
    """The scale of the loss with --precision fp16, in the words of DeepSpeed's JSON."""

    initial_scale_power: int = option(16, "the loss is multiplied by 2 to this power at first")
    loss_scale_window: int = option(2000, "good steps in a row after which the scale is doubled")
    hysteresis: int = option(1, "overflows until it is halved: before the last of these it stays")
    consecutive_hysteresis: bool = option(
        False, "a good step begins that count anew; else a doubling of the scale does, and no good step alone"
    )
    min_loss_scale: float = option(2.0**-14, "least scale, a power of two; an overflow at it ends the run")


@named()
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is kept."""

    keep: int = option(3, "newest checkpoints that are kept, beside the best")
    every: int = option(0, "also keep each checkpoint whose step is a multiple of this; 0: none")
    mode: str = option(
        "async",
        "async: written by a thread while steps go on; sync: steps wait; none: never written",
        *("async", "sync", "none"),
    )
    on_failure: str = option(
        "continue", "after a save that failed; continue: until two in a row have", "continue", "stop"
    )


@named()
@dataclass(frozen=True, slots=True)
class Guards:
    """What watches the run; see docs/guards.md."""

    nonfinite: str = option(
        "stop", "after a loss or gradient that is not finite, which is never applied", "stop", "skip", "rollback"
    )
    spike: str = option("warn", "when the gradient's norm is far above the usual", "warn", "skip", "rollback", "off")
    limit: int = option(10, "steps that nonfinite and spike may leave out before the run stops")
    desync_freq: int = option(100, "steps between comparisons of the replicas' bits; 0: none")
    straggler: float = option(1.2, "times the others' busy time from which a rank is called slow; 0: never")
    retries: int = option(2, "times that a sample, or a loader process that died, is tried again")
    bad_samples: int = option(0, "samples that each rank may leave out because they cannot be loaded")
    audit: float = option(
        0.0, "share of the micro-batches that another rank computes again, to name a device that computes wrongly"
    )


# (field, values) of Optim -> the fields that go with these values alone
_FIELDS_OF = {
    ("name", "adamw or adam or muon"): ("beta1", "beta2", "eps"),
    ("name", "sgd"): ("momentum", "nesterov"),
    ("name", "muon"): ("muon_lr", "muon_scale", "muon_momentum", "ns_steps"),
    ("schedule", "wsd"): ("cooldown",),
    ("schedule", "cosine-periodic or step"): ("period",),
    ("schedule", "polynomial"): ("power",),
    ("schedule", "step or plateau"): ("gamma",),
    ("schedule", "plateau"): ("plateau_patience", "plateau_cooldown"),
}
_OPTIM = Optim()


def check_together(optim: Optim, lora: Lora, fp16: Fp16, precision: str) -> None:
    """Raises FieldError for what is set away from its default and would have no effect, or does not go together."""
    for (chooser, value), fields in _FIELDS_OF.items():
        chosen = getattr(optim, chooser)
        for key in fields:
            if chosen not in value.split(" or ") and getattr(optim, key) != getattr(_OPTIM, key):
                raise FieldError(
                    *(FieldName(f"optim.{key}"), " is no option of ", FieldName(f"optim.{chooser}"), f" {chosen}, "),
                    f"but of {value}: leave it out",
                )
    if optim.muon_scale == "original" and not optim.muon_lr:
        raise FieldError(
            *(FieldName("optim.muon_scale"), " original needs a rate of its own, as ", FieldName("optim.muon_lr")),
            " 0.02: the rate of adamw is far too small for it",
        )
    _check_adapters(lora)
    _check_scale(fp16, precision)


def check_gradients(weight_copies: str, grad_dtype: str) -> None:
    """Raises FieldError for a dtype of gradients that nothing would have."""
    if grad_dtype != "float32" and weight_copies != "step":
        raise FieldError(
            *(FieldName("grad_dtype"), f" {grad_dtype} is of ", FieldName("weight_copies"), " step, and it is "),
            f"{weight_copies}: leave it out",
        )


def _check_adapters(lora: Lora) -> None:
    plain = Lora()
    for name in ("alpha", "dropout", "targets", "modules_to_save"):
        if not lora.rank and getattr(lora, name) != getattr(plain, name):
            raise FieldError(
                *(FieldName(f"lora.{name}"), " is of adapters, and there are none: give ", FieldName("lora.rank")),
                ", say 16, or leave it out",
            )


def _check_scale(fp16: Fp16, precision: str) -> None:
    plain = Fp16()
    for spec in dataclasses.fields(fp16):
        if precision != "fp16" and getattr(fp16, spec.name) != getattr(plain, spec.name):
            raise FieldError(
                *(FieldName(f"fp16.{spec.name}"), " is of ", FieldName("precision"), " fp16, and it is "),
                f"{precision}: leave it out",
            )
    least = fp16.min_loss_scale
    if math.frexp(least)[0] != 0.5 or least > 2.0**fp16.initial_scale_power:
        raise FieldError(
            FieldName("fp16.min_loss_scale"),
            f" is {least:g}: it must be a power of two, so that scaling rounds nothing, and not above the first scale, "
            f"2**{fp16.initial_scale_power}",
        )


def check_unsaved(checkpoint: Checkpoint, guards: Guards) -> None:
    """Raise FieldError for what needs checkpoints that `--checkpoint.mode none` does not write."""
    if checkpoint.mode != "none":
        return
    for name in ("nonfinite", "spike"):
        if getattr(guards, name) == "rollback":
            raise FieldError(
                *(FieldName(f"guards.{name}"), " rollback goes back to a checkpoint, and "),
                *(FieldName("checkpoint.mode"), " none writes none: choose async, or "),
                *(FieldName(f"guards.{name}"), " skip"),
            )
    plain = Checkpoint()
    for name in ("keep", "every", "on_failure"):
        if getattr(checkpoint, name) != getattr(plain, name):
            raise FieldError(
                *(FieldName(f"checkpoint.{name}"), " has no effect, since "),
                *(FieldName("checkpoint.mode"), " none writes no checkpoints: leave it out"),
            )


def without_idle(preset: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`preset` (dotted names) but for what has no effect beside `values`, which win over it."""
    both, found = {**preset, **values}, dict(preset)
    for (chooser, allowed), fields in _FIELDS_OF.items():
        if both.get(f"optim.{chooser}", getattr(_OPTIM, chooser)) not in allowed.split(" or "):
            found = {name: value for name, value in found.items() if name.removeprefix("optim.") not in fields}
    return found
