"""Write the reference from the code: the public names, the options, the commands, the errors.

for path, text in pages().items(): ...      # MyST Markdown

Nothing here is a copy: signatures and docstrings come from `lockstep.__all__`, options from the configuration's
dataclasses, commands from their parsers, exit codes from the classes of errors.
"""

import argparse
import ast
import contextlib
import dataclasses
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lockstep
from lockstep import cli, errors
from lockstep.config import cli as flags
from lockstep.config.schema import BOUNDS, Config, flag, sections
from lockstep.config.task_options import TASKS
from lockstep.training.step.recorder import EXIT_INTERRUPTED, EXIT_SAVED

GROUPS = {
    "A run": ("Config", "train", "Run", "Step", "EvaluationRecord", "Best", "Result", "launch", "load", "verify"),
    "A task": ("Task", "CausalLM", "torch_schedule"),
    "Data": ("image_folder", "hold_out", "shards", "index_shards", "stream", "mixture"),
    "Sections of the configuration": ("Checkpoint", "Data", "EngineOptions", "Guards", "Model", "Optim"),
    "From other libraries": ("from_lightning", "from_trainer"),
    "Parts for your own loop": (
        *("World", "engine", "loader", "attention", "autocast", "step_backward", "gather_for_metrics"),
        *("save_state", "load_state"),
    ),
}
_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
_TITLES = {"Args": "Arguments"}


def pages() -> dict[str, str]:
    """Return the generated pages by path."""
    return {
        "reference/python.md": python(),
        "reference/options.md": options(),
        "reference/commands.md": commands(),
        "reference/errors.md": error_page(),
    }


# --- Python


def python() -> str:
    """Describe every public name."""
    parts = ["# Python", "The names of `import lockstep`. Importing it loads no torch; a name loads what it needs."]
    for title, names in GROUPS.items():
        parts += [f"## {title}", *(describe(name) for name in names)]
    return "\n\n".join(parts) + "\n"


def describe(name: str) -> str:
    """Describe a public class, with its methods, or a public function."""
    value = getattr(lockstep, name)
    if not inspect.isclass(value):
        return directive("py:function", f"lockstep.{name}{signature(value)}", render(inspect.getdoc(value) or ""))
    body = [render(inspect.getdoc(value) or "")]
    if _is_section(value):
        own = [spec.name for spec in dataclasses.fields(value) if not dataclasses.is_dataclass(spec.type)]
        body.append(f"Its {len(own)} fields are [options](options.md): " + ", ".join(f"`{each}`" for each in own) + ".")
    body += [_member(value, each) for each in members(value)]
    arguments = "(**options)" if _is_section(value) else signature(value)
    return directive("py:class", f"lockstep.{name}{arguments}", "\n\n".join(body), colons=4)


def members(kind: type) -> list[str]:
    """List the public methods and properties that a class defines and describes."""
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
        and inspect.getdoc(getattr(kind, name))
    ]


def _member(kind: type, name: str) -> str:
    value = vars(kind)[name]
    text = render(inspect.getdoc(getattr(kind, name)) or "")
    if isinstance(value, property):
        return directive("py:property", name, text)
    directives = {classmethod: ":classmethod:\n", staticmethod: ":staticmethod:\n"}
    option = directives.get(type(value), "")
    function = value.__func__ if option else value
    return directive("py:method", name + signature(function, bound=not isinstance(value, staticmethod)), option + text)


def _is_section(kind: type) -> bool:
    return kind is Config or kind in {type(section) for section, _ in sections(Config())}


def signature(function: Any, *, bound: bool = False) -> str:
    """Format a signature without private parameters, modules and long defaults."""
    original = inspect.signature(function)
    shown = [each for each in original.parameters.values() if not each.name.startswith("_")][int(bound) :]
    shown = [each.replace(annotation=_Text(each.annotation), default=_default(each.default)) for each in shown]
    returns = inspect.Signature.empty if inspect.isclass(function) else _Text(original.return_annotation)
    return str(original.replace(parameters=shown, return_annotation=returns))


