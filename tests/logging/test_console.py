"""The console: plain lines, the bar, the summary, the curve, and the words they are made of."""

import io
import itertools
import math
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.files import bytes_text
from lockstep.logging import console as module
from lockstep.logging.console import Console, count_text, duration_text, line_of, loss_text, summary_rows
from lockstep.logging.plots import curve

RECORD = {
    "epoch": 1,
    "epoch_progress": 0.5,
    "num_batches_remaining": 7,
    "lr": 3e-4,
    "grad_norm": 1.25,
    "items_per_second": 12345.6,
    "memory": 812 * 2**20,
    "time/total": 12.0,
}


def record(step, loss=2.5, **others):
    return {"global_step": step, "running_loss": loss, **RECORD, **others}


def shown(records=(), summary=None, interactive=False, **options):
    stream = io.StringIO()
    console = Console(100, stream=stream, interactive=interactive, **options)
    console.start({})
    for one in records:
        console.log(one)
    console.close(summary)
    return stream.getvalue()


def test_text_from_outside_in_a_record_is_masked(monkeypatch):
    monkeypatch.setenv("OWN_API_KEY", "planted-value")
    hidden = shown([record(10, **{"train/planted-value": 1.0}), {"global_step": 10, "planted-value": 1.0}])
    assert hidden.count("***") == 2
    named = shown([record(10), record(20)], items="planted-value")
    assert named.count("***/s") == 2
    assert "planted-value" not in hidden + named


def test_each_record_is_one_plain_line():
    text = shown(
        [record(10), record(20), {"global_step": 20, "evaluation/loss": 2.0, "evaluation/items": 50}], items="tokens"
    )
    lines = text.splitlines()
    assert lines[0].startswith("step 10/100  epoch 1.50  loss 2.5000  lr 3.00e-04  12.3k tokens/s  812 MiB  grad 1.25")
    assert lines[2] == "step 20/100  evaluation loss 2.0000  perplexity 7.389"
    assert len(lines) == 3
    assert text.isascii()
    assert "\x1b" not in text
    assert "\r" not in text


def test_a_run_that_stops_early_shows_its_plan():
    values = {"global_step": 20, "running_loss": 1.0}
    text = shown([record(20)], values, planned=400)
    assert "step 20/100" in text
    assert re.search(r"^steps +20 of 400$", text, re.MULTILINE)


