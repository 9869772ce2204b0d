"""Define the configuration's sections: groups of options with help texts and defaults.

    config = Config(optim=Optim(clip=0.5), data={"workers": 2})

`lockstep.training.start.resolve` chooses the fields that are "auto", once the task and the plan are known.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.engine_options import EngineOptions, check_quantized
from lockstep.config.fields import FieldError, FieldName, option, suggest_fields
from lockstep.config.task_options import TASKS

__all__ = [
    "LATER",
    "AutoInt",
    "Checkpoint",
    "Data",
    "Fp16",
    "Guards",
    "Lora",
    "Model",
    "Optim",
    "auto",
    "check_gradients",
    "check_load_in",
    "check_together",
    "check_unsaved",
    "effective",
]


def auto(default: Any, text: str, *, span: bool = False, tasks: str = "") -> Any:
    """Define a field that `lockstep.training.start.resolve` chooses if it is "auto".

    Args:
        default: marks "auto"; outside the field's bounds, or an AutoInt.
        text: the help text.
        span, tasks: as for `option`.
    """
    owners = tuple(tasks.split(", ")) if tasks else ()
    metadata = {"help": text, "choices": (), "auto": True, "span": span, "builtin": bool(owners), "tasks": owners}
    return field(default=default, metadata=metadata)


class AutoInt(int):
    """Marks an integer as "auto"; its value is used until the data are known."""


_ALL = ", ".join(TASKS)
# The tasks with models of the hub.
_HUB = "causal-lm, images, classification"
# Marks a float as "auto".
LATER = -math.inf


@suggest_fields()
@dataclass(frozen=True, slots=True)
class Data:
    """Preparation and loading of samples."""

    workers: int = option(0, "loader processes per rank; 0: load in the training process")
    prefetch: int = option(4, "micro-batches that each loader process prepares in advance")
    evaluation: float = option(0.05, "share of the files, or of a single file, held out for evaluation", tasks=_ALL)
    vocab_size: int = option(4096, "vocabulary size of a tokenizer trained on the training split", builtin=True)
    cache: str = option(
        "", "folder for prepared data (default: $LOCKSTEP_CACHE, else the user's cache folder)", tasks=_ALL
    )
    subset: str = option("", "subset (configuration) of a hub dataset", tasks=_ALL)
    split: str = option(
        "train", "split to train on; evaluation uses validation or test, else a held-out part of this one", tasks=_ALL
    )
    revision: str = option("", "branch, tag or commit of a hub dataset (default: the newest)", tasks=_ALL)
    text_column: str = option(
        "",
        "column with the text (default: text, or messages, prompt/completion, instruction/output, or the only one)",
        tasks="causal-lm, classification",
    )
    image_column: str = option("", "column with the image (default: the only one)", tasks="images")
    label_column: str = option(
        "", "column with the class (default: label, labels or class)", tasks="images, classification"
    )
    target_column: str = option(
        "", "column with the number to predict (default: target, y, or the last numeric one)", tasks="regression"
    )
    feature_columns: str = option(
        "", "columns to predict from, NAME,NAME (default: all other numeric ones)", tasks="regression"
    )
    encoding: str = option(
        "", "encoding of csv and json files (default: utf-8, or that of the byte order mark)", tasks=_ALL
    )
    skip: float = option(
        0.01, "share of a folder's files, or of its bytes, that may be left out (other suffixes, no UTF-8)", tasks=_ALL
    )
    packing: str = option(
        "auto",
        "stream: all documents with a separator after each; blocks: without separators, the remainder of every "
        "1000 documents dropped; padded: a document per sample; documents: several whole ones per sample, "
        "attention within each; auto: padded for prompts and conversations, else stream",
        *("auto", "stream", "blocks", "padded", "documents"),
        builtin=True,
    )
    labels: str = option(
        "auto",
        "tokens to learn; auto: completions and assistant turns if rows have them, else all; all with "
        "--data.packing blocks",
        *("auto", "all", "completion"),
        builtin=True,
    )
    prompt: str = option(
        "", "prompt of the text generated at the end of a run (default: as the held-out data begins)", builtin=True
    )
    drop_last: bool = option(False, "drop the last step of a run if it would be short of samples")
    shuffle_shards: int = option(
        0, "shards in a group whose samples are shuffled together, so that each rank reads few; 0: shuffle all samples"
    )


@suggest_fields()
@dataclass(frozen=True, slots=True)
class Model:
    """Options of the model."""

    dropout: float = option(0.0, "dropout probability of the built-in models", tasks=_ALL)
    pretrained: bool = option(False, "start from the weights of the hub model or folder in --model-name", tasks=_HUB)
    load_in: str = option(
        "full",
        "weights of the linear layers in memory, with adapters (extra `quantized`); 4bit: NF4; 8bit: LLM.int8(); "
        "full: as they are stored",
        *("full", "4bit", "8bit"),
        builtin=True,
    )
    revision: str = option("", "branch, tag or commit of a hub model (default: the newest)", tasks=_HUB)
    trust_remote_code: bool = option(False, "run the Python code that comes with a hub model", tasks=_HUB)
    loss_chunk: int = option(
        -1,
        "tokens per chunk of logits in the loss, to save memory; 0: all at once; -1: chunks if the logits would be "
        "large",
        builtin=True,
    )


@suggest_fields()
@dataclass(frozen=True, slots=True)
class Optim:
    """The optimizer and its schedule."""

    name: str = option(
        "adamw", "optimizer; muon: for hidden matrices, with adamw for the rest", "adamw", "adam", "sgd", "muon"
    )
    beta1: float = option(0.9, "adamw, adam, muon's adamw: decay of the running mean of the gradient")
    beta2: float = auto(
        LATER,
        "adamw, adam, muon's adamw: decay of the running mean of the squared gradient; auto: 0.95 for a language "
        "model from scratch, else 0.999",
    )
    eps: float = option(1e-8, "adamw, adam, muon's adamw: term added to the denominator")
    momentum: float = option(0.9, "sgd: momentum")
    nesterov: bool = option(False, "sgd: use Nesterov momentum")
    muon_lr: float = option(0.0, "muon: peak learning rate of the matrices; 0: --lr")
    muon_scale: str = option(
        "match-rms",
        "muon: scale of a matrix's update by its shape; match-rms: as large as adamw's; original: Keller Jordan's",
        *("match-rms", "original"),
    )
    muon_momentum: float = option(0.95, "muon: momentum")
    ns_steps: int = option(5, "muon: Newton-Schulz iterations")
    weight_decay: float = auto(
        LATER,
        "weight decay of matrices; auto: 0.1 for a language model from scratch, 0 if pretrained, else 0.01; sgd "
        "1e-4, adam 0",
    )
    decay_embeddings: bool = option(False, "apply weight decay to embeddings too")
    groups: str = option(
        "",
        "rules by parameter name; the first match wins: 'head.*: lr=10x; *.bias: lr=1e-4, decay=0; tokens.*: freeze'",
    )
    layer_decay: float = option(1.0, "factor of the learning rate from each layer to the one before it; 1: off")
    ema: float = option(
        0.0, "decay of a moving average of the weights, which evaluations use and checkpoints store; 0: off"
    )
    clip: float = option(1.0, "maximum gradient norm; 0: no clipping")
    schedule: str = option(
        "cosine",
        "shape of the learning rate after warm-up; wsd: constant, then decay over --optim.cooldown; none: the "
        "optimizer's own rates, which your code may set",
        *("cosine", "cosine-periodic", "linear", "polynomial", "wsd", "constant"),
        *("inverse-sqrt", "step", "one-cycle", "plateau", "none"),
    )
    period: int = option(
        0,
        "cosine-periodic: steps from peak to floor and back up; step: steps between drops; 0: the plan, or a third "
        "of it for step",
        span=True,
    )
    warmup_steps: int = auto(
        -1,
        "steps of linear warm-up; auto: 1/20 of the plan, at most 50; one-cycle: length of the rise, auto 0.3 of "
        "the plan",
        span=True,
    )
    cooldown: float = option(0.2, "wsd: share of the plan in which the learning rate decays")
    power: float = option(1.0, "polynomial: exponent of the decay")
    gamma: float = option(0.1, "step, plateau: factor of the learning rate at each drop")
    plateau_patience: int = option(
        10, "plateau: evaluations in a row without improvement that are allowed before the learning rate drops"
    )
    plateau_cooldown: int = option(
        0, "plateau: evaluations after a drop that do not count against --optim.plateau-patience"
    )
    floor: float = auto(
        LATER,
        "final rate (inverse-sqrt, step, plateau: minimum) as a share of --lr; auto: 0.1, 0 for those three, "
        "one-cycle 4e-6",
    )


@suggest_fields()
@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters on linear layers, trained in place of the model (extra `peft`); see docs/tasks/lora.md."""

    rank: int = option(0, "rank of each adapter; 0: no adapters, train the model itself")
    alpha: float = option(0.0, "scale of the adapters: their output is multiplied by alpha / rank; 0: twice the rank")
    dropout: float = option(0.0, "dropout probability of an adapter's input")
    targets: str = option(
        "",
        "names or patterns of the layers to adapt, such as 'q_proj, layers.*.mlp.*' (default: all linear ones but "
        "the head)",
    )
    modules_to_save: str = option(
        "",
        "names or patterns of modules to train in full as well (default: those without pretrained weights, such as "
        "a head)",
    )


