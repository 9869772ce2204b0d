"""Whether a name is one on a hub: asked before anything that could reach a hub is loaded."""

import re
from pathlib import Path

__all__ = ["is_hub_name"]


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form OWNER/NAME and is no path that exists here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not Path(name).exists()
