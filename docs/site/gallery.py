"""Run the commands of docs/gallery.md, and put what they print and write into the page.

Each `sh` block of the page is run by bash, in order, in one temporary folder, where the programs of two other pages
are. What a block prints comes below it. `<!-- page: FILE: TITLE -->` becomes a link to a copy of the HTML page FILE.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"spirals.py": "docs/quickstart.md", "ddp.py": "docs/tutorials/check-a-script.md"}  # the first block of each
LIMIT = 120  # seconds of a block, on a machine that does other work too


def render(text: str, pages: Path) -> str:
    """Return the page with its outputs, and copy the HTML pages that it shows into `pages`."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_programs(folder)

        def replace(match: re.Match[str]) -> str:
            if match["commands"]:
                shown = _run(match["commands"], folder)
                return f"{match[0]}\n\n```text\n{shown}\n```" if shown else match[0]
            name = match["file"].replace("/", "-")
            pages.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / match["file"], pages / name)
            return f'<a href="{pages.name}/{name}">{match["title"]}</a>'

        blocks = r"^```sh\n(?P<commands>.*?)^```$|<!-- page: (?P<file>\S+): (?P<title>.*?) -->"
        return re.sub(blocks, replace, text, flags=re.DOTALL | re.MULTILINE)


def write_programs(folder: Path) -> None:
    """Write the programs of the two pages into a folder."""
    for name, page in PROGRAMS.items():
        source = (ROOT / page).read_text(encoding="utf-8")
        block = re.search(r"^```python\n(.*?)^```", source, re.DOTALL | re.MULTILINE)[1]
        (folder / name).write_text(block, encoding="utf-8")


def environment() -> dict[str, str]:
    """Return the variables of a command: this Python and the sources of this repository."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    source = os.pathsep.join([str(ROOT / "src"), str(ROOT / "packages" / "lint" / "src")])
    return {**os.environ, "PATH": path, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


def _run(commands: str, folder: Path) -> str:
    """Run a block by bash; return what it prints, the last 40 lines of it.

    Raises:
        CalledProcessError: a block has failed. A line ends in `|| test $? = 3` where exit code 3 is what it shows.
    """
    script = f'set -e\nlockstep() {{ "{sys.executable}" -m lockstep "$@"; }}\n{commands}'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, commands, done.stdout)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines()[-40:])
