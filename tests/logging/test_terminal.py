"""What is redrawn by a timer: it goes on by itself, ends when told, and never while the process is forked."""

import io
import os
import time
import warnings

import pytest

from lockstep.logging import console as console_module
from lockstep.logging import console as module
from lockstep.logging import console as waiting_module
from lockstep.logging.console import Console, Ticker, waiting


def until(true):
    """Waits for what must come, however busy the machine is."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_calls_until_it_is_stopped():
    calls = []
    ticker = Ticker(lambda: calls.append(1), 0.001)
    until(lambda: len(calls) > 3)
    ticker.stop()
    count = len(calls)
    time.sleep(0.02)
    assert len(calls) == count


def test_a_terminal_that_is_gone_ends_the_timer_and_nothing_else():
    calls = []
    ticker = Ticker(lambda: calls.append(1) or calls[5], 0.001)
    until(lambda: not ticker._thread.is_alive())
    assert calls == [1]
    ticker.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_finds_nothing_half_drawn():
    ticker = Ticker(lambda: time.sleep(0.01), 0.0)  # draws nearly always
    ends = []
    for _ in range(10):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of threads
            child = os.fork()
        if child == 0:
            os._exit(0 if module._TERMINAL_LOCK.acquire(blocking=False) else 1)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    ticker.stop()
    assert ends == [0] * 10


def test_bars_clock_runs_without_events_and_it_shows_the_best(monkeypatch):
    monkeypatch.setattr(console_module, "_TICK", 0.01)
    stream, drawn = io.StringIO(), []
    draw = console_module._Bar.draw
    monkeypatch.setattr(
        console_module._Bar, "draw", lambda self, *values: drawn.append(values[3]) or draw(self, *values)
    )
    console = Console(100, stream=stream, interactive=True)
    console.start({})
    console.best("best accuracy 0.93 at 40")
    console.progress(50, (120, 339))
    count = len(drawn)
    until(lambda: len(drawn) > count + 2)
    assert drawn[-1] == ["evaluating 120/339", "best accuracy 0.93 at 40"]
    console.close(None)
    count = len(drawn)
    assert drawn[-1] == ["best accuracy 0.93 at 40"]
    time.sleep(0.05)
    assert len(drawn) == count
    assert "0:00  evaluating 120/339" in stream.getvalue()


class Tty(io.StringIO):
    def isatty(self):
        return True


def test_who_waits_sees_how_far_it_is_on_a_terminal_alone(monkeypatch):
    monkeypatch.setattr(waiting_module, "_WAIT_TICK", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    screen = Tty()
    monkeypatch.setattr("sys.stderr", screen)
    with waiting("evaluating", shown=True) as progress:
        progress(120, 339)
        until(lambda: "evaluating 120/339" in screen.getvalue())
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")
    for shown, stream in ((False, Tty()), (True, io.StringIO())):
        monkeypatch.setattr("sys.stderr", stream)
        with waiting("evaluating", shown=shown) as progress:
            progress(1, 2)
        assert stream.getvalue() == ""
