"""Build the readme of the distribution, without links into the repository."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent


def without_local_links(text):
    """Turns links into the repository into their text: a distribution's page cannot follow them.

    Args:
        text: Markdown. Absolute links and anchors of the page itself stay.
    """
    text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\((?!https?:|#)[^)]*\)", r"\1", text)


if __name__ == "__main__":
    setup(
        long_description=without_local_links((HERE / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
