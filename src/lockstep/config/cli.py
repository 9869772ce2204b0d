"""Parse flags and config files into a Config, and write a Config as a file.

    config = parse(["--config", "run.toml", "--lr", "3e-4"])       # defaults < preset < file < flags

A command with further flags adds these to its own parser:

    parser = Parser(prog="lockstep verify", foreign=FOREIGN)
    add_flags(parser)
    args = parser.read(argv)
    config = build(apply_preset(collect_options(vars(args))))
"""

import argparse
import dataclasses
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from lockstep.config.deepspeed import merge_settings, read_json
from lockstep.config.engine_options import LAUNCHER_FLAGS, translate_launcher_flags
from lockstep.config.fields import SPAN, FieldError, is_hub_name, is_span
from lockstep.config.hints import FOREIGN, hint
from lockstep.config.schema import (
    DEFAULTS,
    Config,
    flag,
    is_auto,
    is_typed,
    options,
    register_parser,
    requested_seq_len,
    sections,
)
from lockstep.config.sections import effective
from lockstep.config.task_options import LANGUAGE, LIGHTNING, OWN, TASKS, TaskSpec, is_option_of, kind_of
from lockstep.errors import SETTINGS, ConfigError

__all__ = [
    "COMMON_FLAGS",
    "PRESETS",
    "Config",
    "Parser",
    "add_flags",
    "apply_preset",
    "build",
    "collect_options",
    "describe_preset",
    "flatten",
    "make_parser",
    "option_list",
    "parse",
    "read_toml",
    "to_toml",
]


_UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError, with a hint for unknown flags.

    Args:
        prog: the command, as typed.
        foreign: flags of other programs -> the hint for each; see `hints.FOREIGN`.
        kwargs: of argparse.

    Attributes:
        own: (title, destinations) of the task's or the script's flags, which `--help` lists first.
        common: destinations of the flags that `--help` lists, in this order; empty: all flags.
        examples: commands that `--help` lists after them, one per line.
    """

    def __init__(self, *, foreign: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self._foreign = foreign or {}
        self.own: tuple[str, Sequence[str]] = ("", ())
        self.common: Sequence[str] = ()
        self.examples: Sequence[str] = ()
        self.add_argument("--help-all", action=_HelpAll, help=argparse.SUPPRESS)
        self.register("type", int, _whole_number)
        self.register("type", float, _number)
        self.register("type", (int, "auto"), lambda text: text if text == "auto" else _whole_number(text))
        self.register("type", (float, "auto"), lambda text: text if text == "auto" else _number(text))
        self.register("type", (int, "span"), _step_count)
        self.register("type", (int, "auto", "span"), lambda text: text if text == "auto" else _step_count(text))

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse `argv`. `--help` prints the help and raises SystemExit(0).

        Raises:
            ConfigError: an unknown flag, with the nearest known one, or a value of the wrong type.
        """
        # As in `parse`: commands with further flags call this alone.
        SETTINGS.flags = True
        return self.parse_args([self._with_dashes(word) for word in argv])

    def change(self, name: str, **settings: Any) -> None:
        """Change the flag of an option, for a command that reads it in another way."""
        for action in self._actions:
            if action.dest == name:
                vars(action).update(settings)

    def _with_dashes(self, word: str) -> str:
        name, equals, value = word.partition("=")
        # A script's own flag may have underscores.
        if word.startswith("--") and name not in self._option_string_actions:
            return name.replace("_", "-") + equals + value
        return word

    def format_help(self) -> str:
        """Format the text of `--help`: the common flags and the examples, or all flags."""
        if not self.common:
            return super().format_help()
        actions = {}
        for action in self._actions:
            if action.help != argparse.SUPPRESS:
                actions[action.dest] = action
        groups = (self.own, ("common flags", self.common))
        shown = []
        for title, names in groups:
            shown.append((title, [actions[name] for name in names if name in actions]))
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [action for _, flags in shown for action in flags], [])
        formatter.add_text(self.description)
        for title, flags in shown:
            formatter.start_section(title)
            formatter.add_arguments(flags)
            formatter.end_section()
        lines = "".join(f"  {line}\n" for line in self.examples)
        examples = f"examples:\n{lines}\n" if lines else ""
        return f"{formatter.format_help()}\n{examples}`{self.prog} --help-all` lists all {len(actions)} flags.\n"

    def format_all(self) -> str:
        """Format the text of `--help-all`: every flag, by group."""
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message and the way out."""
        words = message.removeprefix(_UNKNOWN).split()
        if message.startswith(_UNKNOWN) and words:
            if not words[0].startswith("-"):
                raise ConfigError(f"unexpected argument {words[0]!r}: flags begin with --; {self._help()} lists them")
            known = [_field_name(text) for text in self._flags()]
            advice = hint(_field_name(words[0]), known, _flag, self._foreign) or f"; {self._help()} lists them"
            raise ConfigError(f"unknown flag {words[0].partition('=')[0]}{advice}")
        if message.startswith("argument --"):
            raise ConfigError(message.removeprefix("argument "))
        raise ConfigError(f"{message}; {self._help()} lists the flags")

    def _help(self) -> str:
        return f"`{self.prog} {'--help-all' if self.common else '--help'}`"

    def _flags(self) -> Iterator[str]:
        """Yield the flags of this parser and its sub-commands."""
        for action in self._actions:
            yield from action.option_strings
            # The choices of sub-commands are parsers.
            if isinstance(action.choices, dict):
                for parser in action.choices.values():
                    yield from parser._flags()


class _HelpAll(argparse.Action):
    """The action of `--help-all`: print every flag, and exit."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "nargs": 0})

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_all(), end="")
        parser.exit()


