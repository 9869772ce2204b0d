"""How a failure is told at a run's end: lost ranks, the user's line of code, the user's part of a traceback."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import warm
from shell import environment

from lockstep.distributed import failures, progress
from lockstep.errors import LockstepError, PeerError, error_line, user_traceback
from lockstep.files import retry_io
from lockstep.guards.preemption import Preemption
from lockstep.training.state.status import PendingStop
from lockstep.training.step.ending import describe_lost_ranks


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
        (ValueError("bad sample 17\nmore"), "ValueError: bad sample 17 (test_failure_messages.py:"),
        (RuntimeError(), "RuntimeError (test_failure_messages.py:"),
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
    assert "test_failure_messages.py:" in line


def test_traceback_begins_with_the_users_first_frame() -> None:
    def fails() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError) as caught:
        retry_io(fails)
    lines = user_traceback(caught.value).splitlines()
    assert lines[1].strip().startswith(f'File "{__file__}"')
    assert "files.py" not in "".join(lines)
    assert lines[-1] == "ValueError: bad"


def test_users_stop_iteration_is_no_error_of_the_generator() -> None:
    def steps() -> Iterator[int]:
        yield next(iter(list[int]()))

    with pytest.raises(RuntimeError) as caught:
        next(steps())
    assert error_line(caught.value).startswith("StopIteration (test_failure_messages.py:")
    assert user_traceback(caught.value).splitlines()[-1] == "StopIteration"
    assert error_line(_raised(RuntimeError("no"))).startswith("RuntimeError: no (")


def _attempt(folder: Path, rank: int) -> dict[str, str]:
    """The variables that torchrun gives a rank of two, and the folder of its error file."""
    note = folder / str(rank) / "error.json"
    note.parent.mkdir(exist_ok=True)
    return {"TORCHELASTIC_ERROR_FILE": str(note), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}


@pytest.mark.parametrize(("sizes", "lines"), [(("none", "none"), 1), (("none", "many"), 2)])
def test_ranks_print_a_shared_refusal_once_and_their_own_each(
    tmp_path: Path, sizes: tuple[str, str], lines: int
) -> None:
    command = [sys.executable, "-m", "lockstep", "train", "--dataset-name", "none", "--batch-size"]
    ranks = [
        subprocess.Popen([*command, size], env=environment(**_attempt(tmp_path, rank)), stderr=-1, text=True)
        for rank, size in enumerate(sizes)
    ]
    said = "".join(rank.communicate(timeout=60)[1] for rank in ranks)
    assert {rank.returncode for rank in ranks} == {2}
    assert said.count("lockstep: error: ") == said.count("\n") == lines, said


def test_ranks_print_a_shared_traceback_once_and_no_follow_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(rank: int, error: BaseException, at: Path = tmp_path) -> str:
        for name, value in _attempt(at, rank).items():
            monkeypatch.setenv(name, value)
        failures.report(error)
        return capsys.readouterr().err

    monkeypatch.delenv(failures.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(progress, "_CURRENT", [])
    boom = _raised(ValueError("boom"))
    assert isinstance(boom, ValueError)
    failures.add_place(boom)  # for a traceback that Python prints
    said = report(1, boom)
    assert said.count("Traceback (") == 1
    assert said.count("at the start") == 1  # in the last line
    assert said.splitlines()[-1].startswith(
        "lockstep: error: rank 1 at the start: ValueError: boom (test_failure_messages.py:"
    )
    assert report(0, boom) == ""
    assert report(0, _raised(KeyError("other"))).count("Traceback (") == 1
    later = tmp_path / "attempt_1"
    later.mkdir()
    assert report(0, PeerError("rank 1 did not arrive"), later).count("\n") == 1  # rank 1 was killed: no note
    report(1, boom, later)
    (later / "0" / "error.json").unlink()
    assert report(0, PeerError("rank 0 lost the other ranks"), later) == ""
    monkeypatch.setenv(failures.FOLDER_VARIABLE, str(tmp_path))
    (later / "0" / "error.json").unlink()
    assert report(0, LockstepError("the launcher prints it"), later) == ""


@pytest.mark.parametrize(
    ("losses", "size", "begins"),
    [
        ([], 2, ""),
        (["rank 1 a"], 1, "on 1 of 2 ranks: rank 1 a"),
        (["rank 1 a"], 2, "after 1 rank was lost and replaced"),
    ],
)
def test_the_last_line_names_the_ranks_that_were_lost(losses: list[str], size: int, begins: str) -> None:
    found = describe_lost_ranks(losses, size, initial_size=2)
    assert found.startswith(begins)
    assert bool(found) == bool(losses)


def test_keyboard_interrupt_without_a_signal_is_a_code_error() -> None:
    with pytest.raises(LockstepError) as caught, Preemption(PendingStop()):
        raise KeyboardInterrupt
    assert "test_failure_messages.py:" in str(caught.value)


def test_a_second_ctrl_c_stays_a_keyboard_interrupt() -> None:
    def interrupt_twice() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), Preemption(PendingStop()), Preemption(PendingStop()):
        interrupt_twice()


_UNCAUGHT = {
    "config": "lockstep.Config(batch_size=0)",
    "second": """
class Mine(lockstep.Task):
    def model(self): return torch.nn.Linear(4, 1)
    def dataset(self, split): return torch.utils.data.TensorDataset(torch.ones(64, 4)) if split == "train" else None
    def loss(self, model, batch): return model(batch[0]).square().mean()

for step in lockstep.Run(lockstep.Config(batch_size=8, max_steps=9, ckpt_freq=2, device="cpu", log_freq=1), Mine()):
    if step.global_step == WHEN:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
""",
}


@pytest.mark.parametrize(
    ("code", "when", "last"),
    [
        ("config", 0, r"lockstep: error: batch_size is 0: it must be at least 1 \(mine.py:4\)"),
        ("second", 1, r"lockstep: interrupted before anything was saved; .*"),
        ("second", 5, r"lockstep: interrupted: the newest checkpoint is of step 4; .*"),
    ],
)
def test_what_a_script_does_not_catch_is_one_line(tmp_path: Path, code: str, when: int, last: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"import signal\nimport torch\nimport lockstep\n{_UNCAUGHT[code]}".replace("WHEN", str(when)))
    run = partial(subprocess.run, [warm.python(), path], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    said = run(env=environment(), check=False).stderr
    assert re.fullmatch(last, said.strip().splitlines()[-1])
    assert "Traceback" not in said
    if code == "config":
        assert "Traceback" in run(env=environment(LOCKSTEP_DEBUG="1"), check=False).stderr
