"""`python -m lockstep_lint ...` and `lockstep-lint ...`: the linter without the rest of lockstep."""

import sys
from pathlib import Path

from lockstep_lint.command import command

__all__ = ["main"]


def main() -> None:
    """Run the linter with the process's arguments, and exit with its code."""
    module = Path(sys.argv[0]).name == "__main__.py"
    prog = "python -m lockstep_lint" if module else "lockstep-lint"
    try:
        code = command(sys.argv[1:], prog)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # `lockstep-lint ... | head`
        code = 141
    sys.exit(code)


if __name__ == "__main__":
    main()
