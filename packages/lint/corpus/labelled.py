"""The labelled scripts: how a label is matched, and what stands of the labels of two readers.

`labels.json` holds one reader's labels of 56 scripts, `labels2.json` two readers' labels of 650 others and one
reader's of 703 (its parts `development5`, `development6`, `development9`, `development11`, `development12` and, read
beside the linter's findings, `development13`). An entry of the second has "readers", each with "labels" and "arguable"
of its own, and after somebody has settled where they differ "labels" and "arguable" beside it. A label is
`{"rule", "line"}`; in a notebook `{"rule", "cell", "line"}`, the line counted within the cell.

`labels3.json` holds what one reader added to scripts of both beside the linter's errors: labels of rules that are newer
than their readings, and those of `if not exists: makedirs`, which were decided. `grave.json` holds scripts of other
repositories that were read for grave mistakes before the linter saw them: "grave" are lists of lines, with the rule of
a mistake, or with its kind where no rule is for it; "right" and "arguable" are what was read of its other findings.
"""

import json
from pathlib import Path

__all__ = [
    "ASIDE",
    "FIRST",
    "GRAVE",
    "LINES",
    "SECOND",
    "WHOLE_FILE",
    "entries",
    "matches",
    "newer",
    "script",
    "settled",
]

FIRST = Path(__file__).with_name("labels.json")
SECOND = Path(__file__).with_name("labels2.json")
THIRD = Path(__file__).with_name("labels3.json")
GRAVE = Path(__file__).with_name("grave.json")
# Scripts on which no rule may be made: they are scored only where they are asked for by these names.
ASIDE = ("aside4", "aside5", "aside6", "aside7")
LINES = 6
# What is missing has no line of its own.
WHOLE_FILE = {
    "LS003",
    "LS004",
    "LS005",
    "LS008",
    "LS009",
    "LS012",
    "LS013",
    "LS017",
    "LS019",
    "LS022",
    "LS026",
    "LS031",
}


def matches(one, other):
    """Whether two labels, or a finding and a label, mean the same mistake."""
    if one["rule"] != other["rule"]:
        return False
    near = one.get("cell", 0) == other.get("cell", 0) and abs(one["line"] - other["line"]) <= LINES
    return near or one["rule"] in WHOLE_FILE


def settled(entry):
    """The entry with "labels" and "arguable", from its readers where nobody has settled them.

    Unsettled, a label stands where all readers have it, be it at another place of its few lines; what one of them has
    alone, or calls arguable, is arguable.
    """
    if "labels" in entry:
        return entry
    readers = list(entry["readers"].values())
    strong, rest = [], [label for reader in readers for label in reader["arguable"]]
    for at, reader in enumerate(readers):
        others = readers[:at] + readers[at + 1 :]
        for label in reader["labels"]:
            common = all(any(matches(label, each) for each in other["labels"]) for other in others)
            known = any(matches(label, each) for each in strong)
            if not common:
                rest.append(label)
            elif not at or not known:
                strong.append(label)
    return {**entry, "labels": strong, "arguable": rest}


def entries(path=FIRST, part=None):
    """The entries of a file of labels, settled; those kept aside only where `part` names them."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    return [settled(e) for e in found if e["part"] == part or (part is None and e["part"] not in ASIDE)]


def newer(entry, kind="labels"):
    """The labels of an entry that were added beside the linter's errors, or ("arguable") what is open to doubt."""
    found = json.loads(THIRD.read_text(encoding="utf-8"))
    same = [e for e in found if (e["repository"], e["path"]) == (entry["repository"], entry["path"])]
    return [label for e in same for label in e.get(kind, ())]


def script(folder, entry):
    """Where a labelled script lies in a folder of checkouts."""
    return Path(folder) / entry["repository"].replace("/", "+") / entry["path"]
