"""The fit on published tables: each number has its source, and rows that are left out are found again."""

import importlib.util
import statistics
from pathlib import Path

import pytest

SCORE = Path(__file__).parents[3] / "bench" / "scaling" / "score.py"


@pytest.fixture(scope="module")
def score():
    spec = importlib.util.spec_from_file_location("scaling_score", SCORE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_says_where_it_is_from(score):
    found = list(score.tables())
    assert len(found) >= 8
    assert sum(len(table["rows"]) for _, _, table in found) >= 40
    for _, source, table in found:
        assert source["url"].startswith("https://")
        assert all([source["source"], source["unit"], source["taken"], table["place"]])
        sizes = [size for size, _ in table["rows"]]
        assert len(sizes) >= 3
        assert sizes == sorted(set(sizes)), table["name"]
        assert all(rate > 0 for _, rate in table["rows"])
    assert len({(name, table["name"], table["place"], str(table["rows"])) for name, _, table in found}) == len(found)


def test_the_baselines_know_their_own_curves(score):
    rows = [(n, 100 / (0.1 + 0.9 / n)) for n in (1, 2, 4, 8)]
    assert score.amdahl(rows, 16) == pytest.approx(100 / (0.1 + 0.9 / 16))
    assert score.amdahl([(1, 10.0), (2, 21.0), (4, 44.0)], 8) > 0  # better than linear: neither term is negative
    assert score.kept(rows, 16) == pytest.approx(16 * rows[-1][1] / 8)
    assert score.kept(rows[1:], 1) == pytest.approx(rows[1][1] / 2)


@pytest.mark.parametrize("ends", [False, True], ids=["every row", "the largest"])
def test_rows_that_are_left_out_are_found_again(score, ends):
    rows = score.scores(ends=ends)
    fit, *others = (score.median(rows, method) for method in score.METHODS)
    assert fit <= 0.03
    assert all(fit < other for other in others)
    assert statistics.mean(row["inside"] for row in rows) >= 0.8
