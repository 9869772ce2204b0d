"""Where a run is kept: the name of its folder, and the folder above it.

check_name("gpt-small")
check_folder("outputs")         # FieldError for s3://bucket/runs
"""

import re

from lockstep.config.fields import FieldError, FieldName

__all__ = ["check_folder", "check_name"]


def check_folder(save_dir: str) -> None:
    """Raise FieldError for a URL, which would become a folder of that name."""
    if re.match(r"[A-Za-z][\w+.-]+:(/|$)", save_dir):  # a path that was taken apart has one slash, or none
        raise FieldError(
            FieldName("save_dir"), f" is '{save_dir}', and runs are kept in folders, not at a URL: give the path of one"
        )


def check_name(name: str) -> None:
    """Raise FieldError for an experiment's name that no folder can have."""
    shown = name if len(name) <= 60 else name[:57] + "..."
    problem = ""
    if not name.strip():
        problem = "is empty"
    elif len(name) > 200:
        problem = f"has {len(name)} characters, more than 200"
    elif not name.isprintable():
        problem = "has characters that cannot be printed"
    elif "/" in name or "\\" in name or name.startswith(".") or ".." in name:
        problem = "would lead out of "
    if problem:
        out = [FieldName("save_dir")] if problem.endswith(" of ") else []
        use = ": use letters, digits, '-', '_' and '.'"
        raise FieldError(FieldName("experiment_name"), f" {shown!r} {problem}", *out, use)
