#!/usr/bin/env python3
"""The pre-commit hook: runs the linter from these sources, so that nothing is installed."""

import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - pre-commit runs whatever python3 is
    sys.exit("lockstep-lint: error: needs Python 3.11 or newer as python3")
sys.path.insert(0, str(Path(__file__).parent / "src"))

from lockstep_lint.__main__ import main

if __name__ == "__main__":
    main()
