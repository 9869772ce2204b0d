"""corpus: the labelled scripts, the agreement of their two readers and the score against them."""

import importlib
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from lockstep_lint.rules import RULES

HOME = Path(__file__).parents[1] / "corpus"


@pytest.fixture(scope="module")
def bench():
    """Return the modules of corpus, by name."""
    sys.path.insert(0, str(HOME))
    names = ("labelled", "agreement", "score")
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(HOME))
        for name in names:
            sys.modules.pop(name, None)


def label(rule, line, **more):
    return {"rule": rule, "line": line, **more}


def entry(readers, path="train.py", part="development2", **more):
    """Return an entry of a second set. Each reader is (strong labels, arguable ones)."""
    read = {name: {"labels": strong, "arguable": rest} for name, (strong, rest) in readers.items()}
    return {"repository": "one/two", "commit": "c" * 40, "path": path, "part": part, "readers": read, **more}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (label("LS015", 10), label("LS015", 16), True),
        (label("LS015", 10), label("LS015", 17), False),
        (label("LS015", 10), label("LS014", 10), False),
        (label("LS022", 10), label("LS022", 400), True),  # what is missing has no line
        (label("LS015", 3, cell=4), label("LS015", 3, cell=5), False),
        (label("LS015", 3, cell=4), label("LS015", 5, cell=4), True),
        (label("LS015", 3, cell=0), label("LS015", 3), True),  # as findings in scripts have it
    ],
)
def test_what_two_labels_have_in_common(bench, one, other, same):
    assert bench["labelled"].matches(one, other) is same
    assert bench["labelled"].matches(other, one) is same


def test_what_stands_where_nobody_has_settled_it(bench):
    first = [label("LS015", 10), label("LS036", 40), label("LS036", 43), label("LS017", 50)]
    second = [label("LS015", 12), label("LS036", 41), label("LS001", 60)]
    found = bench["labelled"].settled(entry({"A": (first, [label("LS007", 5)]), "B": (second, [])}))
    assert found["labels"] == [label("LS015", 10), label("LS036", 40), label("LS036", 43)]
    assert found["arguable"] == [label("LS007", 5), label("LS017", 50), label("LS001", 60)]
    alone = bench["labelled"].settled(entry({"A": (first, [])}))
    assert alone["labels"] == first
    kept = entry({"A": (first, [])}, labels=[], arguable=second)
    assert bench["labelled"].settled(kept) is kept


def test_the_half_kept_aside_is_named_or_not_seen(bench, tmp_path):
    both = [
        entry({"A": ([], [])}),
        entry({"A": ([], [])}, "other.py", "aside6"),
    ]
    path = tmp_path / "labels.json"
    path.write_text(json.dumps(both))
    entries = bench["labelled"].entries
    assert [e["path"] for e in entries(path)] == ["train.py"]
    assert [e["path"] for e in entries(path, "aside6")] == ["other.py"]
    assert entries(path, "nothing") == []


def test_kappa(bench):
    kappa = bench["agreement"].kappa
    known = [(True, True)] * 20 + [(True, False)] * 5 + [(False, True)] * 10 + [(False, False)] * 15
    assert kappa(known) == pytest.approx(0.4)  # 0.7 agreed, 0.5 by chance
    assert kappa([(True, True), (False, False)]) == 1
    assert kappa([(True, False), (False, True)]) == -1
    assert kappa([(False, False)] * 3) is None


def two_readers():
    return [
        entry({"A": ([label("LS015", 10), label("LS036", 30)], []), "B": ([label("LS015", 14)], [label("LS036", 31)])}),
        entry({"A": ([label("LS022", 5)], []), "B": ([label("LS022", 90), label("LS001", 7)], [])}, "b.py", "aside6"),
    ]


