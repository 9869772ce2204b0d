"""Each how-to page's programs run as the page says, and print what it shows."""

import re
import shlex
import subprocess
from pathlib import Path

import object_store
import pytest
import warm
from shell import environment

PAGES = sorted((Path(__file__).parents[1] / "docs" / "howto").glob("*.md"))
FENCE = re.compile(r"^```(python|sh|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_line(line, folder):
    """Run a command that a page shows, and return the lines of its standard output."""
    words = shlex.split(line)
    lockstep = [warm.python(), "-m", "lockstep"]
    command = {"python": [warm.python()], "lockstep": lockstep}[words[0]] + words[1:]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, (line, done.stdout + done.stderr)
    return done.stdout.splitlines()


@pytest.fixture
def store(monkeypatch):
    """A server with the bucket that the page of remote checkpoints names."""
    with object_store.serve(monkeypatch) as store:
        yield store


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_and_prints_what_it_shows(page, tmp_path, request):
    text = page.read_text(encoding="utf-8")
    if "import optuna" in text:
        pytest.importorskip("optuna")
    if "s3://" in text:
        request.getfixturevalue("store")
    printed, compared, end = [], 0, 0
    for block in FENCE.finditer(text):
        kind, body = block.groups()
        if kind == "python":  # under the name that the text above it says last
            name = re.findall(r"`(\w+\.py)`", text[end : block.start()])[-1]
            (tmp_path / name).write_text(body, encoding="utf-8")
        elif kind == "sh":
            printed = [line for command in body.splitlines() for line in run_line(command, tmp_path)]
        else:
            rest = iter(printed)
            assert [line for line in body.splitlines() if line not in rest] == [], printed
            compared += 1
        end = block.end()
    assert compared
