"""Options for a model that several ranks hold between them, and what does not go with them yet.

Config(parallel=Parallel(tensor=2))     # --parallel.tensor 2
check_parallel(config)                  # FieldError: names the option and the way out
"""

from dataclasses import dataclass
from typing import Any

from lockstep.config.engine_options import ENGINES
from lockstep.config.fields import FieldError, FieldName, option, suggest_fields

__all__ = [
    "Parallel",
    "check_parallel",
]


@suggest_fields()
@dataclass(frozen=True, slots=True)
class Parallel:
    """Divide a model over several ranks (experimental); see docs/parallel.md."""

    tensor: int = option(1, "ranks that divide each layer of the model among them")
    pipeline: int = option(1, "ranks that each have a stage of the model, a part of its repeated blocks")
    vocabulary: bool = option(True, "with --parallel.tensor: divide the token table and the head too")

    @property
    def replica(self) -> int:
        """The number of ranks that hold one model between them."""
        return self.tensor * self.pipeline


# Option -> (the values that work with several ranks for one model, the way out).
_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "engine": (("auto", *(name for name, entry in ENGINES.items() if entry.replicas)), "use auto"),
    "precision": (("auto", "float32", "float64", "bf16"), "use bf16"),
    "compile": ((None, False, "auto"), "use --no-compile"),
    "weight_copies": (("forward",), "use forward"),
    "shares": (("equal",), "use equal"),
    "batchnorm": (("auto", "replay"), "use replay"),
    "lora.rank": ((0,), "use 0"),
    "model.load_in": (("full",), "use full"),
    "guards.audit": ((0,), "use 0"),
    "optim.name": (("adamw", "adam", "sgd"), "use adamw"),
    "engine_options.cpu_offload": ((False,), "leave it out"),
    "engine_options.meta_init": ((False,), "leave it out"),
}


# The same, for a pipeline alone.
_WITH_PIPELINE: dict[str, tuple[tuple[Any, ...], str]] = {
    "engine": (("auto", *(name for name, entry in ENGINES.items() if entry.stages)), "use auto"),
    "parallel.tensor": ((1,), "use 1"),
    "batchnorm": (("auto",), "use auto"),
    "log_gradients": (("off",), "use off"),
    "init_from": (("",), "begin with it in the task's model(), or leave it out"),
}


def check_parallel(config: Any) -> None:
    """Check the options that do not go with several ranks for one model.

    Args:
        config: a `Config`, whose module imports this one.

    Raises:
        FieldError: names the first such option, and the way out.
    """
    parallel = config.parallel
    if parallel.tensor == 1 and not parallel.vocabulary:
        raise FieldError(
            *(FieldName("parallel.vocabulary"), " needs ", FieldName("parallel.tensor")), " of 2 or more; remove it"
        )
    if parallel.pipeline > 1:
        _check_supported(config, "pipeline", _SUPPORTED | _WITH_PIPELINE)
    elif parallel.tensor > 1:
        _check_supported(config, "tensor", _SUPPORTED)


def _check_supported(config: Any, dimension: str, supported: dict[str, tuple[tuple[Any, ...], str]]) -> None:
    """Refuse options that do not work with a degree of 2 or more of a dimension."""
    degree = getattr(config.parallel, dimension)
    for name, (values, advice) in supported.items():
        section, _, field = name.rpartition(".")
        value = getattr(getattr(config, section) if section else config, field)
        if value not in values:
            raise FieldError(
                *(FieldName(name), f" {value} does not work with ", FieldName(f"parallel.{dimension}")),
                f" {degree} yet: {advice}",
            )