def test_the_shares_in_common(bench):
    shares = bench["agreement"].shares
    assert shares(two_readers(), "A", "B", ["LS015"]) == (2, 2, 2)
    assert shares(two_readers(), "A", "B", ["LS036"]) == (0, 1, 1)
    assert shares(two_readers(), "A", "B", list(RULES)) == (4, 5, 6)


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def test_the_agreement_is_printed(bench, tmp_path, monkeypatch, capsys):
    path = tmp_path / "labels.json"
    path.write_text(json.dumps(two_readers()))
    run(bench["agreement"], monkeypatch, path, "--details")
    out = capsys.readouterr().out
    assert "2 scripts read by A and by B" in out
    assert "| LS015 | 1 | 1 | 1.00 | 1.00 | 1.00 |" in out
    assert "| LS036 | 1 | 0 | 0.00 | 1.00 | 0.00 |" in out
    assert "| all rules | 3 | 3 | 0.67 | 0.83 | " in out
    assert "A only  LS036 one/two/train.py:30 (arguable there)" in out
    assert "LS001 one/two" not in out  # kept aside
    run(bench["agreement"], monkeypatch, path, "--details", "--part", "aside6")
    assert "B only  LS001 one/two/b.py:7" in capsys.readouterr().out
    path.write_text(json.dumps([entry({"A": ([], [])})]))
    with pytest.raises(SystemExit, match="no script has two readers"):
        run(bench["agreement"], monkeypatch, path)


def test_errors_are_scored_apart_from_hints(bench, tmp_path, monkeypatch, capsys):
    text = "import argparse\nimport torch\nparser = argparse.ArgumentParser()\n"
    text += "parser.add_argument('--fast', type=bool)\nstate = torch.load(parser.parse_args().fast)\n"
    (tmp_path / "one+two").mkdir()
    (tmp_path / "one+two" / "train.py").write_text(text)
    path = tmp_path / "labels.json"
    found = [label("LS068", 4), label("LS015", 5), label("LS027", 40)]
    path.write_text(json.dumps([entry({"A": (found, [])}), entry({"A": (found, [])}, "absent.py")]))
    for name, file in (("FIRST", path), ("SECOND", path), ("ASIDE", ())):
        monkeypatch.setattr(bench["score"], name, file)
    run(bench["score"], monkeypatch, tmp_path, "--errors", "--details")
    out = capsys.readouterr().out
    assert "2 of 4 scripts are there" in out
    assert "| LS068 | 1.00 | 2 | 1.00 | 2 | 0 |" in out
    assert "errors: precision 1.000 (2 of 2), recall 0.500 (2 of 4)" in out


def test_a_reading_is_added_once_and_of_the_same_scripts(bench, tmp_path, monkeypatch, capsys):
    path, reading = tmp_path / "labels.json", tmp_path / "reader.json"
    plain = {"repository": "one/two", "commit": "c", "path": "a.py", "part": "aside6", "labels": [], "arguable": []}
    reading.write_text(json.dumps([plain | {"labels": [label("LS015", 3)]}]))
    run(bench["agreement"], monkeypatch, path, "--add", "A", reading)
    reading.write_text(json.dumps([plain | {"arguable": [label("LS015", 3)]}]))
    run(bench["agreement"], monkeypatch, path, "--add", "B", reading)
    (stored,) = json.loads(path.read_text())
    assert stored["part"] == "aside6"
    assert stored["readers"]["A"] == {"labels": [label("LS015", 3)], "arguable": []}
    assert stored["readers"]["B"] == {"labels": [], "arguable": [label("LS015", 3)]}
    before = path.read_text()
    wrong = [
        (plain, "A", "has a reader A already"),
        (plain | {"path": "b.py"}, "C", "is not among the labelled scripts"),
        (plain | {"labels": [label("LS999", 3)]}, "C", "names no rule or no line"),
        (plain | {"labels": [label("LS015", 0)]}, "C", "names no rule or no line"),
        (plain | {"labels": [label("LS015", "3")]}, "C", "is no label"),
    ]
    for bad, name, message in wrong:
        reading.write_text(json.dumps([bad]))
        with pytest.raises(SystemExit):
            run(bench["agreement"], monkeypatch, path, "--add", name, reading)
        assert message in capsys.readouterr().err
        assert path.read_text() == before