class _Text:
    """An annotation or a default, printed in few words."""

    def __new__(cls, value: Any) -> Any:
        return value if value is inspect.Parameter.empty else super().__new__(cls)

    def __init__(self, value: Any) -> None:
        text = value if isinstance(value, str) else inspect.formatannotation(value)
        self.text = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)

    def __repr__(self) -> str:
        return self.text


def _default(value: Any) -> Any:
    plain = value is inspect.Parameter.empty or value is None or isinstance(value, str | int | float | tuple)
    return value if plain else _Text("...")


def directive(kind: str, argument: str, body: str, colons: int = 3) -> str:
    """Write a directive of MyST; an outer one has more colons than those in it."""
    fence = ":" * colons
    return f"{fence}{{{kind}}} {argument}\n{body}\n{fence}"


def render(docstring: str) -> str:
    """Convert a docstring to Markdown: paragraphs, indented code, and the sections of Google's form."""
    parts, section = [], ""
    for block in re.split(r"\n\s*\n", docstring.strip()):
        title = re.match(rf"({'|'.join(_SECTIONS)}):\n", block)
        if title:
            section, block = title[1], block[title.end() :]
            parts += [f"**{_TITLES.get(section, section)}**", _entries(block)]
        elif block.startswith("    "):
            parts.append(_code(textwrap.dedent(block)))
        else:
            section = ""
            parts.append(escape(block))
    return "\n\n".join(parts)


def _entries(block: str) -> str:
    """Convert `name: text` lines, each with its indented continuation, to a list; other text stays a paragraph."""
    entries: list[str] = []
    for line in textwrap.dedent(block).splitlines():
        if line.startswith(" ") and entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line)
    pairs = [re.match(r"([\w*][\w*, .]*): (.*)", entry) for entry in entries]
    if not all(pairs):
        return escape(" ".join(entries))
    return "\n".join(f"- `{pair[1]}`: {escape(pair[2])}" for pair in pairs if pair)


def _code(text: str) -> str:
    try:
        ast.parse(text)
        language = "python"
    except SyntaxError:
        language = "text"
    return f"```{language}\n{text}\n```"


