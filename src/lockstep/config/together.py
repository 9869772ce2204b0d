"""Options that go with a value of another one: set away from its default beside other values, one has no effect.

check_together(config.optim, config.lora, config.fp16, config.precision)
check_gradients(config.weight_copies, config.grad_dtype)
without_idle(preset, values)        # a preset's values but for those that the flags leave without effect
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lockstep.config.fields import FieldError, FieldName
from lockstep.config.sections import Checkpoint, Fp16, Guards, Lora, Optim

__all__ = ["check_gradients", "check_together", "check_unsaved", "without_idle"]

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
