"""Flags and config files -> Config, and Config -> the file in the run's folder.

    config = parse(["--config", "run.toml", "--lr", "3e-4"])       # defaults < preset < file < flags

A command with flags of its own has them in one parser with these:

    parser = Parser(prog="lockstep verify", foreign=FOREIGN)
    add_flags(parser)
    given = parser.read(argv)
    config = build(presets.applied(told(vars(given))))
"""

import argparse
import dataclasses
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from lockstep.config.deepspeed import read_json, taken
from lockstep.config.engine_options import LAUNCHER_FLAGS, from_launcher
from lockstep.config.fields import SPAN, FieldError, is_hub_name, is_span
from lockstep.config.hints import FOREIGN, hint
from lockstep.config.schema import Config, flag, is_auto, register_parser, sections
from lockstep.config.sections import without_idle
from lockstep.config.task_options import LANGUAGE, LIGHTNING, OWN, TASKS, TaskSpec, belongs, kind_of
from lockstep.errors import SETTINGS, ConfigError

__all__ = [
    "FIRST",
    "PRESETS",
    "Config",
    "Parser",
    "add_flags",
    "applied",
    "build",
    "described",
    "flat",
    "option_list",
    "parse",
    "parser_of",
    "read",
    "to_toml",
    "told",
]


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


