"""Define fields with help texts, errors that name fields, and parsers of values.

@suggest_fields()
@dataclass(frozen=True)
class Optim:
    clip: float = option(1.0, "maximum gradient norm")

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
from lockstep.config.secrets import mask
from lockstep.errors import ConfigError

__all__ = [
    "AUTO",
    "SPAN",
    "FieldError",
    "FieldName",
    "check_folder",
    "check_name",
    "in_batches",
    "in_steps",
    "is_hub_name",
    "is_share",
    "is_span",
    "is_url",
    "local_dir",
    "option",
    "parse_profile",
    "parse_shares",
    "suggest_fields",
]


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form OWNER/NAME and is not an existing path."""
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
    """Define a field with a help text.

    Args:
        default: its default.
        text: the help text.
        choices: the allowed values; none: any.
        builtin: only built-in tasks have it; the help for other tasks omits it.
        tasks: the built-in tasks that have it, "images, classification"; "": the language model.
        span: a number of steps; also allowed as epochs or a share of the plan, see `is_span`.
        share: a number of batches; also allowed as a share of all batches, see `is_share`.
    """
    if tasks:
        owners = tuple(tasks.split(", "))
    else:
        owners = ("causal-lm",) if builtin else ()
    metadata = {"help": text, "choices": choices, "builtin": bool(owners), "tasks": owners}
    return field(default=default, metadata={**metadata, "span": span or share, "share": share})


class FieldName(str):
    """A field's dotted name in a message."""


class FieldError(ConfigError):
    """An invalid value.

    Args:
        parts: of the message, which names fields as Python does. `message` names them in another way.
    """

    def __init__(self, *parts: str) -> None:
        super().__init__("".join(parts))
        self._parts = parts

    def message(self, spell: Callable[[str], str]) -> str:
        """Return the message with each field's name converted by `spell`."""
        return "".join(spell(piece) if isinstance(piece, FieldName) else piece for piece in self._parts)


class UnknownField(ConfigError, TypeError):
    """A keyword that is not a field of the class."""


