"""The parser of every command: errors of one line, and numbers as people write them.

    parser = Parser(prog="lockstep thing", description="Does a thing.")
    parser.add_argument("--step", type=int)         # takes 1000, 1_000 and 1e3; type=(int, "auto") takes auto too
    given = parser.read(["--step", "1e3"])          # --some_flag is --some-flag
    parser.first = ["step"]                         # what --help shows; --help-all shows the rest too

argparse does the parsing: it starts in no time, and its one failure, a message of several lines, is turned into one.
Nothing here loads torch, so that a command can refuse a wrong flag at once.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from lockstep.config.hints import hint
from lockstep.config.spans import SPAN, is_span
from lockstep.errors import SETTINGS, ConfigError

__all__ = ["Parser"]

_UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours.

    Args:
        prog: the command, as it is typed.
        foreign: flags that others have and this command has not -> what to say; see `hints.FOREIGN`.
        kwargs: argparse's own.

    Attributes:
        first: the destinations of the flags that `--help` shows, in this order; empty: of all.
        examples: commands that `--help` shows behind these, one a line.
    """

    def __init__(self, *, foreign: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self._foreign = foreign or {}
        self.first: Sequence[str] = ()
        self.examples: Sequence[str] = ()
        self.add_argument("--help-all", action=_HelpAll, help=argparse.SUPPRESS)
        self.register("type", int, _whole)
        self.register("type", float, _number)
        self.register("type", (int, "auto"), lambda text: text if text == "auto" else _whole(text))
        self.register("type", (float, "auto"), lambda text: text if text == "auto" else _number(text))
        self.register("type", (int, "span"), _steps)
        self.register("type", (int, "auto", "span"), lambda text: text if text == "auto" else _steps(text))

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """What `argv` says. Prints the help and raises SystemExit(0) for `--help`.

        Raises:
            ConfigError: an unknown flag, with the nearest known one, or a value of the wrong kind.
        """
        SETTINGS.flags = True  # which the person writes, and so reads from here on
        return self.parse_args([_dashed(word) for word in argv])

    def format_help(self) -> str:
        """The text of `--help`: the first flags and the examples, where there are first ones."""
        if not self.first:
            return super().format_help()
        found = {action.dest: action for action in self._actions if action.help != argparse.SUPPRESS}
        flags = [found[name] for name in self.first if name in found]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, flags, [])
        formatter.add_text(self.description)
        formatter.start_section("the first flags")
        formatter.add_arguments(flags)
        formatter.end_section()
        shown = "".join(f"  {line}\n" for line in self.examples)
        examples = f"examples:\n{shown}\n" if shown else ""
        return f"{formatter.format_help()}\n{examples}`{self.prog} --help-all` shows all {len(found)} flags.\n"

    def format_all(self) -> str:
        """The text of `--help-all`: every flag, in its group."""
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError in one line: the flag, what is wrong with it, the way out."""
        words = message.removeprefix(_UNKNOWN).split()
        if message.startswith(_UNKNOWN) and words:
            known = [_plain(text) for text in self._flags()]
            meant = hint(_plain(words[0]), known, _flag, self._foreign) or f"; {self._list()} lists them"
            raise ConfigError(f"unknown flag {words[0].partition('=')[0]}{meant}")
        if message.startswith("argument --"):
            raise ConfigError(message.removeprefix("argument "))
        raise ConfigError(f"{message}; {self._list()} lists the flags")

    def _list(self) -> str:
        return f"`{self.prog} {'--help-all' if self.first else '--help'}`"

    def _flags(self) -> Iterator[str]:
        """The flags of this parser and of its sub-commands."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action.choices, dict):  # sub-commands
                for parser in action.choices.values():
                    yield from parser._flags()


class _HelpAll(argparse.Action):
    """`--help-all`: as `--help`, with every flag."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "nargs": 0})

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_all(), end="")
        parser.exit()


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _plain(text: str) -> str:
    """`--optim.weight-decay=1` -> `optim.weight_decay`."""
    return text.partition("=")[0].lstrip("-").replace("-", "_")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _steps(text: str) -> int | str:
    try:
        return text if is_span(text) else _whole(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor {SPAN}") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        value = _number(text, "a whole number")
    if not value.is_integer() or abs(value) >= 2**53:  # from there on floats skip whole numbers
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number")
    return int(value)


def _number(text: str, what: str = "a number") -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not {what}") from None