@suggest_fields()
@dataclass(frozen=True, slots=True)
class Fp16:
    """Loss scaling of --precision fp16, with the names of DeepSpeed's JSON file."""

    initial_scale_power: int = option(16, "initial loss scale, as a power of 2")
    loss_scale_window: int = option(2000, "steps in a row without overflow before the scale doubles")
    hysteresis: int = option(1, "overflows before the scale is halved; 1: the first halves it")
    consecutive_hysteresis: bool = option(
        False, "a step without overflow resets that count; otherwise only a doubling of the scale does"
    )
    min_loss_scale: float = option(2.0**-14, "minimum scale, a power of two; an overflow at it ends the run")


@suggest_fields()
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How checkpoints are written, and which are kept."""

    keep: int = option(3, "newest checkpoints to keep, besides the best")
    every: int = option(0, "also keep each checkpoint whose step is a multiple of this; 0: none")
    mode: str = option(
        "async",
        "async: a thread writes while training continues; sync: training waits; none: write no checkpoints",
        *("async", "sync", "none"),
    )
    on_failure: str = option(
        "continue", "what to do after a failed save; continue: stop only after two in a row", "continue", "stop"
    )
    local_dir: str = option("outputs", "folder for the local copies of runs whose --save-dir is a URL")
    upload_wait: float = option(300.0, "seconds that a run's end waits for a --save-dir that takes no upload")


@suggest_fields()
@dataclass(frozen=True, slots=True)
class Guards:
    """Checks on the running job; see docs/guards.md."""

    nonfinite: str = option(
        "stop",
        "action on a loss or gradient that is not finite; the update is never applied",
        "stop",
        "skip",
        "rollback",
    )
    spike: str = option("warn", "action on a gradient norm far above the usual", "warn", "skip", "rollback", "off")
    limit: int = option(10, "steps that nonfinite and spike may skip before the run stops")
    desync_freq: int = option(100, "steps between bitwise comparisons of the replicas; 0: none")
    straggler: float = option(1.2, "ratio to the other ranks' busy time at which a rank is reported as slow; 0: never")
    retries: int = option(2, "retries of a sample that fails to load, or of a loader process that died")
    bad_samples: int = option(0, "samples that each rank may skip because they fail to load")
    loss_check: int = option(
        10,
        "step at which a loss that was proved to split is proved again, and at 10, 100, ... times it; 0: never",
    )
    audit: float = option(
        0.0, "share of the micro-batches that another rank recomputes, to find a device that computes wrongly"
    )


# (field, values) of Optim -> the fields that need one of these values
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
    """Check that no option is set without effect, and that options agree.

    Raises:
        FieldError: one is or does not.
    """
    for (chooser, value), fields in _FIELDS_OF.items():
        chosen = getattr(optim, chooser)
        for key in fields:
            if chosen not in value.split(" or ") and getattr(optim, key) != getattr(_OPTIM, key):
                raise FieldError(
                    *(
                        FieldName(f"optim.{key}"),
                        " is not an option of ",
                        FieldName(f"optim.{chooser}"),
                        f" {chosen}, ",
                    ),
                    f"but of {value}; remove it",
                )
    if optim.muon_scale == "original" and not optim.muon_lr:
        raise FieldError(
            *(
                FieldName("optim.muon_scale"),
                " original needs its own learning rate, such as ",
                FieldName("optim.muon_lr"),
            ),
            " 0.02: that of adamw is far too small",
        )
    _check_adapters(lora)
    _check_scale(fp16, precision)


def check_gradients(weight_copies: str, grad_dtype: str) -> None:
    """Check that `grad_dtype` has an effect. Raises FieldError."""
    if grad_dtype != "float32" and weight_copies != "step":
        raise FieldError(
            *(FieldName("grad_dtype"), f" {grad_dtype} needs ", FieldName("weight_copies"), " step, not "),
            f"{weight_copies}; remove it",
        )


def _check_adapters(lora: Lora) -> None:
    plain = Lora()
    for name in ("alpha", "dropout", "targets", "modules_to_save"):
        if not lora.rank and getattr(lora, name) != getattr(plain, name):
            raise FieldError(
                *(FieldName(f"lora.{name}"), " needs adapters: set ", FieldName("lora.rank")),
                ", for example to 16, or remove it",
            )


def check_load_in(model: Model, lora: Lora, precision: str, engine: str, options: EngineOptions) -> None:
    """Check what quantized weights need, with an engine's name and options. Raises FieldError."""
    if model.load_in == "full":
        return
    start = (FieldName("model.load_in"), f" {model.load_in} ")
    if not lora.rank:
        raise FieldError(*start, "makes weights that cannot be trained: set ", FieldName("lora.rank"), ", such as 16")
    if not model.pretrained:
        raise FieldError(*start, "needs trained weights: set ", FieldName("model.pretrained"), ", or remove it")
    if precision == "float64":
        raise FieldError(*start, "does not work with ", FieldName("precision"), " float64: use float32 or bf16")
    check_quantized(model.load_in, engine, options)