def _field_name(text: str) -> str:
    """Convert a flag to a dotted name: `--optim.weight-decay=1` -> `optim.weight_decay`."""
    return text.partition("=")[0].lstrip("-").replace("-", "_")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _step_count(text: str) -> int | str:
    try:
        if is_span(text):
            return text
        return _whole_number(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} or {SPAN}") from None


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        value = _number(text, "a whole number")
    # Larger floats skip whole numbers.
    if not value.is_integer() or abs(value) >= 2**53:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number")
    return int(value)


def _number(text: str, kind: str = "a number") -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not {kind}") from None


# The options of the script in chapter 1 of the "distributed training guide": AdamW with torch's defaults, the schedule
# CosineAnnealingLR(T_max=1000, eta_min=lr / 100), bf16 parameters, blocks of text without separators; their length is
# `requested_seq_len`, or the model's context if that is shorter.
_SOURCE: dict[str, Any] = {
    "seed": 0,
    "num_epochs": 100,
    "lr": 3e-5,
    "batch_size": 1,
    "log_freq": 100,
    "ckpt_freq": 500,
    "precision": "bf16-true",
    "data.packing": "blocks",
    "optim.beta2": 0.999,
    "optim.weight_decay": 0.01,
    "optim.decay_embeddings": True,
    "optim.clip": 0.0,
    "optim.schedule": "cosine-periodic",
    "optim.period": 1000,
    "optim.warmup_steps": 0,
    "optim.floor": 0.01,
}
PRESETS: dict[str, dict[str, Any]] = {"none": {}, "source": _SOURCE}


