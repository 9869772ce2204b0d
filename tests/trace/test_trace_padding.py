"""Rows that are padded to other lengths are the same samples, and mistakes among them are named."""

import functools

import plain_loop
import pytest
from ranks import run

from lockstep.trace.compare.judge import compare_runs
from lockstep.trace.compare.reading import read


def traced(world, folder, mistake, settings):
    plain_loop.recorded(world, folder, mistake, padded=True, **settings)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The trace of the correct loop on one process, with these settings; each is made once."""

    @functools.cache
    def made(items):
        folder = tmp_path_factory.mktemp("one") / "trace"
        run(traced, 1, folder, "", dict(items))
        return read(folder)

    return lambda **settings: made(tuple(sorted(settings.items())))


@pytest.fixture
def two(tmp_path):
    def made(mistake="", **settings):
        run(traced, 2, tmp_path / "two", mistake, settings)
        return read(tmp_path / "two")

    return made


WAYS = [{}, {"left": True}, {"mask": True, "left": True, "dtype": "autocast"}, {"stream": True}]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_other_padding_is_no_difference(settings, one, two):
    verdict = compare_runs(one(**settings), two(**settings))
    assert (verdict.finding, verdict.judged, verdict.unproven) == (None, 6, ""), str(verdict)


@pytest.mark.parametrize("settings", [*WAYS, {"ignored": 9}], ids=str)
def test_a_loss_that_is_averaged_per_rank_is_named(settings, one, two):
    found = compare_runs(one(**settings), two("rank-average", **settings)).finding
    assert (found.step, found.stage, found.cause) == (0, "normalisation", "rank-average"), str(found)


@pytest.mark.parametrize("dtype", ["", "autocast"])
def test_absolute_positions_behind_left_padding_are_named(dtype, one, two):
    settings = {"left": True, "absolute": True, "dtype": dtype}
    found = compare_runs(one(**settings), two(**settings)).finding
    assert (found.step, found.stage, found.cause) == (2, "forward", "left-padding"), "where batches have other lengths"


@pytest.mark.parametrize(
    ("mistake", "step", "stage", "cause"),
    [
        ("half-dropped", 5, "data", "lost-samples"),
        ("augmented", 0, "data", "other-contents"),
        ("own-buffer", 0, "buffers", "diverging-buffers"),
        ("train-mode", 5, "evaluation", "train-mode"),
        ("train-and-graph", 5, "evaluation", "train-mode"),
    ],
)
def test_a_mistake_among_padded_rows_is_named(mistake, step, stage, cause, one, two):
    found = compare_runs(one(), two(mistake)).finding
    assert (found.step, found.stage, found.cause) == (step, stage, cause), str(found)
