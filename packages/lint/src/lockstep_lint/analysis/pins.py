"""Which torch a project says it runs on: the lowest version that its requirement files allow."""

import functools
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from lockstep_lint.analysis.imports import root_of

__all__ = ["oldest_torch"]

Version = tuple[int, int]
FILES = ("pyproject.toml", "setup.cfg", "environment.yml", "environment.yaml", "conda.yml", "conda.yaml", "setup.py")
LINE = re.compile(
    r"""^[\s\-"'\[]*(?:[\w.-]+::)?(?:py)?torch(?:\[[\w,\s-]*\])?\s*(?P<rules>[(]?\s*(?:[<>=!~^]=?|===?)[^#;"'\n\]]*)""",
    re.MULTILINE,
)
RULE = re.compile(r"(===?|=|>=|~=|\^|>|<=|<)\s*v?(\d+)(?:\.(\d+))?")


def oldest_torch(path: str) -> Version | None:
    """The lowest version of torch that the project of a file allows, from the file's folder up; None without a pin."""
    folder = os.path.dirname(os.path.abspath(path))
    return _pinned(folder, root_of(folder))


@functools.lru_cache(maxsize=4096)
def _pinned(folder: str, root: str) -> Version | None:
    for place in (Path(folder), *Path(folder).parents):
        found = [version for text in _texts(place) for version in _versions(text)]
        if found:
            return min(found)
        if str(place) == root:
            return None
    return None


def forget() -> None:
    """Drops what was read: files may have changed since."""
    _pinned.cache_clear()


def _texts(folder: Path) -> Iterator[str]:
    """The texts of a folder's requirement files."""
    paths = [folder / name for name in FILES]
    for pattern in ("requirements*.txt", "requirements/*.txt"):
        paths += sorted(folder.glob(pattern))
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        except OSError:
            continue
        yield (
            "\n".join(_listed(text)) if path.name == "pyproject.toml" else text.replace(", ", ",").replace(",'", "\n'")
        )


def _listed(text: str) -> Iterator[str]:
    """The requirements of a pyproject.toml, one a line."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    project = data.get("project", {})
    for group in (project.get("dependencies"), *_values(project.get("optional-dependencies"))):
        yield from (item for item in group or [] if isinstance(item, str))
    poetry = data.get("tool", {}).get("poetry", {})
    for name, wanted in (poetry.get("dependencies") or {}).items():
        text = wanted.get("version", "") if isinstance(wanted, dict) else wanted
        if name == "torch" and isinstance(text, str):
            yield f"torch{text}" if text[:1] in "<>=~^!" else f"torch=={text}"


def _values(table: object) -> list[list[object]]:
    return [group for group in table.values() if isinstance(group, list)] if isinstance(table, dict) else []


def _versions(text: str) -> Iterator[Version]:
    """The lowest version of each requirement of torch in a text; an upper bound alone counts as itself."""
    for match in LINE.finditer(text):
        rules = [(how, (int(major), int(minor or 0))) for how, major, minor in RULE.findall(match["rules"])]
        lowest = [version for how, version in rules if how not in ("<", "<=")]
        if lowest:
            yield max(lowest)
        elif rules:
            yield min(version for _, version in rules)
