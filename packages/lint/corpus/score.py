"""`python corpus/score.py FOLDER [--labels FILE] [--part PART]... [--errors|--grave] [--details]`: measure the linter.

FOLDER holds the labelled repositories at the labelled commits, each as FOLDER/OWNER+NAME. A finding is right if a
label of the same rule stands within LINES lines, or anywhere in the file for rules about something that is missing.
A label that is arguable counts neither for nor against. FILE is labels.json, or labels2.json; scripts that are
kept aside are scored only where --part names them; several parts are scored together. All scripts must be there.
With --torchfix COMMAND, TorchFix's findings on the same files are counted beside. The last two rows count as a
person reads it: a rule that is told once a file, with the number of its other lines, is one finding there, right if
half of the lines are, and one label. Below the table the totals stand again with their counts. With --errors only
findings of that level count, and the labels of rules that have them; those that a hint tells are counted apart, also
the moved names of mixed precision, which LS029 tells. It takes all files of labels, all parts, and the scripts that
are there. With --grave the errors in the scripts of grave.json are scored, a grave mistake within GRAVE_LINES lines.
"""

import argparse
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

from labelled import ASIDE, FIRST, GRAVE, SECOND, WHOLE_FILE, entries, matches, newer, script

from lockstep_lint.config import configure, default_codes
from lockstep_lint.finding import Severity
from lockstep_lint.rules import RULES
from lockstep_lint.runner import check_paths

# TorchFix's rules for the pitfalls of the list.
TORCHFIX = {"TOR102": "LS015", "TOR101": "LS029"}


GRAVE_LINES = 3
FOLDED = ("LS028", "LS036")  # habits: a person is told one of each file


class Tally:
    """Right and wrong findings and found and missed labels, by rule."""

    def __init__(self):
        self.right, self.wrong, self.found, self.missed = Counter(), Counter(), Counter(), Counter()

    def add(self, findings, entry, details=""):
        """Compares the findings in one file with its labels."""
        for finding in findings:
            if any(matches(finding, label) for label in entry["labels"]):
                self.right[finding["rule"]] += 1
            elif not any(matches(finding, label) for label in entry["arguable"]):
                self.wrong[finding["rule"]] += 1
                self.tell(details, "wrong", entry, finding)
        for label in entry["labels"]:
            hit = any(matches(finding, label) for finding in findings)
            (self.found if hit else self.missed)[label["rule"]] += 1
            if not hit:
                self.tell(details, "missed", entry, label)

    def fold(self, findings, entry):
        """The same with one message a file for the rules that are told so."""
        rest = {key: [label for label in entry[key] if label["rule"] not in FOLDED] for key in ("labels", "arguable")}
        self.add([finding for finding in findings if finding["rule"] not in FOLDED], {**entry, **rest})
        for rule in FOLDED:
            labels = [label for label in entry["labels"] if label["rule"] == rule]
            told = [finding for finding in findings if finding["rule"] == rule]
            right = [finding for finding in told if any(matches(finding, label) for label in labels)]
            known = [finding for finding in told if any(matches(finding, label) for label in entry["arguable"])]
            wrong = [finding for finding in told if finding not in right and finding not in known]
            if right or wrong:
                (self.right if len(right) >= len(wrong) else self.wrong)[rule] += 1
            if labels:
                (self.found if right else self.missed)[rule] += 1

    def tell(self, details, what, entry, label):
        """Prints one difference."""
        if details:
            cell = f"cell {label['cell']}:" if label.get("cell") else ""
            print(f"{what:<7} {label['rule']} {entry['repository']}/{entry['path']}:{cell}{label['line']}")

    def row(self, rules):
        """Precision, recall and their counts for some rules."""
        right, told, found, labels = self.counts(rules)
        return ratio(right, told), told, ratio(found, labels), labels

    def counts(self, rules):
        """Right findings, all findings, labels that were found, and all labels of some rules."""
        right, wrong, found, missed = (
            sum(c[r] for r in rules) for c in (self.right, self.wrong, self.found, self.missed)
        )
        return right, right + wrong, found, found + missed

    def total(self, name, rules):
        """One line of a total: its counts, and the ratios with three digits."""
        right, told, found, labels = self.counts(rules)
        precision, recall = ratio(right, told, 3), ratio(found, labels, 3)
        return f"{name}: precision {precision} ({right} of {told}), recall {recall} ({found} of {labels})"


