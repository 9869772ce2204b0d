"""LS068: an option with type=bool."""

import pytest
from rule_findings import count


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
    text = "import argparse\nimport torch\n\nparser = argparse.ArgumentParser()\n"
    text += f"parser.add_argument('--fast', {option})\n"
    assert count(f"{text}args = parser.parse_args()\nprint({use}, torch.__version__)\n", "LS068") == number
