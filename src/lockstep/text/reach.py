"""Whether the hub of models and data can be reached, and what of it lies here.

    reach(say)                                  # once, before a package asks the hub for anything

The packages that download retry a connection for the better part of a minute, on each rank. One attempt to connect,
a few seconds at most, decides here instead whether they may try at all.
"""

import os
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

__all__ = ["reach", "snapshot", "way_out"]

_PROBE = 5.0  # seconds to wait for an answer


def reach(say: Callable[[str], None]) -> bool:
    """Whether the hub answers. Where it does not, the packages are told to use what is in HF_HOME and nothing else.

    Behind a proxy the answer is taken to be yes: an attempt around it would prove nothing.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    if getproxies() or _answers(_endpoint()):
        return True
    say(f"{_endpoint()} does not answer: only what is in HF_HOME ({_home()}) can be used")
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):  # imported before by the caller's own program
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return False


def snapshot(name: str, kind: str, revision: str = "") -> Path | None:
    """The newest files of a hub "model" or "dataset" that a download left in HF_HOME, at a revision; None without."""
    root = Path(os.environ.get("HF_HUB_CACHE") or Path(_home()).expanduser() / "hub")
    held = root / f"{kind}s--{name.replace('/', '--')}"
    try:
        commit = (held / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision
    found = held / "snapshots" / commit
    return found if commit and found.is_dir() else None


def way_out(name: str, kind: str, flag: str) -> str:
    """What to do where the hub's `name` can neither be downloaded nor found here; `kind` is "model" or "dataset"."""
    return (
        f"on a machine with a network run `hf download {name} --repo-type {kind}` and bring its HF_HOME here "
        f"(now {_home()}), or give {flag} a local folder"
    )


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _home() -> str:
    return os.environ.get("HF_HOME") or "~/.cache/huggingface"


@cache
def _answers(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    port = parts.port or {"http": 80}.get(parts.scheme, 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_PROBE).close()
    except OSError:
        return False
    return True
