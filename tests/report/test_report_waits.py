"""One line names the part that cost too much time; a healthy or a short run has none."""

import pytest

from lockstep.report.goodput import advise_workers, waits

HEALTHY = {"steps": 100.0, "data": 5.0, "exchange": 20.0, "saves": 2.0, "evaluation": 15.0}


def line(workers=0, ranks=1, **seconds):
    return waits({**HEALTHY, **seconds}, workers=workers, ranks=ranks)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (
            {"data": 40.0},
            "34.2% of the time in steps, saves and evaluations was spent waiting for samples: set --data.workers to 1",
        ),
        (
            {"data": 40.0, "workers": 2, "ranks": 2},
            "waiting for samples or for another rank: set --data.workers to 3",
        ),
        ({"exchange": 60.0}, "exchanging gradients: raise --batch-size"),
        (
            {"saves": 50.0},
            "30.3% of the time in steps, saves and evaluations was spent waiting for checkpoints: raise --ckpt-freq",
        ),
        (
            {"evaluation": 100.0},
            "49.5% of the time in steps, saves and evaluations was spent evaluating: raise --eval-freq",
        ),
        ({"data": 20.0, "evaluation": 200.0}, "evaluating"),  # what stands out most
    ],
)
def test_what_stands_out_is_said(seconds, words):
    found = line(**seconds)
    assert words in found
    assert "\n" not in found


def test_the_share_is_of_the_wall_time_where_that_is_known():
    found = waits({**HEALTHY, "data": 40.0}, workers=0, ranks=1, wall=400.0)
    assert found.startswith("10.0% of the wall time was spent waiting for samples")


def test_a_healthy_run_is_silent():
    assert line() == ""
    assert waits({"steps": 100.0}, workers=0, ranks=1) == ""  # nothing else is known


def test_so_is_a_short_one():
    assert waits({"steps": 9.0, "data": 8.0}, workers=0, ranks=1) == ""
    assert waits({}, workers=0, ranks=1) == ""


@pytest.mark.parametrize(
    ("data", "cores", "words"),
    [
        (40.0, 4, "40% of a step: try --data.workers 4"),
        (40.0, 64, "--data.workers 8"),
        (40.0, 0, "--data.workers 1"),
        (20.0, 4, ""),
        # A quarter of a short step is nothing.
        (0.4, 4, ""),
    ],
)
def test_loader_processes_are_proposed_where_loading_costs_much(data, cores, words):
    rest = 100.0 - data if data > 1 else 0.6
    found = advise_workers({"data": data, "forward": rest / 2, "backward": rest / 2}, cores)
    assert found.endswith(words)
    assert bool(found) == bool(words)
