"""What the configuration's dataclasses are made of: fields with a help text, and errors that know whose they are.

@named()
@dataclass(frozen=True)
class Optim:
    clip: float = option(1.0, "largest norm of the gradient")

Optim(clipp=1.0)                    # UnknownField: Optim has no 'clipp': did you mean clip?
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar, cast

from lockstep.config.hints import hint
from lockstep.errors import ConfigError

__all__ = [
    "AUTO",
    "SPAN",
    "FieldError",
    "FieldName",
    "check_folder",
    "check_name",
    "counts_of",
    "in_batches",
    "in_steps",
    "is_hub_name",
    "is_share",
    "is_span",
    "named",
    "option",
    "range_of",
]


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form OWNER/NAME and is no path that exists here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not Path(name).exists()


T = TypeVar("T")


def option(
    default: Any,
    text: str,
    *choices: str,
    builtin: bool = False,
    tasks: str = "",
    span: bool = False,
    share: bool = False,
) -> Any:
    """A field with its help text, and the values it may take where these are few.

    Args:
        builtin: the built-in tasks alone have it: who trains a task of their own need not see it.
        tasks: which of them, "images, classification"; left out: the language model.
        span: a number of steps that may be said in epochs, or as a share of the plan: see `config.fields`.
        share: a number of batches that may be said as a share of those that there are.
    """
    own = tuple(tasks.split(", ")) if tasks else ("causal-lm",) if builtin else ()
    known = {"help": text, "choices": choices, "builtin": bool(own), "tasks": own}
    return field(default=default, metadata={**known, "span": span or share, "share": share})


class FieldName(str):
    """A field's dotted name in a message."""


class FieldError(ConfigError):
    """A value that cannot hold. The line names fields as Python does; `spelt` makes one for flags of it."""

    def __init__(self, *parts: str) -> None:
        super().__init__("".join(parts))
        self._parts = parts

    def spelt(self, spell: Callable[[str], str]) -> str:
        """The line with each field's name as `spell` writes it."""
        return "".join(spell(part) if isinstance(part, FieldName) else part for part in self._parts)


class UnknownField(ConfigError, TypeError):
    """A name that is no field of the class it was given to."""


def named(
    known: Callable[[], Iterable[str]] | None = None, suited: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> Callable[[type[T]], type[T]]:
    """Has the dataclass tell whoever misspells a field the nearest one.

    Args:
        known: the names that may be meant, where these are more than the class's own.
        suited: the fields that were given -> these and the defaults that suit them.
    """

    def dressed(kind: type[T]) -> type[T]:
        given, own = kind.__init__, [spec.name for spec in dataclasses.fields(cast(Any, kind))]

        @functools.wraps(given)
        def init(self: Any, *values: Any, **fields: Any) -> None:
            for name in fields:
                if name not in own:
                    meant = hint(name, known() if known else own) or f"; it has {', '.join(own)}"
                    raise UnknownField(f"{kind.__name__} has no '{name}'{meant}")
            if suited and len(values) <= len(own) and fields.keys().isdisjoint(own[: len(values)]):
                values, fields = (), suited({**dict(zip(own, values, strict=False)), **fields})
            given(self, *values, **fields)

        kind.__init__ = init  # type: ignore[method-assign]
        return kind

    return dressed


def check_folder(save_dir: str) -> None:
    """Raise FieldError for a URL, which would become a folder of that name."""
    if re.match(r"[A-Za-z][\w+.-]+:(/|$)", save_dir):  # a path that was taken apart has one slash, or none
        raise FieldError(
            FieldName("save_dir"), f" is '{save_dir}', and runs are kept in folders, not at a URL: give the path of one"
        )


def check_name(name: str) -> None:
    """Raise FieldError for an experiment's name that no folder can have."""
    shown = name if len(name) <= 60 else name[:57] + "..."
    problem = ""
    if not name.strip():
        problem = "is empty"
    elif len(name) > 200:
        problem = f"has {len(name)} characters, more than 200"
    elif not name.isprintable():
        problem = "has characters that cannot be printed"
    elif "/" in name or "\\" in name or name.startswith(".") or ".." in name:
        problem = "would lead out of "
    if problem:
        out = [FieldName("save_dir")] if problem.endswith(" of ") else []
        use = ": use letters, digits, '-', '_' and '.'"
        raise FieldError(FieldName("experiment_name"), f" {shown!r} {problem}", *out, use)


_LONGEST = 1000  # steps: a trace of as many is gigabytes


def range_of(text: str) -> tuple[int, int] | None:
    """First and last step, counted from 1 as in metrics.jsonl. Raises FieldError for anything else."""
    if not text:
        return None
    found = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last:
        raise FieldError(FieldName("profile"), f" is '{text}': it must be FIRST:LAST, two steps from 1, as 100:110")
    if last - first >= _LONGEST:
        raise FieldError(
            FieldName("profile"), f" is '{text}', more than {_LONGEST} steps: ten show what there is to see"
        )
    return first, last


AUTO = "auto"  # by measured speed


def counts_of(text: str) -> tuple[int, ...]:
    """The number of each rank; () where none is given. Raises FieldError for anything else."""
    if text in ("equal", AUTO):
        return ()
    if not re.fullmatch(r"[1-9][0-9]{0,5}( ?, ?[1-9][0-9]{0,5})*", text):
        raise FieldError(
            FieldName("shares"), f" is '{text}': it must be equal, auto, or a number from 1 for each process: 5,3"
        )
    return tuple(int(part) for part in text.split(","))


SPAN = "a length such as 5% or 2epochs"
_SPAN = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?(%|epochs?)")


def is_span(value: object) -> bool:
    """Whether it is a share of the plan or a number of epochs."""
    return isinstance(value, str) and _SPAN.fullmatch(value) is not None


def in_steps(value: int | str, *, steps: int, samples: int, batch_size: int) -> int:
    """The steps that `value` is: itself where it is a number, else the nearest number, and not 0 but for a length of 0.

    Args:
        steps: of the whole plan.
        samples: of an epoch.
        batch_size: samples of a step.
    """
    found = _SPAN.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return int(value)
    number = float(found[1])
    exact = number / 100 * steps if found[2] == "%" else number * samples / batch_size
    return max(1, round(exact)) if number else 0


def is_share(value: object) -> bool:
    """Whether it is a share above 0% and up to 100%."""
    found = _SPAN.fullmatch(value) if isinstance(value, str) else None
    return found is not None and found[2] == "%" and 0 < float(found[1]) <= 100


def in_batches(value: int | str, whole: float) -> int:
    """The batches that a limit leaves: itself, or of a share the nearest number, and not 0; 0 leaves all.

    Args:
        whole: batches without the limit, which need not be a whole number.
    """
    number = max(1, round(float(value[:-1]) / 100 * whole)) if isinstance(value, str) else value
    return number or math.ceil(whole)
