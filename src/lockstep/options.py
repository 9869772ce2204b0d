"""Flags and config files -> Config, and Config -> the file in the run's folder.

    config = parse(["--config", "run.toml", "--lr", "3e-4"])       # defaults < preset < file < flags

argparse does the parsing: it starts in no time, and its one failure, a message of several lines, is turned into one.
"""

import argparse
import dataclasses
import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from lockstep import presets
from lockstep.config import Config, flag, sections
from lockstep.errors import ConfigError

__all__ = ["flat", "option_list", "parse", "to_toml"]


def parse(argv: list[str]) -> Config:
    """The Config that `argv` asks for. Prints the help and raises SystemExit(0) for `--help`.

    Raises:
        ConfigError: an unknown flag or key (with the nearest known one), a value of the wrong kind or out of bounds.
    """
    given = vars(_parser().parse_args(argv))
    _launched_by_deepspeed(given)
    path = given.pop("config", None)
    values = read(Path(path)) if path else {}
    values.update(given)
    return build(presets.applied(values))


def _launched_by_deepspeed(given: dict[str, Any]) -> None:
    """Turns the flags that the `deepspeed` launcher and scripts written for it bring into ours."""
    given.pop("local_rank", None)  # the environment says the same
    wanted, file = given.pop("deepspeed", False), given.pop("deepspeed_config", None)
    if (wanted or file) and given.setdefault("engine", "deepspeed") != "deepspeed":
        raise ConfigError(f"--deepspeed and --engine {given['engine']} contradict each other; leave one out")
    if file and given.setdefault("engine_options.config", file) != file:
        raise ConfigError("--deepspeed_config and --engine.config name two files; leave one out")


def build(values: dict[str, Any]) -> Config:
    """A Config from dotted names and values; what is left out keeps its default."""
    top: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else top)[key] = value
    classes = {spec.name: spec.type for spec in dataclasses.fields(Config)}
    made = {section: classes[section](**fields) for section, fields in nested.items()}  # type: ignore[operator]
    return Config(**top, **made)


def read(path: Path) -> dict[str, Any]:
    """The dotted names and values of a TOML file. Raises ConfigError for what cannot be read or is not known."""
    try:
        with path.open("rb") as handle:
            loaded = tomllib.load(handle)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not a TOML file: {str(error).splitlines()[0]}") from error
    values: dict[str, Any] = {}
    section_names = {prefix.rstrip(".") for _, prefix in sections(Config()) if prefix}
    for key, value in loaded.items():
        if key.replace("-", "_") in section_names and isinstance(value, dict):
            values.update({f"{key}.{name}": item for name, item in value.items()})
        else:
            values[key] = value
    return {_known(name, path): value for name, value in values.items()}


def _known(name: str, path: Path) -> str:
    wanted, known = name.replace("-", "_"), option_list()
    if wanted not in known:
        raise ConfigError(f"--config {path}: unknown key '{name}'{_suggest(wanted, known)}")
    return wanted


def option_list() -> list[str]:
    """The dotted name of every option, in order. A test holds this list fixed."""
    return [
        prefix + spec.name
        for owner, prefix in sections(Config())
        for spec in dataclasses.fields(owner)
        if not dataclasses.is_dataclass(spec.type)
    ]


def flat(config: Config) -> dict[str, Any]:
    """Every option and its value by dotted name."""
    return {
        prefix + spec.name: getattr(owner, spec.name)
        for owner, prefix in sections(config)
        for spec in dataclasses.fields(owner)
        if not dataclasses.is_dataclass(spec.type)
    }


def to_toml(config: Config) -> str:
    """The merged configuration as a file that `--config` reads back to an equal one."""
    lines, seen = [], ""
    for name, value in flat(config).items():
        section, _, key = name.rpartition(".")
        if section != seen:
            lines += ["", f"[{section}]"]
            seen = section
        lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    return repr(value)


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, with the nearest flag for one that is misspelt."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split()
        if message.startswith("unrecognized arguments: ") and words:
            name = words[0].partition("=")[0]
            known = [text for action in self._actions for text in action.option_strings]
            raise ConfigError(f"unknown flag {name}{_suggest(name, known)}")
        raise ConfigError(message.removeprefix("argument "))


def _suggest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1) or [other for other in names if other.endswith("." + name)][:1]
    return f": did you mean {close[0]}?" if close else "; `lockstep train --help` lists them"


def _parser() -> _Parser:
    parser = _Parser(
        prog="lockstep train",
        description="Trains a model. The same --experiment-name resumes, on any number of processes.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with these options; flags override it")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed_config", "--deepspeed-config", metavar="FILE", help=argparse.SUPPRESS)
    for owner, prefix in sections(Config()):
        group = parser.add_argument_group(prefix.rstrip(".")) if prefix else parser
        for spec in dataclasses.fields(owner):
            if not dataclasses.is_dataclass(spec.type):
                _add(group, prefix, spec)
    return parser


def _add(group: Any, prefix: str, spec: "dataclasses.Field[Any]") -> None:
    text = spec.metadata["help"]
    if spec.default != "":
        text += f" (default: {spec.default})"
    if spec.type is bool:
        group.add_argument(flag(prefix + spec.name), dest=prefix + spec.name, action=_Switch, help=text)
        return
    choices = spec.metadata["choices"]
    group.add_argument(
        flag(prefix + spec.name),
        dest=prefix + spec.name,
        type=_READERS[spec.type],  # type: ignore[index]
        metavar="|".join(choices) if choices else spec.type.__name__.upper(),  # type: ignore[union-attr]
        help=text,
    )


class _Switch(argparse.BooleanOptionalAction):
    """`--exact`, `--no-exact`; the help shows the first alone."""

    def format_usage(self) -> str:
        return self.option_strings[0]


def _whole(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


_READERS: dict[type, Any] = {int: _whole, float: _number, str: str}
