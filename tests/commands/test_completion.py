"""The completion files: made of the commands' own flags by the build, and bash completes with them."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.commands import setup
from lockstep.config.cli import option_list
from lockstep.config.schema import flag
from lockstep.errors import ConfigError

ROOT = Path(__file__).parents[2]

# what the shell calls: the function that `complete` was given, with the words of the line
ASK = """
source "$1"; shift
read -ra registered <<< "$(complete -p lockstep)"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
"${registered[-2]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the files, as `setup.py` puts it beside the package when it is built."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", "lib"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "lib" / "lockstep" / "completions"


def offered(built, *words, cwd=None):
    command = ["bash", "--norc", "-c", ASK, "-", built / "lockstep.bash", "lockstep", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


def test_the_files_parse_and_have_every_flag(built):
    for name in setup._SHELL_FILES.values():
        text = (built / name).read_text()
        wanted = {flag(option) for option in option_list()} | set(cli.COMMANDS) | {"--nproc-per-node", "--help-all"}
        assert [word for word in sorted(wanted) if word not in text] == [], name
    done = subprocess.run(["bash", "-n", built / "lockstep.bash"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["trai"], ["train"]),
        (["train", "--optim.we"], ["--optim.weight-decay"]),
        (["train", "--lr", "3", "--exact", "--optim.we"], ["--optim.weight-decay"]),
        (["train", "--precision", "bf"], ["bf16", "bf16-true"]),
        (["checkpoint", "pr"], ["prune"]),
        (["checkpoint", "prune", "--ke"], ["--keep", "--keep-best"]),
        (["verify", "--wor"], ["--world-sizes"]),
        (["launch", "--npr"], ["--nproc-per-node"]),
        (["launch", "--nproc-per-node", "2", "--", "tr"], ["train"]),
        (["launch", "--nproc-per-node", "2", "--", "train", "--optim.we"], ["--optim.weight-decay"]),
        (["launch", "--", "train", "--precision", "bf"], ["bf16", "bf16-true"]),
        (["scale", "--wo"], ["--world-sizes"]),
        (["scale", "--weak", "--", "--optim.we"], ["--optim.weight-decay"]),
        (["train", "--zzz"], []),
    ],
    ids=" ".join,
)
def test_bash_completes(built, words, wanted):
    assert sorted(offered(built, *words)) == wanted


def test_bash_completes_files_and_folders(built, tmp_path):
    (tmp_path / "mine.toml").touch()
    (tmp_path / "mine.py").touch()
    (tmp_path / "minefield").mkdir()
    assert offered(built, "train", "--config", "mine", cwd=tmp_path) == {"mine.toml", "mine.py", "minefield"}
    assert offered(built, "train", "--save-dir", "mine", cwd=tmp_path) == {"minefield"}
    assert offered(built, "evaluate", "minef", cwd=tmp_path) == {"minefield"}
    assert offered(built, "launch", "--", "mi", cwd=tmp_path) == {"mine.py"}


def test_every_command_and_flag_is_in_the_tree():
    tree = runpy.run_path(str(ROOT / "setup.py"))["tree"]()
    (commands,) = (action for action in tree._actions if isinstance(action.choices, dict))
    assert commands.choices.keys() == cli.COMMANDS.keys()
    shown = {word for parser in commands.choices.values() for act in parser._actions for word in act.option_strings}
    assert {"--show-groups", "--against", "--format", "--top-k", "--json"} <= shown


def test_the_command_prints_the_file(built, monkeypatch, capsys):
    monkeypatch.setattr(setup, "_FOLDER", built)
    for shell, name in setup._SHELL_FILES.items():
        assert cli.dispatch(["completion", shell]) == 0
        assert capsys.readouterr().out == (built / name).read_text()


def test_what_the_command_refuses(monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "_FOLDER", tmp_path)
    with pytest.raises(ConfigError, match="lockstep.bash does not exist"):
        cli.dispatch(["completion", "bash"])
    with pytest.raises(ConfigError, match=re.escape("invalid choice: 'fish'")):
        cli.dispatch(["completion", "fish"])
    assert os.listdir(tmp_path) == []