def apply_preset(values: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of the preset that `values` select.

    Args:
        values: options by dotted name, from the file and the flags; they override the preset.
    """
    preset = values.get("preset", "auto")
    from_hub = all(is_hub_name(str(values.get(key, ""))) for key in ("model_name", "dataset_name"))
    # The script of the guide begins with random weights.
    from_hub = from_hub and not values.get("model.pretrained")
    if preset == "auto" and from_hub and kind_of(str(values.get("task", ""))) == LANGUAGE:
        preset = "source"
    return {**effective(PRESETS.get(preset, {}), values), **values, "preset": preset}


def describe_preset(config: Config) -> str:
    """Describe in one line what the preset "source" set, after file and flags."""
    optim = config.optim
    period = f" over {optim.period} steps" if optim.period else ""
    length = f"{'up to ' * is_auto(config, 'seq_len')}{requested_seq_len(config)}"
    return (
        f"preset source: seed {config.seed}, {config.num_epochs} epochs, lr {config.lr:g} ({optim.schedule}"
        f"{period} to {optim.floor:.0%}), batch {config.batch_size}, {config.precision}, blocks of "
        f"{length} tokens; flags override it, --preset none switches it off"
    )


def parse(
    argv: list[str],
    prog: str = "lockstep train",
    defaults: Mapping[str, Any] | None = None,
    own: tuple[argparse.ArgumentParser, argparse.Namespace] | None = None,
) -> Config:
    """Parse flags into a Config. `--help` prints the help and raises SystemExit(0).

    The flags of this process's own command line are noted in `SETTINGS`.

    Args:
        argv: the flags.
        prog: the command as typed, for the help and for errors.
        defaults: fields of Config, sections as dicts; the file and the flags override them.
        own: the parser of a script's own flags, and the namespace to fill with their values.

    Raises:
        ConfigError: an unknown flag or key (with the nearest known one), or a value of the wrong type or out of bounds.
    """
    # The user writes flags, so messages name settings by flag.
    SETTINGS.flags = True
    parser = make_parser(argv, prog, defaults, own[0] if own else None)
    args = vars(parser.read(argv))
    if own:
        # `_script_flags` has refused names that both have.
        for name in set(args) - _DESTINATIONS:
            setattr(own[1], name, args[name])
    options = collect_options(args)
    own_defaults = _by_dotted_name(defaults or {})
    if argv == sys.argv[1:] or is_typed(argv):
        SETTINGS.typed = options
        SETTINGS.defaults = own_defaults
    return build(apply_preset({**own_defaults, **options}))


def make_parser(
    argv: list[str],
    prog: str,
    defaults: Mapping[str, Any] | None = None,
    script_parser: argparse.ArgumentParser | None = None,
) -> Parser:
    """Make the parser of `lockstep train`, or of a script with its flags; see `parse`."""
    task_name = _task_in(argv) or str((defaults or {}).get("task", ""))
    task_kind = kind_of(task_name)
    parser = Parser(
        prog=prog,
        usage=f"{prog} [flags]",
        description="Train a model. The same --experiment-name resumes it, on any number of processes.",
        epilog=f"With --task {' or '.join(TASKS)} the help lists the options of that task too."
        if task_kind == OWN
        else None,
        foreign=FOREIGN,
        parents=[script_parser] if script_parser else [],
        # A parent brings its own --help.
        add_help=script_parser is None or not script_parser.add_help,
    )
    own = _by_dotted_name(defaults or {})
    try:
        add_flags(parser, kind=task_kind, defaults=own)
    except argparse.ArgumentError as error:
        name = str(error).rpartition(" ")[2]
        raise ConfigError(f"{name} of the script's parser is a flag of lockstep: read it from the Config") from None
    parser.common = COMMON_FLAGS
    if defaults is not None:
        # A script makes its task itself.
        parser.common = [name for name in COMMON_FLAGS if name not in _OF_TASK or name in own]
    if task_kind in TASKS and task_name:
        parser.own = f"flags of --task {task_kind}", TASKS[task_kind].common or _options_only_of(task_kind)
    # A script's own flags come first: nobody knows them from elsewhere.
    if script_parser:
        parser.own = f"flags of {prog}", _script_flags(script_parser)
    script = prog.removeprefix("lockstep ")
    task = " --task digits.py:Digits" if script == "train" else ""
    parser.examples = (
        f"{prog} --experiment-name first --max-steps 100",
        f"lockstep launch --nproc-per-node 2 -- {script}{task} --exact",
    )
    return parser


def _script_flags(parser: argparse.ArgumentParser) -> list[str]:
    """List the destinations of a script's own flags.

    Raises:
        ConfigError: one is that of an option of lockstep.
    """
    names = []
    for action in parser._actions:
        if action.dest in _DESTINATIONS:
            raise ConfigError(f"dest '{action.dest}' of the script's parser is an option of lockstep: choose another")
        if not isinstance(action, argparse._HelpAction):
            names.append(action.dest)
    return names


def _options_only_of(kind: str) -> list[str]:
    """List the options of one built-in task alone."""
    return [name for _, name, spec in options(DEFAULTS) if spec.metadata.get("tasks") == (kind,)]


def _task_in(argv: list[str]) -> str:
    """Return the value of the last --task in `argv`."""
    task = ""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name == "--task":
            task = value if equals else following
    return task


def _by_dotted_name(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert fields of Config, sections as dicts or objects, to dotted names. Raises UnknownField."""
    # This checks the names.
    Config(**fields)
    result: dict[str, Any] = {}
    for name, value in fields.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        result |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return result


def collect_options(args: dict[str, Any]) -> dict[str, Any]:
    """Return the options that flags, config file and DeepSpeed file set, by dotted name.

    Flags override the config file.

    Args:
        args: values of a parser with these flags, see `add_flags`; others are ignored.

    Raises:
        ConfigError: a file that cannot be read or has an unknown key, or settings that contradict each other.
    """
    values = {}
    for name, value in args.items():
        if name in _DESTINATIONS:
            values[name] = value
    _set_lightning_task(values)
    translate_launcher_flags(values)
    path = values.pop("config", None)
    values = {**(read_toml(Path(path)) if path else {}), **values}
    file = read_json(str(values.get("engine_options.config", "")))
    if file:
        return merge_settings(values, file, int(os.environ.get("WORLD_SIZE", "1")))
    return values


def _set_lightning_task(values: dict[str, Any]) -> None:
    """Replace `--lightning` and `--datamodule` in `values` by the task that they name. Raises ConfigError."""
    module = str(values.pop("lightning", ""))
    data = str(values.pop("datamodule", ""))
    if data and not module:
        raise ConfigError(f"--datamodule {data} needs the LightningModule: add --lightning FILE.py:Module")
    if module and values.get("task"):
        raise ConfigError(f"--lightning {module} and --task {values['task']} both name the task; remove one")
    if module:
        values["task"] = f"{LIGHTNING}{module}{',' * bool(data)}{data}"


def build(values: dict[str, Any]) -> Config:
    """Make a Config of options by dotted name; the others keep their defaults.

    Raises:
        ConfigError: an invalid value, by its flag.
    """
    top: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else top)[key] = value
    try:
        return Config(**top, **nested)
    except FieldError as error:
        raise ConfigError(error.message(flag)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read the options of a TOML file, by dotted name.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has an unknown key.
    """
    try:
        # Editors of Windows write a byte order mark.
        loaded = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not a TOML file: {str(error).splitlines()[0]}") from error
    values: dict[str, Any] = {}
    section_names = {prefix.rstrip(".") for _, prefix in sections(DEFAULTS) if prefix}
    for key, value in loaded.items():
        if key.replace("-", "_") in section_names and isinstance(value, dict):
            for name, item in value.items():
                values[f"{key}.{name}"] = item
        else:
            values[key] = value
    known = option_list()
    return {_check_key(name, known, path): value for name, value in values.items()}


def _check_key(name: str, known: list[str], path: Path) -> str:
    key = name.replace("-", "_")
    if key not in known:
        advice = hint(key, known) or "; `lockstep train --help-all` lists them"
        raise ConfigError(f"--config {path}: unknown key '{name}'{advice}")
    return key


def option_list() -> list[str]:
    """List every option by dotted name, in order. A test fixes this list."""
    return [name for _, name, _ in options(DEFAULTS)]


def flatten(config: Config, *, own_task: bool = False) -> dict[str, Any]:
    """Return every option by dotted name, "auto" if its value is still to be chosen.

    Options of other tasks than the configuration's are omitted if they have their default.

    Args:
        own_task: the task is the user's: omit the options of all built-in tasks.
    """
    task_kind = OWN if own_task else kind_of(config.task)
    return {
        name: "auto" if is_auto(config, name) else getattr(owner, spec.name)
        for owner, name, spec in options(config)
        if is_option_of(spec, task_kind) or getattr(owner, spec.name) != spec.default
    }


def to_toml(config: Config, *, own_task: bool = False) -> str:
    """Format the configuration as a file that `--config` reads back; `own_task` as for `flatten`."""
    lines = []
    last_section = ""
    for name, value in flatten(config, own_task=own_task).items():
        section, _, key = name.rpartition(".")
        if section != last_section:
            lines += ["", f"[{section}]"]
            last_section = section
        lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        if value:
            return "true"
        return "false"
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    return repr(value)


_OF_TASK = ("task", "model_name", "dataset_name")
# The flags that `--help` lists; `--help-all` lists all.
COMMON_FLAGS = (
    *(*_OF_TASK, "experiment_name", "save_dir", "num_epochs", "max_steps", "batch_size", "micro_batch_size"),
    *("lr", "precision", "engine", "exact", "seed", "eval_freq", "data.workers", "wandb", "config"),
)

# The groups of `--help-all` for the flags outside the sections.
_GROUPS = {
    "model and data": ("task", "model_name", "dataset_name", "tokenizer", "seq_len"),
    "the plan": (
        *("num_epochs", "max_steps", "extend_to", "limit_train_batches", "batch_size", "micro_batch_size"),
        *("lr", "seed", "preset"),
    ),
    "computation": (
        *("engine", "device", "precision", "matmul_precision", "residual_dtype", "weight_copies", "grad_dtype"),
        *("exact", "batchnorm", "attention", "compile", "compile_scope"),
        *("activation_checkpointing", "on_oom", "timeout"),
    ),
    "evaluation": (
        *("eval_freq", "limit_eval_batches", "eval_micro_batch_size", "eval_workers"),
        *("best_metric", "patience", "patience_metric", "min_delta"),
    ),
    "output": (
        "log_freq",
        "log_gradients",
        "ckpt_freq",
        "report",
        "profile",
        "csv",
        "tensorboard",
        "wandb",
        "wandb_project",
        "mlflow",
    ),
}


def add_flags(parser: argparse.ArgumentParser, kind: str = LANGUAGE, defaults: Mapping[str, Any] | None = None) -> None:
    """Add the flag of every option and --config; pass the parsed values to `collect_options`.

    Args:
        parser: of a command that takes the options.
        kind: the kind of the task, see `kind_of`; the help omits options of other tasks. "": it lists all.
        defaults: a script's own defaults, by dotted name.
    """
    add = parser.add_argument
    own_defaults = defaults or {}
    for name, settings in LAUNCHER_FLAGS.items():
        add(flag(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **settings)
    text = "an unchanged LightningModule, constructed without arguments; its loaders set the batch size"
    add("--lightning", metavar="FILE.py:CLASS", default=argparse.SUPPRESS, help=text)
    text = "the LightningDataModule of --lightning (default: the module's own loaders)"
    add("--datamodule", metavar="FILE.py:CLASS", default=argparse.SUPPRESS, help=text)
    text = "a TOML file with these options; flags override it"
    add("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)
    titles = {name: title for title, names in _GROUPS.items() for name in names}
    groups: dict[str, Any] = {title: parser.add_argument_group(title) for title in ("the run", *_GROUPS)}
    for owner, name, spec in options(DEFAULTS):
        if not is_option_of(spec, kind):
            # In no group, because the help prints the title of an empty one.
            _add_flag(parser, name, spec, None)
            continue
        title = name.rpartition(".")[0] or titles.get(spec.name, "the run")
        if title not in groups:
            groups[title] = parser.add_argument_group(title, (type(owner).__doc__ or "").splitlines()[0])
        task = TASKS.get(kind, TaskSpec(""))
        # The help shows what the script trains with if the flag is left out.
        if name in own_defaults:
            task = task._replace(defaults=own_defaults)
        _add_flag(groups[title], name, spec, task)


def _add_flag(group: Any, name: str, spec: "dataclasses.Field[Any]", task: TaskSpec | None) -> None:
    """Add one option's flag, with the help of `task`; None hides it."""
    text = spec.metadata["help"]
    default = spec.default
    if task:
        text = task.helps.get(name, text)
        default = task.defaults.get(name, default)
    auto = bool(spec.metadata.get("auto"))
    has_own = task is not None and name in task.defaults
    if auto or default != "":
        text += f" (default: {'auto' if auto and not has_own else default})"
    settings: dict[str, Any] = {"action": _AutoSwitch if auto else _BooleanFlag}
    if spec.type is not bool:
        field_type = cast(type, spec.type)
        span = bool(spec.metadata.get("span"))
        settings = {
            "type": (field_type, *["auto"] * auto, *["span"] * span) if auto or span else field_type,
            "metavar": _metavar(spec, field_type),
        }
    settings["help"] = text.replace("%", "%%") if task else argparse.SUPPRESS
    group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, **settings)


def _metavar(spec: "dataclasses.Field[Any]", kind: type) -> str:
    metadata = spec.metadata
    if metadata["choices"]:
        return "|".join(metadata["choices"])
    if metadata.get("share"):
        return "BATCHES|10%"
    if metadata.get("span"):
        return "STEPS|5%|1epoch"
    return kind.__name__.upper()


class _BooleanFlag(argparse.BooleanOptionalAction):
    """The action of `--exact` and `--no-exact`; the usage lists the first only."""

    def format_usage(self) -> str:
        return self.option_strings[0]


class _AutoSwitch(_BooleanFlag):
    """The action of `--compile`, `--no-compile` and `--compile auto`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.nargs = "?"
        self.metavar = "auto"

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        name = str(option_string)
        if values not in (None, []) and (values != "auto" or name.startswith("--no-")):
            parser.error(
                f"argument {name}: invalid value '{values}'; use {name} alone, or {self.option_strings[0]} auto"
            )
        setattr(namespace, self.dest, "auto" if values == "auto" else not name.startswith("--no-"))


_DESTINATIONS = {*option_list(), "config", "lightning", "datamodule", *LAUNCHER_FLAGS}


register_parser(parse)
