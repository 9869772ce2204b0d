"""How a failure is told at a run's end: lost ranks, the user's line of code, the user's part of a traceback."""

import signal

import pytest

from lockstep.errors import LockstepError, error_line, user_traceback
from lockstep.files import retry_io
from lockstep.guards.preemption import Preemption
from lockstep.training.recorder import describe_lost_ranks
from lockstep.training.session import PendingStop


class _Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (ValueError("bad sample 17\nmore"), "ValueError: bad sample 17 (test_ends.py:"),
        (RuntimeError(), "RuntimeError (test_ends.py:"),
        (_Mute(), "_Mute: "),
        (
            ExceptionGroup("several", [KeyError("a"), OSError("b")]),
            "ExceptionGroup: several (2 sub-exceptions): KeyError",
        ),
    ],
)
def test_an_error_is_one_line_with_its_own_class_and_place(error: BaseException, begins: str) -> None:
    line = error_line(_raised(error))
    assert line.startswith(begins)
    assert "\n" not in line
    assert "test_ends.py:" in line


def test_a_traceback_begins_with_the_users_first_frame_behind_lockstep() -> None:
    def fails() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError) as caught:
        retry_io(fails)
    lines = user_traceback(caught.value).splitlines()
    assert lines[1].strip().startswith(f'File "{__file__}"')
    assert "files.py" not in "".join(lines)
    assert lines[-1] == "ValueError: bad"


@pytest.mark.parametrize(
    ("losses", "size", "begins"),
    [
        ([], 2, ""),
        (["rank 1 a"], 1, "on 1 of 2 ranks: rank 1 a"),
        (["rank 1 a"], 2, "after 1 rank was lost and replaced"),
    ],
)
def test_the_last_line_names_the_ranks_that_were_lost(losses: list[str], size: int, begins: str) -> None:
    found = describe_lost_ranks(losses, size, began_on=2)
    assert found.startswith(begins)
    assert bool(found) == bool(losses)


def test_a_keyboard_interrupt_without_a_signal_is_an_error_of_the_code() -> None:
    with pytest.raises(LockstepError) as caught, Preemption(PendingStop()):
        raise KeyboardInterrupt
    assert "test_ends.py:" in str(caught.value)


def test_a_second_ctrl_c_stays_a_keyboard_interrupt() -> None:
    def interrupt_twice() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), Preemption(PendingStop()), Preemption(PendingStop()):
        interrupt_twice()
