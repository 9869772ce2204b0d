"""Read and check `--hf-script FILE.py --hf-args FILE` of `lockstep train` before torch is loaded.

parser = with_flags(options.make_parser(argv, "lockstep train"))
values = vars(parser.read(argv))
script = find_script(values, options.collect_options(values))    # None without --hf-script
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lockstep.config import schema
from lockstep.config.task_options import OWN, is_option_of
from lockstep.errors import ConfigError
from lockstep.extras import install_extra

__all__ = [
    "YAML",
    "Script",
    "find_script",
    "with_flags",
]


# Suffixes of files that scripts read by `--config`, with trl's parser.
YAML = (".yaml", ".yml")
_P = TypeVar("_P", bound=argparse.ArgumentParser)
# Options of any task that select it, or that the script decides.
_ALSO = ("task", "preset")


class Script(NamedTuple):
    """Script that makes a Hugging Face Trainer, and the file of its arguments."""

    path: Path
    arguments: Path


def with_flags(parser: _P) -> _P:
    """Add the two flags to the parser."""
    group = parser.add_argument_group("a Hugging Face script", "Run it unchanged; lockstep does its trainer.train().")
    group.add_argument(
        "--hf-script", metavar="FILE.py", default="", help="a script that constructs a transformers.Trainer"
    )
    group.add_argument(
        "--hf-args", metavar="FILE", default="", help="its arguments, which it reads itself: JSON, or YAML for trl's"
    )
    return parser


def find_script(values: Mapping[str, Any], options: Mapping[str, Any]) -> Script | None:
    """Return the script that the flags name, or None.

    Args:
        values: the parsed values.
        options: the options that the flags and the file set, by dotted name.

    Raises:
        ConfigError: one of the two flags without the other, a file that does not exist or is no object, or an option
            that the script decides.
    """
    script = values["hf_script"]
    arguments = values["hf_args"]
    if not script and not arguments:
        return None
    if not script:
        raise ConfigError(f"--hf-args {arguments} needs the script that reads it: --hf-script run_clm.py")
    if not arguments:
        raise ConfigError(f"--hf-script {script} needs its arguments as a file: --hf-args args.json")
    path = Path(script)
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"--hf-script {script}: no such Python file; give a script that builds a Trainer")
    result = Script(path, Path(arguments))
    _check_arguments(result.arguments)
    _check_options(options)
    return result


def _check_arguments(path: Path) -> None:
    # The scripts choose the parser by the suffix.
    if path.suffix not in (".json", *YAML):
        raise ConfigError(f"--hf-args {path}: give a file whose name ends in .json, or in .yaml for a script of trl")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--hf-args {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--hf-args {path} is not a text file: {error}") from None
    if path.suffix in YAML:
        content = _parse_yaml(path, text)
    else:
        content = _parse_json(path, text)
    if not isinstance(content, dict):
        raise ConfigError(f'--hf-args {path} must be one JSON object, such as {{"output_dir": "out"}}')
    if content.get("do_train") is False:
        raise ConfigError(f'--hf-args {path}: "do_train" is false, so there is nothing to train: set it to true')


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"--hf-args {path} is not a JSON file: {str(error).splitlines()[0]}") from None


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"--hf-args {path} needs the package yaml: {install_extra('hf')}") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--hf-args {path} is not a YAML file: {str(error).splitlines()[0]}") from None


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse an option that the script decides: its model and its data.

    Raises:
        ConfigError: such an option is set.
    """
    for _, name, spec in schema.options(schema.DEFAULTS):
        if name in options and (spec.name in _ALSO or not is_option_of(spec, OWN)):
            raise ConfigError(f"{schema.flag(name)} does not work with --hf-script, which has its own model and data")