def escape(text: str) -> str:
    """Escape what Markdown would read as markup, mark flags as code, and link pages; code stays as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _escape_prose(part) for part in parts)


def _escape_prose(text: str) -> str:
    text = re.sub(r"([*<\[\]])", r"\\\1", text)
    text = re.sub(r"(?<![\w-])(--[a-z][\w.-]*\w)", r"`\1`", text)
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](../docs/\1.md)", text)


# --- options


def options() -> str:
    """Describe every option: flag, type, default, choices, bounds, help."""
    blocks: dict[str, list[str]] = {}
    titles = {name: title for title, names in flags._GROUPS.items() for name in names}
    for owner, prefix in sections(Config()):
        for spec in dataclasses.fields(owner):
            if not dataclasses.is_dataclass(spec.type):
                title = f"`{prefix.rstrip('.')}`" if prefix else titles.get(spec.name, "the run")
                blocks.setdefault(title, []).append(option(prefix + spec.name, spec))
    count = sum(map(len, blocks.values()))
    text = (
        f"The {count} options of a run. Each is a flag of `lockstep train` and of the commands that build a run, a "
        "key of a TOML file (`--config`) and a field of [`lockstep.Config`](python.md). A flag overrides the file. "
        "`auto` is decided once the task and the data are known: [defaults](../docs/defaults.md)."
    )
    parts = ["# Options", text, "```{program} lockstep train\n```"]
    for title, entries in blocks.items():
        parts += [f"## {title[0].upper()}{title[1:]}", *entries]
    return "\n\n".join(parts) + "\n"


def option(name: str, spec: "dataclasses.Field[Any]") -> str:
    """Describe one option."""
    kind = spec.type.__name__ if isinstance(spec.type, type) else str(spec.type)
    choices = [f"`{each}`" for each in spec.metadata["choices"]]
    facts = [f"One of {', '.join(choices)}" if choices else f"Type `{kind}`", f"default {_shown(spec, spec.default)}"]
    own = [f"`{task}` {_shown(spec, each.defaults[name])}" for task, each in TASKS.items() if name in each.defaults]
    facts += [f"with `--task` {', '.join(own)}"] * bool(own)
    if name in BOUNDS:
        facts.append(BOUNDS[name][2])
    if spec.metadata.get("tasks"):
        facts.append("for the tasks " + ", ".join(spec.metadata["tasks"]))
    if spec.type is bool:
        facts.append(f"`{flag(name).replace('--', '--no-', 1)}` switches it off")
    facts.append(f"in Python and in a file `{name}`")
    body = f"{escape(spec.metadata['help'])}.\n\n{escape('; '.join(facts))}."
    value = "" if spec.type is bool else f" {flags._metavar(spec, spec.type)}"
    return directive("option", flag(name) + value, body)


def _shown(spec: "dataclasses.Field[Any]", value: Any) -> str:
    if spec.metadata.get("auto") and value is spec.default:
        return "`auto`"
    return "empty" if value == "" else f"`{str(value).lower() if isinstance(value, bool) else value}`"


# --- commands


def commands() -> str:
    """Show what `--help` prints for each command and its actions."""
    parts = [
        "# Commands",
        "What `lockstep COMMAND --help` prints. Commands that build a run take its [options](options.md) too; "
        "`--help-all` lists them all. Exit codes: [errors](errors.md).",
    ]
    for name, (_, _, text) in cli.COMMANDS.items():
        parts += [f"## lockstep {name}", f"{text[0].upper()}{text[1:]}."]
        for title, parser in parsers(name):
            if title != name:
                parts.append(f"### lockstep {title}")
            parts.append(f"```text\n{_help(parser)}\n```")
    return "\n\n".join(parts) + "\n"


def parsers(name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield a command's own parser, and those of its actions: ("checkpoint prune", parser)."""
    seen: list[argparse.ArgumentParser] = []

    def record(parser: argparse.ArgumentParser, file: Any = None) -> None:
        seen.append(parser)

    with mock.patch.object(argparse.ArgumentParser, "print_help", record), contextlib.suppress(SystemExit):
        cli.dispatch([name, "--help"])
    yield name, seen[0]
    for action in seen[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from ((f"{name} {each}", parser) for each, parser in action.choices.items())


def _help(parser: argparse.ArgumentParser) -> str:
    with mock.patch.dict(os.environ, {"COLUMNS": "100"}):
        return parser.format_help().strip()


# --- errors


def error_page() -> str:
    """List the errors with their exit codes."""
    kinds = [each for name in errors.__all__ if inspect.isclass(each := getattr(errors, name))]
    rows = [f"| `{each.__name__}` | {each.exit_code} | {_first_line(each)} |" for each in kinds]
    return "\n".join(
        (
            "# Errors and exit codes\n",
            "Errors that lockstep raises on purpose, in `lockstep.errors`. A command prints one line and exits with "
            "the code. A traceback shows an error of your code, or a bug of lockstep. What a line means, and what to "
            "do: [troubleshooting](../docs/troubleshooting.md).\n",
            "| error | exit code | |",
            "|---|---|---|",
            *rows,
            "",
            "```text",
            (inspect.getdoc(errors) or "").split("\n\n")[2],
            "```\n",
            f"Other codes: 0 where a command did what was asked, {EXIT_INTERRUPTED} after Ctrl-C, {EXIT_SAVED} where a "
            "run saved itself on a signal. What `lockstep launch` does with each: "
            "[reliability](../docs/reliability.md). Codes with a meaning of their own are on the page of the command: "
            "[verify](../docs/verify.md), [compare](../docs/trace.md), [plan](../docs/plan.md), "
            "[scale](../docs/scale.md), [doctor](../docs/doctor.md).\n",
        )
    )


def _first_line(kind: type) -> str:
    return escape((inspect.getdoc(kind) or "").splitlines()[0])
