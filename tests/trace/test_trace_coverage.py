"""A verdict counts what it covered: over sets that are empty or do not match nothing is the same."""

import ast
import copy
import math
import struct
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import names

from lockstep.trace.compare import judge, judge_data
from lockstep.trace.compare.judge import compare_runs
from lockstep.trace.compare.pairing import every, match_names
from lockstep.trace.compare.reading import RankTrace, TracePart, TraceRun

NAMES = ("first.weight", "first.bias", "last.weight", "last.bias")
KINDS = ("initial", "begin", "grad", "weights", "buffers", "state")
STEPS = 3
NAN = math.nan


def sums(number):
    """Digest, square and sketch of a tensor, as a record has them."""
    sketch = [float((number * 31 + place * 17) % 7 - 3) for place in range(8)]
    square = sum(value * value for value in sketch) / 8
    return struct.pack("<q9d", number, square, *sketch)


def tables(names):
    """The tables of one rank: those of weights, buffers and states."""
    states = [f"{name}/momentum" for name in names]
    found = {}
    for number, each in enumerate((names, ["norm.mean", "norm.var"], states)):
        count = len(each)
        found[number] = {
            "names": list(each),
            "starts": [0] * count,
            "sizes": [8] * count,
            "types": ["float32"] * count,
        }
    return found


def trace():
    """A run of one process: a table for each kind, so that names can be taken out of each alone."""
    plain = tables(NAMES)
    ranks = RankTrace({"world": 1, "rank": 0, "initialized": False, "frameworks": [], "versions": {}, "script": {}})
    for step in range(STEPS):
        record = {"k": step, "opt": 0, "kind": "SGD", "groups": [{"n": 4, "lr": 0.1}], "ev": [], "fwd": [], "loads": []}
        record["loss"] = [{"at": 1, "v": [2.0 - step]}]
        values = {"grad": 100, "weights": 200, "begin": 199, "buffers": 300, "state": 400}
        values |= {"initial": 199} if not step else {}
        for kind, base in values.items():
            table = KINDS.index(kind)
            which = 1 if kind == "buffers" else 2 if kind == "state" else 0
            ranks.tables[table] = copy.deepcopy(plain[which])
            count = len(ranks.tables[table]["names"])
            raw = b"".join(sums(base + step + 1000 * place) for place in range(count))
            record[kind] = [table, memoryview(raw)]
        ranks.steps.append(record)
    ranks.end = {"k": STEPS, "ev": [], "fwd": [], "loads": []}
    return TraceRun("run", [TracePart({0: ranks})], {"code": 0})


def without(run, kind, change):
    """The run with other names in the table of a kind: `change` makes None of a name that is dropped."""
    rank = run.parts[0].ranks[0]
    number = KINDS.index(kind)
    table = rank.tables[number]
    names = [change(name) for name in table["names"]]
    kept = [row for row, name in enumerate(names) if name is not None]
    rank.tables[number] = {key: [values[row] for row in kept] for key, values in table.items()}
    rank.tables[number]["names"] = [names[row] for row in kept]
    for record in rank.steps:
        if kind in record:
            raw = bytes(record[kind][1])
            record[kind] = [number, memoryview(b"".join(raw[80 * row : 80 * (row + 1)] for row in kept))]
    return run


def test_a_run_is_the_same_as_itself_and_says_what_was_compared():
    verdict = compare_runs(trace(), trace())
    assert (verdict.word, verdict.bits) == ("SAME", STEPS)
    counts = {kind: verdict.compared[kind] for kind in ("gradients", "weights", "updates", "buffers", "losses")}
    assert counts == {"gradients": 12, "weights": 12, "updates": 12, "buffers": 6, "losses": 3}
    assert verdict.plain()["compared"] == verdict.compared


@settings(max_examples=150, deadline=None)
@given(
    st.sets(st.sampled_from(KINDS), min_size=1),
    st.sets(st.integers(0, 3), min_size=1),
    st.booleans(),
    st.booleans(),
)
def test_a_run_is_never_the_same_as_one_that_lacks_names(kinds, rows, renamed, turned):
    """Dropped or renamed, in any kinds, in either run; of `begin` a large model has none, so all may be gone."""
    rows = rows & {0, 1} if kinds == {"buffers"} else rows
    rows = rows or {0}
    if kinds == {"begin"} and len(rows) == len(NAMES) and not renamed:
        rows = {0}
    other = trace()
    for kind in kinds:
        known = other.parts[0].ranks[0].tables[KINDS.index(kind)]["names"]
        chosen = {known[row % len(known)] for row in rows}
        without(other, kind, lambda name, chosen=chosen: name if name not in chosen else f"x{name}" * renamed or None)
    pair = (other, trace()) if turned else (trace(), other)
    assert not compare_runs(*pair).same