def ratio(part, whole, digits=2):
    """A ratio with so many digits, or a dash."""
    return f"{part / whole:.{digits}f}" if whole else "-"


def lint(path, config):
    """Our findings in one file, in the form of labels."""
    found = check_paths([str(path)], config)
    return [{"rule": f.rule, "line": f.line, "cell": f.cell, "level": f.severity} for f in found if f.rule in RULES]


def torchfix(command, path):
    """TorchFix's findings in one file that belong to a pitfall of the list."""
    out = subprocess.run([command, "--select=ALL", str(path)], capture_output=True, text=True, check=False).stdout
    found = re.findall(r":(\d+):\d+: (TOR\d+)", out)
    return [{"rule": TORCHFIX[code], "line": int(line)} for line, code in found if code in TORCHFIX]


def errors(folder, details):
    """Scores the findings of level error on all labelled scripts that are there."""
    every = [(file, part) for file in (FIRST, SECOND) for part in (None, *ASIDE)]
    chosen = [entry for file, part in every for entry in entries(file, part)]
    there = [entry for entry in chosen if script(folder, entry).is_file()]
    rules = [code for code, rule in RULES.items() if rule.severity is Severity.ERROR]
    tally, hinted = Tally(), Counter()
    for read in there:
        doubts = read["arguable"] + newer(read, "arguable")
        entry = {**read, "labels": read["labels"] + newer(read), "arguable": doubts}
        found = lint(script(folder, entry), configure({}, "ALL", ""))
        told = [finding for finding in found if finding["level"] is Severity.ERROR]
        hints = [finding for finding in found if finding["level"] is not Severity.ERROR]
        hints += [{**finding, "rule": "LS023"} for finding in hints if finding["rule"] == "LS029"]
        wanted = [label for label in entry["labels"] if label["rule"] in rules]
        of_hints = [
            label
            for label in wanted
            if any(matches(hint, label) for hint in hints) and not any(matches(each, label) for each in told)
        ]
        hinted.update(label["rule"] for label in of_hints)
        tally.add(told, {**entry, "labels": [label for label in wanted if label not in of_hints]}, details)
    print(f"{len(there)} of {len(chosen)} scripts are there")
    print("| rule | precision | errors | recall | labels | labels that a hint tells |\n|---|---|---|---|---|---|")
    for code in rules:
        if any(tally.counts([code])) or hinted[code]:
            print(f"| {' | '.join(map(str, [code, *tally.row([code]), hinted[code]]))} |")
    print(tally.total("errors", rules))


def is_told(label, finding):
    """Whether an error is of a grave mistake: near its lines, by its rule where there is one for it."""
    near = any(abs(finding["line"] - line) <= GRAVE_LINES for line in label["lines"])
    rule = label.get("rule", finding["rule"])
    return rule == finding["rule"] and (near or label.get("rule") in WHOLE_FILE)


