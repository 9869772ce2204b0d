"""What the configuration's dataclasses are made of: fields with a help text, and errors that know whose they are.

@named()
@dataclass(frozen=True)
class Optim:
    clip: float = option(1.0, "largest norm of the gradient")

Optim(clipp=1.0)                    # UnknownField: Optim has no 'clipp': did you mean clip?
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any, TypeVar, cast

from lockstep.config.hints import hint
from lockstep.errors import ConfigError

__all__ = ["FieldError", "FieldName", "UnknownField", "named", "option"]

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
        span: a number of steps that may be said in epochs, or as a share of the plan: see `config.spans`.
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
