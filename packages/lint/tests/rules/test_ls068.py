"""LS068: an option with type=bool."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def count(text, code):
    """Count the findings of a rule in a script."""
    return len(check_text(text, configure({}, code, "")))


@pytest.mark.parametrize(
    ("option", "use", "number"),
    [
        ("type=bool", "args.fast", 1),
        ("type=bool, nargs='?'", "args.fast", 0),
        ("type=int", "args.fast", 0),
        ("type=bool", "args.slow", 0),
    ],
)
def test_the_type_of_an_option(option, use, number):
    text = f"import argparse\nimport torch\n\nparser = argparse.ArgumentParser()\nparser.add_argument('--fast', {option})\n"
    assert count(f"{text}args = parser.parse_args()\nprint({use}, torch.__version__)\n", "LS068") == number