def test_the_score_is_of_the_named_labels(bench, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "checkouts" / "one+two"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("import torch\n\nstate = torch.load('cuda.pt')\n")
    cells = [{"cell_type": "code", "source": "import torch"}, {"cell_type": "code", "source": "torch.load('cuda.pt')"}]
    (folder / "b.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    path = tmp_path / "labels.json"
    here, there = [label("LS015", 3), label("LS036", 1)], [label("LS015", 1, cell=1)]
    path.write_text(json.dumps([entry({"A": (here, [])}, "a.py"), entry({"A": (there, [])}, "b.ipynb", "aside6")]))
    score = bench["score"]
    run(score, monkeypatch, folder.parent, "--labels", path, "--details")
    out = capsys.readouterr().out
    assert "1 files, 2 labels" in out
    assert "| LS015 | 1.00 | 1 | 1.00 | 1 |" in out
    assert "missed  LS036 one/two/a.py:1" in out
    run(score, monkeypatch, folder.parent, "--labels", path, "--part", "aside6", "--details")
    out = capsys.readouterr().out
    assert "wrong   LS015 one/two/b.ipynb:cell 2:1" in out
    assert "missed  LS015 one/two/b.ipynb:cell 1:1" in out
    run(score, monkeypatch, folder.parent, "--labels", path, "--part", "aside6", "--part", "development2")
    assert "2 files, 3 labels" in capsys.readouterr().out
    (folder / "b.ipynb").unlink()
    for part, message in (("nothing", "no part 'nothing'"), ("aside6", "1 of 1 scripts are not there, first ")):
        with pytest.raises(SystemExit):
            run(score, monkeypatch, folder.parent, "--labels", path, "--part", part)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "strong", "arguable", "counts"),
    [
        ([10, 30, 50], [10, 30], [], ("1.00", 1, "1.00", 1)),
        ([10, 30, 50], [10], [], ("0.00", 1, "1.00", 1)),
        ([10, 30, 50], [10], [50], ("1.00", 1, "1.00", 1)),
        ([10, 30], [], [], ("0.00", 1, "-", 0)),
        ([10], [], [10], ("-", 0, "-", 0)),
        ([], [10, 30], [], ("-", 0, "0.00", 1)),
        ([], [], [], ("-", 0, "-", 0)),
    ],
)
def test_a_rule_that_is_told_once_a_file_counts_once(bench, lines, strong, arguable, counts):
    tally = bench["score"].Tally()
    labels = {"labels": [label("LS028", n) for n in strong], "arguable": [label("LS028", n) for n in arguable]}
    labels["labels"].append(label("LS015", 7))
    tally.fold([label("LS028", n) for n in lines] + [label("LS015", 7)], {**entry({}), **labels})
    assert tally.row(["LS028"]) == counts
    assert tally.row(["LS015"]) == ("1.00", 1, "1.00", 1)


def test_the_second_set_is_what_it_says(bench):
    labelled = bench["labelled"]
    second = json.loads(labelled.SECOND.read_text(encoding="utf-8"))
    first = {e["repository"] for e in json.loads(labelled.FIRST.read_text(encoding="utf-8"))}
    assert len(second) >= 150
    assert sum(e["path"].endswith(".ipynb") for e in second) >= 15
    assert not first & {e["repository"] for e in second}
    assert len({(e["repository"], e["path"]) for e in second}) == len(second)
    parts = defaultdict(set)
    for e in second:
        parts[e["repository"]].add(e["part"])
        assert len(e["commit"]) == 40
        for reader in e["readers"].values():
            for each in reader["labels"] + reader["arguable"]:
                bench["agreement"].check(each, e["path"])
                assert ("cell" in each) == e["path"].endswith(".ipynb")
    assert all(len(names) == 1 for names in parts.values())  # a repository lies in one part
    counts = Counter(e["part"] for e in second)
    read_once = {"development5", "development6", "development9", "development11", "development12", "development13"}
    read_twice = {"development2", "development3", "development4", "development7", "development8", "development10"}
    read_twice |= {"aside4", "aside5", "aside6", "aside7"}
    assert {*counts} == {*read_once, *read_twice}
    assert all(len(e["readers"]) == 2 for e in second if e["part"] not in read_once)
    assert read_twice > {*labelled.ASIDE}
    assert sum(counts[part] for part in labelled.ASIDE) >= 220  # none of which has shaped a rule
