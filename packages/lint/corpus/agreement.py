"""`python corpus/agreement.py [LABELS] [--part PART] [--details]`: how far two readers of the scripts agree.

LABELS is labels2.json unless another file is named. A reader's label is in common where the other reader has one of the
same rule within LINES lines (anywhere in the file for what is missing), once among strong labels alone, once also where
the other calls it arguable. Cohen's kappa is over (file, rule): whether a reader has a strong label of the rule there.
With --details each label that one reader has alone is printed, of scripts kept aside only where --part names them.
`--add NAME FILE` puts a reading into LABELS: a list of one reader's entries of the same scripts. It replaces none.
"""

import argparse
import json
import sys
from pathlib import Path

from labelled import ASIDE, SECOND, WHOLE_FILE, matches

from lockstep_lint.config import default_codes
from lockstep_lint.rules import RULES


def common(ours, theirs):
    """Which of our labels the other reader has."""
    return [label for label in ours if any(matches(label, other) for other in theirs)]


def kappa(pairs):
    """Cohen's kappa of (first says so, second says so); None where chance alone would agree on all."""
    count = len(pairs)
    agreed = sum(one == two for one, two in pairs) / count
    first, second = (sum(pair[at] for pair in pairs) / count for at in (0, 1))
    chance = first * second + (1 - first) * (1 - second)
    return None if chance == 1 else (agreed - chance) / (1 - chance)


def present(reader, rule):
    """Whether a reader has a strong label of the rule in the file."""
    return any(label["rule"] == rule for label in reader["labels"])


def shares(entries, first, second, rules):
    """(labels in common, all labels of both) among strong ones, and where arguable ones of the other count too."""
    both, either, total = 0, 0, 0
    for entry in entries:
        one, two = entry["readers"][first], entry["readers"][second]
        for ours, theirs in ((one, two), (two, one)):
            labels = [label for label in ours["labels"] if label["rule"] in rules]
            total += len(labels)
            both += len(common(labels, theirs["labels"]))
            either += len(common(labels, theirs["labels"] + theirs["arguable"]))
    return both, either, total


def row(entries, first, second, name, rules):
    """One line of the table: a rule or several, the labels of each reader, their agreement, kappa."""
    counts = [sum(x["rule"] in rules for e in entries for x in e["readers"][who]["labels"]) for who in (first, second)]
    both, either, total = shares(entries, first, second, rules)
    pairs = [
        (present(e["readers"][first], rule), present(e["readers"][second], rule)) for e in entries for rule in rules
    ]
    chance = kappa(pairs)
    figures = [f"{part / total:.2f}" if total else "-" for part in (both, either)]
    return [name, *map(str, counts), *figures, "-" if chance is None else f"{chance:.2f}"]


def report(entries, first, second):
    """Prints the table."""
    print(f"{len(entries)} scripts read by {first} and by {second}")
    print(f"| rule | {first} | {second} | strong in common | or arguable | kappa |")
    print("|---|---|---|---|---|---|")
    default = sorted(default_codes())
    for name, rules in [*((code, [code]) for code in RULES), ("default rules", default), ("all rules", list(RULES))]:
        print(f"| {' | '.join(row(entries, first, second, name, rules))} |")


def differences(entries, first, second):
    """Prints each strong label that one reader has alone."""
    for entry in entries:
        for ours, theirs in ((first, second), (second, first)):
            other = entry["readers"][theirs]
            for label in entry["readers"][ours]["labels"]:
                if not common([label], other["labels"]):
                    doubt = " (arguable there)" if common([label], other["arguable"]) else ""
                    place = f"cell {label['cell']}:{label['line']}" if "cell" in label else label["line"]
                    print(f"{ours} only  {label['rule']} {entry['repository']}/{entry['path']}:{place}{doubt}")


def check(label, where):
    """Refuses a label of no rule or no place."""
    kinds = {"rule": str, "line": int, "cell": int}
    if set(label) - set(kinds) or not all(isinstance(value, kinds[key]) for key, value in label.items()):
        raise ValueError(f"{where}: {label} is no label")
    if label.get("rule") not in RULES or label.get("line", 0) < 1:
        raise ValueError(f"{where}: {label} names no rule or no line")


def added(known, name, reading):
    """`known` with a reader's entries under the reader's name."""
    place = {(e["repository"], e["commit"], e["path"]): e for e in known}
    for entry in reading:
        where = f"{entry['repository']}/{entry['path']}"
        for label in entry["labels"] + entry["arguable"]:
            check(label, where)
        key = (entry["repository"], entry["commit"], entry["path"])
        if known and key not in place:
            raise ValueError(f"{where} at {entry['commit']} is not among the labelled scripts")
        home = place.setdefault(key, {k: entry[k] for k in ("repository", "commit", "path", "part")} | {"readers": {}})
        if name in home["readers"]:
            raise ValueError(f"{where} has a reader {name} already")
        home["readers"][name] = {"labels": entry["labels"], "arguable": entry["arguable"]}
    return list(place.values())


def write(path, entries):
    """One entry a line, as labels.json has them."""
    path.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n", encoding="utf-8")


def main():
    """Adds a reading, or compares two."""
    flags = argparse.ArgumentParser()
    flags.add_argument("labels", nargs="?", type=Path, default=SECOND)
    flags.add_argument("--part")
    flags.add_argument("--details", action="store_true")
    flags.add_argument("--add", nargs=2, metavar=("NAME", "FILE"))
    args = flags.parse_args()
    known = json.loads(args.labels.read_text(encoding="utf-8")) if args.labels.exists() else []
    if args.add:
        try:
            write(args.labels, added(known, args.add[0], json.loads(Path(args.add[1]).read_text(encoding="utf-8"))))
        except ValueError as error:
            flags.error(str(error))
        return
    entries = [e for e in known if args.part in (None, e["part"]) and len(e["readers"]) > 1]
    if not entries:
        sys.exit(f"{args.labels}: no script has two readers" + (f" in part {args.part}" if args.part else ""))
    first, second = sorted(entries[0]["readers"])[:2]
    entries = [e for e in entries if {first, second} <= e["readers"].keys()]
    report(entries, first, second)
    if args.details:
        differences([e for e in entries if args.part or e["part"] not in ASIDE], first, second)
    print(f"{len(WHOLE_FILE)} rules are compared over the whole file: {', '.join(sorted(WHOLE_FILE))}")


if __name__ == "__main__":
    main()