# The options of the script in chapter 1 of the "distributed training guide": AdamW with torch's own defaults, the
# rate of CosineAnnealingLR(T_max=1000, eta_min=lr / 100), bf16 parameters, blocks of text without separators.
_SOURCE: dict[str, Any] = {
    "seed": 0,
    "num_epochs": 100,
    "lr": 3e-5,
    "batch_size": 1,
    "log_freq": 100,
    "ckpt_freq": 500,
    "seq_len": 1024,
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


def applied(values: dict[str, Any]) -> dict[str, Any]:
    """`values` (dotted names, from file and flags) over the defaults of the preset that they name or bring about."""
    chosen = values.get("preset", "auto")
    both = all(is_hub_name(str(values.get(key, ""))) for key in ("model_name", "dataset_name"))
    if chosen == "auto" and both and kind_of(str(values.get("task", ""))) == LANGUAGE:
        chosen = "source"
    return {**without_idle(PRESETS.get(chosen, {}), values), **values, "preset": chosen}


def described(config: Config) -> str:
    """The one line that says what the preset "source" chose, as it stands after the file and the flags."""
    optim = config.optim
    period = f" over {optim.period} steps" if optim.period else ""
    return (
        f"preset source: seed {config.seed}, {config.num_epochs} epochs, lr {config.lr:g} ({optim.schedule}"
        f"{period} to {optim.floor:.0%}), batch {config.batch_size}, {config.precision}, blocks of "
        f"{config.seq_len} tokens; flags win over it, --preset none leaves it out"
    )


def parse(argv: list[str], prog: str = "lockstep train", defaults: Mapping[str, Any] | None = None) -> Config:
    """The Config that `argv` asks for. Prints the help and raises SystemExit(0) for `--help`.

    Args:
        argv: the flags.
        prog: the command as it is typed, for the help and for errors.
        defaults: fields of Config, sections as dicts, which flags and the file win over.

    Raises:
        ConfigError: an unknown flag or key (with the nearest known one), a value of the wrong kind or out of bounds.
    """
    given = vars(parser_of(argv, prog, defaults).read(argv))
    return build(applied({**_dotted(defaults or {}), **told(given)}))


def parser_of(argv: list[str], prog: str, defaults: Mapping[str, Any] | None = None) -> Parser:
    """The parser of `lockstep train` and of scripts with its flags; see `parse`."""
    kind = kind_of(_task_in(argv) or str((defaults or {}).get("task", "")))
    parser = Parser(
        prog=prog,
        usage=f"{prog} [flags]",
        description="Trains a model. The same --experiment-name resumes, on any number of processes.",
        epilog=f"--task {' or '.join(TASKS)}: the help has what belongs to that task too." if kind == OWN else None,
        foreign=FOREIGN,
    )
    add_flags(parser, kind=kind)
    parser.first = (*FIRST, *_of_alone(kind))
    script = prog.removeprefix("lockstep ")
    task = " --task digits.py:Digits" if script == "train" else ""
    parser.examples = (
        f"{prog} --experiment-name first --max-steps 100",
        f"lockstep launch --nproc-per-node 2 -- {script}{task} --num-epochs 10 --exact",
    )
    return parser


def _of_alone(kind: str) -> list[str]:
    """The options that no other built-in task has; none for the language model, which has too many."""
    return [
        prefix + spec.name
        for owner, prefix in sections(Config())
        for spec in dataclasses.fields(owner)
        if kind != LANGUAGE and spec.metadata.get("tasks") == (kind,)
    ]


def _task_in(argv: list[str]) -> str:
    """What the last --task of `argv` says."""
    found = ""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        found = (value if equals else following) if name == "--task" else found
    return found


def _dotted(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Config by dotted name. Raises UnknownField for one that it has not."""
    Config(**fields)
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        found |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return found


def told(given: dict[str, Any]) -> dict[str, Any]:
    """What the file and the flags say, by dotted name; the flags win. `given`: what a parser read, see `add_flags`."""
    values = {name: value for name, value in given.items() if name in _DESTINATIONS}
    _take_lightning(values)
    from_launcher(values)
    path = values.pop("config", None)
    values = {**(read(Path(path)) if path else {}), **values}
    file = read_json(str(values.get("engine_options.config", "")))
    return taken(values, file, int(os.environ.get("WORLD_SIZE", "1"))) if file else values


def _take_lightning(values: dict[str, Any]) -> None:
    """`--lightning` and `--datamodule` as the task that they name. Raises ConfigError where they do not go together."""
    module, data = str(values.pop("lightning", "")), str(values.pop("datamodule", ""))
    if data and not module:
        raise ConfigError(f"--datamodule {data} is the data of a LightningModule: give --lightning FILE.py:Module too")
    if module and values.get("task"):
        raise ConfigError(f"--lightning {module} and --task {values['task']} both say what is trained: leave one out")
    if module:
        values["task"] = f"{LIGHTNING}{module}{',' * bool(data)}{data}"


def build(values: dict[str, Any]) -> Config:
    """A Config from dotted names and values; what is left out keeps its default.

    Raises:
        ConfigError: a value that cannot hold, by its flag.
    """
    top: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else top)[key] = value
    try:
        return Config(**top, **nested)
    except FieldError as error:
        raise ConfigError(error.spelt(flag)) from None


def read(path: Path) -> dict[str, Any]:
    """The dotted names and values of a TOML file. Raises ConfigError for what cannot be read or is not known."""
    try:
        loaded = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors begin with a BOM
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
        meant = hint(wanted, known) or "; `lockstep train --help-all` lists them"
        raise ConfigError(f"--config {path}: unknown key '{name}'{meant}")
    return wanted


def option_list() -> list[str]:
    """The dotted name of every option, in order. A test holds this list fixed."""
    return [
        prefix + spec.name
        for owner, prefix in sections(Config())
        for spec in dataclasses.fields(owner)
        if not dataclasses.is_dataclass(spec.type)
    ]


def flat(config: Config, *, own_task: bool = False) -> dict[str, Any]:
    """Every option and its value by dotted name; "auto" where it is still to be chosen.

    Args:
        own_task: the task is the user's: without what the built-in ones alone have, where it stands at its default. So
            is what other built-in tasks than the configuration's have.
    """
    kind = OWN if own_task else kind_of(config.task)
    return {
        prefix + spec.name: "auto" if is_auto(config, prefix + spec.name) else getattr(owner, spec.name)
        for owner, prefix in sections(config)
        for spec in dataclasses.fields(owner)
        if not dataclasses.is_dataclass(spec.type)
        and not (not belongs(spec, kind) and getattr(owner, spec.name) == spec.default)
    }


def to_toml(config: Config, *, own_task: bool = False) -> str:
    """The merged configuration as a file that `--config` reads back to an equal one; `own_task` as for `flat`."""
    lines, seen = [], ""
    for name, value in flat(config, own_task=own_task).items():
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


# What `--help` shows. All else is behind `--help-all`.
FIRST = (
    *("task", "model_name", "dataset_name", "experiment_name", "num_epochs", "max_steps"),
    *("batch_size", "lr", "exact", "config"),
)

# The flags outside the sections, as `--help-all` shows them.
_GROUPS = {
    "model and data": ("task", "model_name", "dataset_name", "tokenizer", "seq_len"),
    "the plan": (
        *("num_epochs", "max_steps", "extend_to", "limit_train_batches", "batch_size", "micro_batch_size"),
        *("lr", "seed", "preset"),
    ),
    "how it is computed": (
        *("engine", "device", "precision", "matmul_precision", "residual_dtype", "weight_copies", "grad_dtype"),
        *("fused_kernels", "exact", "batchnorm", "attention", "compile", "compile_scope"),
        *("activation_checkpointing", "timeout"),
    ),
    "evaluation": (
        *("eval_freq", "limit_eval_batches", "eval_micro_batch_size", "eval_workers"),
        *("best_metric", "patience", "patience_metric", "min_delta"),
    ),
    "what is written": (
        "log_freq",
        "log_gradients",
        "ckpt_freq",
        "report",
        "profile",
        "tensorboard",
        "wandb",
        "wandb_project",
    ),
}


def add_flags(parser: argparse.ArgumentParser, kind: str = LANGUAGE) -> None:
    """Gives `parser` the flag of every option, and --config; what it reads then goes to `told`.

    Args:
        parser: of a command that takes the options.
        kind: of the task, see `kind_of`: the help is without what others alone have; "": it has all.
    """
    add = parser.add_argument
    for name, settings in LAUNCHER_FLAGS.items():
        add(flag(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **settings)
    text = "a LightningModule as it stands, made without arguments; its loaders say the batch size"
    add("--lightning", metavar="FILE.py:CLASS", default=argparse.SUPPRESS, help=text)
    text = "the LightningDataModule of --lightning (default: the module's own loaders)"
    add("--datamodule", metavar="FILE.py:CLASS", default=argparse.SUPPRESS, help=text)
    text = "a TOML file with these options; flags override it"
    add("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)
    titles = {name: title for title, names in _GROUPS.items() for name in names}
    groups: dict[str, Any] = {title: parser.add_argument_group(title) for title in ("the run", *_GROUPS)}
    for owner, prefix in sections(Config()):
        for spec in dataclasses.fields(owner):
            if dataclasses.is_dataclass(spec.type):
                continue
            if not belongs(spec, kind):
                _add(parser, prefix + spec.name, spec, None)  # in no group: an empty one would have its title
                continue
            title = prefix.rstrip(".") or titles.get(spec.name, "the run")
            if title not in groups:
                groups[title] = parser.add_argument_group(title, (type(owner).__doc__ or "").splitlines()[0])
            _add(groups[title], prefix + spec.name, spec, TASKS.get(kind, TaskSpec("")))


def _add(group: Any, name: str, spec: "dataclasses.Field[Any]", shown: TaskSpec | None) -> None:
    """One option's flag; its help as the task `shown` has it, None: none."""
    text, default = spec.metadata["help"], spec.default
    if shown:
        text, default = shown.helps.get(name, text), shown.defaults.get(name, default)
    auto = bool(spec.metadata.get("auto"))
    if auto or default != "":
        text += f" (default: {'auto' if auto else default})"
    settings: dict[str, Any] = {"action": _AutoSwitch if auto else _BooleanFlag}
    if spec.type is not bool:
        kind = cast(type, spec.type)
        span = bool(spec.metadata.get("span"))
        settings = {
            "type": (kind, *["auto"] * auto, *["span"] * span) if auto or span else kind,
            "metavar": _metavar(spec, kind),
        }
    settings["help"] = text.replace("%", "%%") if shown else argparse.SUPPRESS
    group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, **settings)


def _metavar(spec: "dataclasses.Field[Any]", kind: type) -> str:
    said = spec.metadata
    if said["choices"]:
        return "|".join(said["choices"])
    if said.get("share"):
        return "BATCHES|10%"
    return "STEPS|5%|1epoch" if said.get("span") else kind.__name__.upper()


class _BooleanFlag(argparse.BooleanOptionalAction):
    """`--exact`, `--no-exact`; the help shows the first alone."""

    def format_usage(self) -> str:
        return self.option_strings[0]


class _AutoSwitch(_BooleanFlag):
    """`--compile`, `--no-compile`, `--compile auto`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.nargs, self.metavar = "?", "auto"

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        name = str(option_string)
        if values not in (None, []) and (values != "auto" or name.startswith("--no-")):
            parser.error(
                f"argument {name}: '{values}' does not go with it: {name} alone, or {self.option_strings[0]} auto"
            )
        setattr(namespace, self.dest, "auto" if values == "auto" else not name.startswith("--no-"))


_DESTINATIONS = {*option_list(), "config", "lightning", "datamodule", *LAUNCHER_FLAGS}


register_parser(parse)
