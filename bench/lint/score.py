"""`python bench/lint/score.py FOLDER [--part "development"] [--details]`: precision and recall against labels.json.

FOLDER holds the labelled repositories at the labelled commits, each as FOLDER/OWNER+NAME. A finding is right if a
label of the same rule stands within LINES lines, or anywhere in the file for rules about something that is missing.
A label that is arguable counts neither for nor against. With --torchfix COMMAND, TorchFix's findings on the same
files are counted beside.
"""

import argparse
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

from lockstep.lint.config import configure
from lockstep.lint.rules import RULES
from lockstep.lint.runner import check_paths

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
LABELS = Path(__file__).with_name("labels.json")
# TorchFix's rules for the pitfalls of the list.
TORCHFIX = {"TOR102": "LS015", "TOR101": "LS029"}


def matches(finding, label):
    """Whether a finding is what a label means."""
    rule, line = finding
    return rule == label["rule"] and (rule in WHOLE_FILE or abs(line - label["line"]) <= LINES)


class Tally:
    """Right and wrong findings and found and missed labels, by rule."""

    def __init__(self):
        self.right, self.wrong, self.found, self.missed = Counter(), Counter(), Counter(), Counter()

    def add(self, findings, entry, details=""):
        """Compares the findings in one file with its labels."""
        for finding in findings:
            if any(matches(finding, label) for label in entry["labels"]):
                self.right[finding[0]] += 1
            elif not any(matches(finding, label) for label in entry["arguable"]):
                self.wrong[finding[0]] += 1
                self.tell(details, "wrong", entry, *finding)
        for label in entry["labels"]:
            hit = any(matches(finding, label) for finding in findings)
            (self.found if hit else self.missed)[label["rule"]] += 1
            if not hit:
                self.tell(details, "missed", entry, label["rule"], label["line"])

    def tell(self, details, what, entry, rule, line):
        """Prints one difference."""
        if details:
            print(f"{what:<7} {rule} {entry['repository']}/{entry['path']}:{line}")

    def row(self, rules):
        """Precision, recall and their counts for some rules."""
        right, wrong, found, missed = (
            sum(c[r] for r in rules) for c in (self.right, self.wrong, self.found, self.missed)
        )
        return ratio(right, right + wrong), right + wrong, ratio(found, found + missed), found + missed


def ratio(part, whole):
    """A ratio with two digits, or a dash."""
    return f"{part / whole:.2f}" if whole else "-"


def lint(path, config):
    """Our findings in one file, as (rule, line)."""
    return [(finding.rule, finding.line) for finding in check_paths([str(path)], config) if finding.rule in RULES]


def torchfix(command, path):
    """TorchFix's findings in one file that belong to a pitfall of the list."""
    out = subprocess.run([command, "--select=ALL", str(path)], capture_output=True, text=True, check=False).stdout
    found = re.findall(r":(\d+):\d+: (TOR\d+)", out)
    return [(TORCHFIX[code], int(line)) for line, code in found if code in TORCHFIX]


def main():
    """Scores the files that are there and prints a table."""
    flags = argparse.ArgumentParser()
    flags.add_argument("folder", type=Path)
    flags.add_argument("--part", choices=["development", "held out", "second held out"])
    flags.add_argument("--torchfix", metavar="COMMAND")
    flags.add_argument("--details", action="store_true")
    args = flags.parse_args()
    ours, theirs = Tally(), Tally()
    config = configure({}, "ALL", "")
    entries = [e for e in json.loads(LABELS.read_text()) if args.part in (None, e["part"])]
    for entry in entries:
        path = args.folder / entry["repository"].replace("/", "+") / entry["path"]
        ours.add(lint(path, config), entry, args.details)
        if args.torchfix:
            theirs.add(torchfix(args.torchfix, path), entry)
    report(entries, ours, theirs if args.torchfix else None)


def report(entries, ours, theirs):
    """Prints precision and recall by rule, of the default rules and of all."""
    default = [code for code, rule in RULES.items() if rule.default]
    print(f"{len(entries)} files, {sum(len(e['labels']) for e in entries)} labels")
    print("| rule | precision | findings | recall | labels |" + (" TorchFix precision | recall |" if theirs else ""))
    print("|---|---|---|---|---|" + ("---|---|" if theirs else ""))
    for name, rules in [*((code, [code]) for code in RULES), ("default rules", default), ("all rules", list(RULES))]:
        row = [name, *map(str, ours.row(rules))]
        if theirs:
            row += [theirs.row(rules)[0], theirs.row(rules)[2]]
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
