"""`python -m lockstep_lint ...` and `lockstep-lint ...`: the linter without the rest of lockstep."""

import sys

from lockstep_lint.command import command

__all__ = ["main"]


def main() -> None:
    """Runs the linter with the process's arguments, and exits with its code."""
    try:
        code = command(sys.argv[1:])
    except KeyboardInterrupt:
        print("lockstep lint: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # `lockstep-lint ... | head`
        code = 141
    sys.exit(code)


if __name__ == "__main__":
    main()
