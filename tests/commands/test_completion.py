"""`lockstep completion`: a script of the commands' own flags, with which bash completes."""

import re
import subprocess
import sys

import pytest

from lockstep import cli
from lockstep.config.cli import option_list
from lockstep.config.schema import flag
from lockstep.errors import ConfigError

# what the shell calls: the function that `complete` was given, with the words of the line
ASK = """
source "$1"; shift
read -ra registered <<< "$(complete -p lockstep)"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
"${registered[-2]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A folder with the script of each shell."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh"):
        command = [sys.executable, "-m", "lockstep", "completion", shell]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        (folder / shell).write_text(done.stdout)
    return folder


def offered(scripts, *words, cwd=None):
    command = ["bash", "--norc", "-c", ASK, "-", scripts / "bash", "lockstep", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


def test_the_scripts_parse_and_have_every_command_and_flag(scripts):
    wanted = {flag(option) for option in option_list()} | set(cli.COMMANDS) | {"--nproc-per-node", "--unsafe-fixes"}
    wanted |= {"--show-groups", "--against", "--format", "--top-k", "--json"}
    for shell in ("bash", "zsh"):
        text = (scripts / shell).read_text()
        assert [word for word in sorted(wanted) if word not in text] == [], shell
    done = subprocess.run(["bash", "-n", scripts / "bash"], capture_output=True, check=False)
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
        (["scale", "--wo"], ["--world-sizes"]),
        (["train", "--zzz"], []),
    ],
    ids=" ".join,
)
def test_bash_completes(scripts, words, wanted):
    assert sorted(offered(scripts, *words)) == wanted


def test_bash_completes_files_and_folders(scripts, tmp_path):
    (tmp_path / "mine.toml").touch()
    (tmp_path / "minefield").mkdir()
    assert offered(scripts, "train", "--config", "mine", cwd=tmp_path) == {"mine.toml", "minefield"}
    assert offered(scripts, "train", "--save-dir", "minef", cwd=tmp_path) == {"minefield"}
    assert offered(scripts, "evaluate", "minef", cwd=tmp_path) == {"minefield"}


def test_what_the_command_refuses(monkeypatch):
    with pytest.raises(ConfigError, match=re.escape("invalid choice: 'fish'")):
        cli.dispatch(["completion", "fish"])
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(ConfigError, match="install the extra completion of torch-lockstep"):
        cli.dispatch(["completion", "bash"])