def suggest_fields(
    candidates: Callable[[], Iterable[str]] | None = None,
    defaults: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Make a dataclass suggest the nearest field for an unknown one.

    Args:
        candidates: the names to suggest; None: the fields of the class.
        defaults: the arguments of a call -> the same, with defaults that depend on them.
    """

    def decorate(kind: type[T]) -> type[T]:
        original = kind.__init__
        field_names = [spec.name for spec in dataclasses.fields(cast(Any, kind))]

        @functools.wraps(original)
        def init(self: Any, *values: Any, **fields: Any) -> None:
            for name in fields:
                if name not in field_names:
                    advice = (
                        hint(name, candidates() if candidates else field_names) or f"; it has {', '.join(field_names)}"
                    )
                    raise UnknownField(f"{kind.__name__} has no '{name}'{advice}")
            if defaults and len(values) <= len(field_names) and fields.keys().isdisjoint(field_names[: len(values)]):
                values, fields = (), defaults({**dict(zip(field_names, values, strict=False)), **fields})
            original(self, *values, **fields)

        # mypy forbids the assignment to a method.
        kind.__init__ = init  # type: ignore[method-assign]
        return kind

    return decorate


_URL = re.compile(r"([A-Za-z][\w+.-]+)://(.*)", re.ASCII | re.DOTALL)
# Their URLs are container@account/path.
_CONTAINERS = ("abfs", "abfss", "adl", "az")


def is_url(text: str) -> bool:
    """Whether `text` is a URL, such as s3://bucket/runs, and not a path."""
    return _URL.match(text) is not None


def local_dir(save_dir: str, local: str) -> str:
    """Return the parent folder of all runs on this machine.

    Args:
        save_dir: a folder, which is returned; or a URL.
        local: folder for the copies of runs whose parent is a URL; each URL has a folder of its own there.
    """
    match = _URL.match(save_dir)
    if not match:
        return save_dir
    return str(Path(local, match[1], *(segment for segment in match[2].split("/") if segment)))


def check_folder(save_dir: str) -> None:
    """Check that `save_dir` is a folder, or a URL without secrets. Raises FieldError."""
    match = _URL.match(save_dir)
    problem = ""
    if not match:
        # pathlib leaves one of the two slashes, or none.
        if re.match(r"[A-Za-z][\w+.-]+:(/|$)", save_dir):
            problem = "a URL without its two slashes; give s3://BUCKET/PATH, or the path of a folder"
    elif set(match[2]) & {"?", "#"} or _has_secret(match[1].lower(), match[2].split("/")[0]):
        problem = (
            "a URL with a user, a password or a query, which would be stored in the run; give credentials in the "
            "environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, ...) or in the store's own file"
        )
    elif match[1].lower() in ("http", "https", "ftp"):
        problem = "a URL that cannot be written to; give s3://BUCKET/PATH, gs://, az:// or the path of a folder"
    elif not match[2].strip("/") or not match[2].isprintable() or {".", ".."} & set(match[2].split("/")):
        problem = "a URL without a plain path; give s3://BUCKET/PATH"
    if problem:
        raise FieldError(FieldName("save_dir"), f" is '{mask(save_dir)}', {problem}")


def _has_secret(scheme: str, authority: str) -> bool:
    user, at, _ = authority.rpartition("@")
    return bool(at) and (":" in user or scheme not in _CONTAINERS)


def check_name(name: str) -> None:
    """Check that an experiment's name can be a folder's. Raises FieldError."""
    label = name if len(name) <= 60 else name[:57] + "..."
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
        rest = [FieldName("save_dir")] if problem.endswith(" of ") else []
        advice = "; use letters, digits, '-', '_' and '.'"
        raise FieldError(FieldName("experiment_name"), f" {label!r} {problem}", *rest, advice)


# A trace of more steps would be gigabytes.
_MAX_STEPS = 1000


def parse_profile(text: str) -> tuple[int, int] | None:
    """Parse `--profile` into its first and last step, counted from 1; None for "".

    Raises:
        FieldError: the text has another form, or too many steps.
    """
    if not text:
        return None
    match = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    first_step, last_step = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first_step <= last_step:
        raise FieldError(
            FieldName("profile"), f" is '{text}': it must be FIRST:LAST, steps counted from 1, such as 100:110"
        )
    if last_step - first_step >= _MAX_STEPS:
        raise FieldError(FieldName("profile"), f" is '{text}', more than {_MAX_STEPS} steps; ten are enough")
    return first_step, last_step


# Shares by measured speed.
AUTO = "auto"


def parse_shares(text: str) -> tuple[int, ...]:
    """Parse `--shares` into each rank's number; () for equal and auto.

    Raises:
        FieldError: the text has another form.
    """
    if text in ("equal", AUTO):
        return ()
    if not re.fullmatch(r"[1-9][0-9]{0,5}( ?, ?[1-9][0-9]{0,5})*", text):
        raise FieldError(
            FieldName("shares"),
            f" is '{text}': it must be equal, auto, or a number from 1 for each process, such as 5,3",
        )
    return tuple(int(share) for share in text.split(","))


SPAN = "a length such as 5% or 2epochs"
_SPAN = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?(%|epochs?)")


def is_span(value: object) -> bool:
    """Whether `value` is a share of the plan or a number of epochs, as text."""
    return isinstance(value, str) and _SPAN.fullmatch(value) is not None


def in_steps(value: int | str, *, steps: int, samples: int, batch_size: int) -> int:
    """Convert a length to steps, rounded, and at least 1 unless the length is 0.

    Args:
        value: a number of steps, or a span.
        steps: of the whole plan.
        samples: of an epoch.
        batch_size: samples of a step.
    """
    match = _SPAN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return int(value)
    number = float(match[1])
    if match[2] == "%":
        exact = number / 100 * steps
    else:
        exact = number * samples / batch_size
    if number:
        return max(1, round(exact))
    return 0


def is_share(value: object) -> bool:
    """Whether `value` is a share above 0% and up to 100%, as text."""
    match = _SPAN.fullmatch(value) if isinstance(value, str) else None
    return match is not None and match[2] == "%" and 0 < float(match[1]) <= 100


def in_batches(value: int | str, whole: float) -> int:
    """Convert a limit to batches: a share is rounded, and at least 1.

    Args:
        value: a number of batches, or a share; 0: all.
        whole: batches without the limit; may be a fraction.
    """
    if isinstance(value, str):
        number = max(1, round(float(value[:-1]) / 100 * whole))
    else:
        number = value
    return number or math.ceil(whole)
