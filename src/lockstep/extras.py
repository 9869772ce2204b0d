"""Name the command that installs an extra.

raise ConfigError(f"--lora.rank needs the package peft: {install_extra('peft')}") from error
"""

import json
import shlex
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

__all__ = [
    "install_extra",
]

_NAME = "torch-lockstep"


def install_extra(extra: str) -> str:
    """Describe how to install an extra, with the command that suits this installation if it is known."""
    command = _command(extra)
    advice = f"install the extra {extra} of {_NAME}"
    if command:
        return f"{advice} with `{command}`"
    return advice


def _command(extra: str) -> str:
    """Return pip's command line; "" if the place that lockstep was installed from is unknown or gone."""
    try:
        text = Distribution.from_name(_NAME).read_text("direct_url.json")
        # pip writes the file unless the package comes from an index.
        origin: dict[str, Any] = json.loads(text or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return ""
    url = str(origin.get("url", ""))
    editable = ""
    if not url:
        target = f"{_NAME}[{extra}]"
    elif url.startswith("file:"):
        path = Path(url2pathname(urlsplit(url).path))
        if not path.exists():
            return ""
        target = f"{path}[{extra}]"
        # Without it pip would replace the link to the clone by a copy.
        editable = "-e " * bool(origin.get("dir_info", {}).get("editable"))
    else:
        control = origin.get("vcs_info", {}).get("vcs", "")
        target = f"{_NAME}[{extra}] @ {control}{'+' * bool(control)}{url}"
    return f"pip install {editable}{shlex.quote(target)}"
