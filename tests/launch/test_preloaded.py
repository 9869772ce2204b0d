"""A process that has loaded everything, and what is forked from it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.launch import workers
from lockstep.launch.agent import adopt_orphans, reap_orphans
from lockstep.launch.workers import Preloaded


@pytest.fixture(scope="module")
def ready():
    with adopt_orphans() as adopted:
        assert adopted
        made = Preloaded()
        try:
            until = time.monotonic() + 60
            while not made.is_ready() and time.monotonic() < until:
                time.sleep(0.05)
            assert made.is_ready()
            yield made
        finally:
            made.end()


def started(ready, *command, **environment):
    process = ready.start(["-m", "lockstep", *command], os.environ | environment)
    assert process is not None
    return process


def test_what_is_forked_runs_the_command_and_its_end_is_told(ready):
    process = started(ready, "train", "--help")
    assert os.getsid(process.pid) == process.pid
    assert process.wait(30) == process.poll() == process.returncode == 0
    assert started(ready, "train", "--no-such-flag").wait(30) == 2


def test_it_has_the_environment_and_the_program_that_it_is_given(ready, tmp_path):
    script = tmp_path / "mine.py"
    facts = "os.environ['RANK'], os.path.basename(os.path.dirname(sys.argv[0])), sys.modules['__main__'].__package__"
    script.write_text(
        f"import os, sys\nopen({str(tmp_path / 'said')!r}, 'w').write(' '.join([{facts}]))\nclass T: pass\n"
    )
    started(ready, "train", "--task", f"{script}:T", "--save-dir", str(tmp_path), RANK="7").wait(30)
    assert (tmp_path / "said").read_text() == "7 lockstep lockstep"


def test_killed_one_has_its_signal_and_a_second_one_comes(ready, tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(f"import time\nopen({str(tmp_path / 'there')!r}, 'w')\ntime.sleep(60)\n")
    process = started(ready, "train", "--task", f"{script}:T", "--save-dir", str(tmp_path))
    until = time.monotonic() + 30
    while not (tmp_path / "there").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    process.terminate()  # nobody is there any more
    assert started(ready, "--version").wait(30) == 0


def test_scripts_are_started_as_they_were(ready):
    assert ready.start(["-u", "script.py"], os.environ) is None


def test_before_it_is_ready_and_after_its_end_nothing_is_forked():
    made = Preloaded()
    assert made.start(["-m", "lockstep", "--version"], os.environ) is None
    made.end()
    assert made.start(["-m", "lockstep", "--version"], os.environ) is None


def test_one_that_is_forked_too_late_never_begins(ready, tmp_path, monkeypatch):
    """Its place has been taken by a process that was started in another way."""
    script = tmp_path / "late.py"
    script.write_text(f"import os\nopen({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w')\n")
    command = ["-m", "lockstep", "train", "--task", f"{script}:T", "--save-dir", str(tmp_path)]
    monkeypatch.setattr(workers, "_ANSWER", 1e-6)
    assert ready.start(command, os.environ | {"RANK": "0"}) is None
    monkeypatch.undo()
    process = ready.start(command, os.environ | {"RANK": "1"})
    assert process.wait(30) == 2  # there is no class T
    reap_orphans([])
    assert not (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


def test_it_ends_with_its_launcher():
    program = "import sys, time\nfrom lockstep.launch.workers import Preloaded\nmade = Preloaded()\n"
    program += "print(made.process.pid, flush=True)\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    done = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stat = Path(f"/proc/{int(done.stdout.readline())}/stat")
    until = time.monotonic() + 60
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < until:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    assert done.communicate()[1] == ""  # of which it has a part


def test_what_was_forked_outlives_it_and_has_its_true_code(ready, tmp_path):
    """It is the last test: the others need the process that is killed here."""
    script, go = tmp_path / "waits.py", tmp_path / "go"
    waits = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    ends = "os._exit(7) if os.environ['RANK'] == '0' else os.kill(os.getpid(), signal.SIGUSR2)"
    script.write_text(f"import os, signal, time\n{waits}\n{ends}\n")
    command = ["train", "--task", f"{script}:T", "--save-dir", str(tmp_path)]
    first, second = (started(ready, *command, RANK=rank) for rank in "01")
    ready.process.kill()
    ready.process.wait()
    time.sleep(0.2)
    reap_orphans([first, second])
    assert (first.poll(), second.poll()) == (None, None)
    assert ready.start(["-m", "lockstep", *command], os.environ) is None
    go.touch()
    assert (first.wait(10), second.wait(10)) == (7, -signal.SIGUSR2)
