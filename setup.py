"""Build the shells' completion files, and the readme of the distribution.

pip install .           # `lockstep completion bash` prints a completion file, which shtab makes of the flags
"""

import argparse
import dataclasses
import importlib
import importlib.util
import re
import sys
from pathlib import Path

import shtab
from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
FILES = {"bash": "lockstep.bash", "zsh": "_lockstep"}
PATHS = {"config", "task", "dataset_name", "model_name", "tokenizer", "init_from", "run", "out", "against", "paths"}
FOLDERS = {"save_dir", "scratch", "folder", "dir", "data.cache", "runs"}

# Behind the `--` of launch stand a command and its flags, behind that of scale those of train; shtab's own completion
# would offer none there.
BEHIND_LAUNCH = """
_lockstep() {
  local at
  if [[ ${COMP_WORDS[1]} == scale ]]; then
    for ((at = 2; at < COMP_CWORD; at++)); do
      [[ ${COMP_WORDS[at]} == -- ]] || continue
      COMP_WORDS=(lockstep train "${COMP_WORDS[@]:at+1}")
      COMP_CWORD=$((COMP_CWORD - at + 1))
      break
    done
  elif [[ ${COMP_WORDS[1]} == launch ]]; then
    for ((at = 2; at < COMP_CWORD; at++)); do
      [[ ${COMP_WORDS[at]} == -- ]] || continue
      if ((COMP_CWORD == at + 1)); then
        local word=${COMP_WORDS[COMP_CWORD]}
        COMPREPLY=($(compgen -W "train evaluate profile doctor" -- "$word"; compgen -f -X '!*.py' -- "$word"))
        return
      fi
      COMP_WORDS=(lockstep "${COMP_WORDS[@]:at+1}")
      COMP_CWORD=$((COMP_CWORD - at))
      break
    done
  fi
  _shtab_lockstep
}
complete -o bashdefault -F _lockstep lockstep
"""


def tree():
    """One parser with every command and its flags."""
    cli = importlib.import_module("lockstep.cli")
    root = argparse.ArgumentParser(prog="lockstep")
    root.add_argument("--version", action="version", version="", help="the version")
    commands = root.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, (module, _, text) in cli.COMMANDS.items():
        parser = of_the_linter() if name == "lint" else of(module, name)
        for action in every(parser):
            dress(action, parser)
        commands.add_parser(name, help=text, parents=[parser], add_help=False)
    return root


def of(module, name):
    """A command's own parser: `_train_parser`, where a file has several commands, or `_parser`, or `parser`."""
    own = importlib.import_module(module)
    return next(getattr(own, each) for each in (f"_{name}_parser", "_parser", "parser") if hasattr(own, each))()


def of_the_linter():
    """The parser of `lockstep lint`; without flags where its distribution is neither here nor installed."""
    if importlib.util.find_spec("lockstep_lint"):
        return of("lockstep_lint.command", "lint")
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", help="files and folders")
    return parser


def every(parser):
    """The actions of a parser and of its sub-commands."""
    for action in parser._actions:
        yield action
        for under in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from every(under)


def dress(action, parser):
    """Says what may stand behind a flag, and shows --help-all where it shows more."""
    config = importlib.import_module("lockstep.config.schema")
    options = {
        prefix + spec.name: spec.metadata.get("choices")
        for owner, prefix in config.sections(config.Config())
        for spec in dataclasses.fields(owner)
    }
    if "--help-all" in action.option_strings and getattr(parser, "common", ()):
        action.help = "every flag"
    if action.dest in PATHS | FOLDERS:
        action.complete = shtab.FILE if action.dest in PATHS else shtab.DIRECTORY
    elif options.get(action.dest):
        action.choices = options[action.dest]


def write(folder):
    """Makes the completion files in `folder`, from the sources beside this file."""
    sys.path[:0] = [str(HERE / "src"), str(HERE / "packages" / "lint" / "src")]
    folder.mkdir(parents=True, exist_ok=True)
    for shell, name in FILES.items():
        text = shtab.complete(tree(), shell)
        (folder / name).write_text(text + (BEHIND_LAUNCH if shell == "bash" else ""), encoding="utf-8")


def without_local_links(text):
    """Turns links into the repository into their text: a distribution's page cannot follow them.

    Args:
        text: Markdown. Absolute links and anchors of the page itself stay.
    """
    text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\((?!https?:|#)[^)]*\)", r"\1", text)


class BuildPy(build_py):
    """Also makes the completion files: in the wheel, or beside the sources of an editable install."""

    def run(self):
        super().run()
        write((HERE / "src" if self.editable_mode else Path(self.build_lib)) / "lockstep" / "completions")


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": BuildPy},
        long_description=without_local_links((HERE / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