def test_time_left_is_without_the_start_and_first_evaluation(monkeypatch):
    """The first step takes 100 seconds, the first evaluation 50, every other step one."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(100, stream=stream, interactive=False)
    console.start({})
    for step in range(1, 21):
        now[0] += 100.0 if step == 1 else 1.0
        console.progress(step)
        if step == 15:
            now[0] += 50.0
            console.log({"global_step": 15, "evaluation/loss": 2.0})
        if step % 10 == 0:
            console.log(record(step))
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("  1:30 left")
    assert lines[2].endswith("  1:20 left")


def test_callers_own_numbers_are_shown_once_whatever_their_names():
    own = {"global_step": 5, "grad_norm": 0.5, "lr": 0.25, "mine": 2.0}
    assert shown([own]).splitlines()[0] == "step 5/100  grad_norm 0.5  lr 0.25  mine 2"


def test_numbers_of_the_tasks_own_are_in_a_records_line():
    record = {"global_step": 10, "running_loss": 2.0, "train/kl": 0.25, "gradients/head": 3.0}
    line = line_of(record, 20, "items", None)
    assert "kl 0.25" in line
    assert "head" not in line


def test_further_evaluation_numbers_are_shown():
    found = line_of({"global_step": 5, "evaluation/loss": 0.5, "evaluation/accuracy": 0.75}, 10, "images", None)
    assert found == "step 5/10  evaluation loss 0.5000  accuracy 0.75"


def test_force_color_puts_no_control_sequences_into_a_file(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in shown([record(1)], {}, interactive=None)


def test_a_reader_that_is_gone_does_not_end_the_run():
    code = "from lockstep.logging.console import Console; import os, sys\nconsole = Console(3)\n"
    code += "for step in (1, 2):\n    console.log({'global_step': step, 'running_loss': 2.0, 'lr': 1.0}); input()\n"
    code += "print('alive', file=sys.stderr)"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        assert process.stdout.readline()
        process.stdout.close()
        process.stdin.write("\n\n")
        process.stdin.close()
        assert process.stderr.read() == "alive\n"
    assert process.returncode == 0


def test_a_failed_run_has_no_summary():
    assert shown([record(10)], None).count("\n") == 1
    assert shown([], None) == ""


SUMMARY = {
    "experiment": "first",
    "seconds": 118.2,
    "world_size": 2,
    "replicas": " (1 replica of 2 ranks)",
    "engine": "ddp",
    "sample": "def f():\n\treturn [red]1[/red] \x1b[2J\r",
    "files": {"run": "outputs/first", "records": "outputs/first/metrics.jsonl"},
    "next": "run again with --max-steps 200 to go on",
}


def test_the_summary():
    evaluation = {"global_step": 100, "evaluation/loss": 2.0, "evaluation/items": 5}
    text = shown([record(50, 3.0), record(100, memory=1), evaluation], SUMMARY, items="tokens")
    rows = dict(re.findall(r"^(\S+(?: \S+)*)  +(\S.*)$", text, re.MULTILINE))
    expected = {
        "experiment": "first",
        "steps": "100 of 100",
        "epochs": "1.5",
        "training loss": "2.5000",
        "evaluation loss": "2.0000",
        "perplexity": "7.389",
        "tokens/s": "12.3k",
        "time": "1:58",
        "peak memory": "812 MiB",
        "processes": "2 (1 replica of 2 ranks)",
        "engine": "ddp",
        "run": "outputs/first",
        "records": "outputs/first/metrics.jsonl",
    }
    assert {name: rows.get(name) for name in expected} == expected
    assert text.index("training loss by step") < text.index("def f()") < text.index("outputs/first")
    assert text.splitlines()[-1] == SUMMARY["next"]
    assert max(len(line) for line in text.splitlines()[3:]) <= 80


@pytest.mark.parametrize("interactive", [False, True])
def test_text_from_outside_is_literal(interactive):
    hostile = {**SUMMARY, "experiment": "[bold]x[/bold]\x1b]0;t\x07", "files": ["a\nb", "[link=x]c"]}
    text = shown([record(1)], hostile, interactive=interactive)
    assert "    return [red]1[/red] \\x1b[2J\\r" in text
    assert "[bold]x[/bold]\\x1b]0;t\\x07" in text
    assert "a\\nb" in text
    assert "[link=x]c" in text
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text


def test_a_long_path_is_not_broken():
    path = "outputs/" + "x" * 200
    assert path in shown([], {"files": [path]}).splitlines()


def test_nothing_known_is_a_short_summary():
    assert shown([], {}).strip() == ""
    assert "training loss by step" not in shown([], {"seconds": 1.0})


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_the_curve_is_there_from_one_record_on(count):
    text = shown([record(step + 1) for step in range(count)], {})
    assert "training loss by step" in text


def test_earlier_records_are_in_the_curve():
    text = shown([record(60)], {}, start=50, earlier=[record(10, memory=2**40), record(50)])
    axis = text.splitlines()[-1]
    assert axis.split() == ["10", "60"]
    assert "peak memory  " not in text or "812 MiB" in text


def test_a_stream_without_unicode():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(100, stream=stream)
    console.start({})
    for step in range(20):
        console.log(record(step, 5 - step / 10))
    console.close({"experiment": "é", "sample": "漢"})
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "\\xe9" in text
    assert "\\u6f22" in text
    assert "*" in text


def test_the_bar_on_a_terminal_without_unicode(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")  # the line is cropped
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    bar = module._Bar(module._terminal(stream, True), lambda: None)
    bar.draw(1, 10, None, ["é 1.0"] * 30)
    bar.stop()
    stream.flush()
    assert "\\xe9" in raw.getvalue().decode("ascii")


def test_the_bar_is_drawn_seldom_and_the_cursor_comes_back(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    drawn = []
    draw = module._Bar.draw
    monkeypatch.setattr(module._Bar, "draw", lambda self, *values: drawn.append(values) or draw(self, *values))
    text = shown([record(step) for step in range(1, 101)], None, interactive=True)
    assert 2 <= len(drawn) < 20
    assert text.count("\x1b[?25l") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "step 100/100" in text
    assert "loss 2.5000" in text
    assert "100%" in text


def test_the_summary_has_the_last_evaluations_metrics():
    first = {"global_step": 50, "evaluation/loss": 3.0, "evaluation/accuracy": 0.25, "evaluation/items": 5}
    last = {"global_step": 100, "evaluation/loss": 2.0, "evaluation/accuracy": 0.75, "evaluation/items": 5}
    text = shown([first, record(100), last], {"seconds": 1.0})
    assert re.search(r"^evaluation accuracy +0\.75$", text, re.MULTILINE)


def moving(monkeypatch):
    """A console on a terminal with a clock that the test moves, and what was drawn: (step, numbers)."""
    now, drawn = [1000.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    draw = module._Bar.draw
    monkeypatch.setattr(
        module._Bar, "draw", lambda self, *values: drawn.append((values[0], values[3])) or draw(self, *values)
    )
    console = Console(100, stream=io.StringIO(), interactive=True)
    console.start({})
    return console, now, drawn


def test_the_bar_moves_with_the_steps_and_not_too_often(monkeypatch):
    console, now, drawn = moving(monkeypatch)
    for step in range(1, 101):
        now[0] += 0.1
        console.progress(step)
    console.close(None)
    steps = [step for step, _ in drawn]
    assert steps == sorted(steps)
    assert 10 <= len(steps) <= 25
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 6


def test_an_evaluation_is_seen_to_go_on(monkeypatch):
    console, now, drawn = moving(monkeypatch)
    console.log(record(40))
    for part in range(1, 21):
        now[0] += 0.3
        console.progress(40, (part, 20))
    now[0] += 1
    console.progress(41)
    console.close(None)
    parts = [numbers[0] for _, numbers in drawn if numbers and numbers[0].startswith("evaluating")]
    assert parts[0] == "evaluating 2/20"
    assert parts[-1] == "evaluating 20/20"
    assert not drawn[-1][1][0].startswith("evaluating")
    assert {step for step, numbers in drawn if numbers and numbers[0] in parts} == {40}


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_the_bar_fits_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown([record(5), {"global_step": 5, "evaluation/loss": 1.0}], None, interactive=True)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert max(len(line) for line in re.split(r"[\r\n]+", plain)) <= columns


def test_ctrl_c_gives_the_cursor_back():
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs start without it
        "from lockstep.logging.console import Console\n"
        "console = Console(100)\n"
        "console.start({})\n"
        "console.log({'global_step': 7, 'running_loss': 2.0})\n"
        "print('ready', flush=True)\n"
        "for _ in range(600):\n"  # a signal just before a long sleep would be heard after it
        "    time.sleep(0.05)\n"
    )
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True
    )
    os.close(theirs)
    text = b""
    while b"ready" not in text:
        text += os.read(ours, 4096)
    child.send_signal(signal.SIGINT)
    try:
        while block := os.read(ours, 4096):
            text += block
    except OSError:  # the other side is closed
        pass
    assert child.wait(10) != 0
    os.close(ours)
    assert b"\x1b[?25l" in text
    assert text.rindex(b"\x1b[?25h") > text.rindex(b"\x1b[?25l")
    assert b"KeyboardInterrupt" in text


# the curve


def test_no_point_no_curve():
    assert curve([]) == []
    assert curve([(1, math.nan), (2, math.inf)]) == []


def test_a_falling_line_in_ascii():
    assert curve([(0, 2.0), (1, 1.0), (2, 0.0)], width=8, height=3, unicode=False) == [
        "2 |**",
        "1 |  *",
        "0 |   **",
        "  +-----",
        "   0   2",
    ]


def test_what_is_not_finite_is_left_out():
    assert curve([(0, 1.0), (1, math.nan), (2, 0.0)]) == curve([(0, 1.0), (2, 0.0)])


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.floats(-1e12, 1e12)), max_size=50),
    st.integers(30, 120),
    st.integers(3, 20),
    st.booleans(),
)
def test_every_curve_fits(points, width, height, unicode):
    lines = curve(sorted(points), width, height, unicode)
    assert len(lines) == (height + 2 if points else 0)
    assert all(len(line) <= width for line in lines)


# the words


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1.25, "1.25"), (950, "950"), (999.9, "1.00k"), (12345, "12.3k"), (999_900, "1.00M"), (4.56e9, "4.56G")],
)
def test_counts(count, text):
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (812 * 2**20, "812 MiB"), (1.25 * 2**30, "1.25 GiB"), (2**20 - 1, "1 MiB"), (5 * 2**40, "5 TiB")],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (90000, "1 d 01:00:00"), (math.inf, "?")]
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("loss", "text"), [(2.5, "2.5000"), (1e-7, "1e-07"), (math.nan, "nan"), (123456.0, "1.2346e+05")]
)
def test_losses(loss, text):
    assert loss_text(loss) == text


def test_perplexity_only_of_tokens_and_never_too_large():
    assert ("perplexity", "inf") in summary_rows({"evaluation/loss": 1e6}, 1, "tokens")
    assert ("perplexity", "nan") in summary_rows({"evaluation/loss": math.nan}, 1, "tokens")
    assert [name for name, _ in summary_rows({"evaluation/loss": 1.0}, 1, "images")] == ["evaluation loss"]