def _check_scale(fp16: Fp16, precision: str) -> None:
    plain = Fp16()
    for spec in dataclasses.fields(fp16):
        if precision != "fp16" and getattr(fp16, spec.name) != getattr(plain, spec.name):
            raise FieldError(
                *(FieldName(f"fp16.{spec.name}"), " needs ", FieldName("precision"), " fp16, not "),
                f"{precision}; remove it",
            )
    least = fp16.min_loss_scale
    if math.frexp(least)[0] != 0.5 or least > 2.0**fp16.initial_scale_power:
        raise FieldError(
            FieldName("fp16.min_loss_scale"),
            f" is {least:g}: it must be a power of two, so that scaling does not round, and at most the initial scale, "
            f"2**{fp16.initial_scale_power}",
        )


def check_unsaved(checkpoint: Checkpoint, guards: Guards) -> None:
    """Check that nothing needs checkpoints if none are written. Raises FieldError."""
    if checkpoint.mode != "none":
        return
    for name in ("nonfinite", "spike"):
        if getattr(guards, name) == "rollback":
            raise FieldError(
                *(FieldName(f"guards.{name}"), " rollback needs checkpoints, and "),
                *(FieldName("checkpoint.mode"), " none writes none; choose async, or "),
                *(FieldName(f"guards.{name}"), " skip"),
            )
    plain = Checkpoint()
    for name in ("keep", "every", "on_failure"):
        if getattr(checkpoint, name) != getattr(plain, name):
            raise FieldError(
                *(FieldName(f"checkpoint.{name}"), " has no effect: "),
                *(FieldName("checkpoint.mode"), " none writes no checkpoints; remove it"),
            )


def effective(preset: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `preset` that have an effect with the overriding `values`."""
    both = {**preset, **values}
    result = dict(preset)
    for (chooser, allowed), fields in _FIELDS_OF.items():
        if both.get(f"optim.{chooser}", getattr(_OPTIM, chooser)) not in allowed.split(" or "):
            result = {name: value for name, value in result.items() if name.removeprefix("optim.") not in fields}
    return result
