"""`lockstep completion bash|zsh`: prints the shell's completion file, which the package's build made.

eval "$(lockstep completion bash)"                              in ~/.bashrc
lockstep completion zsh > ~/.zfunc/_lockstep                    in a folder of $fpath
"""

from pathlib import Path

from lockstep.config.flags import Parser
from lockstep.errors import ConfigError

__all__ = ["command"]

_FOLDER = Path(__file__).parents[1] / "completions"
_FILES = {"bash": "lockstep.bash", "zsh": "_lockstep"}


def command(argv: list[str]) -> int:
    """Runs `lockstep completion` with the arguments `argv` and returns its exit code.

    Raises:
        ConfigError: another shell, or a checkout that was never installed, which has no such file.
    """
    try:
        given = _parser().read(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    path = _FOLDER / _FILES[given.shell]
    if not path.is_file():
        raise ConfigError(f"there is no {path}: it is made when the package is installed (pip install, also with -e)")
    print(path.read_text(encoding="utf-8"), end="")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="lockstep completion", description="Prints the completion file of a shell.")
    parser.add_argument("shell", choices=list(_FILES), help='bash: eval "$(lockstep completion bash)"; zsh: in $fpath')
    return parser