def grave(folder, details):
    """Scores the errors in the scripts that were read for grave mistakes, part by part."""
    counts = {}
    for entry in json.loads(GRAVE.read_text(encoding="utf-8")):
        if not script(folder, entry).is_file():
            continue
        count = counts.setdefault(entry["part"], Counter())
        every = lint(script(folder, entry), configure({}, None, None))
        told = [finding for finding in every if finding["level"] is Severity.ERROR]
        count["scripts"] += 1
        for label in entry["grave"]:
            found = any(is_told(label, finding) for finding in told)
            count["found" if found else "missed"] += 1
            if details:
                where = f"{entry['repository']}/{entry['path']}:{label['lines']}"
                print(f"{'found' if found else 'missed':<7} {label.get('rule') or label['kind']} {where}")
        for finding in told:
            right = any(is_told(label, finding) for label in entry["grave"])
            right = right or any(matches(finding, label) for label in entry.get("right", []))
            open_to_doubt = ({"rule": finding["rule"], **label} for label in entry.get("arguable", []))  # of any rule
            if not right and any(matches(finding, label) for label in open_to_doubt):
                continue
            count["right" if right else "wrong"] += 1
            if details and not right:
                print(f"wrong   {finding['rule']} {entry['repository']}/{entry['path']}:{finding['line']}")
    for part, count in counts.items():
        found = f"{count['found']} of {count['found'] + count['missed']} grave mistakes found"
        right = f"{count['right']} of {count['right'] + count['wrong']} errors right"
        print(f"{part}: {count['scripts']} scripts, {found}, {right}")


def main():
    """Scores the scripts, all of which must be there, and prints a table."""
    flags = argparse.ArgumentParser()
    flags.add_argument("folder", type=Path)
    flags.add_argument("--labels", type=Path, default=FIRST, metavar="FILE")
    flags.add_argument("--part", action="append", help="one part of the file only; may be given several times")
    flags.add_argument("--torchfix", metavar="COMMAND")
    flags.add_argument("--details", action="store_true")
    flags.add_argument("--errors", action="store_true", help="findings of level error, on the scripts that are there")
    flags.add_argument("--grave", action="store_true", help="errors in the scripts that were read for grave mistakes")
    args = flags.parse_args()
    if args.grave:
        grave(args.folder, args.details)
        return
    if args.errors:
        errors(args.folder, args.details)
        return
    ours, theirs, read = Tally(), Tally(), Tally()
    config = configure({}, "ALL", "")
    parts = args.part or [None]
    by_part = {part: entries(args.labels, part) for part in parts}
    lacking = [part for part, found in by_part.items() if not found]
    if lacking:
        flags.error(f"no part {lacking[0]!r} in {args.labels}")
    chosen = [entry for found in by_part.values() for entry in found]
    absent = [path for entry in chosen if not (path := script(args.folder, entry)).is_file()]
    if absent:  # its labels would read as missed
        flags.error(f"{len(absent)} of {len(chosen)} scripts are not there, first {absent[0]}")
    for entry in chosen:
        path = script(args.folder, entry)
        findings = lint(path, config)
        ours.add(findings, entry, args.details)
        read.fold(findings, entry)
        if args.torchfix:
            theirs.add(torchfix(args.torchfix, path), entry)
    report(chosen, ours, read, theirs if args.torchfix else None)


def report(chosen, ours, read, theirs):
    """Prints precision and recall by rule, of the default rules and of all."""
    default = sorted(default_codes())
    print(f"{len(chosen)} files, {sum(len(e['labels']) for e in chosen)} labels")
    print("| rule | precision | findings | recall | labels |" + (" TorchFix precision | recall |" if theirs else ""))
    print("|---|---|---|---|---|" + ("---|---|" if theirs else ""))
    for name, rules in [*((code, [code]) for code in RULES), ("default rules", default), ("all rules", list(RULES))]:
        row = [name, *map(str, ours.row(rules))]
        if theirs:
            row += [theirs.row(rules)[0], theirs.row(rules)[2]]
        print(f"| {' | '.join(row)} |")
    totals = [("default rules", default), ("all rules", list(RULES))]
    for name, rules in totals:
        print(f"| {name}, as told | {' | '.join(map(str, read.row(rules)))} |")
    for tally, how in ((ours, ""), (read, ", as told")):
        print(*(tally.total(name + how, rules) for name, rules in totals), sep="\n")


if __name__ == "__main__":
    main()
