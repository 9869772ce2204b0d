"""Options for a model that several ranks hold between them, and what does not go with them yet.

Config(parallel=Parallel(tensor=2))     # --parallel.tensor 2
config.parallel.size, config.parallel.flags     # 2, "--parallel.tensor 2"
check_parallel(config)                  # FieldError: names the option and the way out
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.engine_options import ENGINES
from lockstep.config.fields import FieldError, FieldName, option, suggest_fields

__all__ = [
    "DEGREES",
    "Parallel",
    "check_parallel",
]


@suggest_fields()
@dataclass(frozen=True, slots=True)
class Parallel:
    """Divide a model over several ranks (experimental); see docs/parallel.md."""

    tensor: int = option(1, "ranks that divide each layer of the model among them")
    pipeline: int = option(1, "ranks that each have a stage of the model, a part of its repeated blocks")
    context: int = option(1, "ranks that divide each sequence among them")
    vocabulary: bool = option(True, "with --parallel.tensor: divide the token table and the head too")

    @property
    def size(self) -> int:
        """The ranks of a replica, which hold one model between them."""
        return math.prod(self.degrees.values())

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees of 2 or more by name."""
        found = {}
        for name in DEGREES:
            if getattr(self, name) > 1:
                found[name] = getattr(self, name)
        return found

    def with_degrees(self, degrees: Mapping[str, int]) -> "Parallel":
        """Return the options with these degrees, and 1 for the others."""
        values: dict[str, Any] = dict.fromkeys(DEGREES, 1) | dict(degrees)
        return dataclasses.replace(self, **values)

    @property
    def flags(self) -> str:
        """The degrees of 2 or more, as on the command line."""
        return " ".join(f"--parallel.{name} {degree}" for name, degree in self.degrees.items())

    @property
    def label(self) -> str:
        """The degrees of 2 or more for a table, such as `tensor 2`."""
        return " ".join(f"{name} {degree}" for name, degree in self.degrees.items())


# The fields that are numbers of ranks.
DEGREES = ("tensor", "context", "pipeline")


def supports(engine: str, parallel: Parallel, *, exact: bool) -> bool:
    """Whether an engine trains models that are divided so."""
    sums_by_itself = ENGINES[engine].stages
    needs_own_sums = parallel.pipeline > 1 or (parallel.context > 1 and (exact or parallel.tensor > 1))
    return ENGINES[engine].replicas and (sums_by_itself or not needs_own_sums)


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
    # The other ranks of the replica would wait in the middle of a layer.
    "on_oom": (("stop",), "use stop"),
    "optim.name": (("adamw", "adam", "sgd"), "use adamw"),
    "engine_options.cpu_offload": ((False,), "leave it out"),
    "engine_options.meta_init": ((False,), "leave it out"),
}
# The same, with --parallel.context.
_WITH_CONTEXT: dict[str, tuple[tuple[Any, ...], str]] = {
    "data.packing": (("auto", "stream", "blocks", "padded"), "use padded"),
}
# The same, with --parallel.pipeline.
_WITH_PIPELINE: dict[str, tuple[tuple[Any, ...], str]] = {
    "batchnorm": (("auto",), "use auto"),
    "log_gradients": (("off",), "use off"),
}


def check_parallel(config: Any) -> None:
    """Check the options that do not go with several ranks for one model.

    Args:
        config: a `Config`, whose module imports this one.

    Raises:
        FieldError: names the first such option, and the way out.
    """
    if config.parallel.tensor == 1 and not config.parallel.vocabulary:
        raise FieldError(
            *(FieldName("parallel.vocabulary"), " needs ", FieldName("parallel.tensor")),
            " of 2 or more; remove it",
        )
    tables = {"pipeline": _SUPPORTED | _WITH_PIPELINE, "context": _SUPPORTED | _WITH_CONTEXT, "tensor": _SUPPORTED}
    for degree, table in tables.items():
        if getattr(config.parallel, degree) > 1:
            _check(config, degree, table)
    _check_engine(config)


def _check_engine(config: Any) -> None:
    """Refuse an engine that does not support the degrees together, or with --exact."""
    parallel = config.parallel
    if config.engine not in ENGINES or parallel.size == 1 or supports(config.engine, parallel, exact=config.exact):
        return
    degree = "pipeline" if parallel.pipeline > 1 else "context"
    exact = (" with ", FieldName("exact")) if config.exact else ()
    raise FieldError(
        *(FieldName("engine"), f" {config.engine}", *exact, " does not work with "),
        *(FieldName(f"parallel.{degree}"), f" {getattr(parallel, degree)} yet: use auto"),
    )


def _check(config: Any, degree: str, table: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """Refuse a value that a table does not have, with this degree of 2 or more."""
    for name, (values, advice) in table.items():
        section, _, field = name.rpartition(".")
        value = getattr(getattr(config, section) if section else config, field)
        if value not in values:
            size = getattr(config.parallel, degree)
            raise FieldError(
                *(FieldName(name), f" {value} does not work with ", FieldName(f"parallel.{degree}"), f" {size} yet: "),
                advice,
            )