def poison(run, kind, row, first, value):
    """Make one tensor of a kind, or the loss, not finite from a step on."""
    for record in run.parts[0].ranks[0].steps[first:]:
        if kind == "loss":
            record["loss"] = [{"at": 1, "v": [value]}]
        elif kind in record:
            table, raw = record[kind]
            raw = bytearray(raw)
            at = 80 * (row % (len(raw) // 80))
            raw[at : at + 80] = struct.pack("<q9d", -1 - row, value * value, *[value] * 8)
            record[kind] = [table, memoryview(bytes(raw))]
    return run


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*KINDS, "loss"]), st.integers(0, 3), st.integers(0, STEPS - 1), st.sampled_from([NAN, math.inf])
)
def test_values_that_are_not_finite_prove_nothing(kind, row, first, value):
    """In both runs they are counted as not compared; in one alone they are a difference."""
    first = 0 if kind == "initial" else first
    value = NAN if kind == "buffers" else value  # infinities may be a mask
    both = compare_runs(*(poison(trace(), kind, row, first, value) for _ in range(2)))
    assert both.word == "NOT PROVED"
    assert sum(both.not_finite.values()) >= 1
    for pair in ((0, 1), (1, 0)):
        alone = compare_runs(*(poison(trace(), kind, row, first, value) if side else trace() for side in pair))
        assert alone.word == "DIFFERENT"


def test_a_mask_and_a_skipped_update_hide_nothing():
    """A buffer of infinities with the same bits, and a gradient that overflowed before an update that was skipped."""
    masks = [poison(trace(), "buffers", 0, 0, -math.inf) for _ in range(2)]
    assert compare_runs(*masks).same
    skipped = [poison(trace(), "grad", 0, STEPS - 1, math.inf) for _ in range(2)]
    assert not compare_runs(*skipped).same
    skipped = [poison(trace(), "grad", 0, STEPS - 1, math.inf) for _ in range(2)]
    for run in skipped:
        last = run.parts[0].ranks[0].steps[-1]
        last["weights"] = last["begin"] = run.parts[0].ranks[0].steps[-2]["weights"]
    assert compare_runs(*skipped).same


@pytest.mark.parametrize("kind", ["grad", "losses", "state", "steps", "end", "failed", "full"])
def test_what_is_gone_from_a_run_is_told(kind):
    """Whole kinds, the end, the steps; the limit of --max-mb alone leaves what was compared proved."""
    other = trace()
    rank = other.parts[0].ranks[0]
    if kind in ("grad", "state"):
        without(other, kind, lambda _: None)
    elif kind == "losses":
        for record in rank.steps:
            record["loss"] = []
    elif kind == "steps":
        for record in rank.steps:
            record["k"] += 10
    elif kind == "end":
        rank.end = None
    elif kind == "failed":
        rank.failed = "OSError"
    else:
        rank.end, rank.full = None, True
    verdict = compare_runs(trace(), other)
    assert verdict.word == ("DIFFERENT" if kind == "grad" else "SAME" if kind == "full" else "NOT PROVED")
    assert compare_runs(other, other).same is (kind in ("losses", "state", "steps", "full"))


def test_nothing_in_common_is_not_proved():
    other = trace()
    for kind in KINDS:
        without(other, kind, lambda name: f"other.{name}")
    verdict = compare_runs(trace(), other)
    assert (verdict.word, verdict.judged) == ("NOT PROVED", 0)
    assert NAMES[0] in verdict.missing[0]


def test_sets_that_match():
    assert not every([])
    assert every([True])
    assert not every([True, False])
    sets = match_names("abc", "bd")
    assert (sets.both, sets.first, sets.second) == (("b",), ("a", "c"), ("d",))


def test_no_judge_takes_all_of_nothing_for_a_proof():
    """`all` holds over an empty set: what judges asks `every`."""
    folder = Path(judge.__file__).parent
    for path in [
        *folder.glob("judge*.py"),
        *(folder / f"{name}.py" for name in ("pairing", "causes")),
    ]:
        called = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert "all" not in [node.func.id for node in called if isinstance(node.func, ast.Name)], path.name


def test_each_value_that_is_not_finite_counts(monkeypatch):
    spots = [("gradients", "first.weight"), ("gradients", "last.bias"), ("weights", "last.bias")]
    monkeypatch.setattr(judge, "_not_finite", lambda step: spots)
    unseen = judge.Unseen()
    unseen.add(SimpleNamespace(at=(3, 3)))
    unseen.add(SimpleNamespace(at=(4, 4)))
    assert unseen.counts == {"gradients": 4, "weights": 2}
    assert names(" ".join(unseen.text(Counter(gradients=6))), "step 4", "6 of 10 gradients", "0 of 2 weights")


@pytest.mark.parametrize(
    ("one", "two", "differs"),
    [(1.0, 1.0, False), (1.0, 1.5, True), (1.0, NAN, True), (NAN, 1.0, True), (NAN, NAN, False)],
)
def test_a_norm_that_is_finite_in_one_run_alone_differs(one, two, differs, monkeypatch):
    monkeypatch.setattr(judge, "_first", lambda norm: {"norm": norm})
    assert bool(judge._norms_off(SimpleNamespace(one=one, two=two, limit=1e-6))) == differs


@pytest.mark.parametrize(("shared", "reported"), [(2, False), (3, True)])
def test_padding_explains_two_samples_on_two_ranks(shared, reported, monkeypatch):
    alone = {0: Counter(range(12))}
    ranks = {0: Counter(range(6 + shared)), 1: Counter(range(6, 12))}
    monkeypatch.setattr(judge_data, "_epochs", lambda step, one, two: (alone, ranks))
    step = SimpleNamespace(two=SimpleNamespace(begins=False), finding=lambda *facts: facts)
    finding = judge_data._overlap(step, {}, {})
    assert (finding is not None) == reported
    assert not reported or names(finding[2], "3 of 12")
