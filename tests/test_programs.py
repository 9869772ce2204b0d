"""Every program of the documents and examples, ended early, started twice, on two ranks, asked for help.

`make test` tries README's program, and `make test-full` the others.
"""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from shell import environment

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/quickstart.md", "docs/tutorials/contrastive.md", *ROOT.glob("docs/howto/*.md")]
NO_RESUME = {"find_lr.py"}  # it writes no checkpoints
NEED_MORE = {"images.py", "lora.py", "my_loop.py", "remote-checkpoints", "export"}  # a download, a store, or own flags


def _programs():
    """The source of each program with lockstep's flags, by the name of its page or file."""
    found = {}
    for page in PAGES:
        path = ROOT / page
        for source in re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            if "from_args" in source:
                found[path.stem] = source
    for path in sorted(ROOT.glob("examples/*.py")):
        if "from_args" in (source := path.read_text(encoding="utf-8")):
            found[path.name] = source
    return {name: source for name, source in found.items() if name not in NEED_MORE}


PROGRAMS = _programs()
ALL = [pytest.param(name, marks=[] if name == "README" else pytest.mark.slow) for name in PROGRAMS]


@pytest.fixture
def go(tmp_path):
    def start(name, flags, *, ranks=0, **options):
        (tmp_path / "program.py").write_text(PROGRAMS[name], encoding="utf-8")
        if name.endswith(".py"):
            shutil.copy(ROOT / "examples/own_task.py", tmp_path)  # others import its task
        if name == "streams":  # another program of the page writes them
            (tmp_path / "shards").mkdir(exist_ok=True)
            for part in range(4):
                row = json.dumps({"x": [1.0, 2.0, 3.0, part], "y": 1.0}) + "\n"
                (tmp_path / f"shards/{part}.jsonl").write_text(100 * row, encoding="utf-8")
        launch = f"-m lockstep launch --nproc-per-node {ranks} --" if ranks else ""
        return subprocess.Popen(
            [warm.python(), *shlex.split(f"{launch} program.py {flags}")],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    return start


def ended(process, code=0):
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, out + err
    assert "Traceback" not in err
    return out + err


@pytest.mark.parametrize("name", ALL)
def test_a_stopped_program_continues_on_two_ranks(go, name):
    flags = "--experiment-name tried --log-freq 1 --stop-at"
    saved = "ended after step" if name in NO_RESUME else "stopped: saved after step"
    assert f"{saved} 2 of" in ended(go(name, f"{flags} 2"))
    assert "step 2 of" in ended(go(name, f"{flags} 2"))  # nothing left to do
    text = ended(go(name, f"{flags} 4", ranks=2))
    assert text.count(f"{saved} 4 of") == 1


@pytest.mark.parametrize("name", ALL)
def test_help_is_of_the_program(go, name):
    text = ended(go(name, "--help"))
    assert text.startswith("usage: program.py [flags]")
    for default in re.findall(r'experiment_name="(\w+)"', PROGRAMS[name]):
        assert f"(default: {default})" in " ".join(text.split())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("ranks", [0, 2])
def test_sigterm_saves_and_ends_a_program_with_75(go, name, ranks):
    process = go(name, "--experiment-name tried --log-freq 1 --max-steps 50000", ranks=ranks, bufsize=1)
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGTERM)
            break
    text = ended(process, 75)
    assert text.count("ended after step" if name in NO_RESUME else "ended by a signal: saved after step") == 1


@pytest.mark.parametrize("flags", ["--batch-size 0", "--dataset-name mine", "--engine fsdp", "--optim.name nonesuch"])
def test_refusals_of_a_program_have_one_line_and_code_2(go, tmp_path, flags):
    process = go("README", flags)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2, err
    assert flags.split()[0] in err.splitlines()[-1]
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_a_program_runs_in_a_notebooks_cell(tmp_path):
    """The kernel's own arguments are no flags, and an end that the user asked for is no end of the kernel."""
    (tmp_path / "kernel.py").write_text(
        "import sys\nsys.argv = ['/lib/ipykernel_launcher.py', '-f', '/run/kernel-1.json']\nsys.ps1 = 'In : '\n"
        f"exec({PROGRAMS['README']!r})\nprint('the next cell')\n",
        encoding="utf-8",
    )
    text = subprocess.run(
        [warm.python(), "kernel.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    ).stdout
    assert text.splitlines()[-1] == "the next cell"
    assert "evaluation loss" in text


@pytest.mark.slow  # a real interpreter
def test_an_uncaught_refusal_ends_a_real_interpreter_with_2(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAMS["README"], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "program.py", "--dataset-name", "mine"], cwd=tmp_path, env=environment(), capture_output=True
    )
    assert done.returncode == 2
