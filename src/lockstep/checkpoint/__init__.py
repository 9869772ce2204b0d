"""Write and read checkpoints: immutable folders of safetensors and JSON.

Any world size and engine can read them. See store.py.
"""

from lockstep.checkpoint.find import find_newest, find_resume
from lockstep.checkpoint.layout import check_storable
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.store import (
    clean,
    discard,
    fingerprint,
    fingerprint_of,
    is_marked,
    list_steps,
    load,
    newest,
    path_of,
    read_run_state,
    read_state,
    retain,
    save,
    verify,
    write_share,
)

__all__ = [
    "Saver",
    "check_storable",
    "clean",
    "discard",
    "find_newest",
    "find_resume",
    "fingerprint",
    "fingerprint_of",
    "is_marked",
    "list_steps",
    "load",
    "newest",
    "path_of",
    "read_run_state",
    "read_state",
    "retain",
    "save",
    "verify",
    "write_share",
]
